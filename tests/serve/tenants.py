"""A shop of two tenants: every id and value says whose it is, so that nothing leaks unseen."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from headrace.change.event import BeforeKind, Change, Column, Op, Reference, Table, Transaction
from headrace.formats.catalogue import Formats
from headrace.model import EntityType, Model
from headrace.sources.postgres.position import PostgresPosition
from tests.changes import COMMIT_TIME, Writer

OURS, THEIRS = "qqa", "qqb"  # texts that stand nowhere else
MODEL = Model(
    tenant="tenant_id",
    affected_entities=True,
    entities=(EntityType(name="User", table="users", identifier="name"),),
)
FORMATS = Formats(model=MODEL)

_numbers = itertools.count(1)


def _table(name: str, *columns: Column, **fields: Any) -> Table:
    return Table("shop", "postgres", "origin", "shop", "public", name, columns, **fields)


_ID, _TENANT = Column("id", "text", key=True), Column("tenant_id", "text")
USERS = _table("users", _ID, _TENANT, Column("name", "text"), Column("status", "text"))
ORDERS = _table(
    "orders",
    Column("tenant_id", "text", key=True),
    _ID,
    Column("user_id", "text"),
    references=(Reference(("user_id",), "public", "users", ("id",)),),
)
COLOURS = _table("colours", _ID, Column("name", "text"))  # nobody's
NOTHING = _table("")


class Draft(msgspec.Struct, frozen=True):
    """A change that is not in a transaction yet."""

    op: Op
    table: Table
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    kind: BeforeKind = BeforeKind.NONE


def append(writer: Writer, drafts: Sequence[Draft], said: Mapping[str, Any] | None = None) -> int:
    """Write a transaction; returns its last sequence."""
    number = next(_numbers)
    metadata = None if said is None else msgspec.json.encode(said)
    transaction = Transaction(str(number), COMMIT_TIME, COMMIT_TIME, metadata)
    return writer.append(
        [
            Change(
                draft.op,
                writer.log.register(draft.table),
                _json(_picked(draft.after or draft.before, draft.table.key)),
                _json(draft.before),
                draft.kind,
                _json(draft.after),
                _changed(draft),
                (),
                transaction,
                ordinal,
                PostgresPosition(number * 100, number * 100 - 50 + ordinal),
                last=ordinal == len(drafts),
            )
            for ordinal, draft in enumerate(drafts, 1)
        ]
    )


def _changed(draft: Draft) -> tuple[str, ...] | None:
    before, after = draft.before, draft.after
    if draft.op is not Op.UPDATE or before is None or after is None:
        return None
    if draft.kind is not BeforeKind.FULL:
        return None
    return tuple(name for name in after if after[name] != before.get(name))


def _picked(row: Mapping[str, Any] | None, names: Sequence[str]) -> Mapping[str, Any] | None:
    if row is None or not names or not set(names) <= row.keys():
        return None
    return {name: row[name] for name in names}


def _json(row: Mapping[str, Any] | None) -> bytes | None:
    return None if row is None else msgspec.json.encode(row)


# --- random transactions -------------------------------------------------------------------------

_TENANTS = st.sampled_from([OURS, OURS, THEIRS])
_SMALL = st.integers(1, 3)


@st.composite
def _rows(draw: DrawFn, table: Table) -> dict[str, Any]:
    tenant = draw(_TENANTS)
    row: dict[str, Any] = {"id": f"{tenant}-{draw(_SMALL)}", "tenant_id": tenant}
    if table is USERS:
        return row | {"name": f"{tenant} name {draw(_SMALL)}", "status": f"{tenant}{draw(_SMALL)}"}
    return row | {"user_id": f"{tenant}-{draw(_SMALL)}"}


@st.composite
def _old(draw: DrawFn, table: Table, new: Mapping[str, Any] | None) -> Draft:
    """What is known of the old row: all of it, its key, or nothing."""
    kind = draw(st.sampled_from(list(BeforeKind)))
    old = draw(_rows(table) if new is None else st.one_of(st.just(dict(new)), _rows(table)))
    op = Op.DELETE if new is None else Op.UPDATE
    if kind is BeforeKind.NONE and new is not None:
        return Draft(op, table, None, new)
    if kind is BeforeKind.FULL:
        return Draft(op, table, old, new, kind)
    return Draft(op, table, _picked(old, table.key), new, BeforeKind.KEY)


@st.composite
def drafts(draw: DrawFn) -> Draft:
    """Any change."""
    table = draw(st.sampled_from([USERS, USERS, ORDERS]))
    op = draw(st.sampled_from([*Op, Op.DELETE, Op.UPDATE, Op.DELETE]))
    match op:
        case Op.MESSAGE:
            return Draft(op, NOTHING, None, {"prefix": "x", "content": f"{THEIRS} secret"})
        case Op.TRUNCATE | Op.SCHEMA:
            return Draft(op, table, None, {"sql": f"-- {THEIRS}"})
        case Op.DELETE:
            return draw(_old(table, None))
        case Op.UPDATE:
            return draw(_old(table, draw(_rows(table))))
    if draw(st.integers(0, 5)) == 0:
        return Draft(op, COLOURS, None, {"id": f"{THEIRS}-1", "name": THEIRS})
    return Draft(op, table, None, draw(_rows(table)))


ROOTS = st.builds(
    "{}:{}-{}".format, st.sampled_from(["User", "Order"]), st.sampled_from([OURS, THEIRS]), _SMALL
)
SAID = st.none() | st.builds(
    lambda root, trigger: {"root": root, "trigger": trigger, "user_id": "u1"},
    ROOTS,
    st.sampled_from(["api_create", "data_migration"]),
)
HISTORIES = st.lists(st.tuples(st.lists(drafts(), min_size=1, max_size=5), SAID), max_size=4)


def ours(change: Change) -> bool:
    """Whether a change is our tenant's, found out in another way than the server does."""
    if change.op in (Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE) or change.table.name == "colours":
        return False
    images = [json.loads(each) for each in (change.after, change.before, change.key) if each]
    owners = {image["tenant_id"] for image in images if "tenant_id" in image}
    texts = "".join(map(json.dumps, images))
    return owners == {OURS} and THEIRS not in texts and not _moved(images)


def _moved(images: Sequence[Mapping[str, Any]]) -> bool:
    """A row whose old key is another one's, which does not say whose it was."""
    return len({image["id"] for image in images}) > 1 and not all(
        "tenant_id" in image for image in images[:2]
    )
