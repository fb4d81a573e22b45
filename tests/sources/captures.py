"""A source that is captured into a log of its own while a test writes to its database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from headrace.capture import Capture
from headrace.change.event import Change, Op
from headrace.log import Log
from headrace.sources import Phase, Source, Status
from headrace.testing import wait_until

TIMEOUT = 120.0  # seconds; far more than anything here takes, also on a busy machine

S = TypeVar("S", bound=Source)


class CapturedSource(ABC, Generic[S]):
    """A running capture, and what it has put into the log."""

    def __init__(self, log: Log, source: S) -> None:
        self.log = log
        self.source = source
        self.capture = Capture(source, log)
        self.snapshot_end = 0  # the last sequence of the first snapshot

    def start(self) -> None:
        """Begin, without waiting."""
        self.capture = Capture(self.source, self.log)
        self.capture.start()

    def restart(self) -> None:
        """Stop and begin again, as a new process would."""
        self.capture.stop()
        self.start()

    @contextmanager
    def running(self, *, start: bool = True) -> Iterator[None]:
        """Capture while the block runs, which begins after the first snapshot."""
        try:
            if start:
                self.start()
                self.until_streaming()
                self.snapshot_end = self.log.latest_sequence
            yield
        finally:
            self.capture.stop()

    @property
    def status(self) -> Status:
        """How the capture is doing."""
        return self.capture.status()

    def until(self, condition: Callable[[], Any], message: str, timeout: float = TIMEOUT) -> None:
        """Wait for a condition; fails at once when the capture has halted meanwhile."""

        def holds() -> bool:
            status = self.status
            assert status.phase is not Phase.HALTED, f"{status.error} {status.hint}"
            return bool(condition())

        wait_until(holds, timeout=timeout, message=message)

    def until_streaming(self) -> None:
        """Wait until every snapshot is complete."""

        def all_read() -> bool:
            status = self.status
            return status.phase is Phase.STREAMING and not status.copying

        self.until(all_read, "the capture streams")

    def until_halted(self) -> Status:
        """Wait until the capture has given up, and return its status."""
        wait_until(lambda: self.status.phase is Phase.HALTED, timeout=TIMEOUT, message="halted")
        return self.status

    @abstractmethod
    def until_caught_up(self) -> None:
        """Wait until everything that is committed now is in the log."""

    def counts(self, change: Change) -> bool:
        """Whether a change is not of the test kit itself."""
        del change
        return True

    def changes(self, *ops: Op, table: str = "", after: int = 0) -> list[Change]:
        """What the log holds once it has caught up."""
        self.until_caught_up()
        return self.stored(*ops, table=table, after=after)

    def streamed(self, *ops: Op, table: str = "") -> list[Change]:
        """What came after the first snapshot."""
        return self.changes(*ops, table=table, after=self.snapshot_end)

    def stored(self, *ops: Op, table: str = "", after: int = 0) -> list[Change]:
        """What the log holds now."""
        return [
            change
            for change in self.log.read(after, limit=1 << 30)
            if self.counts(change)
            and (not ops or change.op in ops)
            and (not table or change.table.name == table)
        ]
