"""How a query reads the log: ranges planned on the driver, read on the executors."""

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import pyarrow as pa

from ..change.arrow.frame import Framing
from ..change.block import BlockRows
from ..change.event import Table
from ..change.span import LogSpan
from ..errors import ChangesLost, LogReplaced, PipelineError
from ..log import LogReader, Piece, Ranges
from ..sinks import Progress, lost_tail
from .options import Options
from .typed import TypedTable

logger = logging.getLogger(__name__)

P = TypeVar("P", Piece, Piece | BlockRows)


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """Changes that one task reads: those after `after`, up to and with `upto`."""

    epoch: str
    after: int
    upto: int
    part: int = 0  # of a log range that several tasks read
    parts: int = 1


class LogAccess(Protocol):
    """A log within reach: on disk, or behind a server. It is opened at its first use."""

    def ranges(
        self, after: int, *, limit: int | None = None, upto: int | None = None, parts: int = 1
    ) -> Ranges:
        """How readers may share what follows `after`; see `headrace.log.ranges`."""
        ...

    def pieces(self, wanted: SequenceRange) -> Iterator[Piece]:
        """The changes of a range, those that are still there; LogReplaced: it is another log."""
        ...

    def stored(self, wanted: SequenceRange) -> Iterator[Piece | BlockRows]:
        """The same, with blocks of rows as they are, where this log can give them."""
        ...

    def spans(self, wanted: SequenceRange) -> list[LogSpan]:
        """What is known of a range without reading it, where this log can tell."""
        ...

    def table(self, epoch: str, version: int) -> Table:
        """A version of a table's columns."""
        ...

    def tables(self) -> list[Table]:
        """Every version of every table's columns that there is now, oldest first."""
        ...

    def since(self, moment: int) -> int:
        """The first sequence that was captured at a time or after it; see `LogReader.since`."""
        ...


@dataclass(frozen=True, slots=True)
class DiskLog:
    """A log in a folder, which another process may be writing."""

    path: str

    def ranges(
        self, after: int, *, limit: int | None = None, upto: int | None = None, parts: int = 1
    ) -> Ranges:
        """How readers may share what follows `after`."""
        return _reader(self.path).ranges(after, limit=limit, upto=upto, parts=parts)

    def pieces(self, wanted: SequenceRange) -> Iterator[Piece]:
        """The changes of a range, those that are still there."""
        reader, after = _reader(self.path, wanted.upto), wanted.after
        expect_epoch(wanted.epoch, reader.epoch)
        while piece := reader.piece(after, upto=wanted.upto):
            yield piece
            after = piece.last

    def stored(self, wanted: SequenceRange) -> Iterator[Piece | BlockRows]:
        """The same, with blocks of rows as they are."""
        reader, after = _reader(self.path, wanted.upto), wanted.after
        expect_epoch(wanted.epoch, reader.epoch)
        while part := reader.stored(after, upto=wanted.upto):
            yield part
            after = part.last

    def spans(self, wanted: SequenceRange) -> list[LogSpan]:
        """What is known of a range without reading it."""
        reader = _reader(self.path, wanted.upto)
        expect_epoch(wanted.epoch, reader.epoch)
        return reader.spans(wanted.after, wanted.upto)

    def table(self, epoch: str, version: int) -> Table:
        """A version of a table's columns; it was written before the changes that follow it."""
        return _readers[self.path][1].table(version)

    def tables(self) -> list[Table]:
        """Every version of every table's columns that there is now."""
        return _reader(self.path).tables()

    def since(self, moment: int) -> int:
        """The first sequence that was captured at a time or after it."""
        return _reader(self.path).since(moment)


# One for each log in a process, refreshed when it is used: opening one takes a tenth of a second.
_readers: dict[str, tuple[bytes, LogReader]] = {}
_opening = threading.Lock()


def close_reader(path: str) -> None:
    """Let go of a log that nobody reads any more."""
    if path in _readers:
        _readers.pop(path)[1].close()


def close_readers() -> None:
    """Let go of every log."""
    for path in list(_readers):
        close_reader(path)


def _reader(path: str, upto: int = 0) -> LogReader:
    """The log as it is now, `upto` included; a folder whose log was replaced is opened again."""
    with _opening:
        return _current(path, upto)


def _current(path: str, upto: int) -> LogReader:
    identity_file = Path(path, "IDENTITY")
    identity = identity_file.read_bytes() if identity_file.exists() else b""
    known, reader = _readers.get(path, (b"", None))
    if reader is not None and identity == known:
        reader.refresh(upto)
        return reader
    if reader is not None:
        del _readers[path]
        reader.close()
    reader = LogReader.open(path)
    _readers[path] = (identity, reader)
    return reader


def read_typed(
    reading: LogAccess, wanted: SequenceRange, options: Options, table: TypedTable
) -> Iterator[pa.RecordBatch]:
    """The changes of one table in a range, with its own columns."""
    parts = _complete(reading.stored(wanted), reading, wanted, options)
    return table.batches(parts, _Tables(reading, wanted.epoch))


def read(reading: LogAccess, wanted: SequenceRange, options: Options) -> Iterator[pa.RecordBatch]:
    """The changes of a range as Arrow, some thousands at a time."""
    tables = _Tables(reading, wanted.epoch)
    framing = Framing(wanted.epoch, tables, options.columns, options.tables)
    for piece in _complete(reading.pieces(wanted), reading, wanted, options):
        batch = framing.batch(piece.first, piece.count, piece.records)
        if batch.num_rows:
            yield batch


@dataclass(frozen=True, slots=True)
class PipelineLog:
    """The log of a pipeline as the tasks of a sink read it; see `sinks.ReadableLog`."""

    reading: LogAccess
    options: Options

    def pieces(self, epoch: str, after: int, upto: int) -> Iterator[tuple[int, int, bytes]]:
        """The changes of a range, as the log stores them."""
        wanted = SequenceRange(epoch, after, upto)
        found = self.reading.pieces(wanted)
        for piece in _complete(found, self.reading, wanted, self.options):
            yield piece.first, piece.count, piece.records

    def blocks(
        self, epoch: str, after: int, upto: int
    ) -> Iterator[tuple[int, int, bytes] | BlockRows]:
        """The same, with blocks of rows as they are."""
        wanted = SequenceRange(epoch, after, upto)
        found = self.reading.stored(wanted)
        for part in _complete(found, self.reading, wanted, self.options):
            if isinstance(part, BlockRows):
                yield part
            else:
                yield part.first, part.count, part.records

    def spans(self, epoch: str, after: int, upto: int) -> list[LogSpan]:
        """What is known of a range without reading it."""
        return self.reading.spans(SequenceRange(epoch, after, upto))

    def tables(self, epoch: str) -> Mapping[int, Table]:
        """The tables, by version."""
        return _Tables(self.reading, epoch)


def _complete(
    found: Iterator[P], reading: LogAccess, wanted: SequenceRange, options: Options
) -> Iterator[P]:
    """The changes of a range; none is missing unnoticed."""
    after = wanted.after
    for piece in found:
        if piece.first > after + 1:
            lose(options, after + 1, piece.first)
        after = piece.last
        yield piece
    if after < wanted.upto:
        _explain_end(reading, wanted, after, options)


def _explain_end(reading: LogAccess, wanted: SequenceRange, after: int, options: Options) -> None:
    """What is missing at the end of a range was trimmed, or has not come to this machine."""
    now = reading.ranges(after, upto=after)
    expect_epoch(wanted.epoch, now.epoch)
    if now.first_sequence <= after + 1:
        raise PipelineError(
            f"the log ends at {now.latest_sequence} where this executor reads it, "
            f"although a batch up to {wanted.upto} was planned",
            hint="Check that driver and executors reach the same log.",
        )
    lose(options, after + 1, min(now.first_sequence, wanted.upto + 1), now.removed)


def expect_epoch(wanted: str, found: str) -> None:
    """Sequences of two logs cannot be compared."""
    if wanted != found:
        raise LogReplaced(f"the query has read the log {wanted}, but this one is {found}")


def expect_shared(place: Progress, now: Ranges) -> None:
    """A place of the log that this one was restored from holds as far as the copy goes."""
    upto = now.shared_upto(place.epoch, place.generation)
    if upto is not None and place.sequence <= upto:
        return
    fork = now.likely_fork(place.epoch, place.generation)
    if fork is None:
        expect_epoch(place.epoch, now.epoch)
    elif place.epoch != now.epoch:
        raise LogReplaced(
            f"the query has read up to {place.sequence}, but what this log has of it ends at "
            f"{fork}: it was restored from an older copy"
        )
    raise LogReplaced(lost_tail("the query", place.sequence, fork or 0))


def lose(options: Options, wanted: int, first: int, removed: str = "") -> None:
    """Changes from `wanted` on were trimmed; the first one kept is `first`."""
    if options.strict:
        raise ChangesLost(
            f"changes {wanted} to {first - 1} are no longer in the log, "
            f"whose oldest change is {first}{removed}"
        )
    logger.warning("lost=%d-%d first_kept=%d", wanted, first - 1, first)


class _Tables(dict[int, Table]):
    """Table versions, read when each is first met."""

    def __init__(self, reading: LogAccess, epoch: str) -> None:
        super().__init__()
        self._reading = reading
        self._epoch = epoch

    def __missing__(self, version: int) -> Table:
        table = self[version] = self._reading.table(self._epoch, version)
        return table
