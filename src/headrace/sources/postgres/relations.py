"""What must be known of a table before its rows can be read from the stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ...change.event import Table
from .looks import LookState, Numbering, TableLook
from .pgoutput import WalRelation
from .rows import Rows


class RelationCatalog(Protocol):
    """Who knows the types and keys behind a Relation message: the catalog."""

    def describe_relation(
        self, relation: WalRelation, *, announced_by: int, known: LookState | None = None
    ) -> tuple[Rows, Numbering]:
        """The decoder for rows that follow it; `announced_by` is the transaction, 0: an old one.

        `known` is the state that the look before has left; and which columns they are.
        """
        ...

    def describe_look(self, look: TableLook, *, announced_by: int) -> Rows:
        """The decoder for rows that follow a look."""
        ...

    def narrowed(self, look: TableLook) -> TableLook:
        """The same, with the columns alone that are published."""
        ...

    def gone_leaves(self, leaves: Mapping[int, int]) -> set[int]:
        """Those of some partitions that are none of their tables any more; leaf -> table."""
        ...

    def forget_types(self) -> None:
        """Some types were altered."""
        ...

    def sourceless(self) -> Table:
        """The table of changes that belong to no table."""
        ...
