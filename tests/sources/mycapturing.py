"""A database of MySQL or MariaDB, captured into a log of its own while a test writes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.capture import Capture
from headrace.change.event import Change, Op
from headrace.change.replay import Replay, Row, TableName
from headrace.log import Log
from headrace.sources import Phase, Status
from headrace.sources.mysql import Mysql
from headrace.sources.mysql.resume import MysqlResume, decode, file_number
from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase
from tests.sources.myplaces import mysql

TIMEOUT = 240.0  # seconds; far more than anything here takes, also on a busy machine


class Captured:
    """A running capture, and what it has put into the log."""

    def __init__(self, database: MysqlDatabase, log: Log, source: Mysql) -> None:
        self.database = database
        self.log = log
        self.source = source
        self.capture = Capture(source, log)
        self.snapshot_end = 0  # the last sequence of the first snapshot

    def start(self) -> None:
        """Begin, without waiting."""
        self.capture = Capture(self.source, self.log)
        self.capture.start()

    def restart(self) -> None:
        """Stop and begin again, as a new process would."""
        self.capture.stop()
        self.start()

    @property
    def status(self) -> Status:
        """How the capture is doing."""
        return self.capture.status()

    @property
    def resume(self) -> MysqlResume:
        """How far the log is."""
        stored = self.log.resume(self.source.name)
        assert stored is not None
        resume = decode(stored)
        assert isinstance(resume, MysqlResume)
        return resume

    def until(self, condition: Callable[[], Any], message: str, timeout: float = TIMEOUT) -> None:
        """Wait for a condition; fails at once when the capture has halted meanwhile."""

        def holds() -> bool:
            status = self.status
            assert status.phase is not Phase.HALTED, f"{status.error} {status.hint}"
            return bool(condition())

        wait_until(holds, timeout=timeout, message=message)

    def until_streaming(self) -> None:
        """Wait until every snapshot is complete."""
        self.until(lambda: self.status.phase is Phase.STREAMING, "the capture streams")

    def until_halted(self) -> Status:
        """Wait until the capture has given up, and return its status."""
        wait_until(lambda: self.status.phase is Phase.HALTED, timeout=TIMEOUT, message="halted")
        return self.status

    def until_caught_up(self) -> None:
        """Wait until everything that is committed now is in the log, snapshots included."""
        file, position = self.database.server.end
        end = file_number(file), position
        self.until(
            lambda: self.resume.offset >= end and not self.resume.to_snapshot,
            f"the log holds everything up to {end}",
        )
        self.log.drop_cursor("nobody")  # waits for its turn: what is written by now is visible

    def changes(self, *ops: Op, table: str = "", after: int = 0) -> list[Change]:
        """What the log holds once it has caught up."""
        self.until_caught_up()
        return [
            change
            for change in self.log.read(after, limit=1 << 30)
            if (not ops or change.op in ops) and (not table or change.table.name == table)
        ]

    def streamed(self, *ops: Op, table: str = "") -> list[Change]:
        """What came after the first snapshot."""
        return self.changes(*ops, table=table, after=self.snapshot_end)

    def rows(self, table: str, *, surprises: bool = False) -> list[Row]:
        """The rows of a table that the log adds up to."""
        replay = Replay.of(self.changes())
        if not surprises:
            assert replay.surprises == []
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
        try:
            if start:
                feed.start()
                feed.until_streaming()
                feed.snapshot_end = log.latest_sequence
            yield feed
        finally:
            feed.capture.stop()


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
