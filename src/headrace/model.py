"""Tables as entities: what events call their rows, and how these reference each other.

A model says only what the database does not: the rest (names, keys, foreign keys) is derived from
the table as it was when a change was made, so that it is right for old changes too.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, NamedTuple

import msgspec

from .change.event import Table
from .errors import ConfigError, nearest

OPERATIONS = ("CREATE", "UPDATE", "DELETE")
Operation = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(OPERATIONS)})$")]


class _Written(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A value with mappings: two are equal when they are written alike, so their order counts."""

    @cached_property
    def _text(self) -> bytes:
        return msgspec.json.encode(self)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._text == self._text

    def __ne__(self, other: object) -> bool:
        return not self == other  # a struct's own would ask for the very same object

    def __hash__(self) -> int:
        return hash(self._text)


class Parent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A foreign key that the database does not declare."""

    entity: str
    columns: tuple[str, ...]
    parent_columns: tuple[str, ...] = ()  # none: the parent's id


class EntityType(_Written, frozen=True, kw_only=True, dict=True, eq=False):
    """What the rows of a table are."""

    name: str
    table: str  # schema.table, or the bare table in any schema
    id: tuple[str, ...] = ()  # none: the primary key
    identifier: str | None = None
    tenant: str | None = None
    version: str | None = None
    soft_delete: str | None = None
    parents: tuple[Parent, ...] = ()
    queries: dict[str, tuple[Operation, ...]] | tuple[str, ...] = {}
    fields: dict[Operation, tuple[str, ...]] = {}

    def invalidated(self, operation: str) -> tuple[str, ...]:
        """The queries whose results an operation may change."""
        queries = self.queries
        if not isinstance(queries, dict):
            return queries
        return tuple(name for name, on in queries.items() if not on or operation in on)

    def columns(self) -> Iterator[tuple[str, str]]:
        """Every column that is named, after the setting that names it."""
        yield from (("id", column) for column in self.id)
        for setting in ("identifier", "tenant", "version", "soft_delete"):
            if column := getattr(self, setting):
                yield setting, column
        for at, parent in enumerate(self.parents):
            yield from ((f"parents[{at}].columns", column) for column in parent.columns)
        for operation, shown in self.fields.items():
            yield from ((f"fields.{operation}", column) for column in shown)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which events there are: none named means all, and what is excluded stays out."""

    entities: tuple[str, ...] = ()
    exclude_entities: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = ()
    exclude_operations: tuple[Operation, ...] = ()

    def includes(self, entity: str) -> bool:
        """Whether there are events of an entity at all."""
        return entity not in self.exclude_entities and entity in (self.entities or (entity,))

    def emits(self, operation: str) -> bool:
        """Whether an operation makes an event."""
        excluded = operation in self.exclude_operations
        return not excluded and operation in (self.operations or OPERATIONS)


class Model(_Written, frozen=True, kw_only=True, dict=True, eq=False):
    """Tables as entities, and what events say about all of them."""

    name: str = "headrace"
    version: str = "1"
    tenant: str | None = None  # a column, in every table that has it
    source_details: bool = False
    instances: dict[str, str] = {}  # by the name of the source
    regions: dict[str, str] = {}
    affected_entities: bool = False
    entities: tuple[EntityType, ...] = ()
    selection: Selection = Selection()

    NOT_SETTINGS: ClassVar[tuple[str, ...]] = ("selection",)  # the section `cdc` has it

    def selected(self, by: Selection) -> "Model":
        """The same model with only the events that a selection names."""
        # Copied field by field: what is handed over may be a selection and more.
        names = Selection.__struct_fields__
        selection = Selection(**{name: getattr(by, name) for name in names})
        return msgspec.structs.replace(self, selection=selection)

    def entity(self, table: Table) -> EntityType:
        """What the rows of a table are, with everything that the table itself declares."""
        given = self._given(table) or EntityType(name=entity_name(table.name), table=table.path)
        everywhere = self.tenant if self.tenant in _columns(table) else None
        return msgspec.structs.replace(
            given, id=given.id or table.key, tenant=given.tenant or everywhere
        )

    def _given(self, table: Table) -> EntityType | None:
        by_table = {each.table: each for each in self.entities}
        return by_table.get(table.path) or by_table.get(table.name)

    def unknown_sources(self, known: Sequence[str]) -> list[str]:
        """What is wrong with the names of sources; nothing where none are known."""
        return [
            f"headrace.model.{setting}: no source called {_meant(name, known)}"
            for setting in ("instances", "regions")
            for name in getattr(self, setting)
            if known and name not in known
        ]

    def check(self, tables: Sequence[Table]) -> None:
        """One ConfigError that names everything these tables do not have."""
        if problems := list(_Problems(self, tables)):
            raise ConfigError("\n".join(problems))


# --- names ---------------------------------------------------------------------------------------

_IRREGULAR = {
    "caches": "cache",
    "children": "child",
    "cookies": "cookie",
    "movies": "movie",
    "news": "news",
    "people": "person",
    "series": "series",
    "species": "species",
}
# The first that fits counts; what follows the stem is what the singular ends in.
_PLURALS = (
    (re.compile(r"(.*(?:ss|us|is))", re.I), ""),  # address, status, analysis: no plurals
    (re.compile(r"(.{2,})ies", re.I), "y"),
    (re.compile(r"(.*(?:ss|x|ch|sh))es", re.I), ""),
    (re.compile(r"(.*[^aeou]us)es", re.I), ""),  # statuses, but not houses and causes
    (re.compile(r"(.+)s", re.I), ""),
)


def entity_name(table: str) -> str:
    """The name of a table's entities: `order_items` holds `OrderItem`.

    Words are joined with capitals, the last one in the singular, and a leading `tb_` is dropped.
    """
    words = [word for word in re.split(r"[\W_]+", re.sub(r"^tbl?_", "", table)) if word]
    if not words:
        return table
    words[-1] = _singular(words[-1])
    return "".join(word[0].upper() + word[1:] for word in words)


def _singular(word: str) -> str:
    if known := _IRREGULAR.get(word.lower()):
        return word[0] + known[1:]
    for plural, ending in _PLURALS:
        if found := plural.fullmatch(word):
            return found[1] + ending
    return word


def _columns(table: Table) -> list[str]:
    return [column.name for column in table.columns]


# --- problems ------------------------------------------------------------------------------------


class _Names(NamedTuple):
    """What the tables that there are call themselves."""

    tables: Mapping[str, Table]  # under schema.table
    entities: Mapping[str, list[Table]]

    @classmethod
    def of(cls, model: Model, tables: Sequence[Table]) -> "_Names":
        entities: dict[str, list[Table]] = {each.name: [] for each in model.entities}
        for table in tables:
            entities.setdefault(model.entity(table).name, []).append(table)
        return cls({table.path: table for table in tables}, entities)


class _Problems:
    """Everything in a model that the tables do not have, in the model's order."""

    def __init__(self, model: Model, tables: Sequence[Table]) -> None:
        self._model = model
        self._names = _Names.of(model, tables)

    def __iter__(self) -> Iterator[str]:
        yield from self._tenant()
        taken: dict[str, str] = {}
        for entity in self._model.entities:
            yield from self._entity(entity, taken)
        selection = self._model.selection
        yield from self._selected("entities", selection.entities)
        yield from self._selected("exclude_entities", selection.exclude_entities)

    def _tenant(self) -> Iterator[str]:
        tenant, tables = self._model.tenant, self._names.tables.values()
        columns = {name for table in tables for name in _columns(table)}
        if tenant is not None and tenant not in columns:
            yield f"headrace.model.tenant: no table has a column {_meant(tenant, columns)}"

    def _entity(self, entity: EntityType, taken: dict[str, str]) -> Iterator[str]:
        where = f"headrace.model.entities.{entity.name}"
        tables = self._tables(entity)
        if not tables:
            yield f"{where}.table: no table called {_meant(entity.table, self._names.tables)}"
        for path in tables:
            other = taken.setdefault(path, entity.name)
            if other != entity.name:
                yield f"{where}.table: {path} is already the table of {other}; name it once"
        for table in tables.values():
            yield from self._unknown_columns(where, entity, table)
        for at, parent in enumerate(entity.parents):
            yield from self._parent(f"{where}.parents[{at}]", parent)

    def _tables(self, entity: EntityType) -> dict[str, Table]:
        return {
            path: table
            for path, table in self._names.tables.items()
            if entity.table in (path, table.name)
        }

    def _unknown_columns(self, where: str, entity: EntityType, table: Table) -> Iterator[str]:
        known = _columns(table)
        for setting, column in entity.columns():
            if column not in known:
                meant = _meant(column, known)
                yield f"{where}.{setting}: {table.path} has no column {meant}"

    def _parent(self, where: str, parent: Parent) -> Iterator[str]:
        tables = self._names.entities.get(parent.entity)
        if tables is None:
            yield f"{where}.entity: no entity called {_meant(parent.entity, self._names.entities)}"
        for table in tables or ():
            known = _columns(table)
            for column in parent.parent_columns:
                if column not in known:
                    meant = _meant(column, known)
                    yield f"{where}.parent_columns: {table.path} has no column {meant}"
            named = parent.parent_columns or self._model.entity(table).id
            if len(named) != len(parent.columns):
                yield (
                    f"{where}.columns: {len(parent.columns)} columns cannot name a row of "
                    f"{parent.entity} by {', '.join(named) or 'nothing'}; give one for each"
                )

    def _selected(self, setting: str, given: Iterable[str]) -> Iterator[str]:
        known = self._names.entities
        for name in given:
            if name not in known:
                yield f"headrace.cdc.{setting}: no entity called {_meant(name, known)}"


def _meant(name: str, known: Iterable[str]) -> str:
    return f"{name}{nearest(name, known)}"
