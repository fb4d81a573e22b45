"""The schema as it was at the last look, and DDL that leaves no other trace in it.

A column that is dropped and added again, or a table that is built anew with the triggers that it
had, looks as before, and its rows are others. But every DDL statement counts the version of the
schema on: statements that no difference explains may have done so.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import apsw
import msgspec

from .connections import Row, quoted, rows, text
from .schema import OURS, SqliteShape

TABLE = "headrace_seen"
CREATE = f"""CREATE TABLE IF NOT EXISTS {TABLE} (
  id INTEGER PRIMARY KEY CHECK (id = 1), version INTEGER, last INTEGER, objects TEXT)"""

_OBJECTS = "SELECT type, name, tbl_name, rowid, sql FROM main.sqlite_schema"
_SEEN = f"SELECT version, last, objects FROM {TABLE}"

_VIRTUAL = "virtual"  # in place of a digest
_READDED = 2  # statements that drop a column and add it again
_REMADE = 2  # that drop a table and create it again
_REBUILT = 7  # that drop a table, put another in its place, and create five triggers
_WITNESSES = 10_000  # rows that are looked at, while writers wait


class SchemaObject(msgspec.Struct, frozen=True, array_like=True):
    """A table, index, trigger or view."""

    type: str
    name: str
    table: str
    row: int  # where it stands in the schema
    sql: str  # a digest of its text

    @property
    def is_own(self) -> bool:
        """Whether SQLite makes it along with another object."""
        return self.name.startswith("sqlite_")


class SeenSchema(msgspec.Struct, frozen=True):
    """All objects of a database at one version of its schema."""

    version: int
    last: int  # the newest entry at that time
    objects: dict[str, SchemaObject]

    def explains(self, other: SeenSchema) -> int:
        """The least number of statements that turn the other schema into this one."""
        gained = [each for name, each in self.objects.items() if name not in other.objects]
        lost = [each for name, each in other.objects.items() if name not in self.objects]
        tables = max(_tables(gained), _tables(lost))
        # Their indexes and triggers go with them.
        gone = {each.name for each in lost if each.type in ("table", "view")}
        parts = [each for each in gained if each.type != "table" and not each.is_own]
        parts += [each for each in lost if each.type == "view"]
        taken = Counter(
            each.table
            for each in lost
            if each.type not in ("table", "view") and each.table not in gone
        )
        # A table that was made anew under its name has taken its own along.
        dropped = sum(min(count, _REMADE) for count in taken.values())
        changed = any(
            each.sql != other.objects[name].sql
            for name, each in self.objects.items()
            if name in other.objects
        )
        return tables + len(parts) + dropped + (1 if changed and not tables and not dropped else 0)


def _tables(objects: list[SchemaObject]) -> int:
    """How many statements create or drop these tables; a virtual one takes others along."""
    found = [each for each in objects if each.type == "table" and not each.is_own]
    return min(len(found), 1) if any(each.sql == _VIRTUAL for each in found) else len(found)


class SchemaDoubt:
    """Which tables may have other rows than their entries say, since the last look."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._before = _stored(connection)
        self._now = look(connection)
        before = self._before
        self._surplus = 0
        if before is not None:
            self._surplus = self._now.version - before.version - self._now.explains(before)

    def about(self, shape: SqliteShape, layout: int) -> bool:
        """Whether rows of a table may have changed that no trigger has seen."""
        before = self._before
        if before is None or before.version == self._now.version:
            return False
        was, now = self._own(before, shape.name, layout), self._own(self._now, shape.name, layout)
        if _texts(was) != _texts(now):
            return True
        if self._surplus >= _REBUILT and was != now:
            return True
        return self._surplus >= _READDED and not self._is_untouched(shape, before.last)

    def _own(self, seen: SeenSchema, name: str, layout: int) -> dict[str, SchemaObject]:
        """A table and the triggers of its layout."""
        prefix = f"trigger {OURS}{layout}_"
        return {
            key: each
            for key, each in seen.objects.items()
            if key == f"table {name}" or key.startswith(prefix)
        }

    def _is_untouched(self, shape: SqliteShape, last: int) -> bool:
        """Whether some row has what no column has that was added since.

        Columns are added at the end: if the last one was not, no other one was.
        """
        info = rows(self._connection, f"PRAGMA main.table_xinfo({text(shape.name)})")
        column = next((row for row in reversed(info) if row[6] == 0), None)
        if column is None or column[1] not in shape.droppable or _is_computed(column):
            return True
        table, name = f"main.{quoted(shape.name)}", quoted(column[1])
        written = self._now.last - last  # so many rows may have got their value later
        query = f"""SELECT count(*) FROM (
            SELECT 1 FROM (SELECT {name} AS c FROM {table} LIMIT {_WITNESSES})
            WHERE c IS NOT {column[4] or "NULL"} LIMIT {written + 1})"""
        if not rows(self._connection, f"SELECT 1 FROM {table} LIMIT 1"):
            return True
        try:
            ((witnesses,),) = rows(self._connection, query)
        except apsw.SQLError:
            return False  # DEFAULT may have a word without quotes, which no expression has
        return bool(witnesses > written)


def _is_computed(column: Row) -> bool:
    """Whether its default is no constant: such a column cannot be added where there are rows."""
    default = (column[4] or "").upper()
    return default.startswith(("(", "CURRENT_"))


def _texts(objects: dict[str, SchemaObject]) -> dict[str, str]:
    return {name: each.sql for name, each in objects.items()}


def look(connection: apsw.Connection) -> SeenSchema:
    """The schema as it is now."""
    (version,) = rows(connection, "PRAGMA main.schema_version")[0]
    (last,) = rows(connection, "SELECT last FROM headrace_state")[0]
    objects = {
        f"{kind} {name}": SchemaObject(kind, name, table, row, _digest(sql or ""))
        for kind, name, table, row, sql in rows(connection, _OBJECTS)
    }
    return SeenSchema(version, last, objects)


def _digest(sql: str) -> str:
    if sql[:14].upper() == "CREATE VIRTUAL":
        return _VIRTUAL
    return hashlib.blake2b(sql.encode(), digest_size=8).hexdigest()


def is_current(connection: apsw.Connection) -> bool:
    """Whether no DDL has come since the last look."""
    query = "SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = ?"
    if not rows(connection, query, TABLE):
        return False
    (version,) = rows(connection, "PRAGMA main.schema_version")[0]
    return rows(connection, f"SELECT version FROM {TABLE}") == [(version,)]


def remember(connection: apsw.Connection) -> None:
    """Look, after everything that was found was dealt with."""
    now = look(connection)
    objects = msgspec.json.encode(now.objects).decode()
    if rows(connection, _SEEN) != [(now.version, now.last, objects)]:
        statement = f"INSERT OR REPLACE INTO {TABLE} VALUES (1, ?, ?, ?)"
        connection.execute(statement, (now.version, now.last, objects))


def remember_entry(connection: apsw.Connection) -> None:
    """Note how far entries have come, where the schema is what it was at the last look."""
    (version,) = rows(connection, "PRAGMA main.schema_version")[0]
    update = f"UPDATE {TABLE} SET last = (SELECT last FROM headrace_state) WHERE version = ?"
    connection.execute(update, (version,))


def _stored(connection: apsw.Connection) -> SeenSchema | None:
    for version, last, objects in rows(connection, _SEEN):
        decoded = msgspec.json.decode(objects, type=dict[str, SchemaObject])
        return SeenSchema(version, last, decoded)
    return None
