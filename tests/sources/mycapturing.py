"""A database of MySQL or MariaDB, captured into a log of its own while a test writes to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.change.event import Op
from headrace.change.replay import Replay, Row, TableName
from headrace.log import Log
from headrace.sources.mysql import Mysql
from headrace.sources.mysql.resume import MysqlResume, decode, file_number
from headrace.testing.mysql import MysqlDatabase
from tests.sources.captures import CapturedSource
from tests.sources.myplaces import mysql


class Captured(CapturedSource[Mysql]):
    """A running capture, and what it has put into the log."""

    def __init__(self, database: MysqlDatabase, log: Log, source: Mysql) -> None:
        super().__init__(log, source)
        self.database = database

    @property
    def resume(self) -> MysqlResume:
        """How far the log is."""
        stored = self.log.resume(self.source.name)
        assert stored is not None
        resume = decode(stored)
        assert isinstance(resume, MysqlResume)
        return resume

    def until_caught_up(self) -> None:
        """Wait until everything that is committed now is in the log, snapshots included."""
        file, position = self.database.server.end
        end = file_number(file), position
        self.until(
            lambda: self.resume.offset >= end and not self.resume.to_snapshot,
            f"the log holds everything up to {end}",
        )
        self.log.drop_cursor("nobody")  # waits for its turn: what is written by now is visible

    def rows(self, table: str, *, surprises: bool = False) -> list[Row]:
        """The rows of a table that the log adds up to."""
        replay = Replay.of(self.changes())
        if not surprises:
            assert replay.surprises == [], replay.surprises
        return ordered(replay.rows(TableName(self.source.name, self.database.name, table)))

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run statements on a connection of their own."""
        return self.database.execute(statement, *parameters)


@contextmanager
def captured(
    database: MysqlDatabase, folder: Path, *, start: bool = True, **settings: Any
) -> Iterator[Captured]:
    """Capture a database; the block begins after the first snapshot."""
    with Log.open(folder / "log") as log:
        feed = Captured(database, log, mysql(database, **settings))
        with feed.running(start=start):
            yield feed


def image(data: bytes | None) -> Any:
    """An image as Python values."""
    return None if data is None else msgspec.json.decode(data)


def ordered(rows: list[Row]) -> list[Row]:
    """Rows in an order that depends on nothing but themselves."""
    return sorted(rows, key=lambda row: repr(sorted(row.items())))


def numbers(count: int) -> str:
    """A table for FROM, whose column `seq` has the numbers from one on."""
    digits = " UNION ALL ".join(
        f"SELECT {digit}{' AS d' if not digit else ''}" for digit in range(10)
    )
    places = range(len(str(count)))
    tables = ", ".join(f"({digits}) AS d{place}" for place in places)
    number = " + ".join(f"{10**place} * d{place}.d" for place in places)
    return f"(SELECT 1 + {number} AS seq FROM {tables} HAVING seq <= {count}) AS numbers"


def snapshot_rows(database: MysqlDatabase, folder: Path) -> dict[str, list[Row]]:
    """The rows of every table as a snapshot of its own, taken now, shows them."""
    with captured(database, folder, name="other") as feed:
        replay = Replay.of(feed.changes(Op.READ))
        return {name.name: ordered(replay.rows(name)) for name in replay.tables}
