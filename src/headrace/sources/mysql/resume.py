"""What the log remembers of a MySQL or MariaDB source between two runs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec

from ...change.event import Reference
from .. import CopyProgress, Phase, Status
from .decode.columns import DeclaredColumn
from .decode.path import Path

Place = tuple[int, int]
"""A file's number and a position in it: what orders places in a binary log."""


class Declared(msgspec.Struct, frozen=True, array_like=True):
    """A table as the catalogue showed it."""

    columns: tuple[DeclaredColumn, ...]
    key: tuple[str, ...] = ()  # the primary key's columns
    references: tuple[Reference, ...] = ()
    transactional: bool = True  # whether a snapshot shows its rows
    read_at: Place = (0, 0)  # the binary log ended here, or earlier, when the catalogue was read
    hidden: int = 0  # columns behind these that an index needs and only the binary log shows
    versioned: bool = False  # WITH SYSTEM VERSIONING: the binary log tells its history as rows


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """The copy of one table's rows."""

    begun: bool = False  # from then on its changes count; what happened before is in the copy
    done: bool = False
    rows: int = 0
    estimated_rows: int = -1
    again: bool = False  # whether rows of an earlier copy must be forgotten first


class Resume(msgspec.Struct, frozen=True):
    """Which server, how far, and what is left to copy."""

    server: str  # its identity
    origin: str  # the identity that its tables carry
    file: str
    position: int  # end of the last transaction that is in the log
    born: int  # when the file was begun, by the server's clock; 0: not known
    gtids: str  # what has been executed up to there
    copies: dict[Path, Copy]
    errored: dict[Path, str]  # the reason
    versions: dict[Path, int]  # the version that the last SCHEMA change told
    catalogue: bytes  # the tables' columns at `position`, packed
    former: tuple[Path, ...] = ()  # captured before and not now: their rows are in the log
    told_later: dict[Path, list[dict[str, str]]] = {}  # DDL whose columns the next row shows
    # XA transactions that are prepared and not decided: where they begin.
    prepared: dict[str, tuple[str, int]] = {}
    # It was read on another server first. The files of this one have transactions that are in the
    # log behind others that are not, so the server leaves them out by their GTIDs.
    moved: bool = False

    def encode(self) -> bytes:
        """As the log stores it."""
        return Encoder().encode(self)

    @property
    def to_copy(self) -> list[Path]:
        """Tables that have rows left to read."""
        return [path for path, copy in self.copies.items() if not copy.done]

    @property
    def place(self) -> Place:
        """What orders its position among others of the server."""
        return file_number(self.file), self.position

    def status(self, source: str, phase: Phase) -> Status:
        """As far as it tells how the source is doing."""
        return Status(
            source=source,
            phase=phase,
            position=f"{self.file}:{self.position}",
            copies=tuple(
                CopyProgress(str(path), copy.rows, copy.estimated_rows, copy.done)
                for path, copy in self.copies.items()
            ),
            errored={str(path): why for path, why in self.errored.items()},
        )

    def with_copy(self, path: Path, copy: Copy) -> Resume:
        """The same with another state of one table's copy."""
        return msgspec.structs.replace(self, copies=self.copies | {path: copy})

    def with_error(self, path: Path, reason: str) -> Resume:
        """The same with one table in the errored state."""
        return msgspec.structs.replace(self, errored=self.errored | {path: reason})

    def declared(self) -> dict[Path, Declared]:
        """The tables' columns at its position."""
        return unpacked(self.catalogue)


class Restart(msgspec.Struct, frozen=True, array_like=True, tag="restart"):
    """Start anew; the tables named were captured before."""

    tables: tuple[Path, ...]

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
    """What a resume says of the tables and seldom changes, beside their columns."""

    copies: dict[Path, Copy]
    errored: dict[Path, str]
    versions: dict[Path, int]
    former: tuple[Path, ...]
    told_later: dict[Path, list[dict[str, str]]]

    @classmethod
    def of(cls, resume: Resume) -> _Tables:
        """Those of a resume."""
        return cls(resume.copies, resume.errored, resume.versions, resume.former, resume.told_later)

    def same_as(self, other: _Tables) -> bool:
        """Whether these are the very same values, which is soon asked also of many tables."""
        ours, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return all(one is another for one, another in zip(ours, theirs, strict=True))


class Encoder:
    """Resumes, one after the other, as the log stores them; packs only what has changed."""

    def __init__(self) -> None:
        self._tables: _Tables | None = None
        self._packed = b""

    def encode(self, resume: Resume) -> bytes:
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


def decode(stored: bytes) -> Resume | Restart:
    """What `encode` wrote."""
    found = msgspec.msgpack.decode(stored, type=_Stored | Restart)
    if isinstance(found, Restart):
        return found
    tables = msgspec.msgpack.decode(zlib.decompress(found.tables), type=_Tables)
    return Resume(
        found.server,
        found.origin,
        found.file,
        found.position,
        found.born,
        found.gtids,
        tables.copies,
        tables.errored,
        tables.versions,
        found.catalogue,
        tables.former,
        tables.told_later,
        found.prepared,
        found.moved,
    )


def copied_again(resume: Resume | Restart, tables: set[str]) -> Resume | Restart:
    """Forget that these tables were copied, which are database.table; no tables: start anew."""
    if isinstance(resume, Restart):
        return resume
    if not tables:
        return Restart((*resume.copies, *resume.former))
    copies = {
        path: Copy(again=True) if str(path) in tables else copy
        for path, copy in resume.copies.items()
    }
    errored = {path: why for path, why in resume.errored.items() if str(path) not in tables}
    return msgspec.structs.replace(resume, copies=copies, errored=errored)


def packed(tables: Mapping[Path, Declared]) -> bytes:
    """Columns of many tables, small enough to be stored with every commit."""
    return _compressed(tables)


def unpacked(data: bytes) -> dict[Path, Declared]:
    """What `packed` wrote."""
    return _tables.decode(zlib.decompress(data))


def _compressed(value: object) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(value), level=1)


_tables = msgspec.msgpack.Decoder(dict[Path, Declared])


def file_number(file: str) -> int:
    """The number of mysql-bin.000042; files are ordered by it, not by their names."""
    number = file.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0
