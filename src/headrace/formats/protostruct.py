"""A row as a protobuf Struct, written from its JSON: to build the messages takes much longer.

Struct     { map<string, Value> fields = 1; }
Value      { one of null = 1, number = 2, string = 3, bool = 4, Struct = 5, ListValue = 6 }
ListValue  { repeated Value values = 1; }
"""

import functools
import json
import math
import struct
from typing import Any

import msgspec

# Parsers give up at messages a hundred deep; an object within an object takes three.
DEEPEST = 30

_NULL, _NUMBER, _STRING, _BOOL, _STRUCT, _LIST = range(1, 7)
_FIXED = {_NULL: 0, _NUMBER: 1, _BOOL: 0}  # wire types of what says no length

_double = struct.Struct("<d").pack


def written(image: bytes) -> bytes | None:
    """The Struct that holds a row; None: the row is deeper than anybody could follow."""
    try:
        return _row(image)
    except RecursionError:
        return None


def framed(number: int, content: bytes) -> bytes:
    """A field of a message that is text, bytes or a message itself."""
    return bytes((number << 3 | 2,)) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    low, rest = number & 127, number >> 7
    return bytes((low | 128,)) + _varint(rest) if rest else bytes((low,))


def _row(image: bytes) -> bytes:
    try:
        return _fields(msgspec.json.decode(image), 1)
    except (msgspec.DecodeError, struct.error):
        # A number beyond a double's range, or half a surrogate pair: a `json` column may have it.
        return _fields(json.loads(image, parse_int=_number, parse_float=_number), 1)


def _number(digits: str) -> float | str:
    """The number as a Struct holds it; one beyond a double's range keeps its digits, as text."""
    number = float(digits)
    return number if math.isfinite(number) else digits


def _fields(row: dict[str, Any], depth: int) -> bytes:
    parts: list[bytes] = []
    for name, value in row.items():
        kind, content = _content(value, depth)
        parts += (_head(name, kind, len(content)), content)
    return b"".join(parts)


def _values(values: list[Any], depth: int) -> bytes:
    parts: list[bytes] = []
    for value in values:
        kind, content = _content(value, depth)
        parts += (_head(None, kind, len(content)), content)
    return b"".join(parts)


def _content(value: Any, depth: int) -> tuple[int, bytes]:
    """Which field of a Value it is, and what that holds."""
    if isinstance(value, str):
        return _STRING, _text(value)
    if value is None:
        return _NULL, b"\x00"
    if isinstance(value, bool):
        return _BOOL, b"\x01" if value else b"\x00"
    if isinstance(value, int | float):
        return _NUMBER, _double(value)
    if depth == DEEPEST:
        return _STRING, _text(json.dumps(value, ensure_ascii=False))
    if isinstance(value, dict):
        return _STRUCT, _fields(value, depth + 1)
    return _LIST, _values(value, depth + 1)


@functools.lru_cache(100_000)
def _head(name: str | None, kind: int, length: int) -> bytes:
    """All that stands before a content of so many bytes; the same columns come with every row."""
    size = b"" if kind in _FIXED else _varint(length)
    value = bytes((kind << 3 | _FIXED.get(kind, 2),)) + size
    if name is not None:
        entry = framed(1, _text(name)) + bytes((2 << 3 | 2,)) + _varint(len(value) + length)
        value = entry + value
    return bytes((1 << 3 | 2,)) + _varint(len(value) + length) + value


def _text(text: str) -> bytes:
    # Half a surrogate pair is no Unicode, and no message may hold it.
    return text.encode(errors="replace")
