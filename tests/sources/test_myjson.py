"""MySQL's binary documents become the text that SELECT shows."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DecodeError
from headrace.sources.mysql.decode.binaryjson import json_text

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def encoded(value: Any, *, large: bool = False) -> bytes:
    """The document as MySQL stores it."""
    kind, data = typed(value, large=large)
    return bytes([kind]) + data


def typed(value: Any, *, large: bool) -> tuple[int, bytes]:
    if value is None or isinstance(value, bool):
        return 4, bytes([{None: 0, True: 1, False: 2}[value]])
    if isinstance(value, float):
        return 11, struct.pack("<d", value)
    if isinstance(value, int):
        return whole(value)
    if isinstance(value, str):
        data = value.encode()
        return 12, varied(len(data)) + data
    return nested(value, large=large)


def whole(value: int) -> tuple[int, bytes]:
    for kind, code in ((5, "<h"), (6, "<H"), (7, "<i"), (8, "<I"), (9, "<q"), (10, "<Q")):
        try:
            return kind, struct.pack(code, value)
        except struct.error:
            continue
    raise ValueError(value)


def varied(size: int) -> bytes:
    data = bytearray()
    while size > 127:
        data.append(size & 127 | 128)
        size >>= 7
    return bytes([*data, size])


def nested(value: list[Any] | dict[str, Any], *, large: bool) -> tuple[int, bytes]:
    offset, inlined = ("I", (4, 5, 6, 7, 8)) if large else ("H", (4, 5, 6))
    keys = [key.encode() for key in value] if isinstance(value, dict) else []
    inner = list(value.values()) if isinstance(value, dict) else value
    values = [typed(each, large=large) for each in inner]
    entry = struct.calcsize("<" + offset)
    at = 2 * entry + len(keys) * (entry + 2) + len(values) * (1 + entry)
    key_table = b""
    for key in keys:
        key_table += struct.pack(f"<{offset}H", at, len(key))
        at += len(key)
    value_table, rest = b"", b""
    for kind, data in values:
        if kind in inlined:
            value_table += bytes([kind]) + data.ljust(entry, b"\0")
        else:
            value_table += bytes([kind]) + struct.pack("<" + offset, at + len(rest))
            rest += data
    head = struct.pack(f"<{offset}{offset}", len(values), at + len(rest))
    kind = (0 if isinstance(value, dict) else 2) + large
    return kind, head + key_table + value_table + b"".join(keys) + rest


@given(DOCUMENTS, st.booleans())
def test_a_document_comes_out_as_it_went_in(document: Any, large: bool) -> None:
    text = json_text(encoded(document, large=large))
    assert json.loads(text) == document
    assert b"\n" not in text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_all_their_digits(value: float) -> None:
    assert float(json_text(encoded(value))) == value


def test_text_is_spaced_as_select_shows_it() -> None:
    assert json_text(encoded({"a": [1, None, True], "b": {}})) == (
        b'{"a": [1, null, true], "b": {}}'
    )
    assert json_text(encoded('é"\n')) == '"é\\"\\n"'.encode()
    assert json_text(b"") == b"null"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e15, b"1e15"), (1.5e16, b"1.5e16"), (1e14, b"100000000000000.0"), (1e-7, b"0.0000001"),
        (1e-16, b"1e-16"), (1234567890123456.5, b"1234567890123456.5"), (-0.0, b"-0.0"),
        (5e-324, b"5e-324"), (2.0, b"2.0"),
    ],
)  # fmt: skip
def test_numbers_are_written_in_the_servers_notation(value: float, text: bytes) -> None:
    assert json_text(encoded(value)) == text


def test_values_of_sql_types_are_shown_as_the_server_shows_them() -> None:
    def opaque(kind: int, data: bytes) -> bytes:
        return bytes([15, kind]) + varied(len(data)) + data

    moment = ((2024 * 13 + 1) << 5 | 2) << 17 | 3 << 12 | 4 << 6 | 5
    packed = struct.pack("<q", moment << 24 | 123456)
    assert json_text(opaque(12, packed)) == b'"2024-01-02 03:04:05.123456"'
    assert json_text(opaque(7, packed)) == b'"2024-01-02 03:04:05.123456"'
    assert json_text(opaque(10, packed)) == b'"2024-01-02"'
    clock = 12 << 12 | 34 << 6 | 56
    assert json_text(opaque(11, struct.pack("<q", -(clock << 24 | 500000)))) == (
        b'"-12:34:56.500000"'
    )
    assert json_text(opaque(246, b"\x04\x02\x8c\x32")) == b"12.50"
    assert json_text(opaque(252, b"abc")) == b'"base64:type252:YWJj"'


@given(DOCUMENTS, st.data())
def test_a_damaged_document_is_a_document_or_an_error(
    document: Any, choices: st.DataObject
) -> None:
    data = bytearray(encoded(document))
    at = choices.draw(st.integers(0, len(data) - 1))
    data[at] = choices.draw(st.integers(0, 255))
    try:
        json.loads(json_text(bytes(data[: choices.draw(st.integers(1, len(data)))])))
    except DecodeError:
        return


def test_a_document_deeper_than_the_server_allows_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    assert json.loads(json_text(encoded(deep, large=True))) == deep
    for _ in range(200):
        deep = [deep]
    with pytest.raises(DecodeError):
        json_text(encoded(deep, large=True))
