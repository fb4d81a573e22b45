"""A table's columns in Arrow: the source's types as Arrow types, JSON images as Arrow columns.

    PostgreSQL                        Arrow
    smallint, integer, bigint, oid    int16, int32, int64, int64
    real, double precision            float32, float64
    numeric(p,s), p up to 38          decimal128(p, s)
    boolean, bytea, date              bool, binary, date32
    timestamp, timestamptz            timestamp(us), timestamp(us, UTC)
    one of these, or of the rest []   list, of one dimension
    json, jsonb                       string: the document's own text
    the rest                          string: text, or the JSON of what is not text

`_mysql` has the types of MySQL and MariaDB; of SQLite's columns the declared affinity counts.

This runs for every changed row: images are read by a decoder made for their columns, and what is
left to do is done by Arrow for whole columns. A document `null` and no document are both null,
since the image does not tell them apart.
"""

from ._images import decode
from ._schema import columns_of, references_of, row_schema
from ._types import arrow_schema, arrow_type, widened

__all__ = [
    "arrow_schema",
    "arrow_type",
    "columns_of",
    "decode",
    "references_of",
    "row_schema",
    "widened",
]
