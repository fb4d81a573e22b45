"""The proof for Delta tables: each holds its table's rows, and every column has the right type.

The files are read by delta-rs, and the types worked out here from what the database declares, so
that this shares no line of code with the pipeline it judges.
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
from .database import Database
from .proof import Verdict, compare, json_value

OWN_COLUMNS = ("_sequence",)  # Headrace's, beside the table's


def prove_delta(database: Database, lake: Path, names: Iterable[TableName]) -> list[Verdict]:
    """Compare every table of the database with its Delta table, rows and types."""
    return [_verdict(database, lake, name) for name in names]


def _verdict(database: Database, lake: Path, name: TableName) -> Verdict:
    declared = database.declared(name.name)
    stored = stored_table(lake / name.schema / name.name)
    wanted = {column: database.arrow(kind) for column, kind in declared.items()}
    found = dict(zip(stored.schema.names, stored.schema.types, strict=True))
    documents = [column for column, kind in declared.items() if database.is_document(kind)]
    held = [_as_json(row, documents) for row in database.rows(name.name)]
    verdict = compare(name, held, rows_in_delta(stored, documents))
    names = sorted(wanted.keys() | found.keys())
    mistyped = [column for column in names if wanted.get(column) != found.get(column)]
    return verdict._replace(mistyped=tuple(mistyped))


def _as_json(row: Row, documents: Sequence[str]) -> Row:
    return {n: value if n in documents else json_value(value) for n, value in row.items()}


def stored_table(folder: Path) -> pa.Table:
    """What a Delta table holds, without Headrace's own columns; nothing where there is none."""
    try:
        table = DeltaTable(folder).to_pyarrow_table()
    except TableNotFoundError:
        return pa.table({})
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
        stored = DeltaTable(folder).to_pyarrow_table(columns=["sequence"])
    except TableNotFoundError:
        return not sequences
    return sorted(stored["sequence"].to_pylist()) == list(sequences)
