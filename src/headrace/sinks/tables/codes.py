"""Hashes by which the rows of two tables are compared: of whole Arrow columns at a time."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .keys import Hashes, Numbers, combined, key_codes, mixed, text_hashes

_NULL = np.uint64(0x6E756C6C)


def part_of(keys: Numbers, parts: int) -> Numbers:
    """Which part of the keys each belongs to: any key to one, about as many to each."""
    return ((keys.view(np.uint64) >> np.uint64(32)) % np.uint64(parts)).astype(np.int64)


def row_codes(rows: pa.Table, key: Sequence[str]) -> tuple[tuple[Numbers, Numbers], Numbers]:
    """Two hashes of each key, and one of the row; without a key, the row is its own."""
    values = value_codes(rows)
    row = np.zeros(rows.num_rows, dtype=np.uint64)
    for code in values.values():
        row = mixed(row ^ code)
    if key:
        codes = key_codes([rows[name] for name in key], exact=False)
        assert codes.check is not None
        return (codes.codes, codes.check), row.view(np.int64)
    another = np.zeros(rows.num_rows, dtype=np.uint64)
    for code in reversed(values.values()):
        another = mixed(another + code)
    zero = np.zeros(rows.num_rows, dtype=np.int64)
    return (row.view(np.int64), another.view(np.int64)), zero


def value_codes(rows: pa.Table) -> dict[str, Hashes]:
    """A hash of each value of each column; that of null is the same for all types."""
    return {name: _value_codes(combined(rows[name])) for name in rows.column_names}


def _value_codes(column: pa.Array) -> Hashes:
    words = _words(column)
    if words is None:
        found = text_hashes(column, 0)
    else:
        found = np.zeros(len(column), dtype=np.uint64)
        for word in words:
            found = mixed(found ^ word)
    if column.null_count:
        found = np.where(column.is_null().to_numpy(zero_copy_only=False), _NULL, found)
    return found


def _words(column: pa.Array) -> list[Hashes] | None:
    """The bytes of values that all have the same size; None: they have not."""
    kind, count = column.type, len(column)
    if pa.types.is_boolean(kind):
        numbers = pc.fill_null(column.cast(pa.int8()), 0).to_numpy(zero_copy_only=False)
        return [numbers.astype(np.uint64)]
    if pa.types.is_decimal128(kind):
        size = 16
    elif pa.types.is_primitive(kind) and kind.bit_width >= 8:
        size = kind.bit_width // 8
    else:
        return None
    data = column.buffers()[1]
    if data is None or not count:
        return [np.zeros(count, dtype=np.uint64)]
    width = min(size, 8)
    raw = np.frombuffer(data, dtype=f"<u{width}", count=(column.offset + count) * size // width)
    words = raw[column.offset * size // width :].reshape(count, size // width).astype(np.uint64)
    return [words[:, at] for at in range(size // width)]
