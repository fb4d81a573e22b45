"""Headrace's tables and triggers in a SQLite database: put there, kept up to date, taken away."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import apsw
import msgspec

from ...change.event import Column
from ...errors import SourceRefused
from . import seen
from .altered import altered_columns, numbered_columns, statements_of
from .connections import classified, connect, not_installed, quoted, rows, writing
from .schema import OURS, TABLES, Layout, SqliteShape, matches, path_of, shapes
from .triggers import ANNOTATE, KEYS, MOVE_ON, NEXT, NOW, VALUES, drop, former_triggers, triggers

_KEYS = ", ".join(f"k{number}" for number in range(KEYS))

# `last` stands in a row of its own, so that every transaction with entries writes its page.
_TABLES = f"""
CREATE TABLE headrace_state (
  id INTEGER PRIMARY KEY CHECK (id = 1), uuid TEXT NOT NULL, last INTEGER NOT NULL);
CREATE TABLE headrace_changes (entry INTEGER PRIMARY KEY, layout, op, at, token, {VALUES});
CREATE TABLE headrace_replaced (layout, part, {_KEYS}, {VALUES});
CREATE TABLE headrace_layouts (
  layout INTEGER PRIMARY KEY, relation INTEGER, told TEXT, follows INTEGER, gone INTEGER);
CREATE TABLE headrace_ends (entry INTEGER PRIMARY KEY);
CREATE TABLE headrace_readers (name TEXT PRIMARY KEY, id TEXT, acked INTEGER, looks INTEGER);
CREATE TABLE headrace_annotations (metadata TEXT);
{ANNOTATE};
{seen.CREATE};
"""

# Triggers first; the application may have names that begin like ours.
_OBJECTS = f"""
    SELECT type, name FROM main.sqlite_schema
    WHERE type = 'table' AND name IN {TABLES}
       OR type = 'trigger' AND (tbl_name IN {TABLES} OR name GLOB '{OURS}[0-9]*_*')
    ORDER BY type DESC"""
_TRIGGERS = """
    SELECT rowid, name, tbl_name, sql FROM main.sqlite_schema WHERE type = 'trigger'"""
_LAYOUTS = "SELECT layout, relation, told FROM headrace_layouts WHERE gone IS NULL"

_layout = msgspec.json.Decoder(Layout).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class InstalledTable:
    """A table that has its triggers."""

    number: int
    relation: int  # the same for all layouts of a table
    layout: Layout

    @property
    def path(self) -> str:
        """As the config and the status write it."""
        return path_of(self.layout.name)


@dataclass(frozen=True, slots=True)
class Report:
    """What an installation has found and done."""

    tables: tuple[str, ...]  # that have triggers now
    changed: tuple[str, ...]  # that got new ones
    refused: dict[str, str]  # table -> why it cannot have any


def install(path: str, globs: Sequence[str], *, wal: bool = True) -> Report:
    """Put tables and triggers into a database; what is there and right stays as it is."""
    connection = connect(path)
    with classified(path):
        try:
            if wal:
                _write_ahead(connection)
            with writing(connection):
                if not is_installed(connection):
                    connection.execute(_TABLES)
                    identity = uuid.uuid4().hex
                    connection.execute("INSERT INTO headrace_state VALUES (1, ?, 0)", (identity,))
                return renew(connection, globs)
        finally:
            connection.close()


def alter(path: str, statements: str) -> Report:
    """Run DDL without losing a change: no write comes between a statement and the new triggers."""
    connection = connect(path)
    with classified(path):
        try:
            expect_installed(connection, path)
            with writing(connection):
                paths = [each.path for each in layouts(connection)]
                report = renew(connection, paths)
                changed: dict[str, None] = {}
                for statement in statements_of(statements):
                    _run(connection, statement)
                    report = renew(connection, paths, altered=statement)
                    changed |= dict.fromkeys(report.changed)
                return Report(report.tables, tuple(changed), report.refused)
        finally:
            connection.close()


def _run(connection: apsw.Connection, statements: str) -> None:
    """Run statements, of which none may begin or end a transaction."""
    connection.authorizer = _within
    try:
        connection.execute(statements)
    except apsw.AuthError as error:
        raise SourceRefused(
            "what is altered must not end its transaction", hint="Leave out BEGIN and COMMIT."
        ) from error
    finally:
        connection.authorizer = None


def _within(operation: int, *_: str | None) -> int:
    denied = operation == apsw.SQLITE_TRANSACTION
    return apsw.SQLITE_DENY if denied else apsw.SQLITE_OK


def remove(path: str) -> bool:
    """Take everything of Headrace's away; False: there was nothing."""
    return bool(take_out(path))


def take_out(path: str, *, dry_run: bool = False) -> list[tuple[str, str]]:
    """Drop everything of Headrace's; returns the kind and the name of each object."""
    connection = connect(path)
    with classified(path):
        try:
            if dry_run:
                return rows(connection, _OBJECTS)
            with writing(connection):
                found = rows(connection, _OBJECTS)
                for kind, name in found:
                    connection.execute(f"DROP {kind} main.{quoted(name)}")
            return found
        finally:
            connection.close()


def _write_ahead(connection: apsw.Connection) -> None:
    (mode,) = rows(connection, "PRAGMA main.journal_mode")[0]
    if mode not in ("wal", "memory"):
        connection.execute("PRAGMA main.journal_mode = WAL")


def is_installed(connection: apsw.Connection) -> bool:
    """Whether Headrace's tables are there."""
    query = "SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'headrace_state'"
    return bool(rows(connection, query))


def expect_installed(connection: apsw.Connection, path: str) -> None:
    """Raise unless Headrace's tables are there."""
    if not is_installed(connection):
        raise not_installed(path)


def layouts(connection: apsw.Connection) -> list[InstalledTable]:
    """The tables that have triggers, or had them when somebody last looked."""
    return [
        InstalledTable(number, relation, _layout(stored))
        for number, relation, stored in rows(connection, _LAYOUTS)
    ]


def expected_layouts(connection: apsw.Connection, globs: Sequence[str]) -> list[Layout]:
    """The layouts that tables have, or get with their triggers."""
    known = layouts(connection) if is_installed(connection) else []
    there = {each.layout.declared: each.layout for each in known}
    found = [shape.layout for shape in shapes(connection, globs)]
    return [
        there.get(each) or msgspec.structs.replace(each, columns=numbered_columns(each.columns, ()))
        for each in found
    ]


def layout(connection: apsw.Connection, number: int) -> tuple[InstalledTable, int | None] | None:
    """A layout, also one that has gone, and the one that it follows."""
    query = "SELECT relation, told, follows FROM headrace_layouts WHERE layout = ?"
    for relation, stored, follows in rows(connection, query, number):
        return InstalledTable(number, relation, _layout(stored)), follows
    return None


def renew(connection: apsw.Connection, globs: Sequence[str], *, altered: str = "") -> Report:
    """Give every table that matches the triggers that it should have; inside a transaction.

    `altered`: the one DDL statement that has run since the last time.
    """
    _upgrade(connection)
    doubt = seen.SchemaDoubt(connection)
    known = {each.layout.name: each for each in layouts(connection)}
    there = {shape.name: shape for shape in shapes(connection, ("*",))}
    for name, each in known.items():
        if name not in there:
            _forget(connection, each.number)
    changed, refused = [], {}
    wanted = [shape for name, shape in there.items() if name in known or matches(name, globs)]
    for shape in wanted:
        reason, was = _refusal(shape), known.get(shape.name)
        if reason:
            refused[shape.path] = reason
        elif was is None or doubt.about(shape, was.number) or not _is_right(connection, shape, was):
            _rebuild(connection, shape, was, altered)
            changed.append(shape.path)
        else:
            _replace_former(connection, shape, was.number)
    seen.remember(connection)
    paths = tuple(shape.path for shape in wanted if shape.path not in refused)
    return Report(paths, tuple(changed), refused)


def _upgrade(connection: apsw.Connection) -> None:
    """Bring what an earlier version has installed up to date."""
    if not rows(connection, "SELECT 1 FROM main.sqlite_schema WHERE name = ?", seen.TABLE):
        connection.execute(seen.CREATE)
    query = "SELECT sql FROM main.sqlite_schema WHERE name = 'headrace_annotate'"
    if rows(connection, query) != [(ANNOTATE,)]:
        connection.execute(drop("headrace_annotate"))
        connection.execute(ANNOTATE)


def is_stale(connection: apsw.Connection, globs: Sequence[str]) -> bool:
    """Whether `renew` would do anything."""
    if not seen.is_current(connection):
        return True
    known = {each.layout.name: each for each in layouts(connection)}
    there = {shape.name: shape for shape in shapes(connection, ("*",))}
    if not there.keys() >= known.keys():
        return True
    return any(
        not _is_right(connection, shape, known.get(name))
        for name, shape in there.items()
        if (name in known or matches(name, globs)) and not _refusal(shape)
    )


def refusals(connection: apsw.Connection, globs: Sequence[str]) -> dict[str, str]:
    """Tables that match and cannot have triggers, and why."""
    found = {shape.path: _refusal(shape) for shape in shapes(connection, globs)}
    return {path: why for path, why in found.items() if why}


def _refusal(shape: SqliteShape) -> str:
    if not shape.identity:
        return "its columns have every name of the rowid, so nothing tells its rows apart"
    if len(shape.identity) > KEYS:
        return f"it has no rowid and a key of more than {KEYS} columns"
    return ""


def _is_right(
    connection: apsw.Connection, shape: SqliteShape, known: InstalledTable | None
) -> bool:
    if known is None or known.layout.declared != shape.layout:
        return False
    found = [row for row in rows(connection, _TRIGGERS) if row[2].lower() == shape.name.lower()]
    prefix = f"{OURS}{known.number}_"
    ours = [row for row in found if row[1].startswith(prefix)]
    there = {name: sql for _, name, _, sql in ours}
    accepted = [triggers(shape, known.number)]
    if not shape.nested and not any(unique.where for unique in shape.uniques):
        accepted.append(former_triggers(shape, known.number))
    if there not in accepted:
        return False  # those of earlier versions miss rows of such tables
    others = [row[0] for row in found if not row[1].startswith(prefix)]
    return bool(max(others, default=0) < min(row[0] for row in ours))


def _replace_former(connection: apsw.Connection, shape: SqliteShape, number: int) -> None:
    """Put triggers of this version in place of earlier ones, which have missed nothing."""
    query = "SELECT sql FROM main.sqlite_schema WHERE type = 'trigger' AND name = ?"
    wanted = triggers(shape, number)
    if any(rows(connection, query, name) != [(sql,)] for name, sql in wanted.items()):
        _drop_triggers(connection, number)
        _create_triggers(connection, shape, number)


def _create_triggers(connection: apsw.Connection, shape: SqliteShape, number: int) -> None:
    # Whoever creates the same objects again leaves no gap before them: that shows in the schema.
    gap = f"{OURS}{number}_gap"
    connection.execute(f"CREATE VIEW main.{gap} AS SELECT 1")
    for statement in triggers(shape, number).values():
        connection.execute(statement)
    connection.execute(f"DROP VIEW main.{gap}")


def _rebuild(
    connection: apsw.Connection, shape: SqliteShape, known: InstalledTable | None, altered: str
) -> None:
    (newest,) = rows(connection, "SELECT coalesce(max(layout), 0) FROM headrace_layouts")[0]
    number = newest + 1
    relation = known.relation if known else _relation(connection, shape.name, number)
    earlier = _columns_of(connection, relation)
    columns = follows = None
    if known is not None:
        _forget(connection, known.number)
        columns = altered_columns(connection, earlier, shape, altered)
        follows = None if columns is None else known.number
    if columns is None:
        columns = numbered_columns(shape.layout.columns, earlier)
    layout = msgspec.structs.replace(shape.layout, columns=columns)
    connection.execute(
        "INSERT INTO headrace_layouts VALUES (?, ?, ?, ?, NULL)",
        (number, relation, _encode(layout).decode(), follows),
    )
    _create_triggers(connection, shape, number)
    if follows is not None:
        stored = f"""INSERT INTO headrace_changes (entry, layout, op, at, v0)
            VALUES ({NEXT}, ?, 'S', {NOW}, ?)"""
        connection.execute(stored, (number, altered))
        connection.execute(MOVE_ON)


def _columns_of(connection: apsw.Connection, relation: int) -> list[tuple[Column, ...]]:
    """The columns of all layouts of a table, the newest last."""
    query = "SELECT told FROM headrace_layouts WHERE relation = ? ORDER BY layout"
    return [_layout(stored).columns for (stored,) in rows(connection, query, relation)]


def _relation(connection: apsw.Connection, name: str, number: int) -> int:
    """The number that a table had when it was there before, or a new one."""
    found = rows(
        connection,
        "SELECT min(relation) FROM headrace_layouts WHERE told ->> '$.name' = ?",
        name,
    )
    return int(found[0][0] or number)


def _forget(connection: apsw.Connection, number: int) -> None:
    _drop_triggers(connection, number)
    connection.execute("UPDATE headrace_layouts SET gone = 1 WHERE layout = ?", (number,))


def _drop_triggers(connection: apsw.Connection, number: int) -> None:
    for name in ("inserting", "inserted", "updating", "updated", "deleted"):
        connection.execute(drop(f"{OURS}{number}_{name}"))
