"""What all changes of one version of a table share, made once."""

from collections.abc import Callable
from typing import Generic, TypeVar

from ..change.event import Table

_KEPT = 10_000  # far more than a database has tables and versions of them

T = TypeVar("T")


class PerTable(Generic[T]):
    """Makes a thing for each table that it meets, and remembers it.

    It goes by the table's address: hashing a table takes longer than writing an event.
    """

    def __init__(self, make: Callable[[Table], T]) -> None:
        self._make = make
        self._made: dict[int, tuple[Table, T]] = {}

    def __call__(self, table: Table) -> T:
        """The thing for this table."""
        known = self._made.get(id(table))
        if known is not None and known[0] is table:
            return known[1]
        if len(self._made) >= _KEPT:
            self._made.clear()
        made = self._make(table)
        self._made[id(table)] = table, made
        return made
