"""A column's type as text, from what a table map tells of it. No I/O."""

from __future__ import annotations

from .columns import MappedColumn

_PLAIN = {
    1: "tinyint", 2: "smallint", 3: "int", 4: "float", 5: "double", 7: "timestamp", 8: "bigint",
    9: "mediumint", 10: "date", 11: "time", 12: "datetime", 13: "year", 14: "date", 245: "json",
}  # fmt: skip
_FRACTIONS = {17: "timestamp", 18: "datetime", 19: "time"}
_GEOMETRIES = (
    "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon",
    "geometrycollection",
)  # fmt: skip
_BLOBS = {1: "tiny", 2: "", 3: "medium", 4: "long"}
_BINARY = 63  # the collation of bytes
_DECIMAL, _BIT, _BLOB, _STRING, _ENUM, _SET, _GEOMETRY = 246, 16, 252, 254, 247, 248, 255
_VARIABLE = (15, 253)


def type_text(column: MappedColumn) -> str:
    """As far as a table map tells what information_schema would show."""
    return _base(column) + (" unsigned" if column.unsigned else "")


def _base(column: MappedColumn) -> str:
    code, meta = column.code, column.meta
    if code in _PLAIN:
        return _PLAIN[code]
    if code in _FRACTIONS:
        return f"{_FRACTIONS[code]}({meta})" if meta else _FRACTIONS[code]
    if code == _DECIMAL:
        return f"decimal({meta & 0xFF},{meta >> 8})"
    if code == _BIT:
        return f"bit({(meta >> 8) * 8 + (meta & 0xFF)})"
    if code == _BLOB:
        return _BLOBS.get(meta, "") + ("blob" if _is_binary(column) else "text")
    if code == _GEOMETRY:
        number = column.geometry or 0
        return _GEOMETRIES[number] if number < len(_GEOMETRIES) else "geometry"
    return _text(column)


def _text(column: MappedColumn) -> str:
    if column.labels is not None:
        kind = "set" if column.code == _SET or column.meta & 0xFF == _SET else "enum"
        labels = [label.decode(errors="replace").replace("'", "''") for label in column.labels]
        quoted = ",".join(f"'{label}'" for label in labels)
        return f"{kind}({quoted})"
    if column.code in _VARIABLE:
        return "varbinary" if _is_binary(column) else "varchar"
    return "binary" if _is_binary(column) else "char"


def _is_binary(column: MappedColumn) -> bool:
    return column.collation == _BINARY
