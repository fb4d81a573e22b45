"""Log → Delta table: random updates of tables of several sizes, beside delta-rs' MERGE.

Every table is filled once by each runner. A run then brings further changes to what is there, so
the tables of both have the same history, and in the end must be equal.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from . import delta
from .family import Family, Kind, Peaks
from .lake_task import BATCH_SECONDS, BYTES, SLOWEST, Task
from .orders import NAME, PER_TRANSACTION, SCHEMA, Orders, Written
from .process import MeasurementFailed, Outcome, child, module, next_line
from .report import Row, Runner

SIZES = (100_000, 1_000_000, 10_000_000)  # rows of the table
TARGET_SIZE, TARGET_RATE = 1_000_000, 50_000  # changes/s over a table of so many rows
CHANGES_PER_BATCH = 100_000
BATCHES = 10
WARM_UP = 2  # batches, until the JVM has compiled what runs often
ROWS_PER_FILLING = 1_000_000  # rows in a batch while a table is filled

HEADRACE, PEER = "Headrace", "delta-rs MERGE"
PROGRAMS = {HEADRACE: "lake_run", PEER: "lake_peer"}
_MEMORY: tuple[Kind, ...] = ("driver", "JVM", "workers")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How large one table and its batches are."""

    rows: int
    batch: int
    filling: int  # rows in a batch while the table is filled

    @classmethod
    def scaled(cls, rows: int, factor: float) -> "Size":
        """A table of the full measurement, made smaller with its batches."""
        # Whole transactions: a batch that could not hold one would be larger than it was asked.
        transactions = max(1, round(CHANGES_PER_BATCH * factor / PER_TRANSACTION))
        filling = max(PER_TRANSACTION, round(ROWS_PER_FILLING * factor))
        return cls(max(1, round(rows * factor)), transactions * PER_TRANSACTION, filling)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured on a table of one size."""

    size: Size
    filled: Mapping[str, Outcome]
    runners: Sequence[Runner]

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer Headrace is."""
        headrace, peer = self.runners
        return headrace.best.rate / peer.best.rate


@dataclass(frozen=True, slots=True)
class Lake:
    """The section of the page."""

    measured: Sequence[Measured]
    factor: float = 1.0
    title: str = field(default="Log → Delta table", init=False)

    def table(self) -> tuple[Row, list[Row]]:
        """A header, and a row for each runner on each table."""
        header = ("table", "", "changes/s", "s a batch", "slowest", "bytes written per changed row")
        memory = tuple(f"{kind}, MB" for kind in _MEMORY)
        rows = [self._row(of, runner) for of in self.measured for runner in of.runners]
        return (*header, *memory, "× delta-rs", "all runs, changes/s"), rows

    def _row(self, of: Measured, runner: Runner) -> Row:
        notes = runner.best.notes
        peer = of.runners[1].best.rate
        return (
            f"{of.size.rows:,} rows",
            runner.name,
            f"{runner.best.rate:,.0f}",
            f"{notes[BATCH_SECONDS]:.2f}",
            f"{notes[SLOWEST]:.2f}",
            f"{notes[BYTES]:,.0f}",
            *(f"{notes[kind]:,.0f}" if kind in notes else "" for kind in _MEMORY),
            f"{runner.best.rate / peer:.2f}",
            ", ".join(f"{outcome.rate:,.0f}" for outcome in runner.runs),
        )

    def verdicts(self) -> Iterator[str]:
        """The rate on the table that the target names, and the ratio on each."""
        for of in self.measured:
            if of.size.rows == round(TARGET_SIZE * self.factor):
                rate = of.runners[0].best.rate
                verdict = "reached" if rate >= TARGET_RATE else "missed"
                yield (
                    f"{HEADRACE} applies {rate:,.0f} changes/s to a table of {of.size.rows:,} "
                    f"rows; the target is {TARGET_RATE:,}: {verdict}."
                )
        for of in self.measured:
            yield f"{HEADRACE} is {of.ratio:.2f} × {PEER} on {of.size.rows:,} rows."

    def notes(self) -> Iterator[str]:
        """How fast the tables were filled, and where the time of a batch went."""
        for of in self.measured:
            for who, outcome in of.filled.items():
                yield (
                    f"{of.size.rows:,} rows, filling by {who}: {outcome.rate:,.0f} rows/s, "
                    f"cold start included, batches of {min(of.size.filling, of.size.rows):,}."
                )
            for runner in of.runners:
                shown = (BATCH_SECONDS, SLOWEST, BYTES, *_MEMORY)
                for what, value in runner.best.notes.items():
                    if what not in shown:
                        yield f"{of.size.rows:,} rows, {runner.name}, {what}: {value:.2f}."


def measure(sizes: Sequence[Size], folder: Path, *, runs: int, say: Say) -> list[Measured]:
    """Everyone on every table, one after the other; what one table took is deleted at once."""
    found = []
    for size in sizes:
        place = folder / str(size.rows)
        place.mkdir()
        found.append(_Course(size, place, say).measured(runs))
        shutil.rmtree(place)
    return found


@dataclass(frozen=True, slots=True)
class _Course:
    """One table."""

    size: Size
    folder: Path
    say: Say

    def measured(self, runs: int) -> Measured:
        """Fill the table, then change it."""
        orders = Orders(str(self.folder / "log"))
        self.say(f"lake: writing a log of {self.size.rows:,} rows")
        rows = orders.insert(self.size.rows)
        filled = {who: self._run(who, self._filling(who, rows), "filling") for who in PROGRAMS}
        outcomes: dict[str, list[Outcome]] = {who: [] for who in PROGRAMS}
        for run in range(runs):
            batch = self.size.batch
            updates = orders.update(self.size.rows, batch=batch, batches=BATCHES, warm_up=WARM_UP)
            for who in PROGRAMS:
                task = self._task(who, updates, batch=batch, warm_up=WARM_UP)
                outcomes[who].append(self._run(who, task, f"run {run + 1} of {runs}"))
        self._expect_equal()
        return Measured(self.size, filled, [Runner(who, done) for who, done in outcomes.items()])

    def _filling(self, who: str, written: Written) -> Task:
        return self._task(who, written, batch=self.size.filling, warm_up=0)

    def _task(self, who: str, written: Written, *, batch: int, warm_up: int) -> Task:
        folder = self.folder / PROGRAMS[who]
        folder.mkdir(exist_ok=True)
        return Task(
            log=str(self.folder / "log"),
            folder=str(folder),
            after=written.after,
            upto=written.upto,
            batch=batch,
            warm_up=warm_up,
            rows=written.rows,
        )

    def _run(self, who: str, task: Task, step: str) -> Outcome:
        outcome = watched(module(PROGRAMS[who], task.encode()))
        self.say(f"lake: {self.size.rows:,} rows, {step}: {who} {outcome.rate:,.0f} changes/s")
        return outcome

    def _expect_equal(self) -> None:
        tables = [self.folder / own / "lake" / SCHEMA / NAME for own in PROGRAMS.values()]
        ours, theirs = map(delta.digest, tables)
        if ours != theirs:
            raise MeasurementFailed(f"the tables differ: {ours} and {theirs}")


def watched(command: list[str]) -> Outcome:
    """Run a child to its answer, with the memory of every kind of process at its peak."""
    with child(command) as process, Peaks(Family(process.pid, "driver")) as peaks:
        outcome = msgspec.json.decode(next_line(process), type=Outcome)
    highest = {str(kind): held for kind, held in peaks.highest.items()}
    return msgspec.structs.replace(outcome, notes=outcome.notes | highest)
