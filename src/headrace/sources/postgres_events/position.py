"""Where a change stands in an event table of PostgreSQL."""

from collections.abc import Mapping
from typing import Any, Self

from ...change.event import Position
from ...change.lsn import format_lsn, parse_lsn


class EventTablePosition(Position, frozen=True, gc=False, tag="events"):
    """Where a change stands in an event table of PostgreSQL."""

    transaction: int  # the transaction's number, an xid8
    entry: int  # the row's number in the table, or that of one before it that is higher
    # Where the write-ahead log stood when the transaction was found committed, and no two alike:
    # it grows from one to the next, however late they commit. 0: not known.
    lsn: int = 0

    @property
    def commit(self) -> int:
        """A number that orders transactions, as they became visible."""
        return self.lsn

    @property
    def own(self) -> int:
        return self.entry

    @property
    def replayed_commit(self) -> int:
        # When the transaction is found committed may differ from replay to replay.
        return self.transaction

    def to_json(self) -> dict[str, str | int]:
        return {"txid": self.transaction, "id": self.entry, "lsn": format_lsn(self.lsn)}

    @classmethod
    def from_json(cls, shown: Mapping[str, Any]) -> Self:
        if shown.keys() != {"txid", "id", "lsn"}:
            raise ValueError(f"not a position in an event table: {shown!r}")
        return cls(shown["txid"], shown["id"], parse_lsn(shown["lsn"]))
