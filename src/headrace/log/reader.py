"""Reading the log: from the process that writes it, or from any other on the same machine."""

from __future__ import annotations

import math
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import chain, takewhile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, cast

import msgspec
from rocksdict import AccessType, Options, Rdict, ReadOptions

from ..change.block import MARK, BlockRows, RowBlock
from ..change.event import Change, Table
from ..change.record import RecordHead, decode, head, head_in
from ..change.span import LogSpan
from ..errors import LogAbsent, LogDamaged, LogError
from . import _layout as layout
from ._synced import read_mark
from .folder import reading, unopened
from .holding import ChangeRemoval, Cursor
from .keys import Key
from .lineage import (
    UNKNOWN_GENERATION,
    Ancestor,
    Generation,
    ancestors,
    earlier_lineage,
    shared_upto,
)
from .ranges import Ranges, plan

PIECE_HEAD = struct.Struct(">QII")  # first sequence, number of changes, their bytes

_PIECE_BYTES = 512 << 10
_ROWS = 512  # of a block, turned into records at a time; fewer, where those have many bytes
_BLOCKS_KEPT = 4  # which were read last: who polls a hundred changes at a time finds them there
_OPEN_SECONDS = 5.0  # a large transaction is flushed many times before anything of it may be seen
_LOOKS = 5  # at a log that shows less than was synced
_POLL_SECONDS = 0.2  # between two looks at a log that another process may write
_WRITE_BUFFER = 32 << 20  # bytes; up to two of them hold what is not in a table file yet


class Stats(msgspec.Struct, frozen=True):
    """What the log holds now."""

    count: int
    first_sequence: int  # of the oldest change kept; latest_sequence + 1 when there is none
    latest_sequence: int  # of the newest change ever committed; trimming does not lower it
    total_bytes: int


class Piece(msgspec.Struct, frozen=True):
    """Neighbouring changes as the log stores them."""

    first: int  # sequence of the first
    count: int
    records: bytes  # one after the other

    @property
    def last(self) -> int:
        """The sequence of the last one."""
        return self.first + self.count - 1

    @property
    def head(self) -> bytes:
        """What is sent before the records (`PIECE_HEAD`)."""
        return PIECE_HEAD.pack(self.first, self.count, len(self.records))

    def packed(self) -> bytes:
        """The piece as it is sent: its head, then the records."""
        return self.head + self.records


class _Run(NamedTuple):
    """A block, or the records of neighbouring changes, half a megabyte of them or a little more."""

    first: int  # sequence
    last: int
    content: RowBlock | list[bytes]


class LogReader:
    """The committed changes of a log, oldest first."""

    def __init__(self, db: Rdict, path: Path) -> None:
        self.path = path
        self._db = db
        self._state = db.get_column_family(layout.STATE)
        self._tables: dict[int, Table] = {}
        self._versions: list[Table] = []  # from the first on; a version never changes
        self._recent: tuple[
            tuple[int, RowBlock], ...
        ] = ()  # blocks by first sequence, newest first
        self._latest = 0
        self._first = 1
        self._manifest = _Manifest("", 0)  # when everything in it was seen
        self._open_due = 0.0
        self._seen_lineage: bytes | None = None
        self._damaged: dict[float, str] = {}  # by the last change of each damage, newest last

    @classmethod
    def open(cls, path: Path | str) -> LogReader:
        """Follow a log that another process may be writing; `refresh` catches up with it."""
        folder = Path(path)
        manifest = _manifest(folder)
        if not manifest.name:
            raise LogAbsent(f"there is no log in {folder}")
        reader = cls(_follower(folder), folder)
        reader._manifest = manifest
        try:
            reader._expect_layout()
            reader._expect_state()
        except LogError:
            reader.close()
            raise
        try:
            reader.refresh()
        except LogError:
            reader.close()
            raise
        return reader

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        with ExitStack() as stack:  # all of them, even when one cannot be closed in order
            stack.callback(self._db.close)
            stack.callback(self._state.close)

    def refresh(self, upto: int = 0) -> None:
        """See what the writer has committed since; `upto`: what somebody else has seen of it."""
        known, before = self._manifest, self._latest
        synced = read_mark(self.path).sequence  # first: what it says is there
        manifest = _manifest(self.path)
        with reading(self.path):
            self._db.try_catch_up_with_primary()
        self._look()
        # A writer that is opened begins another manifest, of which a follower overlooks files
        # (facebook/rocksdb#7815): changes are then missing in the midst of others.
        switched = not _manifest(self.path).follows(known)
        # What is flushed, and was not seen before, is hidden until more is written (#14444).
        hidden = manifest.size != known.size and self._latest == before
        due = self._latest < upto or (hidden and time.monotonic() >= self._open_due)
        if manifest.name and (switched or due):
            self._open_again()
        elif not hidden:
            self._manifest = manifest
        self._expect_upto(synced)

    def _expect_upto(self, synced: int) -> None:
        """A follower passes over files that it cannot read, and would show an older log."""
        for _ in range(_LOOKS):
            if self._latest >= synced:
                return
            self._open_again()
            if self._latest < synced:
                time.sleep(_POLL_SECONDS)  # the writer may be moving it to another file just now
        raise self._note_damage(
            f"the log in {self.path} had changes up to {synced}, and can be read up to "
            f"{self._latest}"
        )

    @property
    def damage(self) -> str:
        """What could not be read of that which is not trimmed; "": nothing so far."""
        kept = [what for last, what in self._damaged.items() if last >= self._first]
        return kept[-1] if kept else ""

    def _note_damage(self, what: str, last: float = math.inf) -> LogDamaged:
        """What to report; `last` is the last change that it concerns, if no other is."""
        others = {at: each for at, each in self._damaged.items() if last != at >= self._first}
        self._damaged = {**others, last: what}
        return LogDamaged(what)

    def _open_again(self) -> None:
        """See the log as one who has not followed it before."""
        self._manifest, self._open_due = _manifest(self.path), time.monotonic() + _OPEN_SECONDS
        # What others read from the last one, they may read to its end: nobody closes it.
        self._db = _follower(self.path)
        self._state = self._db.get_column_family(layout.STATE)
        self._look()

    def _look(self) -> None:
        self._first = self._number(layout.FIRST, 1)
        self._latest = self._number(layout.SEQUENCE, 0)
        if (lineage := self._get(layout.LINEAGE)) != self._seen_lineage:
            # The folder may have been put back from a copy, which went on with other tables.
            self._tables, self._versions, self._recent = {}, [], ()
            self._seen_lineage = lineage

    def wait_beyond(self, sequence: int, seconds: float = math.inf) -> None:
        """Wait until the log, which another process may write, has more or the time is over."""
        until = time.monotonic() + seconds
        self.refresh()
        while self.latest_sequence <= sequence and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            self.refresh()

    @property
    def epoch(self) -> str:
        """Differs from that of every other log: sequences of two epochs cannot be compared."""
        return bytes(self._get(layout.EPOCH) or b"").decode()

    @property
    def lineage(self) -> list[Generation]:
        """The generations of this log, oldest first; see `headrace.log.lineage`."""
        if (stored := self._get(layout.LINEAGE)) is not None:
            return msgspec.json.decode(stored, type=list[Generation])
        known = self._get(layout.ANCESTORS)
        earlier = [] if known is None else msgspec.json.decode(known, type=list[Ancestor])
        return earlier_lineage(self.epoch, earlier)

    @property
    def generation(self) -> str:
        """The one that a reader of this log is in."""
        return self.lineage[-1].id

    @property
    def ancestors(self) -> list[Ancestor]:
        """The logs that this one was restored from, each with how much of it is here."""
        return ancestors(self.lineage)

    def shared_upto(self, epoch: str, generation: str = UNKNOWN_GENERATION) -> int | None:
        """Up to which sequence a place in that log and generation holds here; None: nowhere."""
        latest = self._latest  # first: a generation that begins meanwhile has no place before it
        return shared_upto(self.lineage, epoch, generation, latest)

    @property
    def latest_sequence(self) -> int:
        """The last committed sequence."""
        return self._latest

    @property
    def first_sequence(self) -> int:
        """The oldest sequence that is kept."""
        return self._first

    def read(self, after: int, *, limit: int = 1000, upto: int | None = None) -> list[Change]:
        """The next changes, at most `limit`, none beyond `upto`."""
        tables = _Tables(self)
        return [
            decode(sequence, record, tables)
            for sequence, record in self.records(after, limit=limit, upto=upto)
        ]

    def records(
        self, after: int, *, limit: int, upto: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """The next changes as (sequence, record), undecoded."""
        start, end = self._span(after, limit, upto)
        following = 0
        for run in self._runs(start, end):
            if following:
                self._expect_next(following, run.first)
            if isinstance(run.content, RowBlock):
                yield from _rows(run.first, run.content, start, end)
            else:
                self._expect_whole(run.first, run.content, run.last)
                yield from enumerate(run.content, run.first)
            following = run.last + 1

    def piece(self, after: int, *, upto: int, most: int = 10_000) -> Piece | None:
        """The next changes in one go: at most `most`, and no more once they have half a megabyte.

        None: nothing follows. It begins later than `after` + 1 where changes were trimmed.
        """
        start, end = self._span(after, most, upto)
        first, last, size, records = 0, 0, 0, list[bytes]()
        for run in self._runs(start, end):
            first = first or max(run.first, start)
            if isinstance(run.content, RowBlock):
                last = max(run.first, start) - 1
                for last, record in _rows(run.first, run.content, start, end):  # noqa: B007
                    records.append(record)
                    size += len(record)
                    if size >= _PIECE_BYTES:
                        break
            else:
                last = run.last
                records += run.content
                size += sum(map(len, run.content))
            if size >= _PIECE_BYTES:
                break
        return self._whole(first, records, last) if records else None

    def stored(self, after: int, *, upto: int, most: int = 10_000) -> Piece | BlockRows | None:
        """The next changes as they are stored: rows of a block, or a piece that ends before one."""
        start, end = self._span(after, most, upto)
        run = next(self._runs(start, end), None)
        if run is None:
            return None
        if isinstance(run.content, RowBlock):
            return _shown(run.first, run.content, start, min(upto, self._latest))
        return self._whole(run.first, run.content, run.last)

    def _whole(self, first: int, records: list[bytes], last: int) -> Piece:
        """A piece that lacks nothing between its first and last change."""
        self._expect_whole(first, records, last)
        return Piece(first, len(records), b"".join(records))

    def _expect_whole(self, first: int, records: list[bytes], last: int) -> None:
        self._expect_next(first + len(records), last + 1)

    def _expect_next(self, wanted: int, found: int) -> None:
        if found != wanted:
            what = f"the log in {self.path} lacks changes before sequence {found}"
            raise self._note_damage(what, found - 1)

    def place(self, sequence: int) -> RecordHead | None:
        """Where a change stands in its transaction; None: it is not in the log."""
        if not self._first <= sequence <= self._latest:
            return None
        found = self._readable(sequence)
        if found is None:
            self._open_again()  # as in `_runs`
            found = self._readable(sequence)
        if found is None:
            if self._first > sequence:
                return None  # it was trimmed meanwhile
            raise self._unreadable(sequence)
        first, value = found
        return head_in(value, sequence - first) if isinstance(value, RowBlock) else head(value)

    def since(self, moment: int) -> int:
        """The first sequence captured at a time (microseconds since 1970) or after it.

        What was committed later was captured later, so nothing of it comes before; what was
        committed a little earlier may follow. Beyond the last one when there is none.
        """
        low, high = self._first, self._latest + 1
        while low < high:
            middle = (low + high) // 2
            found = self.place(middle)
            if found is not None and found.captured_at < moment:
                low = middle + 1
            else:
                high = middle
        return low

    def ranges(
        self, after: int, *, limit: int | None = None, upto: int | None = None, parts: int = 1
    ) -> Ranges:
        """How readers may share what follows `after`; see `headrace.log.ranges`."""
        return plan(self, after, limit=limit, upto=upto, parts=parts)

    def spans(self, after: int, upto: int) -> list[LogSpan]:
        """What is known of the changes in between without reading them, span by span."""
        first = max(after, self._first - 1)
        marks = takewhile(lambda mark: mark[0] <= upto, self._marks(first + 1))
        return [mark.span for _, mark in marks if mark.span and mark.span.after >= first]

    def stats(self) -> Stats:
        """How many changes there are, and how large they are."""
        latest, first = self._latest, self._first
        size = self._number(layout.BYTES, 0) - self._number(layout.TRIMMED, 0)
        return Stats(latest - first + 1, first, latest, size)

    def table(self, version: int) -> Table:
        """A version of a table's columns."""
        table = self._tables.get(version)
        if table is None:
            stored = self._get(layout.table_key(version))
            if stored is None:
                raise LogError(f"the log has no table version {version}")
            table = self._tables[version] = msgspec.json.decode(stored, type=Table)
        return table

    def tables(self) -> list[Table]:
        """Every version of every table's columns, oldest first."""
        versions = list(self._versions)
        while stored := self._get(layout.table_key(len(versions) + 1)):
            versions.append(msgspec.json.decode(stored, type=Table))
        self._versions = versions
        return list(versions)

    def resume(self, source: str) -> bytes | None:
        """Where a source goes on; None: it has never been captured."""
        value: bytes | None = self._get(layout.source_key(source))
        return value

    def cursors(self) -> list[Cursor]:
        """Every named cursor."""
        return [msgspec.json.decode(value, type=Cursor) for _, value in self._scan(b"cursor:")]

    def cursor(self, name: str, owner: str | None = None) -> Cursor | None:
        """One named cursor of an owner's; None: nobody has set it."""
        stored = self._get(layout.cursor_key(name, owner))
        return None if stored is None else msgspec.json.decode(stored, type=Cursor)

    def keys(self) -> list[Key]:
        """Every API key, also those that have ended."""
        return [msgspec.json.decode(value, type=Key) for _, value in self._scan(b"key:")]

    def removals(self) -> list[ChangeRemoval]:
        """The last removals of changes, oldest first."""
        stored = self._get(layout.REMOVALS)
        return [] if stored is None else msgspec.json.decode(stored, type=list[ChangeRemoval])

    def before_time(self, moment: int, *, start: int = 0) -> int:
        """A sequence such that everything below it was captured before `moment` (µs).

        `start` is what it was for an earlier moment: a large log has millions of marks.
        """
        before = max(self._first, start)
        for key, mark in self._marks(start):
            if mark.captured_at >= moment:
                break
            before = key + 1
        return before

    def beyond_size(self, max_bytes: int) -> int:
        """The lowest marked sequence such that what follows it is at most `max_bytes`."""
        surplus = self._number(layout.BYTES, 0) - max_bytes
        before = self._first
        for key, mark in self._marks():
            if mark.total_bytes >= surplus > 0:
                return key + 1
            before = key + 1
        return before if surplus > 0 else self._first

    def _span(self, after: int, limit: int, upto: int | None) -> tuple[int, int]:
        """The first and the last sequence of what is there and asked for."""
        start, latest = max(after + 1, self._first), self._latest
        return start, min(latest if upto is None else min(upto, latest), start + limit - 1)

    def _runs(self, start: int, end: int) -> Iterator[_Run]:
        """What holds these sequences: the first and the last block may reach beyond them."""
        if end < start:
            return
        reached = start - 1
        # An iterator keeps its bound alive only as long as the options live.
        bounds = ReadOptions()
        bounds.set_iterate_upper_bound(layout.change_key(end + 1))
        for _ in range(2):
            with reading(self.path):
                if (recent := self._recent_over(reached + 1)) is not None:
                    reached = recent[0] + recent[1].count - 1
                    yield _Run(recent[0], reached, recent[1])
                if reached < end:
                    wanted = layout.change_key(reached + 1)
                    items = cast(
                        "Iterator[tuple[bytes, bytes]]",
                        iter(self._db.items(from_key=wanted, read_opt=bounds)),
                    )
                    following = next(items, None)
                    if following is None or following[0] != wanted:
                        for begun, block in self._block_over(reached + 1):
                            first = layout.sequence_of(begun)
                            reached = first + block.count - 1
                            yield _Run(first, reached, block)
                    # What follows a hole is for nobody: it would look as if the hole was trimmed.
                    if following and following[0] == layout.change_key(reached + 1):
                        for run in self._gathered(chain((following,), items)):
                            reached = run.last
                            yield run
            # It ends without an error where a block of a file cannot be read, too.
            if reached >= end:
                return
            self._open_again()  # the writer may have moved it to another file
            if self._first > end or self._first > reached + 1 > start:
                return  # it was trimmed meanwhile; what follows is another piece
            reached = max(reached, self._first - 1)
        raise self._unreadable(reached + 1)

    def _gathered(self, items: Iterator[tuple[bytes, bytes]]) -> Iterator[_Run]:
        """Values as they come from RocksDB, in runs."""
        first = last = b""
        size, records = 0, list[bytes]()
        for key, value in items:
            if value[0] == MARK:
                block, begin = self._block(key, value), layout.sequence_of(key)
                if records:  # up to the block, so that one who reads the run sees what it lacks
                    yield _Run(layout.sequence_of(first), begin - 1, records)
                    size, records = 0, []
                yield _Run(begin, begin + block.count - 1, block)
                continue
            if not records:
                first = key
            last = key
            records.append(value)
            size += len(value)
            if size >= _PIECE_BYTES:
                yield _Run(layout.sequence_of(first), layout.sequence_of(last), records)
                size, records = 0, []
        if records:
            yield _Run(layout.sequence_of(first), layout.sequence_of(last), records)

    def _holding(self, sequence: int) -> tuple[int, bytes | RowBlock] | None:
        """The value that holds a sequence, and its own first one."""
        if (recent := self._recent_over(sequence)) is not None:
            return recent
        key = layout.change_key(sequence)
        value: bytes | None = self._db.get(key)
        if value is not None:
            return sequence, self._block(key, value) if value[0] == MARK else value
        return next(((layout.sequence_of(k), v) for k, v in self._block_over(sequence)), None)

    def _readable(self, sequence: int) -> tuple[int, bytes | RowBlock] | None:
        """The same; None also where RocksDB cannot read it."""
        try:
            with reading(self.path):
                return self._holding(sequence)
        except LogDamaged:
            return None

    def _unreadable(self, first: int) -> LogDamaged:
        """What to report where a change that is there cannot be read; it is noted for `/health`."""
        reason = ""
        try:
            with reading(self.path):
                self._db.get(layout.change_key(first))  # raises what RocksDB says
        except LogDamaged as error:
            reason = f"; {str(error).partition('; ')[2]}"
        last = self._damaged_upto(first)
        what = f"changes {first} to {last} of the log in {self.path} cannot be read{reason}"
        return self._note_damage(what, last)

    def _damaged_upto(self, first: int) -> int:
        """The last change, in a row from a first one, that cannot be read."""
        low, step = first, 1
        while (there := low + step) <= self._latest and self._readable(there) is None:
            low, step = there, step * 2
        high = min(there, self._latest + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._readable(middle) is None else (low, middle)
        return low

    def _recent_over(self, sequence: int) -> tuple[int, RowBlock] | None:
        return next((each for each in self._recent if _holds(*each, sequence)), None)

    def _block_over(self, sequence: int) -> Iterator[tuple[bytes, RowBlock]]:
        """The block, if there is one, that holds a sequence which is not its first."""
        items = self._db.items(from_key=layout.change_key(sequence), backwards=True)
        for key, value in cast("Iterator[tuple[bytes, bytes]]", items):
            if value[0] == MARK:
                block = self._block(key, value)
                if _holds(layout.sequence_of(key), block, sequence):
                    yield key, block
            return

    def _block(self, key: bytes, value: bytes) -> RowBlock:
        first, block = layout.sequence_of(key), RowBlock(value)
        # What is not committed may be removed, and its sequences given to others.
        if first + block.count - 1 <= self._latest:
            others = [each for each in self._recent if each[0] != first]
            self._recent = ((first, block), *others[: _BLOCKS_KEPT - 1])
        return block

    def _expect_layout(self) -> None:
        found = self._get(layout.LAYOUT)
        if found is not None and found not in layout.LAYOUTS:
            raise LogError(
                f"the log in {self.path} has layout {found.decode()}, this version of Headrace "
                f"reads layout {' and '.join(each.decode() for each in layout.LAYOUTS)}",
                hint="Run the version of Headrace that wrote it, or a later one.",
            )

    def _expect_state(self) -> None:
        # A follower passes over files that it cannot read: the writer may have removed them. A
        # writer, too, where the list of its files was cut short. The epoch alone is there when the
        # first writer was killed as it began.
        begun = any(self._get(key) is not None for key in (layout.EPOCH, layout.LAYOUT))
        if not begun and any(self.path.glob("*.sst")):
            raise LogDamaged(f"the log in {self.path} is damaged: its state cannot be read")

    def _marks(self, start: int = 0) -> Iterator[tuple[int, layout.Mark]]:
        for key, value in self._scan(b"mark:", layout.mark_key(start)):
            yield int(key[5:]), msgspec.msgpack.decode(value, type=layout.Mark)

    def _scan(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        bounds = ReadOptions()
        bounds.set_iterate_upper_bound(prefix[:-1] + bytes([prefix[-1] + 1]))
        last = start or prefix
        with reading(self.path):
            items = self._state.items(from_key=last, read_opt=bounds)
            for last, value in cast("Iterator[tuple[bytes, bytes]]", items):
                yield last, value
            # The items end without an error where a block cannot be read; an iterator says it.
            iterator = self._state.iter(bounds)
            iterator.seek(last)
            while iterator.valid():
                iterator.next()
            iterator.status()

    def _get(self, key: bytes) -> bytes | None:
        with reading(self.path):
            stored: bytes | None = self._state.get(key)
        return stored

    def _number(self, key: bytes, default: int) -> int:
        stored = self._get(key)
        return default if stored is None else int(stored)


def _follower(folder: Path) -> Rdict:
    """The database of a log that another process may be writing."""
    scratch = tempfile.mkdtemp(prefix="headrace-reader-")
    access = AccessType.secondary(scratch)
    try:
        return Rdict(str(folder), options(), {layout.STATE: options()}, access)
    except Exception as error:
        raise unopened(folder, error) from error
    finally:
        # A follower's own notes: nobody reads them, and a killed process leaves none this way.
        shutil.rmtree(scratch)


class _Manifest(NamedTuple):
    """The file in which RocksDB notes what its files are."""

    name: str  # "": there is none, so no log
    size: int
    inode: int = 0  # a copy that was put back may go on under the same names

    def follows(self, other: _Manifest) -> bool:
        """Whether it is the same file, perhaps longer."""
        return (self.name, self.inode) == (other.name, other.inode)


def _manifest(folder: Path) -> _Manifest:
    name, size, inode = "", 0, 0
    # The second may have just been replaced; a name that is none is for RocksDB to report.
    with suppress(FileNotFoundError, ValueError):
        name = (folder / "CURRENT").read_text(errors="replace").strip()
        found = (folder / name).stat()
        size, inode = found.st_size, found.st_ino
    return _Manifest(name, size, inode)


def _rows(first: int, block: RowBlock, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The rows of a block from the sequence `start` to `end`, as records."""
    rows = range(max(start - first, 0), min(end - first + 1, block.count))
    step = max(1, min(_ROWS, _PIECE_BYTES // block.record_size))
    for begin in rows[::step]:
        yield from enumerate(block.records(begin, min(begin + step, rows.stop)), first + begin)


def _shown(first: int, block: RowBlock, start: int, end: int) -> BlockRows:
    """The rows of a block from the sequence `start` to `end`; some there are."""
    begin = max(start - first, 0)
    return BlockRows(block, first + begin, begin, min(end - first + 1, block.count) - begin)


def _holds(first: int, block: RowBlock, sequence: int) -> bool:
    return first <= sequence < first + block.count


class _Tables(dict[int, Table]):
    """Table versions for decoding, fetched from the log the first time each is met."""

    def __init__(self, reader: LogReader) -> None:
        super().__init__()
        self._reader = reader

    def __missing__(self, version: int) -> Table:
        table = self[version] = self._reader.table(version)
        return table


def options(*, open_files: int = -1) -> Options:
    """RocksDB as an append-only log likes it; -1: all of its files stay open.

    Whoever follows a log must keep them open: the one that writes it removes files.
    """
    opts = Options(raw_mode=True)
    opts.create_if_missing(True)
    opts.create_missing_column_families(True)
    opts.set_keep_log_file_num(2)
    opts.set_write_buffer_size(_WRITE_BUFFER)
    opts.set_max_open_files(open_files)
    return opts
