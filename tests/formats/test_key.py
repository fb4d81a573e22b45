"""A row's key as text."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.event import BeforeKind, Op
from headrace.formats.key import previous_primary_key, primary_key, row_key
from tests.changes import make_change, make_table

TWO = make_table("order_items", key=("order_id", "line"))


@pytest.mark.requirement("S4-05")
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ({"id": "alice"}, "users:alice"),
        ({"id": 7}, "users:7"),
        ({"id": 2**63}, "users:9223372036854775808"),
        ({"id": True}, "users:true"),
        ({"id": "a:b%c"}, "users:a:b%c"),
        ({"id": "Grüße 😀"}, "users:Grüße 😀"),
        ({"id": [1, 2]}, "users:[1,2]"),
        ({"id": None}, "users:null"),
        (None, "users:"),
    ],
)
def test_a_key_is_the_table_and_the_primary_key(
    key: Mapping[str, Any] | None, expected: str
) -> None:
    assert row_key(make_change(key=key)) == expected


@pytest.mark.requirement("C-15")
def test_a_key_of_several_columns_is_escaped_and_joined() -> None:
    change = make_change(table=TWO, key={"order_id": "a:b", "line": "50%"})
    assert row_key(change) == "order_items:a%3Ab:50%25"


@pytest.mark.requirement("C-15")
@given(st.text(), st.text())
def test_the_columns_of_a_key_can_be_told_apart_again(first: str, second: str) -> None:
    change = make_change(table=TWO, key={"order_id": first, "line": second})
    assert [unquote(part) for part in primary_key(change).split(":")] == [first, second]


def test_a_number_keeps_the_digits_the_source_wrote() -> None:
    change = msgspec.structs.replace(make_change(), key=b'{"id":1.10000000000000000001}')
    assert row_key(change) == "users:1.10000000000000000001"


def test_an_update_that_changed_the_key_tells_the_previous_one() -> None:
    change = make_change(
        Op.UPDATE, key={"id": "bob"}, before={"id": "alice"}, before_kind=BeforeKind.KEY
    )
    assert previous_primary_key(change) == "alice"


@pytest.mark.parametrize(
    "change",
    [
        make_change(Op.UPDATE, key={"id": "bob"}),
        make_change(Op.UPDATE, key={"id": "bob"}, before={"id": "bob", "name": "B"}),
        make_change(Op.UPDATE, key={"id": "bob"}, before={"id": "x"}, changed=("name",)),
        make_change(Op.UPDATE, key={"id": "bob"}, before={"name": "B"}),
        make_change(Op.UPDATE, before={"name": "B"}),
        make_change(Op.DELETE, key={"id": "bob"}, before={"id": "alice"}),
    ],
    ids=["no old row", "same key", "key not changed", "key not sent", "no key", "not an update"],
)
def test_otherwise_there_is_no_previous_key(change: Any) -> None:
    assert previous_primary_key(change) is None
