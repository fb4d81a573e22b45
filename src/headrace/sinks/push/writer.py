"""A push sink in use by a query: the driver's side of sending a batch until it is settled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ...errors import HeadraceError, LogReplaced, PipelineError, SinkRefused, SinkUnavailable
from .. import DeliveryStatus, LogBatch, Progress, SinkWriter
from ..lake.delta import Marks
from . import disabled
from . import ledger as ledgers
from . import redrive as redriving
from .deadletters import DeadLetters
from .delivery import Counts
from .ledger import Ledger, Seen
from .parcel import Parcel
from .resending import Resending
from .tasks import Deliver, Delivered, Send, Stand, packed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .settings import PushSettings

_T = TypeVar("_T")

FIRST_WAIT = 1.0  # seconds, after a destination took nothing; doubled each time
LONGEST_WAIT = 60.0
_IN_LINE = 1.0  # seconds for which a redrive waits for the batch before it, each time it is tried


@dataclass(slots=True)
class _Sending:
    """A batch that is being sent."""

    batch: int
    after: int = 0  # changes up to this one were settled when the batch came before
    parts: int = 0  # 0: nobody knows yet
    stands: dict[int, Stand] = field(default_factory=dict)  # of the parts that are not settled
    open: frozenset[int] | None = None  # which these are; None: all
    seen: Seen = field(default_factory=Seen)
    counts: Counts = field(default_factory=Counts)
    known: int = 0  # events of these that were sent before, and are not sent again
    repeats: bool = False  # more was sent before than is known
    rounds: int = 0  # in a row that ended before everything was settled, with nothing accepted
    begun: bool = False  # at least one has ended
    accepted_at: float = 0.0  # by the wall clock: when something last was, in any part


class PushWriter(SinkWriter[LogBatch]):
    """A destination while a query sends to it."""

    def __init__(self, sink: PushSettings, writer: str, *, adopt: bool) -> None:
        self._sink = sink
        self._adopt = adopt
        disabled.expect_enabled(sink.folder, sink.address)
        self._ledger = Ledger.open(sink.folder, writer, adopt=adopt)
        self._letters = DeadLetters(sink.letters, writer, adopt=adopt)
        self._ledger.withdraw(self._letters.files)
        self._resending = Resending(sink, self._ledger, self._letters, writer)
        self._writer = writer
        self._closed = threading.Event()
        self._busy = threading.Lock()  # one batch or one redrive at a time
        self._account = DeliveryStatus(
            dead_letters=self._letters.count, waiting_rows=self._letters.rows
        )
        self._accepted_at = time.monotonic()  # when something last was
        self._refusals = 0  # in a row, with nothing accepted between them
        self._answer: redriving.Redriven | None = None  # to the last redrive
        self._told = True  # to whoever asked for it

    def progress(self) -> Progress | None:
        """Up to where every change is settled."""
        return self._ledger.progress()

    def status(self) -> DeliveryStatus:
        """What was sent, and what waits."""
        return self._account

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
            sending = self._begun(batch_id, after)
            while sending.open is None or sending.open:
                self._round(batch, sending)
            self._until_done(lambda: self._settle(sending))
        return sending.seen.changes

    def serve_requests(self, spark: SparkSession) -> None:
        """Send some dead letters again, if somebody has asked for it."""
        wanted = self._resending.unsaved or redriving.asked(self._sink.folder) is not None
        # A sink that has much to send is between two batches only for a moment.
        if wanted and self._busy.acquire(timeout=_IN_LINE):
            try:
                # First a batch that was interrupted: its events may be among the letters.
                if not (self._closed.is_set() or self._ledger.interrupted):
                    self._resend(spark)
            finally:
                self._busy.release()

    def maintain(self) -> None:
        """Keep the ledger short, and the dead letters in few files."""
        if self._busy.acquire(blocking=False):  # else they are being sent again
            try:
                if not self._resending.unsaved:
                    self._ledger.tend()
                    self._letters.tend()
            finally:
                self._busy.release()

    # --- rounds ----------------------------------------------------------------------------------

    def _settled_upto(self) -> int:
        progress = self._ledger.progress()
        return progress.sequence if progress else 0

    def _begun(self, batch_id: int, after: int) -> _Sending:
        self._until_done(lambda: self._ledger.begin(batch_id, _now()))
        self._accepted_at = time.monotonic()
        sending = _Sending(batch_id, after)
        line = self._ledger.paused(batch_id)
        if line is not None and line.rendered == self._sink.rendered:
            sending.parts = line.tasks
            sending.stands = {
                part: Stand(point, line.read.get(part, Seen()))
                for part, point in line.points.items()
            }
            sending.open = frozenset(sending.stands)
            _count(sending.counts, line.counts)
            sending.known = line.counts.sent
        else:
            sending.repeats = line is not None and line.counts.sent > 0
        return sending

    def _round(self, batch: LogBatch, sending: _Sending) -> None:
        told = self._delivered(batch, sending)
        _expect_one_log(told)
        _expect_all(told, sending)
        self._take(told, sending)
        marks = Marks(batch_id=None, epoch=self._epoch(sending.seen), sequence=sending.seen.last)
        added = [file for each in told for file in each.added]
        self._until_done(lambda: self._letters.commit(added, marks=marks))
        self._note(told)
        for each in told:
            if each.refusal:
                self._pause(sending, closed=True)
                self._halt(SinkRefused(each.refusal.message, hint=each.refusal.hint))
        if sending.open:
            closed = self._closed.is_set()
            self._pause(sending, closed=closed)
            if closed:
                raise SinkUnavailable(f"{self._sink.name}: the batch was interrupted")
            self._wait(sending, told)

    def _delivered(self, batch: LogBatch, sending: _Sending) -> list[Delivered]:
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
        content = packed(sending.stands) if sending.stands else b""
        stands = self._until_done(lambda: Parcel.of(content, letters.folder))
        deliver = Deliver(sink, policy, letters.folder, blocked, stands)
        send = Send(sink.rendering, deliver, sending.open, sending.parts, sending.after)
        try:
            reports = batch.run(send)
        finally:
            stands.remove(letters.folder)
        return [msgspec.json.decode(each, type=Delivered) for each in reports]

    def _take(self, told: list[Delivered], sending: _Sending) -> None:
        """Note what the tasks have done, and where they stand."""
        # Each that did not stop has seen everything, and in the last round none does.
        sending.seen = max((each.seen for each in told), key=_last, default=Seen())
        stands: dict[int, Stand] = {}
        for each in told:
            _count(sending.counts, each.counts)
            sending.accepted_at = max(sending.accepted_at, each.accepted_at)
            sending.repeats |= each.again and each.counts.sent > 0
            if each.stopped:
                stands[each.part] = Stand(each.stopped.point, each.read)
            elif each.unread:
                stands[each.part] = sending.stands.get(each.part, Stand())
        sending.stands, sending.open, sending.begun = stands, frozenset(stands), True

    def _wait(self, sending: _Sending, told: list[Delivered]) -> None:
        """Let the destination come back, unless the query is to end."""
        left = [each for each in told if each.open]
        failing = [each for each in left if each.reason]
        if any(each.counts.sent or each.counts.refused for each in told):
            sending.rounds = 1 if failing else 0
        else:
            sending.rounds += 1
        if len(failing) < len(left):
            return  # some have only used up their time
        reason = failing[0].reason
        asked = min(each.stopped.after if each.stopped else 0.0 for each in failing)
        self._waits(reason, sending.rounds)
        if self._closed.wait(max(_doubled(sending.rounds), asked)):
            self._pause(sending, closed=True)
            raise SinkUnavailable(f"{self._sink.name}: {reason}")

    def _waits(self, reason: str, rounds: int) -> None:
        since = self._account.since or time.time()
        self._account = replace(self._account, reason=reason, since=since, rounds=rounds)

    def _until_done(self, do: Callable[[], _T]) -> _T:
        """Do something with the sink's own files; wait while they fail, unless it is to end.

        To raise would mean to send once more what was sent before it.
        """
        tries = 0
        while True:
            try:
                done = do()
            except (SinkUnavailable, OSError) as error:
                tries += 1
                reason = _reason(error)
                self._waits(reason, tries)
                if self._closed.wait(_doubled(tries)):
                    raise SinkUnavailable(f"{self._sink.name}: {reason}") from error
                continue
            if tries:
                self._account = _well(self._account)
            return done

    def _halt(self, error: SinkRefused) -> None:
        disabled.disable(self._sink.folder, self._sink.address, error)
        raise error

    def _pause(self, sending: _Sending, *, closed: bool = False) -> None:
        line = ledgers.Line(
            "paused",
            self._writer,
            sending.batch,
            counts=sending.counts,
            at=_now(),
            tasks=sending.parts,
            points={part: stand.point for part, stand in sending.stands.items()},
            read={part: stand.read for part, stand in sending.stands.items()},
            rendered=self._sink.rendered,
            closed=closed,
        )
        self._until_done(lambda: self._ledger.pause(line))

    def _epoch(self, seen: Seen) -> str:
        """The log that the batch comes from."""
        known = self._ledger.epoch
        epoch = next(iter(seen.epochs), known)
        if known not in ("", epoch) and not self._adopt:
            raise LogReplaced(f"what the sink {self._sink.name} has sent comes from another log")
        return epoch

    def _settle(self, sending: _Sending) -> None:
        seen = sending.seen
        unsure = self._ledger.unsure or sending.repeats
        line = ledgers.Line(
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
            rendered=self._sink.rendered,
        )
        self._ledger.settle(line)
        self._account = _well(self._account)

    def _note(self, told: list[Delivered]) -> None:
        account = self._account
        self._refusals += sum(each.counts.refusals for each in told)
        if any(each.counts.sent for each in told):
            self._refusals = 0
            self._accepted_at = time.monotonic()
            account = _well(account)
        self._account = replace(
            account,
            sent=account.sent + sum(each.counts.sent for each in told),
            requests=account.requests + sum(each.counts.requests for each in told),
            retries=account.retries + sum(each.counts.retries for each in told),
            dead_letters=self._letters.count,
            waiting_rows=self._letters.rows,
        )

    # --- dead letters sent again -----------------------------------------------------------------

    def redrive(self, spark: SparkSession, keys: Sequence[str]) -> redriving.Redriven:
        """Send dead letters again, each row's in order; what is not accepted stays."""
        wish = redriving.ask(self._sink.folder, keys)
        with self._busy:
            while True:
                self._until_done(self._save)
                self._note(self._resending.step(spark, wish))
                self._until_done(self._save)
                if self._answer is not None and self._answer.done:
                    return self._answer

    def _resend(self, spark: SparkSession) -> None:
        """A step of what is asked for; it is noted when the dead letters' storage allows it."""
        if not self._saved():
            return
        wish = redriving.asked(self._sink.folder)
        if wish is None:
            return
        try:
            self._note(self._resending.step(spark, wish))
            self._saved()
        except BaseException as error:
            # Answered, so that nobody waits for it and it is not tried for ever.
            told = self._resending.failed(wish, _explained(error))
            redriving.tell(self._sink.folder, told)
            raise

    def _saved(self) -> bool:
        """Whether all is noted that was sent again; if not, it is tried at the next step."""
        try:
            self._save()
        except (SinkUnavailable, OSError) as error:
            self._waits(_reason(error), self._account.rounds + 1)
            return False
        return True

    def _save(self) -> None:
        """Note what was sent again, and tell whoever asked for it."""
        if self._resending.unsaved:
            self._resending.save()
            self._answer, self._told = self._resending.answer(), False
            letters, rows = self._letters.count, self._letters.rows
            account = _well(self._account)
            self._account = replace(account, dead_letters=letters, waiting_rows=rows)
        if self._answer is not None and not self._told:
            redriving.tell(self._sink.folder, self._answer)
            self._told = True


def _expect_one_log(told: list[Delivered]) -> None:
    if len(set().union(*(each.seen.epochs for each in told))) > 1:
        raise PipelineError(
            "the batch holds changes of several logs, and their sequences have no common order",
            hint="Give each log a sink of its own.",
        )


def _expect_all(told: list[Delivered], sending: _Sending) -> None:
    """Every part that is not settled has said something: silence must not count as settled."""
    parts = told[0].parts if told else sending.parts
    if parts != sending.parts:
        # It is the first round. What was noted of other parts is of no use for these.
        sending.repeats |= sending.known > 0
        sending.counts, sending.known, sending.stands = Counts(), 0, {}
        sending.parts, sending.open = parts, frozenset(range(parts))
    expected = sending.open or frozenset()
    found = {each.part for each in told}
    if found != expected or len(found) != len(told):
        raise PipelineError(
            f"of the parts {sorted(expected)} of the batch, {sorted(found)} told what they sent",
            hint="Whatever the others sent will come again. Please report it.",
        )


def _well(account: DeliveryStatus) -> DeliveryStatus:
    """The same where nothing is wrong any more."""
    return replace(account, reason="", since=0.0, rounds=0)


def _doubled(tries: int) -> float:
    """Seconds to wait after so many tries."""
    return min(FIRST_WAIT * 2.0 ** min(tries - 1, 20), LONGEST_WAIT)


def _reason(error: SinkUnavailable | OSError) -> str:
    if isinstance(error, SinkUnavailable):
        return str(error)
    place = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or type(error).__name__}{place}"


def _explained(error: BaseException) -> str:
    """Why a redrive failed; the text of an error that is not ours may hold what nobody may read."""
    if isinstance(error, HeadraceError):
        return f"{error}. {error.hint}" if error.hint else str(error)
    if isinstance(error, OSError):
        return _reason(error)
    return f"it ended with {type(error).__name__}; `headrace status` may tell more"


def _last(seen: Seen) -> int:
    return seen.last


def _count(total: Counts, more: Counts) -> None:
    for name in Counts.__struct_fields__:
        setattr(total, name, getattr(total, name) + getattr(more, name))


def _now() -> int:
    return time.time_ns() // 1000
