"""Partitions that rows of the stream were written to. No I/O.

A row names the whole table alone. But when a partition is first written to, the server describes
the whole table and right behind it the partition. So one that was created, filled and dropped
between two looks has left its name in the stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class WrittenLeaves:
    """Which partitions were written to since the last look at their tables."""

    def __init__(self) -> None:
        # Replaced, never altered: leaf -> whole table.
        self.unlooked: Mapping[int, int] = {}
        self.new = False  # whether the open transaction has written to another one
        self._whole = 0  # the table that was described last,
        self._ordinal = -1  # when the transaction had so many changes

    def began(self) -> None:
        """A transaction has begun."""
        self.new, self._ordinal = False, -1

    def described_whole(self, relation: int, ordinal: int) -> None:
        """A captured table with partitions was described."""
        self._whole, self._ordinal = relation, ordinal

    def described_other(self, relation: int, ordinal: int) -> None:
        """A table that is not captured was described: without a row in between it is a leaf."""
        if ordinal == self._ordinal:
            self.unlooked = {**self.unlooked, relation: self._whole}
            self.new = True

    def truncated(self, relations: Collection[int]) -> None:
        """Tables that one TRUNCATE names are described together, and are no partitions."""
        self.forget(relations)

    def of(self, whole: int) -> dict[int, int]:
        """Those of one table."""
        return {leaf: of for leaf, of in self.unlooked.items() if of == whole}

    def forget(self, leaves: Collection[int]) -> None:
        """Looks show these from now on, or that they are gone."""
        if not self.unlooked.keys().isdisjoint(leaves):
            self.unlooked = {leaf: of for leaf, of in self.unlooked.items() if leaf not in leaves}
