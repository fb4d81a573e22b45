"""Columns of the binlog's rows: how their bytes lie, and their JSON.

`layout` knows how many bytes a column takes in a row, and its `convert` turns the values that the
column has in many rows into JSON at once: what can be decided for all of them (is there anything
to escape?) is decided once. A value that cannot be read raises DecodeError, which names the column
and never shows the value. `values` lists what each type becomes.
"""

from __future__ import annotations

import zlib
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address
from math import isfinite
from struct import Struct, pack
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from ....errors import DecodeError
from . import times
from . import typecodes as t
from .binaryjson import json_text
from .charsets import UTF8, decoder, is_ascii_superset
from .columns import ColumnType
from .decimals import decimal_size, decimals

Values = Sequence[Any]
Convert = Callable[[Values], tuple[bytes, Sequence[bytes]]]
"""Values of one column -> how the image holds each, and the texts; none of them is NULL."""

PLAIN, QUOTED = b"%b", b'"%b"'

_quote = msgspec.json.Encoder().encode
_document = msgspec.json.Decoder(msgspec.Raw).decode
_array = msgspec.json.Decoder(list[msgspec.Raw]).decode

# What may stand in a JSON string only escaped.
_SPECIAL = bytes(range(32)) + b'"\\'


class ColumnLayout(NamedTuple):
    """How a column stands in a row."""

    code: str  # struct's, of a fixed size, the lowest byte first; "": its length stands in front
    prefix: int  # bytes of that length
    convert: Convert


def layout(column: ColumnType) -> ColumnLayout:
    """How to read a column; DecodeError: its type cannot be read here."""
    build = _LAYOUTS.get(column.code)
    if build is None:
        name = _UNREADABLE.get(column.code, f"type number {column.code}")
        raise DecodeError(
            f"the column {column.name} is of {name}, which is not read here",
            hint="Leave the table out with `tables`, or drop the column.",
        )
    try:
        return build(column)
    except ValueError as error:
        raise _unreadable(column, "a type that does not exist") from error


def _unreadable(column: ColumnType, what: str) -> DecodeError:
    return DecodeError(f"the column {column.name} has {what}")


# --- numbers -------------------------------------------------------------------------------------


def _numbers(values: Values) -> tuple[bytes, Sequence[bytes]]:
    # Encoding all at once is three times as fast as formatting each.
    return PLAIN, _quote(values)[1:-1].split(b",")


_BOOLEANS = {0: b"false", 1: b"true"}  # TINYINT(1) has other numbers, too


def _booleans(values: Values) -> tuple[bytes, Sequence[bytes]]:
    return PLAIN, [_BOOLEANS.get(value) or b"%d" % value for value in values]


def _integer(signed: str) -> Callable[[ColumnType], ColumnLayout]:
    def build(column: ColumnType) -> ColumnLayout:
        code = signed.upper() if column.unsigned else signed
        return ColumnLayout(code, 0, _booleans if column.boolean else _numbers)

    return build


def _int24(column: ColumnType) -> ColumnLayout:
    iterate = Struct("<HB" if column.unsigned else "<Hb").iter_unpack

    def convert(values: Values) -> tuple[bytes, Sequence[bytes]]:
        return _numbers([high << 16 | low for low, high in iterate(b"".join(values))])

    return ColumnLayout("3s", 0, convert)


def _year(column: ColumnType) -> ColumnLayout:
    return ColumnLayout("B", 0, lambda values: _numbers([1900 + v if v else 0 for v in values]))


def _bit(column: ColumnType) -> ColumnLayout:
    size = (column.meta >> 8) + (1 if column.meta & 0xFF else 0)
    if not 0 < size <= 8:
        raise ValueError(f"{size} bytes")
    return ColumnLayout(
        f"{size}s", 0, lambda values: _numbers([int.from_bytes(v, "big") for v in values])
    )


def _decimal(column: ColumnType) -> ColumnLayout:
    precision, scale = column.meta & 0xFF, column.meta >> 8
    size, read = decimal_size(precision, scale), decimals(precision, scale)
    return ColumnLayout(f"{size}s", 0, lambda values: (QUOTED, read(values)))


def _double(column: ColumnType) -> ColumnLayout:
    return ColumnLayout("d", 0, _numbers)


def _float(column: ColumnType) -> ColumnLayout:
    return ColumnLayout("f", 0, lambda values: _numbers([shortest(value) for value in values]))


def shortest(value: float) -> float:
    """The number with the fewest digits that is the same FLOAT: 0.1, not 0.10000000149011612."""
    if not isfinite(value):
        return value
    same = pack("<f", value)
    for digits in (6, 7, 8):
        short = float(f"{value:.{digits}g}")
        try:
            if pack("<f", short) == same:
                return short
        except OverflowError:  # rounded up beyond the largest FLOAT
            continue
    return float(f"{value:.9g}")


# --- text and bytes ------------------------------------------------------------------------------


def _base64(values: Values) -> tuple[bytes, Sequence[bytes]]:
    return QUOTED, [b2a_base64(value, newline=False) for value in values]


def _texts(column: ColumnType) -> Convert:
    charset = column.charset
    decode = decoder(charset)
    plain = is_ascii_superset(charset)

    def convert(values: Values) -> tuple[bytes, Sequence[bytes]]:
        whole = b",".join(values)  # a comma, so that no character can span two values
        if plain and len(whole.translate(None, _SPECIAL)) == len(whole) and fits(whole):
            return QUOTED, values
        try:
            return PLAIN, [_quote(decode(value)) for value in values]
        except UnicodeError:
            raise _foreign(column) from None

    def fits(whole: bytes) -> bool:
        return whole.isascii() or (charset in UTF8 and _is_utf8(whole))

    return convert


def _foreign(column: ColumnType) -> DecodeError:
    return DecodeError(
        f"the column {column.name} has a value that is not in its character set {column.charset}",
        hint="Correct the row, or convert the column to the character set of its values.",
    )


def _is_utf8(whole: bytes) -> bool:
    try:
        whole.decode()
    except UnicodeDecodeError:
        return False  # decoding value by value raises
    return True


_ONE_LINE = bytes.maketrans(b"\n\r\t", b"   ")


def document(value: bytes) -> bytes:
    """A document that the server keeps as text; what is none, since checks can be off, as text."""
    try:
        _document(value)
        value.decode()
    except (msgspec.DecodeError, RecursionError):
        return _quote(value.decode())
    return value.translate(_ONE_LINE).strip()


def _are_documents(values: Values) -> bool:
    """Whether each is one as it stands, tested for all at once."""
    whole = b"[%b]" % b",".join(values)
    if len(whole.translate(None, b"\n\r\t")) != len(whole):
        return False
    try:
        whole.decode()
        # Only where each of them is a value do they come back as they are.
        return list(map(bytes, _array(whole))) == list(values)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # looking at them one by one shows which


def _documents(column: ColumnType) -> Convert:
    def convert(values: Values) -> tuple[bytes, Sequence[bytes]]:
        if _are_documents(values):
            return PLAIN, values
        try:
            return PLAIN, [document(value) for value in values]
        except UnicodeDecodeError:
            raise _unreadable(column, "a document that is not UTF-8") from None

    return convert


def _documents_in(column: ColumnType) -> Convert:
    """Documents in another character set than JSON's."""
    decode = decoder(column.charset)

    def convert(values: Values) -> tuple[bytes, Sequence[bytes]]:
        try:
            return PLAIN, [document(decode(value).encode()) for value in values]
        except UnicodeError:
            raise _foreign(column) from None

    return convert


def _content(column: ColumnType) -> Convert:
    if column.charset == "binary":
        return _base64
    if column.json:
        return _documents(column) if column.charset in UTF8 else _documents_in(column)
    return _texts(column)


def _variable(column: ColumnType) -> ColumnLayout:
    return ColumnLayout("", 1 if column.meta < 256 else 2, _content(column))


def _blob(column: ColumnType) -> ColumnLayout:
    return ColumnLayout("", _blob_prefix(column), _content(column))


def _blob_prefix(column: ColumnType) -> int:
    if column.meta not in (1, 2, 3, 4):
        raise ValueError(f"a length of {column.meta} bytes")
    return column.meta


def _string(column: ColumnType) -> ColumnLayout:
    prefix, size = (1 if column.meta < 256 else 2), column.meta
    special = _SPECIAL_TYPES.get(column.base)
    if special is not None:
        return ColumnLayout("", prefix, _padded(column, size, special))
    if column.charset == "binary":
        return ColumnLayout(
            "", prefix, _padded(column, size, lambda v: b2a_base64(v, newline=False))
        )
    return ColumnLayout("", prefix, _content(column))


def _padded(column: ColumnType, size: int, text: Callable[[bytes], bytes]) -> Convert:
    """Zeros at the end are left out in the binlog."""

    def convert(values: Values) -> tuple[bytes, Sequence[bytes]]:
        try:
            return QUOTED, [text(value.ljust(size, b"\0")) for value in values]
        except ValueError:
            raise _unreadable(column, f"a value that is no {column.base}") from None

    return convert


def _inet6(value: bytes) -> bytes:
    """As MariaDB shows it: the longest zeros left out, also a single one; IPv4 in its own way."""
    if value[:12] == bytes(10) + b"\xff\xff" or (
        value[:12] == bytes(12) and value[12:14] != b"\0\0"
    ):
        start = b"::ffff:" if value[10] else b"::"
        return start + str(IPv4Address(value[12:])).encode()
    groups = [f"{high << 8 | low:x}" for high, low in zip(value[::2], value[1::2], strict=True)]
    if len(groups) != 8:
        raise ValueError("not sixteen bytes")
    size, first = max(_zeros(groups), key=lambda run: (run[0], -run[1]), default=(0, 0))
    if not size:
        return ":".join(groups).encode()
    return f"{':'.join(groups[:first])}::{':'.join(groups[first + size :])}".encode()


def _zeros(groups: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Runs of zeros: how many, and where they begin."""
    for first in range(len(groups)):
        size = 0
        while first + size < len(groups) and groups[first + size] == "0":
            size += 1
        if size:
            yield size, first


# MariaDB's types that a binlog has as BINARY.
_SPECIAL_TYPES: dict[str, Callable[[bytes], bytes]] = {
    "uuid": lambda value: str(UUID(bytes=value)).encode(),
    "inet4": lambda value: str(IPv4Address(value)).encode(),
    "inet6": _inet6,
}


def _compressed(
    plain: Callable[[ColumnType], ColumnLayout],
) -> Callable[[ColumnType], ColumnLayout]:
    """MariaDB's COMPRESSED columns."""

    def build(column: ColumnType) -> ColumnLayout:
        _, prefix, inner = plain(column)

        def convert(values: Values) -> tuple[bytes, Sequence[bytes]]:
            try:
                return inner([_inflated(value) for value in values])
            except (zlib.error, ValueError):
                raise _unreadable(column, "a value that cannot be uncompressed") from None

        return ColumnLayout("", prefix, convert)

    return build


def _inflated(value: bytes) -> bytes:
    """A byte of method and size of the length, the length, the data."""
    if not value or not value[0]:
        return value[1:]
    at = 1 + (value[0] & 7)
    if value[0] >> 4 != 8 or len(value) < at:
        raise ValueError("an unknown method")
    size = int.from_bytes(value[1:at], "big")
    found = zlib.decompressobj(-15 if value[0] & 8 else 15).decompress(value[at:], size + 1)
    if len(found) != size:
        raise ValueError("another length")
    return found


def _geometry(column: ColumnType) -> ColumnLayout:
    def convert(values: Values) -> tuple[bytes, Sequence[bytes]]:
        return _base64([value[4:] for value in values])  # the number of its reference system

    return ColumnLayout("", _blob_prefix(column), convert)


def _json(column: ColumnType) -> ColumnLayout:
    def convert(values: Values) -> tuple[bytes, Sequence[bytes]]:
        try:
            return PLAIN, [json_text(value) for value in values]
        except DecodeError as error:
            raise _unreadable(column, "a document that does not read as one") from error

    return ColumnLayout("", _blob_prefix(column), convert)


# --- labels --------------------------------------------------------------------------------------


def _enum(column: ColumnType) -> ColumnLayout:
    # 0 stands for a value that was not among the labels.
    texts = [b'""', *map(_quote, column.labels)]

    def convert(values: Values) -> tuple[bytes, Sequence[bytes]]:
        try:
            return PLAIN, [texts[value] for value in values]
        except IndexError:
            raise _unreadable(column, "a value beyond its labels") from None

    return ColumnLayout({1: "B", 2: "H"}[_choice_size(column, (1, 2))], 0, convert)


class _Sets(dict[int, bytes]):
    """Combinations of labels as arrays, each written once."""

    def __init__(self, column: ColumnType) -> None:
        self._column = column
        self._texts = [_quote(label) for label in column.labels]

    def __missing__(self, value: int) -> bytes:
        if value >> len(self._texts):
            raise _unreadable(self._column, "a value beyond its labels")
        chosen = [text for at, text in enumerate(self._texts) if value >> at & 1]
        text = b"[%b]" % b",".join(chosen)
        if len(self) < 10_000:
            self[value] = text
        return text


def _set(column: ColumnType) -> ColumnLayout:
    sets, size = _Sets(column), _choice_size(column, (1, 2, 3, 4, 8))

    def convert(values: Values) -> tuple[bytes, Sequence[bytes]]:
        return PLAIN, [sets[int.from_bytes(value, "little")] for value in values]

    return ColumnLayout(f"{size}s", 0, convert)


def _choice_size(column: ColumnType, sizes: tuple[int, ...]) -> int:
    size = column.meta if column.meta < 256 else column.meta >> 8
    if size not in sizes:
        raise ValueError(f"{size} bytes")
    return size


# --- dates and times -----------------------------------------------------------------------------


def _moment(size: int, convert: Callable[[int], Convert]) -> Callable[[ColumnType], ColumnLayout]:
    """A type with fractions of a second."""

    def build(column: ColumnType) -> ColumnLayout:
        if column.meta > 6:
            raise ValueError(f"{column.meta} digits")
        return ColumnLayout(f"{size + (column.meta + 1) // 2}s", 0, convert(column.meta))

    return build


def _fixed(code: str, convert: Convert) -> Callable[[ColumnType], ColumnLayout]:
    return lambda column: ColumnLayout(code, 0, convert)


_LAYOUTS: dict[int, Callable[[ColumnType], ColumnLayout]] = {
    t.TINY: _integer("b"),
    t.SHORT: _integer("h"),
    t.INT24: _int24,
    t.LONG: _integer("i"),
    t.LONGLONG: _integer("q"),
    t.FLOAT: _float,
    t.DOUBLE: _double,
    t.NEWDECIMAL: _decimal,
    t.YEAR: _year,
    t.BIT: _bit,
    t.DATE: _fixed("3s", times.dates),
    t.NEWDATE: _fixed("3s", times.dates),
    t.TIME: _fixed("3s", times.old_times),
    t.DATETIME: _fixed("Q", times.old_datetimes),
    t.TIMESTAMP: _fixed("I", times.old_timestamps),
    t.TIME2: _moment(3, times.times),
    t.DATETIME2: _moment(5, times.datetimes),
    t.TIMESTAMP2: _moment(4, times.timestamps),
    t.VARCHAR: _variable,
    t.VAR_STRING: _variable,
    t.STRING: _string,
    **dict.fromkeys((t.TINY_BLOB, t.MEDIUM_BLOB, t.LONG_BLOB, t.BLOB), _blob),
    t.VARCHAR_COMPRESSED: _compressed(_variable),
    t.BLOB_COMPRESSED: _compressed(_blob),
    t.GEOMETRY: _geometry,
    t.JSON: _json,
    t.ENUM: _enum,
    t.SET: _set,
}
_UNREADABLE = {
    t.VECTOR: "type VECTOR",
    t.TYPED_ARRAY: "an array that an index on an expression made",
    t.DECIMAL: "type DECIMAL of a server before 5.0",
}
