"""Changes as columns: the schema that Spark and Arrow see, and records turned into it.

Every row explains itself: `row_schema` holds the columns of its table as they were then, `epoch`
the log it comes from, so that a DataFrame of changes can be filtered, stored and read elsewhere.
"""

import pyarrow as pa

_TIMESTAMP = pa.timestamp("us", tz="UTC")

FIELDS: dict[str, pa.DataType] = {
    "sequence": pa.int64(),
    "id": pa.string(),
    "op": pa.string(),  # INSERT, UPDATE, DELETE, READ, TRUNCATE, SCHEMA, MESSAGE
    "source": pa.string(),
    "connector": pa.string(),
    "database": pa.string(),
    "schema": pa.string(),
    "table": pa.string(),
    "key": pa.string(),  # JSON, as are before, after, position, row_schema and metadata
    "before": pa.string(),
    "before_kind": pa.string(),
    "after": pa.string(),
    "changed": pa.list_(pa.string()),
    "unchanged": pa.list_(pa.string()),  # never null
    "transaction": pa.struct(
        [
            pa.field("id", pa.string()),
            pa.field("ordinal", pa.int64()),
            pa.field("last", pa.bool_()),
            pa.field("commit_time", _TIMESTAMP),
        ]
    ),
    "position": pa.string(),
    "captured_at": _TIMESTAMP,
    "schema_version": pa.int32(),
    "row_schema": pa.string(),  # [{"name":"id","type":"bigint","key":true},…]; null: no table
    "metadata": pa.string(),
    "epoch": pa.string(),
}
"""The columns of a change, in order; all may be null but sequence, op, unchanged and epoch."""


def schema(fields: list[str] | None = None) -> pa.Schema:
    """The Arrow schema of changes; `fields` leaves out what nobody will look at."""
    return pa.schema([(name, FIELDS[name]) for name in fields or FIELDS])
