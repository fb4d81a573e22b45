"""One transaction of many rows, from the log into a Delta table: how much memory it takes."""

from collections.abc import Callable, Iterator
from pathlib import Path

from . import delta
from .lake import watched
from .lake_task import LARGEST, Task
from .orders import Orders, Written
from .process import MeasurementFailed, Outcome, module
from .report import Figure, Figures

ROWS = 10_000_000
BATCH = 250_000  # the sink's own; no transaction is cut, so this one is a batch by itself
LIMIT = 1000.0  # MB of a worker


def measure(folder: Path, *, factor: float, say: Callable[[str], None]) -> Figures:
    """Insert all rows of a table in one transaction, then update all of them in another."""
    rows = max(round(ROWS * factor), 1)
    orders = Orders(str(folder / "log"))
    found: list[Figure] = []
    for what, write in (("inserts", orders.insert_at_once), ("updates", orders.update_at_once)):
        say(f"lake-transaction: one transaction of {rows:,} {what}")
        written = write(rows)
        found += figures(what, _applied(folder, written))
        _expect_all(folder, written)
    return Figures(f"One transaction of {rows:,} rows into a Delta table", found)


def _task(folder: Path, written: Written) -> Task:
    return Task(
        log=str(folder / "log"),
        folder=str(folder),
        after=written.after,
        upto=written.upto,
        batch=BATCH,
        warm_up=0,
        rows=written.rows,
    )


def _applied(folder: Path, written: Written) -> Outcome:
    return watched(module("lake_run", _task(folder, written).encode()))


def _expect_all(folder: Path, written: Written) -> None:
    """Every row must come from the transaction."""
    found = delta.sequences(_task(folder, written).table)
    if len(found) != written.rows or found.min() <= written.after:
        raise MeasurementFailed(f"{len(found)} rows, the first of change {found.min()}")


def figures(what: str, outcome: Outcome) -> Iterator[Figure]:
    """What one transaction took."""
    notes = outcome.notes
    yield Figure(f"{what}, the largest worker", notes[LARGEST], "MB", below=LIMIT)
    for kind in ("driver", "JVM"):
        yield Figure(f"{what}, {kind}", notes[kind], "MB")
    yield Figure(f"{what}, cold start included", outcome.rate, "rows/s")
