"""What the log remembers of a MySQL or MariaDB source between two runs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec

from ...event import Reference
from .. import CopyProgress, Phase, Status
from .columns import DeclaredColumn

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


class Copy(msgspec.Struct, frozen=True):
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
    copies: dict[str, Copy]  # by database.table
    errored: dict[str, str]  # database.table -> reason
    versions: dict[str, int]  # database.table -> the version its last SCHEMA change told
    catalogue: bytes  # the tables' columns at `position`, packed
    former: tuple[str, ...] = ()  # captured before and not now: their rows are in the log
    told_later: dict[str, list[dict[str, str]]] = {}  # DDL whose columns the next row shows
    # XA transactions that are prepared and not decided: where they begin.
    prepared: dict[str, tuple[str, int]] = {}
    # It was read on another server first. The files of this one have transactions that are in the
    # log behind others that are not, so the server leaves them out by their GTIDs.
    moved: bool = False

    def encode(self) -> bytes:
        """As the log stores it."""
        return msgspec.json.encode(self)

    @property
    def live(self) -> frozenset[str]:
        """Tables whose changes count."""
        return frozenset(path for path, copy in self.copies.items() if copy.begun)

    @property
    def to_copy(self) -> list[str]:
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
                CopyProgress(path, copy.rows, copy.estimated_rows, copy.done)
                for path, copy in self.copies.items()
            ),
            errored=self.errored,
        )

    def with_copy(self, path: str, copy: Copy) -> Resume:
        """The same with another state of one table's copy."""
        return msgspec.structs.replace(self, copies=self.copies | {path: copy})

    def with_error(self, path: str, reason: str) -> Resume:
        """The same with one table in the errored state."""
        return msgspec.structs.replace(self, errored=self.errored | {path: reason})

    def declared(self) -> dict[str, Declared]:
        """The tables' columns at its position."""
        return unpacked(self.catalogue)


class Restart(msgspec.Struct, frozen=True):
    """Start anew; the tables named were captured before."""

    restart: bool
    tables: tuple[str, ...]

    def encode(self) -> bytes:
        """As the log stores it."""
        return msgspec.json.encode(self)


def decode(stored: bytes) -> Resume | Restart:
    """What `encode` wrote."""
    if b'"restart":' in stored[:16]:
        return msgspec.json.decode(stored, type=Restart)
    return msgspec.json.decode(stored, type=Resume)


def copied_again(resume: Resume | Restart, tables: set[str]) -> Resume | Restart:
    """Forget that these tables were copied; no tables: start anew."""
    if isinstance(resume, Restart):
        return resume
    if not tables:
        return Restart(True, (*resume.copies, *resume.former))
    copies = {
        path: Copy(again=True) if path in tables else copy for path, copy in resume.copies.items()
    }
    errored = {path: why for path, why in resume.errored.items() if path not in tables}
    return msgspec.structs.replace(resume, copies=copies, errored=errored)


def packed(tables: Mapping[str, Declared]) -> bytes:
    """Columns of many tables, small enough to be stored with every commit."""
    return zlib.compress(msgspec.msgpack.encode(tables), level=1)


def unpacked(data: bytes) -> dict[str, Declared]:
    """What `packed` wrote."""
    return _tables.decode(zlib.decompress(data))


_tables = msgspec.msgpack.Decoder(dict[str, Declared])


def file_number(file: str) -> int:
    """The number of mysql-bin.000042; files are ordered by it, not by their names."""
    number = file.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0
