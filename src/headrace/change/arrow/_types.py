"""Types by the names that sources give them."""

import re
from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa
from msgspec import Raw

from ...errors import ConfigError
from ..event import Column
from . import _mysql
from . import _values as read
from ._values import ANYTHING, DOCUMENT, INSTANT, STRING, Kind, list_of

_POSTGRES: dict[str, Kind] = {
    **dict.fromkeys(("smallint", "int2"), Kind(pa.int16(), int, read.plain)),
    **dict.fromkeys(("integer", "int", "int4"), Kind(pa.int32(), int, read.plain)),
    **dict.fromkeys(("bigint", "int8", "oid"), Kind(pa.int64(), int, read.plain)),
    **dict.fromkeys(("real", "float4"), Kind(pa.float32(), Raw, read.floats)),
    **dict.fromkeys(("double precision", "float8"), Kind(pa.float64(), Raw, read.floats)),
    **dict.fromkeys(("boolean", "bool"), Kind(pa.bool_(), bool, read.plain)),
    "date": Kind(pa.date32(), str, read.parsed),
    "bytea": Kind(pa.binary(), bytes, read.plain),  # base64 in JSON, which msgspec reads as bytes
    **dict.fromkeys(
        ("timestamp without time zone", "timestamp"),
        Kind(pa.timestamp("us"), str, read.wall_clock),
    ),
    **dict.fromkeys(("timestamp with time zone", "timestamptz"), Kind(INSTANT, str, read.parsed)),
    **dict.fromkeys(("json", "jsonb"), DOCUMENT),
    # Types of text are read as such; the names that are not here may hold anything.
    **dict.fromkeys(
        ("text", "character varying", "varchar", "character", "bpchar", "uuid", "name", "numeric"),
        STRING,
    ),
}

_CONNECTORS = {"postgres": _POSTGRES}

# A name, a modifier in brackets anywhere before "with time zone", and the brackets of an array.
_type_parts = re.compile(
    r'([^()"\[\]]+?)(?:\(([\d,-]+)\))?( with(?:out)? time zone)?(\[\])?'
).fullmatch


# SQLite's own rules, in its order: what a declared type contains says what a column is meant for.
_SQLITE = (
    ("INT", Kind(pa.int64(), int, read.plain)),
    ("CHAR", STRING),
    ("CLOB", STRING),
    ("TEXT", STRING),
    ("BLOB", Kind(pa.binary(), bytes, read.plain)),
    ("REAL", Kind(pa.float64(), Raw, read.floats)),
    ("FLOA", Kind(pa.float64(), Raw, read.floats)),
    ("DOUB", Kind(pa.float64(), Raw, read.floats)),
)


def _sqlite(type_text: str) -> Kind:
    """Numbers of any kind, dates and columns without a type are text: they may hold anything."""
    declared = type_text.upper()
    return next((kind for part, kind in _SQLITE if part in declared), ANYTHING)


@lru_cache(maxsize=4096)
def _kind(type_text: str, connector: str) -> Kind:
    if connector == "sqlite":
        return _sqlite(type_text)
    if connector == "mysql":
        return _mysql.kind(type_text)
    names = _CONNECTORS.get(connector)
    if names is None:
        raise ConfigError(f"the types of {connector!r} are not known here")
    parts = _type_parts(type_text)
    if parts is None:
        return list_of(ANYTHING) if type_text.endswith("[]") else ANYTHING
    name, modifier, zone, array = parts.groups()
    kind = _decimal(modifier) if name == "numeric" else names.get(name + (zone or ""), ANYTHING)
    return list_of(kind) if array else kind


def _decimal(modifier: str | None) -> Kind:
    """Room for every value of numeric(p,s), or text where Arrow has none."""
    precision, scale = (int(n) for n in f"{modifier or 0},0".split(",")[:2])
    if 1 <= precision <= 38 and 0 <= scale <= precision:
        return Kind(pa.decimal128(precision, scale), str, read.parsed)
    return STRING


def arrow_type(type_text: str, connector: str = "postgres") -> pa.DataType:
    """The Arrow type of a column that the source declares as `type_text`."""
    return _kind(type_text, connector).arrow


def arrow_schema(
    columns: Sequence[Column],
    *,
    as_text: frozenset[str] = frozenset(),
    connector: str = "postgres",
) -> pa.Schema:
    """The schema of what `decode` returns for these columns."""
    return pa.schema([(c.name, kind_of(c, as_text, connector).arrow) for c in columns])


def kind_of(column: Column, as_text: frozenset[str], connector: str) -> Kind:
    kind = _kind(column.type, connector)
    # A document is text already, and its quotes belong to it.
    return ANYTHING if column.name in as_text and kind is not DOCUMENT else kind


_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_WIDER: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    pa.int16(): (pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    pa.int32(): (pa.int64(), pa.float64()),
    pa.float32(): (pa.float64(),),
}


def widened(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether each value of `old` is the same value in `new`, and Arrow casts it without loss."""
    if old == new or new in _WIDER.get(old, ()):
        return True
    if pa.types.is_list(old) and pa.types.is_list(new):
        return widened(old.value_type, new.value_type)
    if not pa.types.is_decimal(new):
        return False
    whole = new.precision - new.scale
    if pa.types.is_decimal(old):
        return bool(new.scale >= old.scale and whole >= old.precision - old.scale)
    return old in _DIGITS and bool(whole >= _DIGITS[old])
