"""What a SQLite database says of its tables: columns, keys, unique indexes, foreign keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import apsw
import msgspec

from ...change.event import Column, Reference
from ...change.path import path_matches, table_path
from .connections import Row, quoted, rows, text
from .writebacks import WriteBacks, written_back

SCHEMA = "main"  # the name of the database itself, as every connection calls it by default
OURS = "headrace_"
TABLES = tuple(
    OURS + name
    for name in (
        "state",
        "changes",
        "replaced",
        "layouts",
        "ends",
        "readers",
        "annotations",
        "seen",
    )
)

_ROWIDS = ("rowid", "_rowid_", "oid")
_TABLES = f"""
    SELECT name, wr FROM pragma_table_list
    WHERE schema = 'main' AND type = 'table'
      AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND name NOT IN {TABLES}
    ORDER BY name"""
_EXPRESSION = -2  # what index_xinfo calls a column that is an expression
_ROWID = -1

# A column list is cut at commas that stand outside of brackets, quotes and comments.
_token = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|.""", re.DOTALL
)
_order = re.compile(r"\s+(?:asc|desc)\s*$", re.IGNORECASE)
_collation = re.compile(r"\s+collate\s+(?:\"[^\"]*\"|\S+)\s*$", re.IGNORECASE)


class Layout(msgspec.Struct, frozen=True):
    """A table as triggers were made for it: what their values stand for."""

    name: str
    columns: tuple[Column, ...]
    references: tuple[Reference, ...]

    @property
    def declared(self) -> Layout:
        """As the database knows it: without what its history says of the columns."""
        return Layout(self.name, tuple(map(declared, self.columns)), self.references)


def declared(column: Column) -> Column:
    """A column as the database knows it: without what its history says."""
    return Column(column.name, column.type, column.key)


@dataclass(frozen=True, slots=True)
class Unique:
    """What no two rows may share: expressions over a row, each with its collation."""

    terms: tuple[tuple[str, str], ...]
    names: frozenset[str] | None  # the columns it looks at; None: there are expressions
    where: str = ""  # which rows a partial index has


@dataclass(frozen=True, slots=True)
class SqliteShape:
    """A table, with all that its triggers must know."""

    layout: Layout
    identity: tuple[str, ...]  # columns that tell rows apart: the rowid, or the key; (): none do
    uniques: tuple[Unique, ...]
    droppable: frozenset[str]  # columns that ALTER TABLE may drop, once no index is in its way
    generated: frozenset[str]
    nested: bool = False  # it may be written to between its own BEFORE and AFTER triggers
    rewritten: bool = False  # ON UPDATE may change the updated row itself

    @property
    def name(self) -> str:
        """The table's name."""
        return self.layout.name

    @property
    def path(self) -> str:
        """As the config and the status write it."""
        return path_of(self.name)


def path_of(name: str) -> str:
    """schema.table, as the config and the status write it."""
    return table_path(SCHEMA, name)


def matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a table is wanted; a bare name means the same as main.name."""
    return any(path_matches(SCHEMA, name, glob, default=SCHEMA) for glob in globs)


def shapes(connection: apsw.Connection, globs: Sequence[str]) -> list[SqliteShape]:
    """The tables that match."""
    found = [(name, bool(wr)) for name, wr in rows(connection, _TABLES)]
    back = written_back(connection)
    return [_shape(connection, name, keyed, back) for name, keyed in found if matches(name, globs)]


def _shape(connection: apsw.Connection, name: str, keyed: bool, back: WriteBacks) -> SqliteShape:
    """`keyed`: the table has no rowid."""
    info = [row for row in _pragma(connection, "table_xinfo", name) if row[6] != 1]
    columns = tuple(Column(row[1], row[2] or "ANY", bool(row[5])) for row in info)
    names = {column.name.lower() for column in columns}
    if keyed:
        identity = tuple(row[1] for row in sorted(info, key=lambda row: row[5]) if row[5])
    else:
        free = [each for each in _ROWIDS if each not in names] or _rowid(info)
        identity = tuple(free[:1])
    layout = Layout(name, columns, _references(connection, name, columns))
    if not identity:
        return SqliteShape(layout, (), (), frozenset(), frozenset())
    uniques = () if keyed else (Unique(((quoted(identity[0]), "BINARY"),), _alias(info)),)
    indexes = [row for row in _pragma(connection, "index_list", name) if row[2]]
    found = [_unique(connection, row[1], info, identity) for row in indexes]
    declared = [each.names or () for each, row in zip(found, indexes, strict=True) if row[3] != "c"]
    fixed = {column.name for column in columns if column.key}.union(*declared)
    droppable = frozenset(column.name for column in columns if column.name not in fixed)
    generated = frozenset(row[1] for row in info if row[6])
    return SqliteShape(
        layout,
        identity,
        (*uniques, *found),
        droppable,
        generated,
        nested=name.lower() in back.nested,
        rewritten=name.lower() in back.rewritten,
    )


def _rowid(info: Sequence[Row]) -> list[str]:
    """The column that is the rowid itself, where it has that name or the others' too."""
    keys = [row for row in info if row[5]]
    return [row[1] for row in keys if len(keys) == 1 and row[2].upper() == "INTEGER"]


def _alias(info: Sequence[Row]) -> frozenset[str]:
    """The columns that may be other names of the rowid."""
    keys = [row[1] for row in info if row[5]]
    return frozenset(keys if len(keys) == 1 else ())


def _unique(
    connection: apsw.Connection, index: str, info: Sequence[Row], identity: Sequence[str]
) -> Unique:
    columns = [row for row in _pragma(connection, "index_xinfo", index) if row[5]]
    named = {row[0]: row[1] for row in info}
    query = "SELECT sql FROM main.sqlite_schema WHERE type = 'index' AND name = ?"
    sql = "".join(found or "" for (found,) in rows(connection, query, index))  # none: a constraint
    where = filtered(sql)
    if any(row[1] == _EXPRESSION for row in columns):
        expressions = listed(sql)
        terms = [(expressions[row[0]], row[4]) for row in columns]
        return Unique(tuple(terms), None, where)
    plain = [identity[0] if row[1] == _ROWID else named[row[1]] for row in columns]
    collations = [row[4] for row in columns]
    terms = list(zip(map(quoted, plain), collations, strict=True))
    names = frozenset(plain) | _mentioned(where, named.values())
    return Unique(tuple(terms), names, where)


def _mentioned(expression: str, names: Iterable[str]) -> frozenset[str]:
    """The columns that an expression may look at."""
    lower = expression.lower()
    return frozenset(
        name
        for name in names
        if expression
        and (not name.isidentifier() or re.search(rf"(?<!\w){name.lower()}(?!\w)", lower))
    )


def filtered(sql: str) -> str:
    """The condition of a CREATE INDEX of some rows; empty: it has all."""
    depth, listed, rest = 0, False, ""
    for token in _token.findall(sql):
        if listed:
            rest += " " if token.startswith(("--", "/*")) else token
        depth += {"(": 1, ")": -1}.get(token, 0)
        listed = listed or (token == ")" and depth == 0)
    return re.sub(r"^\s*where\b", "", rest, flags=re.IGNORECASE).strip()


def listed(sql: str) -> list[str]:
    """The expressions of a CREATE INDEX, without their order and collation."""
    depth, found, current = 0, [], ""
    for token in _token.findall(sql):
        if token == ")":
            depth -= 1
            if depth == 0:
                break
        if depth == 1 and token == ",":
            found.append(current)
            current = ""
        elif depth and not token.startswith(("--", "/*")):
            current += token
        if token == "(":
            depth += 1
    return [_bare(each) for each in (*found, current)]


def _bare(expression: str) -> str:
    expression = _order.sub("", expression)
    return _collation.sub("", expression).strip()


def _references(
    connection: apsw.Connection, name: str, columns: Sequence[Column]
) -> tuple[Reference, ...]:
    found: dict[int, list[Row]] = {}
    for row in _pragma(connection, "foreign_key_list", name):
        found.setdefault(row[0], []).append(row)
    # By their first column and the parent: a later index or key must not reorder them.
    made = [_reference(connection, each) for each in found.values()]
    names = {column.name for column in columns}
    return tuple(sorted({r for r in made if names.issuperset(r.columns)}, key=lambda r: r.columns))


def _reference(connection: apsw.Connection, found: list[Row]) -> Reference:
    found = sorted(found, key=lambda row: row[1])
    parent = found[0][2]
    theirs = [row[4] for row in found]
    if None in theirs:  # not named: the parent's key
        info = sorted(_pragma(connection, "table_xinfo", parent), key=lambda row: row[5])
        theirs = [row[1] for row in info if row[5]][: len(found)]
    return Reference(tuple(row[3] for row in found), SCHEMA, parent, tuple(theirs))


def _pragma(connection: apsw.Connection, name: str, argument: str) -> list[Row]:
    return rows(connection, f"PRAGMA main.{name}({text(argument)})")
