"""A column's type as text, from what a table map tells of it. No I/O."""

from __future__ import annotations

from . import codes as t
from .columns import GEOMETRIES, MappedColumn

_PLAIN = {
    t.TINY: "tinyint", t.SHORT: "smallint", t.INT24: "mediumint", t.LONG: "int",
    t.LONGLONG: "bigint", t.FLOAT: "float", t.DOUBLE: "double", t.YEAR: "year", t.JSON: "json",
    t.DATE: "date", t.NEWDATE: "date", t.TIME: "time", t.DATETIME: "datetime",
    t.TIMESTAMP: "timestamp",
}  # fmt: skip
_FRACTIONS = {t.TIMESTAMP2: "timestamp", t.DATETIME2: "datetime", t.TIME2: "time"}
_BLOBS = {1: "tiny", 2: "", 3: "medium", 4: "long"}  # by the bytes of their length
_BINARY = 63  # the collation of bytes


def type_text(column: MappedColumn) -> str:
    """As far as a table map tells what information_schema would show."""
    return _base(column) + (" unsigned" if column.unsigned else "")


def _base(column: MappedColumn) -> str:
    code, meta = column.code, column.meta
    if code in _PLAIN:
        return _PLAIN[code]
    if code in _FRACTIONS:
        return f"{_FRACTIONS[code]}({meta})" if meta else _FRACTIONS[code]
    if code == t.NEWDECIMAL:
        return f"decimal({meta & 0xFF},{meta >> 8})"
    if code == t.BIT:
        return f"bit({(meta >> 8) * 8 + (meta & 0xFF)})"
    if code == t.BLOB:
        return _BLOBS.get(meta, "") + ("blob" if _is_binary(column) else "text")
    if code == t.GEOMETRY:
        number = column.geometry or 0
        return GEOMETRIES[number] if number < len(GEOMETRIES) else "geometry"
    return _text(column)


def _text(column: MappedColumn) -> str:
    if column.labels is not None:
        kind = "set" if t.SET in (column.code, column.meta & 0xFF) else "enum"
        labels = [label.decode(errors="replace").replace("'", "''") for label in column.labels]
        quoted = ",".join(f"'{label}'" for label in labels)
        return f"{kind}({quoted})"
    if column.code in (t.VARCHAR, t.VAR_STRING):
        return "varbinary" if _is_binary(column) else "varchar"
    return "binary" if _is_binary(column) else "char"


def _is_binary(column: MappedColumn) -> bool:
    return column.collation == _BINARY
