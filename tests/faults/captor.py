"""A process that captures a database into a log, and kills itself at a named point.

    python -m tests.faults.captor '{"data_dir": …, "url": …, "kill": …}'

It writes how it is doing to its standard output, a JSON object a line whenever that changes. It
ends when its standard input does, and by itself when capture halts. The points are reached from
outside: between the stream of the source and the log stands one that looks, and may kill.
"""

import faulthandler
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

import msgspec
import psycopg

from headrace import capture as capturing
from headrace.capture import Capture
from headrace.change.event import Batch, Op, Table
from headrace.config import source_class
from headrace.errors import HeadraceError
from headrace.log import Log
from headrace.retry import Backoff
from headrace.secret import Secret
from headrace.sources import Finding, Phase, Register, Removal, Source, Status, Stream, worker
from headrace.sources.worker import Apart
from headrace.testing import wait_until

SOURCE = "faults"
HALTED, REFUSED = 3, 4  # exit codes

STREAMING = f"""
    FROM pg_stat_replication JOIN pg_replication_slots ON pid = active_pid
    WHERE slot_name = 'headrace_{SOURCE}'"""
ANSWERED = f"SELECT 1 {STREAMING} AND reply_time > %s"
CUT = f"SELECT pg_terminate_backend(pid) {STREAMING}"


class Point(StrEnum):
    """Where a process may die."""

    OPENING = "before the source is opened"
    FIRST_BATCH = "before the first batch of a stream is appended"
    BEFORE_APPEND = "before a streamed batch is appended"
    AFTER_APPEND = "after a streamed batch is appended, before it is acknowledged"
    AFTER_ACK = "after a streamed batch is acknowledged"
    IN_TRANSACTION = "after a piece of a large transaction is written"
    BEFORE_LAST_PIECE = "before the last piece of a large transaction is written"
    IN_SNAPSHOT = "after a batch of the snapshot is appended"
    BEFORE_STREAM = "between the snapshot and the stream"


class Kill(msgspec.Struct, frozen=True):
    """Die at a point, the `nth` time it is reached."""

    at: Point
    nth: int = 1
    told: bool = False  # not before the server has heard once more how far the log has come
    cut: bool = False  # do not die: only end the server's side of the stream


class Orders(msgspec.Struct, frozen=True):
    """What the process is to do."""

    data_dir: str
    url: str
    kill: Kill | None = None
    file_limit: int = 0  # bytes a file may have; 0: as many as the disk holds
    copy_again: tuple[str, ...] | None = None  # tables to copy anew, and then to die meanwhile
    type: str = "postgres"  # of the source
    settings: dict[str, Any] = {}  # more of its settings


class Report(msgspec.Struct, frozen=True):
    """How the process is doing."""

    phase: Phase
    error: str = ""
    hint: str = ""
    errored: dict[str, str] = {}
    copying: bool = False  # whether a snapshot is not complete


class Killer:
    """Counts how often each point is reached while it is armed."""

    def __init__(self, orders: Orders) -> None:
        self.armed = orders.copy_again is None
        self._kill = orders.kill
        self._url = orders.url
        self._reached = 0

    def reach(self, point: Point) -> None:
        """Die if this is the point."""
        if not self.armed or self._kill is None or self._kill.at is not point:
            return
        self._reached += 1
        if self._reached == self._kill.nth:
            self._strike(self._kill)

    def _strike(self, kill: Kill) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            if kill.told:
                now = connection.execute("SELECT clock_timestamp()").fetchall()[0]
                wait_until(lambda: connection.execute(ANSWERED, now).fetchall(), timeout=120)
            if kill.cut:
                connection.execute(CUT)
            else:
                os.kill(os.getpid(), signal.SIGKILL)


class WatchedSource:
    """A source whose streams are watched."""

    def __init__(self, source: Source, killer: Killer) -> None:
        self._source = source
        self._killer = killer

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def host(self) -> str:
        return self._source.host

    def open(self, resume: bytes | None, register: Register) -> "WatchedStream":
        self._killer.reach(Point.OPENING)
        return WatchedStream(self._source, self._source.open(resume, register), self._killer)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        return self._source.copy_again(resume, tables)

    def describe(self, resume: bytes | None) -> Status:
        return self._source.describe(resume)

    def check(self) -> list[Finding]:
        return self._source.check()

    def captured_tables(self) -> list[Table]:
        return self._source.captured_tables()

    def remove(self, resume: bytes | None, *, dry_run: bool = False) -> list[Removal]:
        return self._source.remove(resume, dry_run=dry_run)


class WatchedStream:
    """A stream that may kill the process before and after the log has taken a batch."""

    def __init__(self, source: Source, stream: Stream, killer: Killer) -> None:
        self._source = source
        self._stream = stream
        self._killer = killer
        self._batch = Batch((), None)

    def __iter__(self) -> Iterator[Batch]:
        pieces = False
        for number, batch in enumerate(self._stream):
            self._batch = batch
            if number == 0:
                self._killer.reach(Point.FIRST_BATCH)
            if pieces and batch.resume is not None:
                self._killer.reach(Point.BEFORE_LAST_PIECE)
            if self._streamed():
                self._killer.reach(Point.BEFORE_APPEND)
            pieces = batch.resume is None
            yield batch
            if pieces:
                self._killer.reach(Point.IN_TRANSACTION)

    def ack(self, resume: bytes) -> None:
        copies = self._source.describe(resume).copies
        if self._streamed():
            self._killer.reach(Point.AFTER_APPEND)
        elif copies and all(copy.done for copy in copies):
            self._killer.reach(Point.BEFORE_STREAM)
        if self._batch.changes and self._batch.changes[-1].op is Op.READ:
            self._killer.reach(Point.IN_SNAPSHOT)
        self._stream.ack(resume)
        if self._streamed():
            self._killer.reach(Point.AFTER_ACK)

    def _streamed(self) -> bool:
        """Whether the batch at hand is of the stream; the ids of its transactions are numbers."""
        changes = self._batch.changes
        return bool(changes) and changes[-1].transaction.id.isdigit()

    def status(self) -> Status:
        return self._stream.status()

    def close(self) -> None:
        self._stream.close()


def main(orders: Orders) -> int:
    """Capture until standard input ends."""
    faulthandler.register(signal.SIGUSR1)  # tells what every thread is at
    capturing.BACKOFF = Backoff(
        0.5, 0.5, 0.25
    )  # tests alter tables all the time, and copies begin again
    if orders.file_limit:
        # The write that goes beyond fails; Python ignores the signal that comes with it.
        resource.setrlimit(resource.RLIMIT_FSIZE, (orders.file_limit, orders.file_limit))
    if orders.kill is not None and orders.kill.at in (Point.IN_SNAPSHOT, Point.BEFORE_STREAM):
        worker._JOINED = 0  # batches are counted, so none is stored with the next
    try:
        log = Log.open(orders.data_dir)
    except HeadraceError as error:
        _tell(Report(Phase.STOPPED, str(error), error.hint))
        return REFUSED
    with log:
        chosen: Any = source_class(orders.type)
        source = Apart(
            chosen(name=SOURCE, url=Secret(orders.url), **orders.settings)
        )  # as `headrace run` does
        killer = Killer(orders)
        capture = Capture(WatchedSource(source, killer), log)
        capture.start()
        if orders.copy_again is not None:
            _watch(capture, until=Phase.STREAMING)
            killer.armed = True
            capture.copy_again(orders.copy_again)
        phase = _watch(capture)
        capture.stop()
    return HALTED if phase is Phase.HALTED else 0


def _watch(capture: Capture, *, until: Phase = Phase.HALTED) -> Phase:
    """Tell what changes, until a phase is reached, capture halts or standard input ends."""
    told: Report | None = None
    while True:
        status = capture.status()
        copying = any(not copy.done for copy in status.copies)
        report = Report(status.phase, status.error, status.hint, status.errored, copying)
        if report != told:
            _tell(report)
            told = report
        ended, _, _ = select.select([sys.stdin], [], [], 0.02)
        reached = status.phase is until and not copying
        if ended or reached or status.phase is Phase.HALTED:
            return status.phase


def _tell(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Orders)))
