"""What the log remembers of a source between two runs: the part that most sources share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from ..errors import TableUnknown
from . import CopyProgress, Phase, Status


class TableSnapshot(Protocol):
    """How far the snapshot of one table is."""

    @property
    def rows(self) -> int:
        """How many were read."""
        ...

    @property
    def estimated_rows(self) -> int:
        """How many there are, by the server's own guess; -1: it has none."""
        ...

    @property
    def done(self) -> bool:
        """Whether every row has been read."""
        ...

    def anew(self) -> Self:
        """The same table, to be read from its first row."""
        ...


_S = TypeVar("_S", bound=TableSnapshot)


class TablesResume(msgspec.Struct, Generic[_S], frozen=True, kw_only=True):
    """Which snapshots are left, and what the log has of each table, by schema.table."""

    snapshots: dict[str, _S] = msgspec.field(name="copies")
    errored: dict[str, str]  # the reason
    versions: dict[str, int]  # the version of the last SCHEMA change
    former: tuple[str, ...] = ()  # captured before and not now: their rows are in the log

    def encode(self) -> bytes:
        """As the log stores it."""
        return msgspec.json.encode(self)

    @property
    def reached(self) -> str:
        """How far the log has come, in the source's own words."""
        raise NotImplementedError

    @property
    def to_snapshot(self) -> list[str]:
        """Tables that have rows left to read."""
        return [path for path, snapshot in self.snapshots.items() if not snapshot.done]

    def status(self, source: str, phase: Phase) -> Status:
        """How the source is doing, as far as the resume shows."""
        return Status(
            source=source,
            phase=phase,
            position=self.reached,
            copies=tuple(
                CopyProgress(path, snapshot.rows, snapshot.estimated_rows, snapshot.done)
                for path, snapshot in self.snapshots.items()
            ),
            errored=self.errored,
            former=tuple(dict.fromkeys(self.former)),
        )

    def with_snapshot(self, path: str, snapshot: _S) -> Self:
        """The same with another state of one table's snapshot."""
        return msgspec.structs.replace(self, snapshots=self.snapshots | {path: snapshot})

    def with_version(self, path: str, version: int) -> Self:
        """The same after a SCHEMA change with this version of a table's columns."""
        return msgspec.structs.replace(self, versions=self.versions | {path: version})

    def with_error(self, path: str, reason: str) -> Self:
        """The same with one table in the errored state."""
        return msgspec.structs.replace(self, errored=self.errored | {path: reason})

    def repathed(self, paths: Mapping[str, str]) -> Self:
        """The same with the paths that some tables have now: dots of names once had no quotes."""
        if not paths:
            return self
        return msgspec.structs.replace(
            self,
            snapshots={paths.get(path, path): each for path, each in self.snapshots.items()},
            errored={paths.get(path, path): why for path, why in self.errored.items()},
            versions={paths.get(path, path): each for path, each in self.versions.items()},
            former=tuple(paths.get(path, path) for path in self.former),
        )

    def anew(self, tables: Collection[str]) -> Self:
        """The same with new snapshots of some tables."""
        snapshots = {
            path: snapshot.anew() if path in tables else snapshot
            for path, snapshot in self.snapshots.items()
        }
        return msgspec.structs.replace(self, snapshots=snapshots)


class Restart(msgspec.Struct, frozen=True):
    """Start anew; the tables named were captured before."""

    restart: bool
    tables: tuple[str, ...]

    def encode(self) -> bytes:
        """As the log stores it."""
        return msgspec.json.encode(self)


_R = TypeVar("_R", bound=TablesResume[Any])


def decode(stored: bytes, resume: type[_R]) -> _R | Restart:
    """What `encode` of one of them wrote."""
    if b'"restart":' in stored[:16]:
        return msgspec.json.decode(stored, type=Restart)
    found: _R = msgspec.json.decode(stored, type=resume)
    return found


class _Position(msgspec.Struct, frozen=True):
    position: int


def position_in(stored: bytes) -> int:
    """The position alone, passing over everything else."""
    return msgspec.json.decode(stored, type=_Position).position


def described(source: str, stored: bytes | None, resume: type[TablesResume[Any]]) -> Status:
    """The status of a source that is not running."""
    known = None if stored is None else decode(stored, resume)
    if known is None or isinstance(known, Restart):
        return Status(source=source, phase=Phase.STOPPED)
    return known.status(source, Phase.STOPPED)


def snapshots_again(
    source: str, known: TablesResume[Any] | Restart, paths: Collection[str]
) -> bytes:
    """A resume with new snapshots of these tables; none: of all, from a new start."""
    captured = known.tables if isinstance(known, Restart) else tuple(known.snapshots)
    unknown = set(paths) - set(captured)
    if unknown:
        raise TableUnknown(
            f"source {source} has no table {', '.join(sorted(unknown))}",
            hint=f"It captures: {', '.join(sorted(captured))}.",
        )
    if isinstance(known, Restart):
        return known.encode()
    if not paths:
        return Restart(True, (*known.snapshots, *known.former)).encode()
    errored = {path: why for path, why in known.errored.items() if path not in paths}
    return msgspec.structs.replace(known.anew(paths), errored=errored).encode()
