"""Connections to a SQLite database, and what its errors mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import ConfigError, SourceError, SourceRefused, SourceUnavailable

try:
    import apsw
except ImportError as error:  # pragma: no cover - it is there wherever tests run
    raise ConfigError(
        "a source of type sqlite needs apsw", hint="Run: pip install 'headrace[sqlite]'"
    ) from error

BUSY_MILLISECONDS = 5000  # how long to wait for whoever holds the lock

Row = tuple[Any, ...]

_REFUSED = (apsw.ReadOnlyError, apsw.PermissionsError, apsw.AuthError, apsw.NotADBError)


def connect(path: str) -> apsw.Connection:
    """Open a database that exists."""
    with told(path):
        if not os.path.exists(path):
            raise SourceUnavailable(f"there is no file {path}")
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
        connection.set_busy_timeout(BUSY_MILLISECONDS)
        # What is written here may be learned anew, so a commit need not wait for the disk.
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection


@contextmanager
def told(path: str) -> Iterator[None]:
    """Turn SQLite's errors into ours."""
    try:
        yield
    except apsw.Error as error:
        raise classify(error, path) from error


def classify(error: apsw.Error, path: str) -> SourceError:
    """Who must act on an error of SQLite."""
    message = f"{path}: {error}"
    if isinstance(error, apsw.CorruptError):
        return SourceError(message, hint="Restore the database from a backup.")
    if isinstance(error, _REFUSED):
        hint = "Headrace must be allowed to write to the database and its folder."
        return SourceRefused(message, hint=hint)
    if isinstance(error, apsw.SQLError) and "no such table: headrace_" in str(error):
        return not_installed(path)
    # Locked, busy, no file descriptors, a disk that answers later, a schema that has changed.
    return SourceUnavailable(message)


def not_installed(path: str) -> SourceRefused:
    """Nothing has put the triggers there, or somebody has taken them away."""
    return SourceRefused(
        f"{path} has no triggers of Headrace", hint=f"Run `headrace sqlite install {path}`."
    )


def rows(connection: apsw.Connection, query: str, *values: object) -> list[Row]:
    """What a query returns."""
    return connection.execute(query, values).fetchall()


@contextmanager
def writing(connection: apsw.Connection) -> Iterator[None]:
    """A transaction that has the right to write from its start."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """A text as SQL writes it."""
    return "'" + value.replace("'", "''") + "'"
