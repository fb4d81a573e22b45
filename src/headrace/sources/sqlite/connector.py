"""SQLite as readers of the log know it."""

from ...change.connector import Connector
from ...change.event import Position


class SqlitePosition(Position, frozen=True, gc=False, tag="sqlite"):
    """Where a change stands in the table that the triggers of a SQLite database append to."""

    transaction: int  # its first entry
    entry: int  # counted from the installation on

    @property
    def commit(self) -> int:
        return self.transaction

    @property
    def own(self) -> int:
        return self.entry


SQLITE = Connector(
    name="sqlite", positions=(SqlitePosition,), arrow="headrace.sources.sqlite.arrow:kind"
)
