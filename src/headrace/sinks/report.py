"""The file in which a running pipeline reports how it is doing, and whether that still holds."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from . import Progress, SinkPhase, SinkStatus
from .checkpoints import LocalCheckpointFiles, committed, noted_position
from .verification import noted

REPORT = "status.json"
STALE_SECONDS = 15.0  # a pipeline that has not reported for so long is no longer there, or stuck


class PipelineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last report of a running pipeline."""

    pid: int
    at: int  # microseconds since 1970
    sinks: list[SinkStatus]


class PipelineFolder(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of a pipeline that another process runs, and what it runs."""

    folder: Path
    sinks: tuple[str, ...] = ()  # as the config names them
    same_log: bool = True  # whether what it reads is the log of this process
    checkpoints: Path | None = None  # the folder that has one folder a sink; None: `folder`
    elsewhere: bool = False  # the checkpoints are in a storage: sinks note here how far they are

    def committed(self) -> dict[str, Progress | None]:
        """How far each sink is by its checkpoint, whether the pipeline runs or not."""
        return {sink: _committed(self._reading(self.folder_of(sink))) for sink in self.sinks}

    def folder_of(self, sink: str) -> Path:
        """The folder of a sink."""
        return (self.checkpoints or self.folder) / sink

    def _reading(self, folder: Path) -> Callable[[], Progress | None]:
        if self.elsewhere:
            return lambda: noted_position(folder)
        return lambda: committed(LocalCheckpointFiles(folder / "checkpoint"))


class PipelineOverview(msgspec.Struct, frozen=True, kw_only=True):
    """How the pipeline is doing, by its last report."""

    running: bool
    # Microseconds since 1970; 0: it has never run.
    reported_at: int = msgspec.field(name="told_at")
    detail: str
    sinks: list[SinkStatus]


def write(folder: Path, sinks: Sequence[SinkStatus]) -> None:
    """Report how this process, a pipeline, is doing; an OSError when that cannot be written."""
    report = PipelineReport(pid=os.getpid(), at=time.time_ns() // 1000, sinks=list(sinks))
    fresh = folder / f"{REPORT}.new"
    fresh.write_bytes(msgspec.json.encode(report))
    fresh.replace(folder / REPORT)


def read(folder: Path) -> PipelineOverview:
    """Read the last report of the pipeline whose folder this is."""
    try:
        report = msgspec.json.decode((folder / REPORT).read_bytes(), type=PipelineReport)
    except FileNotFoundError:
        return _without_report("has never run here")
    except (OSError, msgspec.DecodeError) as error:
        return _without_report(f"{folder / REPORT} cannot be read: {error}")
    alive, age = _is_alive(report.pid), time.time() - report.at / 1e6
    stopped = all(sink.phase in (SinkPhase.STOPPED, SinkPhase.PAUSED) for sink in report.sinks)
    if not alive:
        detail = "not running" if stopped else "not running: it ended without a last report"
    elif age > STALE_SECONDS:
        detail = f"process {report.pid} has not reported for {age:.0f} s"
    else:
        detail = f"process {report.pid} runs"
    running = alive and age <= STALE_SECONDS
    return PipelineOverview(
        running=running, reported_at=report.at, detail=detail, sinks=report.sinks
    )


def with_verified(found: PipelineOverview, folder_of: Callable[[str], Path]) -> PipelineOverview:
    """A report, with what the last comparison of each sink has found."""
    sinks = [
        msgspec.structs.replace(sink, verified=noted(folder_of(sink.sink))) for sink in found.sinks
    ]
    return msgspec.structs.replace(found, sinks=sinks)


def behind(position: int, *, first: int, latest: int) -> int:
    """How many changes of a log follow a position; 0 is before everything that the log keeps."""
    return max(latest - max(position, first - 1), 0)


def lag_of(sink: SinkStatus, *, first: int, latest: int) -> int | None:
    """The lag of a sink in its log as that is now; None: the sink's position is not known.

    What the sink reported is as old as its report.
    """
    if sink.lag is None and not sink.sequence:
        return None
    return behind(sink.sequence, first=first, latest=latest)


def _without_report(detail: str) -> PipelineOverview:
    return PipelineOverview(running=False, reported_at=0, detail=detail, sinks=[])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it is another user's
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True  # there is no such folder on this system
    # The state follows the name, which is in parentheses. Z: it has ended, but is still listed,
    # because its parent waits for whoever else writes to the same pipe.
    return stat.rpartition(b") ")[2][:1] != b"Z"


def _committed(read: Callable[[], Progress | None]) -> Progress | None:
    """Where a query goes on; None: no batch was stored, or that cannot be read."""
    try:
        return read()
    except (OSError, ValueError, LookupError, TypeError):
        return None
