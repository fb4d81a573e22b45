"""Databases of MySQL and MariaDB as tests use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pymysql

from headrace.secret import Secret
from headrace.sources import Source
from headrace.sources.mysql import Mysql
from headrace.testing import Value
from headrace.testing.mysql import MysqlDatabase, MysqlServer

VALUES = {
    "integer": Value("int", "-2147483648", "-2147483648"),
    "big integer": Value("bigint", "9223372036854775807", "9223372036854775807"),
    "unsigned": Value("bigint unsigned", "18446744073709551615", "18446744073709551615"),
    "decimal": Value(
        "decimal(30,10)", "12345678901234567890.1", '"12345678901234567890.1000000000"'
    ),
    "boolean": Value("tinyint(1)", "1", "true"),
    "text": Value(
        "text", r"""'a "quoted" \\ word\nand\tmore'""", r'"a \"quoted\" \\ word\nand\tmore"'
    ),
    "unicode": Value("varchar(50)", "'é 水 🌊'", '"é 水 🌊"'),
    "latin": Value("varchar(50) character set latin1", "'é €'", '"é €"'),
    "binary": Value("varbinary(10)", "x'00ff10'", '"AP8Q"'),
    "padded": Value("binary(4)", "x'0100'", '"AQAAAA=="'),
    "blob": Value("blob", "x'00ff10'", '"AP8Q"'),
    "date": Value("date", "'2024-02-29'", '"2024-02-29"'),
    "time": Value("time(1)", "'-23:59:59.5'", '"-23:59:59.5"'),
    "moment": Value("datetime", "'2025-01-15 10:30:00'", '"2025-01-15 10:30:00"'),
    "moment in a zone": Value("timestamp null", "'2025-01-15 10:30:00'", '"2025-01-15T10:30:00Z"'),
    "document": Value("json", """'{"b": [1.5, null]}'""", '{"b": [1.5, null]}'),
    "label": Value("enum('small','große')", "'große'", '"große"'),
    "labels": Value("set('a','b','c')", "'a,c'", '["a","c"]'),
    "double": Value("double", "-0.1", "-0.1"),
    "bits": Value("bit(10)", "b'1000000001'", "513"),
    "year": Value("year", "2024", "2024"),
}


def mysql(database: MysqlDatabase, **settings: Any) -> Mysql:
    """The source that captures a database."""
    given: dict[str, Any] = {"name": "shop", "url": Secret(database.url), "heartbeat_seconds": 0.5}
    return Mysql(**(given | settings))


class Connected:
    """A session."""

    def __init__(self, connection: pymysql.Connection[Any]) -> None:
        self._connection = connection
        self.commit = connection.commit
        self.rollback = connection.rollback
        self.close = connection.close

    def execute(self, statement: str) -> Sequence[tuple[Any, ...]]:
        """Run one statement, and give its rows if it has any."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())


@dataclass(frozen=True, slots=True)
class MysqlPlace:
    """A database, and a source over it."""

    database: MysqlDatabase
    make: Callable[[MysqlDatabase], Source] = mysql
    elsewhere: MysqlServer | None = None  # another one

    @property
    def schema(self) -> str:
        """A database is a schema."""
        return self.database.name

    def source(self) -> Source:
        """The source under test."""
        return self.make(self.database)

    def connect(self) -> Connected:
        """Another connection."""
        return Connected(self.database.connect(autocommit=False))

    def altered(self) -> None:
        """The binary log shows it by itself."""

    @contextmanager
    def another(self) -> Iterator[MysqlPlace]:
        """A database of another server."""
        assert self.elsewhere is not None
        with self.elsewhere.database() as database:
            yield replace(self, database=database)

    def stop(self) -> None:
        """Stop the server."""
        self.database.server.stop("immediate")

    def start(self) -> None:
        """Start it again."""
        self.database.server.start()
