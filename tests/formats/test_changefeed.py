"""The changefeed format: PUT and DELETE of keys."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.event import BeforeKind, Op
from headrace.formats import Changefeed
from tests.changes import COMMIT_TIME, make_change, make_table

ALICE = {"id": "alice", "name": "Ä\n😀"}


def encode(change: Any, *include: Op) -> dict[str, Any]:
    payload = Changefeed(frozenset(include)).encode(change)
    assert payload is not None
    event: dict[str, Any] = json.loads(payload)
    return event


@pytest.mark.requirement("S4-05")
def test_a_put_is_the_event_of_the_document() -> None:
    event = encode(make_change(Op.INSERT, key={"id": "alice"}, after=ALICE, sequence=123))
    assert list(event) == ["sequence", "type", "key", "value", "timestamp_ms", "metadata"]
    assert (event["sequence"], event["type"], event["key"]) == (123, "PUT", "users:alice")
    assert isinstance(event["value"], str)
    assert json.loads(event["value"]) == ALICE
    assert event["timestamp_ms"] == COMMIT_TIME // 1000
    assert event["metadata"] == {
        "table": "users",
        "pk": "alice",
        "operation": "INSERT",
        "schema": "public",
    }


@pytest.mark.requirement("S4-03", "S4-05")
def test_a_delete_has_no_value() -> None:
    event = encode(make_change(Op.DELETE, key={"id": "alice"}, before=ALICE))
    assert (event["type"], event["key"], event["value"]) == ("DELETE", "users:alice", None)


@pytest.mark.requirement("S4-03", "C-02")
@pytest.mark.parametrize(
    ("op", "expected"),
    [(Op.INSERT, "PUT"), (Op.UPDATE, "PUT"), (Op.READ, "PUT"), (Op.DELETE, "DELETE")],
)
def test_the_real_operation_is_in_the_metadata(op: Op, expected: str) -> None:
    event = encode(make_change(op, key={"id": "alice"}, after=ALICE))
    assert (event["type"], event["metadata"]["operation"]) == (expected, op.value)


@pytest.mark.requirement("C-02")
@pytest.mark.parametrize("op", [Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE])
def test_what_is_no_row_comes_only_when_asked_for(op: Op) -> None:
    change = make_change(op, after={"cascade": True})
    assert Changefeed().encode(change) is None
    others = {Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE} - {op}
    assert Changefeed(frozenset(others)).encode(change) is None
    event = encode(change, op)
    assert (event["type"], event["key"], event["value"]) == (op.value, "users:", '{"cascade":true}')


@pytest.mark.requirement("C-03")
def test_a_column_the_source_did_not_send_is_named_and_not_null() -> None:
    change = make_change(
        Op.UPDATE, key={"id": "alice"}, after={"id": "alice"}, unchanged=("photo",)
    )
    event = encode(change)
    assert json.loads(event["value"]) == {"id": "alice"}
    assert event["metadata"]["unchanged"] == ["photo"]


@pytest.mark.requirement("C-15")
def test_a_changed_key_puts_the_new_one_and_names_the_old_one() -> None:
    change = make_change(
        Op.UPDATE,
        key={"id": "bob"},
        before={"id": "alice"},
        before_kind=BeforeKind.KEY,
        after={"id": "bob"},
    )
    event = encode(change)
    assert (event["type"], event["key"]) == ("PUT", "users:bob")
    assert event["metadata"]["previous_key"] == "users:alice"


def test_a_table_without_a_key_has_an_empty_one() -> None:
    table = make_table("audit", key=())
    event = encode(make_change(table=table, after={"name": "x"}))
    assert (event["key"], event["metadata"]["pk"]) == ("audit:", "")


@given(st.text(), st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_every_event_is_one_line_of_json(pk: str, row: dict[str, Any]) -> None:
    payload = Changefeed().encode(make_change(key={"id": pk}, after=row))
    assert payload is not None
    assert b"\n" not in payload
    assert b"\r" not in payload
    event = json.loads(payload)
    assert event["key"] == f"users:{pk}"
    assert json.loads(event["value"]) == row
