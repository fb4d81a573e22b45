"""Values as a database prints them, written as JSON. No I/O.

Each way has a name, under which a block of rows (`block`) keeps values as they were printed.
"""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from ..errors import DecodeError

Encode = Callable[[bytes], bytes]

_quote = msgspec.json.Encoder().encode


class Printed(StrEnum):
    """How the text of a column's values becomes JSON."""

    JSON = "json"  # it is JSON, `null` for null; all others have \N for null
    PLAIN = "plain"  # it is JSON: numbers, documents
    QUOTED = "quoted"  # digits, letters and signs that JSON never escapes
    TEXT = "text"
    FLOAT = "float"  # 1.5, NaN, -Infinity
    BOOLEAN = "boolean"  # t, f
    TIMESTAMP = "timestamp"  # 2025-01-15 10:30:00.5
    TIMESTAMPTZ = "timestamptz"  # 2025-01-15 10:30:00.5+00


def unreadable(what: str) -> DecodeError:
    """The error for a value that is not what its type says; the value itself may be private."""
    return DecodeError(f"the server sent {what} that does not read as one")


def as_quoted(value: bytes) -> bytes:
    """Text of digits, letters and signs that JSON never escapes."""
    return b'"%b"' % value


def as_string(value: bytes) -> bytes:
    """Any text; raises UnicodeDecodeError."""
    return _quote(value.decode())


def as_float(value: bytes) -> bytes:
    """A number as it is; NaN and Infinity, which JSON does not have, as text."""
    try:
        # A number ends in a digit, the others in a letter.
        return value if value[-1] <= 57 else b'"%b"' % value
    except IndexError:
        raise unreadable("a number") from None


class _Boolean(dict[bytes, bytes]):
    """A dictionary, since looking up is faster than any comparison in Python."""

    def __missing__(self, key: bytes) -> bytes:
        raise unreadable("a boolean")


as_boolean: Encode = _Boolean({b"t": b"true", b"f": b"false"}).__getitem__


def as_timestamp(value: bytes) -> bytes:
    """A time without a zone, in ISO 8601 where that has a form for it."""
    try:
        # The space stands at 10 in years of four digits; "BC" ends in C (67).
        if value[10] == 32 and value[-1] != 67:
            return b'"%bZ"' % value.replace(b" ", b"T")
    except IndexError:  # infinity is short
        pass
    return b'"%b"' % value


def as_timestamptz(value: bytes) -> bytes:
    """A moment, in ISO 8601 where that has a form for it."""
    try:
        if value[10] == 32:
            sign = value[-3]
            if sign in (43, 45):  # +00 or -03: hours alone
                return b'"%b:00"' % value.replace(b" ", b"T")
            if sign == 58:  # +05:30 or +00:19:32
                return b'"%b"' % value.replace(b" ", b"T")
    except IndexError:  # infinity is short
        pass
    return b'"%b"' % value


def same(value: bytes) -> bytes:
    """Text that is its own JSON."""
    return value


ENCODERS: dict[Printed, Encode] = {
    Printed.JSON: same,
    Printed.PLAIN: same,
    Printed.QUOTED: as_quoted,
    Printed.TEXT: as_string,
    Printed.FLOAT: as_float,
    Printed.BOOLEAN: as_boolean,
    Printed.TIMESTAMP: as_timestamp,
    Printed.TIMESTAMPTZ: as_timestamptz,
}
"""How a value becomes JSON that is not null."""
