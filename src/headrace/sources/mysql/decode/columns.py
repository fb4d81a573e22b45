"""Columns of MySQL and MariaDB: what the catalogue declares and what the binlog has.

A table map has the layout of a row's bytes. With the servers' default settings it has no names,
labels and character sets, and it never has the declared width: these come from
the catalogue as it was when the rows were written.
"""

from __future__ import annotations

import re

import msgspec

from ....errors import DecodeError
from . import typecodes as t
from .charsets import charset_of, decoder

WITHHELD = "withheld"  # in `extra`: the column has a default that must not be stored


class MappedColumn(msgspec.Struct, frozen=True):
    """A column as a table map describes it; None: the server left it out."""

    code: int  # the type's number, protocol's MYSQL_TYPE_…
    meta: int  # length, precision …, packed as the type packs them
    nullable: bool
    unsigned: bool | None = None
    collation: int | None = None  # the number of a collation, which names a character set
    name: str | None = None
    labels: tuple[bytes, ...] | None = None  # of ENUM and SET, in the column's character set
    key: int | None = None  # index in the primary key, from 0; None: not in it, or not known
    visible: bool | None = None
    geometry: int | None = None
    dimensions: int | None = None  # of a VECTOR


class DeclaredColumn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A column as information_schema.COLUMNS describes it, and as DDL was followed."""

    name: str
    type: str  # COLUMN_TYPE: "int(10) unsigned", "enum('a','b')", "tinyint(1)"
    charset: str = ""  # CHARACTER_SET_NAME; "": not text
    json: bool = False  # MariaDB: text with CHECK (json_valid(…))
    nullable: bool = True
    default: str | None = None  # COLUMN_DEFAULT: text of the server's own; None: there is none
    extra: str = ""  # EXTRA, in small letters: "auto_increment", "stored generated"
    number: int = 0  # among all columns that the table ever had; 0: not given yet
    initial_default: str = ""  # JSON of what rows have that are older than the column; "": null
    loose: bool = False  # text that the server holds to be equal to other text, by its collation

    def like(self, other: DeclaredColumn) -> bool:
        """Whether both are declared alike; the server need not give the same values by default."""
        return (self.name, self.type, self.charset, self.json) == (
            other.name,
            other.type,
            other.charset,
            other.json,
        )


class ColumnType(msgspec.Struct, frozen=True):
    """Everything that decoding a column depends on."""

    name: str
    code: int
    meta: int
    nullable: bool
    unsigned: bool = False
    charset: str = "binary"
    labels: tuple[str, ...] = ()
    boolean: bool = False  # declared as TINYINT(1)
    json: bool = False  # text that is a JSON document
    base: str = ""  # the declared type's first word; "": not known


class DeclaredType(msgspec.Struct, frozen=True):
    """COLUMN_TYPE, taken apart."""

    base: str  # "int", "enum", "point"
    arguments: str = ""  # what stands in the brackets
    unsigned: bool = False
    zerofill: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """Of ENUM and SET."""
        if self.base not in ("enum", "set"):
            return ()
        return tuple(_unescaped(label[1:-1]) for label in _labels(self.arguments))

    @property
    def boolean(self) -> bool:
        """TINYINT(1), which BOOLEAN is another name of; UNSIGNED makes it a number."""
        return (self.base, self.arguments, self.unsigned) == ("tinyint", "1", False)


_LABEL = r"'(?:[^'\\]|''|\\.)*+'"
_labels = re.compile(_LABEL, re.DOTALL).findall
_declared = re.compile(
    rf"\s*([a-z][a-z0-9_]*)\s*(?:\(((?:{_LABEL}|[^'()])*+)\))?(.*)", re.DOTALL | re.IGNORECASE
).fullmatch
_escape = re.compile(r"''|\\(.)", re.DOTALL).sub
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "0": "\0", "Z": "\x1a"}


def declared_type(text: str) -> DeclaredType:
    """COLUMN_TYPE taken apart; DecodeError where it does not read as one."""
    found = _declared(text)
    if found is None:
        raise DecodeError(f"the catalogue declares a column as {text[:100]!r}, which is no type")
    words = found[3].lower().split()
    zerofill = "zerofill" in words
    base = _SYNONYMS.get(found[1].lower(), found[1].lower())
    unsigned = zerofill or "unsigned" in words
    return DeclaredType(base, (found[2] or "").strip(), unsigned, zerofill)


def _unescaped(label: str) -> str:
    return _escape(lambda e: _ESCAPES.get(e[1], e[1]) if e[1] is not None else "'", label)


_SYNONYMS = {"integer": "int", "numeric": "decimal", "real": "double", "geomcollection": "geometry"}
_BLOBS = frozenset(
    (t.TINY_BLOB, t.MEDIUM_BLOB, t.LONG_BLOB, t.BLOB, t.BLOB_COMPRESSED)
)  # fmt: skip
_VARIABLE = frozenset((t.VARCHAR, t.VAR_STRING, t.VARCHAR_COMPRESSED))
# In the order of the numbers that a table map has for them.
GEOMETRIES = ("geometry", "point", "linestring", "polygon", "multipoint", "multilinestring",
              "multipolygon", "geometrycollection")  # fmt: skip
_TEXTS = frozenset(("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set"))

# How each declared type may stand in a binlog.
_CODES: dict[str, frozenset[int]] = {
    "tinyint": frozenset((t.TINY,)),
    "smallint": frozenset((t.SHORT,)),
    "mediumint": frozenset((t.INT24,)),
    "int": frozenset((t.LONG,)),
    "bigint": frozenset((t.LONGLONG,)),
    "float": frozenset((t.FLOAT,)),
    "double": frozenset((t.DOUBLE,)),
    "decimal": frozenset((t.NEWDECIMAL,)),
    "bit": frozenset((t.BIT,)),
    "year": frozenset((t.YEAR,)),
    "date": frozenset((t.DATE, t.NEWDATE)),
    "time": frozenset((t.TIME, t.TIME2)),
    "datetime": frozenset((t.DATETIME, t.DATETIME2)),
    "timestamp": frozenset((t.TIMESTAMP, t.TIMESTAMP2)),
    **dict.fromkeys(("char", "binary", "uuid", "inet4", "inet6"), frozenset((t.STRING,))),
    **dict.fromkeys(("varchar", "varbinary"), _VARIABLE),
    **dict.fromkeys(("tinytext", "text", "mediumtext", "longtext"), _BLOBS),
    **dict.fromkeys(("tinyblob", "blob", "mediumblob", "longblob"), _BLOBS),
    **dict.fromkeys(GEOMETRIES, frozenset((t.GEOMETRY,))),
    "json": frozenset((t.JSON, t.TYPED_ARRAY)),
    "enum": frozenset((t.ENUM,)),
    "set": frozenset((t.SET,)),
    "vector": frozenset((t.VECTOR, *_VARIABLE)),
}


def columns_of(
    mapped: tuple[MappedColumn, ...], declared: tuple[DeclaredColumn, ...] | None
) -> tuple[ColumnType, ...]:
    """Both put together; `declared` may be None where the table map has names and labels.

    Raises DecodeError where the two do not describe the same columns.
    """
    if declared is None:
        return tuple(map(_from_map_alone, mapped))
    if len(mapped) != len(declared):
        raise DecodeError(
            f"its rows have {len(mapped)} columns in the binlog and {len(declared)} in the "
            "catalogue, so it was altered while Headrace did not read",
            hint=_ROW_METADATA,
        )
    return tuple(_column(m, d) for m, d in zip(mapped, declared, strict=True))


_ROW_METADATA = "SET GLOBAL binlog_row_metadata = FULL; then run `headrace snapshot SOURCE TABLE`."


_SIGNED = frozenset((t.TINY, t.SHORT, t.INT24, t.LONG, t.LONGLONG))


def _from_map_alone(mapped: MappedColumn) -> ColumnType:
    if mapped.name is None:
        raise DecodeError("the binlog does not have the names of columns", hint=_ROW_METADATA)
    if mapped.unsigned is None and mapped.code in _SIGNED:
        raise DecodeError(f"the binlog does not show whether {mapped.name} has a sign")
    charset = "binary" if mapped.collation is None else charset_of(mapped.collation)
    return ColumnType(
        name=mapped.name,
        code=mapped.code,
        meta=mapped.meta,
        nullable=mapped.nullable,
        unsigned=bool(mapped.unsigned),
        charset=charset,
        labels=_label_texts(mapped, charset),
    )


def _column(mapped: MappedColumn, declared: DeclaredColumn) -> ColumnType:
    kind = declared_type(declared.type)
    _agree(mapped, declared, kind)
    _refuse_old_fractions(mapped, declared, kind)
    charset = declared.charset or "binary"
    if mapped.collation is not None:
        charset = charset_of(mapped.collation)
    elif kind.base in _TEXTS and not declared.charset:
        raise DecodeError(f"the character set of the column {declared.name} is not known")
    return ColumnType(
        name=declared.name,
        code=mapped.code,
        meta=mapped.meta,
        nullable=mapped.nullable,
        unsigned=kind.unsigned if mapped.unsigned is None else mapped.unsigned,
        charset=charset,
        labels=kind.labels if mapped.labels is None else _label_texts(mapped, charset),
        boolean=kind.boolean,
        json=declared.json,
        base=kind.base,
    )


def _agree(mapped: MappedColumn, declared: DeclaredColumn, kind: DeclaredType) -> None:
    codes = _CODES.get(kind.base)
    if codes is None:
        raise DecodeError(
            f"the column {declared.name} has the type {kind.base}, which is not known here"
        )
    if mapped.name not in (None, declared.name) or mapped.code not in codes:
        raise DecodeError(
            f"the column {mapped.name or declared.name} has another type in the binlog than "
            f"{declared.name} in the catalogue, so it was altered while Headrace did not read",
            hint=_ROW_METADATA,
        )


def _refuse_old_fractions(
    mapped: MappedColumn, declared: DeclaredColumn, kind: DeclaredType
) -> None:
    """The binlog does not have the number of digits of such a column."""
    if mapped.code in (t.TIME, t.DATETIME, t.TIMESTAMP) and kind.arguments not in ("", "0"):
        raise DecodeError(
            f"the column {declared.name} keeps fractions of seconds in the format of MariaDB 5.3",
            hint="SET GLOBAL mysql56_temporal_format = ON; then ALTER TABLE … FORCE.",
        )


def _label_texts(mapped: MappedColumn, charset: str) -> tuple[str, ...]:
    try:
        return tuple(map(decoder(charset), mapped.labels or ())) if mapped.labels else ()
    except UnicodeError as error:
        raise DecodeError(
            f"a label of the column {mapped.name} is not in its character set {charset}"
        ) from error


# --- a type as text ------------------------------------------------------------------------------

_PLAIN_TYPES = {
    t.TINY: "tinyint", t.SHORT: "smallint", t.INT24: "mediumint", t.LONG: "int",
    t.LONGLONG: "bigint", t.FLOAT: "float", t.DOUBLE: "double", t.YEAR: "year", t.JSON: "json",
    t.DATE: "date", t.NEWDATE: "date", t.TIME: "time", t.DATETIME: "datetime",
    t.TIMESTAMP: "timestamp",
}  # fmt: skip
_FRACTION_TYPES = {t.TIMESTAMP2: "timestamp", t.DATETIME2: "datetime", t.TIME2: "time"}
_BLOB_SIZES = {1: "tiny", 2: "", 3: "medium", 4: "long"}  # by the bytes of their length
_BINARY = 63  # the collation of bytes


def type_text(column: MappedColumn) -> str:
    """The type as information_schema would show it, as far as the table map has it."""
    return _mapped_base(column) + (" unsigned" if column.unsigned else "")


def _mapped_base(column: MappedColumn) -> str:
    code, meta = column.code, column.meta
    if code in _PLAIN_TYPES:
        return _PLAIN_TYPES[code]
    if code in _FRACTION_TYPES:
        return f"{_FRACTION_TYPES[code]}({meta})" if meta else _FRACTION_TYPES[code]
    if code == t.NEWDECIMAL:
        return f"decimal({meta & 0xFF},{meta >> 8})"
    if code == t.BIT:
        return f"bit({(meta >> 8) * 8 + (meta & 0xFF)})"
    if code == t.BLOB:
        return _BLOB_SIZES.get(meta, "") + ("blob" if _is_binary(column) else "text")
    if code == t.GEOMETRY:
        number = column.geometry or 0
        return GEOMETRIES[number] if number < len(GEOMETRIES) else "geometry"
    return _mapped_text(column)


def _mapped_text(column: MappedColumn) -> str:
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
