"""A source read batch by batch into a real log, by a test that acts in between."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ..change import connector as connectors
from ..change.event import Batch, Change, Op
from ..change.replay import Replay, Row, TableName
from ..errors import HeadraceError
from ..log import Log
from ..sources import Source, Stream
from .writing import PATIENCE, RowWriter, Session, SqlWriter

MARKS = "marks"  # the table whose rows say that everything before them has come

_numbers = itertools.count(1)


class Place(Protocol):
    """A fresh, empty database on a real server, and the source that captures all of it."""

    @property
    def schema(self) -> str:
        """The schema that changes have for a table that was created without naming one."""
        ...

    def source(self) -> Source:
        """The source under test, always with the same settings."""
        ...

    def connect(self) -> Session:
        """Another connection."""
        ...

    def altered(self) -> None:
        """Called after tables were created or altered: what the source's user would do then."""
        ...

    def another(self) -> AbstractContextManager[Place]:
        """A place that a resume of this one does not fit, on another server or in another file."""
        ...

    def stop(self) -> None:
        """Make the database not answer; raises NotImplementedError where that cannot be."""
        ...

    def start(self) -> None:
        """Undo `stop`."""
        ...


class Reading:
    """A source that is open, and the log that takes what comes from it."""

    def __init__(
        self, place: Place, log: Log, writer: Callable[[Session], RowWriter] = SqlWriter
    ) -> None:
        self.place = place
        self.log = log
        self._writer = writer
        self.source = place.source()
        self.stream: Stream
        self._open()

    def _open(self) -> None:
        self.go_back(self.log.resume(self.source.name))

    # -- batches --------------------------------------------------------------------------------

    def peek(self) -> Batch:
        """The next batch, which is lost unless it is stored."""
        deadline = time.monotonic() + PATIENCE
        while True:
            # A stream that gives nothing for ever would keep the test waiting as long.
            alarm = threading.Timer(PATIENCE, self.stream.close)
            alarm.start()
            self._begun = True
            try:
                batch = next(self._batches)
                self._came += 1
                return batch
            except StopIteration:
                raise AssertionError(f"the stream gave nothing for {PATIENCE:.0f} s") from None
            except HeadraceError as error:
                if not error.retry or time.monotonic() > deadline:
                    raise
                self._try_again()
            finally:
                alarm.cancel()
                alarm.join()

    def _try_again(self) -> None:
        """As a capture does, only sooner."""
        self.close()
        self.go_back(self._resume if self._came == 0 else self.log.resume(self.source.name))

    def store(self, batch: Batch, *, ack: bool = True) -> None:
        """What a capture does with a batch: durable first, forgotten second."""
        self.log.append(self.source.name, batch)
        if ack and batch.resume is not None:
            self.stream.ack(batch.resume)

    def step(self) -> Batch:
        """The next batch, stored and acknowledged."""
        batch = self.peek()
        self.store(batch)
        return batch

    def until(self, wanted: Callable[[Batch], Any], *, take: Callable[[], Batch]) -> list[Batch]:
        """The batches up to the first that is wanted and ends a transaction."""
        deadline = time.monotonic() + PATIENCE
        batches: list[Batch] = []
        found = False
        while not found or batches[-1].resume is None:
            assert time.monotonic() < deadline, "what was waited for did not come"
            batches.append(take())
            found = found or bool(wanted(batches[-1]))
        return batches

    def until_change(self, table: str, op: Op = Op.READ) -> None:
        """Go on to a change of this kind."""
        if not self.changes(op, table=table):
            self.until(lambda batch: any(_is(c, op, table) for c in batch.changes), take=self.step)

    def catch_up(self) -> None:
        """Go on until all that is committed now is in the log, and every snapshot is done."""
        done = False
        while not done:
            wanted = self.mark()
            batches = self.until(wanted, take=self.step)
            # A mark of a snapshot only says that other rows are yet to be read.
            marks = [change for batch in batches for change in wanted(batch)]
            copies = self.source.describe(self.log.resume(self.source.name)).copies
            done = marks[0].op is Op.INSERT and all(copy.done for copy in copies)

    def pass_over(self) -> list[Batch]:
        """The batches of everything that is committed now, of which none is stored."""
        return self.until(self.mark(), take=self.peek)

    def mark(self) -> Callable[[Batch], list[Change]]:
        """Commit a row that comes after all that was committed before; finds it in a batch."""
        number = next(_numbers)
        with session(self.place) as writer:
            self._writer(writer).insert(MARKS, [{"id": number}])
        key = {"id": number}
        return lambda batch: [
            c for c in batch.changes if c.table.name == MARKS and image(c.key) == key
        ]

    # -- opening --------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go in the middle of everything, as a process that ends does."""
        self.stream.close()
        for _ in self._batches if self._begun else ():
            pass  # what nobody has stored is lost with the process
        self.log.abandon(self.source.name)

    def reopen(self) -> None:
        """Begin again from what the log has stored, as a new process would."""
        self.close()
        self._open()

    def go_back(self, resume: bytes | None) -> None:
        """Begin again from a resume of one's choice."""
        self.stream = self.source.open(resume, self.log.register)
        self._batches = iter(self.stream)
        self._resume = resume
        self._begun = False
        self._came = 0

    # -- what came ------------------------------------------------------------------------------

    def changes(self, *ops: Op, table: str = "") -> list[Change]:
        """What the log holds, without the marks."""
        return [
            change
            for change in self.log.read(0, limit=1 << 30)
            if change.table.name != MARKS
            and (not ops or change.op in ops)
            and (not table or change.table.name == table)
        ]

    def rows(self, table: str, *, surprises: bool = False) -> list[Row]:
        """The rows of a table that the log adds up to, by id.

        Nothing may be odd about them, unless a snapshot was interrupted: then changes of rows
        that it had not read yet have come before these.
        """
        replay = Replay.of(self.changes())
        assert surprises or replay.surprises == [], replay.surprises
        name = TableName(self.source.name, self.place.schema, table)
        return sorted(replay.rows(name), key=lambda row: int(row["id"]))


@contextmanager
def session(place: Place) -> Iterator[Session]:
    """A connection whose work is committed at the end of the block."""
    opened = place.connect()
    try:
        yield opened
        opened.commit()
    finally:
        opened.close()


@contextmanager
def reading(
    place: Place, folder: Path, *, writer: Callable[[Session], RowWriter] = SqlWriter
) -> Iterator[Reading]:
    """The place's source, open while the block runs; a new folder begins a new log.

    `writer` writes rows over a session of the place.
    """
    if own := getattr(place.source(), "connector", None):
        connectors.register(own)  # as its entry point does where it is installed
    if not (folder / "log").exists():
        with session(place) as opened:
            writer(opened).create(MARKS, {})
        place.altered()
    with Log.open(folder / "log") as log:
        feed = Reading(place, log, writer)
        try:
            yield feed
        finally:
            feed.close()


def image(data: bytes | None) -> Row:
    """An image as Python values; of none, nothing."""
    return {} if data is None else msgspec.json.decode(data)


def _is(change: Change, op: Op, table: str) -> bool:
    return change.op is op and change.table.name == table
