"""The notification format: a message for clients that show what changed."""

import json
import pickle
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given

from headrace.change.event import BeforeKind, Change, Op
from headrace.formats.notification import Notification
from tests.changes import COMMIT_TIME, make_change, make_table
from tests.formats.generated import changes

OLD = {"id": "alice", "name": "A", "tier": "gold"}
NEW = {"id": "alice", "name": "B", "tier": "gold"}


def encode(change: Change, *include: Op) -> dict[str, Any]:
    payload = Notification(frozenset(include)).encode(change)
    assert payload is not None
    message: dict[str, Any] = json.loads(payload)
    return message


@pytest.mark.requirement("S3-09", "S3-10", "S3-11")
@pytest.mark.parametrize("op", [Op.INSERT, Op.READ])
def test_a_new_row_has_no_old_one(op: Op) -> None:
    change = make_change(op, key={"id": "alice"}, after=NEW)
    assert encode(change) == {
        "type": "cdc_event",
        "eventId": change.id,
        "tableName": "users",
        "operation": "INSERT",
        "data": NEW,
        "timestamp": "2024-10-30T01:00:00.000123Z",
        "version": 1,
    }
    assert COMMIT_TIME == 1_730_250_000_000_123


@pytest.mark.requirement("S3-10", "S3-11", "C-22")
def test_an_update_has_the_whole_row_and_the_old_values_of_what_changed() -> None:
    message = encode(
        make_change(Op.UPDATE, key={"id": "alice"}, before=OLD, after=NEW, changed=("name",))
    )
    assert (message["operation"], message["data"]) == ("UPDATE", NEW)
    assert message["beforeData"] == {"name": "A"}
    assert "beforeKind" not in message


def test_what_changed_is_found_out_when_the_source_does_not_say() -> None:
    message = encode(make_change(Op.UPDATE, before=OLD | {"old": 1}, after=NEW))
    assert message["beforeData"] == {"name": "A"}


def test_an_update_that_changed_nothing_says_so() -> None:
    message = encode(make_change(Op.UPDATE, before=OLD, after=OLD, changed=()))
    assert message["beforeData"] == {}


@pytest.mark.requirement("S3-10", "S3-11")
def test_a_delete_has_no_row_but_the_old_one() -> None:
    message = encode(make_change(Op.DELETE, key={"id": "alice"}, before=OLD))
    assert (message["operation"], message["data"], message["beforeData"]) == ("DELETE", None, OLD)
    assert "beforeKind" not in message


@pytest.mark.requirement("C-03")
def test_of_a_deleted_row_whose_key_alone_was_sent_no_more_is_told() -> None:
    key = {"id": "alice"}
    message = encode(make_change(Op.DELETE, key=key, before=key, before_kind=BeforeKind.KEY))
    assert (message["data"], message["beforeData"], message["beforeKind"]) == (None, key, "key")


@pytest.mark.requirement("C-03", "C-04")
@pytest.mark.parametrize("op", [Op.UPDATE, Op.DELETE])
def test_an_old_row_that_was_not_sent_is_absent_and_not_null(op: Op) -> None:
    message = encode(make_change(op, after=NEW if op is Op.UPDATE else None))
    assert "beforeData" not in message
    assert message["beforeKind"] == "none"


@pytest.mark.requirement("C-03")
def test_an_update_of_the_key_tells_the_old_key_and_that_no_more_is_known() -> None:
    change = make_change(
        Op.UPDATE,
        key={"id": "bob", "line": 2},
        before={"id": "alice", "line": 2},
        before_kind=BeforeKind.KEY,
        after=NEW | {"id": "bob"},
    )
    message = encode(change)
    assert (message["beforeData"], message["beforeKind"]) == ({"id": "alice"}, "key")


def test_a_key_that_was_sent_but_has_not_changed_is_no_old_value() -> None:
    key = {"id": "alice"}
    change = make_change(Op.UPDATE, key=key, before=key, before_kind=BeforeKind.KEY, after=NEW)
    message = encode(change)
    assert "beforeData" not in message
    assert message["beforeKind"] == "key"


@pytest.mark.requirement("C-03")
def test_a_column_the_source_did_not_send_is_named_and_not_null() -> None:
    message = encode(make_change(Op.UPDATE, after={"id": "alice"}, unchanged=("photo", 'o"dd')))
    assert message["data"] == {"id": "alice"}
    assert message["unchanged"] == ["photo", 'o"dd']
    assert "unchanged" not in encode(make_change(Op.UPDATE, after=NEW))


@pytest.mark.requirement("C-02")
@pytest.mark.parametrize("op", [Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE])
def test_what_is_no_row_comes_only_when_asked_for(op: Op) -> None:
    change = make_change(op, after={"cascade": True})
    others = {Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE} - {op}
    assert Notification().encode(change) is None
    assert Notification(frozenset(others)).encode(change) is None
    message = encode(change, op)
    assert (message["operation"], message["data"]) == (op.value, {"cascade": True})


@pytest.mark.requirement("C-23")
@pytest.mark.parametrize(
    ("schema", "expected"), [("public", "users"), ("", "users"), ("sales", "sales.users")]
)
def test_a_table_outside_the_default_schema_is_named_with_its_schema(
    schema: str, expected: str
) -> None:
    message = encode(make_change(table=make_table(schema=schema), after=NEW))
    assert message["tableName"] == expected


def test_two_tables_of_one_name_are_not_mixed_up() -> None:
    format = Notification()
    named = [format.encode(make_change(table=make_table(name), after=NEW)) for name in "abab"]
    assert [json.loads(each or b"")["tableName"] for each in named] == list("abab")


@pytest.mark.requirement("C-01", "S3-09")
def test_the_id_is_the_changes_own() -> None:
    change = make_change(after=NEW)
    assert encode(change)["eventId"] == change.id
    assert re.fullmatch(r"evt_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", change.id)


def test_the_version_of_the_messages_is_one() -> None:
    assert encode(make_change(after=NEW))["version"] == 1


def test_images_are_passed_on_byte_for_byte() -> None:
    image = b'{"n":1.10000000000000000001,"big":12345678901234567890123}'
    change = msgspec.structs.replace(make_change(Op.UPDATE, before=OLD), after=image, before=image)
    payload = Notification().encode(change)
    assert payload is not None
    assert b'"data":' + image in payload
    changed = msgspec.structs.replace(change, changed=("n", "big"))
    assert b'"beforeData":' + image in (Notification().encode(changed) or b"")


@given(changes())
def test_every_message_is_one_line_of_json(change: Change) -> None:
    payload = Notification(frozenset(Op)).encode(change)
    assert payload is not None
    assert b"\n" not in payload
    assert b"\r" not in payload
    message = json.loads(payload)
    assert message["data"] == (json.loads(change.after) if change.after else None)
    if change.changed is not None:
        assert set(message["beforeData"]) == set(change.changed)


def test_formats_are_values() -> None:
    format = Notification(frozenset({Op.TRUNCATE}))
    assert pickle.loads(pickle.dumps(format)) == format
    assert hash(format) == hash(Notification(frozenset({Op.TRUNCATE})))
    assert format != Notification()
