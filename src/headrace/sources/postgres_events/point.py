"""An event source's tables as a snapshot of the server shows them, beside whoever captures it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from ...change.event import Batch, Position
from ...errors import SourceUnavailable
from .. import Register
from ..pace import RowPace
from ..postgres.plan import Planner
from ..postgres.point import PlannedCopy, plans_at
from ..postgres.snapshot import PostgresSnapshotReader
from ..postgres.waiters import WaiterWatch
from ..resume import Restart, decode
from .catalog import EventCatalog
from .position import EventTablePosition
from .resume import EventResume, TransactionSnapshot, seen_in
from .settings import PostgresEventsSettings


@dataclass(frozen=True, slots=True)
class SeenPoint:
    """Which transactions a snapshot sees, and rows as it shows them."""

    seen: TransactionSnapshot
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
        """Whether the snapshot sees a transaction.

        The log has transactions in the order in which they were found. Of one row, those that the
        snapshot sees come before the others: who changes a row waits for whoever did so before.
        """
        assert isinstance(position, EventTablePosition)
        return position.transaction < self.seen.after and position.transaction not in self.seen.open

    def reached_by(self, resume: bytes) -> bool:
        """Whether the log has seen all that the snapshot sees."""
        stored = seen_in(resume)
        late = {xid for xid in stored.open if xid < self.seen.after}
        return stored.after >= self.seen.after and late <= set(self.seen.open)


@contextmanager
def seen_point(
    source: PostgresEventsSettings, stored: bytes, tables: Sequence[str], register: Register
) -> Iterator[SeenPoint]:
    """Tables under a snapshot that lives as long as its transaction."""
    resume = decode(stored, EventResume)
    if isinstance(resume, Restart):
        raise SourceUnavailable("a new snapshot of all tables is about to be taken")
    routed = source.outbox.table if source.outbox else ""
    with (
        closing(_catalog(source, resume.origin)) as holder,
        closing(_catalog(source, resume.origin)) as catalog,
    ):
        address = dataclasses.replace(source.address, encoding=catalog.row_encoding())
        point = holder.point()
        catalog.share(point.snapshot)
        planner = Planner(catalog, register, publication="", point=point)
        plans = plans_at(planner, resume, [path for path in tables if path != routed])
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
                seen = TransactionSnapshot.of(point.seen)
                yield SeenPoint(seen, PlannedCopy(plans, reader, watch))
            finally:
                reader.close()


def _catalog(source: PostgresEventsSettings, origin: str) -> EventCatalog:
    connection = source.address.connect()
    return EventCatalog(connection, source=source.name, schema=source.schema, origin=origin)
