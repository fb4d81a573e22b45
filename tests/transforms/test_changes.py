"""What sinks that hand changes on may see of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from headrace.change.arrow import decode
from headrace.change.arrow.frame import FIELDS, Framing
from headrace.change.event import BeforeKind, Change, Column, Op, Reference, Table
from headrace.errors import TableFailed
from headrace.formats.catalogue import Formats
from headrace.pipeline.options import Options
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.secret import Secret
from headrace.sinks import LogRange
from headrace.sinks.push.events import EventRendering
from headrace.transforms import Mask, TableTransform, Transforms
from headrace.transforms.changes import ShapedChanges
from headrace.transforms.frames import ShapedFrames
from headrace.transforms.shape import fitted, masked
from tests.sinks.lake import Shop, change, put, remove, schema, truncate

MASK = Mask(Secret("a key of sixteen or more"))
COLUMNS = (
    Column("id", "bigint", key=True),
    Column("name", "text"),
    Column("country", "text"),
)
USERS = Table("shop", "postgres", "origin-1", "shop", "public", "users", COLUMNS, version=1)


def shaped(rule: TableTransform, *changes: Change) -> list[Change]:
    return ShapedChanges(Transforms({"public.users": rule}, "hook"))(changes)


def update(old: dict[str, Any] | None, new: dict[str, Any]) -> Change:
    """An update; with its old row, where the source sends it."""
    made = put(USERS, Op.UPDATE, **new)
    if old is None:
        return made
    image = msgspec.json.encode(old)
    return msgspec.structs.replace(made, before=image, before_kind=BeforeKind.FULL)


def user(number: int, country: str, name: str = "ann") -> dict[str, Any]:
    return {"id": number, "name": name, "country": country}


HIDES_XX = TableTransform(where="country <> 'XX'")


@pytest.mark.parametrize(
    ("made", "ops"),
    [
        (put(USERS, **user(1, "DE")), [Op.INSERT]),
        (put(USERS, **user(1, "XX")), []),
        (put(USERS, Op.READ, **user(1, "XX")), []),
        (update(None, user(1, "DE")), [Op.UPDATE]),
        (update(None, user(1, "XX")), [Op.DELETE]),  # it may have been there
        (update(user(1, "DE"), user(1, "FR")), [Op.UPDATE]),
        (update(user(1, "DE"), user(1, "XX")), [Op.DELETE]),
        (update(user(1, "XX"), user(1, "DE")), [Op.INSERT]),
        (update(user(1, "XX"), user(1, "XX", "bob")), []),
        (remove(USERS, id=1), [Op.DELETE]),
        (
            msgspec.structs.replace(
                remove(USERS, id=1),
                before=msgspec.json.encode(user(1, "XX")),
                before_kind=BeforeKind.FULL,
            ),
            [],
        ),
        (truncate(USERS), [Op.TRUNCATE]),
    ],
)
def test_what_where_makes_of_a_change(made: Change, ops: Sequence[Op]) -> None:
    assert [each.op for each in shaped(HIDES_XX, made)] == ops


def test_a_row_that_leaves_is_deleted_by_the_key_that_it_had() -> None:
    moved = update(user(1, "DE"), user(2, "XX"))
    [left] = shaped(HIDES_XX, moved)
    assert (left.op, left.key, left.after) == (Op.DELETE, b'{"id":1}', None)
    assert left.id == moved.id


def test_every_image_is_selected_and_masked() -> None:
    rule = TableTransform(select=("id", "name"), mask={"id": MASK, "name": None})
    made = update(user(1, "DE"), user(2, "FR", "bob"))
    [found] = shaped(rule, msgspec.structs.replace(made, changed=("name", "country")))
    assert found.key == msgspec.json.encode({"id": MASK.code("2")})
    assert json.loads(found.before or b"") == {"id": MASK.code("1"), "name": None}
    assert json.loads(found.after or b"") == {"id": MASK.code("2"), "name": None}
    assert found.changed == ("name",)
    assert [(each.name, each.type, each.key) for each in found.table.columns] == [
        ("id", "text", True),
        ("name", "text", False),
    ]


def test_a_change_of_the_columns_names_those_that_are_seen() -> None:
    [found] = shaped(TableTransform(select=("id",)), schema(USERS))
    assert json.loads(found.after or b"")["columns"] == [
        {"name": "id", "type": "bigint", "key": True}
    ]


def test_where_cannot_guess_what_the_source_did_not_send() -> None:
    made = change(
        Op.UPDATE, USERS, key=b'{"id":1}', after=b'{"id":1,"name":"x"}', unchanged=("country",)
    )
    with pytest.raises(TableFailed, match="comes without country, which where looks at") as failed:
        shaped(HIDES_XX, made)
    assert "REPLICA IDENTITY FULL" in failed.value.hint


def test_an_error_names_the_sink_the_table_and_the_condition() -> None:
    rule = TableTransform(where="countri <> 'XX'")
    by_pattern, by_name = (Transforms({name: rule}, "hook") for name in ("*", "public.users"))
    for transforms, place in (
        (by_pattern, "hook.transforms.* (public.users)"),
        (by_name, "hook.transforms.public.users"),
    ):
        with pytest.raises(TableFailed) as raised:
            ShapedChanges(transforms)([put(USERS, id=1, name="ann", country="DE")])
        assert str(raised.value).startswith(f"{place}: there is no column countri; there are: id")
    wrong = Transforms({"*": TableTransform(where="country > 5")}, "hook")
    with pytest.raises(TableFailed, match=r"hook\.transforms\.\* \(public\.users\): .country > 5."):
        ShapedChanges(wrong)([put(USERS, id=1, name="ann", country="DE")])


def test_a_part_of_where_that_fails_decides() -> None:
    made = change(
        Op.UPDATE, USERS, key=b'{"id":9}', after=b'{"id":9,"name":"x"}', unchanged=("country",)
    )
    [left] = shaped(TableTransform(where="id < 5 AND country <> 'XX'"), made)
    assert (left.op, left.key, left.before) == (Op.DELETE, b'{"id":9}', b'{"id":9}')


def test_raw_rows_and_ddl_text_are_not_seen() -> None:
    raw = change(Op.MESSAGE, USERS, after=b'{"error":"x","operation":"INSERT","pgoutput":"U0VD"}')
    ddl = change(Op.SCHEMA, USERS, after=b'{"columns":[],"ddl_command":"ALTER SECRET"}')
    found = shaped(TableTransform(mask={"name": MASK}), raw, ddl)
    assert found[0].after == b'{"error":"x","operation":"INSERT"}'
    assert b"SECRET" not in (found[1].after or b"")
    message = change(Op.MESSAGE, msgspec.structs.replace(USERS, name="", columns=()), after=b"{}")
    assert ShapedChanges(Transforms({"*": HIDES_XX}))([message]) == [message]


def test_a_change_of_another_table_stays_as_it_is() -> None:
    other = msgspec.structs.replace(USERS, name="orders")
    made = put(other, **user(1, "XX"))
    assert shaped(HIDES_XX, made) == [made]


VALUES = {
    "bigint": b"12345678901234",
    "numeric(12,2)": b"1.50",
    "double precision": b"1e300",
    "boolean": b"true",
    "text": b'"a \\"b\\" \\u00e9"',
    "jsonb": b'{"a": [1, "x"]}',
    "json": b'"only text"',
    "date": b'"2026-01-31"',
    "timestamp with time zone": b'"2026-01-31T10:30:00.000001Z"',
    "bytea": b'"AAEC"',
    "integer[]": b"[1,2,null]",
    "uuid": b'"00000000-0000-0000-0000-000000000001"',
}


@pytest.mark.parametrize("type_text", VALUES)
def test_a_value_has_the_same_code_in_tables_and_in_events(type_text: str) -> None:
    columns = (Column("id", "bigint", key=True), Column("value", type_text))
    table = msgspec.structs.replace(USERS, columns=columns)
    rule, image = TableTransform(mask={"value": MASK}), b'{"id":1,"value":%b}' % VALUES[type_text]
    selected = fitted(Transforms({"*": rule}), "public", "users", columns, "postgres")
    assert selected
    rows = masked(decode([image], columns, connector="postgres", as_text=selected.coded), selected)
    [found] = shaped(rule, change(Op.INSERT, table, key=b'{"id":1}', after=image))
    assert json.loads(found.after or b"")["value"] == rows["value"][0].as_py()
    assert len(rows["value"][0].as_py()) == 64


# --- on their way to sinks -----------------------------------------------------------------------


RULES = Transforms(
    {"public.users": TableTransform(mask={"name": MASK}, where="country <> 'XX'")}, "hook"
)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    shop = Shop(tmp_path)
    users, other = shop.table("users", COLUMNS), shop.table("other", COLUMNS)
    shop.commit(
        put(users, **user(1, "DE")), put(users, **user(2, "XX")), put(other, **user(3, "XX"))
    )
    shop.commit(put(users, Op.UPDATE, **user(1, "XX")), put(users, Op.UPDATE, **user(2, "DE")))
    shop.snapshot(users, [user(4, "DE"), user(5, "XX")])
    return shop


def whole(shop: Shop, parts: int = 1, part: int = 0) -> LogRange:
    path = str(shop.log.path)
    log = PipelineLog(DiskLog(path), Options(path=path))
    return LogRange(log, shop.log.epoch, 0, shop.log.latest_sequence, part, parts)


SEEN = [
    ("users", "INSERT", 1),
    ("other", "INSERT", 3),
    ("users", "DELETE", 1),
    ("users", "UPDATE", 2),
    ("users", "READ", 4),
]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("format", ["canonical", "savegress", "debezium"])
def test_events_are_those_of_rows_that_pass(shop: Shop, format: str, parts: int) -> None:
    rendering = EventRendering(Formats(), format, transforms=RULES)
    events = [
        event
        for part in range(parts)
        for chunk in rendering.events(whole(shop, parts, part))
        for event in chunk.events
    ]
    found = sorted((each.sequence, each.table, each.op, each.key) for each in events)
    assert [(table, op, json.loads(key or "")["id"]) for _, table, op, key in found] == SEEN
    for each in events:
        assert each.table == "other" or b"ann" not in (each.payload or b"")
        assert each.table == "other" or b'"XX"' not in (each.payload or b"")
    shop.log.close()


def test_rows_of_a_frame_are_those_that_pass(shop: Shop) -> None:
    tables = {1: shop.table("users", COLUMNS), 2: shop.table("other", COLUMNS)}
    framing = Framing(shop.log.epoch, {each.version: each for each in tables.values()})
    pieces = whole(shop).pieces()
    task = ShapedFrames(RULES, tuple(FIELDS))
    rows = pa.Table.from_batches(task(framing.batch(*piece) for piece in pieces)).to_pylist()
    found = [(row["table"], row["op"], json.loads(row["key"])["id"]) for row in rows]
    assert found == SEEN
    assert "ann" not in str([row for row in rows if row["table"] == "users"])
    shop.log.close()


def test_what_is_hidden_is_in_no_cascade_and_hides_nothing_else(tmp_path: Path) -> None:
    """An entity's event may stand for several rows."""
    rows = Shop(tmp_path)
    users = rows.table("users", COLUMNS)
    children = Table(
        "shop",
        "postgres",
        "origin-1",
        "shop",
        "public",
        "notes",
        (Column("id", "bigint", key=True), Column("user_id", "bigint")),
        references=(Reference(("user_id",), "public", "users", ("id",)),),
    )
    notes = rows.log.register(children)
    gone = [
        msgspec.structs.replace(
            remove(table, id=row["id"]),
            before=msgspec.json.encode(row),
            before_kind=BeforeKind.FULL,
        )
        for table, row in ((users, user(1, "XX")), (notes, {"id": 5, "user_id": 1}))
    ]
    rows.commit(*gone)
    rendering = EventRendering(Formats(), "entity", transforms=RULES)
    [chunk] = rendering.events(whole(rows))
    assert [(event.table, event.key) for event in chunk.events] == [("notes", '{"id":5}')]
    rows.log.close()
