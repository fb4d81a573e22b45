"""The CloudEvents format, in both of its modes."""

import json
import pickle
import re
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.event import Change, Op
from headrace.formats import Canonical
from headrace.formats.cloudevents import CloudEvents
from headrace.formats.facts import Facts
from tests.changes import make_change, make_table
from tests.formats.generated import changes

FACTS = Facts(pipeline="6f1c")
REQUIRED = {"id", "source", "specversion", "type"}
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
NAME = re.compile("[a-z0-9]{1,20}")


def structured(change: Change) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(CloudEvents(FACTS).encode(change))
    return event


def canonical(change: Change) -> Any:
    return json.loads(Canonical().encode(change))


# --- structured mode -----------------------------------------------------------------------------


def test_a_change_is_the_data_of_its_event() -> None:
    change = make_change(
        Op.UPDATE,
        table=make_table("orders", schema="sales"),
        key={"id": 7},
        after={"id": 7},
        sequence=42,
    )
    assert structured(change) == {
        "specversion": "1.0",
        "id": change.id,
        "source": "/headrace/6f1c/shop",
        "type": "headrace.change.update",
        "subject": "sales.orders",
        "time": "2024-10-30T01:00:00.000123Z",
        "datacontenttype": "application/json",
        "dataschema": "urn:headrace:schema:canonical",
        "sequence": "00000000000000000042",
        "partitionkey": "orders:7",
        "data": canonical(change),
    }
    assert CloudEvents.media_type == "application/cloudevents+json"


@pytest.mark.requirement("C-02")
@pytest.mark.parametrize("op", list(Op))
def test_every_operation_is_a_type(op: Op) -> None:
    assert structured(make_change(op))["type"] == f"headrace.change.{op.value.lower()}"


def test_without_a_log_the_source_is_its_name() -> None:
    event = json.loads(CloudEvents().encode(make_change()))
    assert event["source"] == "/headrace/shop"


def test_what_belongs_to_no_table_has_no_subject() -> None:
    event = structured(make_change(Op.MESSAGE, table=make_table("", schema="", key=())))
    assert "subject" not in event
    assert "partitionkey" not in event


@given(st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 63) - 1))
def test_sequences_compare_as_text(one: int, other: int) -> None:
    first, second = (structured(make_change(sequence=each))["sequence"] for each in (one, other))
    assert (first < second) == (one < other)


def test_characters_that_no_attribute_may_hold_are_escaped() -> None:
    odd = "a\nb\x7f\x9f\ufffe\U0010ffff é 😀 %"
    event = structured(make_change(table=make_table(odd), key={"id": "x\ty"}))
    assert event["subject"] == "public.a%0Ab%7F%C2%9F%EF%BF%BE%F4%8F%BF%BF é 😀 %"
    assert event["partitionkey"].endswith(" é 😀 %:x%09y")


@given(changes())
def test_every_event_follows_the_rules_for_attributes(change: Change) -> None:
    payload = CloudEvents(FACTS).encode(change)
    assert b"\n" not in payload
    assert b"\r" not in payload
    event = json.loads(payload)
    assert event.pop("data") == canonical(change)
    assert event.keys() >= REQUIRED
    for name, value in event.items():
        assert NAME.fullmatch(name)
        assert isinstance(value, str)
        assert value
        assert not CONTROL.search(value)


# --- binary mode ---------------------------------------------------------------------------------


def test_attributes_are_headers_and_the_change_is_the_body() -> None:
    change = make_change(table=make_table("orders"), key={"id": 7}, sequence=42)
    headers, body = CloudEvents(FACTS).binary(change)
    assert headers == {
        "content-type": "application/json",
        "ce-specversion": "1.0",
        "ce-id": change.id,
        "ce-source": "/headrace/6f1c/shop",
        "ce-type": "headrace.change.insert",
        "ce-subject": "public.orders",
        "ce-time": "2024-10-30T01:00:00.000123Z",
        "ce-dataschema": "urn:headrace:schema:canonical",
        "ce-sequence": "00000000000000000042",
        "ce-partitionkey": "orders:7",
    }
    assert body == Canonical().encode(change)


def test_the_specifications_own_example_of_a_header() -> None:
    headers, _ = CloudEvents().binary(make_change(table=make_table("Euro € 😀")))
    assert headers["ce-subject"] == "public.Euro%20%E2%82%AC%20%F0%9F%98%80"


def test_quotes_and_percent_signs_are_escaped_and_other_signs_are_not() -> None:
    signs = "".join(map(chr, range(0x21, 0x7F)))
    headers, _ = CloudEvents().binary(make_change(table=make_table(signs)))
    path = 'public."{}"'.format(signs.replace('"', '""'))  # a name with a dot stands in quotes
    assert headers["ce-subject"] == path.replace("%", "%25").replace('"', "%22")


@given(changes())
def test_headers_decode_to_the_attributes(change: Change) -> None:
    headers, body = CloudEvents(FACTS).binary(change)
    event = structured(change)
    assert json.loads(body) == event.pop("data")
    assert headers.pop("content-type") == event.pop("datacontenttype")
    for value in headers.values():
        assert re.fullmatch(r"[\x21-\x7e]+", value)
        assert '"' not in value
    assert {
        name.removeprefix("ce-"): unquote(value, errors="strict") for name, value in headers.items()
    } == event


def test_formats_are_values() -> None:
    format = CloudEvents(FACTS)
    change = make_change()
    format.encode(change)
    copy = pickle.loads(pickle.dumps(format))
    assert (copy, hash(copy)) == (format, hash(format))
    assert copy.encode(change) == format.encode(change)
    assert format != CloudEvents()
