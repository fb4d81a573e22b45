"""Changes of rows, looked at as entities."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from ..change.event import BeforeKind, Change, Op, Table
from ..model import OPERATIONS, Model
from ._annotation import as_text
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
Referenced = tuple[str, str] | str  # a table by schema and name, or an entity
Key = tuple[str, str, Values | int]  # a table, and its row's key; of a row without one its number

_columns = msgspec.json.Decoder(Columns).decode
_encode = msgspec.json.Encoder().encode
_string = msgspec.json.Decoder(str).decode
# Members of an enum, looked up once: on Python 3.11 that takes as long as a call.
_FULL, _KEY, _NONE = BeforeKind.FULL, BeforeKind.KEY, BeforeKind.NONE


class EntityShape:
    """What all changes of one version of a table share."""

    def __init__(self, table: Table, model: Model, facts: Facts) -> None:
        entity = model.entity(table)
        self.table = table
        self.entity = entity
        self.only_id = entity.id[0] if len(entity.id) == 1 else None
        self.key = table.key or entity.id  # the columns that identify a row
        self.kept = _kept(table)
        self.label = _encode(entity.name)
        # Whether an entity is described by its id alone.
        named = entity.identifier, entity.tenant, entity.version, entity.soft_delete
        self.plain = not any(named)
        self.affected = model.affected_entities
        self.included = model.selection.includes(entity.name)
        # The operations that make events.
        self.emitted = {
            each for each in OPERATIONS if self.included and model.selection.emits(each)
        }
        self.labels = _Labels()
        self._lists = _Lists(self.labels)
        # Which columns an image shows; None: all of them.
        self.shown = {each: _chosen(entity.fields.get(each)) for each in OPERATIONS}
        self.deleted = tuple(self._ever_shown())
        self.deleted_fields = self.names(self.deleted)
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

    def _links(self) -> tuple[tuple[tuple[str, ...], Referenced, tuple[str, ...]], ...]:
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


def _kept(table: Table) -> frozenset[str]:
    """The columns that an update has not changed when the source sent nothing of the old row."""
    # PostgreSQL sends the old key whenever the new one differs; of a table that may send none, it
    # publishes no updates.
    return frozenset(table.key if table.connector == "postgres" else ())


def _chosen(names: Sequence[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


def _opening(table: Table, model: Model, facts: Facts) -> bytes:
    server = facts.server(table.source)
    source = {
        "database": _DATABASES.get(table.connector, table.connector),
        "instance": server.instance or table.source,
    }
    details = {
        "database_name": table.database,
        "host": server.host,
        "region": server.region,
    }
    if model.source_details:
        source |= {name: value for name, value in details.items() if value}
    members = {"schema_name": model.name, "schema_version": model.version, "source": source}
    return _encode(members)[1:-2]  # `source` stays open


class EntityRow:
    """One change of an entity."""

    __slots__ = ("after", "before", "change", "id", "operation", "shape")

    def __init__(self, change: Change, shape: EntityShape) -> None:
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
    def old_id(self) -> bytes:
        """The id that it had before its change."""
        return _joined(self.shape.entity.id, self.before.get) or self.id

    @property
    def key(self) -> Key:
        """Its identity: several tables may hold entities of one name."""
        given = _columns(self.change.key) if self.change.key else {}
        return self._key(self.after) or self._key(given) or self._key(self.before) or self._number

    @property
    def old_key(self) -> Key:
        """The key that it had before its change."""
        return self._key(self.before) or self.key

    def is_named(self, name: str, id: str) -> bool:
        """Whether an annotation that names an entity and an id means it, by its old id too."""
        if not self.shape.key or self.name != name:
            return False  # without a key it has no id
        return id in (_string(self.id), _string(self.old_id))

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
        """The columns that it changed, as far as they are shown: those that it may have."""
        shown = self.shape.shown[self.operation]
        change, before = self.change, self.before
        names: Iterable[str] = self.after
        if self.operation == "UPDATE" and change.changed is not None:
            names = change.changed
        elif self.operation == "UPDATE":
            names = [name for name, raw in self.after.items() if before.get(name) != raw]
            if change.before_kind is _NONE:
                names = [name for name in names if name not in self.shape.kept]
        return tuple(names if shown is None else filter(shown.__contains__, names))

    def unchanged(self) -> tuple[str, ...]:
        """The columns that would be shown, had the source sent them."""
        shown, names = self.shape.shown[self.operation], self.change.unchanged
        return names if shown is None else tuple(filter(shown.__contains__, names))

    def _id(self) -> bytes:
        return _joined(self.shape.entity.id, self.value) or _encode(primary_key(self.change))

    def _key(self, image: Columns) -> Key | None:
        values = [image.get(column) for column in self.shape.key]
        known = tuple(bytes(value) for value in values if value is not None)
        table = self.shape.table
        return (table.schema, table.name, known) if known and len(known) == len(values) else None

    @property
    def _number(self) -> Key:
        return self.shape.table.schema, self.shape.table.name, self.change.ordinal


def _joined(columns: Sequence[str], value: Callable[[str], msgspec.Raw | None]) -> bytes | None:
    """Columns as the id of an entity; None: not all of them are known."""
    values = {column: found for column in columns if (found := value(column)) is not None}
    return _encode(joined(values)) if values and len(values) == len(columns) else None


# --- several changes of a row --------------------------------------------------------------------


def histories(rows: Iterable[EntityRow]) -> list[list[EntityRow]]:
    """All changes of each row, whatever key it has between them; rows in order of their first."""
    every: list[list[EntityRow]] = []
    bearing: dict[Key, list[EntityRow]] = {}  # the rows that bear a key now, or did when deleted
    for row in rows:
        history = bearing.pop(row.old_key, None)
        if history is None:
            history = []
            every.append(history)
        history.append(row)
        bearing[row.key] = history
    return every


def together(history: Sequence[EntityRow]) -> str | None:
    """The operation that changes of one row add up to; None: it came and went."""
    created, deleted = history[0].operation == "CREATE", history[-1].operation == "DELETE"
    if deleted:
        return None if created else "DELETE"
    return "CREATE" if created else "UPDATE"


def netted(history: Sequence[EntityRow]) -> EntityRow:
    """What the changes of one row add up to, in the place of the one that is called the same."""
    if len(history) == 1:
        return history[0]
    first, last = history[0], history[-1]
    operation = together(history) or "DELETE"
    place = _place(history, operation)
    old = None if operation == "CREATE" else _old(history, operation)
    after: Columns = {}
    known: Columns = {}
    for row in history:
        after |= row.after
        known |= row.before
        known |= row.after
    change = msgspec.structs.replace(
        place.change,
        op=first.change.op if operation == "CREATE" else _OPS[operation],
        key=last.change.key,
        before=old.change.before if old else None,
        before_kind=old.change.before_kind if old else _NONE,
        after=None if operation == "DELETE" else _encode(after),
        changed=None,
        unchanged=tuple(name for name in last.change.unchanged if name not in after),
    )
    net = _Net(change, last.shape, known)
    if together(history) == "DELETE":
        net.id = first.old_id  # under another one nobody ever saw it
    return net


_OPS = {"UPDATE": Op.UPDATE, "DELETE": Op.DELETE}
_WORTH = {_FULL: 2, _KEY: 1, _NONE: 0}


def _place(history: Sequence[EntityRow], operation: str) -> EntityRow:
    """The change at which the event stands, so that who asks for an operation finds it."""
    if operation == "CREATE":
        return history[0]
    return next((row for row in reversed(history) if row.operation == operation), history[-1])


def _old(history: Sequence[EntityRow], operation: str) -> EntityRow:
    """The change that came with the most of the old row, the first of several."""
    first, *later = history
    if operation == "UPDATE":
        # A whole row that comes later has some of the changes already.
        later = [row for row in later if row.change.before_kind is not _FULL]
    return max([first, *later], key=lambda row: _WORTH[row.change.before_kind])


class _Net(EntityRow):
    """Several changes of a row as one: a column's value may come from any of them."""

    __slots__ = ("_known",)

    def __init__(self, change: Change, shape: EntityShape, known: Columns) -> None:
        self._known = known
        super().__init__(change, shape)

    def value(self, column: str) -> msgspec.Raw | None:
        return self._known.get(column)
