"""Types of MySQL and MariaDB in Arrow, by the text that information_schema has for them."""

import re

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Raw

from ...change.arrow import kinds as read
from ...change.arrow.kinds import ANYTHING, DOCUMENT, INSTANT, STRING, TEXT, Kind, list_of

# "int(10) unsigned", "decimal(12,2)", "enum('a','(b)')", "varchar(50) /*M!100301 COMPRESSED*/"
_parts = re.compile(r"([a-z0-9_]+)(?:\((.*?)\))?((?: [^']*)?)", re.DOTALL | re.IGNORECASE).fullmatch


def kind(type_text: str) -> Kind:
    """How a column of this type travels."""
    parts = _parts(type_text)
    if parts is None:
        return ANYTHING
    base, arguments, rest = parts[1].lower(), parts[2] or "", parts[3].lower()
    unsigned = "unsigned" in rest or "zerofill" in rest
    if base in _INTEGERS:
        if (base, arguments, unsigned) == ("tinyint", "1", False):
            return _BOOLEAN
        return _UNSIGNED[base] if unsigned else _INTEGERS[base]
    if base == "decimal":
        return _decimal(arguments)
    if base == "bit":
        return _whole(pa.int64()) if int(arguments or 1) < 64 else _LARGE
    return _KINDS.get(base, ANYTHING)


def _decimal(arguments: str) -> Kind:
    """Room for every value, or text where Arrow has none: there are up to 65 digits."""
    precision, scale = (int(number) for number in f"{arguments or 10},0".split(",")[:2])
    if precision <= 38:
        return Kind(pa.decimal128(precision, scale), str, read.parsed)
    return STRING


def _dates(values: read.Texts, arrow: pa.DataType) -> pa.Array:
    """Dates and times; the zero date, which the server itself finds with IS NULL, is null.

    One that lacks only its month or its day is more than null and no date, and neither does the
    year 0 exist elsewhere.
    """
    texts = read.texts(values)
    if pc.any(pc.starts_with(texts, "0000-")).as_py():
        texts = pc.if_else(pc.starts_with(texts, "0000-00-00"), pa.scalar(None, TEXT), texts)
        if pc.any(pc.starts_with(texts, "0000-")).as_py():
            raise pa.ArrowInvalid("the year 0")
    return texts.cast(arrow)


def _whole(arrow: pa.DataType) -> Kind:
    return Kind(arrow, int, read.plain)


_BOOLEAN = Kind(pa.bool_(), bool, read.plain)
_LARGE = _whole(pa.decimal128(20, 0))
_BYTES = Kind(pa.binary(), bytes, read.plain)  # base64 in JSON, which msgspec reads as bytes

_INTEGERS = {
    "tinyint": _whole(pa.int8()),
    "smallint": _whole(pa.int16()),
    "mediumint": _whole(pa.int32()),
    "int": _whole(pa.int32()),
    "bigint": _whole(pa.int64()),
}
_UNSIGNED = {
    "tinyint": _whole(pa.int16()),
    "smallint": _whole(pa.int32()),
    "mediumint": _whole(pa.int32()),
    "int": _whole(pa.int64()),
    "bigint": _LARGE,
}
_KINDS = {
    "float": Kind(pa.float32(), Raw, read.floats),
    "double": Kind(pa.float64(), Raw, read.floats),
    "year": _whole(pa.int16()),
    "date": Kind(pa.date32(), str, _dates),
    "datetime": Kind(pa.timestamp("us"), str, _dates),
    "timestamp": Kind(INSTANT, str, _dates),
    "json": DOCUMENT,
    "set": list_of(STRING),
    **dict.fromkeys(
        ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "time", "uuid"),
        STRING,
    ),
    **dict.fromkeys(("inet4", "inet6"), STRING),
    **dict.fromkeys(("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"), _BYTES),
    **dict.fromkeys(
        ("geometry", "point", "linestring", "polygon", "multipoint", "multilinestring"), _BYTES
    ),
    **dict.fromkeys(("multipolygon", "geometrycollection", "geomcollection"), _BYTES),
}
