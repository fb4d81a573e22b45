"""What the log remembers of a MySQL or MariaDB source between two runs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache

import msgspec

from ...change.event import Reference
from .. import CopyProgress, Phase, Status
from ..redact import ColumnMask, ColumnRules
from .decode.columns import WITHHELD, DeclaredColumn
from .decode.path import TablePath

BinlogOffset = tuple[int, int]
"""A file's number and a position in it: these order the events of a binary log."""


class DeclaredTable(msgspec.Struct, frozen=True, array_like=True):
    """A table as the catalogue showed it."""

    columns: tuple[DeclaredColumn, ...]
    key: tuple[str, ...] = ()  # the primary key's columns
    references: tuple[Reference, ...] = ()
    transactional: bool = True  # whether a snapshot shows its rows
    read_at: BinlogOffset = (
        0,
        0,
    )  # the binary log ended here, or earlier, when the catalogue was read
    hidden: int = 0  # columns behind these that an index needs and only the binary log shows
    versioned: bool = False  # WITH SYSTEM VERSIONING: the binary log shows its history as rows
    # The columns at the stream's place, where the catalogue is of a later one; (): it is not.
    followed: tuple[DeclaredColumn, ...] = ()
    last_number: int = 0  # that a column ever had
    # Columns and key are those of the stream's place; False: the catalogue may be of a later one.
    exact: bool = False
    charset: str = ""  # of columns whose definition has none; "": not known
    keyless: bool = False  # it was created without a key, whatever the catalogue shows

    @property
    def there(self) -> tuple[DeclaredColumn, ...]:
        """The columns at the stream's place, as far as they are known."""
        return self.followed or self.columns

    @property
    def names(self) -> frozenset[str]:
        """Their names, in small letters."""
        return frozenset(column.name.lower() for column in self.there)

    def like(self, other: DeclaredTable) -> bool:
        """Whether both have the same columns and key."""
        pairs = zip(self.columns, other.columns, strict=False)
        same = len(self.columns) == len(other.columns) and all(a.like(b) for a, b in pairs)
        return same and self.key == other.key

    def numbered(self, known: DeclaredTable | None) -> DeclaredTable:
        """The same with the numbers that its columns have by their names; new ones get others."""
        there = {} if known is None else {each.name.lower(): each for each in known.there}
        last = 0 if known is None else known.last_number
        columns = []
        for column in self.columns:
            was = there.get(column.name.lower())
            if was is None or not was.number:
                last += 1
                columns.append(msgspec.structs.replace(column, number=last))
            else:
                given = {"number": was.number, "initial_default": was.initial_default}
                columns.append(msgspec.structs.replace(column, **given))
        return msgspec.structs.replace(self, columns=tuple(columns), last_number=last)


KeyBound = tuple[str, ...]
"""A value for each column of a key; of strings, the hexadecimal digits of their bytes."""


class PrimaryKeyRange(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a table, by their keys."""

    after: KeyBound | None = None  # the first key comes behind it; None: there is none before
    upto: KeyBound | None = None  # the last key; None: there is none behind


class MysqlTableSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """How far the snapshot of one table is."""

    begun: bool = False  # from then on its changes count; what happened before is in the snapshot
    done: bool = False
    rows: int = 0
    estimated_rows: int = -1
    replaces: bool = False  # rows of an earlier snapshot must be forgotten first
    # What is not read yet of a snapshot that has begun: what happens to it is not captured.
    left: tuple[PrimaryKeyRange, ...] = ()


class MysqlResume(msgspec.Struct, frozen=True):
    """Which server, how far, and which snapshots are left."""

    server: str  # its identity
    origin: str  # the identity that its tables carry
    file: str
    position: int  # end of the last transaction that is in the log
    born: int  # when the file was begun, by the server's clock; 0: not known
    gtids: str  # what has been executed up to there
    snapshots: dict[TablePath, MysqlTableSnapshot]
    errored: dict[TablePath, str]  # the reason
    versions: dict[TablePath, int]  # the version of the last SCHEMA change
    catalogue: bytes  # the tables' columns at `position`, packed
    former: tuple[TablePath, ...] = ()  # captured before and not now: their rows are in the log
    pending_ddl: dict[TablePath, list[dict[str, str]]] = {}  # DDL whose columns the next row shows
    # XA transactions that are prepared and not decided: where they begin.
    prepared: dict[str, tuple[str, int]] = {}
    # It was read on another server first. The files of this one have transactions that are in the
    # log behind others that are not, so the server leaves them out by their GTIDs.
    moved: bool = False

    def encode(self) -> bytes:
        """As the log stores it."""
        return ResumeEncoder().encode(self)

    @property
    def to_snapshot(self) -> list[TablePath]:
        """Tables that have rows left to read."""
        return [path for path, progress in self.snapshots.items() if not progress.done]

    @property
    def offset(self) -> BinlogOffset:
        """What orders its position among others of the server."""
        return file_number(self.file), self.position

    def status(self, source: str, phase: Phase) -> Status:
        """How the source is doing, as far as the resume shows."""
        return Status(
            source=source,
            phase=phase,
            position=f"{self.file}:{self.position}",
            copies=tuple(
                CopyProgress(str(path), progress.rows, progress.estimated_rows, progress.done)
                for path, progress in self.snapshots.items()
            ),
            errored={str(path): why for path, why in self.errored.items()},
            former=tuple(dict.fromkeys(map(str, self.former))),
        )

    def with_snapshot(self, path: TablePath, progress: MysqlTableSnapshot) -> MysqlResume:
        """The same with another state of one table's snapshot."""
        return msgspec.structs.replace(self, snapshots=self.snapshots | {path: progress})

    def with_error(self, path: TablePath, reason: str) -> MysqlResume:
        """The same with one table in the errored state."""
        return msgspec.structs.replace(self, errored=self.errored | {path: reason})

    def without_values(self, rules: ColumnRules) -> MysqlResume:
        """The same without what these rules keep out of the log: masked keys, defaults, DDL text.

        A snapshot whose place is such a key begins anew when it is interrupted.
        """
        snapshots = {
            path: MysqlTableSnapshot(replaces=True, estimated_rows=each.estimated_rows)
            for path, each in self.snapshots.items()
            if any(part != PrimaryKeyRange() for part in each.left)
            and rules.masks_key(path.schema, path.table, _keys(self.catalogue)[path])
        }
        pending = {
            path: [{"ddl_type": ddl["ddl_type"]} for ddl in several]
            for path, several in self.pending_ddl.items()
        }
        return msgspec.structs.replace(
            self,
            snapshots=self.snapshots | snapshots if snapshots else self.snapshots,
            pending_ddl=pending or self.pending_ddl,
            catalogue=_without_defaults(self.catalogue, rules.exclude, tuple(rules.mask.items())),
        )

    def declared(self) -> dict[TablePath, DeclaredTable]:
        """The tables' columns at its position."""
        return unpacked(self.catalogue)


class MysqlRestart(msgspec.Struct, frozen=True, array_like=True, tag="restart"):
    """Start anew; the tables named were captured before."""

    tables: tuple[TablePath, ...]

    def encode(self) -> bytes:
        """As the log stores it."""
        return msgspec.msgpack.encode(self)


class _Stored(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """A resume as the log stores it."""

    server: str
    origin: str
    file: str
    position: int
    born: int
    gtids: str
    tables: bytes
    catalogue: bytes
    prepared: dict[str, tuple[str, int]]
    moved: bool


class _Tables(msgspec.Struct, frozen=True, array_like=True):
    """The part of a resume about tables, which seldom changes, beside their columns."""

    snapshots: dict[TablePath, MysqlTableSnapshot]
    errored: dict[TablePath, str]
    versions: dict[TablePath, int]
    former: tuple[TablePath, ...]
    pending_ddl: dict[TablePath, list[dict[str, str]]]

    @classmethod
    def of(cls, resume: MysqlResume) -> _Tables:
        """Those of a resume."""
        return cls(
            resume.snapshots, resume.errored, resume.versions, resume.former, resume.pending_ddl
        )

    def same_as(self, other: _Tables) -> bool:
        """Whether these are the very same values, which is a quick test also for many tables."""
        ours, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return all(one is another for one, another in zip(ours, theirs, strict=True))


class ResumeEncoder:
    """Resumes, one after the other, as the log stores them; packs only what has changed."""

    def __init__(self) -> None:
        self._tables: _Tables | None = None
        self._packed = b""

    def encode(self, resume: MysqlResume) -> bytes:
        """One of them."""
        tables = _Tables.of(resume)
        if self._tables is None or not tables.same_as(self._tables):
            self._tables, self._packed = tables, _compressed(tables)
        return msgspec.msgpack.encode(
            _Stored(
                resume.server,
                resume.origin,
                resume.file,
                resume.position,
                resume.born,
                resume.gtids,
                self._packed,
                resume.catalogue,
                resume.prepared,
                resume.moved,
            )
        )


def decode(stored: bytes) -> MysqlResume | MysqlRestart:
    """What `encode` wrote."""
    found = msgspec.msgpack.decode(stored, type=_Stored | MysqlRestart)
    if isinstance(found, MysqlRestart):
        return found
    tables = msgspec.msgpack.decode(zlib.decompress(found.tables), type=_Tables)
    return MysqlResume(
        found.server,
        found.origin,
        found.file,
        found.position,
        found.born,
        found.gtids,
        tables.snapshots,
        tables.errored,
        tables.versions,
        found.catalogue,
        tables.former,
        tables.pending_ddl,
        found.prepared,
        found.moved,
    )


def snapshot_again(
    resume: MysqlResume | MysqlRestart, tables: set[str]
) -> MysqlResume | MysqlRestart:
    """Take new snapshots of these tables, which are database.table; no tables: start anew."""
    if isinstance(resume, MysqlRestart):
        return resume
    if not tables:
        return MysqlRestart((*resume.snapshots, *resume.former))
    snapshots = {
        path: MysqlTableSnapshot(replaces=True) if str(path) in tables else progress
        for path, progress in resume.snapshots.items()
    }
    errored = {path: why for path, why in resume.errored.items() if str(path) not in tables}
    return msgspec.structs.replace(resume, snapshots=snapshots, errored=errored)


def packed(tables: Mapping[TablePath, DeclaredTable]) -> bytes:
    """Columns of many tables, small enough to be stored with every commit."""
    return _compressed(tables)


def unpacked(data: bytes) -> dict[TablePath, DeclaredTable]:
    """What `packed` wrote."""
    return _tables.decode(zlib.decompress(data))


@lru_cache(maxsize=8)
def _unpacked_once(catalogue: bytes) -> Mapping[TablePath, DeclaredTable]:
    return unpacked(catalogue)


@lru_cache(maxsize=8)
def _keys(catalogue: bytes) -> Mapping[TablePath, tuple[str, ...]]:
    """The key of each table; every batch asks, and the catalogue seldom changes."""
    return {path: table.key for path, table in _unpacked_once(catalogue).items()}


@lru_cache(maxsize=8)
def _without_defaults(
    catalogue: bytes, exclude: tuple[str, ...], mask: tuple[tuple[str, ColumnMask], ...]
) -> bytes:
    """The catalogue without default values of columns that are not stored as they are."""
    rules = ColumnRules(exclude, dict(mask))

    def stripped(path: TablePath, columns: tuple[DeclaredColumn, ...]) -> Iterator[DeclaredColumn]:
        for column in columns:
            hides = rules.hides(path.schema, path.table, column.name)
            extra = f"{column.extra} {WITHHELD}" if column.default is not None else column.extra
            none = {"default": None, "initial_default": "", "extra": extra}
            yield msgspec.structs.replace(column, **none) if hides else column

    return packed(
        {
            path: msgspec.structs.replace(
                table,
                columns=tuple(stripped(path, table.columns)),
                followed=tuple(stripped(path, table.followed)),
            )
            for path, table in _unpacked_once(catalogue).items()
        }
    )


def _compressed(value: object) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(value), level=1)


_tables = msgspec.msgpack.Decoder(dict[TablePath, DeclaredTable])


def file_number(file: str) -> int:
    """The number of mysql-bin.000042; files are ordered by it, not by their names."""
    number = file.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0
