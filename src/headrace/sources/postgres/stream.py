"""The flow of a PostgreSQL source, from connecting to closing.

A copy always happens at a point: a snapshot exported together with an LSN. The stream is followed
up to that LSN, the rows are read under that snapshot, and the stream goes on. The first copy of a
database, a copy taken up after a crash, a table that appears later and a table copied again are
all this one case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing

import msgspec

from ...change.event import Batch, Change
from ...errors import PositionLost, SourceUnavailable
from .. import Phase, Register, Status
from ..pace import RowPace
from ..resume import Restart
from ..stream import FlowStream, nothing_yet
from . import ddl, slot
from .catalog import inserts_name
from .following import read_anew, with_leaving, with_looks, without_gone
from .history import HistoryProof
from .interleaved import BesideFlow
from .lookout import Lookout, present_paths
from .looks import LookState
from .pgoutput import WalBegin
from .plan import Planner, SnapshotPlan, progressed
from .publications import PublishedTables
from .receive import Received, Receiver
from .replication import Replication
from .resume import AckedResume, LastCommit, PostgresResume
from .session import PostgresSession, with_inserts, with_tables
from .settings import PostgresSettings
from .snapshot import Point, PostgresSnapshotReader
from .transactions import PostgresAssembler
from .waiters import WaiterWatch, settled, yield_warnings

_WATCH_SECONDS = 10.0  # between two looks for new tables
_IDENTITY_SECONDS = 1.0  # between two looks whether a table has lost or got its identity
_FREE_SECONDS = 10.0  # until the server has noticed that a stream was ended
_LONGEST_STATUS = 10.0  # seconds between two words to the server
_TAKE_SECONDS = 0.5


class PostgresStream(FlowStream["_Flow"]):
    """An open PostgreSQL source."""

    def __init__(
        self, source: PostgresSettings, stored: PostgresResume | Restart | None, register: Register
    ) -> None:
        super().__init__(source.name)
        self._source = source
        self._stored = stored
        self._register = register

    def _begin(self) -> _Flow:
        session = PostgresSession.open(self._source, self._stored, self._closing)
        return _Flow(self._source, session, self._register, self._closing)


class _Flow(BesideFlow):
    """Batches of one connection: copy what is not copied, then stream."""

    def __init__(
        self,
        source: PostgresSettings,
        session: PostgresSession,
        register: Register,
        closing: threading.Event,
    ) -> None:
        self._source = source
        self._session = session
        self._register = register
        self._closing = closing
        self._phase = Phase.STARTING
        self._resume = session.resume
        self._published = session.published
        self._durable: Collection[str] = self._resume.inserts_only  # inserts only, in the log
        self._acked = self._resume.position  # the log has it, or the slot begins there
        self._replication = session.replication
        self._unreadable: dict[str, str] = {}  # tables that cannot be copied now, and why
        self._yielded = ""  # what a snapshot that was interrupted for somebody has let go of
        self._lookout = Lookout(session.catalog, source)
        self._anew: dict[str, str] = {}  # tables that DDL makes us read anew, and why
        self._looks: dict[str, LookState] = {}  # as the receiver has handed them over last
        self._receiver: Receiver | None = None
        self._copier: PostgresSnapshotReader | None = None
        self._pace = RowPace(source.snapshot_rows_per_second)
        self._stored_at = 0
        self._inside = False  # whether a transaction was handed over in part
        self._watched = self._looked = self._beat = time.monotonic()
        self._beat_position = 0

    def batches(self) -> Iterator[Batch]:
        """Everything, for ever."""
        try:
            yield from self._everything()
        except PositionLost as error:
            second = inserts_name(self._source.publication_name)
            if f'publication "{second}" does not exist' not in str(error):
                raise
            # Dropped by somebody: the next session creates it, and does not name it before that.
            raise SourceUnavailable(str(error)) from error

    def _everything(self) -> Iterator[Batch]:
        yield self._batch([])  # remembers the slot before anything is read from it
        self._lookout.let_go(self._resume.leaving)
        point = self._session.point
        beside = point is None and self._beside(self._to_copy())
        if not beside:
            yield from self._copy_rest(point)
        self._receive()
        self._phase = settled(self._yielded)
        if beside:
            yield from self._copy_rest()
        while not self._closing.is_set():
            if (yield from self._turn(_TAKE_SECONDS)):
                yield from self._copy_rest()
            self._phase = settled(self._yielded)

    def _turn(self, seconds: float) -> Generator[Batch, None, bool]:
        """What the stream has, up to the end of a transaction; whether tables were looked at."""
        receiver = self._receive()
        received = receiver.take(seconds)
        while received is not None or (self._inside and not self._closing.is_set()):
            if received is not None:
                yield self._received(received)
            if not self._inside:
                break
            received = receiver.take(_TAKE_SECONDS)  # nothing may come between its pieces
        if self._inside:
            return False
        self._heartbeat(receiver)
        before = self._resume
        looked = self._tables_published() or self._pending_anew()
        if self._resume != before:
            yield self._batch([])
        self._lookout.let_go(self._resume.leaving)
        return looked

    def ack(self, resume: bytes) -> None:
        """Everything up to `resume` is durable: the server may forget it."""
        acked = msgspec.json.decode(resume, type=AckedResume)
        self._acked, self._durable = acked.position, acked.inserts_only
        self._stored_at = time.time_ns() // 1000
        receiver = self._receiver
        if receiver is not None:
            receiver.ack(acked.position)

    def interrupt(self) -> None:
        """End waiting and copying."""
        if self._copier is not None:
            self._copier.close()
        for receiver in (self._follower, self._receiver):
            if receiver is not None:
                receiver.close()

    def release(self) -> None:
        """Let go of the server."""
        self._closing.set()
        self.interrupt()
        self._session.guard.close()
        self._session.catalog.close()
        if self._receiver is None:
            self._replication.close()

    def status(self) -> Status:
        """How it is doing."""
        warnings, refused = self._warnings(), self._published.refused  # before what replaces them
        resume, receiver = self._resume, self._receiver
        lag_bytes, lag_seconds = receiver.lag.now(time.time()) if receiver else (0, 0.0)
        return msgspec.structs.replace(
            resume.status(self._source.name, self._phase),
            lag_bytes=lag_bytes,
            lag_seconds=lag_seconds,
            heard_at=receiver.heard_at if receiver else self._stored_at,
            stored_at=self._stored_at,
            errored=resume.errored | refused | self._unreadable,
            warnings=warnings,
        )

    def _warnings(self) -> tuple[str, ...]:
        waits = not self._resume.snapshots and not self._published.refused
        missing = (nothing_yet(self._source.tables),) if waits else ()
        found = self._published.warnings | {
            path: f"it is read anew: {why}" for path, why in self._anew.items()
        }
        tables = (f"table {path}: {why}" for path, why in found.items())
        waiting = (f"snapshots wait: {self._no_point}",) if self._no_point else ()
        return (*missing, *tables, *waiting, *yield_warnings(self._yielded, _WATCH_SECONDS))

    def _batch(self, changes: Sequence[Change]) -> Batch:
        return Batch(changes, self._resume.encode())

    # -- streaming ------------------------------------------------------------------------------

    def _receive(self, boundary: int | None = None) -> Receiver:
        """The receiver, started when it is first needed."""
        if self._receiver is None:
            self._receiver = self._start_receiver(boundary)
            if self._closing.is_set():
                self._receiver.close()
        elif boundary is not None:
            self._receiver.set_boundary(boundary)
        return self._receiver

    def _start_receiver(self, boundary: int | None) -> Receiver:
        resume = self._resume
        replication, proof = self._replication, self._proof()
        try:
            replication.start(resume.slot, proof.start, self._options())
        except PositionLost as error:
            if self._source.max_wal_gb is None:
                raise
            # Given up between the look at it and this; the next session starts anew.
            raise SourceUnavailable(str(error)) from error
        # The receiver asks the catalogs from its own thread, so it has its own connection.
        catalog = self._session.another_catalog()
        stop = self._stop if self._source.on_rewrite == "stop" else None
        assembler = PostgresAssembler(
            catalog, self._register, after=resume.position, xid=resume.xid, proof=proof, stop=stop
        )
        assembler.renew(resume.live, resume.errored, resume.versions, resume.looks)
        receiver = Receiver(replication, assembler, catalog, status_seconds=self._status_seconds())
        # A point that was followed to is where to go on; the log may not have it yet.
        receiver.start(acked=self._acked, boundary=boundary)
        return receiver

    def _options(self) -> dict[str, str]:
        return {
            "proto_version": "1",
            "publication_names": ",".join(map(_quoted, self._named())),
            "messages": "true",
        }

    def _status_seconds(self) -> float:
        timeout = self._session.catalog.wal_sender_timeout()
        return min(_LONGEST_STATUS, timeout / 3) if timeout else _LONGEST_STATUS

    def _proof(self) -> HistoryProof:
        """What the server has to send again before its history is known to be ours."""
        resume, slot = self._resume, self._session.catalog.slot(self._resume.slot)
        # Other publications may send other transactions.
        same = not resume.inserts or resume.inserts == self._published.inserts
        commit = resume.last_commit if same and slot else None
        return HistoryProof(resume.position, commit, confirmed=slot.confirmed if slot else 0)

    def _named(self) -> list[str]:
        """The publications that every transaction after the position can see."""
        first = self._source.publication_name
        readable = self._resume.inserts and self._resume.inserts == self._published.inserts
        return [first, inserts_name(first)] if readable else [first]

    def _restart_receiver(self, lsn: int) -> None:
        """Begin to stream anew at a boundary that was reached, with what is published now."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        slot.await_free(self._session.catalog, self._resume.slot, seconds=_FREE_SECONDS)
        self._replication = self._session.address.replicate(self._closing)
        self._receive(boundary=lsn)

    def _received(self, received: Received) -> Batch:
        self._inside = received.position is None
        if received.position is None:
            return Batch(received.changes, None)
        self._resume = msgspec.structs.replace(
            self._resume,
            position=received.position,
            xid=received.xid,
            errored=received.errored,
            versions=received.versions,
            last_commit=_last_commit(received.begin) or self._resume.last_commit,
        )
        if received.looks is not self._looks:  # replaced when one of them has changed
            self._looks = received.looks
            self._resume = with_looks(self._resume, received.looks)
        self._resume = read_anew(without_gone(self._resume, received.gone), received.again)
        self._anew |= received.again
        return self._batch(received.changes)

    def _stop(self, path: str, why: str) -> str:
        return f"{why}; run `headrace snapshot {self._source.name} {path}` to read it anew"

    def _pending_anew(self) -> bool:
        """Whether a snapshot must begin because of DDL."""
        snapshots = self._resume.snapshots
        waiting = {path for path in self._anew if path in snapshots and not snapshots[path].done}
        self._anew = {path: why for path, why in self._anew.items() if path in waiting}
        return any(snapshots[path].ranges is None for path in waiting - self._unreadable.keys())

    def _heartbeat(self, receiver: Receiver) -> None:
        """Write a word into an otherwise idle stream, so that the slot can move."""
        now = time.monotonic()
        if now - self._beat < self._source.heartbeat_seconds:
            return
        position, idle = self._resume.position, self._resume.position == self._beat_position
        self._beat, self._beat_position = now, position
        if idle and receiver.lag.foreign:
            self._session.catalog.beat()

    def _tables_published(self) -> bool:
        """Look whether tables have come, or are to be published in another way."""
        now = time.monotonic()
        due = now - self._watched >= _WATCH_SECONDS
        if self._closing.is_set() or not (due or now - self._looked >= _IDENTITY_SECONDS):
            return False
        self._looked = now
        publications = self._session.publications
        if due:
            self._watched = now
            if self._source.ddl:
                ddl.install(self._session.catalog)
            receiver = self._receive()
            receiver.lag.looked(self._session.catalog.wal_lsn(), time.time())
            receiver.ask()
        elif not publications.changed(self._durable):
            return self._altered()
        published = publications.publish(self._durable)
        resume = self._without_left(self._resume, published)
        resume = with_tables(resume, published.tables, copying=True)
        # In this order: a status without the warning of a table already has its snapshot.
        self._resume = with_inserts(resume, published)
        self._published = published
        self._altered()
        return True

    def _without_left(self, resume: PostgresResume, published: PublishedTables) -> PostgresResume:
        """Let go of tables that were dropped, or have a name that nobody wants."""
        catalog = self._session.catalog
        paths = present_paths(catalog, [copy.relation for copy in resume.snapshots.values()])
        return with_leaving(resume, published.tables, paths)

    def _altered(self) -> bool:
        """Look at the catalogs of the captured tables."""
        found = self._lookout.look(self._resume, self._receive().unlooked_leaves)
        if not found:
            return False
        if self._source.on_rewrite == "stop":
            errors = {path: self._stop(path, why) for path, why in found.items()}
            errored = errors | self._resume.errored
            self._resume = msgspec.structs.replace(self._resume, errored=errored)
        else:
            self._anew |= found
            self._resume = read_anew(self._resume, found)
        return True

    # -- copying --------------------------------------------------------------------------------

    def _to_copy(self) -> list[str]:
        """Tables with rows left to read, without those that cannot be read now."""
        resume = self._resume
        wanted = {path: resume.snapshots[path].relation for path in resume.to_snapshot}
        self._unreadable = self._session.catalog.unreadable(wanted)
        readable = [path for path in wanted if path not in self._unreadable]
        self._yielded = self._yielded if readable else ""
        return readable

    def _copy_rest(self, point: Point | None = None) -> Iterator[Batch]:
        """Copy what is not copied yet."""
        paths = self._to_copy()
        if not paths:
            self._no_point = ""
        elif point is None and self._receiver is not None and self._beside(paths):
            yield from self._copy_beside(paths)
        else:
            yield from self._copy_at(point)

    def _copy_at(self, point: Point | None) -> Iterator[Batch]:
        """Follow the stream to a point, and copy there what is not copied yet."""
        self._phase = Phase.SNAPSHOT
        if point is not None:
            with self._watching(self._session.replication) as watch:
                yield from self._copy(point, watch)
            return
        if self._receiver is not None:
            # What is read from here on must not overtake the point that is about to be made.
            self._receiver.pause()
            yield from self._reach_boundary(self._receiver)
        # What the snapshot shows must be known again by a commit that came just before it.
        self._session.catalog.beat()
        with closing(self._session.address.replicate(self._closing)) as holder:
            point = slot.create_point(holder, slot.temporary_name(self._source.slot_name))
            with self._watching(holder) as watch:
                yield from self._follow_to(point.lsn)
                self._name_publications(point.lsn)
                yield from self._copy(point, watch)
        self._receive().renew(self._resume)

    def _watching(self, exporter: Replication) -> WaiterWatch:
        return WaiterWatch(self._source.address.connect, exporter=exporter.session)

    def _name_publications(self, lsn: int) -> None:
        """Every transaction after a point began after all that was published before it."""
        if self._closing.is_set() or self._resume.inserts == self._published.inserts:
            return
        self._resume = msgspec.structs.replace(
            self._resume, inserts=self._published.inserts, last_commit=None
        )
        self._restart_receiver(lsn)
        self._session.catalog.beat()

    def _follow_to(self, lsn: int) -> Iterator[Batch]:
        yield from self._reach_boundary(self._receive(boundary=lsn))
        if not self._closing.is_set():
            # The stream has sent nothing yet of tables whose snapshot begins only now: what was
            # committed before this point is in the copy, and must not come once more after it.
            self._reached(lsn)

    def _reached(self, lsn: int) -> None:
        """Every transaction that commits before a boundary has come."""
        position = max(self._resume.position, lsn)
        commit = _last_commit(self._receive().last_begin) or self._resume.last_commit
        self._resume = msgspec.structs.replace(
            self._resume,
            position=position,
            last_commit=commit and msgspec.structs.replace(commit, until=position),
        )

    def _reach_boundary(self, receiver: Receiver) -> Iterator[Batch]:
        while not self._closing.is_set() and not receiver.reached_boundary():
            received = receiver.take(_TAKE_SECONDS)
            if received is not None:
                yield self._received(received)

    def _copy(self, point: Point, watch: WaiterWatch) -> Iterator[Batch]:
        copier = self._copier_at(point, watch)
        if self._closing.is_set():
            return
        tasks = []
        for plan in self._plans(point, self._resume.to_snapshot):
            self._resume = plan.resume
            tasks += plan.tasks
            yield self._batch(plan.announced)
        for copied in copier.copy(tasks):
            self._resume = progressed(self._resume, copied)
            yield self._batch(copied.changes)
        self._has_yielded(watch)

    def _copier_at(self, point: Point, watch: WaiterWatch) -> PostgresSnapshotReader:
        workers = self._source.snapshot_workers
        self._copier = PostgresSnapshotReader(
            self._session.address, point, watch, workers=workers, pace=self._pace
        )
        return self._copier

    def _has_yielded(self, watch: WaiterWatch) -> None:
        self._yielded = watch.yielded
        self._watched = time.monotonic()  # what has yielded goes on at the next look for tables

    def _plans(self, point: Point, paths: Collection[str]) -> list[SnapshotPlan[PostgresResume]]:
        """How each table is copied; the session that looks is closed before anybody waits."""
        plans: list[SnapshotPlan[PostgresResume]] = []
        publication, resume = self._source.publication_name, self._resume
        with closing(self._session.another_catalog()) as catalog:
            catalog.share(point.snapshot)
            planner = Planner(catalog, self._register, publication=publication, point=point)
            for path in paths:
                if path not in self._unreadable:
                    plans.append(planner.plan(resume, path))
                    resume = plans[-1].resume
        return plans


def _last_commit(begin: WalBegin | None) -> LastCommit | None:
    return LastCommit(begin.commit_lsn, begin.xid, begin.commit_time) if begin else None


def _quoted(publication: str) -> str:
    return '"' + publication.replace('"', '""') + '"'
