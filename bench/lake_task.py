"""What a run into a Delta table is asked, and how its batches become figures."""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from . import delta
from .orders import NAME, SCHEMA
from .process import MeasurementFailed, Outcome

BATCH_SECONDS = "seconds a batch"
SLOWEST = "seconds of the slowest batch"
BYTES = "bytes written per changed row"
BATCH_BYTES = "bytes written a batch"
LARGEST = "MB of the largest worker"
GROWTH = "seconds of the last tenth of the batches, by those of the first"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Which changes of a log go where."""

    log: str
    folder: str  # the runner's own, the same in every run
    after: int
    upto: int
    batch: int  # changes
    warm_up: int  # batches that are not counted
    rows: int  # different ones in each counted batch, added up
    keep: Literal["rows", "history"] = "rows"
    select: tuple[str, ...] = ()  # the columns that are stored; none: all
    where: str = ""  # the rows
    sql: str = ""  # or a statement that Spark computes them with
    executors: int = 0  # of a standalone cluster, one core each; 0: Spark is in the driver

    def encode(self) -> str:
        """As the argument of a child."""
        return msgspec.json.encode(self).decode()

    @property
    def lake(self) -> Path:
        """Where the tables lie."""
        return Path(self.folder, "lake")

    @property
    def table(self) -> Path:
        """The one table."""
        return self.lake / SCHEMA / NAME


class Lap(NamedTuple):
    """How things stood when a batch had been stored; the first lap is the start."""

    at: float
    changes: int  # of this batch
    version: int  # of the table, or what else tells how much there was
    written: float = 0.0  # seconds in which the batch was stored, all else left out


def _tenth(times: Sequence[float]) -> int:
    return max(len(times) // 10, 1)


def outcome(task: Task, laps: Sequence[Lap], added: Callable[[int], int] | None = None) -> Outcome:
    """The batches after the warm-up; `added`: the bytes written since a version, if not Delta's."""
    if (total := sum(lap.changes for lap in laps)) != task.upto - task.after:
        raise MeasurementFailed(f"{total} changes came, not {task.upto - task.after}")
    base, *counted = laps[task.warm_up :]
    if not counted:
        raise MeasurementFailed(f"{len(laps) - 1} batches came, all of them for warming up")
    ends = [lap.at for lap in (base, *counted)]
    times = [end - begin for begin, end in pairwise(ends)]
    written = added(base.version) if added else delta.bytes_added(task.table, base.version)
    notes = {
        BATCH_SECONDS: sum(times) / len(times),
        SLOWEST: max(times),
        BYTES: written / task.rows,
        BATCH_BYTES: written / len(times),
        "seconds a batch in storing it": sum(lap.written for lap in counted) / len(times),
        GROWTH: statistics.mean(times[-_tenth(times) :]) / statistics.mean(times[: _tenth(times)]),
    }
    return Outcome(sum(lap.changes for lap in counted), sum(times), notes)
