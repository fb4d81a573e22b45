"""Connections to a SQLite database, and what its errors mean."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import apsw

from ...errors import SourceError, SourceRefused, SourceUnavailable

BUSY_MILLISECONDS = 5000  # how long to wait for whoever holds the lock

_PAGE_BYTES = 16 << 20  # from here on a page of rows is full, however few they are

Row = tuple[Any, ...]

_REFUSED = (apsw.ReadOnlyError, apsw.PermissionsError, apsw.AuthError, apsw.NotADBError)


def connect(path: str) -> apsw.Connection:
    """Open a database that exists."""
    with classified(path):
        if not os.path.exists(path):
            raise SourceUnavailable(f"there is no file {path}")
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE)
        connection.set_busy_timeout(BUSY_MILLISECONDS)
        # What is written here may be learned anew, so a commit need not wait for the disk.
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection


@contextmanager
def classified(path: str) -> Iterator[None]:
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


def page(found: Iterable[Row], most: int) -> list[Row]:
    """The next rows: so many, or fewer where they are large."""
    taken: list[Row] = []
    size = 0
    for row in found:
        taken.append(row)
        size += weight(row)
        if len(taken) >= most or size >= _PAGE_BYTES:
            break
    return taken


def weight(values: Iterable[Any]) -> int:
    """How much of the memory texts and blobs take."""
    return sum([len(value) for value in values if isinstance(value, (str, bytes))])


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
