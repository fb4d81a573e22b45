"""The tables of a lake compared with their sources, row by row, while both go on changing.

    source ─▶ its rows at a point ─▶ a log of their own ─┐
    log    ─▶ what follows the point, up to a batch ─────┴▶ the sink itself ─▶ tables as they should
              of the sink                                                      be ─▶ compare

A source gives its rows at a point of its stream, and says of each change whether the rows show it.
The sink's tables are taken as they were when one of its batches had ended, with everything up to a
sequence P, at or beyond the last change that the rows show. Rows, and then the changes up to P that
they do not show, are applied by the same sink to empty tables, with the same transforms. Both are
then the state at P: what differs was different before, whatever has been written meanwhile. Nothing
is compared by time, and no row is left out because it has just changed.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..change.event import Batch, Change, Op, Table
from ..change.path import path_matches
from ..errors import (
    ConfigError,
    LogReplaced,
    PipelineError,
    PipelineInUse,
    SourceUnavailable,
    TableFailed,
)
from ..log import Log, LogReader
from ..log.folder import locked
from ..log.lineage import likely_fork
from ..sinks import LogRange, Progress, lost_tail
from ..sinks.lake.delta import applied_mark
from ..sinks.lake.deltalog import DeltaLog, TableState
from ..sinks.lake.plan import TableRef
from ..sinks.tables.compare import ComparedTables, StoredTable, TablePair, compare
from ..sinks.tables.ledger import TablesLedger
from ..sinks.tables.sink import Tables
from ..sinks.verification import (
    ROWS_LOCK,
    ROWS_PREFIX,
    TableOutcome,
    TableVerification,
    Verification,
)
from ..sources import Source
from ..sources.point import PointSource, SourcePoint, redacted_point
from .options import Options
from .query import RangesBatch
from .reading import DiskLog, PipelineLog, close_reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

Look = Callable[[str, int], None]  # what is being done, and how many rows of it are done
Session = Callable[[], AbstractContextManager["SparkSession"]]

PATIENCE_SECONDS = 300.0  # with a capture or a sink that does not move
_ATTEMPTS = 5  # to read all rows at a point: whoever waits for a lock goes first
_LOOK_SECONDS = 0.25
_PAGE = 10_000
_BATCH_CHANGES = 1_000_000
_WRITER = "verify"
_END = b"{}"  # of a batch; nobody goes on from here
_SKIPPED = {
    TableOutcome.SNAPSHOT: "a snapshot of it is being taken",
    TableOutcome.NOT_CAPTURED: "its source does not capture it now",
}


@dataclass(frozen=True, slots=True)
class VerifiedTables:
    """What was found, and the rows that differ: for whoever asked, and nobody else."""

    verification: Verification
    compared: Mapping[TableRef, ComparedTables] = field(default_factory=dict)

    @property
    def differing(self) -> dict[str, list[str]]:
        """The tables that are not equal, by their source."""
        found: dict[str, list[str]] = {}
        for each in self.verification.tables:
            if not each.sound:
                found.setdefault(each.source, []).append(each.table)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesVerifier:
    """Compares the tables of one sink."""

    sink: Tables
    sources: Sequence[Source]
    log_dir: Path
    folder: Path  # in which it works; for its user alone
    session: Session
    look: Look = lambda what, rows: None
    patience: float = PATIENCE_SECONDS

    def verify(self, tables: Sequence[str] = ()) -> VerifiedTables:
        """Compare tables (schema.table, or patterns; none: all); HeadraceError: it cannot be done.

        Who waits for a lock that the reading has goes first, and all begins anew.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._verify(tables)
            except SourceUnavailable as error:
                logger.info("sink=%s verified again: %s", self.sink.name, error)
        return self._verify(tables, last=True)

    def _verify(self, tables: Sequence[str], *, last: bool = False) -> VerifiedTables:
        began, clock = time.time_ns() // 1000, time.monotonic()
        with LogReader.open(self.log_dir) as log, self._workplace() as place:
            known = _Known.of(self, log, tables)
            with closing(_Shadow(self.sink, place)) as shadow:
                states: dict[TableRef, StoredTable | None] = {}
                for source in self.sources:
                    if known.of_source(source.name):
                        states |= self._staged(log, known, source, shadow)
            compared = self._compared(shadow, known, states, place) if states else {}
            if not last:
                _expect_unaltered(log, known.began, compared)
        found = [_verified(ref, compared[ref], known.rows[ref]) for ref in compared]
        listed = [
            msgspec.structs.replace(each, at=began)
            for each in sorted([*found, *known.skipped], key=lambda each: (each.source, each.table))
        ]
        verification = Verification(
            sink=self.sink.name,
            at=began,
            seconds=time.monotonic() - clock,
            tables=tuple(listed),
        )
        return VerifiedTables(verification, compared)

    @contextmanager
    def _workplace(self) -> Iterator[Path]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / ROWS_LOCK).open("a+") as lock:
            if not locked(lock):
                raise PipelineInUse(f"the tables of sink {self.sink.name} are being compared now")
            # What was killed has left its rows.
            for stale in self.folder.glob(f"{ROWS_PREFIX}*"):
                shutil.rmtree(stale, ignore_errors=True)
            place = Path(tempfile.mkdtemp(prefix=ROWS_PREFIX, dir=self.folder))
            try:
                yield place
            finally:
                shutil.rmtree(place, ignore_errors=True)

    def _compared(
        self,
        shadow: _Shadow,
        known: _Known,
        states: Mapping[TableRef, StoredTable | None],
        place: Path,
    ) -> dict[TableRef, ComparedTables]:
        with self.session() as spark:
            failures = shadow.apply(spark, lambda rows: self.look("applied", rows))
            for ref in states:
                if str(ref) in failures:
                    known.skip(ref, TableOutcome.FAILED, failures[str(ref)])
            refs = [ref for ref in states if str(ref) not in failures]
            self.look("comparing", shadow.rows)
            pairs = {ref: TablePair(shadow.stored(ref), states[ref]) for ref in refs}
            known.rows |= {ref: each.wanted.rows for ref, each in pairs.items() if each.wanted}
            there = {ref: each for ref, each in pairs.items() if each.wanted or each.found}
            found = compare(spark, list(there.values()), place)
            done = dict(zip(there, found, strict=True))
            return {ref: done.get(ref, ComparedTables()) for ref in refs}

    def _staged(
        self, log: LogReader, known: _Known, source: Source, shadow: _Shadow
    ) -> dict[TableRef, StoredTable | None]:
        """The tables of a source as they are; what they should be is put into the shadow's log."""
        log.refresh()
        resume, before = log.resume(source.name), log.latest_sequence
        if resume is None:
            return {}
        known.began = min(known.began or before, before)
        known.look(source, resume)
        names = [str(ref) for ref in known.of_source(source.name)]
        with redacted_point(source, resume, names, shadow.log.register) as point:
            known.leave_out(source.name, point.left_out)
            self._await_capture(log, source, point)
            window = _Window.of(log, source.name, point, before)
            upto = self._await_sink(log, known, window)
            log.refresh(upto)
            known.look(source, log.resume(source.name))
            for ref in window.snapshots(log):
                known.skip(ref, TableOutcome.SNAPSHOT)
            refs = known.of_source(source.name)
            states = {ref: self._state(known, ref, log.epoch, upto) for ref in refs}
            for batch in point.batches():
                shadow.take(source.name, batch)
                self.look("read", shadow.rows)
        shadow.follow(log, window, upto)
        _expect_untrimmed(log, window.after)
        left = set(known.of_source(source.name))
        return {ref: state for ref, state in states.items() if ref in left}

    def _await_capture(self, log: LogReader, source: Source, point: SourcePoint) -> None:
        """Until the log has all that the rows show."""

        def reached() -> tuple[bool, object]:
            log.refresh()
            resume = log.resume(source.name)
            return resume is not None and point.reached_by(resume), resume

        self._await(
            point,
            reached,
            f"the log does not come to where source {source.name} is now",
            "Start `headrace run`, or see `headrace status` for what keeps it.",
        )

    def _await_sink(self, log: LogReader, known: _Known, window: _Window) -> int:
        """Until the sink has stored what the rows show; returns up to where it has all then."""
        upto = 0

        def reached() -> tuple[bool, object]:
            nonlocal upto
            ledger = TablesLedger.open(self.sink.folder, "", adopt=True)
            known.look_at_failures(ledger)
            if progress := ledger.progress():
                upto = max(ledger.upto, progress.sequence)
                self._expect_followed(log, progress._replace(sequence=upto))
            return upto >= window.shown, upto

        self._await(
            window.point,
            reached,
            f"the sink {self.sink.name} does not come to sequence {window.shown}",
            "Start its pipeline, or see `headrace status` for what keeps it.",
        )
        return upto

    def _expect_followed(self, log: LogReader, place: Progress) -> None:
        """A sink must have no other changes than this log has."""
        if place.epoch != log.epoch:
            raise PipelineError(
                f"the tables in {self.sink.folder.uri} were filled from another log"
            )
        log.refresh(place.sequence)
        shared = log.shared_upto(place.epoch, place.generation)
        if shared is None or place.sequence > shared:
            latest = log.latest_sequence
            fork = likely_fork(log.lineage, place.epoch, place.generation, latest) or 0
            what = lost_tail(f"sink {self.sink.name}", place.sequence, fork)
            raise LogReplaced(what, hint=self.sink.ahead_hint(fork))

    def _await(
        self, point: SourcePoint, reached: Callable[[], tuple[bool, object]], what: str, hint: str
    ) -> None:
        """Wait, with the point held, and nobody else waiting for that."""
        since, seen = time.monotonic(), None
        while True:
            done, now = reached()
            if done:
                return
            if now != seen:
                since, seen = time.monotonic(), now
            if time.monotonic() - since > self.patience:
                raise PipelineError(f"{what}, for {self.patience:.0f} s", hint=hint)
            point.expect_nobody_waits()
            time.sleep(_LOOK_SECONDS)

    def _state(self, known: _Known, ref: TableRef, epoch: str, upto: int) -> StoredTable | None:
        folder = self.sink.folder.within(ref.schema, ref.table)
        try:
            state = state_at(DeltaLog(folder), applied_mark(epoch), upto)
        except TableFailed as error:
            known.skip(ref, TableOutcome.FAILED, str(error))
            return None
        return StoredTable(folder, state) if state else None


def state_at(log: DeltaLog, mark: str, upto: int) -> TableState | None:
    """A table when it had everything up to a sequence, and nothing beyond; None: there was none."""
    state = log.read()
    if state is None or state.transactions.get(mark, 0) <= upto:
        return state
    beyond = version = state.version
    while version >= 0 and (commit := log.commit(version)) is not None:
        marked = [a.txn.version for a in commit.actions if a.txn and a.txn.app_id == mark]
        if marked and min(marked) <= upto:
            break
        beyond = version if marked else beyond
        version -= 1
    return log.read(beyond - 1) if beyond > 0 else None


class _Known:
    """The tables of a sink: those to compare, and why the others are not."""

    def __init__(self, refs: Sequence[TableRef]) -> None:
        self._refs = list(refs)
        self._skipped: dict[TableRef, TableVerification] = {}
        self.rows: dict[TableRef, int] = dict.fromkeys(refs, 0)
        self.began = 0  # where the log ended when the first table was looked at

    @classmethod
    def of(cls, verifier: TablesVerifier, log: LogReader, wanted: Sequence[str]) -> _Known:
        """Those that the sink has had, and those that it should have."""
        sink = verifier.sink
        ledger = TablesLedger.open(sink.folder, "", adopt=True)
        statuses = {
            source.name: source.describe(log.resume(source.name)) for source in verifier.sources
        }
        named = {
            TableRef(table.source, table.schema, table.name)
            for table in log.tables()
            if table.name and table.source in statuses
        }
        captured = {
            ref
            for ref in named
            if str(ref) in {copy.table for copy in statuses[ref.source].copies}
            and _matches(sink.tables, ref)
        }
        refs = [ref for ref in {*ledger.refs, *captured} if _matches(wanted, ref)]
        for pattern in wanted:
            if not any(_matches([pattern], ref) for ref in refs):
                raise ConfigError(
                    f"the sink {sink.name} has no table {pattern}",
                    hint="Name tables as schema.table; `headrace status` shows what is captured.",
                )
        known = cls(refs)
        known.look_at_failures(ledger)
        for ref in refs:
            if ref.source not in statuses:
                known.skip(ref, TableOutcome.NOT_CAPTURED)
        for source in verifier.sources:
            known.look(source, log.resume(source.name))
        return known

    @property
    def skipped(self) -> list[TableVerification]:
        """Those that are not compared."""
        return list(self._skipped.values())

    def of_source(self, name: str) -> list[TableRef]:
        """Those of a source that are compared."""
        return [ref for ref in self._refs if ref.source == name and ref not in self._skipped]

    def look_at_failures(self, ledger: TablesLedger) -> None:
        """Leave out what the sink does not follow."""
        for ref in self._refs:
            if ref not in self._skipped and (failure := ledger.failure(ref)):
                self.skip(ref, TableOutcome.FAILED, failure.reason)

    def look(self, source: Source, resume: bytes | None) -> None:
        """Leave out what cannot be compared now.

        A table that the source would capture and does not was dropped, or has another name: no row
        may be left of it.
        """
        status = source.describe(resume)
        copies = {copy.table: copy for copy in status.copies}
        patterns = source.tables if isinstance(source, PointSource) else ()
        for ref in self.of_source(source.name):
            path = str(ref)
            if path in status.errored:
                reason = f"its source does not follow it: {status.errored[path]}"
                self.skip(ref, TableOutcome.FAILED, reason)
            elif path not in copies:
                if resume is None or not _matches(patterns, ref):
                    self.skip(ref, TableOutcome.NOT_CAPTURED)
            elif path in status.inserts_only:
                reason = f"all of it is captured after: {status.inserts_only[path]}"
                self.skip(ref, TableOutcome.INSERTS_ONLY, reason)
            elif not copies[path].done:
                self.skip(ref, TableOutcome.SNAPSHOT)

    def leave_out(self, source: str, reasons: Mapping[str, str]) -> None:
        """Leave out what the source does not read."""
        for ref in self.of_source(source):
            if reason := reasons.get(str(ref)):
                self.skip(ref, TableOutcome.LEFT_OUT, reason)

    def skip(self, ref: TableRef, outcome: TableOutcome, reason: str = "") -> None:
        """Leave a table out."""
        self._skipped[ref] = TableVerification(
            source=ref.source,
            table=str(ref),
            outcome=outcome,
            reason=reason or _SKIPPED.get(outcome, ""),
        )


@dataclass(frozen=True, slots=True)
class _Window:
    """Where a point lies in the log."""

    source: str
    point: SourcePoint
    after: int  # everything up to here the rows show
    shown: int  # the last change of the log that they show

    @classmethod
    def of(cls, log: LogReader, source: str, point: SourcePoint, before: int) -> _Window:
        """`before` is where the log ended when the point was not taken yet."""
        after, step = before, 1
        # A server may send a transaction a moment before others see it.
        while after >= log.first_sequence:
            _expect_untrimmed(log, after - 1)
            [change] = log.read(after - 1, limit=1, upto=after)
            if change.table.source == source:
                if point.covers(change.position):
                    break
            elif before - after > _PAGE:
                break
            after, step = after - step, step * 2
        _expect_untrimmed(log, before)
        after = shown = max(after, log.first_sequence - 1)
        for change in _changes(log, after, log.latest_sequence):
            if change.table.source == source and point.covers(change.position):
                shown = change.sequence
        return cls(source, point, after, shown)

    def following(self, log: LogReader, upto: int) -> Iterator[Change]:
        """The changes of the source that the rows do not show."""
        for change in _changes(log, self.after, upto):
            if change.table.source == self.source and not self.point.covers(change.position):
                yield change

    def snapshots(self, log: LogReader) -> set[TableRef]:
        """Tables of which a snapshot was begun: what the log has of them may not be whole."""
        return {
            TableRef(change.table.source, change.table.schema, change.table.name)
            for change in _changes(log, self.after, log.latest_sequence)
            if change.op is Op.READ and change.table.source == self.source
        }


def _expect_untrimmed(log: LogReader, after: int) -> None:
    """What was trimmed meanwhile is missing in what was read, without an error."""
    log.refresh()
    if log.first_sequence > after + 1:
        raise PipelineError(
            f"the log was trimmed up to {log.first_sequence - 1} while tables were compared, and "
            f"the changes after {after} are needed",
            hint="Verify again; if it takes too long, name fewer tables, or let the log keep more "
            "(cdc.retention_days, cdc.retention_bytes).",
        )


def _expect_unaltered(
    log: LogReader, after: int, compared: Mapping[TableRef, ComparedTables]
) -> None:
    """Columns of the next batch are in a table a moment before its rows: then look again."""
    log.refresh()
    differs = {ref for ref, found in compared.items() if not found.equal}
    for change in _changes(log, after, log.latest_sequence) if differs else ():
        table = change.table
        ref = TableRef(table.source, table.schema, table.name)
        if change.op is Op.SCHEMA and ref in differs:
            raise SourceUnavailable(f"the columns of {ref} have changed meanwhile")


def _changes(log: LogReader, after: int, upto: int) -> Iterator[Change]:
    while after < upto and (page := log.read(after, limit=_PAGE, upto=upto)):
        yield from page
        after = page[-1].sequence


class _Shadow:
    """The tables as they should be: a log of rows, and what the sink makes of it."""

    def __init__(self, sink: Tables, place: Path) -> None:
        self._sink = replace(
            sink,
            path=str(place / "tables"),
            tables=(),
            keep="rows",
            deletes="vectors",
            cluster_by={},
            partition_by={},
            mode="0700",
            catalog=None,
            storage={},
        )
        self.log = Log.open(place / "log")
        self._epoch, self._latest = self.log.epoch, 0
        self.rows = 0

    def close(self) -> None:
        """Take no more rows."""
        self._latest = self.log.latest_sequence
        self.log.close()

    def take(self, source: str, batch: Batch) -> None:
        """Store rows."""
        if batch.changes:
            self.log.append(source, batch)
            self.rows += len(batch.changes)

    def follow(self, log: LogReader, window: _Window, upto: int) -> None:
        """Store what follows the rows."""
        versions: dict[int, Table] = {}
        some: list[Change] = []
        for change in window.following(log, upto):
            number = change.table.version
            if number not in versions:
                unnumbered = msgspec.structs.replace(change.table, version=0)
                versions[number] = self.log.register(unnumbered)
            some.append(msgspec.structs.replace(change, table=versions[number]))
            if len(some) >= _PAGE:
                self.log.append(window.source, Batch(some, _END))
                some = []
        self.log.append(window.source, Batch(some, _END))

    def apply(self, spark: SparkSession, look: Callable[[int], None]) -> dict[str, str]:
        """Let the sink store all of it; returns the tables that it cannot store, and why."""
        address = {"path": str(self.log.path)}
        log = PipelineLog(DiskLog(address["path"]), Options.read(address))
        parts = spark.sparkContext.defaultParallelism
        with ExitStack() as stack:
            stack.callback(close_reader, address["path"])
            writer = stack.enter_context(closing(self._sink.open(_WRITER)))
            after, number = 0, 0
            while after < self._latest:
                [end] = log.reading.ranges(after, limit=_BATCH_CHANGES).ends
                wanted = LogRange(log, self._epoch, after, end)
                batch = RangesBatch.of_range(spark, wanted, parts=parts, address=address)
                writer.write(batch, number)
                after, number = end, number + 1
                look(after)
            return {failed.table: failed.reason for failed in writer.failed_tables()}

    def stored(self, ref: TableRef) -> StoredTable | None:
        """A table as it should be."""
        folder = self._sink.folder.within(ref.schema, ref.table)
        state = DeltaLog(folder).read()
        return StoredTable(folder, state) if state else None


def _matches(patterns: Sequence[str], ref: TableRef) -> bool:
    return not patterns or any(path_matches(ref.schema, ref.table, each) for each in patterns)


def _verified(ref: TableRef, found: ComparedTables, rows: int) -> TableVerification:
    return TableVerification(
        source=ref.source,
        table=str(ref),
        outcome=TableOutcome.EQUAL if found.equal else TableOutcome.DIFFERS,
        rows=rows,
        missing=found.missing,
        surplus=found.surplus,
        repeated=found.repeated,
        differing=found.differing,
    )
