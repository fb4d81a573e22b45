"""A table's columns in Arrow: the source's types as Arrow types, JSON images as Arrow columns.

Each source says what its types are in Arrow, in the words of `kinds`.

This runs for every changed row: images are read by a decoder made for their columns, and what is
left to do is done by Arrow for whole columns. A document `null` and no document are both null,
since the image does not tell them apart.
"""

from ._images import decode
from ._rescue import RESCUED, keyless, rescued_of, rescued_text, rescued_under
from ._schema import columns_of, references_of, row_schema
from ._types import arrow_schema, arrow_type, widened
from .blocks import block_table

__all__ = [
    "RESCUED",
    "arrow_schema",
    "arrow_type",
    "block_table",
    "columns_of",
    "decode",
    "keyless",
    "references_of",
    "rescued_of",
    "rescued_text",
    "rescued_under",
    "row_schema",
    "widened",
]
