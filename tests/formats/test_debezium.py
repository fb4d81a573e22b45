"""The Debezium format: the envelope that Debezium 3 writes."""

import base64
import json
import pickle
from pathlib import Path
from typing import Any, LiteralString

import msgspec
import pytest
from hypothesis import given

from headrace.change.event import BeforeKind, Change, Op, Transaction
from headrace.formats.debezium import UNAVAILABLE, UNDECODED, Debezium
from headrace.formats.entity import Entity
from headrace.formats.facts import Facts
from headrace.sources.postgres.position import PostgresPosition
from headrace.testing import PostgresDatabase
from tests.changes import COMMIT_TIME, make_change, make_table
from tests.formats.generated import changes
from tests.sources.capturing import captured

# What the engine of Debezium 3.6.3 wrote for the statements below, with schemas disabled.
RECORDED = Path(__file__).parent / "seeds" / "debezium.json"

BEFORE: list[LiteralString] = [
    "CREATE TABLE orders (id int PRIMARY KEY, customer text, paid boolean,"
    " weight double precision, note text)",
    "ALTER TABLE orders ALTER note SET STORAGE EXTERNAL",
    "CREATE TABLE accounts (id int PRIMARY KEY, name text)",
    "ALTER TABLE accounts REPLICA IDENTITY FULL",
    "INSERT INTO orders VALUES (1, 'Ann', true, 1.5, NULL)",
    "INSERT INTO accounts VALUES (1, 'Ann')",
]
STATEMENTS: list[LiteralString] = [
    "INSERT INTO orders VALUES (2, 'Bea', false, 99.99, repeat('x', 9000))",
    "UPDATE orders SET customer = 'Cleo' WHERE id = 2",
    "DELETE FROM orders WHERE id = 2",
    "UPDATE accounts SET name = 'Anna'",
    "UPDATE orders SET id = 3 WHERE id = 1",
    "DELETE FROM accounts",
    "TRUNCATE orders, accounts",
    "SELECT pg_logical_emit_message(true, 'prices', 'changed')",
    "SELECT pg_logical_emit_message(false, 'prices', 'looked at')",
]
ROW = {"id": "alice", "name": "A"}


def encode(change: Change, facts: Facts | None = None) -> dict[str, Any]:
    payload = Debezium(facts or Facts()).encode(change)
    assert payload is not None
    event: dict[str, Any] = json.loads(payload)
    return event


# --- beside Debezium itself ----------------------------------------------------------------------


def what_both_tell(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what belongs to one server, one moment or one program."""
    source = event["source"]
    row = event.get("before")
    return {
        "op": event["op"],
        # Debezium shows null where it was sent nothing but the key.
        "before": row and {name: value for name, value in row.items() if value is not None},
        "after": event.get("after"),
        "message": event.get("message"),
        "transaction": event["transaction"],
        "copied": source["snapshot"] != "false",
        "table": (source["schema"], source["table"]),
        "connector": source["connector"],
        "name": source["name"],
        "in a transaction": source["txId"] is not None or event["op"] == "r",
    }


def as_two_events(event: dict[str, Any]) -> list[dict[str, Any]]:
    """What Debezium makes of a new key: the old row is deleted, and a new one created."""
    before, after = event.get("before"), event.get("after")
    if event["op"] != "u" or not before or not after or before["id"] == after["id"]:
        return [event]
    return [event | {"op": "d", "after": None}, event | {"op": "c", "before": None}]


def test_events_are_those_of_debezium(pg: PostgresDatabase, tmp_path: Path) -> None:
    for statement in BEFORE:
        pg.execute(statement)
    with captured(pg, tmp_path) as feed:
        for statement in STATEMENTS:
            pg.execute(statement)
        captured_changes = feed.changes()
    events = [encode(change) for change in captured_changes if change.op is not Op.SCHEMA]
    events = [each for event in events for each in as_two_events(event)]
    recorded = json.loads(RECORDED.read_text().replace('"BIG"', f'"{"x" * 9000}"'))
    # Tables are copied in no particular order.
    ours = sorted(map(what_both_tell, events[:2]), key=lambda told: told["table"])
    theirs = sorted(map(what_both_tell, recorded[:2]), key=lambda told: told["table"])
    assert ours + [what_both_tell(event) for event in events[2:]] == theirs + [
        what_both_tell(event) for event in recorded[2:]
    ]
    shapes = [(list(event), list(event["source"])) for event in events[2:]]
    assert shapes == [(list(event), list(event["source"])) for event in recorded[2:]]


# --- the envelope --------------------------------------------------------------------------------


def test_every_field_of_the_envelope() -> None:
    change = make_change(
        Op.UPDATE,
        table=make_table(schema="sales"),
        key={"id": "alice"},
        before=ROW,
        after=ROW | {"name": "B"},
        transaction=Transaction("571", COMMIT_TIME, COMMIT_TIME + 500),
        position=PostgresPosition(0x16B3800, 0x16B3748),
    )
    assert encode(change, Facts(version="1.2.3")) == {
        "before": ROW,
        "after": ROW | {"name": "B"},
        "source": {
            "version": "1.2.3",
            "connector": "postgresql",
            "name": "shop",
            "ts_ms": COMMIT_TIME // 1000,
            "snapshot": "false",
            "db": "shop",
            "sequence": '["23803904","23803720"]',
            "ts_us": COMMIT_TIME,
            "ts_ns": COMMIT_TIME * 1000,
            "schema": "sales",
            "table": "users",
            "txId": 571,
            "lsn": 23803720,
            "xmin": None,
            "origin": None,
            "origin_lsn": None,
        },
        "transaction": None,
        "op": "u",
        "ts_ms": (COMMIT_TIME + 500) // 1000,
        "ts_us": COMMIT_TIME + 500,
        "ts_ns": (COMMIT_TIME + 500) * 1000,
    }


@pytest.mark.requirement("S1-54", "C-02")
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (Op.INSERT, "c"),
        (Op.UPDATE, "u"),
        (Op.DELETE, "d"),
        (Op.READ, "r"),
        (Op.TRUNCATE, "t"),
        (Op.MESSAGE, "m"),
    ],
)
def test_each_operation_has_a_letter(op: Op, expected: str) -> None:
    said = {"prefix": "p", "content": "c"} if op is Op.MESSAGE else {}
    assert encode(make_change(op, after=said))["op"] == expected


LETTERS = {"CREATE": "c", "UPDATE": "u", "DELETE": "d"}


def enveloped(operation: dict[str, Any]) -> dict[str, Any]:
    """The operation of an entity as the envelope has it."""
    return {
        "op": LETTERS[operation["type"]],
        "before": operation.get("before"),
        "after": operation.get("after"),
    }


@pytest.mark.requirement("S1-54")
@pytest.mark.parametrize("seed", ["s1_created", "s1_updated", "s1_deleted"])
def test_the_operation_of_an_entitys_document_maps_onto_the_envelope(seed: str) -> None:
    operation = json.loads((RECORDED.parent / f"{seed}.json").read_text())["operation"]
    op = {"c": Op.INSERT, "u": Op.UPDATE, "d": Op.DELETE}[LETTERS[operation["type"]]]
    change = make_change(op, before=operation.get("before"), after=operation.get("after"))
    assert enveloped(operation).items() <= encode(change).items()


@pytest.mark.requirement("S1-54")
@pytest.mark.parametrize(
    "change",
    [
        make_change(Op.INSERT, key={"id": "alice"}, after=ROW),
        make_change(Op.UPDATE, key={"id": "alice"}, before=ROW, after=ROW | {"name": "B"}),
        make_change(Op.DELETE, key={"id": "alice"}, before=ROW),
    ],
    ids=lambda change: str(change.op),
)
def test_an_entitys_operation_maps_onto_the_envelope(change: Change) -> None:
    (rendered,) = Entity().render([change])
    operation = json.loads(rendered.payload)["operation"]
    assert enveloped(operation).items() <= encode(change).items()


def test_new_columns_of_a_table_are_not_carried() -> None:
    assert Debezium().encode(make_change(Op.SCHEMA, after={"columns": []})) is None


def test_a_row_that_a_copy_read_is_part_of_a_snapshot_and_of_no_transaction() -> None:
    copy = Transaction("snapshot-0/16B3748-public.users", COMMIT_TIME, COMMIT_TIME)
    event = encode(make_change(Op.READ, after=ROW, transaction=copy))
    assert (event["before"], event["after"]) == (None, ROW)
    assert (event["source"]["snapshot"], event["source"]["txId"]) == ("true", None)


@pytest.mark.parametrize(("said", "snapshot"), [({"snapshot": True}, "true"), ({}, "false")])
def test_a_truncate_before_a_copy_is_part_of_it(said: dict[str, bool], snapshot: str) -> None:
    event = encode(make_change(Op.TRUNCATE, after=said))
    assert (event["before"], event["after"], event["op"]) == (None, None, "t")
    assert event["source"]["snapshot"] == snapshot


@pytest.mark.requirement("C-03")
@pytest.mark.parametrize("sent", [{}, {"id": "alice"}])
def test_a_column_the_source_did_not_send_is_unavailable(sent: dict[str, str]) -> None:
    change = make_change(Op.UPDATE, after=sent, unchanged=("photo", 'o"dd'))
    assert encode(change)["after"] == sent | {"photo": UNAVAILABLE, 'o"dd': UNAVAILABLE}


@pytest.mark.requirement("C-03")
def test_of_an_old_row_only_what_was_sent_is_shown() -> None:
    key = {"id": "alice"}
    deleted = make_change(Op.DELETE, key=key, before=key, before_kind=BeforeKind.KEY)
    assert (encode(deleted)["before"], encode(deleted)["after"]) == (key, None)
    assert encode(make_change(Op.DELETE))["before"] is None


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ({"prefix": "p", "content": "Grüße"}, "Grüße".encode()),
        ({"prefix": "p", "content": ""}, b""),
        ({"prefix": "p", "content_base64": "/wA="}, b"\xff\x00"),
    ],
)
def test_a_message_is_in_base64(said: dict[str, str], content: bytes) -> None:
    event = encode(make_change(Op.MESSAGE, table=make_table(""), after=said))
    assert event["message"] == {"prefix": "p", "content": base64.b64encode(content).decode()}


def test_a_row_that_could_not_be_read_is_a_message_that_says_so() -> None:
    said = {"error": "not a boolean", "operation": "INSERT", "pgoutput": "SQ=="}
    message = encode(make_change(Op.MESSAGE, after=said))["message"]
    assert message["prefix"] == UNDECODED
    assert json.loads(base64.b64decode(message["content"])) == said


# --- bytes ---------------------------------------------------------------------------------------


def test_images_are_passed_on_byte_for_byte() -> None:
    image = b'{"n":1.10000000000000000001,"big":12345678901234567890123}'
    change = msgspec.structs.replace(make_change(Op.UPDATE), before=image, after=image)
    payload = Debezium().encode(change)
    assert payload is not None
    assert payload.count(image) == 2


@given(changes())
def test_every_event_is_one_line_of_json(change: Change) -> None:
    payload = Debezium().encode(change)
    if payload is None:
        assert change.op is Op.SCHEMA
        return
    assert b"\n" not in payload
    assert b"\r" not in payload
    event = json.loads(payload)
    if change.op in (Op.INSERT, Op.UPDATE, Op.READ):
        assert event["after"] == json.loads(change.after or b"") | dict.fromkeys(
            change.unchanged, UNAVAILABLE
        )


def test_formats_are_values() -> None:
    format = Debezium(Facts(pipeline="p1"))
    change = make_change(after=ROW)
    format.encode(change)
    copy = pickle.loads(pickle.dumps(format))
    assert (copy, hash(copy)) == (format, hash(format))
    assert copy.encode(change) == format.encode(change)
    assert format != Debezium()
