"""A PostgreSQL source's tables at a point of its stream, beside the session that captures it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import msgspec

from ...change.event import Batch, Position
from ...errors import SourceError, SourceUnavailable
from .. import Register
from ..pace import RowPace
from ..resume import Restart, decode
from . import slot
from .catalog import Catalog
from .plan import Planner, SnapshotPlan
from .position import PostgresPosition
from .resume import PostgresResume, PostgresTableSnapshot, PostgresTablesResume
from .settings import PostgresSettings
from .snapshot import PostgresSnapshotReader
from .waiters import WaiterWatch

_END = b"{}"  # after each batch; nobody goes on from here


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """The tables of a point, and what reads them."""

    plans: Sequence[SnapshotPlan[PostgresTablesResume]]
    reader: PostgresSnapshotReader
    watch: WaiterWatch

    def batches(self) -> Iterator[Batch]:
        """The columns of each table, then the rows of all."""
        for plan in self.plans:
            yield Batch(plan.announced, _END)
        for copied in self.reader.copy([task for plan in self.plans for task in plan.tasks]):
            if copied.error:
                raise SourceUnavailable(f"{copied.task.table.path} cannot be read: {copied.error}")
            yield Batch(copied.changes, _END)
        self.expect_nobody_waits()

    def expect_nobody_waits(self) -> None:
        """Give way to a statement that waits, also for the snapshot alone."""
        if self.watch.yielded:
            raise SourceUnavailable(
                f"a statement had waited for a lock on {self.watch.yielded}, so it is not read on"
            )


def plans_at(
    planner: Planner, resume: PostgresTablesResume, tables: Sequence[str]
) -> list[SnapshotPlan[PostgresTablesResume]]:
    """How to read tables from their first rows, whatever the log has of them."""
    whole = {
        path: PostgresTableSnapshot(resume.snapshots[path].relation)
        for path in tables
        if path in resume.snapshots
    }
    unread = msgspec.structs.replace(resume, snapshots=whole, versions={})
    return [planner.plan(unread, path) for path in whole]


@dataclass(frozen=True, slots=True)
class WalPoint:
    """A place of the write-ahead log, and rows as they were there."""

    lsn: int
    copy: PlannedCopy

    @property
    def left_out(self) -> Mapping[str, str]:
        """Every table can be read."""
        return {}

    def batches(self) -> Iterator[Batch]:
        """The rows."""
        return self.copy.batches()

    def expect_nobody_waits(self) -> None:
        """Give way."""
        self.copy.expect_nobody_waits()

    def covers(self, position: Position) -> bool:
        """Whether a transaction's commit lies before the point."""
        assert isinstance(position, PostgresPosition)
        return position.commit_lsn < self.lsn

    def reached_by(self, resume: bytes) -> bool:
        """Whether the stream was followed up to the point."""
        return msgspec.json.decode(resume, type=_Reached).position >= self.lsn


class _Reached(msgspec.Struct, frozen=True):
    position: int = 0


@contextmanager
def wal_point(
    source: PostgresSettings, stored: bytes, tables: Sequence[str], register: Register
) -> Iterator[WalPoint]:
    """Tables at the place of a slot that dies with its session."""
    resume = decode(stored, PostgresResume)
    if isinstance(resume, Restart):
        raise SourceUnavailable("a new snapshot of all tables is about to be taken")
    origin = resume.origin
    with closing(Catalog(source.address.connect(), source=source.name, origin=origin)) as catalog:
        address = dataclasses.replace(source.address, encoding=catalog.row_encoding())
        with closing(address.replicate(threading.Event())) as holder:
            point = slot.create_point(holder, slot.temporary_name(source.slot_name))
            # In an idle database nothing else would bring the stream beyond the point. A standby
            # cannot write; there the primary's next commit does.
            with suppress(SourceError):
                catalog.beat()
            catalog.share(point.snapshot)
            planner = Planner(catalog, register, publication=source.publication_name, point=point)
            plans = plans_at(planner, resume, tables)
            catalog.run("COMMIT")
            with WaiterWatch(source.address.connect, exporter=holder.session) as watch:
                reader = PostgresSnapshotReader(
                    address,
                    point,
                    watch,
                    workers=source.snapshot_workers,
                    pace=RowPace(source.snapshot_rows_per_second),
                )
                try:
                    yield WalPoint(point.lsn, PlannedCopy(plans, reader, watch))
                finally:
                    reader.close()
