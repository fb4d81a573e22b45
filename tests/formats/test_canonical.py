"""The canonical format: the whole change as one JSON object."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.event import BeforeKind, Op, Transaction
from headrace.formats import Canonical
from headrace.formats.canonical import CanonicalChange
from headrace.sources.postgres.position import PostgresPosition
from tests.changes import COMMIT_TIME, make_change, make_table

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
ROWS = st.dictionaries(st.text(), VALUES)


def encode(change: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Canonical().encode(change))
    return document


def test_every_field_of_a_change_is_there() -> None:
    change = make_change(
        Op.UPDATE,
        table=make_table(version=3),
        key={"id": "alice"},
        before={"id": "alice", "name": "A"},
        after={"id": "alice", "name": "B"},
        changed=("name",),
        unchanged=("photo",),
        transaction=Transaction("7", COMMIT_TIME, COMMIT_TIME + 500, b'{"user":"u1"}'),
        ordinal=2,
        sequence=123,
        position=PostgresPosition(0x16B3800, 0x16B3748),
    )
    assert encode(change) == {
        "sequence": 123,
        "id": change.id,
        "op": "UPDATE",
        "source": "shop",
        "connector": "postgres",
        "database": "shop",
        "schema": "public",
        "table": "users",
        "key": {"id": "alice"},
        "before": {"id": "alice", "name": "A"},
        "before_kind": "full",
        "after": {"id": "alice", "name": "B"},
        "changed": ["name"],
        "unchanged": ["photo"],
        "transaction": {"id": "7", "ordinal": 2, "last": True, "commit_time": COMMIT_TIME},
        "position": {"lsn": "0/16B3748", "commit_lsn": "0/16B3800"},
        "captured_at": COMMIT_TIME + 500,
        "schema_version": 3,
        "metadata": {"user": "u1"},
    }


@pytest.mark.requirement("C-01")
def test_the_id_is_the_changes_own() -> None:
    change = make_change(key={"id": "alice"}, after={"id": "alice"})
    assert encode(change)["id"] == change.id
    assert change.id.startswith("evt_")


@pytest.mark.requirement("C-03")
def test_what_is_not_known_is_null_and_never_left_out() -> None:
    document = encode(make_change(Op.TRUNCATE))
    assert document.keys() == set(CanonicalChange.__struct_fields__)
    unknown = ("key", "before", "after", "changed", "metadata")
    assert {name: document[name] for name in unknown} == dict.fromkeys(unknown)
    assert document["before_kind"] == BeforeKind.NONE
    assert document["unchanged"] == []


@pytest.mark.requirement("C-02")
@pytest.mark.parametrize("op", list(Op))
def test_every_operation_is_carried_under_its_own_name(op: Op) -> None:
    assert encode(make_change(op))["op"] == op.value


@given(ROWS, ROWS)
def test_images_arrive_as_they_were(before: dict[str, Any], after: dict[str, Any]) -> None:
    document = encode(make_change(Op.UPDATE, before=before, after=after))
    assert document["after"] == after
    assert document["before"] == before


def test_an_image_is_passed_on_byte_for_byte() -> None:
    after = b'{"n":1.10000000000000000001,"big":12345678901234567890123}'
    change = msgspec.structs.replace(make_change(), after=after)
    assert after in Canonical().encode(change)


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_a_change_is_one_line_even_when_its_json_column_was_not(end: bytes) -> None:
    after = end.join([b'{"doc":{', b'  "a": "x\\ny",', b'  "b": 1', b"}}"])
    line = Canonical().encode(msgspec.structs.replace(make_change(), after=after))
    assert b"\n" not in line
    assert b"\r" not in line
    assert json.loads(line)["after"] == {"doc": {"a": "x\ny", "b": 1}}
