"""Rows of files that were written with earlier columns, as the table has them now."""

from collections.abc import Sequence

import pyarrow as pa

Partition = Sequence[tuple[str, str | None]]


def conformed(rows: pa.Table, schema: pa.Schema, partition: Partition = ()) -> pa.Table:
    """Rows with the columns of another version: missing ones null, widened ones cast.

    The values of a partition are not in its files.
    """
    if rows.schema.equals(schema):
        return rows
    shared = dict(partition)
    columns = []
    for each in schema:
        if each.name in rows.column_names:
            columns.append(rows[each.name].cast(each.type))
        elif each.name in shared:
            value = pa.scalar(shared[each.name], pa.string()).cast(each.type)
            columns.append(pa.repeat(value, rows.num_rows))
        else:
            columns.append(pa.nulls(rows.num_rows, each.type))
    return pa.table(columns, schema=schema)
