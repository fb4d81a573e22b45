"""Changes of rows, looked at as entities."""

from collections.abc import Iterable, Sequence

import msgspec

from ..event import BeforeKind, Change, Op, Table
from ..model import OPERATIONS, Model
from ._said import as_text
from .facts import Facts
from .key import joined, primary_key

CARRIED = {
    Op.INSERT.value: "CREATE",
    Op.READ.value: "CREATE",
    Op.UPDATE.value: "UPDATE",
    Op.DELETE.value: "DELETE",
}
"""What each operation is called here; what is missing is not carried."""

_LISTS_KEPT = 1000
_DATABASES = {"postgres": "postgresql"}

Columns = dict[str, msgspec.Raw]
Values = tuple[bytes, ...]
Place = tuple[str, str] | str  # a table by schema and name, or an entity

_columns = msgspec.json.Decoder(Columns).decode
_encode = msgspec.json.Encoder().encode
# Members of an enum, looked up once: on Python 3.11 that takes as long as a call.
_FULL = BeforeKind.FULL


class Shape:
    """What all changes of one version of a table share."""

    def __init__(self, table: Table, model: Model, facts: Facts) -> None:
        entity = model.entity(table)
        self.table = table
        self.entity = entity
        self.only_id = entity.id[0] if len(entity.id) == 1 else None
        self.label = _encode(entity.name)
        self.affected = model.affected_entities
        self.included = model.selection.includes(entity.name)
        self.emitted = {each for each in OPERATIONS if model.selection.emits(each)}
        self.labels = _Labels()
        self._lists = _Lists(self.labels)
        # Which columns an image shows; None: all of them.
        self.shown = {each: _chosen(entity.fields.get(each)) for each in OPERATIONS}
        self.deleted_fields = self.names(self._ever_shown())
        self.opening = _opening(table, model, facts)  # from the model's name to the transaction
        self.schema = b',"schema":%b' % _encode(table.schema) if model.source_details else None
        self.alone: dict[str, bytes] = {}  # cascades of rows that stand alone, by operation
        self.links = self._links()

    def names(self, columns: Iterable[str]) -> bytes:
        """Names of columns as a JSON array."""
        return self._lists[tuple(columns)]

    def image(self, operation: str, image: bytes | None, columns: Columns) -> bytes:
        """An image as far as it is shown; as it came, where that is all of it."""
        shown = self.shown[operation]
        if image is None or shown is None:
            return image or b"null"
        members = [b"%b:%b" % (self.labels[n], raw) for n, raw in columns.items() if n in shown]
        return b"{%b}" % b",".join(members)

    def _ever_shown(self) -> list[str]:
        """The columns of the table that any image shows."""
        names = [column.name for column in self.table.columns]
        return [
            name
            for name in names
            if any(shown is None or name in shown for shown in self.shown.values())
        ]

    def _links(self) -> tuple[tuple[tuple[str, ...], Place, tuple[str, ...]], ...]:
        """Columns that name a row, of which table or entity, and by which of its columns."""
        declared = [
            (each.columns, (each.schema, each.table), each.parent_columns)
            for each in self.table.references
        ]
        added = [(each.columns, each.entity, each.parent_columns) for each in self.entity.parents]
        return (*declared, *added)


class _Labels(dict[str, bytes]):
    """Names of columns as JSON."""

    def __missing__(self, name: str) -> bytes:
        label = self[name] = _encode(name)
        return label


class _Lists(dict[tuple[str, ...], bytes]):
    """Lists of columns as JSON: most changes of a table name the same few."""

    def __init__(self, labels: _Labels) -> None:
        super().__init__()
        self._labels = labels

    def __missing__(self, names: tuple[str, ...]) -> bytes:
        if len(self) >= _LISTS_KEPT:
            self.clear()
        written = self[names] = b"[%b]" % b",".join([self._labels[name] for name in names])
        return written


def _chosen(names: Sequence[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


def _opening(table: Table, model: Model, facts: Facts) -> bytes:
    server = facts.server(table.source)
    source = {
        "database": _DATABASES.get(table.connector, table.connector),
        "instance": model.instances.get(table.source) or server.instance or table.source,
    }
    details = {
        "database_name": table.database,
        "host": server.host,
        "region": model.regions.get(table.source) or server.region,
    }
    if model.source_details:
        source |= {name: value for name, value in details.items() if value}
    told = {"schema_name": model.name, "schema_version": model.version, "source": source}
    return _encode(told)[1:-2]  # `source` stays open


class Row:
    """One change of an entity."""

    __slots__ = ("after", "before", "change", "id", "operation", "shape")

    def __init__(self, change: Change, shape: Shape) -> None:
        self.change = change
        self.shape = shape
        self.operation = CARRIED[change.op._value_]
        self.before = _columns(change.before) if change.before else {}
        self.after = _columns(change.after) if change.after else {}
        only = shape.only_id and self.value(shape.only_id)
        self.id = as_text(bytes(only)) if only else self._id()  # as a JSON string

    @property
    def name(self) -> str:
        """What its entity is called."""
        return self.shape.entity.name

    @property
    def key(self) -> tuple[str, str, bytes]:
        """What tells it from all other rows: several tables may hold entities of one name."""
        return self.shape.table.schema, self.shape.table.name, self.id

    def value(self, column: str) -> msgspec.Raw | None:
        """What a column holds, or held last; None: not known."""
        value = self.after.get(column)
        return self.before.get(column) if value is None else value

    def text(self, column: str) -> bytes | None:
        """The same as a JSON string; None: null, or not known."""
        raw = self.value(column)
        value = b"null" if raw is None else bytes(raw)
        return None if value == b"null" else as_text(value)

    def named(self, columns: Sequence[str]) -> Values | None:
        """What an old row holds in columns that are to name a row; None: not known, or null."""
        values = [self.before.get(column) for column in columns]
        plain = [b"null" if value is None else bytes(value) for value in values]
        if b"null" in plain or not plain:
            return None
        # Numbers and texts that look the same may name each other.
        return tuple(value[1:-1] if value.startswith(b'"') else value for value in plain)

    def changed(self) -> tuple[str, ...]:
        """The columns that it changed, as far as they are shown: where that is unknown, all."""
        shown = self.shape.shown[self.operation]
        change = self.change
        names: Iterable[str] = self.after
        if self.operation == "UPDATE" and change.changed is not None:
            names = change.changed
        elif self.operation == "UPDATE" and change.before_kind is _FULL:
            names = [name for name, raw in self.after.items() if self.before.get(name) != raw]
        return tuple(names if shown is None else filter(shown.__contains__, names))

    def unchanged(self) -> tuple[str, ...]:
        """The columns that would be shown, had the source sent them."""
        shown, names = self.shape.shown[self.operation], self.change.unchanged
        return names if shown is None else tuple(filter(shown.__contains__, names))

    def _id(self) -> bytes:
        columns = self.shape.entity.id
        values = {column: value for column in columns if (value := self.value(column)) is not None}
        if not columns or len(values) < len(columns):
            return _encode(primary_key(self.change))
        return _encode(joined(values))


def netted(rows: Sequence[Row]) -> Row:
    """What the changes of one row add up to, in the place of the last one."""
    first, last = rows[0], rows[-1]
    created, deleted = first.operation == "CREATE", last.operation == "DELETE"
    if len(rows) == 1 or (created and deleted):
        return last
    after: Columns = {}
    for row in rows:
        after |= row.after
    change = msgspec.structs.replace(
        last.change,
        op=first.change.op if created else Op.DELETE if deleted else Op.UPDATE,
        before=None if created else first.change.before,
        before_kind=BeforeKind.NONE if created else first.change.before_kind,
        after=None if deleted else _encode(after),
        changed=None,
        unchanged=tuple(name for name in last.change.unchanged if name not in after),
    )
    return Row(change, last.shape)
