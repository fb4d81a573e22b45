"""The entity event: what a mutation did to an entity, and to the rows that reference it.

A transaction that is annotated as one mutation of one entity is one event. In any other, a row
that was deleted with the row it referenced is part of that row's event, and every further change
of a row is an event of its own.
"""

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, ClassVar, Protocol, Self

import msgspec

from ..change.event import BeforeKind, Change, Op
from ..change.glob import LONGEST_GLOB, MOST_GLOBS, matches
from ..model import Model
from . import Rendered
from ._annotation import NO_ANNOTATION, Annotation, read
from ._cascade import Cascade, ForeignKeyGraph, cascaded_deletes
from ._line import one_line
from ._rows import CARRIED, EntityRow, EntityShape, histories, netted
from ._tables import PerTable
from .facts import Facts, FormatOptions
from .timestamps import second

_encode = msgspec.json.Encoder().encode
_WHOLE = re.compile(rb'"(0|-?[1-9]\d*)"')
# Members of an enum, looked up once: on Python 3.11 that takes as long as a call.
_FULL, _READ = BeforeKind.FULL, Op.READ

EVENT_TYPES = {
    "CREATE": "entity:created",
    "UPDATE": "entity:updated",
    "DELETE": "entity:deleted",
}

# By operation, so that what all of one have in common is not put in anew.
_EVENTS = {
    operation: b'{"version":"1.0","event_id":"%%b","event_type":"%b","timestamp":"%%b",'
    b'"sequence_number":%%d,%%b%%b%%b},"entity":{"entity_type":%%b,%%b},'
    b'"operation":{"type":"%b","trigger":"%%b","timestamp":"%%b",%%b},'
    b'"cascade":%%b,"metadata":{%%b}}' % (type.encode(), operation.encode())
    for operation, type in EVENT_TYPES.items()
}


@dataclass(frozen=True)
class Entity:
    """Entities created, updated and deleted; what happens to no row is not carried."""

    model: Model = field(default_factory=Model)
    facts: Facts = field(default_factory=Facts)
    _shapes: PerTable[EntityShape] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "entity"
    media_type: ClassVar[str] = "application/json"

    @classmethod
    def of(cls, options: FormatOptions) -> Self:
        return cls(options.model, options.facts)

    def __post_init__(self) -> None:
        """Make room for what all changes of a table share."""
        shapes = PerTable(lambda table: EntityShape(table, self.model, self.facts))
        object.__setattr__(self, "_shapes", shapes)

    def __reduce__(self) -> tuple[type["Entity"], tuple[Model, Facts]]:
        return Entity, (self.model, self.facts)

    def render(self, transaction: Sequence[Change]) -> Sequence[Rendered]:
        """The events of a transaction, each at the sequence of its own entity's change."""
        rows = [
            EntityRow(change, self._shapes(change.table))
            for change in transaction
            if change.op._value_ in CARRIED
        ]
        if not rows:
            return ()
        # An annotation counts for all, but only the changes after it carry it if they are many.
        events = _TransactionEvents(transaction[-1])
        root = events.annotation.root
        if root is None:
            return _row_by_row(rows, events)
        named = _named(rows, root)
        if named is not None and named.shape.included:
            return _as_one(rows, named, events)
        if named is None:
            whole = transaction[0].ordinal == 1 and transaction[-1].last
            events.add_problem(_no_root(root, whole=whole))
        return _row_by_row(rows, events)


def _named(rows: Sequence[EntityRow], root: str) -> EntityRow | None:
    """The first change of the row that an annotation means by `User:7`, under its old id too."""
    name, _, id = root.partition(":")
    return next((row for row in rows if row.is_named(name, id)), None)


def _no_root(root: str, *, whole: bool) -> str:
    missing = f"root {root} names no row of this transaction"
    return missing if whole else f"{missing}, of which only a part is at hand"


def _as_one(
    rows: Sequence[EntityRow], named: EntityRow, events: "_TransactionEvents"
) -> list[Rendered]:
    """The one event of a mutation of one entity, by one of that entity's changes."""
    every = histories(rows)
    (about,) = (history for history in every if named in history)
    root = netted(about)
    if root.operation not in root.shape.emitted:
        return []
    others = [each for each in every if each is not about and each[-1].shape.included]
    if not others:
        return [events.event(root, _cascade(root, ()))]
    folded = _folded(rows, frozenset(about))
    cascade = Cascade(root)
    for history in others:
        cascade.add(history, folded=history[-1] in folded)
    return [events.event(root, cascade.written())]


def _folded(rows: Sequence[EntityRow], about: Set[EntityRow]) -> set[EntityRow]:
    """The changes that deleted rows because those that a mutation is about were deleted."""
    deleted = [row for row in rows if row.operation == "DELETE"]
    roots = [at for at, row in enumerate(deleted) if row in about]
    return {deleted[at] for at in ForeignKeyGraph(deleted).below(roots)} if roots else set()


def _row_by_row(rows: Sequence[EntityRow], events: "_TransactionEvents") -> list[Rendered]:
    """An event for each row, but for those that were deleted with another one."""
    emitted = [row for row in rows if row.operation in row.shape.emitted]
    if len(rows) == 1:  # the most frequent one, and the dearest: nothing is shared
        return [events.event(row, _cascade(row, ())) for row in emitted]
    folded, detached = cascaded_deletes([row for row in rows if row.operation == "DELETE"])
    elsewhere = set(chain.from_iterable(folded.values()))
    return [
        events.event(row, _cascade(row, folded.get(row, ())), detached=row in detached)
        for row in emitted
        if row not in elsewhere
    ]


def _cascade(row: EntityRow, below: Sequence[EntityRow]) -> bytes:
    """What a row takes with it; the same for all of a table that take nothing."""
    alone = None if below else row.shape.alone.get(row.operation)
    if alone is not None:
        return alone
    cascade = Cascade(row)
    cascade.fold(below)
    written = cascade.written()
    if not below and not row.shape.affected:
        row.shape.alone[row.operation] = written
    return written


class _TransactionEvents:
    """What all events of a transaction share."""

    __slots__ = ("_time", "_transaction", "_user", "annotation")

    def __init__(self, last: Change) -> None:
        transaction = last.transaction
        metadata = transaction.metadata
        self.annotation = annotation = NO_ANNOTATION if metadata is None else read(metadata)
        seconds, rest = divmod(transaction.commit_time, 1_000_000)
        self._time = b"%b.%06dZ" % (second(seconds), rest)
        self._transaction = b',"transaction_id":%b,"session_id":%b' % (
            _encode(transaction.id),
            annotation.session_id,
        )
        self._user = b"" if annotation.user is None else b',"user":%b' % annotation.user

    def add_problem(self, problem: str) -> None:
        """Say in every event what is wrong with the annotation."""
        problems = filter(None, (self.annotation.annotation_error, problem))
        self.annotation = self.annotation._replace(annotation_error="; ".join(problems))

    def event(self, row: EntityRow, cascade: bytes, *, detached: bool = False) -> Rendered:
        """The event of a row; `detached`: it was deleted with a row that no event reports."""
        change, shape, operation = row.change, row.shape, row.operation
        payload = _EVENTS[operation] % (
            change.id.encode(),
            self._time,
            change.sequence,
            shape.opening,
            self._transaction,
            b"" if shape.schema is None else self._user + shape.schema,
            shape.label,
            _entity(row),
            trigger(self.annotation, change, detached=detached),
            self._time,
            _OPERATIONS[operation](row),
            cascade,
            self._metadata(row),
        )
        return Rendered(change.sequence, one_line(payload))

    def _metadata(self, row: EntityRow) -> bytes:
        """What is known, and nothing else."""
        annotation, change = self.annotation, row.change
        copied = change.op is _READ
        partly = change.before_kind is not _FULL and row.operation != "CREATE"
        unchanged = row.unchanged() if change.unchanged else ()
        if annotation is NO_ANNOTATION and not (copied or partly or unchanged):
            return b""
        custom = annotation.custom if row.operation in annotation.fitting else annotation.misfit
        custom = _members(custom, b'"snapshot":true' if copied else b"")
        return _members(
            annotation.request,
            b'"custom_fields":{%b}' % custom if custom else b"",
            b'"before_kind":"%b"' % change.before_kind._value_.encode() if partly else b"",
            b'"unchanged":%b' % row.shape.names(unchanged) if unchanged else b"",
            b'"error":%b' % annotation.error if annotation.error else b"",
            b'"annotation_error":%b' % _encode(annotation.annotation_error)
            if annotation.annotation_error
            else b"",
        )


def trigger(annotation: Annotation, change: Change, *, detached: bool = False) -> bytes:
    """Why a row was changed: what its annotation says, where that fits, or what is likely."""
    if CARRIED[change.op._value_] in annotation.fitting:
        return annotation.trigger
    if change.op is _READ:
        return b"data_migration"
    return b"cascade_delete" if detached else b"admin_action"


def _members(*members: bytes) -> bytes:
    return b",".join(filter(None, members))


# --- parts of an event ---------------------------------------------------------------------------


def _entity(row: EntityRow) -> bytes:
    """The members of `entity` after its type."""
    entity = row.shape.entity
    if row.shape.plain:
        return b'"entity_id":%b,"tenant_id":null' % row.id
    members = b'"entity_id":%b' % row.id
    if entity.identifier and (identifier := row.text(entity.identifier)):
        members += b',"entity_identifier":%b' % identifier
    tenant = row.text(entity.tenant) if entity.tenant else None
    members += b',"tenant_id":%b' % (tenant or b"null")
    if entity.version and _WHOLE.fullmatch(version := row.text(entity.version) or b""):
        members += b',"version":%b' % version[1:-1]
    if entity.soft_delete and (mark := row.value(entity.soft_delete)) is not None:
        members += b',"is_soft_deleted":%b' % (b"false" if bytes(mark) == b"null" else b"true")
    return members


def _created(row: EntityRow) -> bytes:
    shape = row.shape
    return b'"after":%b,"changed_fields":%b' % (
        shape.image("CREATE", row.change.after, row.after),
        shape.names(row.changed()),
    )


def _updated(row: EntityRow) -> bytes:
    shape, change, names = row.shape, row.change, row.changed()
    return b'"before":%b,"after":%b,"changed_fields":%b,"changed_field_values":{%b}' % (
        shape.image("UPDATE", change.before, row.before),
        shape.image("UPDATE", change.after, row.after),
        shape.names(names),
        _differences(row, names),
    )


def _differences(row: EntityRow, names: Sequence[str]) -> bytes:
    """Old and new values, of columns of which both are known."""
    labels, before, after = row.shape.labels, row.before, row.after
    members = []
    for name in names:
        old, new = before.get(name), after.get(name)
        if old is not None and new is not None and old != new:
            members.append(b'%b:{"before":%b,"after":%b}' % (labels[name], old, new))
    return b",".join(members)


def _deleted(row: EntityRow) -> bytes:
    shape = row.shape
    return b'"before":%b,"after":null,"changed_fields":%b' % (
        shape.image("DELETE", row.change.before, row.before),
        shape.deleted_fields,
    )


_OPERATIONS = {"CREATE": _created, "UPDATE": _updated, "DELETE": _deleted}


# --- choosing events -----------------------------------------------------------------------------


class _DecodedEntity(msgspec.Struct):
    entity_type: str
    tenant_id: str | None


class _DecodedOperation(msgspec.Struct):
    trigger: str
    changed_fields: tuple[str, ...]


class _DecodedCascade(msgspec.Struct):
    updated: tuple[msgspec.Raw, ...]
    deleted: tuple[msgspec.Raw, ...]


class _DecodedOthers(msgspec.Struct):
    cascade: _DecodedCascade


class _DecodedEvent(msgspec.Struct):
    event_type: str
    entity: _DecodedEntity
    operation: _DecodedOperation

    @property
    def entity_type(self) -> str:
        return self.entity.entity_type

    @property
    def tenant_id(self) -> str | None:
        return self.entity.tenant_id

    @property
    def trigger(self) -> str:
        return self.operation.trigger

    @property
    def changed_fields(self) -> tuple[str, ...]:
        return self.operation.changed_fields


_decode_event = msgspec.json.Decoder(_DecodedEvent).decode
_decode_cascade = msgspec.json.Decoder(_DecodedOthers).decode


def reports_other_rows(event: bytes) -> bool:
    """Whether a rendered event reports other rows than its entity's own."""
    cascade = _decode_cascade(event).cascade
    return bool(cascade.updated or cascade.deleted)


class Filterable(Protocol):
    """What the filters look at, of an event or of one change alone."""

    @property
    def event_type(self) -> str: ...
    @property
    def entity_type(self) -> str: ...
    @property
    def tenant_id(self) -> str | None: ...
    @property
    def trigger(self) -> str: ...
    @property
    def changed_fields(self) -> tuple[str, ...]: ...


def _about(description: str, *, most: int | None = None) -> msgspec.Meta:
    """What a filter is for; `most`: characters of a pattern, or names in a list."""
    return msgspec.Meta(description=description, max_length=most)


class EntityFilter(msgspec.Struct, frozen=True):
    """Which events somebody wants; what is left out says nothing about them."""

    event_type: Annotated[
        str,
        _about("only entity events of this type; a pattern, such as entity:*", most=LONGEST_GLOB),
    ] = "*"
    entity_type: Annotated[str | None, _about("only this type of entity")] = None
    tenant_id: Annotated[str | None, _about("only this tenant's rows")] = None
    trigger: Annotated[
        str, _about("only what was made so; a pattern, such as api_*", most=LONGEST_GLOB)
    ] = "*"
    changed_fields: Annotated[
        tuple[str, ...], _about("only where one of these columns changed", most=MOST_GLOBS)
    ] = ()

    def wants(self, event: bytes) -> bool:
        """Whether a rendered event is one of them."""
        return self.fits(_decode_event(event))

    def fits(self, one: Filterable) -> bool:
        """Whether all conditions hold; the cheap ones come first, and only those given count."""
        return (
            (self.event_type == "*" or matches(one.event_type, self.event_type))
            and (self.entity_type is None or self.entity_type == one.entity_type)
            and (self.trigger == "*" or matches(one.trigger, self.trigger))
            and (self.tenant_id is None or self.tenant_id == one.tenant_id)
            and (
                not self.changed_fields
                or not set(self.changed_fields).isdisjoint(one.changed_fields)
            )
        )
