"""The demo's comparison with Delta tables: rows, and the type of every column.

The files are read by delta-rs, and the types worked out from what the database declares, so that
this shares no line of code with the pipeline that it checks.
"""

import json
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from ..change.replay import Row, TableName
from .database import ShopDatabase
from .verify import TableComparison, compare_rows, json_value

OWN_COLUMNS = ("_sequence",)  # Headrace's, beside the table's


def compare_delta(
    database: ShopDatabase, lake: Path, names: Iterable[TableName]
) -> list[TableComparison]:
    """Compare every table of the database with its Delta table, rows and types."""
    return [_compare_delta(database, lake, name) for name in names]


def _compare_delta(database: ShopDatabase, lake: Path, name: TableName) -> TableComparison:
    declared = database.declared(name.name)
    stored = stored_table(lake / name.schema / name.name)
    wanted = {column: database.arrow(kind) for column, kind in declared.items()}
    found = {field.name: _printed(field.type) for field in stored.schema}
    documents = [column for column, kind in declared.items() if database.is_document(kind)]
    held = [_as_json(row, documents) for row in database.rows(name.name)]
    comparison = compare_rows(name, held, rows_in_delta(stored, documents))
    names = sorted(wanted.keys() | found.keys())
    mistyped = [column for column in names if wanted.get(column) != found.get(column)]
    return comparison._replace(mistyped=tuple(mistyped))


def _printed(type: pa.DataType) -> str:
    # What an array calls its elements says nothing of its type.
    return str(type).replace("<item: ", "<element: ")


def _as_json(row: Row, documents: Sequence[str]) -> Row:
    return {n: value if n in documents else json_value(value) for n, value in row.items()}


def stored_table(folder: Path) -> pa.Table:
    """What a Delta table holds, without Headrace's own columns; nothing where there is none."""
    try:
        delta = DeltaTable(folder)
    except TableNotFoundError:
        return pa.table({})
    table = pa.table(delta.scan()).cast(pa.schema(delta.schema().to_arrow()))
    return table.drop_columns([name for name in OWN_COLUMNS if name in table.column_names])


def rows_in_delta(stored: pa.Table, documents: Sequence[str]) -> list[Row]:
    """The rows as JSON values; `documents` are columns that hold JSON as text."""

    def parted(row: dict[str, Any]) -> Row:
        texts = {name: row[name] for name in documents if row.get(name) is not None}
        return row | {n: json.loads(text, parse_float=Decimal) for n, text in texts.items()}

    return [_as_json(parted(row), documents) for row in stored.to_pylist()]


def has_each_once(folder: Path, sequences: Sequence[int]) -> bool:
    """Whether a history holds exactly the changes of these sequences, each once."""
    try:
        stored = pa.table(DeltaTable(folder).scan(columns=["sequence"]))
    except TableNotFoundError:
        return not sequences
    return sorted(stored["sequence"].to_pylist()) == list(sequences)
