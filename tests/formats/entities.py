"""A small shop's tables, transactions on them, and the entity events these make."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from headrace.change.event import BeforeKind, Change, Column, Op, Reference, Table, Transaction
from headrace.formats.entity import Entity
from headrace.model import EntityType, Model
from tests.changes import COMMIT_TIME, make_change

Event = dict[str, Any]
Row = dict[str, Any]

FIRST = 101  # the sequence of a transaction's first change


def make_entity_table(
    name: str,
    *columns: str,
    references: Sequence[Reference] = (),
    schema: str = "public",
    key: Sequence[str] = ("id",),
) -> Table:
    """A table with the columns of its key and these."""
    every = (
        *(Column(each, "text", key=True) for each in key),
        *(Column(c, "text") for c in columns),
    )
    return Table(
        "shop",
        "postgres",
        "postgres:1:shop",
        "shop",
        schema,
        name,
        every,
        version=1,
        references=tuple(references),
    )


def to(table: str, column: str, parent_column: str = "id") -> Reference:
    """A foreign key of one column."""
    return Reference((column,), "public", table, (parent_column,))


USERS = make_entity_table("users", "email", "status")
POSTS = make_entity_table("posts", "user_id", references=[to("users", "user_id")])
COMMENTS = make_entity_table(
    "comments",
    "post_id",
    "author_id",
    references=[to("posts", "post_id"), to("users", "author_id")],
)


class Step(NamedTuple):
    """What happens to one row."""

    op: Op
    table: Table
    before: Row | None = None
    after: Row | None = None
    fields: Mapping[str, Any] = MappingProxyType({})


def inserted(table: Table, **row: Any) -> Step:
    """A new row."""
    return Step(Op.INSERT, table, after=row)


def updated(table: Table, before: Row, **new: Any) -> Step:
    """A row of which the source sent everything."""
    changed = tuple(name for name, value in new.items() if before.get(name) != value)
    return Step(Op.UPDATE, table, before, before | new, {"changed": changed})


def deleted(table: Table, **row: Any) -> Step:
    """A row that is gone, and of which the source sent everything."""
    return Step(Op.DELETE, table, before=row)


def deleted_by_key(table: Table, **key: Any) -> Step:
    """A row that is gone, and of which the source sent the key alone."""
    return Step(Op.DELETE, table, key, None, {"before_kind": BeforeKind.KEY})


def transaction(*steps: Step, said: object = None) -> list[Change]:
    """The changes of one transaction, with what its application said about it."""
    metadata = None if said is None else msgspec.json.encode(said)
    shared = Transaction("7", COMMIT_TIME, COMMIT_TIME + 500, metadata)
    return [
        make_change(
            op,
            table=table,
            key={name: (after or before or {})[name] for name in table.key},
            before=before,
            after=after,
            transaction=shared,
            ordinal=ordinal,
            last=ordinal == len(steps),
            sequence=FIRST + ordinal - 1,
            **fields,
        )
        for ordinal, (op, table, before, after, fields) in enumerate(steps, 1)
    ]


def model(*entities: EntityType, **settings: Any) -> Model:
    """A model of these entities."""
    return Model(entities=entities, **settings)


def render(changes: Sequence[Change], by: Model | None = None) -> list[Event]:
    """The events of a transaction."""
    events = Entity(by or Model()).render(changes)
    decoded: list[Event] = [json.loads(event.payload) for event in events]
    assert [event["sequence_number"] for event in decoded] == [each.sequence for each in events]
    return decoded


def render_one(changes: Sequence[Change], by: Model | None = None) -> Event:
    """The only event of a transaction."""
    (event,) = render(changes, by)
    return event


def ids(entries: Sequence[Event]) -> list[str]:
    """Entities as `User:7`, of events or of what a cascade lists."""
    told = [entry.get("entity", entry) for entry in entries]
    return [f"{each['entity_type']}:{each['entity_id']}" for each in told]
