"""One run of Headrace's capture into a log of its own, checked and timed.

Timed is everything from opening source and log to the commit, fsynced, of the last change. Then
the log is read back: it must hold exactly what was expected, or the run counts as failed.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Literal

import msgspec

from headrace.capture import Capture
from headrace.log import Log
from headrace.secret import Secret
from headrace.sources import Phase
from headrace.sources.postgres import Postgres
from headrace.sources.worker import Apart
from headrace.testing import PostgresDatabase, wait_until

from . import workload
from .process import MeasurementFailed, Outcome, answer, measure, module
from .workload import Scale

Mode = Literal["stream", "snapshot", "follow"]
ROWS = ("INSERT", "UPDATE", "DELETE", "READ")
IDLE_LIMIT = 60.0  # seconds without a commit


class Task(msgspec.Struct, frozen=True):
    """What to capture, and what the log must hold in the end."""

    mode: Mode
    url: str
    slot: str
    log: str
    expected: dict[str, int]  # changes by operation

    def encode(self) -> str:
        """As the argument of a child."""
        return msgspec.json.encode(self).decode()

    @property
    def rows(self) -> int:
        """Row changes in all."""
        return sum(self.expected.values())

    def source(self) -> Postgres:
        """The backlog from a slot made before it, or a whole table."""
        url = Secret(self.url)
        if self.mode == "snapshot":
            return Postgres(name="bench", url=url, tables=(workload.COPY_TABLE,), slot=self.slot)
        return Postgres(
            name="bench",
            url=url,
            tables=(workload.BACKLOG_TABLE,),
            slot=self.slot,
            publication=workload.PUBLICATION,
            snapshot=False,
        )


# --- in the child --------------------------------------------------------------------------------


class Commits:
    """When the log had grown how far."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._commits: list[tuple[int, float]] = []
        self._target = 0
        self._reached = Event()
        log.listen(self._note)

    def _note(self) -> None:
        latest = self._log.latest_sequence
        self._commits.append((latest, time.perf_counter()))
        if latest >= self._target:
            self._reached.set()

    def wait(self, sequence: int, capture: Capture) -> float:
        """Return the time at which the log had grown so far; fail when it stands still."""
        self._target = sequence
        self._reached.clear()
        quiet_since = time.perf_counter()
        while self._log.latest_sequence < sequence and not self._reached.wait(0.5):
            last = self._commits[-1][1] if self._commits else quiet_since
            status = capture.status()
            if status.phase is Phase.HALTED or time.perf_counter() - last > IDLE_LIMIT:
                raise MeasurementFailed(f"at {self._log.latest_sequence} of {sequence}: {status}")
        return next(at for latest, at in self._commits if latest >= sequence)


def capture_all(task: Task, *, ready: Callable[[Capture], None]) -> Outcome:
    """Capture until the log holds every expected row; `ready` is called after the start."""
    began = time.perf_counter()
    with Log.open(task.log) as log:
        commits = Commits(log)
        capture = Capture(Apart(task.source()), log)
        capture.start()
        ready(capture)
        ended = rows_there(task.rows, log, commits, capture)
        capture.stop()
        found = operations(log)
    if found != task.expected:
        raise MeasurementFailed(f"the log holds {found}, not {task.expected}")
    return Outcome(task.rows, ended - began)


def rows_there(rows: int, log: Log, commits: Commits, capture: Capture) -> float:
    """The time of the commit that completed the rows."""
    target = rows
    while True:
        ended = commits.wait(target, capture)
        missing = rows - sum(operations(log, upto=target).values())
        if missing <= 0:
            return ended
        target += missing  # the log also holds what is no row: a table's columns


def operations(log: Log, *, upto: int | None = None) -> dict[str, int]:
    """Row changes in the log, by operation."""
    found: Counter[str] = Counter()
    after = 0
    while changes := log.read(after, limit=2_000, upto=upto):
        found.update(change.op.value for change in changes if change.op in ROWS)
        after = changes[-1].sequence
    return dict(found)


def _say_when_streaming(capture: Capture) -> None:
    wait_until(lambda: capture.status().phase is Phase.STREAMING, message="it is streaming")
    answer({"ready": True})


def main(encoded: str) -> None:
    """Do one task and answer."""
    task = msgspec.json.decode(encoded, type=Task)
    following = task.mode == "follow"
    answer(capture_all(task, ready=_say_when_streaming if following else lambda _: None))


# --- in the parent -------------------------------------------------------------------------------


def stream(database: PostgresDatabase, slot: str, *, scale: Scale, folder: Path) -> Outcome:
    """The backlog, from a slot made before it, into a log."""
    return _measured(database, slot, "stream", expected=scale.operations, folder=folder)


def snapshot(database: PostgresDatabase, slot: str, *, scale: Scale, folder: Path) -> Outcome:
    """A whole table into a log."""
    return _measured(database, slot, "snapshot", expected={"READ": scale.rows}, folder=folder)


def _measured(
    database: PostgresDatabase, slot: str, mode: Mode, *, expected: dict[str, int], folder: Path
) -> Outcome:
    task = Task(mode, database.url, slot, str(folder / "log"), expected)
    return measure(module("headrace_run", task.encode()), folder)


if __name__ == "__main__":
    main(sys.argv[1])
