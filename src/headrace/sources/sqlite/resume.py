"""What the log remembers of a SQLite source between two runs."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ..resume import TablesResume


class SqliteTableSnapshot(msgspec.Struct, frozen=True):
    """The snapshot of one table: it is done, or begins anew."""

    layout: int  # what its changes must follow: with another one, the table is read anew
    done: bool = False
    rows: int = 0
    again: bool = False  # whether rows of an earlier snapshot must be forgotten first

    estimated_rows: ClassVar[int] = -1

    def anew(self) -> SqliteTableSnapshot:
        """The same table, to be read from its first row."""
        return SqliteTableSnapshot(self.layout, again=True)


class SqliteResume(TablesResume[SqliteTableSnapshot], frozen=True, kw_only=True):
    """Which database, as which reader, and how far."""

    uuid: str  # made when the triggers were installed
    reader: str  # made when this log first read from it
    looks: int  # how often it has; an older copy of the database knows of fewer
    position: int  # the last entry that is in the log
    seal: str = ""  # what that last entry is known by; "": there was none yet

    @property
    def reached(self) -> str:
        """The number of an entry."""
        return str(self.position)

    def without(self, path: str) -> SqliteResume:
        """The same without a table that is not captured any more."""
        return msgspec.structs.replace(
            self,
            snapshots={name: each for name, each in self.snapshots.items() if name != path},
            errored={name: why for name, why in self.errored.items() if name != path},
            versions={name: version for name, version in self.versions.items() if name != path},
            former=(*self.former, path),
        )
