"""A MySQL source's tables at a place of the binary log, beside the session that captures it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import msgspec

from ...change.event import Batch, Position
from ...errors import SourceUnavailable
from .. import Register
from ..pace import RowPace
from .aside import LOCK_SECONDS, anyone_waits
from .catalog import BinlogEnd, FoundTable, MysqlCatalog
from .decode.path import TablePath
from .plan import MysqlTablePlan, plan
from .position import MysqlPosition
from .resume import MysqlRestart, MysqlResume, MysqlTableSnapshot, decode, file_number
from .settings import MysqlSettings
from .snapshot import MysqlSnapshot, UnreadableTable

_END = b"{}"  # after each batch; nobody goes on from here
_LOCKED = "its storage engine has no transactions, so it would have to be locked against writers"


@dataclass(frozen=True, slots=True)
class BinlogPoint:
    """A place of the binary log, and rows as they were there."""

    end: BinlogEnd
    snapshot: MysqlSnapshot
    plans: Mapping[TablePath, MysqlTablePlan]
    catalog: MysqlCatalog
    pace: RowPace
    left_out: Mapping[str, str]

    def batches(self) -> Iterator[Batch]:
        """The columns of each table, then the rows of all."""
        for each in self.plans.values():
            yield Batch(each.announced, _END)
        looked = time.monotonic()
        tasks = [each.task() for each in self.plans.values()]
        with closing(self.snapshot.copy(tasks, self.pace)) as reading:
            try:
                for copied in reading:
                    if copied is not None and copied.error:
                        raise SourceUnavailable(f"{copied.task.path} cannot be read")
                    if copied is not None and copied.changes:
                        yield Batch(copied.changes, _END)
                    if time.monotonic() - looked > LOCK_SECONDS / 2:
                        looked = time.monotonic()
                        self.expect_nobody_waits()
            except UnreadableTable as error:
                raise SourceUnavailable(f"{error.path}: {error.reason}") from error

    def expect_nobody_waits(self) -> None:
        """Give way to a statement that waits, which the server shows to those who may see it."""
        if anyone_waits(self.catalog.rows("SHOW FULL PROCESSLIST"), self.plans):
            raise SourceUnavailable("a statement had waited for a lock, so it is not read on")

    def covers(self, position: Position) -> bool:
        """Whether a transaction begins before the point: none lies across it."""
        assert isinstance(position, MysqlPosition)
        begin = file_number(position.file), position.begin
        # A snapshot stands where the next transaction begins, and shows what is before.
        is_snapshot = position.position == position.begin
        return begin < self.end.offset or (is_snapshot and begin == self.end.offset)

    def reached_by(self, resume: bytes) -> bool:
        """Whether the stream was followed up to the point."""
        found = decode(resume)
        return isinstance(found, MysqlResume) and found.offset >= self.end.offset


@contextmanager
def binlog_point(
    source: MysqlSettings, stored: bytes, tables: Sequence[str], register: Register
) -> Iterator[BinlogPoint]:
    """Tables under snapshots that show one place of the binary log.

    A table whose storage engine has no transactions is left out: nobody could write to it until
    capture and sink have come to the point.
    """
    resume = decode(stored)
    if isinstance(resume, MysqlRestart):
        raise SourceUnavailable("a new snapshot of all tables is about to be taken")
    address = source.address
    catalog = MysqlCatalog(address.connect(), source=source.name, origin=resume.origin)
    with closing(catalog):
        wanted = [
            table
            for table in catalog.candidates(source.wants)
            if str(table.path) in tables and table.path in resume.snapshots
        ]
        found = {table.path: table for table in wanted if table.transactional}
        left_out = {str(table.path): _LOCKED for table in wanted if not table.transactional}
        workers = source.snapshot_workers
        snapshot = MysqlSnapshot.open(address, catalog, list(found.values()), workers=workers)
        with closing(snapshot):
            for table in found.values():
                snapshot.hold(table)
            plans = _plans(catalog, resume, found, register, snapshot.end)
            pace = RowPace(source.snapshot_rows_per_second)
            yield BinlogPoint(snapshot.end, snapshot, plans, catalog, pace, left_out)


def _plans(
    catalog: MysqlCatalog,
    resume: MysqlResume,
    found: Mapping[TablePath, FoundTable],
    register: Register,
    end: BinlogEnd,
) -> dict[TablePath, MysqlTablePlan]:
    """How to read tables from their first rows, whatever the log has of them."""
    whole = {path: MysqlTableSnapshot() for path in found}
    unread = msgspec.structs.replace(resume, snapshots=whole, versions={})
    plans: dict[TablePath, MysqlTablePlan] = {}
    for path, table in found.items():
        declared = catalog.declared(table.schema, table.name)
        if declared is None:
            raise SourceUnavailable(f"{path} was dropped when it was about to be read")
        described = register(catalog.table(table.schema, table.name, declared))
        plans[path] = plan(unread, table, described, declared, end)
    return plans
