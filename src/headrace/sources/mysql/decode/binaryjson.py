"""MySQL's binary JSON -> JSON text, as SELECT shows it.

A document is a type and a value; objects and arrays hold a table of offsets to theirs, counted
from where they begin. What does not read as one raises DecodeError, and so does a document that
names the same bytes again and again.
"""

from __future__ import annotations

import math
import struct
from binascii import b2a_base64
from decimal import Decimal

import msgspec

from ....errors import DecodeError
from .decimals import decimal_size, decimals
from .typecodes import DATE, DATETIME, NEWDECIMAL, TIME, TIMESTAMP

_SMALL_OBJECT, _LARGE_OBJECT, _SMALL_ARRAY, _LARGE_ARRAY, _LITERAL = range(5)
_INT16, _UINT16, _INT32, _UINT32, _INT64, _UINT64, _DOUBLE, _STRING = range(5, 13)
_OPAQUE = 15
_DEEPEST = 110  # MySQL allows 100

_NUMBERS = {
    _INT16: struct.Struct("<h"),
    _UINT16: struct.Struct("<H"),
    _INT32: struct.Struct("<i"),
    _UINT32: struct.Struct("<I"),
    _INT64: struct.Struct("<q"),
    _UINT64: struct.Struct("<Q"),
}
_LITERALS = (b"null", b"true", b"false")
_quote = msgspec.json.Encoder().encode


def json_text(data: bytes) -> bytes:
    """The document as text on one line."""
    if not data:
        return b"null"  # what a column that was added NOT NULL gives to the rows there are
    try:
        return _Document(data).value(data[0], 1, 0)
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise DecodeError("the server sent a JSON document that does not read as one") from error


class _Document:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = len(data)  # each value has at least a byte of its own

    def value(self, kind: int, at: int, depth: int) -> bytes:
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            raise ValueError("more values than bytes")
        number = _NUMBERS.get(kind)
        if number is not None:
            return b"%d" % number.unpack_from(self._data, at)[0]
        if kind == _STRING:
            return self._string(at)
        if kind == _LITERAL:
            return _LITERALS[self._data[at]]
        if kind == _DOUBLE:
            return _double(*struct.unpack_from("<d", self._data, at))
        if kind == _OPAQUE:
            return self._opaque(at)
        if kind <= _LARGE_ARRAY:
            return self._nested(kind, at, depth)
        raise ValueError(f"a value of kind {kind}")

    def _nested(self, kind: int, at: int, depth: int) -> bytes:
        large = kind in (_LARGE_OBJECT, _LARGE_ARRAY)
        count, _size = struct.unpack_from("<II" if large else "<HH", self._data, at)
        entry = struct.Struct("<BI" if large else "<BH")
        head = at + (8 if large else 4)
        is_object = kind in (_SMALL_OBJECT, _LARGE_OBJECT)
        entries = head + count * ((6 if large else 4) if is_object else 0)
        if entries + count * entry.size > len(self._data):
            raise ValueError("a table of values is cut short")
        values = []
        for number in range(count):
            place = entries + number * entry.size
            inner, offset = entry.unpack_from(self._data, place)
            inlined = inner in (_LITERAL, _INT16, _UINT16) or (large and inner in (_INT32, _UINT32))
            values.append(self.value(inner, place + 1 if inlined else at + offset, depth + 1))
        if not is_object:
            return b"[%b]" % b", ".join(values)
        keys = self._keys(at, head, count, large=large)
        return b"{%b}" % b", ".join(map(b"%b: %b".__mod__, zip(keys, values, strict=True)))

    def _keys(self, at: int, head: int, count: int, *, large: bool) -> list[bytes]:
        entry = struct.Struct("<IH" if large else "<HH")
        keys = []
        for number in range(count):
            offset, size = entry.unpack_from(self._data, head + number * entry.size)
            keys.append(_quote(self._part(at + offset, size).decode()))
        return keys

    def _string(self, at: int) -> bytes:
        size, at = self._length(at)
        return _quote(self._part(at, size).decode())

    def _opaque(self, at: int) -> bytes:
        kind = self._data[at]
        size, at = self._length(at + 1)
        value = self._part(at, size)
        if kind == NEWDECIMAL:
            precision, scale = value[0], value[1]
            if len(value) != 2 + decimal_size(precision, scale):
                raise ValueError("a decimal is cut short")
            return decimals(precision, scale)([value[2:]])[0]
        if kind in (DATE, TIME, DATETIME, TIMESTAMP):
            return _moment(kind, *struct.unpack("<q", value))
        return b'"base64:type%d:%b"' % (kind, b2a_base64(value, newline=False))

    def _length(self, at: int) -> tuple[int, int]:
        """A number of seven bits a byte, the lowest first, and where it ends."""
        size = 0
        for shift in range(0, 35, 7):
            byte = self._data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                return size, at
        raise ValueError("a length of more than five bytes")

    def _part(self, at: int, size: int) -> bytes:
        if at + size > len(self._data):
            raise ValueError("a value is cut short")
        return self._data[at : at + size]


def _double(value: float) -> bytes:
    """The shortest text that reads as the same number, in the server's notation."""
    if not math.isfinite(value):
        raise ValueError("not a number")
    size = abs(value)
    if size == 0 or 1e-4 <= size < 1e15:
        return repr(value).encode()
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    text = "".join(map(str, digits)).rstrip("0")
    point = len(digits) + int(exponent)  # places before the decimal point
    if len(text) > point > 0:
        return repr(value).encode()
    if -14 <= point <= 0:
        shown = f"0.{'0' * -point}{text}"
    else:
        shown = f"{text[0]}{'.' + text[1:] if text[1:] else ''}e{point - 1}"
    return f"{'-' if sign else ''}{shown}".encode()


def _moment(kind: int, packed: int) -> bytes:
    sign = b"-" if packed < 0 else b""
    whole, micro = divmod(abs(packed), 1 << 24)
    day, clock = divmod(whole, 1 << 17)
    if kind == TIME:
        parts = (whole >> 12 & 0x3FF, whole >> 6 & 63, whole & 63, micro)
        return b'"%b%02d:%02d:%02d.%06d"' % (sign, *parts)
    months, of_month = divmod(day, 32)
    shown = b"%04d-%02d-%02d" % (*divmod(months, 13), of_month)
    if kind == DATE:
        return b'"%b"' % shown
    parts = (clock >> 12, clock >> 6 & 63, clock & 63, micro)
    return b'"%b %02d:%02d:%02d.%06d"' % (shown, *parts)
