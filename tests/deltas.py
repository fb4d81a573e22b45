"""What a Delta table holds, as delta-rs reads it, rows marked as dead left out."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable


def stored(table: DeltaTable | Path | str, columns: Sequence[str] | None = None) -> pa.Table:
    """The live rows of a table, with the types that its schema says."""
    delta = table if isinstance(table, DeltaTable) else DeltaTable(str(table))
    rows = pa.table(delta.scan(columns=list(columns) if columns else None))
    schema = pa.schema(delta.schema().to_arrow())
    return rows.cast(pa.schema([schema.field(name) for name in rows.column_names]))
