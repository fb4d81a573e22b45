"""Which changes a subscription wants."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..event import Change, Op, Table
from ..formats.key import row_key


@dataclass(frozen=True)
class Filter:
    """Every condition must hold; one that is empty always does."""

    source: str = ""  # the configured name
    tables: tuple[str, ...] = ()  # globs: schema.table, or the bare table in any schema
    operations: frozenset[Op] = frozenset()
    key_prefix: str = ""  # of table:pk
    # A table's answer never changes, so each version is asked once.
    _answers: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)

    def predicate(self) -> Callable[[Change], bool] | None:
        """A test of one change; None: every change passes."""
        limits = (self.source, self.tables, self.operations, self.key_prefix)
        return self.passes if any(limits) else None

    def concerns(self, change: Change) -> bool:
        """Whether a change is of the source that is wanted: of others not even marks are told."""
        return not self.source or change.table.source == self.source

    def passes(self, change: Change) -> bool:
        """Whether the subscription wants this change."""
        if not self.concerns(change):
            return False
        if self.operations and change.op not in self.operations:
            return False
        if self.tables and not self._wants(change.table):
            return False
        return not self.key_prefix or self._has_prefix(change)

    def _wants(self, table: Table) -> bool:
        answer = self._answers.get(table.version)
        if answer is None:
            answer = any(table.matches(glob) for glob in self.tables)
            self._answers[table.version] = answer
        return answer

    def _has_prefix(self, change: Change) -> bool:
        table = f"{change.table.name}:"
        # The row's key is decoded only where the prefix reaches into it.
        if len(self.key_prefix) <= len(table):
            return table.startswith(self.key_prefix)
        return self.key_prefix.startswith(table) and row_key(change).startswith(self.key_prefix)
