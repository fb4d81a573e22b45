"""Changes as a PostgreSQL source makes them, in all their variety, for hypothesis.

`transactions()` gives the changes of one whole transaction, `changes()` a single one of them.
Keys come from few values, so that rows of a transaction meet: parents are deleted with their
children, rows change twice.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from headrace.change.event import BeforeKind, Change, Column, Op, Reference, Table, Transaction
from headrace.change.lsn import format_lsn
from headrace.sources.postgres.position import PostgresPosition

Values = Mapping[str, bytes]  # a row: its columns' values as JSON

ORIGIN = "postgres:7412345678901234567:shop"
FIRST_RELATION = 16384
LAST_MICROSECOND = 253_402_300_799_999_999  # of the year 9999

# --- values --------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def _texts(*values: str) -> SearchStrategy[bytes]:
    return st.sampled_from(values).map(msgspec.json.encode)


def _compact(document: Any) -> bytes:
    # Not msgspec, which refuses integers of more than 64 bits; the database does not.
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _as_written(document: Any, end: str) -> bytes:
    """A document with the white space its author left in it."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return text.replace("\n", end).encode()


@dataclass(frozen=True)
class Kind:
    """A type of columns, and its values as a change carries them."""

    type: str
    oid: int
    values: SearchStrategy[bytes]


KINDS = (
    Kind("smallint", 21, st.integers(-(1 << 15), (1 << 15) - 1).map(msgspec.json.encode)),
    Kind("bigint", 20, st.integers(-(1 << 63), (1 << 63) - 1).map(msgspec.json.encode)),
    Kind("numeric(12,2)", 1700, _texts("0.00", "-99.99", "12345678901234567890.10", "NaN")),
    Kind(
        "double precision",
        701,
        st.floats(allow_nan=False, allow_infinity=False).map(msgspec.json.encode)
        | _texts("NaN", "-Infinity"),
    ),
    Kind("boolean", 16, st.sampled_from((b"true", b"false"))),
    Kind("text", 25, TEXT.map(msgspec.json.encode)),
    Kind("character varying(40)", 1043, TEXT.map(msgspec.json.encode)),
    Kind(
        "timestamp without time zone",
        1114,
        _texts("2025-01-15T10:30:00Z", "2025-01-15T10:30:00.123456Z", "0044-03-15 00:00:00 BC"),
    ),
    Kind(
        "timestamp with time zone",
        1184,
        _texts("2025-01-15T10:30:00+00:00", "infinity", "12025-01-15 10:30:00+00"),
    ),
    Kind("date", 1082, _texts("2025-01-15", "-infinity", "0044-03-15 BC")),
    Kind("time without time zone", 1083, _texts("10:30:00", "24:00:00", "10:30:00.000001")),
    Kind("uuid", 2950, st.uuids().map(str).map(msgspec.json.encode)),
    Kind(
        "json",
        114,
        st.builds(_as_written, DOCUMENTS, st.sampled_from(("\n", "\r", "\r\n")))
        | st.just(b'{"a":1.10000000000000000001,"a" : 12345678901234567890123}'),
    ),
    Kind("jsonb", 3802, DOCUMENTS.map(_compact)),
    Kind("bytea", 17, st.binary(max_size=9).map(msgspec.json.encode)),
    Kind("integer[]", 1007, st.sampled_from((b"[]", b"[1,null,3]", b"[[1,2],[3,4]]"))),
    Kind("inet", 869, _texts("192.168.0.1", "2001:db8::/32")),
    Kind("point", 600, st.sampled_from((b'{"x":1.0,"y":-2.5}', b'{"x":"NaN","y":0.0}'))),
)
KEY_KINDS = (
    Kind("integer", 23, st.integers(1, 3).map(msgspec.json.encode)),
    Kind("text", 25, _texts("alice", "a:b", "50%", "Ä 😀", "")),
    Kind(
        "uuid",
        2950,
        _texts("550e8400-e29b-41d4-a716-446655440000", "00000000-0000-4000-8000-000000000001"),
    ),
)
_KEY_VALUES = {kind.type: kind.values for kind in KEY_KINDS}
_POINTERS = {kind.type: st.just(b"null") | kind.values for kind in KEY_KINDS}
_VALUES = {kind.type: st.just(b"null") | kind.values for kind in KINDS}

# --- tables --------------------------------------------------------------------------------------

TABLE_NAMES = (
    "users",
    "orders",
    "order_items",
    "posts",
    'odd "name"',
    "Größe %s",
    "a.b:c\\d",
    "表",
)
COLUMN_NAMES = (
    "name",
    "email",
    "status",
    "total",
    "deleted_at",
    "updated_at",
    "tenant_id",
    "version",
    'say "hi"',
    "100%b",
    "back\\slash",
    "line\nend",
    "naïve 😀",
    "{brace}",
    "before",
)
SCHEMA_NAMES = ("public", "public", "sales", "Über 'x'")


@st.composite
def tables(draw: DrawFn) -> tuple[Table, ...]:
    """Up to three tables of a database, some of them with foreign keys to one another."""
    names = draw(st.lists(st.sampled_from(TABLE_NAMES), min_size=1, max_size=3, unique=True))
    made: list[Table] = []
    for name in names:
        made.append(draw(_another_table(name, made)))
    return tuple(made)


@st.composite
def _another_table(draw: DrawFn, name: str, others: Sequence[Table]) -> Table:
    key = draw(_KEYS)
    schema = draw(st.sampled_from(SCHEMA_NAMES))
    bare = Table("shop", "postgres", ORIGIN, "shop", schema, name, key)
    parents = [each for each in (*others, bare) if each.key]
    named = draw(st.lists(st.sampled_from(parents), max_size=2)) if parents else []
    references = tuple(_reference(number, parent) for number, parent in enumerate(named))
    pointers = tuple(
        Column(column, original.type, type_id=original.type_id)
        for reference, parent in zip(references, named, strict=True)
        for column, original in zip(reference.columns, parent.columns, strict=False)
    )
    identities = ("default", "full", "full", "index", "nothing") if key else ("full", "nothing")
    return msgspec.structs.replace(
        bare,
        columns=(*key, *pointers, *draw(_COLUMNS)),
        identity=draw(st.sampled_from(identities)),
        relation=FIRST_RELATION + len(others),
        version=1 + len(others),
        references=references,
    )


_KEYS = st.lists(st.sampled_from(KEY_KINDS), max_size=2).map(
    lambda kinds: tuple(
        Column(name, kind.type, key=True, type_id=kind.oid)
        for name, kind in zip(("id", "line"), kinds, strict=False)
    )
)
_COLUMNS = st.lists(
    st.tuples(st.sampled_from(COLUMN_NAMES), st.sampled_from(KINDS)),
    max_size=5,
    unique_by=lambda named: named[0],
).map(lambda named: tuple(Column(name, kind.type, type_id=kind.oid) for name, kind in named))


def _reference(number: int, parent: Table) -> Reference:
    columns = tuple(f"parent{number}_{name}" for name in parent.key)
    return Reference(columns, parent.schema, parent.name, parent.key)


@st.composite
def _rows(draw: DrawFn, table: Table) -> Values:
    pointers = {name for reference in table.references for name in reference.columns}
    row: dict[str, bytes] = {}
    for column in table.columns:
        values = _POINTERS if column.name in pointers else _VALUES
        row[column.name] = draw((_KEY_VALUES if column.key else values)[column.type])
    return row


# --- what happens to tables ----------------------------------------------------------------------


class _Draft(NamedTuple):
    """A change that does not know yet where it stands in its transaction."""

    op: Op
    table: Table
    key: bytes | None = None
    before: bytes | None = None
    before_kind: BeforeKind = BeforeKind.NONE
    after: bytes | None = None
    changed: tuple[str, ...] | None = None
    unchanged: tuple[str, ...] = ()


def _image(row: Values) -> bytes:
    return b"{%b}" % b",".join(
        [msgspec.json.encode(name) + b":" + value for name, value in row.items()]
    )


def _key(table: Table, row: Values) -> bytes | None:
    # A key column that was not sent has not changed, but its value is not known.
    if not table.key or not set(table.key) <= row.keys():
        return None
    return _image({name: row[name] for name in table.key})


@st.composite
def _new_rows(draw: DrawFn, op: Op, table: Table) -> _Draft:
    row = draw(_rows(table))
    return _Draft(op, table, _key(table, row), after=_image(row))


@st.composite
def _updates(draw: DrawFn, table: Table) -> _Draft:
    old, new = draw(_rows(table)), draw(_rows(table))
    names = list(new)
    some_names = st.lists(st.sampled_from(names), unique=True) if names else st.just([])
    if table.identity == "full":
        kept = draw(some_names)
        new = {name: old[name] if name in kept else new[name] for name in names}
        changed = tuple(name for name in names if old[name] != new[name])
        return _Draft(
            Op.UPDATE,
            table,
            _key(table, new),
            _image(old),
            BeforeKind.FULL,
            _image(new),
            changed,
        )
    unchanged = draw(st.just([]) | some_names)
    sent = {name: value for name, value in new.items() if name not in unchanged}
    tells_key = bool(table.key) and table.identity != "nothing" and draw(st.booleans())
    return _Draft(
        Op.UPDATE,
        table,
        _key(table, sent),
        _key(table, old) if tells_key else None,
        BeforeKind.KEY if tells_key else BeforeKind.NONE,
        _image(sent),
        unchanged=tuple(name for name in names if name in unchanged),
    )


@st.composite
def _deletes(draw: DrawFn, table: Table) -> _Draft:
    old = draw(_rows(table))
    key = _key(table, old)
    if table.identity == "full":
        return _Draft(Op.DELETE, table, key, _image(old), BeforeKind.FULL)
    if table.identity == "nothing" or key is None:
        return _Draft(Op.DELETE, table)
    return _Draft(Op.DELETE, table, key, key, BeforeKind.KEY)


@st.composite
def _truncates(draw: DrawFn, known: Sequence[Table]) -> Sequence[_Draft]:
    emptied = draw(st.lists(st.sampled_from(known), min_size=1, unique_by=lambda t: t.relation))
    said = {
        "cascade": draw(st.booleans()),
        "restart_identity": draw(st.booleans()),
        "relations": [table.relation for table in emptied],
    }
    return [_Draft(Op.TRUNCATE, table, after=msgspec.json.encode(said)) for table in emptied]


@st.composite
def _schemas(draw: DrawFn, table: Table) -> _Draft:
    columns = [{"name": each.name, "type": each.type, "key": each.key} for each in table.columns]
    command = f'ALTER TABLE "{table.name}"\nADD COLUMN age integer'
    altered = {"ddl_type": "ALTER_TABLE", "ddl_command": command}
    dropped = {"ddl_type": "DROP_TABLE", "ddl_command": "DROP TABLE x", "dropped": True}
    said = draw(st.sampled_from(({"columns": columns}, {"columns": columns, **altered}, dropped)))
    return _Draft(Op.SCHEMA, table, after=msgspec.json.encode(said))


@st.composite
def _messages(draw: DrawFn, table: Table) -> _Draft:
    spoken: dict[str, Any] = {"prefix": draw(TEXT), "transactional": True}
    unread = {"error": "the server sent a boolean that does not read as one", "operation": "UPDATE"}
    said = draw(
        st.sampled_from(
            (
                spoken | {"content": "price list\nchanged"},
                spoken | {"content_base64": "/wA="},
                unread | {"pgoutput": "SQAAQAFOAAE="},
            )
        )
    )
    nowhere = Table("shop", "postgres", ORIGIN, "shop", "", "", version=99)
    return _Draft(
        Op.MESSAGE, table if "error" in said else nowhere, after=msgspec.json.encode(said)
    )


_STREAMED = (*[Op.INSERT, Op.UPDATE, Op.DELETE] * 3, Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE)


@st.composite
def _streamed(draw: DrawFn, known: Sequence[Table]) -> Sequence[_Draft]:
    """What a change of a running database adds; a TRUNCATE may add several."""
    op, table = draw(st.sampled_from(_STREAMED)), draw(st.sampled_from(known))
    match op:
        case Op.UPDATE:
            return [draw(_updates(table))]
        case Op.DELETE:
            return [draw(_deletes(table))]
        case Op.TRUNCATE:
            return draw(_truncates(known))
        case Op.SCHEMA:
            return [draw(_schemas(table))]
        case Op.MESSAGE:
            return [draw(_messages(table))]
    return [draw(_new_rows(op, table))]


# --- transactions --------------------------------------------------------------------------------

_ODD = st.sampled_from((None, 7, ["x"], {"a": 1}))  # anybody may write an annotation

ANNOTATIONS: SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "root": st.sampled_from(("User:1", "Order:2", "OrderItem:1:alice", "User:", "no root"))
        | _ODD,
        "trigger": st.sampled_from(("api_create", "api_delete", "admin_action", "data_migration"))
        | _ODD,
        "session_id": st.uuids().map(lambda uuid: f"sess_{uuid}") | _ODD,
        "request_id": st.uuids().map(lambda uuid: f"req_{uuid}"),
        "user_id": TEXT | _ODD,
        "user_roles": st.lists(TEXT, max_size=2) | _ODD,
        "ip_address": st.just("203.0.113.7"),
        "user_agent": TEXT,
        "api_version": st.just("2.1.0"),
        "custom_fields": st.dictionaries(TEXT, DOCUMENTS, max_size=2) | _ODD,
        "error": TEXT | st.just({"code": "partial", "message": "2 of 3 rows"}),
        "user": TEXT,
        "workflow step": DOCUMENTS,
        "annotation_error": st.just("not JSON: {root: \x01"),
    },
)


@st.composite
def _circumstances(draw: DrawFn, id: str) -> Transaction:
    committed = draw(st.integers(0, LAST_MICROSECOND - 1_000_000))
    said = draw(st.none() | ANNOTATIONS)
    return Transaction(
        id,
        committed,
        committed + draw(st.integers(0, 1_000_000)),
        None if said is None else _compact(said),
    )


@st.composite
def transactions(draw: DrawFn) -> list[Change]:
    """The changes of one transaction, as a reader of the log gets them."""
    known = draw(tables())
    start = draw(st.integers(1, 1 << 40))
    if draw(st.integers(0, 4)) == 0:
        drafts = draw(_snapshots(draw(st.sampled_from(known))))
        transaction = draw(_circumstances(f"snapshot-{format_lsn(start)}-sales.orders-(0,1)"))
        # Nobody annotates a copy.
        return list(_placed(drafts, msgspec.structs.replace(transaction, metadata=None), start))
    told = draw(st.lists(_streamed(known), min_size=1, max_size=10))
    transaction = draw(_circumstances(str(draw(st.integers(3, (1 << 64) - 1)))))
    return list(_placed([draft for each in told for draft in each], transaction, start))


@st.composite
def _snapshots(draw: DrawFn, table: Table) -> Sequence[_Draft]:
    """Rows that were copied, or what is said before them."""
    if draw(st.integers(0, 3)) == 0:
        said = {"snapshot": True, "relations": [table.relation]}
        again = _Draft(Op.TRUNCATE, table, after=msgspec.json.encode(said))
        return [draw(_schemas(table)), again]
    return draw(st.lists(_new_rows(Op.READ, table), min_size=1, max_size=4))


def _placed(drafts: Sequence[_Draft], transaction: Transaction, start: int) -> Iterator[Change]:
    commit_lsn = start + 64 * len(drafts)
    for ordinal, draft in enumerate(drafts, 1):
        last = ordinal == len(drafts)
        # Two changes share a record where a statement inserts several rows at once.
        lsn = start + 64 * (ordinal // 2)
        position = PostgresPosition(commit_lsn, lsn, commit_lsn + 48 if last else 0)
        yield Change(*draft, transaction, ordinal, position, last, start + ordinal)


def changes() -> SearchStrategy[Change]:
    """Any change of any transaction."""
    return transactions().flatmap(st.sampled_from)
