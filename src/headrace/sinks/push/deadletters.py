"""Dead letters: a Delta table for each sink, with the event and the reason why it was not accepted.

Tasks write its files, the driver commits them. A row that has dead letters is blocked: its later
events are put behind them, so that a redrive keeps the order of the row.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from ...change.event import Op
from ...change.path import table_path
from ...errors import SinkUnavailable, TableFailed, TableMoved
from ..lake.append import due
from ..lake.delta import KEEP, Delta, Marks
from ..lake.storage import Added, Folder
from .contract import Event
from .delivery import DeadLetterRange, Position
from .spill import Spill

SCHEMA = pa.schema(
    [
        ("epoch", pa.string()),
        ("sequence", pa.int64()),
        ("at", pa.int32()),
        ("id", pa.string()),
        ("row", pa.string()),
        ("op", pa.string()),
        ("source", pa.string()),
        ("schema", pa.string()),
        ("table", pa.string()),
        ("key", pa.string()),
        ("commit_time", pa.timestamp("us", tz="UTC")),
        ("status", pa.string()),  # refused, or waiting behind one that was
        ("reason", pa.string()),
        ("attempts", pa.int32()),
        ("refused_at", pa.timestamp("us", tz="UTC")),
        ("event", pa.string()),
    ]
)
LETTERS = "dead letters"  # what the table keeps
FILE = "letters"
_PLACE = ("epoch", "row", "sequence", "at")
_TABLE_OPS = frozenset((Op.TRUNCATE.value, Op.SCHEMA.value))
_BUFFERED_BYTES = 8_000_000
_SEQUENCE, _STATUS = SCHEMA.get_field_index("sequence"), SCHEMA.get_field_index("status")
_VACUUM_SECONDS = 3600.0
_VACUUM_HOURS = 24.0  # for so long, versions of the table can still be read
_IN_ORDER = [(name, "ascending") for name in ("epoch", "sequence", "at")]
EARLIER = DeadLetterRange((0, -1), (0, -1))  # the range of a row's letters of an earlier log

REFUSED, WAITING = "refused", "waiting"

_to_msgpack = msgspec.msgpack.Encoder().encode
_ranges = msgspec.msgpack.Decoder(dict[str, dict[str, DeadLetterRange]])


class DeadLetterBuffer:
    """Dead letters of one task, written to files when there are enough."""

    def __init__(self, folder: Folder, epoch: str = "") -> None:
        self.epoch = epoch
        self.added: list[Added] = []
        self.error: SinkUnavailable | None = None  # why the rest cannot be written
        self._folder = folder
        self._rows: list[tuple[Any, ...]] = []
        self._size = 0

    def add(self, event: Event, status: str, reason: str, attempts: int) -> None:
        """Keep an event; it is in a file after `flush`."""
        now = time.time_ns() // 1000
        head = (self.epoch, *event[:-1])
        payload = None if event.payload is None else event.payload.decode()
        self._rows.append((*head, status, reason or None, attempts, now, payload))
        self._size += len(event.payload or b"") + 500
        if self._size >= _BUFFERED_BYTES:
            self.flush()

    @property
    def full(self) -> bool:
        """Whether nothing more can be kept, because writing has failed."""
        return self.error is not None

    @property
    def unsaved(self) -> list[tuple[int, int, str]]:
        """What is in no file yet: sequence, place and status of each."""
        return [(row[_SEQUENCE], row[_SEQUENCE + 1], row[_STATUS]) for row in self._rows]

    def flush(self) -> None:
        """Write the rest to a file; it stays in memory if that fails, and `error` says why."""
        if not self._rows or self.full:
            return  # a buffer is for one round: what fails is tried again in the next
        try:
            self._write()
        except SinkUnavailable as error:
            # Not raised: the task must report what was accepted, or it would be sent again.
            self.error = error

    def _write(self) -> None:
        columns = zip(*self._rows, strict=True)
        arrays = [
            pa.array(values, type=kind) for values, kind in zip(columns, SCHEMA.types, strict=True)
        ]
        self.added.append(self._folder.write(pa.table(arrays, schema=SCHEMA), FILE, {}))
        self._rows, self._size = [], 0


class DeadLetters:
    """The table, as the driver sees it."""

    def __init__(self, folder: Folder, writer: str, *, adopt: bool) -> None:
        self._folder = folder
        self._writer = writer
        self._delta: Delta | None = None
        self._stale = False  # a commit has failed, and may have been done all the same
        self._blocked: dict[str, dict[str, DeadLetterRange]] = {}  # by log and row
        self._packed: Spill | None = None
        self._vacuum_due = time.monotonic()
        self._open(adopt=adopt)

    @property
    def folder(self) -> Folder:
        """Where the table lies."""
        return self._folder

    @property
    def files(self) -> list[str]:
        """The files of the table."""
        return list(self._delta.files) if self._delta else []

    @property
    def count(self) -> int:
        """How many dead letters there are."""
        return sum(part.rows for part in self._delta.files.values()) if self._delta else 0

    @property
    def rows(self) -> int:
        """How many rows have dead letters."""
        return len(set().union(*self._blocked.values()))

    def count_of(self, rows: Collection[str]) -> int:
        """How many dead letters some rows have."""
        if not rows:
            return 0
        return sum(row in rows for file in self.files for row in _row_names(self._folder, file))

    def has_before(self, table: str, place: tuple[str, Position], ranks: Mapping[str, int]) -> bool:
        """Whether rows of a table (`source|schema.table`) have letters before a place of a log."""
        epoch, position = place
        return any(
            row.startswith(f"{table}:")
            and (span.first < position if log == epoch else ranks.get(log, 0) < ranks[epoch])
            for log, rows in self._blocked.items()
            for row, span in rows.items()
        )

    def blocked(self) -> Spill:
        """The rows that have dead letters, as tasks get them; the same until these change."""
        if self._packed is None:
            self._packed = Spill.of(_to_msgpack(self._blocked), self._folder)
        return self._packed

    def commit(self, added: Sequence[Added], removed: Sequence[str] = (), *, marks: Marks) -> None:
        """Add and remove files in one commit; may be called again after it has failed."""
        if not added and not removed:
            return
        if self._stale:
            self._open(adopt=False)  # it may have been done, and only the reply was lost
        self._stale = True
        if self._delta is None:
            properties = {KEEP: LETTERS}
            self._delta = Delta.create(self._folder, SCHEMA, properties, writer=self._writer)
        there = self._delta.files
        fresh = [file for file in added if file.path not in there]
        gone = [file for file in removed if file in there]
        if fresh or gone:
            try:
                self._delta.commit(fresh, gone, marks=marks)
            except TableMoved as error:
                raise SinkUnavailable(str(error)) from error  # which is tried again in place
        if removed:
            self._reload()
        else:
            self._load([file.path for file in added])
        self._stale = False

    def _open(self, *, adopt: bool) -> None:
        delta = Delta.open(self._folder, self._writer, adopt=adopt)
        if delta is not None and any(file.vector for file in delta.files.values()):
            raise TableFailed(
                f"dead letters in {self._folder.uri} were deleted by deletion vectors, which are "
                "not read here",
                hint="Run REORG TABLE … APPLY (PURGE) with the tool that deleted them.",
            )
        self._delta = delta
        self._reload()

    def _reload(self) -> None:
        self._blocked = {}
        self._load(self.files)

    def compact(self) -> None:
        """Compact small files, and now and then vacuum the table."""
        if self._delta is None:
            return
        for parts in due(list(self._delta.files.values())):
            files = [self._folder.read(part.path) for part in parts]
            joined = pa.concat_tables(files).sort_by(_IN_ORDER)
            added = self._folder.write(joined, FILE, {})
            self._delta.commit([added], [part.path for part in parts])
        if time.monotonic() >= self._vacuum_due:
            self._vacuum_due = time.monotonic() + _VACUUM_SECONDS
            self._forget()  # or what tasks are to read might be deleted as old
            self._delta.vacuum(_VACUUM_HOURS)

    def _forget(self) -> None:
        if self._packed is not None:
            self._packed.remove(self._folder)
        self._packed = None

    def _load(self, paths: Iterable[str]) -> None:
        self._forget()
        for path in paths:
            letters = self._folder.read(path, list(_PLACE))
            for epoch, row, sequence, at in _rows(letters, _PLACE):
                rows = self._blocked.setdefault(epoch, {})
                position = sequence, at
                first, last = rows.get(row, (position, position))
                rows[row] = DeadLetterRange(min(first, position), max(last, position))


def counted(folder: Folder) -> tuple[int, int]:
    """How many dead letters a folder has, and of how many rows."""
    found = rows_of(folder)
    return sum(found.values()), len(found)


def rows_of(folder: Folder) -> dict[str, int]:
    """The rows that have dead letters, each with how many; whichever process writes them."""
    return dict(Counter(row for name in files_of(folder) for row in _row_names(folder, name)))


def files_of(folder: Folder) -> list[str]:
    """The files of the table, whichever process writes it."""
    uri, options = folder.uri, dict(folder.options)
    try:
        if not DeltaTable.is_deltatable(uri, options):
            return []
        files = DeltaTable(uri, storage_options=options).file_uris()
    except (DeltaError, OSError) as error:
        raise folder.failure("the dead letters cannot be read", error) from error
    return [unquote(file).removeprefix(uri).lstrip("/") for file in files]


def _row_names(folder: Folder, file: str) -> list[str]:
    names: list[str] = folder.read(file, ["row"])["row"].to_pylist()
    return names


def blocked_rows(packed: bytes, epoch: str) -> dict[str, DeadLetterRange]:
    """The rows that are blocked, with the positions of their letters in a log."""
    known = _ranges.decode(packed) if packed else {}
    found = known.pop(epoch, {})
    for row in set().union(*known.values()):
        # Letters of another log come before all of this one.
        found[row] = DeadLetterRange(EARLIER.first, found.get(row, EARLIER).last)
    return found


def are_of_tables(letters: pa.Table) -> list[bool]:
    """Which letters are of a whole table: a TRUNCATE or a SCHEMA, named as all of its rows."""
    columns = _rows(letters, ("op", "row", "source", "schema", "table"))
    return [
        op in _TABLE_OPS and row == f"{source}|{table_path(schema, table)}"
        for op, row, source, schema, table in columns
    ]


def _rows(letters: pa.Table, names: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(letters[name].to_pylist() for name in names), strict=True)


def events_of(letters: pa.Table) -> list[tuple[str, Event]]:
    """The events that dead letters keep, each with its log."""
    names = [name for name in Event._fields if name != "payload"]
    times = letters["commit_time"].cast(pa.int64())
    columns = [times if name == "commit_time" else letters[name] for name in names]
    payloads = letters["event"].cast(pa.binary())
    rows = zip(*(column.to_pylist() for column in (*columns, payloads)), strict=True)
    return list(zip(letters["epoch"].to_pylist(), map(Event._make, rows), strict=True))


def ranks(folder: Folder, files: Iterable[str], followed: Sequence[str]) -> dict[str, int]:
    """The logs that dead letters come from, in the order in which they were followed."""
    firsts: dict[str, tuple[int, int]] = {}
    for file in files:
        letters = folder.read(file, ["epoch", "refused_at"])
        times = letters["refused_at"].cast(pa.int64()).to_pylist()
        for epoch, at in zip(letters["epoch"].to_pylist(), times, strict=True):
            # One that nothing was settled of yet is the latest. The times decide only among
            # several of these: they change when letters are refused again.
            known = followed.index(epoch) if epoch in followed else len(followed)
            firsts[epoch] = min((known, at), firsts.get(epoch, (known, at)))
    return {epoch: rank for rank, epoch in enumerate(sorted(firsts, key=firsts.__getitem__))}
