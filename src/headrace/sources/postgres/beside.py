"""What a snapshot beside the stream needs, while the other tables go on.

A temporary slot gives a point, as for every snapshot. The stream is followed to the point, where
the rows of the tables are forgotten and their changes are left out of the stream from then on.
Their rows are read while the stream goes on. Then the temporary slot sends what has happened to
these tables since the point, up to where the stream is; it stops there for a moment, and has them
again. Nothing is compared by key, so tables without one and values that are not sent again
(TOAST) come out right.

All of it stands in the log as transactions of the snapshot, at the position that the stream has
then: positions never run backwards.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...change.event import Change, Op, Table
from ...change.record import Records
from ...errors import HeadraceError, SourceError
from . import slot
from .catalog import Catalog
from .following import with_looks
from .pgoutput import Message
from .plan import progressed
from .position import PostgresPosition
from .receive import Received
from .replication import Replication
from .resume import PostgresResume, PostgresTableSnapshot
from .snapshot import Copied, Point
from .transactions import ANNOTATION, DDL, LOOK, PostgresAssembler

_set = msgspec.structs.force_setattr

# The columns of tables and of their partitions: whoever alters them makes new rows of these.
_COLUMNS_AS_THEY_ARE = """
    SELECT t.oid::bigint, coalesce(sum(hashtextextended(concat_ws(' ', kind, d.at, d.xmin), 0)), 0)
    FROM unnest(%s::oid[]) AS t(oid)
    CROSS JOIN LATERAL (SELECT relid::oid FROM pg_partition_tree(t.oid) UNION SELECT t.oid) p(part)
    CROSS JOIN LATERAL (
        SELECT 1 AS kind, concat(a.attrelid, ' ', a.attnum) AS at, a.xmin FROM pg_attribute a
        WHERE a.attrelid = p.part AND a.attnum > 0
        UNION ALL SELECT 2, d.oid::text, d.xmin FROM pg_attrdef d WHERE d.adrelid = p.part) d
    GROUP BY 1"""


class PendingPoint:
    """A point in the making: the server waits for open transactions, and nobody here does."""

    def __init__(self, replication: Replication, name: str, cancelled: threading.Event) -> None:
        """`cancelled` ends the session's command too."""
        self._replication = replication
        self._name = name
        self._cancelled = cancelled
        self._point: Point | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="postgres-point", daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        """Whether `point` has an answer."""
        return not self._thread.is_alive()

    def point(self) -> Point:
        """The point; raises what kept the server from making one."""
        self._thread.join()
        if isinstance(self._error, HeadraceError):
            raise self._error
        if self._error is not None:
            raise SourceError("no point could be made") from self._error
        assert self._point is not None
        return self._point

    def close(self) -> None:
        """Wait no longer, and end the session."""
        self._cancelled.set()
        self._thread.join()
        self._replication.close()

    def _run(self) -> None:
        try:
            self._point = slot.create_point(self._replication, self._name)
        except Exception as error:  # noqa: BLE001 - raised again by whoever asks
            self._error = error


class BesideAssembler(PostgresAssembler):
    """Collects what happens to some tables; what belongs to no table comes by the stream itself."""

    def _logical_message(self, message: Message, lsn: int) -> None:
        if message.transactional and message.prefix in (DDL, LOOK, ANNOTATION):
            super()._logical_message(message, lsn)

    def _add(self, op: Op, table: Table, lsn: int, payload: dict[str, Any]) -> None:
        if table.relation in self.live:
            super()._add(op, table, lsn, payload)


class BesideTables:
    """The tables of one snapshot beside the stream, and how far each has come."""

    def __init__(self, planned: PostgresResume, paths: Collection[str], point: Point) -> None:
        """`planned` is the resume as it would be if these tables alone had been begun."""
        self.resume = planned  # of these tables only; never stored
        self.paths = tuple(paths)
        self.point = point
        self._began = {path: planned.snapshots[path] for path in paths}
        self._columns: dict[int, int] = {}
        self._altered: set[str] = set()  # whose rows must be read once more

    @property
    def relations(self) -> dict[int, str]:
        """The tables by their oids."""
        return {snapshot.relation: path for path, snapshot in self._began.items()}

    @property
    def errored(self) -> dict[str, str]:
        """Those that cannot be read, and why."""
        return {path: why for path, why in self.resume.errored.items() if path in self._began}

    @property
    def all_read(self) -> bool:
        """Whether every row has been read."""
        return all(self.resume.snapshots[path].done for path in self.paths)

    def look(self, catalog: Catalog) -> None:
        """Remember the columns, as a catalog that shares the snapshot shows them."""
        self._columns = _columns(catalog, self.relations)

    def begun(self, stored: PostgresResume, path: str) -> PostgresResume:
        """The resume to store meanwhile: if this is interrupted, a table is read from its start."""
        known = stored.snapshots.get(path)
        if known is None or not self._is_same(path, known):
            return stored
        reading = self.resume.snapshots[path]
        return stored.with_snapshot(
            path, msgspec.structs.replace(reading, ranges=None, moved=(), again=True)
        )

    def progressed(self, stored: PostgresResume, copied: Copied) -> PostgresResume:
        """The resume to store after some rows."""
        self.resume = progressed(self.resume, copied)
        return self.begun(stored, copied.task.table.path)

    def followed(self, received: Received) -> None:
        """Note what their changes have brought."""
        self.resume = msgspec.structs.replace(
            with_looks(self.resume, received.looks),
            errored=self.resume.errored | received.errored,
            versions=self.resume.versions | received.versions,
        )
        self._altered |= received.again.keys() | received.gone

    def finished(self, stored: PostgresResume, catalog: Catalog) -> PostgresResume:
        """The resume in which they are complete, but those that were altered meanwhile."""
        columns = _columns(catalog, self.relations)
        for path, began in self._began.items():
            known = stored.snapshots.get(path)
            same = columns.get(began.relation) == self._columns.get(began.relation)
            same = same and path not in self._altered
            if known is None or not same or not self._is_same(path, known):
                continue  # it stays unread, and is read again
            stored = stored.with_snapshot(path, self.resume.snapshots[path])
            if path in self.resume.versions:
                stored = stored.with_version(path, self.resume.versions[path])
            if path in self.resume.errored:
                stored = stored.with_error(path, self.resume.errored[path])
        return stored

    def _is_same(self, path: str, known: PostgresTableSnapshot) -> bool:
        began = self._began[path]
        return (known.relation, known.published) == (began.relation, began.published)


def placed(changes: Sequence[Change], at: int, *, name: str = "") -> Sequence[Change]:
    """Changes that nobody has seen yet, put where the stream stands.

    `name` is what the ids of their transactions begin with.
    """
    position, last = PostgresPosition(at, at), PostgresPosition(at, at, at)
    if isinstance(changes, Records):
        return changes.at((position, last))
    for change in changes:
        _set(change, "position", last if change.last else position)
        transaction = change.transaction
        if not transaction.id.startswith(name):
            _set(transaction, "id", name + transaction.id)  # its changes share this one value
    return changes


def _columns(catalog: Catalog, relations: Mapping[int, str] | Iterable[int]) -> dict[int, int]:
    return {oid: int(seen) for oid, seen in catalog.rows(_COLUMNS_AS_THEY_ARE, list(relations))}
