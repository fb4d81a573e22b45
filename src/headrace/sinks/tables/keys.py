"""Rows by their keys: which bucket a key falls into, and where a key stands among others.

Both work on whole Arrow columns, and both on values rather than on their text: a row that is
stored and a change that has just come must agree.
"""

import zlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


def hashes(columns: Sequence[pa.Array], rows: int) -> Hashes:
    """A number for each row's key, the same on every machine and for ever."""
    combined = np.zeros(rows, dtype=np.uint64)
    for column in columns:
        combined = _mixed(combined ^ _bits(_whole(column)))
    return combined


def buckets(columns: Sequence[pa.Array], rows: int, level: int) -> Numbers:
    """The bucket of each row's key, of 2 ** level."""
    numbers = hashes(columns, rows) & np.uint64((1 << level) - 1)
    return numbers.astype(np.int64)


def positions(columns: Sequence[pa.Array], among: Sequence[pa.Array]) -> Numbers:
    """Where each row's key stands in `among`, whose keys differ; -1: nowhere."""
    found, known = _whole(columns[0]), _whole(among[0])
    for column, others in zip(columns[1:], among[1:], strict=True):
        found, known = _paired(found, known, _whole(column), _whole(others))
    where = pc.index_in(found, value_set=known)
    return cast("Numbers", pc.fill_null(where, -1).to_numpy(zero_copy_only=False).astype(np.int64))


def _paired(
    left: pa.Array, left_known: pa.Array, right: pa.Array, right_known: pa.Array
) -> tuple[pa.Array, pa.Array]:
    """Two columns as one of numbers that differ exactly where a pair of values does."""
    lefts, rights = pc.unique(left_known), pc.unique(right_known)
    width = len(rights)

    def numbered(one: pa.Array, other: pa.Array) -> pa.Array:
        first = pc.cast(pc.index_in(one, value_set=lefts), pa.int64())
        second = pc.cast(pc.index_in(other, value_set=rights), pa.int64())
        # A value that `among` does not have makes the pair -1, which no known pair is.
        return pc.fill_null(pc.add(pc.multiply(first, width), second), -1)

    return numbered(left, right), numbered(left_known, right_known)


def _bits(column: pa.Array) -> Hashes:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_timestamp(kind):
        whole = pc.cast(column, pa.int64())
    elif pa.types.is_date32(kind):
        whole = pc.cast(pc.cast(column, pa.int32()), pa.int64())
    else:
        return _text_bits(column)
    numbers = pc.fill_null(whole, -1).to_numpy(zero_copy_only=False)
    return cast("Hashes", numbers.astype(np.int64).view(np.uint64))


def _text_bits(column: pa.Array) -> Hashes:
    if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
        column = pc.cast(column, pa.string())
    values = pc.cast(column, pa.binary()).to_pylist()
    checksum = zlib.crc32
    sums = [0 if value is None else checksum(value) for value in values]
    return np.array(sums, dtype=np.uint64)


def _mixed(numbers: Hashes) -> Hashes:
    """Neighbouring numbers spread over all 64 bits (the finalizer of splitmix64)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("Hashes", numbers ^ (numbers >> np.uint64(31)))


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array; Arrow combines chunks only on request."""
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    return column
