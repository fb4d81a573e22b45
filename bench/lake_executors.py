"""Log → Delta table on a standalone cluster: two executors beside one, each with one core."""

from collections.abc import Callable
from pathlib import Path

from . import delta
from .lake import BATCHES, WARM_UP, watched
from .lake_task import Task
from .orders import NAME, SCHEMA, Orders, Written
from .process import MeasurementFailed, Outcome, module
from .report import Race, Runner, Target

ROWS, BATCH = 1_000_000, 250_000  # the sink's own batches
AT_LEAST = 1.7  # times one executor
EXECUTORS = {"two executors": 2, "one executor": 1}


class _Clusters:
    """The same log into a table of each cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, who: str, written: Written, *, batch: int, warm_up: int) -> Outcome:
        folder = self._folder / who.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        task = Task(
            log=str(self._folder / "log"),
            folder=str(folder),
            after=written.after,
            upto=written.upto,
            batch=batch,
            warm_up=warm_up,
            rows=written.rows,
            executors=EXECUTORS[who],
        )
        # Memory is not what this is about.
        outcome = watched(module("lake_run", task.encode()))
        return Outcome(outcome.rows, outcome.seconds)

    def expect_equal(self) -> None:
        folders = [self._folder / who.replace(" ", "-") for who in EXECUTORS]
        first, second = (delta.digest(folder / "lake" / SCHEMA / NAME) for folder in folders)
        if first != second:
            raise MeasurementFailed(f"the tables differ: {first} and {second}")


def measure(folder: Path, *, factor: float, runs: int, say: Callable[[str], None]) -> Race:
    """Fill a table on each cluster, then bring the same updates to both."""
    rows, batch = max(round(ROWS * factor), 1), max(round(BATCH * factor), 1)
    orders, clusters = Orders(str(folder / "log")), _Clusters(folder)
    filling = orders.insert(rows)
    for who in EXECUTORS:
        clusters.run(who, filling, batch=rows, warm_up=0)
    outcomes: dict[str, list[Outcome]] = {who: [] for who in EXECUTORS}
    for run in range(runs):
        updates = orders.update(rows, batch=batch, batches=BATCHES, warm_up=WARM_UP)
        for who in EXECUTORS:
            done = clusters.run(who, updates, batch=batch, warm_up=WARM_UP)
            say(f"lake-executors: run {run + 1} of {runs}: {who} {done.rate:,.0f} changes/s")
            outcomes[who].append(done)
    clusters.expect_equal()
    title = f"Executors of a cluster: {rows:,} rows, batches of {batch:,}"
    runners = [Runner(who, done) for who, done in outcomes.items()]
    return Race(title, runners, [Target("one executor", AT_LEAST)])
