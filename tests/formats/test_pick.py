"""Some columns of a row, without taking the others apart."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.formats import _pick
from headrace.formats._pick import picked

ROWS = st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.booleans()))


@given(ROWS, st.lists(st.text(), max_size=2))
def test_a_column_that_is_there_is_picked(row: dict[str, Any], others: list[str]) -> None:
    names = (*list(row)[::2], *others)
    encoded = json.dumps(row, ensure_ascii=False).encode()
    names = tuple(dict.fromkeys(names))
    assert json.loads(picked(encoded, names)) == {n: row[n] for n in names if n in row}


def test_values_stay_byte_for_byte() -> None:
    row = b'{"a":1.10,"b":{"x" : 12345678901234567890123},"c":"\\u00e9"}'
    assert picked(row, ("b", "c", "a")) == (
        b'{"b":{"x" : 12345678901234567890123},"c":"\\u00e9","a":1.10}'
    )


def test_readers_are_kept_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pick, "_readers", {})
    monkeypatch.setattr(_pick, "_KEPT", 2)
    row = msgspec.json.encode({name: name for name in "abcd"})
    for _ in range(2):
        assert [picked(row, (name,)) for name in "abcd"] == [
            msgspec.json.encode({name: name}) for name in "abcd"
        ]
        assert list(_pick._readers) == [("c",), ("d",)]  # the latest ones
