"""Databases of PostgreSQL as a contract's tests use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from headrace.sources import Source
from headrace.testing import PostgresDatabase, PostgresServer, Value

VALUES = {
    "integer": Value("integer", "-2147483648", "-2147483648"),
    "big integer": Value("bigint", "9223372036854775807", "9223372036854775807"),
    "decimal": Value(
        "numeric(30,10)", "12345678901234567890.1", '"12345678901234567890.1000000000"'
    ),
    "text": Value(
        "text", r"""E'a "quoted" \\ word\nand\tmore'""", r'"a \"quoted\" \\ word\nand\tmore"'
    ),
    "unicode": Value("varchar(50)", "'é 水 🌊'", '"é 水 🌊"'),
    "binary": Value("bytea", r"'\x00ff10'", '"AP8Q"'),
    "date": Value("date", "'2024-02-29'", '"2024-02-29"'),
    "time": Value("time", "'23:59:59.5'", '"23:59:59.5"'),
    "moment": Value("timestamp", "'2025-01-15 10:30:00'", '"2025-01-15T10:30:00Z"'),
    "moment in a zone": Value(
        "timestamptz", "'2025-01-15 10:30:00+02'", '"2025-01-15T08:30:00+00:00"'
    ),
    "document": Value("jsonb", """'{"b": [1.50, null]}'""", '{"b": [1.50, null]}'),
    "array": Value("numeric[]", "'{1.50,NULL}'", '["1.50",null]'),
    "float": Value("float8", "'-0.1'", "-0.1"),
    "no number": Value("float8", "'NaN'", '"NaN"'),
}


class Connected:
    """A session of PostgreSQL."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._connection = connection
        self.commit = connection.commit
        self.rollback = connection.rollback
        self.close = connection.close

    def execute(self, statement: str) -> Sequence[tuple[Any, ...]]:
        """Run one statement, and give its rows if it has any."""
        cursor = self._connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


@dataclass(frozen=True, slots=True)
class PostgresPlace:
    """A database of PostgreSQL, and a source over it."""

    database: PostgresDatabase
    make: Callable[[PostgresDatabase], Source]
    server: PostgresServer | None = None  # one that may be stopped
    elsewhere: PostgresServer | None = None  # another one
    schema: str = "public"

    def source(self) -> Source:
        """The source under test."""
        return self.make(self.database)

    def connect(self) -> Connected:
        """Another connection."""
        return Connected(self.database.connect(autocommit=False))

    def altered(self) -> None:
        """PostgreSQL tells by itself."""

    @contextmanager
    def another(self) -> Iterator[PostgresPlace]:
        """A database of the same name on another server."""
        with (self.elsewhere or self.database.server).database() as database:
            yield replace(self, database=database)

    def stop(self) -> None:
        """Stop the server."""
        if self.server is None:
            raise NotImplementedError("other tests use the server")
        self.server.stop("immediate")

    def start(self) -> None:
        """Start it again."""
        if self.server is not None:
            self.server.start()
