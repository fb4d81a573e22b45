"""What a pipeline last said of itself, and whether that still holds."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from . import REPORT, Phase, Report, Status

STALE_SECONDS = 15.0  # a pipeline that has said nothing for so long is no longer there, or stuck


class PipelinePlace(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline that another process runs: where it says how it is doing, and what of."""

    folder: Path
    sinks: tuple[str, ...] = ()  # as the config names them
    same_log: bool = True  # whether what it reads is the log of this process


class PipelineOverview(msgspec.Struct, frozen=True, kw_only=True):
    """How the pipeline is doing, by what it last wrote down."""

    running: bool
    told_at: int  # microseconds since 1970; 0: it has never run
    detail: str
    sinks: list[Status]


def write(folder: Path, sinks: Sequence[Status]) -> None:
    """Say how this process, a pipeline, is doing; an OSError when that cannot be written."""
    report = Report(pid=os.getpid(), at=time.time_ns() // 1000, sinks=list(sinks))
    fresh = folder / f"{REPORT}.new"
    fresh.write_bytes(msgspec.json.encode(report))
    fresh.replace(folder / REPORT)


def look(folder: Path) -> PipelineOverview:
    """What the pipeline whose folder this is last wrote down."""
    try:
        report = msgspec.json.decode((folder / REPORT).read_bytes(), type=Report)
    except FileNotFoundError:
        return _silent("has never run here")
    except (OSError, msgspec.DecodeError) as error:
        return _silent(f"{folder / REPORT} cannot be read: {error}")
    lives, age = _lives(report.pid), time.time() - report.at / 1e6
    stopped = all(sink.phase is Phase.STOPPED for sink in report.sinks)
    if not lives:
        detail = "not running" if stopped else "not running: it ended without a last word"
    elif age > STALE_SECONDS:
        detail = f"process {report.pid} has said nothing for {age:.0f} s"
    else:
        detail = f"process {report.pid} runs"
    running = lives and age <= STALE_SECONDS
    return PipelineOverview(running=running, told_at=report.at, detail=detail, sinks=report.sinks)


def _silent(detail: str) -> PipelineOverview:
    return PipelineOverview(running=False, told_at=0, detail=detail, sinks=[])


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it is another user's
    return True
