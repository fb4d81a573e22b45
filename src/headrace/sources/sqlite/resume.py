"""What the log remembers of a SQLite source between two runs."""

from __future__ import annotations

import msgspec

from .. import CopyProgress, Phase, Status


class Copy(msgspec.Struct, frozen=True):
    """The copy of one table's rows: it is done, or begins anew."""

    layout: int  # what its changes must follow: with another one, the table is copied anew
    done: bool = False
    rows: int = 0
    again: bool = False  # whether rows of an earlier copy must be forgotten first


class Resume(msgspec.Struct, frozen=True):
    """Which database, as which reader, how far, and what is left to copy."""

    uuid: str  # made when the triggers were installed
    reader: str  # made when this log first read from it
    looks: int  # how often it has; an older copy of the database knows of fewer
    position: int  # the last entry that is in the log
    copies: dict[str, Copy]  # by schema.table
    errored: dict[str, str]  # schema.table -> reason
    versions: dict[str, int]  # schema.table -> the version its last SCHEMA change told
    former: tuple[str, ...] = ()  # captured before and not now: their rows are in the log
    seal: str = ""  # what that last entry is known by; "": there was none yet

    def encode(self) -> bytes:
        """As the log stores it."""
        return msgspec.json.encode(self)

    def status(self, source: str, phase: Phase) -> Status:
        """As far as it tells how the source is doing."""
        return Status(
            source=source,
            phase=phase,
            position=str(self.position),
            copies=tuple(
                CopyProgress(path, copy.rows, -1, copy.done) for path, copy in self.copies.items()
            ),
            errored=self.errored,
        )

    def with_copy(self, path: str, copy: Copy) -> Resume:
        """The same with another state of one table's copy."""
        return msgspec.structs.replace(self, copies=self.copies | {path: copy})

    def with_version(self, path: str, version: int) -> Resume:
        """The same after telling a version of a table's columns."""
        return msgspec.structs.replace(self, versions=self.versions | {path: version})

    def with_error(self, path: str, reason: str) -> Resume:
        """The same with one table in the errored state."""
        return msgspec.structs.replace(self, errored=self.errored | {path: reason})

    def without(self, path: str) -> Resume:
        """The same without a table that is not captured any more."""
        return msgspec.structs.replace(
            self,
            copies={name: copy for name, copy in self.copies.items() if name != path},
            errored={name: why for name, why in self.errored.items() if name != path},
            versions={name: version for name, version in self.versions.items() if name != path},
            former=(*self.former, path),
        )


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


class _Position(msgspec.Struct, frozen=True):
    position: int


def position_in(stored: bytes) -> int:
    """The position alone, passing over everything else."""
    return msgspec.json.decode(stored, type=_Position).position


def copied_again(resume: Resume | Restart, tables: set[str]) -> Resume | Restart:
    """Forget that these tables were copied; no tables: start anew."""
    if isinstance(resume, Restart):
        return resume
    if not tables:
        return Restart(True, (*resume.copies, *resume.former))
    copies = {
        name: Copy(copy.layout, again=True) if name in tables else copy
        for name, copy in resume.copies.items()
    }
    errored = {name: why for name, why in resume.errored.items() if name not in tables}
    return msgspec.structs.replace(resume, copies=copies, errored=errored)
