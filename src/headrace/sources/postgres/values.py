r"""PostgreSQL values as JSON: what the server prints, turned into what a change carries.

    numbers       12, 1.5           numeric   "12.50", exact; "NaN"
    true, false                     text      "…", also every type not named here
    timestamp     "2025-01-15T10:30:00Z"      timestamptz   "2025-01-15T10:30:00+00:00"
    json, jsonb   the document      bytea     "base64"
    array         [1,[2,null]]      point     {"x":1.0,"y":2.0}
    composite     {"field":…}       hstore    {"key":"value"}

Infinity, years before 1 and years after 9999 keep the server's own text.

Everything here is pure: bytes in, bytes out, no I/O. The result is JSON on one line.
What cannot be read raises DecodeError. Scalars with a fixed alphabet (numbers, uuid, dates) are
taken as printed, because every row pays for a check that the server's output functions never fail.
"""

import re
from binascii import Error as Base16Error
from binascii import b2a_base64, unhexlify
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ...change.printed import (
    Encode,
    Printed,
    as_boolean,
    as_float,
    as_quoted,
    as_timestamp,
    as_timestamptz,
    unreadable,
)
from ...errors import DecodeError
from .large import LARGE, base64_of_hex, expect_utf8, listed, quoted

# The text of a value depends on these, so every connection that reads values sets them.
SESSION_SETTINGS: dict[str, str] = {
    "DateStyle": "ISO",
    "IntervalStyle": "iso_8601",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
    "lc_monetary": "C",
}

# Every type of the database, one JSON document a row.
# Only what array_out prints is an array: point, name and int2vector have a typelem as well.
TYPES_SQL = """
    SELECT json_build_object(
        'oid', t.oid::int8,
        'name', format_type(t.oid, NULL),
        'kind', t.typtype,
        'element', CASE WHEN t.typtype = 'b' AND t.typoutput = 'pg_catalog.array_out'::regproc
                        THEN t.typelem::int8 ELSE 0 END,
        'base', t.typbasetype::int8,
        'delimiter', t.typdelim,
        'fields', coalesce(c.fields, '[]')
    )::text
    FROM pg_catalog.pg_type t
    LEFT JOIN (
        SELECT attrelid,
               json_agg(json_build_array(attname, atttypid::int8) ORDER BY attnum) AS fields
        FROM pg_catalog.pg_attribute WHERE attnum > 0 AND NOT attisdropped
        GROUP BY attrelid
    ) c ON t.typtype = 'c' AND c.attrelid = t.typrelid"""

ARRAY_DIMENSIONS = 6  # PostgreSQL's MAXDIM
TYPE_NESTING = 64  # arrays of composites of domains …; each level costs stack


@dataclass(frozen=True, slots=True)
class PgType:
    """What the catalog says of a type, as far as its text depends on it."""

    oid: int
    name: str  # format_type() without modifiers: "integer", "public.mood"
    kind: str  # pg_type.typtype: b base, d domain, e enum, c composite, r range, m multirange
    element: int = 0  # an array's element type; 0: not an array
    base: int = 0  # the type below a domain
    delimiter: str = ","  # between the elements of an array
    fields: tuple[tuple[str, int], ...] = ()  # a composite's names and types, in its own order


_type = msgspec.json.Decoder(PgType).decode
_quote = msgspec.json.Encoder().encode
_parse = msgspec.json.Decoder(msgspec.Raw).decode


def pg_types(rows: Iterable[Sequence[str | bytes]]) -> dict[int, PgType]:
    """The rows of TYPES_SQL, by oid."""
    try:
        return {pg_type.oid: pg_type for pg_type in (_type(row[0]) for row in rows)}
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise DecodeError("the server's catalog describes a type in an unknown way") from error


def encoder(oid: int, types: Mapping[int, PgType]) -> Encode | None:
    """The function that writes a value of this type as JSON; None when its text already is JSON."""
    return _Encoders(types).of(oid)


def _not_utf8() -> DecodeError:
    return DecodeError(
        "the server sent text that is not UTF-8",
        hint="Correct the row, or convert the database to the encoding UTF8.",
    )


def encode_large(encode: Encode | None, value: memoryview) -> bytes:
    """A value of many megabytes as JSON, without a copy of it where the type allows."""
    if encode is as_text:
        try:
            return quoted(value)
        except UnicodeDecodeError as error:
            raise _not_utf8() from error
    if encode is _bytea:
        return _large_bytea(value)
    whole = bytes(value)
    return whole if encode is None else encode(whole)


# --- scalars -------------------------------------------------------------------------------------


def as_text(value: bytes) -> bytes:
    try:
        return _quote(value.decode()) if len(value) < LARGE else quoted(value)
    except UnicodeDecodeError as error:
        raise _not_utf8() from error


def as_utf8(value: bytes) -> bytes:
    """Text that is its own JSON, from a database that does not know its encoding."""
    _refuse_other_than_utf8(value)
    return value


def _refuse_other_than_utf8(value: bytes) -> None:
    try:
        expect_utf8(value) if len(value) >= LARGE else value.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8() from error


_ONE_LINE = bytes.maketrans(b"\n\r\t", b"   ")


def _json(value: bytes) -> bytes:
    if not value.isascii():
        _refuse_other_than_utf8(value)
    return value.translate(_ONE_LINE)


def _bytea(value: bytes) -> bytes:
    if len(value) >= LARGE:
        return _large_bytea(memoryview(value))
    if value[:2] != b"\\x":
        raise unreadable("a bytea in hex")
    try:
        return b'"%b"' % b2a_base64(unhexlify(value[2:]), newline=False)
    except Base16Error:
        raise unreadable("a bytea in hex") from None


def _large_bytea(value: memoryview) -> bytes:
    if bytes(value[:2]) != b"\\x":
        raise unreadable("a bytea in hex")
    try:
        return base64_of_hex(value[2:])
    except Base16Error:
        raise unreadable("a bytea in hex") from None


_FLOAT = rb"(-?\d+(?:\.\d+)?(?:e[-+]\d+)?|NaN|-?Infinity)"
_point_parts = re.compile(rb"\(%b,%b\)" % (_FLOAT, _FLOAT)).fullmatch


def _point(value: bytes) -> bytes:
    parts = _point_parts(value)
    if parts is None:
        raise unreadable("a point")
    return b'{"x":%b,"y":%b}' % (_coordinate(parts[1]), _coordinate(parts[2]))


def _coordinate(value: bytes) -> bytes:
    whole = value.removeprefix(b"-").isdigit()
    return value + b".0" if whole else as_float(value)


def _vector(value: bytes) -> bytes:
    return b"[%b]" % value.replace(b" ", b",")


# Number and string types by their oid, which is the same on every server.
_INTEGERS = frozenset((20, 21, 23, 26, 28, 29, 5069))  # int8 int2 int4 oid xid cid xid8
_FLOATS = frozenset((700, 701))
_SCALARS: dict[int, Encode | None] = {
    **dict.fromkeys(_INTEGERS),
    **dict.fromkeys(_FLOATS, as_float),
    3802: None,  # jsonb: printed on one line
    114: _json,
    16: as_boolean,
    17: _bytea,
    22: _vector,  # int2vector
    30: _vector,  # oidvector
    600: _point,
    1114: as_timestamp,
    1184: as_timestamptz,
    # numeric, date, time, timetz, interval, uuid, inet, cidr, macaddr, macaddr8, bit, varbit,
    # pg_lsn, tid
    **dict.fromkeys(
        (1700, 1082, 1083, 1266, 1186, 2950, 869, 650, 829, 774, 1560, 1562, 3220, 27), as_quoted
    ),
}


PRINTED: Mapping[Encode | None, Printed] = {
    None: Printed.PLAIN,
    as_quoted: Printed.QUOTED,
    as_text: Printed.TEXT,
    as_float: Printed.FLOAT,
    as_boolean: Printed.BOOLEAN,
    as_timestamp: Printed.TIMESTAMP,
    as_timestamptz: Printed.TIMESTAMPTZ,
}
"""The functions whose values a block keeps as they were printed."""


# --- arrays, composites, hstore ------------------------------------------------------------------

# A quoted element; inside the quotes \ stands before each " and \ of the text.
_QUOTED = rb'"[^"\\]*+(?:\\["\\][^"\\]*+)*+"'


def _unquote(quoted: bytes) -> bytes:
    text = quoted[1:-1]
    if 92 in text:
        # Each " loses the \ just before it; the \ that are left come in pairs.
        return text.replace(b'\\"', b'"').replace(b"\\\\", b"\\")
    return text


def _array(encode: Encode | None, delimiter: str) -> Encode:
    """Arrays as array_out prints them: {1,NULL,"a b"}, {{1,2},{3,4}}, [0:1]={1,2}."""
    stop = delimiter.encode()
    nested = _nested_array(encode, stop)

    def write(value: bytes) -> bytes:
        if value[:1] == b"[":
            value = value[value.find(b"=") + 1 :]
        # One brace at each end and nothing else that is special: the delimiter alone decides.
        if value[-1:] != b"}" or len(value.translate(None, b'{}"\\')) != len(value) - 2:
            return nested(value)
        if value[0] != 123 or len(value) >= LARGE:
            return nested(value)
        elements = value[1:-1].split(stop)
        if b"" in elements:
            return nested(value)
        if encode is None:
            return b"[%b]" % b",".join([b"null" if e == b"NULL" else e for e in elements])
        return b"[%b]" % b",".join([b"null" if e == b"NULL" else encode(e) for e in elements])

    return write


def _nested_array(encode: Encode | None, stop: bytes) -> Encode:
    """Arrays with quotes or several dimensions."""
    # Opening braces, one element, closing braces and what follows; or a byte that fits nowhere.
    escaped = re.escape(stop)
    pattern = re.compile(
        rb'(\{*+)(%b|[^{}"\\%b]++)(\}*+)(%b|\Z)|.' % (_QUOTED, escaped, escaped), re.DOTALL
    )

    def write(value: bytes) -> bytes:
        if value == b"{}":
            return b"[]"
        if len(value) < LARGE:
            return b",".join(texts(pattern.findall(value)))
        # A list of millions of elements would take many times what they take here.
        return listed(texts(found.groups(b"") for found in pattern.finditer(value)))

    def texts(elements: Iterable[tuple[bytes, ...]]) -> Iterator[bytes]:
        depth, empty = 0, True
        for opened, element, closed, after in elements:
            depth += len(opened)
            if not element or not 0 < depth <= ARRAY_DIMENSIONS:
                raise unreadable("an array")
            if element == b"NULL":
                text = b"null"
            else:
                text = _unquote(element) if element[0] == 34 else element
                text = text if encode is None else encode(text)
            if opened or closed:
                depth -= len(closed)
                text = opened.replace(b"{", b"[") + text + closed.replace(b"}", b"]")
            if (depth > 0) is (after == b""):
                raise unreadable("an array")
            empty = False
            yield text
        if depth or empty:
            raise unreadable("an array")

    return write


_NUMBERS = bytes.maketrans(b"{}NUL", b"[]nul")


def _integers(value: bytes) -> bytes:
    if value[:1] == b"[":
        value = value[value.find(b"=") + 1 :]
    return value.translate(_NUMBERS)


_any_floats = _array(as_float, ",")


def _floats(value: bytes) -> bytes:
    # NULL, NaN (78: N) and Infinity (73: I) apart, the numbers stand as they are.
    if 78 in value or 73 in value:
        return _any_floats(value)
    return _integers(value)


# A field and what follows; inside quotes both " and \ are written twice.
_fields = re.compile(
    rb'("[^"\\]*+(?:(?:""|\\\\)[^"\\]*+)*+"|[^",()\\]*+)([,)])|.', re.DOTALL
).findall


def _undouble(quoted: bytes) -> bytes:
    return quoted[1:-1].replace(b'""', b'"').replace(b"\\\\", b"\\")


def record_fields(value: bytes, count: int) -> list[bytes | None]:
    """The fields of a row as record_out prints it; None: null."""
    fields = _fields(value, 1)
    ends = [b","] * (count - 1) + [b")"]
    if not count and value == b"()":
        return []
    if value[:1] != b"(" or [end for _, end in fields] != ends:
        raise unreadable(f"a row of {count} fields")
    return [
        None if not field else _undouble(field) if field[0] == 34 else field for field, _ in fields
    ]


def _composite(columns: Sequence[tuple[str, Encode | None]]) -> Encode:
    """Rows as record_out prints them: (1,,"a ""quoted"" word"); an empty field is null."""
    keys = [(_quote(name) + b":", encode) for name, encode in columns]

    def write(value: bytes) -> bytes:
        parts: list[bytes] = []
        for (key, encode), text in zip(keys, record_fields(value, len(keys)), strict=True):
            if text is None:
                parts.append(key + b"null")
            else:
                parts.append(key + (text if encode is None else encode(text)))
        return _whole(b"{%b}" % b",".join(parts))

    return write


def _whole(document: bytes) -> bytes:
    """Refuse what is no JSON: a type may have been altered since it was looked up."""
    try:
        _parse(document)
    except (msgspec.DecodeError, RecursionError):
        raise unreadable("a row of its type") from None
    return document


_pairs = re.compile(rb"(%b)=>(%b|NULL)(, |\Z)|." % (_QUOTED, _QUOTED), re.DOTALL).findall


def _hstore(value: bytes) -> bytes:
    pairs = _pairs(value)
    if not pairs:
        return b"{}"
    # What fits nowhere has neither key nor end.
    if not pairs[-1][0] or [end for _, _, end in pairs] != [b", "] * (len(pairs) - 1) + [b""]:
        raise unreadable("an hstore")
    try:
        return _quote(
            {
                _unquote(key).decode(): None if text == b"NULL" else _unquote(text).decode()
                for key, text, _ in pairs
            }
        )
    except UnicodeDecodeError as error:
        raise _not_utf8() from error


# --- from types to functions ---------------------------------------------------------------------


def _too_deep(value: bytes) -> bytes:
    """A value of such a type cannot be read; to describe its table does no harm."""
    del value
    raise DecodeError(f"a type is nested more than {TYPE_NESTING} levels deep")


class _Encoders:
    """The functions of the types that one type is made of, each built once."""

    def __init__(self, types: Mapping[int, PgType]) -> None:
        self._types = types
        # While a type is being built it stands here as text, which ends a circle.
        self._built: dict[int, Encode | None] = dict(_SCALARS)
        self._depth = 0

    def of(self, oid: int) -> Encode | None:
        if oid in self._built:
            return self._built[oid]
        pg_type = self._types.get(oid)
        if pg_type is None:
            return as_text
        if self._depth == TYPE_NESTING:
            return _too_deep
        self._built[oid] = as_text
        self._depth += 1
        self._built[oid] = self._build(pg_type)
        self._depth -= 1
        return self._built[oid]

    def _build(self, pg_type: PgType) -> Encode | None:
        if pg_type.kind == "d":
            return self.of(pg_type.base)
        if pg_type.kind == "c" and pg_type.fields:
            return _composite([(name, self.of(oid)) for name, oid in pg_type.fields])
        if pg_type.element and len(pg_type.delimiter) == 1:
            return self._array_of(pg_type)
        if pg_type.kind == "b" and pg_type.name.rpartition(".")[2] == "hstore":
            return _hstore
        return as_text

    def _array_of(self, pg_type: PgType) -> Encode:
        element = self._undomained(pg_type.element)
        if pg_type.delimiter == ",":
            if element in _INTEGERS:
                return _integers
            if element in _FLOATS:
                return _floats
        return _array(self.of(element), pg_type.delimiter)

    def _undomained(self, oid: int) -> int:
        for _ in range(TYPE_NESTING):
            pg_type = self._types.get(oid)
            if pg_type is None or pg_type.kind != "d":
                break
            oid = pg_type.base
        return oid
