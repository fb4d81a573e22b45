"""Blocks of rows to Arrow tables, a whole column at a time.

A column becomes what `decode` makes of the same rows' images. Where the printed text itself is
what Arrow reads, no JSON is made of it; everything else goes through `decode`.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..block import BlockRows, ColumnText
from ..event import Column
from ..printed import Printed
from . import kinds
from ._images import decode
from ._rescue import RESCUED
from ._types import arrow_schema, kind_of

_NULL = "\\N"
_TAB = 9


def block_table(
    rows: BlockRows,
    columns: Sequence[Column],
    *,
    connector: str,
    as_text: frozenset[str] = frozenset(),
    rescue: bool = False,
) -> pa.Table:
    """What `decode` returns for the images of these rows."""
    rescue = rescue and all(column.name != RESCUED for column in columns)
    typed: dict[str, pa.Array] = {}
    for column in columns:
        text = rows.block.column(column.name)
        kind = kind_of(column, as_text, connector)
        array = None if text is None else _typed(text, rows.block.count, kind)
        if array is not None:
            typed[column.name] = array.slice(rows.begin, rows.count)
    if rest := [column for column in columns if column.name not in typed]:
        images = rows.block.images([c.name for c in rest], rows.begin, rows.begin + rows.count)
        decoded = decode(images, rest, connector=connector, as_text=as_text, rescue=rescue)
        decoded = decoded.combine_chunks()
        typed |= {column.name: decoded[column.name] for column in rest}
    schema = arrow_schema(columns, connector=connector, as_text=as_text)
    found = pa.table([typed[column.name] for column in columns], schema=schema)
    if rest and decoded.num_columns > len(rest):
        return found.append_column(RESCUED, decoded[RESCUED])
    return found


def _typed(column: ColumnText, count: int, kind: kinds.Kind) -> pa.Array | None:
    """A column by its printed text; None: `decode` must say what it is, or what is wrong."""
    printed, text = column
    try:
        match printed, kind.column:
            case ((Printed.TEXT | Printed.QUOTED), _) if (
                kind.image is str or kind is kinds.ANYTHING
            ):
                found = _strings(text, count)
                return found if kind.arrow == kinds.TEXT else kind.column(found, kind.arrow)
            case Printed.PLAIN, kinds.documents:
                found = _strings(text, count)
                return pc.if_else(pc.equal(found, "null"), pa.scalar(None, kinds.TEXT), found)
            case Printed.PLAIN, kinds.plain if pa.types.is_integer(kind.arrow):
                return _strings(text, count).cast(kind.arrow)
            case ((Printed.PLAIN | Printed.FLOAT), kinds.floats):
                return _strings(text, count).cast(kind.arrow)
            case Printed.BOOLEAN, kinds.plain if pa.types.is_boolean(kind.arrow):
                return _booleans(text, count)
            case Printed.TIMESTAMP, kinds.wall_clock:
                return _strings(text, count).cast(kind.arrow)
            case Printed.TIMESTAMP, _ if kind.image is str and kind.arrow == kinds.INSTANT:
                return _strings(text, count).cast(pa.timestamp("us")).cast(kind.arrow)
            case Printed.TIMESTAMPTZ, kinds.parsed if kind.arrow == kinds.INSTANT:
                return _strings(text, count).cast(kind.arrow)
    except pa.ArrowException:
        pass  # such as infinity
    return None


def _strings(text: bytes, count: int) -> pa.StringArray:
    """The printed values, null where they are."""
    data = np.frombuffer(text, np.uint8)
    offsets = np.empty(count + 1, np.int32)
    offsets[0], offsets[-1] = 0, len(text) - (count - 1)
    # Each tab before the end of a value is left out below.
    offsets[1:-1] = np.flatnonzero(data == _TAB) - np.arange(count - 1)
    values = pa.py_buffer(text.replace(b"\t", b""))
    found = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), values)
    if b"\\" in text:
        return pc.if_else(pc.equal(found, _NULL), pa.scalar(None, kinds.TEXT), found)
    return found


def _booleans(text: bytes, count: int) -> pa.Array:
    if b"\\" in text:
        return pc.equal(_strings(text, count), "t")
    return pa.array(np.frombuffer(text, np.uint8)[::2] == ord("t"))
