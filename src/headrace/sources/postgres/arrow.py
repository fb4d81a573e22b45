"""Types of PostgreSQL in Arrow, by the names that format_type gives them.

PostgreSQL                        Arrow
smallint, integer, bigint, oid    int16, int32, int64, int64
real, double precision            float32, float64
numeric(p,s), p up to 38          decimal128(p, s)
boolean, bytea, date              bool, binary, date32
timestamp, timestamptz            timestamp(us), timestamp(us, UTC)
one of these, or of the rest []   list, of one dimension
json, jsonb                       string: the document's own text
the rest                          string: text, or the JSON of what is not text
"""

import re

import pyarrow as pa
from msgspec import Raw

from ...change.arrow import kinds as read
from ...change.arrow.kinds import ANYTHING, DOCUMENT, INSTANT, STRING, Kind, list_of

_KINDS: dict[str, Kind] = {
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

# A name, a modifier in brackets anywhere before "with time zone", and the brackets of an array.
_type_parts = re.compile(
    r'([^()"\[\]]+?)(?:\(([\d,-]+)\))?( with(?:out)? time zone)?(\[\])?'
).fullmatch


def kind(type_text: str) -> Kind:
    """How a column of this type travels."""
    parts = _type_parts(type_text)
    if parts is None:
        return list_of(ANYTHING) if type_text.endswith("[]") else ANYTHING
    name, modifier, zone, array = parts.groups()
    kind = _decimal(modifier) if name == "numeric" else _KINDS.get(name + (zone or ""), ANYTHING)
    return list_of(kind) if array else kind


def _decimal(modifier: str | None) -> Kind:
    """Room for every value of numeric(p,s), or text where Arrow has none."""
    precision, scale = (int(n) for n in f"{modifier or 0},0".split(",")[:2])
    if 1 <= precision <= 38 and 0 <= scale <= precision:
        return Kind(pa.decimal128(precision, scale), str, read.parsed)
    return STRING
