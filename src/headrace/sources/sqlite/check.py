"""What capturing a SQLite database needs, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import apsw

from ...errors import SourceError
from .. import Finding
from . import installation
from .connections import classified, connect, rows
from .schema import shapes
from .settings import SqliteSettings

_TOGETHER = (
    "transactions that commit between two polls are merged into one; PRAGMA journal_mode = WAL "
    "lets Headrace tell them apart"
)


def check(source: SqliteSettings) -> list[Finding]:
    """Look at everything, as far as the file can be opened."""
    try:
        with classified(source.path), closing(connect(source.path)) as connection:
            return list(_findings(source, connection))
    except SourceError as error:
        fix = error.hint or "Check `path` of the source, and who holds the database."
        return [Finding("database", ok=False, detail=str(error), fix=fix)]


def _findings(source: SqliteSettings, connection: apsw.Connection) -> Iterator[Finding]:
    path = source.path
    yield Finding("database", ok=not connection.readonly("main"), detail=path)
    (mode,) = rows(connection, "PRAGMA main.journal_mode")[0]
    yield Finding("journal mode", ok=True, detail=str(mode) if mode == "wal" else _TOGETHER)
    installed = installation.is_installed(connection)
    fix = f"headrace sqlite install {path}"
    detail = "installed" if installed else "Headrace's tables are not in the database"
    yield Finding("triggers", ok=installed, detail=detail, fix="" if installed else fix)
    found = shapes(connection, source.tables)
    if not found:
        detail = f"no table matches {', '.join(source.tables)}"
        yield Finding("tables", ok=False, detail=detail, fix="Check `tables` of the source.")
    refused = installation.refusals(connection, source.tables)
    known = {each.path for each in installation.layouts(connection)} if installed else set()
    for shape in found:
        yield _table(shape.path, refused.get(shape.path, ""), captured=shape.path in known)
    if installed:
        yield from _readers(source, connection)


def _table(path: str, refused: str, *, captured: bool) -> Finding:
    if refused:
        return Finding(f"table {path}", ok=False, detail=refused, fix="Give it another key.")
    detail = "has its triggers" if captured else "will get its triggers"
    return Finding(f"table {path}", ok=True, detail=detail)


def _readers(source: SqliteSettings, connection: apsw.Connection) -> Iterator[Finding]:
    """Whoever does not come back keeps every entry."""
    query = """SELECT name, (SELECT last FROM headrace_state) - acked FROM headrace_readers
               WHERE name <> ?"""
    for name, behind in rows(connection, query, source.name):
        detail = f"source {name} has not stored {behind} entries, which are kept for it"
        yield Finding(f"reader {name}", ok=True, detail=detail)
