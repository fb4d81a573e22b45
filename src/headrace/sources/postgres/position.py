"""Where a change stands in PostgreSQL's write-ahead log."""

from collections.abc import Mapping
from typing import Any, Self

from ...change.event import Position
from ...change.lsn import format_lsn, parse_lsn


class PostgresPosition(Position, frozen=True, gc=False, tag="postgres"):
    """Where a change stands in PostgreSQL's write-ahead log."""

    commit_lsn: int  # of the transaction's commit record; orders transactions
    lsn: int  # of the change's own record; several changes may share one
    end_lsn: int = 0  # where the commit record ends; 0: not the transaction's last change

    @property
    def commit(self) -> int:
        return self.commit_lsn

    @property
    def own(self) -> int:
        return self.lsn

    @property
    def commit_end(self) -> int:
        return self.end_lsn

    @property
    def replayed_commit(self) -> int:
        return self.commit_lsn

    def to_json(self) -> dict[str, str | int]:
        return {"lsn": format_lsn(self.lsn), "commit_lsn": format_lsn(self.commit_lsn)}

    @classmethod
    def from_json(cls, shown: Mapping[str, Any]) -> Self:
        if shown.keys() != {"lsn", "commit_lsn"}:
            raise ValueError(f"not a position in the write-ahead log: {shown!r}")
        return cls(parse_lsn(shown["commit_lsn"]), parse_lsn(shown["lsn"]))
