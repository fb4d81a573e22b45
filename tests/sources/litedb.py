"""Databases of SQLite: written to, captured, and compared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw

from headrace.sources import Source
from headrace.sources.sqlite import Sqlite, alter, install
from headrace.testing import Value

SOURCE = "shop"

VALUES = {
    "integer": Value("integer", "-2147483648", "-2147483648"),
    "big integer": Value("bigint", "9223372036854775807", "9223372036854775807"),
    "decimal": Value("numeric(30,10)", "'12345678901234567.1'", "12345678901234568"),
    "text": Value(
        "text", """'a "quoted" \\ word\nand\tmore'""", r'"a \"quoted\" \\ word\nand\tmore"'
    ),
    "unicode": Value("varchar(50)", "'é 水 🌊'", '"é 水 🌊"'),
    "binary": Value("blob", "x'00ff10'", '"AP8Q"'),
    "date": Value("date", "'2024-02-29'", '"2024-02-29"'),
    "time": Value("time", "'23:59:59.5'", '"23:59:59.5"'),
    "moment": Value("timestamp", "'2025-01-15 10:30:00'", '"2025-01-15 10:30:00"'),
    "real": Value("real", "0.1", "0.1"),
    "whole real": Value("double", "-5", "-5.0"),
    "infinity": Value("real", "-9e999", '"-Infinity"'),
    "blob in text": Value("text", "x'ff'", '{"base64":"/w=="}'),
    "text in blob": Value("blob", "'hi'", '{"text":"hi"}'),
    "text in integer": Value("integer", "'many'", '"many"'),
    "anything": Value("", "1.0", "1.0"),
    "text with a zero": Value("text", "'a' || char(0) || 'b'", r'"a\u0000b"'),
}


def sqlite(path: Path, **settings: Any) -> Sqlite:
    """The source that captures a database."""
    given: dict[str, Any] = {"name": SOURCE, "path": str(path), "poll_seconds": 0.005}
    return Sqlite(**given | settings)


class Connected:
    """A session of SQLite, by the library that Headrace uses.

    Locks of a file belong to the process: two libraries in one would not keep each other out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = apsw.Connection(str(path))
        self._connection.set_busy_timeout(20_000)

    def execute(self, statement: str) -> Sequence[tuple[Any, ...]]:
        """Run one statement, and give its rows if it has any."""
        if statement.startswith("ALTER"):
            alter(str(self._path), statement)
            return []
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")
        return self._connection.execute(statement).fetchall()

    def commit(self) -> None:
        """End the transaction."""
        if self._connection.in_transaction:
            self._connection.execute("COMMIT")

    def rollback(self) -> None:
        """End the transaction as if it had never been."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Let go of the database."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class SqlitePlace:
    """A database of SQLite, and a source over it."""

    path: Path
    wal: bool = True
    schema: str = "main"

    def source(self) -> Source:
        """The source under test."""
        return sqlite(self.path)

    def connect(self) -> Connected:
        """Another connection."""
        return Connected(self.path)

    def altered(self) -> None:
        """What the docs tell people to run after DDL of their own."""
        install(str(self.path), ["*"], wal=self.wal)

    @contextmanager
    def another(self) -> Iterator[SqlitePlace]:
        """A database in another file."""
        folder = self.path.parent / "elsewhere"
        folder.mkdir()
        yield SqlitePlace(folder / self.path.name)

    def stop(self) -> None:
        """Take the file away."""
        os.rename(self.path, f"{self.path}.away")

    def start(self) -> None:
        """Put it back."""
        os.rename(f"{self.path}.away", self.path)
