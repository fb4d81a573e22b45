"""TABLE_MAP: which columns the rows of a table have in the binlog.

What is wrong with the bytes raises ValueError, IndexError or struct.error; `binlog` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec

from .columns import MappedColumn
from .typecodes import (
    BIT,
    BLOB,
    BLOB_COMPRESSED,
    DATETIME2,
    DOUBLE,
    ENUM,
    FLOAT,
    GEOMETRY,
    INT24,
    JSON,
    LONG,
    LONG_BLOB,
    LONGLONG,
    MEDIUM_BLOB,
    NEWDECIMAL,
    SET,
    SHORT,
    STRING,
    TIME2,
    TIMESTAMP2,
    TINY,
    TINY_BLOB,
    TYPED_ARRAY,
    VAR_STRING,
    VARCHAR,
    VARCHAR_COMPRESSED,
    VECTOR,
    YEAR,
)  # fmt: skip

_META_SIZES = {
    **dict.fromkeys(
        (FLOAT, DOUBLE, TINY_BLOB, MEDIUM_BLOB, LONG_BLOB, BLOB, GEOMETRY, JSON, VECTOR,
         TIMESTAMP2, DATETIME2, TIME2, BLOB_COMPRESSED),
        1,
    ),
    **dict.fromkeys(
        (VARCHAR, VAR_STRING, STRING, BIT, NEWDECIMAL, ENUM, SET, VARCHAR_COMPRESSED), 2
    ),
}  # fmt: skip
_NUMBERS = frozenset((TINY, SHORT, INT24, LONG, LONGLONG, NEWDECIMAL, FLOAT, DOUBLE, YEAR))
_TEXTS = frozenset(
    (VARCHAR, VAR_STRING, STRING, TINY_BLOB, MEDIUM_BLOB, LONG_BLOB, BLOB, BLOB_COMPRESSED,
     VARCHAR_COMPRESSED)
)  # fmt: skip
_MARIADB_TEXTS = _TEXTS | {GEOMETRY}  # has a collation of geometries as well
_CHOICES = frozenset((ENUM, SET))

MOST_COLUMNS = 4096  # more than either server allows


def integer(data: bytes, at: int) -> tuple[int, int]:
    """A length-encoded integer, and where it ends."""
    first = data[at]
    if first < 251:
        return first, at + 1
    size = {252: 2, 253: 3, 254: 8}[first]
    end = at + 1 + size
    if end > len(data):
        raise ValueError("a number is cut short")
    return int.from_bytes(data[at + 1 : end], "little"), end


def part(data: bytes, at: int, size: int) -> bytes:
    """So many bytes, all of them there."""
    found = data[at : at + size]
    if len(found) != size:
        raise ValueError(f"{size} bytes announced, {len(found)} there")
    return found


def bits(data: bytes, count: int) -> Iterator[bool]:
    """The bits of a row's bitmap: the lowest of each byte comes first."""
    return (bool(data[at >> 3] >> (at & 7) & 1) for at in range(count))


@lru_cache(maxsize=1024)  # the same one stands before every statement's rows
def table_map(data: bytes, *, mariadb: bool) -> tuple[str, str, tuple[MappedColumn, ...]]:
    """Database, table and columns, from what follows the table's number and flags."""
    database, at = _name(data, 0)
    table, at = _name(data, at)
    count, at = integer(data, at)
    if count > MOST_COLUMNS:
        raise ValueError(f"a table of {count} columns")
    codes = part(data, at, count)
    size, at = integer(data, at + count)
    metas = _metas(codes, part(data, at, size))
    at += size
    nullable = bits(part(data, at, (count + 7) // 8), count)
    columns = [
        MappedColumn(code, meta, null) for (code, meta), null in zip(metas, nullable, strict=True)
    ]
    fields = _MARIADB_FIELDS if mariadb else _FIELDS
    return database, table, tuple(_with_fields(columns, data[at + (count + 7) // 8 :], fields))


def without_doubtful_signs(columns: tuple[MappedColumn, ...]) -> tuple[MappedColumn, ...]:
    """The same without signs where a YEAR may have shifted them: the catalogue knows them."""
    if all(column.code != YEAR for column in columns):
        return columns
    return tuple(msgspec.structs.replace(column, unsigned=None) for column in columns)


def _name(data: bytes, at: int) -> tuple[str, int]:
    size, at = integer(data, at)
    return part(data, at, size).decode(), at + size + 1  # a zero byte follows


def _metas(codes: bytes, data: bytes) -> list[tuple[int, int]]:
    """The types with what describes each further; STRING may stand for ENUM and SET."""
    found: list[tuple[int, int]] = []
    at = 0
    for code in codes:
        if code == TYPED_ARRAY:
            # The element's type, and of that what the type itself would have.
            at += 1 + _META_SIZES.get(data[at], 0)
            found.append((code, 0))
            continue
        size = _META_SIZES.get(code, 0)
        raw = part(data, at, size)
        at += size
        if code == STRING:
            found.append(_string(raw))
        else:
            found.append((code, int.from_bytes(raw, "little")))
    if at != len(data):
        raise ValueError("bytes after the last column's metadata")
    return found


def _string(raw: bytes) -> tuple[int, int]:
    # Lengths over 255 have their two high bits in the type, upside down.
    real, length = raw
    if real & 0x30 != 0x30:
        return real | 0x30, length | ((real & 0x30) ^ 0x30) << 4
    return real, length


# --- what binlog_row_metadata adds ---------------------------------------------------------------


_Fields = list[MappedColumn]
_FieldReader = Callable[[_Fields, bytes], _Fields]


def _with_fields(columns: _Fields, data: bytes, fields: Mapping[int, _FieldReader]) -> _Fields:
    """The columns with everything that the server sends beside the layout."""
    at = 0
    while at < len(data):
        kind = data[at]
        size, at = integer(data, at + 1)
        value = part(data, at, size)
        at += size
        read = fields.get(kind)
        if read is not None:  # others are of servers to come, and do not change the layout
            columns = read(columns, value)
    return columns


def _chosen(columns: _Fields, codes: frozenset[int]) -> list[int]:
    return [at for at, column in enumerate(columns) if column.code in codes]


def _set(columns: _Fields, name: str, values: Sequence[tuple[int, object]]) -> _Fields:
    changed = list(columns)
    for at, value in values:
        changed[at] = msgspec.structs.replace(changed[at], **{name: value})
    return changed


def _integers(value: bytes) -> list[int]:
    found, at = [], 0
    while at < len(value):
        number, at = integer(value, at)
        found.append(number)
    return found


def _pairs(value: bytes) -> list[tuple[int, int]]:
    numbers = _integers(value)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _high_bits(value: bytes, count: int) -> list[bool]:
    """Bits of which the highest of each byte comes first."""
    return [bool(value[at >> 3] & 0x80 >> (at & 7)) for at in range(count)]


def _unsigned(columns: _Fields, value: bytes) -> _Fields:
    numbers = _chosen(columns, _NUMBERS)
    if len(numbers) > 8 * len(value):  # an older server, which leaves them out
        numbers = _chosen(columns, _NUMBERS - {YEAR})
    flags = _high_bits(value, len(numbers))
    return _set(columns, "unsigned", list(zip(numbers, flags, strict=True)))


def _default_collations(codes: frozenset[int]) -> _FieldReader:
    def read(columns: _Fields, value: bytes) -> _Fields:
        default, at = integer(value, 0)
        texts = _chosen(columns, codes)
        collations = dict.fromkeys(range(len(texts)), default) | dict(_pairs(value[at:]))
        return _set(columns, "collation", [(texts[at], each) for at, each in collations.items()])

    return read


def _collations(codes: frozenset[int]) -> _FieldReader:
    def read(columns: _Fields, value: bytes) -> _Fields:
        every = zip(_chosen(columns, codes), _integers(value), strict=True)
        return _set(columns, "collation", list(every))

    return read


def _names(columns: _Fields, value: bytes) -> _Fields:
    names = [name.decode() for name in _strings(value, len(columns))]
    if len(names) != len(columns):
        raise ValueError("another number of names than of columns")
    return _set(columns, "name", list(enumerate(names)))


def _strings(value: bytes, count: int) -> list[bytes]:
    found, at = [], 0
    for _ in range(count):
        size, at = integer(value, at)
        found.append(part(value, at, size))
        at += size
    if at != len(value):
        raise ValueError("bytes after the last name")
    return found


def _labels(code: int) -> _FieldReader:
    def read(columns: _Fields, value: bytes) -> _Fields:
        at, found = 0, list[tuple[int, object]]()
        for column in _chosen(columns, frozenset((code,))):
            count, at = integer(value, at)
            labels = []
            for _ in range(min(count, len(value))):
                size, at = integer(value, at)
                labels.append(part(value, at, size))
                at += size
            found.append((column, tuple(labels)))
        return _set(columns, "labels", found)

    return read


def _geometries(columns: _Fields, value: bytes) -> _Fields:
    every = zip(_chosen(columns, frozenset((GEOMETRY,))), _integers(value), strict=True)
    return _set(columns, "geometry", list(every))


def _vectors(columns: _Fields, value: bytes) -> _Fields:
    every = zip(_chosen(columns, frozenset((VECTOR,))), _integers(value), strict=True)
    return _set(columns, "dimensions", list(every))


def _key(columns: _Fields, value: bytes) -> _Fields:
    return _set(columns, "key", [(at, place) for place, at in enumerate(_integers(value))])


def _prefix_key(columns: _Fields, value: bytes) -> _Fields:
    return _set(columns, "key", [(at, place) for place, (at, _) in enumerate(_pairs(value))])


def _visible(columns: _Fields, value: bytes) -> _Fields:
    return _set(columns, "visible", list(enumerate(_high_bits(value, len(columns)))))


_FIELDS: dict[int, _FieldReader] = {
    1: _unsigned,
    2: _default_collations(_TEXTS),
    3: _collations(_TEXTS),
    4: _names,
    5: _labels(SET),
    6: _labels(ENUM),
    7: _geometries,
    8: _key,
    9: _prefix_key,
    10: _default_collations(_CHOICES),
    11: _collations(_CHOICES),
    12: _visible,
    13: _vectors,
}
_MARIADB_FIELDS = _FIELDS | {
    2: _default_collations(_MARIADB_TEXTS),
    3: _collations(_MARIADB_TEXTS),
}
