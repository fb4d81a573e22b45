"""The part of a flow that copies tables beside the stream, while the others go on."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing

import msgspec

from ...change.event import Batch, Change
from ...errors import SourceError
from .. import Register
from . import slot
from .beside import BesideAssembler, BesideTables, PendingPoint, placed
from .plan import SnapshotPlan, without_error
from .receive import Receiver
from .replication import Replication
from .resume import PostgresResume
from .session import PostgresSession
from .snapshot import Point, PostgresSnapshotReader
from .waiters import WaiterWatch

_LOOK_SECONDS = 0.05  # between two looks whether the server has made a point
_POLL_SECONDS = 0.01  # between two looks at the stream while a snapshot is read beside it
_ROUNDS = 50  # in which tables come nearer to a stream that does not stand still
_NEAR_SECONDS = 1.0  # that the stream may stand still, more or less, for tables beside it


class BesideFlow(ABC):
    """Copies tables at a point, and brings them to where the stream is, which goes on meanwhile.

    The stream itself, and how tables are planned and read, is the flow's.
    """

    _session: PostgresSession
    _register: Register
    _resume: PostgresResume
    _closing: threading.Event
    _unreadable: dict[str, str]
    _yielded: str
    _follower: Receiver | None = None  # of tables that are copied beside the stream
    _no_point = ""  # why no snapshot beside the stream can begin

    @abstractmethod
    def _batch(self, changes: Sequence[Change]) -> Batch: ...

    @abstractmethod
    def _turn(self, seconds: float) -> Generator[Batch, None, bool]: ...

    @abstractmethod
    def _receive(self) -> Receiver: ...

    @abstractmethod
    def _follow_to(self, lsn: int) -> Iterator[Batch]: ...

    @abstractmethod
    def _reach_boundary(self, receiver: Receiver) -> Iterator[Batch]: ...

    @abstractmethod
    def _reached(self, lsn: int) -> None: ...

    @abstractmethod
    def _name_publications(self, lsn: int) -> None: ...

    @abstractmethod
    def _options(self) -> dict[str, str]: ...

    @abstractmethod
    def _status_seconds(self) -> float: ...

    @abstractmethod
    def _plans(
        self, point: Point, paths: Collection[str]
    ) -> list[SnapshotPlan[PostgresResume]]: ...

    @abstractmethod
    def _watching(self, exporter: Replication) -> WaiterWatch: ...

    @abstractmethod
    def _copier_at(self, point: Point, watch: WaiterWatch) -> PostgresSnapshotReader: ...

    @abstractmethod
    def _has_yielded(self, watch: WaiterWatch) -> None: ...

    def _beside(self, paths: Collection[str]) -> bool:
        """Whether tables are copied while the others go on: none was begun, and others stream."""
        snapshots = self._resume.snapshots
        others = any(snapshot.done for snapshot in snapshots.values())
        return others and not self._yielded and all(snapshots[p].ranges is None for p in paths)

    def _copy_beside(self, paths: Collection[str]) -> Iterator[Batch]:
        """Copy tables at a point, and bring them to where the stream is, while it goes on."""
        self._session.catalog.beat()
        name, cancelled = slot.temporary_name(self._session.source.slot_name), threading.Event()
        try:
            holder = self._session.address.replicate(cancelled)
        except SourceError as error:
            self._no_point = str(error)
            return
        with closing(PendingPoint(holder, name, cancelled)) as pending:
            while not pending.ready() and not self._closing.is_set():
                yield from self._turn(_LOOK_SECONDS)
            if self._closing.is_set():
                return
            try:
                point = pending.point()
            except SourceError as error:
                self._no_point = str(error)
                return
            self._no_point = ""
            yield from self._follow_to(point.lsn)
            self._name_publications(point.lsn)
            if self._closing.is_set():
                return
            tables, plans = self._planned(point, paths)
            with self._watching(holder) as watch:
                yield from self._copy_interleaved(tables, plans, watch)
            if tables.all_read and not self._closing.is_set():
                yield from self._catch_up(tables, holder, name)

    def _planned(
        self, point: Point, paths: Collection[str]
    ) -> tuple[BesideTables, list[SnapshotPlan[PostgresResume]]]:
        with closing(self._session.another_catalog()) as catalog:
            catalog.share(point.snapshot)
            there = self._resume.snapshots.keys() - self._unreadable.keys()
            known = [path for path in paths if path in there]
            plans = self._plans(point, known)
            tables = BesideTables(plans[-1].resume if plans else self._resume, known, point)
            tables.look(catalog)
        return tables, plans

    def _copy_interleaved(
        self, tables: BesideTables, plans: list[SnapshotPlan[PostgresResume]], watch: WaiterWatch
    ) -> Iterator[Batch]:
        """Read rows; the stream, which has stopped at the point, goes on without these tables."""
        copier = self._copier_at(tables.point, watch)
        for path, plan in zip(tables.paths, plans, strict=True):
            resume = without_error(self._resume, path)
            resume = msgspec.structs.replace(resume, versions=plan.resume.versions)
            self._resume = tables.begun(resume, path)
            yield self._batch(placed(plan.announced, self._resume.position))
        self._receive().renew(self._resume)
        tasks = [task for plan in plans for task in plan.tasks]
        with closing(copier.polled(tasks, _POLL_SECONDS)) as reading:
            for copied in reading:
                if self._closing.is_set():
                    return
                if copied is not None:
                    self._resume = tables.progressed(self._resume, copied)
                    yield self._batch(placed(copied.changes, self._resume.position))
                yield from self._turn(0.0)
        self._has_yielded(watch)

    def _catch_up(self, tables: BesideTables, holder: Replication, name: str) -> Iterator[Batch]:
        """Bring tables from their point to where the stream is, and make them part of it."""
        self._follower = follower = self._follow(tables, holder, name)
        with closing(follower):
            for _ in range(_ROUNDS):
                began = time.monotonic()
                yield from self._followed(tables, follower, streaming=True)
                if time.monotonic() - began < _NEAR_SECONDS:
                    break
                follower.set_boundary(self._resume.position)
            receiver = self._receive()
            receiver.pause()
            yield from self._reach_boundary(receiver)
            self._reached(receiver.position)
            follower.set_boundary(self._resume.position)
            yield from self._followed(tables, follower, streaming=False)
        self._follower = None
        if not self._closing.is_set():
            self._resume = tables.finished(self._resume, self._session.catalog)
            yield self._batch([])
            receiver.renew(self._resume)

    def _follow(self, tables: BesideTables, holder: Replication, name: str) -> Receiver:
        """Begin to read the changes of tables after their point."""
        point, resume = tables.point, tables.resume
        holder.start(name, point.lsn, self._options())
        catalog = self._session.another_catalog()
        assembler = BesideAssembler(catalog, self._register, after=point.lsn, xid=resume.xid)
        assembler.renew(tables.relations, tables.errored, resume.versions, resume.looks)
        follower = Receiver(holder, assembler, catalog, status_seconds=self._status_seconds())
        follower.start(acked=point.lsn, boundary=self._resume.position)
        return follower

    def _followed(
        self, tables: BesideTables, follower: Receiver, *, streaming: bool
    ) -> Iterator[Batch]:
        """Changes of tables up to a boundary; meanwhile the stream goes on, or stands still."""
        name, inside = f"snapshot-{tables.point.name}-", False
        while not self._closing.is_set() and (inside or not follower.reached_boundary()):
            received = follower.take(_POLL_SECONDS)
            if received is not None:
                changes = placed(received.changes, self._resume.position, name=name)
                inside = received.position is None
                if inside:
                    yield Batch(changes, None)
                else:
                    tables.followed(received)
                    yield self._batch(changes)
                    follower.ack(received.position or 0)
            if streaming and not inside:
                yield from self._turn(0.0)
