"""Writing the log: one process appends, in whole transactions."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from rocksdict import (
    BottommostLevelCompaction,
    Checkpoint,
    CompactOptions,
    Rdict,
    ReadOptions,
    WriteBatch,
)

from ..change import record
from ..change.block import MARK, RowBlock, row_count
from ..change.event import Batch, Table
from ..change.record import ChangeRun
from ..change.span import SpanNotes
from ..errors import LogDamaged, LogError, LogFailed
from ..observe import traces
from . import _layout as layout
from ._recovery import open_database
from ._synced import MarkKeeper
from ._wal import WriteAheadLog
from .counts import AppendCounts
from .files import HINT, file_limit, is_exhausted, log_files
from .folder import is_corruption, make_private, reading
from .holding import (
    ChangeRemoval,
    Cursor,
    Holder,
    Holders,
    RemovalReason,
    cursor_holders,
    noted,
    slowest,
)
from .keys import Key
from .lineage import (
    FIRST_GENERATION,
    GENERATIONS_KEPT,
    Ancestor,
    Generation,
    new_generation,
    upcoming,
)
from .reader import LogReader, options

_MARK_CHANGES = 1024
_MARK_MICROSECONDS = 60_000_000
_TOGETHER = 10_000  # changes; what lies so close together is in one file, or nearly


class Trimmed(msgspec.Struct, frozen=True):
    """What a trim did."""

    removed: int
    first_sequence: int
    held_by: str | None = None  # the cursor or sink that kept it from removing more
    losers: tuple[str, ...] = ()  # those that needed what was removed


class Log(LogReader):
    """The log as its one writer sees it."""

    def __init__(self, db: Rdict, path: Path) -> None:
        super().__init__(db, path)
        self._family = db.get_column_family_handle(layout.STATE)
        self._wal = WriteAheadLog(path)
        self._durable = MarkKeeper(path)
        self._turn = threading.Condition()
        self._arrival = threading.Condition()
        self.appended = AppendCounts()
        self._listeners: list[Callable[[], None]] = []
        self._unfinished: str | None = None  # the source whose transaction is not complete yet
        self._failure: Exception | None = None
        self._found()
        self._written = self._latest  # the last sequence on disk, committed or not
        self._bytes = self._number(layout.BYTES, 0)
        self._mark = (self._latest, 0)
        self._notes = SpanNotes(self._latest)

    @classmethod
    def open(cls, path: Path | str) -> Log:
        """Open for writing; a transaction cut short by a crash is removed."""
        folder = Path(path)
        make_private(folder)
        db = open_database(folder, lambda: options(open_files=log_files(file_limit())))
        try:
            with reading(folder):
                return cls(db, folder)
        except LogError:
            db.close()
            raise

    def close(self) -> None:
        """Let go of the files, so that another process may write."""
        del self._family  # it keeps the database open
        self._wal.close()
        self._durable.close()
        try:
            super().close()
        except Exception as error:
            # After a failed write RocksDB only repeats the error that was already raised. What a
            # compaction could not read is where it was, and readers report it.
            if self._failure is None and not is_corruption(error):
                raise LogFailed(f"the log in {self.path} could not be closed") from error

    def append(self, source: str, batch: Batch) -> int:
        """Store a batch; when this returns, it survives a crash.

        A batch without `resume` is not complete: it becomes visible with the one that ends its
        transaction. Until then other sources wait. Returns the last committed sequence.
        """
        # What is wrong with the changes of a source is its own error, and not the log's.
        encoded, runs = record.encode_runs(batch.changes)
        now = record.captured_at(encoded[-1]) if encoded else 0
        with self._turn:
            self._turn.wait_for(lambda: self._failure or self._unfinished in (None, source))
            if self._failure:
                raise LogFailed("the log takes no changes since a write failed") from self._failure
            with self._failing():
                self._write(source, encoded, runs, batch.resume, now)
            self.appended.take(source, runs, complete=batch.resume is not None)
        if traces.current is not None:
            traces.current.captured(source, record.transactions(encoded))
        if batch.resume is not None:
            self._announce()
        return self._latest

    def abandon(self, source: str) -> None:
        """Forget the incomplete transaction of a source that has failed."""
        with self._turn:
            if self._unfinished != source or self._failure:
                return
            with self._failing():
                self._remove_uncommitted()
            self.appended.abandon()
            self._unfinished = None
            self._turn.notify_all()

    def register(self, table: Table) -> Table:
        """The same table with the version it has, or now gets, in this log."""
        with self._turn:
            versions = self.tables()
            latest = next((known for known in reversed(versions) if _same_name(known, table)), None)
            if latest and msgspec.structs.replace(latest, version=0) == table:
                return latest
            added = msgspec.structs.replace(table, version=len(versions) + 1)
            self._put(layout.table_key(added.version), msgspec.json.encode(added))
        return added

    def trim(
        self,
        before: int,
        *,
        force: bool = False,
        reason: RemovalReason | None = None,
        holders: Holders | None = None,
    ) -> Trimmed:
        """Remove changes with a sequence below `before`, but none that a holder still needs.

        Without `holders` these are the named cursors.
        """
        with self._turn:
            before = min(before, self._latest + 1)
            known = (holders or self._cursor_holders)()
            least, held_by = slowest(known), None
            if least and not force and least.sequence + 1 < before:
                before, held_by = least.sequence + 1, least.name
            if before <= self._first:
                return Trimmed(0, self._first, held_by)
            removed = before - self._first
            losers = tuple(sorted(each.name for each in known if each.sequence + 1 < before))
            reason = reason or (RemovalReason.FORCE if force else RemovalReason.REQUEST)
            removal = ChangeRemoval(
                first_sequence=before, at=time.time_ns() // 1000, reason=reason, losers=losers
            )
            with self._failing():
                self._trim(removal)
            return Trimmed(removed, before, held_by, losers)

    def reclaim(self, upto: int) -> None:
        """Give the disk back what removed changes up to here take; it may take seconds."""
        # RocksDB would do so by itself only when enough new changes push it to.
        # A block that ends in the range may begin before it.
        self._db.compact_range(layout.change_key(0), layout.change_key(upto))

    def rewrite(self, values: Mapping[int, bytes]) -> None:
        """Put other values in the place of stored ones, by the sequence under which each stands.

        They must stand for the same changes. The disk keeps copies of the old ones until `purge`.
        The sizes that retention counts stay those of what was captured.
        """
        batch = WriteBatch(raw_mode=True)
        for sequence, value in values.items():
            batch.put(layout.change_key(sequence), value)
        with self._turn, self._failing():
            self._write_durably(batch)
            self._recent = ()

    def purge(self, sequences: Iterable[int]) -> None:
        """Leave no copy on the disk of what was rewritten here, trimmed, or replaced in the state.

        RocksDB would keep them until a compaction of its own comes by.
        """
        whole = CompactOptions()
        whole.set_bottommost_level_compaction(BottommostLevelCompaction.force())
        with self._turn, self._failing():
            # A write-ahead log goes when the tables of all families have what it holds.
            self._db.flush()
            self._state.flush()
            self._state.compact_range(b"\x00", b"\xff" * 32, whole)
            self._db.compact_range(layout.change_key(0), layout.change_key(self._first), whole)
            for first, last in _neighbours(sorted(set(sequences))):
                self._db.compact_range(layout.change_key(first), layout.change_key(last), whole)

    def replaced_copies(self, sequences: Iterable[int]) -> list[int]:
        """Those of these sequences of which the disk may have an older value, or a trimmed one.

        There is none where exactly one file covers a key, and has as many entries as keys.
        """
        begun = next(
            (run.first for run in self._runs(self._first, min(self._first, self._latest))),
            self._first,
        )
        first = layout.change_key(begun)
        files = [each for each in self._db.live_files() if each["start_key"][:11] == first[:11]]
        found = {self._first} if any(each["start_key"] < first for each in files) else set()
        for sequence in sequences:
            key = layout.change_key(sequence)
            over = [each for each in files if each["start_key"] <= key <= each["end_key"]]
            if len(over) != 1 or not self._is_plain(over[0]):
                found.add(sequence)
        return sorted(found)

    def _is_plain(self, file: Mapping[str, Any]) -> bool:
        """Whether a file has one value for each key in its range."""
        bounds = ReadOptions()
        bounds.set_iterate_upper_bound(file["end_key"] + b"\x00")
        keys = sum(1 for _ in self._db.keys(from_key=file["start_key"], read_opt=bounds))
        return not file["num_deletions"] and bool(file["num_entries"] == keys)

    def _cursor_holders(self) -> list[Holder]:
        return cursor_holders(self.cursors(), self.keys(), now=time.time_ns() // 1000)

    def move_cursor(self, name: str, sequence: int) -> Cursor:
        """Remember that a named consumer on this machine has everything up to `sequence`."""
        return self.put_cursor(Cursor(name, sequence, 0))

    def put_cursor(self, cursor: Cursor) -> Cursor:
        """Keep a cursor as it is now; returns it with the time. Durable when this returns."""
        name, sequence = cursor.name, cursor.sequence
        if not 0 <= sequence <= self._latest:
            raise LogError(f"cursor {name!r}: sequence {sequence} is not in 0..{self._latest}")
        kept = msgspec.structs.replace(cursor, updated_at=time.time_ns() // 1000)
        self._put(layout.cursor_key(*cursor.id), msgspec.json.encode(kept))
        return kept

    def put_key(self, key: Key) -> None:
        """Keep an API key, or what has become of it."""
        self._put(layout.api_key(key.id), msgspec.json.encode(key))

    def drop_cursor(self, name: str, owner: str | None = None) -> None:
        """Forget a named consumer: it no longer holds back trimming."""
        batch = WriteBatch(raw_mode=True)
        batch.delete(layout.cursor_key(name, owner), self._family)
        with self._turn, self._failing():
            self._write_durably(batch)

    def checkpoint(self, folder: Path) -> None:
        """Write all that is in the log now into a new folder, by links where the disk allows."""
        with self._turn, reading(self.path):
            Checkpoint(self._db).create_checkpoint(str(folder))

    def become_copy(self) -> Ancestor:
        """Take a new epoch: from here on, sequences are not those of the log it was copied from.

        Returns what it was.
        """
        was, epoch = Ancestor(self.epoch, self._latest), uuid.uuid4().hex
        batch = WriteBatch(raw_mode=True)
        batch.put(layout.EPOCH, epoch.encode(), self._family)
        with self._turn, self._failing():
            self._start = new_generation()
            lineage = self._begun(batch, epoch)
            self._write_durably(batch)
            self._lineage = lineage
        return was

    @property
    def lineage(self) -> list[Generation]:
        """The generations of this log, oldest first."""
        return self._lineage

    @property
    def generation(self) -> str:
        """What a reader notes as its generation until this writer ends."""
        latest, last = self._latest, self._lineage[-1].id  # in this order: see `_write`
        return last if last == self._start else upcoming(self._start, latest, last)

    def _begun(self, batch: WriteBatch, epoch: str) -> list[Generation]:
        """The lineage with the generation of this start, which the batch begins."""
        begun = Generation(epoch, self._start, self._latest + 1)
        lineage = [*self._lineage, begun][-GENERATIONS_KEPT:]
        batch.put(layout.LINEAGE, msgspec.json.encode(lineage), self._family)
        return lineage

    def refresh(self, upto: int = 0) -> None:
        """The writer always sees everything."""

    def _open_again(self) -> None:
        """As above."""

    def wait(self, after: int, *, timeout: float) -> bool:
        """Block until there is something after `after`; False when the time is over."""
        with self._arrival:
            return self._arrival.wait_for(lambda: self._latest > after, timeout)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from the writing thread, after every commit."""
        self._listeners.append(listener)

    def _write(
        self,
        source: str,
        encoded: list[bytes],
        runs: Sequence[ChangeRun],
        resume: bytes | None,
        now: int,
    ) -> None:
        records = WriteBatch(raw_mode=True)
        put = records.put
        sequence, blocks = self._written, 0
        for each in encoded:
            put(b"changefeed:%020d" % (sequence + 1), each)
            if each[0] == MARK:
                sequence += row_count(each)
                blocks += 1
            else:
                sequence += 1
        if blocks:
            records.put(layout.LAYOUT, layout.WITH_BLOCKS, self._family)
        if blocks < len(encoded):
            # Where blocks are among them, the runs do not say which they are.
            self._notes.take(() if blocks else runs, sequence)
        else:
            for each in encoded:
                self._notes.take_block(RowBlock(each))
        self._bytes += sum(map(len, encoded))
        if encoded:
            self._note_mark(records, sequence, now)
        if resume is None:
            self._db.write(records)
            self._unfinished = source
            self._written = sequence
            return
        records.put(layout.SEQUENCE, b"%d" % sequence, self._family)
        records.put(layout.BYTES, b"%d" % self._bytes, self._family)
        records.put(layout.source_key(source), resume, self._family)
        lineage = self._lineage
        if sequence > self._latest and lineage[-1].id != self._start:
            lineage = self._begun(records, self.epoch)
        self._write_durably(records, sequence)
        self._lineage = lineage  # before `_latest`: no change is seen without its generation
        self._written = self._latest = sequence
        self._unfinished = None
        self._turn.notify_all()

    def _note_mark(self, records: WriteBatch, sequence: int, now: int) -> None:
        marked, at = self._mark
        if sequence - marked >= _MARK_CHANGES or now - at >= _MARK_MICROSECONDS:
            mark = layout.Mark(now, self._bytes, self._notes.cut())
            records.put(layout.mark_key(sequence), msgspec.msgpack.encode(mark), self._family)
            self._mark = (sequence, now)

    def _trim(self, removal: ChangeRemoval) -> None:
        before, removals = removal.first_sequence, noted(self.removals(), removal)
        batch = WriteBatch(raw_mode=True)
        # Of a block, the rows before it are hidden: it goes with its last one.
        over = next(iter(self._block_over(before)), None)
        batch.delete_range(layout.change_key(0), over[0] if over else layout.change_key(before))
        batch.put(layout.FIRST, b"%d" % before, self._family)
        batch.put(layout.TRIMMED, b"%d" % self._bytes_below(before), self._family)
        batch.put(layout.REMOVALS, msgspec.json.encode(removals), self._family)
        batch.delete_range(layout.mark_key(0), layout.mark_key(before - 1), self._family)
        self._first = before  # first: whoever reads meanwhile must not take it for damage
        self._write_durably(batch)

    def _bytes_below(self, before: int) -> int:
        """Bytes of all values ever committed below `before`, trimmed ones included.

        A block counts where its last row does: until then it takes its room.
        """
        start, total = self._first - 1, self._number(layout.TRIMMED, 0)
        for sequence, mark in self._marks():
            if start <= sequence < before:
                start, total = sequence, mark.total_bytes
        with suppress(LogDamaged):  # what cannot be read counts from the next mark on
            for run in self._runs(start + 1, before - 1):
                if not isinstance(run.content, RowBlock):
                    total += sum(map(len, run.content))
                elif run.last < before:
                    total += len(run.content.value)
        return total

    def _found(self) -> None:
        """Begin a new log, or take up an old one."""
        self._expect_layout()
        self._expect_state()
        if new := self._get(layout.LAYOUT) is None:
            self._put(layout.EPOCH, uuid.uuid4().hex.encode())
            self._put(layout.LAYOUT, layout.RECORDS_ONLY)
        self._first = self._number(layout.FIRST, 1)
        self._latest = self._number(layout.SEQUENCE, 0)
        self._lineage = super().lineage
        self._start = FIRST_GENERATION if new else new_generation()
        self._remove_uncommitted()

    def _remove_uncommitted(self) -> None:
        removal = WriteBatch(raw_mode=True)
        beyond = self._latest + 1
        removal.delete_range(layout.change_key(beyond), layout.change_key(10**20 - 1))
        removal.delete_range(layout.mark_key(beyond), layout.mark_key(10**20 - 1), self._family)
        self._write_durably(removal)
        self._written = self._latest
        self._bytes = self._number(layout.BYTES, 0)
        self._mark = (self._latest, 0)
        self._notes = SpanNotes(self._latest)

    def _write_durably(self, batch: WriteBatch, latest: int | None = None) -> None:
        """`latest` is the last change that the batch commits; None: it commits none."""
        self._db.write(batch)
        writes = self._db.latest_sequence_number()
        self._wal.sync()
        self._durable.take(self._latest if latest is None else latest, writes)

    def _put(self, key: bytes, value: bytes) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.put(key, value, self._family)
        with self._turn, self._failing():
            self._write_durably(batch)

    def _announce(self) -> None:
        with self._arrival:
            self._arrival.notify_all()
        for listener in self._listeners:
            listener()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        # With the turn held. RocksDB refuses everything after a failed write, and so do we: what is
        # on disk is known again only when the log is opened anew.
        try:
            yield
        except Exception as error:
            self._failure = error
            self._turn.notify_all()  # whoever waits for a transaction that will not end
            hint = HINT if is_exhausted(error) else ""
            if is_corruption(error):  # found by a compaction: RocksDB then takes no more
                hint = LogDamaged.hint
                self._note_damage(f"the log in {self.path} is damaged; RocksDB says: {error}")
            raise LogFailed(f"the log in {self.path} could not be written", hint=hint) from error


def _neighbours(sequences: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges with all of these, those together that are not far apart: each is compacted once."""
    first = last = 0
    for sequence in sequences:
        if first and sequence - last > _TOGETHER:
            yield first, last
            first = 0
        first, last = first or sequence, sequence
    if first:
        yield first, last


def _same_name(one: Table, other: Table) -> bool:
    return (one.source, one.schema, one.name) == (other.source, other.schema, other.name)
