"""What the log remembers of a PostgreSQL source between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, TypeVar

import msgspec

from ...change.lsn import format_lsn
from ...errors import TableUnknown
from .. import CopyProgress, Phase, Status


class Range(msgspec.Struct, frozen=True):
    """Blocks of one physical table that still have to be copied."""

    relation: str  # quoted, schema-qualified: a partition, or the table itself
    start: str  # first ctid to read
    end: int | None  # first block that is not ours; None: to the end of the table


class Copy(msgspec.Struct, frozen=True):
    """The copy of one table's rows.

    Not begun: `ranges` is None, and changes committed before the copy's point are in the copy.
    Begun: `ranges` are left to read. Taken up after an interruption: `moved` too. Finished:
    nothing is left.
    """

    relation: int  # the table's oid: another one under the same name is another table
    ranges: tuple[Range, ...] | None = None
    rows: int = 0
    estimated_rows: int = -1
    # The oldest transaction that the first of the copy's snapshots might not see: a row written by
    # it or later may have moved between the ranges when an interrupted copy is taken up again.
    since: int = 0
    moved: tuple[str, ...] = ()  # physical tables where such rows still have to be looked for
    filenodes: tuple[int, ...] = ()  # a rewritten table has others: its ranges mean nothing then
    again: bool = False  # whether rows of an earlier copy must be forgotten first

    @property
    def done(self) -> bool:
        """Whether every row has been read."""
        return self.ranges == () and not self.moved


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """Which database, what is left to copy of it, and what was told of its tables."""

    system: str  # the server's system identifier
    timeline: int
    database: str
    copies: dict[str, Copy]  # by schema.table
    errored: dict[str, str]  # schema.table -> reason
    versions: dict[str, int]  # schema.table -> the version its last SCHEMA change told
    former: tuple[str, ...] = ()  # captured before and not now: their rows are in the log

    def encode(self) -> bytes:
        """As the log stores it."""
        return msgspec.json.encode(self)

    @property
    def origin(self) -> str:
        """The identity that its tables carry."""
        return f"postgres:{self.system}:{self.database}"

    @property
    def reached(self) -> str:
        """How far the log has come, in the source's own words."""
        raise NotImplementedError

    @property
    def live(self) -> dict[int, str]:
        """Tables whose changes count: what happens before a table's copy begins is in the copy."""
        return {
            copy.relation: path for path, copy in self.copies.items() if copy.ranges is not None
        }

    @property
    def to_copy(self) -> list[str]:
        """Tables that have rows left to read."""
        return [path for path, copy in self.copies.items() if not copy.done]

    def status(self, source: str, phase: Phase) -> Status:
        """As far as it tells how the source is doing."""
        return Status(
            source=source,
            phase=phase,
            position=self.reached,
            copies=tuple(
                CopyProgress(path, copy.rows, copy.estimated_rows, copy.done)
                for path, copy in self.copies.items()
            ),
            errored=self.errored,
        )

    def with_copy(self, path: str, copy: Copy) -> Self:
        """The same with another state of one table's copy."""
        return msgspec.structs.replace(self, copies=self.copies | {path: copy})

    def with_version(self, path: str, version: int) -> Self:
        """The same after telling a version of a table's columns."""
        return msgspec.structs.replace(self, versions=self.versions | {path: version})

    def with_error(self, path: str, reason: str) -> Self:
        """The same with one table in the errored state."""
        return msgspec.structs.replace(self, errored=self.errored | {path: reason})


class Resume(Copies, frozen=True, kw_only=True):
    """Which slot of which server, and how far."""

    slot: str
    position: int  # end of the last transaction that is in the log
    xid: int  # its transaction id, with the epoch

    @property
    def reached(self) -> str:
        """As PostgreSQL writes a position."""
        return format_lsn(self.position)


class Restart(msgspec.Struct, frozen=True):
    """Start anew, with a new slot; the tables named were captured before."""

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


class _Position(msgspec.Struct, frozen=True):
    position: int


def position_in(stored: bytes) -> int:
    """The position alone, passing over everything else."""
    return msgspec.json.decode(stored, type=_Position).position


R = TypeVar("R", bound=Copies)


def copied_again(resume: R | Restart, tables: set[str]) -> R | Restart:
    """Forget that these tables were copied; no tables: start anew."""
    if isinstance(resume, Restart):
        return resume
    if not tables:
        return Restart(True, (*resume.copies, *resume.former))
    copies = {
        name: Copy(copy.relation, again=True) if name in tables else copy
        for name, copy in resume.copies.items()
    }
    errored = {name: why for name, why in resume.errored.items() if name not in tables}
    return msgspec.structs.replace(resume, copies=copies, errored=errored)


def asked_again(source: str, known: Copies | Restart, tables: Sequence[str]) -> bytes:
    """A resume that copies these tables anew; refuses those that are not captured."""
    paths = {table if "." in table else f"public.{table}" for table in tables}
    copies = known.tables if isinstance(known, Restart) else tuple(known.copies)
    unknown = paths - set(copies)
    if unknown:
        raise TableUnknown(
            f"source {source} has no table {', '.join(sorted(unknown))}",
            hint=f"It captures: {', '.join(sorted(copies))}.",
        )
    return copied_again(known, paths).encode()
