"""A push sink in use by a query: the driver's side of sending a batch until it is settled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ...errors import HeadraceError, LogReplaced, PipelineError, SinkRefused, SinkUnavailable
from ...retry import Backoff
from .. import DeliveryStatus, LogBatch, Progress, SinkWriter
from ..lake.delta import Marks
from .computing import sweep
from .deadletters import DeadLetters
from .delivery import Counts, DeliveryCheckpoint
from .events import EventRendering
from .halt import expect_no_halt, write_halt
from .ledger import LedgerEntry, PushLedger, ReadChanges, RenderingOptions, versioned
from .redrive import RedriveResult, RedriveRunner, report_result, request_redrive, requested
from .spill import Spill
from .tasks import LAST_PLACE, DeliveryTask, PartProgress, SendTask, TaskReport, packed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .settings import PushSettings

_T = TypeVar("_T")

BACKOFF = Backoff(first=1.0, longest=60.0)  # after a destination accepted nothing
_IN_LINE = 1.0  # seconds for which a redrive waits for the batch before it, each time it is tried


@dataclass(slots=True)
class _Sending:
    """A batch that is being sent."""

    batch: int
    rendering: EventRendering
    after: int = 0  # changes up to this one were settled when the batch came before
    parts: int = 0  # 0: not known yet
    progress: dict[int, PartProgress] = field(default_factory=dict)  # of parts not settled
    open: frozenset[int] | None = None  # the parts not settled; None: all
    seen: ReadChanges = field(default_factory=ReadChanges)
    counts: Counts = field(default_factory=Counts)
    known: int = 0  # events of these that were sent before, and are not sent again
    repeats: bool = False  # more may have been sent before than is recorded
    rounds: int = 0  # in a row that ended before everything was settled, with nothing accepted
    begun: bool = False  # at least one has ended
    accepted_at: float = 0.0  # by the wall clock: when an event of any part was last accepted
    barrier: int = 0  # the last TRUNCATE or SCHEMA before which everything is settled …
    alone: bool = False  # … and which is sent now, with those just before it and nothing else
    ahead: int = 0  # the next one, before which parts have ended; 0: there is none
    ahead_last: int = 0  # the last one behind it, with no row between them

    def pass_barrier(self) -> None:
        """Once all parts are settled: go on with the changes at which they ended, or behind."""
        if self.alone:
            self.alone, done = False, self.barrier
        elif self.ahead:
            self.barrier, self.alone, done = self.ahead_last, True, self.ahead - 1
            self.ahead, self.ahead_last = 0, 0
        else:
            return
        place = DeliveryCheckpoint(done, LAST_PLACE)
        self.progress = {part: PartProgress(place, self.seen.copy()) for part in range(self.parts)}
        self.open = frozenset(self.progress)


class PushWriter(SinkWriter[LogBatch]):
    """Sends the batches of one streaming query."""

    def __init__(self, sink: PushSettings, writer: str, *, adopt: bool) -> None:
        self._sink = sink
        self._adopt = adopt
        expect_no_halt(sink.folder, sink.address)
        self._ledger = PushLedger.open(sink.folder, writer, adopt=adopt)
        self._letters = DeadLetters(sink.letters, writer, adopt=adopt)
        self._ledger.withdraw(self._letters.files)
        if sink.shaping.computes:
            sweep(sink.letters)
        self._redrive = RedriveRunner(sink, self._ledger, self._letters, writer)
        self._writer = writer
        self._closed = threading.Event()
        self._busy = threading.Lock()  # one batch or one redrive at a time
        self._status = DeliveryStatus(
            dead_letters=self._letters.count, waiting_rows=self._letters.rows
        )
        self._accepted_at = time.monotonic()  # when an event was last accepted
        self._refusals = 0  # in a row, with nothing accepted between them
        self._result: RedriveResult | None = None  # of the last redrive
        self._reported = True  # whether its file is written

    def progress(self) -> Progress | None:
        """Up to where every change is settled."""
        return self._ledger.progress()

    def status(self) -> DeliveryStatus:
        """What was sent, and what waits."""
        return self._status

    def close(self) -> None:
        """End what waits, soon."""
        self._closed.set()

    def write(self, batch: LogBatch, batch_id: int) -> int:
        """Send what is not settled yet."""
        after = 0
        if known := self._ledger.settled(batch_id):
            after = self._settled_upto()
            if batch.upto <= after:
                return known.changes
        with self._busy:
            self._until_done(self._save)
            with self._computed(batch) as rendering:
                sending = self._begun(batch_id, rendering, after)
                while sending.open is None or sending.open:
                    self._round(batch, sending)
                self._until_done(lambda: self._settle(sending))
        return sending.seen.changes

    @contextmanager
    def _computed(self, batch: LogBatch) -> Iterator[EventRendering]:
        """How the changes of a batch become events: for all its rounds, they are computed once."""
        rendering = self._sink.rendering
        if not rendering.transforms.computes:
            yield rendering
            return
        # Only here: it brings pyspark, which who reads the config can do without.
        from .computed import computed_changes  # noqa: PLC0415

        computed = computed_changes(batch, rendering, self._letters.folder)
        try:
            yield replace(rendering, computed=computed)
        finally:
            computed.remove()

    def serve_requests(self, spark: SparkSession) -> None:
        """Do a step of a redrive, if one is requested."""
        wanted = self._redrive.unsaved or requested(self._sink.folder) is not None
        # A busy sink is between two batches only for a moment.
        if wanted and self._busy.acquire(timeout=_IN_LINE):
            try:
                # First an interrupted batch: its events may be among the dead letters.
                if not (self._closed.is_set() or self._ledger.interrupted):
                    self._redrive_step(spark)
            finally:
                self._busy.release()

    def maintain(self) -> None:
        """Compact the ledger and the dead letters."""
        if self._busy.acquire(blocking=False):  # else a redrive is running
            try:
                if not self._redrive.unsaved:
                    self._ledger.compact()
                    self._letters.compact()
            finally:
                self._busy.release()

    # --- rounds ----------------------------------------------------------------------------------

    def _settled_upto(self) -> int:
        progress = self._ledger.progress()
        return progress.sequence if progress else 0

    def _begun(self, batch_id: int, rendering: EventRendering, after: int) -> _Sending:
        self._until_done(lambda: self._ledger.begin(batch_id, _now()))
        self._accepted_at = time.monotonic()
        sending = _Sending(batch_id, rendering, after)
        entry = self._ledger.paused(batch_id)
        if entry is not None and entry.rendered and self._goes_on(entry.rendered):
            # An earlier version did not do this: its places are those of its events.
            sending.rendering = replace(rendering, **versioned(entry.rendered))
            sending.parts = entry.tasks
            sending.progress = {
                part: PartProgress(checkpoint, entry.read.get(part, ReadChanges()))
                for part, checkpoint in entry.points.items()
            }
            sending.open = frozenset(sending.progress)
            sending.barrier, sending.alone = entry.barrier, entry.alone
            _count(sending.counts, entry.counts)
            sending.known = entry.counts.sent
        else:
            sending.repeats = entry is not None and entry.counts.sent > 0
        return sending

    def _goes_on(self, then: RenderingOptions) -> bool:
        """Whether the places of a paused batch are places of today's events too."""
        now = self._sink.rendered
        return msgspec.structs.replace(then, **versioned(now)) == now

    def _rendered(self, sending: _Sending) -> RenderingOptions:
        return msgspec.structs.replace(self._sink.rendered, **versioned(sending.rendering))

    def _round(self, batch: LogBatch, sending: _Sending) -> None:
        reports = self._delivered(batch, sending)
        _expect_one_log(reports)
        _expect_all(reports, sending)
        self._take(reports, sending)
        marks = Marks(batch_id=None, epoch=self._epoch(sending.seen), sequence=sending.seen.last)
        added = [file for each in reports for file in each.added]
        self._until_done(lambda: self._letters.commit(added, marks=marks))
        self._add_up(reports)
        for each in reports:
            if each.refusal:
                self._pause(sending, closed=True)
                self._halt(SinkRefused(each.refusal.message, hint=each.refusal.hint))
        settled = not sending.open
        if settled:
            sending.pass_barrier()
        if sending.open:
            closed = self._closed.is_set()
            self._pause(sending, closed=closed)
            if closed:
                raise SinkUnavailable(f"{self._sink.name}: the batch was interrupted")
            if not settled:
                self._wait(sending, reports)

    def _delivered(self, batch: LogBatch, sending: _Sending) -> list[TaskReport]:
        sink, letters = self._sink, self._letters
        patient = time.monotonic() - self._accepted_at < sink.patience_seconds
        policy = msgspec.structs.replace(
            sink.policy,
            gives_up=sending.begun and not patient,
            refusals=self._refusals,
            probes=sending.rounds,
            moved=sending.accepted_at,
        )
        blocked = self._until_done(letters.blocked)
        content = packed(sending.progress) if sending.progress else b""
        progress = self._until_done(lambda: Spill.of(content, letters.folder))
        delivery = DeliveryTask(sink, policy, letters.folder, blocked, progress)
        send = SendTask(
            sending.rendering,
            delivery,
            sending.open,
            sending.parts,
            sending.after,
            sending.barrier,
            sending.alone,
        )
        try:
            reports = batch.run(send)
        finally:
            progress.remove(letters.folder)
        return [msgspec.json.decode(each, type=TaskReport) for each in reports]

    def _take(self, reports: list[TaskReport], sending: _Sending) -> None:
        """Add up what the tasks report."""
        # Each that did not stop has seen everything, and in the last round none does.
        sending.seen = max((each.seen for each in reports), key=_last, default=ReadChanges())
        progress: dict[int, PartProgress] = {}
        for each in reports:
            _count(sending.counts, each.counts)
            sending.accepted_at = max(sending.accepted_at, each.accepted_at)
            sending.repeats |= each.again and each.counts.sent > 0
            if each.barrier:
                sending.ahead = each.barrier
                sending.ahead_last = min(sending.ahead_last or each.barrier_last, each.barrier_last)
            if each.stopped:
                progress[each.part] = PartProgress(each.stopped.checkpoint, each.read)
            elif each.unread:
                progress[each.part] = sending.progress.get(each.part, PartProgress())
        sending.progress, sending.open, sending.begun = progress, frozenset(progress), True

    def _wait(self, sending: _Sending, reports: list[TaskReport]) -> None:
        """Wait for a destination that accepts nothing, unless the query is to end."""
        left = [each for each in reports if each.open]
        failing = [each for each in left if each.reason]
        if any(each.counts.sent or each.counts.refused for each in reports):
            sending.rounds = 1 if failing else 0
        else:
            sending.rounds += 1
        if len(failing) < len(left):
            return  # some have only used up their time
        reason = failing[0].reason
        retry_after = min(each.stopped.retry_after if each.stopped else 0.0 for each in failing)
        self._report_waiting(reason, sending.rounds)
        if self._closed.wait(max(BACKOFF.wait(sending.rounds), retry_after)):
            self._pause(sending, closed=True)
            raise SinkUnavailable(f"{self._sink.name}: {reason}")

    def _report_waiting(self, reason: str, rounds: int) -> None:
        since = self._status.since or time.time()
        self._status = replace(self._status, reason=reason, since=since, rounds=rounds)

    def _until_done(self, do: Callable[[], _T]) -> _T:
        """Retry something with the sink's own files until it succeeds, unless the query is to end.

        An error would send once more what was sent before it.
        """
        tries = 0
        while True:
            try:
                done = do()
            except (SinkUnavailable, OSError) as error:
                tries += 1
                reason = _reason(error)
                self._report_waiting(reason, tries)
                if self._closed.wait(BACKOFF.wait(tries)):
                    raise SinkUnavailable(f"{self._sink.name}: {reason}") from error
                continue
            if tries:
                self._status = _recovered(self._status)
            return done

    def _halt(self, error: SinkRefused) -> None:
        write_halt(self._sink.folder, self._sink.address, error)
        raise error

    def _pause(self, sending: _Sending, *, closed: bool = False) -> None:
        entry = LedgerEntry(
            "paused",
            self._writer,
            sending.batch,
            counts=sending.counts,
            at=_now(),
            tasks=sending.parts,
            points={part: each.checkpoint for part, each in sending.progress.items()},
            read={part: each.read for part, each in sending.progress.items()},
            rendered=self._rendered(sending),
            closed=closed,
            barrier=sending.barrier,
            alone=sending.alone,
        )
        self._until_done(lambda: self._ledger.pause(entry))

    def continue_in(self, epoch: str, upto: int) -> None:
        """Record the restored log's name; a batch that was interrupted is sent to its end."""
        entry = LedgerEntry("continued", self._writer, epoch=epoch, generation=self.generation)
        self._ledger.settle(msgspec.structs.replace(entry, at=_now()))

    def go_back(self, upto: int) -> None:
        """Record that what was sent beyond `upto` is not of this log."""
        epoch, known = self._ledger.epoch, self._ledger.progress()
        past = f"{epoch}~{known.generation if known else ''}"
        self._ledger.settle(LedgerEntry("continued", self._writer, epoch=past, at=_now()))
        entry = LedgerEntry("settled", self._writer, epoch=epoch, last=upto, at=_now())
        self._ledger.settle(msgspec.structs.replace(entry, generation=self.generation))

    def _epoch(self, seen: ReadChanges) -> str:
        """The log that the batch comes from."""
        known = self._ledger.epoch
        epoch = next(iter(seen.epochs), known)
        if known not in ("", epoch) and not self._adopt:
            raise LogReplaced(f"what the sink {self._sink.name} has sent comes from another log")
        return epoch

    def _settle(self, sending: _Sending) -> None:
        seen = sending.seen
        unsure = self._ledger.unsure or sending.repeats
        entry = LedgerEntry(
            "settled",
            self._writer,
            sending.batch,
            self._epoch(seen),
            seen.first,
            seen.last,
            seen.changes,
            sending.counts,
            _now(),
            doubtful=sending.counts.sent - sending.known if unsure else 0,
            rendered=self._rendered(sending),
            generation=self.generation,
        )
        self._ledger.settle(entry)
        self._status = _recovered(self._status)

    def _add_up(self, reports: list[TaskReport]) -> None:
        status = self._status
        self._refusals += sum(each.counts.refusals for each in reports)
        if any(each.counts.sent for each in reports):
            self._refusals = 0
            self._accepted_at = time.monotonic()
            status = _recovered(status)
        self._status = replace(
            status,
            sent=status.sent + sum(each.counts.sent for each in reports),
            requests=status.requests + sum(each.counts.requests for each in reports),
            retries=status.retries + sum(each.counts.retries for each in reports),
            dead_letters=self._letters.count,
            waiting_rows=self._letters.rows,
        )

    # --- redrives --------------------------------------------------------------------------------

    def redrive(self, spark: SparkSession, keys: Sequence[str]) -> RedriveResult:
        """Send dead letters again, each row's in order; what is not accepted stays."""
        request = request_redrive(self._sink.folder, keys)
        with self._busy:
            while True:
                self._until_done(self._save)
                self._add_up(self._redrive.step(spark, request))
                self._until_done(self._save)
                if self._result is not None and self._result.done:
                    return self._result

    def _redrive_step(self, spark: SparkSession) -> None:
        """Do a step of a redrive; it is saved when the storage of the dead letters allows it."""
        if not self._saved():
            return
        request = requested(self._sink.folder)
        if request is None:
            return
        try:
            self._add_up(self._redrive.step(spark, request))
            self._saved()
        except BaseException as error:
            # Reported, so that the command does not wait for it and it is not retried for ever.
            result = self._redrive.failed(request, _explained(error))
            report_result(self._sink.folder, result)
            raise

    def _saved(self) -> bool:
        """Whether the last step of a redrive is saved; if not, the next step tries again."""
        try:
            self._save()
        except (SinkUnavailable, OSError) as error:
            self._report_waiting(_reason(error), self._status.rounds + 1)
            return False
        return True

    def _save(self) -> None:
        """Save what a redrive has sent, and write its result."""
        if self._redrive.unsaved:
            self._redrive.save()
            self._result, self._reported = self._redrive.result(), False
            letters, rows = self._letters.count, self._letters.rows
            status = _recovered(self._status)
            self._status = replace(status, dead_letters=letters, waiting_rows=rows)
        if self._result is not None and not self._reported:
            report_result(self._sink.folder, self._result)
            self._reported = True


def _expect_one_log(reports: list[TaskReport]) -> None:
    if len(set().union(*(each.seen.epochs for each in reports))) > 1:
        raise PipelineError(
            "the batch holds changes of several logs, and their sequences have no common order",
            hint="Give each log a sink of its own.",
        )


def _expect_all(reports: list[TaskReport], sending: _Sending) -> None:
    """Every part that is not settled has reported: a missing report must not count as settled."""
    parts = reports[0].parts if reports else sending.parts
    if parts != sending.parts:
        # It is the first round. What is recorded of other parts is of no use for these.
        sending.repeats |= sending.known > 0
        sending.counts, sending.known, sending.progress = Counts(), 0, {}
        sending.barrier, sending.alone = 0, False
        sending.parts, sending.open = parts, frozenset(range(parts))
    expected = sending.open or frozenset()
    found = {each.part for each in reports}
    if found != expected or len(found) != len(reports):
        raise PipelineError(
            f"of the parts {sorted(expected)} of the batch, {sorted(found)} sent a report",
            hint="Whatever the others sent will come again. Please report it.",
        )


def _recovered(status: DeliveryStatus) -> DeliveryStatus:
    """The status after the destination has accepted something."""
    return replace(status, reason="", since=0.0, rounds=0)


def _reason(error: SinkUnavailable | OSError) -> str:
    if isinstance(error, SinkUnavailable):
        return str(error)
    place = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or type(error).__name__}{place}"


def _explained(error: BaseException) -> str:
    """Why a redrive failed; the text of an error that is not ours may hold secrets."""
    if isinstance(error, HeadraceError):
        return f"{error}. {error.hint}" if error.hint else str(error)
    if isinstance(error, OSError):
        return _reason(error)
    return f"it ended with {type(error).__name__}; `headrace status` may show more"


def _last(seen: ReadChanges) -> int:
    return seen.last


def _count(total: Counts, more: Counts) -> None:
    for name in Counts.__struct_fields__:
        setattr(total, name, getattr(total, name) + getattr(more, name))


def _now() -> int:
    return time.time_ns() // 1000
