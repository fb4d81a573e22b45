"""The tables that a client names, found among those of the log."""

from collections.abc import Callable, Sequence
from glob import escape
from typing import NamedTuple

from ...change.event import Table
from ...formats.notification import in_default_schema
from ..filter import named
from .messages import Code, Rejected


class Choice(NamedTuple):
    """Tables that may be subscribed to."""

    names: tuple[str, ...]  # as the client wrote them, each table once
    globs: tuple[str, ...]  # the same for a filter; each means one schema and table


def choose(known: Sequence[Table], names: Sequence[str], allows: Callable[[Table], bool]) -> Choice:
    """The tables of these names; Rejected when one does not exist or may not be seen.

    A bare name means the default schema. Whether a table exists is told only to those who may see
    it, so that nobody learns the names of others' tables.
    """
    found = {name: _meant(known, name) for name in names}
    denied = [name for name, tables in found.items() if not any(map(allows, tables or named(name)))]
    if denied:
        raise _rejected(Code.PERMISSION_DENIED, names, denied)
    missing = [name for name, tables in found.items() if not tables]
    if missing:
        raise _rejected(Code.TABLE_NOT_FOUND, names, missing)
    first = {_paths(tables): name for name, tables in reversed(found.items())}
    kept = [(name, paths) for paths, name in reversed(first.items())]
    globs = [escape(path) for _, paths in kept for path in paths]
    return Choice(tuple(name for name, _ in kept), tuple(dict.fromkeys(globs)))


def _meant(known: Sequence[Table], name: str) -> list[Table]:
    return [
        table
        for table in known
        if (table.name == name and in_default_schema(table)) or _path(table) == name
    ]


def _paths(tables: Sequence[Table]) -> tuple[str, ...]:
    return tuple(sorted({_path(table) for table in tables}))


def _path(table: Table) -> str:
    return f"{table.schema}.{table.name}"


def _rejected(code: Code, names: Sequence[str], wrong: Sequence[str]) -> Rejected:
    listed = ", ".join(f"'{name}'" for name in wrong)
    noun = "table" if len(wrong) == 1 else "tables"
    message = (
        f"API key does not have permission to subscribe to {listed} {noun}"
        if code is Code.PERMISSION_DENIED
        else f"there is no {listed} {noun}; check the spelling"
    )
    allowed = [name for name in dict.fromkeys(names) if name not in wrong]
    return Rejected(code, message, {"deniedTables": list(wrong), "allowedTables": allowed})
