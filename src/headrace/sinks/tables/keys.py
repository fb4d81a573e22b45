"""Keys as numbers, by which they are compared and sorted: whole Arrow columns at a time.

A key of one column whose values are whole numbers is that number. Any other is two hashes of 64
bits each: two keys that share both do not occur.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

_NULL = -(2**63)  # below any other key of a whole number
# Two hash functions of one kind; they are kept in files, so they never change.
_SALTS = ("headrace.first_.", "headrace.second.")
_NULLS = (np.uint64(0x6E756C6C31), np.uint64(0x6E756C6C32))


@dataclass(frozen=True, slots=True)
class KeyCodes:
    """A number for each key; where two keys may share it, `check` is another one."""

    codes: Numbers
    check: Numbers | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, chosen: Numbers) -> "KeyCodes":
        """Some of them."""
        check = None if self.check is None else self.check[chosen]
        return KeyCodes(self.codes[chosen], check)


def is_exact(types: Sequence[pa.DataType]) -> bool:
    """Whether keys of these types are numbers themselves."""
    return len(types) == 1 and (
        pa.types.is_integer(types[0])
        or pa.types.is_timestamp(types[0])
        or pa.types.is_date32(types[0])
    )


def key_codes(columns: Sequence[pa.Array | pa.ChunkedArray], *, exact: bool) -> KeyCodes:
    """The numbers of keys."""
    if exact:
        return KeyCodes(_whole(combined(columns[0]), null=_NULL))
    lanes = []
    for lane in range(len(_SALTS)):
        code = np.zeros(len(columns[0]), dtype=np.uint64)
        for column in columns:
            code = mixed(code ^ _hashes(combined(column), lane))
        lanes.append(code.view(np.int64))
    return KeyCodes(*lanes)


def row_numbers(rows: BitMap) -> Numbers:
    """The rows that a bitmap has."""
    return np.frombuffer(rows.to_array(), dtype=np.uint32).astype(np.int64)


def bitmap(rows: Numbers) -> BitMap:
    """A bitmap of rows."""
    return BitMap(array("I", rows.astype(np.uint32).tobytes()))


def united(dead: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Serialized bitmaps of rows, those of each file together."""
    found: dict[str, BitMap] = {}
    for each in dead:
        for path, rows in each.items():
            found[path] = found.get(path, BitMap()) | BitMap.deserialize(rows)
    return {path: rows.serialize() for path, rows in found.items()}


def combined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array; Arrow combines chunks only on request."""
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    return column


def _hashes(column: pa.Array, lane: int) -> Hashes:
    if is_exact([column.type]) or pa.types.is_boolean(column.type):
        found = mixed(_whole(column).view(np.uint64) + np.uint64(lane))
    else:
        found = text_hashes(column, lane)
    if column.null_count:
        found = np.where(column.is_null().to_numpy(zero_copy_only=False), _NULLS[lane], found)
    return found


def text_hashes(column: pa.Array, lane: int) -> Hashes:
    """Hashes of values that have no number of their own."""
    # Not at the top: it takes long to import, and most keys are whole numbers.
    from pandas.util import hash_array  # noqa: PLC0415

    kind = column.type
    if pa.types.is_nested(kind):
        texts = [None if value is None else repr(value) for value in column.to_pylist()]
        column = pa.array(texts, pa.string())
    elif not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        column = pc.cast(column, pa.string())
    values = column.to_numpy(zero_copy_only=False)
    return cast("Hashes", hash_array(values, hash_key=_SALTS[lane], categorize=False))


def _whole(column: pa.Array, null: int = 0) -> Numbers:
    """The numbers of a column."""
    if pa.types.is_date32(column.type):
        column = pc.cast(column, pa.int32())
    numbers = pc.fill_null(pc.cast(column, pa.int64()), null)
    return cast("Numbers", numbers.to_numpy(zero_copy_only=False))


def mixed(numbers: Hashes) -> Hashes:
    """Neighbouring numbers spread over all 64 bits (the finalizer of splitmix64)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("Hashes", numbers ^ (numbers >> np.uint64(31)))
