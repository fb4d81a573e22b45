"""The proof for Delta tables: each holds its table's rows, and every column has the right type.

The files are read by delta-rs, and the types worked out here from what the database declares, so
that this shares no line of code with the pipeline it judges.
"""

import json
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from ..replay import Row, TableName
from .proof import Verdict, compare, json_value, rows_in_database

OWN_COLUMNS = ("_sequence",)  # Headrace's, beside the table's

_TYPES = {
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "boolean": pa.bool_(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "timestamp without time zone": pa.timestamp("us"),
    "timestamp with time zone": pa.timestamp("us", tz="UTC"),
}
_DOCUMENTS = ("json", "jsonb")
_numeric = re.compile(r"numeric\((\d+),(\d+)\)").fullmatch

_COLUMNS = """
SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = format('%%I.%%I', %s::text, %s::text)::regclass
  AND attnum > 0 AND NOT attisdropped
"""


def prove_delta(url: str, lake: Path, names: Iterable[TableName]) -> list[Verdict]:
    """Compare every table of the database with its Delta table, rows and types."""
    return [_verdict(url, lake, name) for name in names]


def _verdict(url: str, lake: Path, name: TableName) -> Verdict:
    declared = declared_types(url, name)
    stored = stored_table(lake / name.schema / name.name)
    wanted = {column: expected_type(kind) for column, kind in declared.items()}
    found = dict(zip(stored.schema.names, stored.schema.types, strict=True))
    documents = [column for column, kind in declared.items() if kind in _DOCUMENTS]
    verdict = compare(name, rows_in_database(url, name), rows_in_delta(stored, documents))
    names = sorted(wanted.keys() | found.keys())
    mistyped = [column for column in names if wanted.get(column) != found.get(column)]
    return verdict._replace(mistyped=tuple(mistyped))


def declared_types(url: str, name: TableName) -> dict[str, str]:
    """A table's columns as the database declares them."""
    with psycopg.connect(url, autocommit=True) as connection:
        return dict(connection.execute(_COLUMNS, (name.schema, name.name)).fetchall())


def expected_type(declared: str) -> pa.DataType:
    """The type that a column of the Delta table should have."""
    if declared.endswith("[]"):
        return pa.list_(expected_type(declared.removesuffix("[]")))
    if found := _numeric(declared):
        return pa.decimal128(int(found[1]), int(found[2]))
    return _TYPES.get(declared, pa.string())


def stored_table(folder: Path) -> pa.Table:
    """What a Delta table holds, without Headrace's own columns; nothing where there is none."""
    try:
        table = DeltaTable(folder).to_pyarrow_table()
    except TableNotFoundError:
        return pa.table({})
    return table.drop_columns([name for name in OWN_COLUMNS if name in table.column_names])


def rows_in_delta(stored: pa.Table, documents: Sequence[str]) -> list[Row]:
    """The rows as JSON values; `documents` are columns that hold JSON as text."""

    def value(column: str, given: Any) -> Any:
        if column in documents and given is not None:
            return json.loads(given, parse_float=Decimal)
        return json_value(given)

    return [{name: value(name, row[name]) for name in row} for row in stored.to_pylist()]


def has_each_once(folder: Path, sequences: Sequence[int]) -> bool:
    """Whether a history holds exactly the changes of these sequences, each once."""
    try:
        stored = DeltaTable(folder).to_pyarrow_table(columns=["sequence"])
    except TableNotFoundError:
        return not sequences
    return sorted(stored["sequence"].to_pylist()) == list(sequences)
