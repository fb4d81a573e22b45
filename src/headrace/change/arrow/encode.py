"""Arrow columns as images, written as PostgreSQL's rows are: what `decode` reads again.

For rows that no source has written: those that Spark has computed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa

from ...errors import DecodeError
from ..event import Column

CONNECTOR = "postgres"
"""Whose types `declared` names."""

_TYPES = {
    "boolean": "boolean",
    "tinyint": "smallint",
    "smallint": "smallint",
    "int": "integer",
    "bigint": "bigint",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp without time zone",
}
_text = msgspec.json.Encoder().encode


def declared(types: Mapping[str, str], key: Sequence[str]) -> tuple[Column, ...]:
    """Columns whose types Spark names, in PostgreSQL's words.

    >>> declared({"id": "bigint", "tags": "array<string>"}, ["id"])[1].type
    'text[]'
    """
    return tuple(Column(name, _type_text(name, each), name in key) for name, each in types.items())


def _type_text(name: str, spark: str) -> str:
    if spark.startswith("decimal("):
        return spark.replace("decimal", "numeric")
    if spark.startswith("array<") and not spark.startswith("array<array<"):
        return f"{_type_text(name, spark[len('array<') : -1])}[]"
    if (plain := spark.partition(" collate ")[0]) in _TYPES:
        return _TYPES[plain]
    nested = spark.startswith(("array<", "map<", "struct<", "variant"))
    text = f"to_json({name})" if nested else f"CAST({name} AS STRING)"
    raise DecodeError(
        f"column {name!r} is {spark}, which has no place in an image",
        hint=f"Make text of it: {text} AS {name}.",
    )


def images(rows: pa.Table | pa.RecordBatch) -> list[bytes]:
    """The image of each row, which has every column."""
    names = rows.schema.names
    columns = [_values(column, rows.schema.field(at)) for at, column in enumerate(rows.columns)]
    if not columns:
        return [b"{}"] * rows.num_rows
    return [_text(dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]


def _values(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> Iterable[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        # A date of a year that Python has none of; the message would show it.
        raise DecodeError(
            f"column {field.name!r} has a value outside the years 1 to 9999"
        ) from None
    convert = _conversion(field.type)
    return (
        values if convert is None else [None if each is None else convert(each) for each in values]
    )


def _conversion(arrow: pa.DataType) -> Callable[[Any], Any] | None:
    """What a value of Python needs before it is written; None: nothing."""
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        inner = _conversion(arrow.value_type)
        if inner is None:
            return None
        return lambda values: [None if each is None else inner(each) for each in values]
    if pa.types.is_floating(arrow):
        return _float
    if pa.types.is_timestamp(arrow):
        return _instant
    return None


def _float(value: float) -> float | str:
    """JSON has no number for these."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _instant(value: datetime) -> datetime:
    """Written with a Z: also the time of a clock on a wall."""
    return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
