"""Log → Delta table, the same changes in several ways: by executors of a cluster, by transforms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import delta
from .lake import BATCHES, WARM_UP, watched
from .lake_task import Task
from .orders import NAME, SCHEMA, Orders, Written
from .process import MeasurementFailed, Outcome, module
from .report import Race, Runner, Target

ROWS, BATCH = 1_000_000, 250_000  # the sink's own batches


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ways to do the same, by what they ask of a task; the second is the measure."""

    title: str
    ways: Mapping[str, Mapping[str, Any]]
    at_least: float  # times the second
    equal: bool = True  # whether the tables are


EXECUTORS = Comparison(
    "Executors of a cluster",
    {"two executors": {"executors": 2}, "one executor": {"executors": 1}},
    at_least=1.7,
)
TRANSFORM = Comparison(
    "A transform that selects and filters",
    {
        "select and where": {
            "select": ("id", "customer_id", "status", "amount", "created_at"),
            "where": "status <> 'done' AND amount < 900000",
        },
        "everything": {},
    },
    at_least=0.85,
    equal=False,
)


SQL = Comparison(
    "Rows that Spark computes",
    {
        "sql": {"sql": "SELECT * FROM changes WHERE status <> 'none'"},
        "no transform": {},
    },
    at_least=0.25,
)


class _Runs:
    """The same log into a table of each way."""

    def __init__(self, folder: Path, ways: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder = folder
        self._ways = ways

    def run(self, who: str, written: Written, *, batch: int, warm_up: int) -> Outcome:
        folder = self._of(who)
        folder.mkdir(exist_ok=True)
        task = Task(
            log=str(self._folder / "log"),
            folder=str(folder),
            after=written.after,
            upto=written.upto,
            batch=batch,
            warm_up=warm_up,
            rows=written.rows,
            **self._ways[who],
        )
        # Memory is not what this is about.
        outcome = watched(module("lake_run", task.encode()))
        return Outcome(outcome.rows, outcome.seconds)

    def expect_equal(self) -> None:
        tables = [self._of(who) / "lake" / SCHEMA / NAME for who in self._ways]
        first, second = map(delta.digest, tables)
        if first != second:
            raise MeasurementFailed(f"the tables differ: {first} and {second}")

    def _of(self, who: str) -> Path:
        return self._folder / who.replace(" ", "-")


def measure(
    compared: Comparison, folder: Path, *, factor: float, runs: int, say: Callable[[str], None]
) -> Race:
    """Fill a table in each way, then bring the same updates to all."""
    rows, batch = max(round(ROWS * factor), 1), max(round(BATCH * factor), 1)
    orders, ways = Orders(str(folder / "log")), _Runs(folder, compared.ways)
    filling = orders.insert(rows)
    for who in compared.ways:
        ways.run(who, filling, batch=rows, warm_up=0)
    outcomes: dict[str, list[Outcome]] = {who: [] for who in compared.ways}
    for run in range(runs):
        updates = orders.update(rows, batch=batch, batches=BATCHES, warm_up=WARM_UP)
        for who in compared.ways:
            done = ways.run(who, updates, batch=batch, warm_up=WARM_UP)
            say(f"lake: run {run + 1} of {runs}: {who} {done.rate:,.0f} changes/s")
            outcomes[who].append(done)
    if compared.equal:
        ways.expect_equal()
    title = f"{compared.title}: {rows:,} rows, batches of {batch:,}"
    runners = [Runner(who, done) for who, done in outcomes.items()]
    return Race(title, runners, [Target(runners[1].name, compared.at_least)])
