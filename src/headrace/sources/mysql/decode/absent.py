"""What columns have that an event leaves out (binlog_row_image other than FULL). No I/O.

An INSERT leaves columns out that have their default. An UPDATE leaves out what stays as it is; but
a REPLACE is logged as an UPDATE, too, and what that leaves out has its default.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

from ....errors import DecodeError
from .columns import WITHHELD, DeclaredColumn, declared_type
from .definitions import implicit
from .path import TablePath
from .statements import DmlStatement, read
from .values import text_encoder

_FIX = (
    "SET GLOBAL binlog_row_image = FULL, let sessions connect anew, and run `headrace snapshot "
    "SOURCE TABLE`"
)
# Types whose default the catalogue does not write as a SELECT shows a value.
_ODD = frozenset({"timestamp", "bit", "binary", "varbinary", "float", "uuid", "inet4", "inet6"})


class Manner(Enum):
    """What a column means that an UPDATE leaves out."""

    UNKNOWN = "unknown"
    UPDATE = "update"  # it is unchanged
    REPLACE = "replace"  # it has its default


class DefaultsOfAnotherTime(DecodeError):
    """The catalogue has defaults of another time than the rows: the table must be read anew."""


class ColumnDefaults(msgspec.Struct, frozen=True):
    """The defaults of a table's columns."""

    values: dict[str, bytes]  # JSON; a column whose default the server alone knows is left out
    virtual: frozenset[str]  # computed when they are read: no event has them
    optional: frozenset[str]  # columns that have a default of their own
    current: bool = True  # whether they are of the stream's place

    @classmethod
    def of(
        cls, columns: Iterable[DeclaredColumn], *, mariadb: bool, current: bool
    ) -> ColumnDefaults:
        """Those that the catalogue shows."""
        declared = list(columns)
        found = {each.name: _default(each, mariadb=mariadb) for each in declared}
        virtual = (each.name for each in declared if "virtual generated" in each.extra)
        return cls(
            {name: value for name, value in found.items() if value is not None},
            frozenset(virtual),
            frozenset(each.name for each in declared if each.default is not None),
            current,
        )

    def given(self, names: Iterable[str]) -> dict[str, bytes]:
        """What a new row has in columns that its event leaves out."""
        wanted = list(names)
        unknown = [name for name in wanted if name not in self.values]
        if unknown:
            raise DecodeError(
                f"an event leaves out {', '.join(unknown)}, whose default is not known here; {_FIX}"
            )
        if wanted and not self.current:
            raise DefaultsOfAnotherTime("an event leaves out columns whose default may be another")
        return {name: self.values[name] for name in wanted}

    def manner(self, manner: Manner, key: Iterable[str], there: set[str]) -> Manner:
        """What is meant by an UPDATE whose new row has only these columns."""
        if manner is not Manner.UNKNOWN:
            return manner
        left_out = set(key) - there
        if left_out and left_out.isdisjoint(self.optional):
            return Manner.UPDATE  # a REPLACE has the whole key
        raise DecodeError(
            "an UPDATE may be a REPLACE, which leaves out what it sets to its default; " + _FIX
        )

    def expect_kept(self, names: Iterable[str]) -> None:
        """DecodeError: columns that an UPDATE leaves out may have changed with it."""
        changing = sorted(self.virtual.intersection(names))
        if changing:
            raise DecodeError(
                f"an event leaves out {', '.join(changing)}, which the server computes; {_FIX}"
            )


def unnamed() -> DecodeError:
    """For a row that an event names by columns that are no primary key."""
    return DecodeError(
        f"it has no primary key, and an event has only a part of the old row; {_FIX}"
    )


def manner_of(sql: str, path: TablePath, others: Iterable[TablePath] = ()) -> Manner:
    """What a statement makes of columns that its events on a table leave out.

    `others`: all tables that it writes to.
    """
    try:
        statement = read(sql, database="")
    except DecodeError:
        return Manner.UNKNOWN
    if not isinstance(statement, DmlStatement) or statement.path is None:
        return Manner.UNKNOWN
    schema, table = statement.path
    if table != path.table or schema not in ("", path.schema):
        return Manner.UNKNOWN  # a trigger has written the rows
    if not schema and any(each.table == table and each != path for each in others):
        return Manner.UNKNOWN  # one of them has, and which the text means is not known
    verbs = {"UPDATE": Manner.UPDATE, "INSERT": Manner.UPDATE, "REPLACE": Manner.REPLACE}
    return verbs.get(statement.verb, Manner.UNKNOWN)


def _default(column: DeclaredColumn, *, mariadb: bool) -> bytes | None:
    if "generated" in column.extra or WITHHELD in column.extra:
        return None
    text = column.default
    if text is None or (mariadb and text.upper() == "NULL"):
        if column.nullable:
            return b"null"
        found = implicit(declared_type(column.type))
        return None if found is None else found.encode()
    if declared_type(column.type).base in _ODD or column.json:
        return None
    if mariadb and text.startswith("'"):
        text = text[1:-1].replace("''", "'")
        if "\\" in text:
            return None
    elif mariadb and not text.lstrip("-").replace(".", "", 1).isdecimal():
        return None
    try:
        return text_encoder(column)(text.encode())
    except DecodeError:
        return None
