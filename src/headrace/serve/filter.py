"""Which changes a subscription wants."""

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated

from ..change.event import Change, Op, Table
from ..change.path import is_qualified, path_part, split_path, unquoted
from ..formats.entities import Entities, Test
from ..formats.entity import EntityFilter
from ..formats.key import row_key
from .parameters import Globs, OperationList, Text

_EVERY = EntityFilter()


class FilterParameters(EntityFilter, frozen=True, kw_only=True):
    """The filters of every route that reads changes, beside those of entities.

    Each is declared once, here or in `EntityFilter`; parameters, /openapi.json and the mapping of
    gRPC requests follow. Every condition must hold; one that is left out always does.
    """

    source: Annotated[str, Text("only this source, by its name in the config")] = ""
    tables: Annotated[
        tuple[str, ...],
        Globs(
            "only tables that match one of these: schema.table, or the table alone in any schema"
        ),
    ] = ()
    operations: Annotated[frozenset[Op], OperationList(frozenset(Op), "only these operations")] = (
        frozenset()
    )


class Filter(FilterParameters, frozen=True, kw_only=True, dict=True):
    """Which changes a subscription wants."""

    key_prefix: str = ""  # of table:pk

    @property
    def entity(self) -> EntityFilter | None:
        """The conditions on entities; None: there are none."""
        return None if self._entity == _EVERY else self._entity

    def predicate(self, entities: Entities) -> Test | None:
        """A test of one change alone; None: every change passes."""
        entity = self.entity
        return both(self.plain(), None if entity is None else entities.wanted(entity))

    def plain(self) -> Test | None:
        """The same test without the conditions on entities."""
        limits = (self.source, self.tables, self.operations, self.key_prefix)
        return self.passes if any(limits) else None

    def concerns(self, change: Change) -> bool:
        """Whether a change is of the source that is wanted: of others not even marks are sent."""
        return not self.source or change.table.source == self.source

    def passes(self, change: Change) -> bool:
        """Whether a change is in the source, tables, operations and keys that are wanted."""
        if not self.concerns(change):
            return False
        if self.operations and change.op not in self.operations:
            return False
        if self.tables and not self._answers.wants(change):
            return False
        return not self.key_prefix or self._has_prefix(change)

    @cached_property
    def _entity(self) -> EntityFilter:
        names = EntityFilter.__struct_fields__
        return EntityFilter(**{name: getattr(self, name) for name in names})

    @cached_property
    def _answers(self) -> "TableAnswers":
        return TableAnswers(self.tables)

    def _has_prefix(self, change: Change) -> bool:
        table = f"{change.table.name}:"
        # The row's key is decoded only where the prefix reaches into it.
        if len(self.key_prefix) <= len(table):
            return table.startswith(self.key_prefix)
        return self.key_prefix.startswith(table) and row_key(change).startswith(self.key_prefix)


class TableAnswers:
    """Whether tables match patterns: an answer never changes, so each version is matched once."""

    def __init__(self, globs: tuple[str, ...]) -> None:
        self._globs = globs
        self._known: dict[int, bool] = {}

    def wants(self, change: Change) -> bool:
        """Whether the table of a change matches one of them."""
        table = change.table
        answer = self._known.get(table.version)
        if answer is None:
            answer = self._known[table.version] = any(map(table.matches, self._globs))
        return answer


class NamedTables:
    """The tables of a log by their names, for requests that name many."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._bare: dict[str, list[Table]] = {}
        self._whole: dict[str, list[Table]] = {}  # by schema.table
        for table in tables:
            for name in {table.name, path_part(table.name)}:
                self._bare.setdefault(name, []).append(table)
            for path in {table.path, f"{table.schema}.{table.name}"}:
                self._whole.setdefault(path, []).append(table)

    def matching(self, name: str) -> list[Table]:
        """The tables that a pattern without wildcards means, in all their versions."""
        names = self._whole if is_qualified(name) else self._bare
        return [table for table in names.get(unquoted(name), []) if table.matches(name)]

    def called(self, name: str) -> list[Table]:
        """Those that are called so, with or without their schema, in all their versions."""
        name = unquoted(name)
        return [*self._bare.get(name, []), *self._whole.get(name, [])]


def named(name: str) -> list[Table]:
    """The tables that a name could mean, whether or not there are such tables."""
    dots = [at for at, character in enumerate(name) if character == "."]
    paths = [(name[:at], name[at + 1 :]) for at in dots] or [("public", name)]
    if '"' in name:
        schema, bare = split_path(name)
        paths = [(schema or "public", bare)]
    return [Table("", "", "", "", schema, table) for schema, table in paths]


def both(one: Test | None, other: Test | None) -> Test | None:
    """A test that two tests must pass; None passes all."""
    if one is None or other is None:
        return one or other
    first, second = one, other
    return lambda change: first(change) and second(change)
