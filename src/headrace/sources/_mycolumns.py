"""Columns of MySQL and MariaDB: what the catalogue declares and what the binlog tells. No I/O.

A table map says how the bytes of a row are laid out. With the servers' default settings it says
nothing of names, labels and character sets, and it never says the declared width: these come from
the catalogue as it was when the rows were written.
"""

from __future__ import annotations

import msgspec


class MappedColumn(msgspec.Struct, frozen=True):
    """A column as a table map describes it; None: the server did not tell."""

    code: int  # the type's number, protocol's MYSQL_TYPE_…
    meta: int  # length, precision …, packed as the type packs them
    nullable: bool
    unsigned: bool | None = None
    collation: int | None = None  # the number of a collation, which names a character set
    name: str | None = None
    labels: tuple[bytes, ...] | None = None  # of ENUM and SET, in the column's character set
    key: int | None = None  # place in the primary key, from 0; None: not in it, or not told
    visible: bool | None = None
    geometry: int | None = None
    dimensions: int | None = None  # of a VECTOR


class DeclaredColumn(msgspec.Struct, frozen=True):
    """A column as information_schema.COLUMNS describes it."""

    name: str
    type: str  # COLUMN_TYPE: "int(10) unsigned", "enum('a','b')", "tinyint(1)"
    charset: str = ""  # CHARACTER_SET_NAME; "": not text
    json: bool = False  # MariaDB: text with CHECK (json_valid(…))


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
    length: int = 0  # of BINARY(N), whose padding the binlog leaves out


def columns_of(
    mapped: tuple[MappedColumn, ...], declared: tuple[DeclaredColumn, ...] | None
) -> tuple[ColumnType, ...]:
    """Both put together; `declared` may be None where the table map tells names and labels.

    Raises DecodeError where the two do not describe the same columns.
    """
    raise NotImplementedError
