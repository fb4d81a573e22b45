"""Values of MySQL and MariaDB as JSON, from the binlog and from SELECT: the same bytes for both.

    INT …, YEAR, BIT    12              DECIMAL    "12.50"      TINYINT(1)  true, false, 7
    FLOAT, DOUBLE       1.5             BLOB, BINARY, geometry (WKB)  "base64"
    DATETIME  "2025-01-15 10:30:00"     TIMESTAMP  "2025-01-15T10:30:00Z"
    DATE  "2025-01-15"    TIME  "-838:59:59"    ENUM  "label"    SET  ["a","b"]
    JSON      the document

Zero dates and partial ones keep the server's text: "0000-00-00", "2000-00-01 00:00:00".

This module is about what SELECT gives, one value at a time; `layouts` about the binlog's rows.
A value that cannot be read raises DecodeError, which names the column and never shows the value.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable

import msgspec

from ....change.printed import Encode, Printed
from ....errors import DecodeError
from .columns import GEOMETRIES, DeclaredColumn, DeclaredType, declared_type
from .layouts import document, shortest
from .times import ZERO

_quote = msgspec.json.Encoder().encode


def select_expression(column: DeclaredColumn, quoted: str) -> str:
    """The expression that selects a column without any loss; `quoted`: its name."""
    base = declared_type(column.type).base
    if base in ("float", "double"):
        return f"{quoted} * 1e0"  # FLOAT alone is shown with six digits; + 0 would lose a -0
    return f"{quoted} + 0" if base == "bit" else quoted


def text_encoder(column: DeclaredColumn) -> Encode:
    """JSON of what `select_expression` gives over the text protocol.

    The session's time_zone must be +00:00 and its character_set_results utf8mb4.
    """
    kind = declared_type(column.type)
    if column.json:
        return _named(column, document)
    encode = _ENCODERS.get(kind.base)
    if encode is None:
        raise DecodeError(
            f"the column {column.name} is of type {kind.base}, which is not read here"
        )
    return _named(column, encode(kind))


def printed_as(column: DeclaredColumn) -> Printed | None:
    """How a block keeps what the server sends, which `text_encoder` writes as the same JSON.

    None: as JSON alone. Zero dates among timestamps must be written as JSON, too.
    """
    kind = declared_type(column.type)
    if column.json or kind.boolean or kind.zerofill:
        return None
    return _PRINTED.get(kind.base)


def _named(column: DeclaredColumn, encode: Encode) -> Encode:
    def named(value: bytes) -> bytes:
        try:
            return encode(value)
        except ValueError:
            raise DecodeError(
                f"the column {column.name} has a value that does not read as {column.type}"
            ) from None

    return named


_BOOLEANS = {b"0": b"false", b"1": b"true"}


def _integer(kind: DeclaredType) -> Encode:
    if kind.boolean:
        return lambda value: _BOOLEANS.get(value, value)
    return _whole if kind.zerofill else _same


def _same(value: bytes) -> bytes:
    return value


def _whole(value: bytes) -> bytes:
    return b"%d" % int(value)


def _decimal(kind: DeclaredType) -> Encode:
    return _unfilled if kind.zerofill else _quoted


def _unfilled(value: bytes) -> bytes:
    whole, dot, fraction = value.partition(b".")
    return b'"%d%b%b"' % (int(whole), dot, fraction)


def _quoted(value: bytes) -> bytes:
    return b'"%b"' % value


def _text(value: bytes) -> bytes:
    return _quote(value.decode())


def _timestamp(value: bytes) -> bytes:
    return _quoted(value) if value.startswith(ZERO) else b'"%bZ"' % value.replace(b" ", b"T")


def _labels(value: bytes) -> bytes:
    return _quote(value.decode().split(",")) if value else b"[]"


def _base64(value: bytes) -> bytes:
    return b'"%b"' % b2a_base64(value, newline=False)


def _always(encode: Encode) -> Callable[[DeclaredType], Encode]:
    return lambda kind: encode


_ENCODERS: dict[str, Callable[[DeclaredType], Encode]] = {
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint"), _integer),
    "decimal": _decimal,
    "double": _always(lambda value: _quote(float(value))),
    "float": _always(lambda value: _quote(shortest(float(value)))),
    "bit": _always(_same),
    "year": _always(_whole),
    **dict.fromkeys(("date", "time", "datetime", "uuid", "inet4", "inet6"), _always(_quoted)),
    "timestamp": _always(_timestamp),
    **dict.fromkeys(
        ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum"), _always(_text)
    ),
    **dict.fromkeys(
        ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"), _always(_base64)
    ),
    "set": _always(_labels),
    "json": _always(_same),
    **dict.fromkeys(GEOMETRIES, _always(lambda value: _base64(value[4:]))),
}

_PRINTED: dict[str, Printed] = {
    **dict.fromkeys(
        ("tinyint", "smallint", "mediumint", "int", "bigint", "bit", "json"), Printed.PLAIN
    ),
    **dict.fromkeys(
        ("decimal", "date", "time", "datetime", "uuid", "inet4", "inet6"), Printed.QUOTED
    ),
    "timestamp": Printed.TIMESTAMP,
    **dict.fromkeys(
        ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum"), Printed.TEXT
    ),
}
