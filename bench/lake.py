"""Log → Delta table: random updates of tables of several sizes, beside delta-rs and pyiceberg.

Every table is filled once by each runner. A run then brings further changes to what is there, so
the tables of both have the same history, and in the end must be equal.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import msgspec

from . import delta
from .family import Family, Kind, Peaks
from .lake_task import BATCH_BYTES, BATCH_SECONDS, BYTES, LARGEST, SLOWEST, Task
from .orders import NAME, PER_TRANSACTION, SCHEMA, Orders, Written
from .process import MeasurementFailed, Outcome, child, module, next_line
from .report import Row, Runner

SIZES = (1_000_000, 10_000_000)  # rows of the table
SMALL = (1, 10, 100, 1_000)
LARGE = (100_000, 250_000)
TARGETS = {  # changes/s, and how many times the peer's
    (1_000_000, 100_000): (120_000, 1.2),
    (1_000_000, 250_000): (150_000, 1.2),
    (10_000_000, 100_000): (80_000, 3.0),
    (100_000_000, 100_000): (40_000, None),
}
SMALL_SECONDS, SMALL_BYTES, BYTES_PER_CHANGE = 0.5, 100_000, 100  # what a small batch may take
BATCHES = 10
WARM_UP = 2  # batches, until the JVM has compiled what runs often
ROWS_PER_FILLING = 1_000_000  # rows in a batch while a table is filled

HEADRACE, PEER, SLOW_PEER = "Headrace", "delta-rs MERGE", "pyiceberg overwrite"
PROGRAMS = {HEADRACE: "lake_run", PEER: "lake_peer", SLOW_PEER: "lake_iceberg"}
_MEMORY: tuple[Kind, ...] = ("driver", "JVM", "workers")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How large one table and its batches are."""

    rows: int
    batches: tuple[int, ...]  # changes in each batch of a run
    filling: int  # rows in a batch while the table is filled
    slow: int = 0  # the batches in which the slow peer takes part

    @classmethod
    def scaled(cls, rows: int, factor: float) -> "Size":
        """A table of the full measurement, made smaller with its batches."""
        batches = (*SMALL, *LARGE) if rows == min(SIZES) else LARGE[:1]
        small = (max(1, round(batch * factor)) for batch in batches)
        filling = max(PER_TRANSACTION, round(ROWS_PER_FILLING * factor))
        slow = max(1, round(LARGE[0] * factor)) if rows == min(SIZES) else 0
        return cls(max(1, round(rows * factor)), tuple(dict.fromkeys(small)), filling, slow)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured on a table of one size, with batches of one size."""

    rows: int
    batch: int
    runners: Sequence[Runner]  # Headrace, and the peers unless this is too much for them

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the peer Headrace is."""
        headrace, *peer = self.runners
        return headrace.best.rate / peer[0].best.rate if peer else None


@dataclass(frozen=True, slots=True)
class Lake:
    """The section of the page."""

    measured: Sequence[Measured]
    filled: Mapping[int, Mapping[str, Outcome]] = field(default_factory=dict)  # by rows
    title: str = field(default="Log → Delta table", init=False)

    def table(self) -> tuple[Row, list[Row]]:
        """A header, and a row for each runner on each table."""
        header = ("table", "batches of", "", "changes/s", "s a batch", "slowest")
        written = ("KB a batch", "bytes per changed row")
        memory = tuple(f"{kind}, MB" for kind in _MEMORY)
        rows = [self._row(of, runner) for of in self.measured for runner in of.runners]
        return (*header, *written, *memory, "× delta-rs", "all runs, changes/s"), rows

    def _row(self, of: Measured, runner: Runner) -> Row:
        notes = runner.best.notes
        ratio = of.ratio if runner is of.runners[0] else None
        return (
            f"{of.rows:,} rows",
            f"{of.batch:,}",
            runner.name,
            f"{runner.best.rate:,.0f}",
            f"{notes[BATCH_SECONDS]:.2f}",
            f"{notes[SLOWEST]:.2f}",
            f"{notes[BATCH_BYTES] / 1000:,.1f}",
            f"{notes[BYTES]:,.0f}",
            *(f"{notes[kind]:,.0f}" if kind in notes else "" for kind in _MEMORY),
            f"{ratio:.2f}" if ratio else "",
            ", ".join(f"{outcome.rate:,.0f}" for outcome in runner.runs),
        )

    def verdicts(self) -> Iterator[str]:
        """What was reached of what is asked."""
        for of in self.measured:
            headrace, ratio = of.runners[0].best, of.ratio
            where = f"{of.rows:,} rows, batches of {of.batch:,}"
            if target := TARGETS.get((of.rows, of.batch)):
                rate, times = target
                yield f"{where}: {headrace.rate:,.0f} changes/s; {_asked(headrace.rate, rate)}."
                if ratio and times:
                    yield f"{where}: {ratio:.2f} × {PEER}; {_asked(ratio, times)}."
            elif of.batch in SMALL:
                seconds, written = headrace.notes[BATCH_SECONDS], headrace.notes[BATCH_BYTES]
                most = SMALL_BYTES + BYTES_PER_CHANGE * of.batch
                yield f"{where}: {seconds:.2f} s a batch; {_asked(-seconds, -SMALL_SECONDS)}."
                yield f"{where}: {written:,.0f} bytes a batch; {_asked(-written, -most)}."

    def notes(self) -> Iterator[str]:
        """How fast the tables were filled, and where the time of a batch went."""
        for rows, filled in self.filled.items():
            for who, outcome in filled.items():
                yield (
                    f"{rows:,} rows, filling by {who}: {outcome.rate:,.0f} rows/s, cold start "
                    f"included, batches of {min(ROWS_PER_FILLING, rows):,}."
                )


def _asked(value: float, least: float) -> str:
    """Whether a figure comes up to what is asked; both negative: stays below it."""
    bound = f"at least {least:,g}" if least >= 0 else f"at most {-least:,g}"
    return f"the target is {bound}: {'reached' if value >= least else 'missed'}"


def measure(sizes: Sequence[Size], folder: Path, *, runs: int, say: Say) -> Lake:
    """Everyone on every table, one after the other; what one table took is deleted at once."""
    measured: list[Measured] = []
    filled: dict[int, Mapping[str, Outcome]] = {}
    for size in sizes:
        place = folder / str(size.rows)
        place.mkdir()
        course = _Course(size, place, say)
        filled[size.rows] = course.fill()
        measured += course.measured(runs)
        shutil.rmtree(place)
    return Lake(measured, filled)


class _Course:
    """One table, filled once and then changed in batches of several sizes."""

    def __init__(self, size: Size, folder: Path, say: Say) -> None:
        self._size = size
        self._folder = folder
        self._say = say
        self._orders = Orders(str(folder / "log"))
        # Peers are left out where they would take hours.
        self._who = [HEADRACE, PEER] if size.rows <= max(SIZES) else [HEADRACE]
        self._slow = size.slow if find_spec("pyiceberg") else 0
        if size.slow and not self._slow:
            say(f"lake: without {SLOW_PEER}, since pyiceberg is not installed")
        self._filled = 0  # where the log's updates begin
        self._reached = 0  # what the slow peer has of the log

    def fill(self) -> Mapping[str, Outcome]:
        """Fill the table of everyone."""
        self._say(f"lake: writing a log of {self._size.rows:,} rows")
        written = self._orders.insert(self._size.rows)
        self._filled = written.upto
        filling = self._size.filling
        return {
            who: self._run(who, self._task(who, written, batch=filling, warm_up=0), "filling")
            for who in self._who
        }

    def measured(self, runs: int) -> Iterator[Measured]:
        """Change it; in the end the tables of all must be equal."""
        for batch in self._size.batches:
            everyone = [*self._who, *([SLOW_PEER] if batch == self._slow else [])]
            outcomes: dict[str, list[Outcome]] = {who: [] for who in everyone}
            for run in range(runs):
                updates = self._orders.update(
                    self._size.rows, batch=batch, batches=BATCHES, warm_up=WARM_UP
                )
                if SLOW_PEER in everyone:
                    self._catch_up(updates)
                for who in everyone:
                    task = self._task(who, updates, batch=batch, warm_up=WARM_UP)
                    step = f"batches of {batch:,}, run {run + 1} of {runs}"
                    outcomes[who].append(self._run(who, task, step))
            yield Measured(
                self._size.rows, batch, [Runner(who, done) for who, done in outcomes.items()]
            )
            self._expect_equal(everyone)

    def _catch_up(self, updates: Written) -> None:
        """Let the slow peer have all that came before these."""
        edges = {max(edge, self._reached) for edge in (0, self._filled, updates.after)}
        for after, upto in pairwise(sorted(edges)):
            missed = Written(after, upto, upto - after)
            task = self._task(SLOW_PEER, missed, batch=upto - after, warm_up=0)
            self._run(SLOW_PEER, task, "catching up")
        self._reached = updates.upto

    def _task(self, who: str, written: Written, *, batch: int, warm_up: int) -> Task:
        folder = self._folder / PROGRAMS[who]
        folder.mkdir(exist_ok=True)
        return Task(
            log=str(self._folder / "log"),
            folder=str(folder),
            after=written.after,
            upto=written.upto,
            batch=batch,
            warm_up=warm_up,
            rows=written.rows,
        )

    def _run(self, who: str, task: Task, step: str) -> Outcome:
        outcome = watched(module(PROGRAMS[who], task.encode()))
        self._say(
            f"lake: {self._size.rows:,} rows, {step}: {who} {outcome.rate:,.0f} changes/s, "
            f"{outcome.notes[BATCH_SECONDS]:.2f} s and {outcome.notes[BATCH_BYTES]:,.0f} bytes "
            "a batch"
        )
        return outcome

    def _expect_equal(self, everyone: Sequence[str]) -> None:
        tables = [self._folder / PROGRAMS[who] / "lake" / SCHEMA / NAME for who in everyone]
        first, *others = map(delta.digest, tables)
        if any(other != first for other in others):
            raise MeasurementFailed(f"the tables differ: {first} and {others}")


def watched(command: list[str]) -> Outcome:
    """Run a child to its answer, with the memory of every kind of process at its peak."""
    with child(command) as process, Peaks(Family(process.pid, "driver")) as peaks:
        outcome = msgspec.json.decode(next_line(process), type=Outcome)
    highest = {str(kind): held for kind, held in peaks.highest.items()}
    highest[LARGEST] = peaks.largest("workers")
    return msgspec.structs.replace(outcome, notes=outcome.notes | highest)
