"""A push sink in use by a query: the driver's side of sending a batch until it is settled."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from ...errors import LogReplaced, PipelineError, SinkRefused, SinkUnavailable
from .. import Account, Progress, Troubled
from .._delta import Marks
from . import disabled
from . import ledger as ledgers
from . import redrive as redriving
from .deadletters import DeadLetters, ranks
from .delivery import Counts, Point
from .ledger import Ledger
from .tasks import SAID_DDL, Deliver, Delivered, Seen, Send

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from .settings import PushSettings

logger = logging.getLogger(__name__)

FIRST_WAIT = 1.0  # seconds, after a destination took nothing; doubled each time
LONGEST_WAIT = 60.0


@dataclass(slots=True)
class _Sending:
    """A batch that is being sent."""

    batch: int
    parts: int
    points: dict[int, Point]  # of the parts that are not settled; what is missing is at its start
    open: frozenset[int]
    seen: Seen
    counts: Counts
    known: int = 0  # events of these that were sent before, and are not sent again
    rounds: int = 0  # that ended before everything was settled


class PushWriter:
    """A destination while a query sends to it."""

    def __init__(self, sink: PushSettings, writer: str, *, adopt: bool) -> None:
        self._sink = sink
        self._adopt = adopt
        disabled.expect_enabled(sink.folder, sink.address)
        self._ledger = Ledger.open(sink.folder, writer, adopt=adopt)
        self._letters = DeadLetters(sink.letters, writer, adopt=adopt)
        self._writer = writer
        self._closed = threading.Event()
        self._busy = threading.Lock()  # one batch or one redrive at a time
        self._account = Account(dead_letters=self._letters.count, waiting_rows=self._letters.rows)
        self._accepted_at = time.monotonic()  # when something last was
        self._refusals = 0  # in a row, with nothing accepted between them

    def progress(self) -> Progress | None:
        """Up to where every change is settled."""
        return self._ledger.progress()

    def troubled(self) -> list[Troubled]:
        """None: what a destination does not take is in the dead letters."""
        return []

    def account(self) -> Account:
        """What was sent, and what waits."""
        return self._account

    def close(self) -> None:
        """End what waits, soon."""
        self._closed.set()

    def write(self, changes: DataFrame, batch_id: int) -> int:
        """Send what is not settled yet."""
        if known := self._ledger.settled(batch_id):
            return known.changes
        with self._busy:
            sending = self._begun(changes, batch_id)
            while sending.open:
                self._round(changes, sending)
            self._settle(sending)
        return sending.seen.changes

    def idle(self, spark: SparkSession) -> None:
        """Send dead letters again, if somebody has asked for it."""
        wish = redriving.asked(self._sink.folder)
        if not self._letters.files and self._ledger.interrupted:
            return  # whoever asks wants to know whether the batch goes on
        if wish is not None and self._busy.acquire(blocking=False):
            try:
                self.redrive(spark, wish)
            except BaseException as error:
                # Answered, so that nobody waits for it and it is not tried for ever.
                count = self._letters.count
                told = redriving.Redriven(wish.id, count, 0, count, type(error).__name__)
                redriving.tell(self._sink.folder, told)
                raise
            finally:
                self._busy.release()

    def tend(self) -> None:
        """Keep the ledger short, and the dead letters in few files."""
        self._ledger.tend()
        if self._busy.acquire(blocking=False):  # else they are being sent again
            try:
                self._letters.tend()
            finally:
                self._busy.release()

    # --- rounds ----------------------------------------------------------------------------------

    def _begun(self, changes: DataFrame, batch_id: int) -> _Sending:
        parts = changes.rdd.getNumPartitions()
        self._ledger.begin(batch_id, _now())
        self._accepted_at = time.monotonic()
        sending = _Sending(batch_id, parts, {}, frozenset(range(parts)), Seen(), Counts())
        if known := self._ledger.paused(batch_id, parts):
            sending.points, sending.open = dict(known.points), frozenset(known.points)
            _count(sending.counts, known.counts)
            sending.known = known.counts.sent
        return sending

    def _round(self, changes: DataFrame, sending: _Sending) -> None:
        told = self._delivered(changes, sending)
        _expect_one_log(told)
        # Each that did not stop has seen everything, and in the last round none does.
        sending.seen = max((each.seen for each in told), key=_last, default=Seen())
        for each in told:
            _count(sending.counts, each.counts)
        epoch = self._epoch(sending.seen)
        added = [file for each in told for file in each.added]
        marks = Marks(batch_id=None, epoch=epoch, sequence=sending.seen.last)
        self._letters.commit(added, marks=marks)
        stopped = [each for each in told if each.stopped]
        sending.points = {each.part: each.stopped.point for each in stopped if each.stopped}
        sending.open = frozenset(sending.points)
        self._note(told)
        for each in stopped:
            if each.refusal:
                self._pause(sending, closed=True)
                self._halt(SinkRefused(each.refusal.message, hint=each.refusal.hint))
        if stopped:
            self._pause(sending)
            self._wait(sending, stopped)

    def _delivered(self, changes: DataFrame, sending: _Sending) -> list[Delivered]:
        sink = self._sink
        patient = time.monotonic() - self._accepted_at < sink.patience_seconds
        policy = msgspec.structs.replace(
            sink.policy,
            gives_up=bool(sending.rounds) and not patient,
            refusals=self._refusals,
            probes=sending.rounds,
        )
        deliver = Deliver(sink, policy, sink.letters, self._letters.blocked(), sending.points)
        send = Send(sink.rendering, deliver, sending.open)
        said = [row["said"] for row in changes.mapInArrow(send, SAID_DDL).collect()]
        return [msgspec.json.decode(each, type=Delivered) for each in said]

    def _wait(self, sending: _Sending, stopped: list[Delivered]) -> None:
        """Let the destination come back, unless the query is to end."""
        progress = any(each.counts.sent for each in stopped)
        sending.rounds = 1 if progress else sending.rounds + 1
        told = [each.stopped for each in stopped if each.stopped]
        reason = told[0].reason
        self._account = replace(
            self._account,
            reason=reason,
            since=self._account.since or time.time(),
            rounds=sending.rounds,
        )
        doubled = FIRST_WAIT * 2.0 ** min(sending.rounds - 1, 20)
        wait = max(min(doubled, LONGEST_WAIT), min(each.after for each in told))
        if self._closed.wait(wait):
            self._pause(sending, closed=True)
            raise SinkUnavailable(f"{self._sink.name}: {reason}")

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
            points=sending.points,
            closed=closed,
        )
        self._ledger.pause(line)

    def _epoch(self, seen: Seen) -> str:
        """The log that the batch comes from."""
        known = self._ledger.epoch
        epoch = next(iter(seen.epochs), known)
        if known not in ("", epoch) and not self._adopt:
            raise LogReplaced(f"what the sink {self._sink.name} has sent comes from another log")
        return epoch

    def _settle(self, sending: _Sending) -> None:
        seen = sending.seen
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
            again=sending.counts.sent - sending.known if self._ledger.unsure else 0,
            rendered=self._sink.rendered,
        )
        self._ledger.settle(line)
        self._account = replace(self._account, reason="", since=0.0, rounds=0)

    def _note(self, told: list[Delivered]) -> None:
        account = self._account
        self._refusals += sum(each.counts.refused for each in told)
        if any(each.counts.sent for each in told):
            self._refusals = 0
            self._accepted_at = time.monotonic()
            account = replace(account, reason="", since=0.0, rounds=0)
        self._account = replace(
            account,
            sent=account.sent + sum(each.counts.sent for each in told),
            requests=account.requests + sum(each.counts.requests for each in told),
            retries=account.retries + sum(each.counts.retries for each in told),
            dead_letters=self._letters.count,
            waiting_rows=self._letters.rows,
        )

    # --- dead letters sent again -----------------------------------------------------------------

    def redrive(self, spark: SparkSession, wish: redriving.Wish) -> redriving.Redriven:
        """Send dead letters again, each row's in order; what is not accepted stays."""
        letters, sink = self._letters, self._sink
        before = letters.count
        redriving.tell(sink.folder, redriving.Redriven(wish.id, before, left=before, done=False))
        told = self._resent(spark, wish) if letters.files else []
        opened = [file for each in told for file in each.opened]
        added = [file for each in told for file in each.delivered.added]
        kept = [file for each in opened for file in each.added]
        marks = Marks(batch_id=None, epoch=self._ledger.epoch, sequence=0)
        counts = Counts()
        for each in told:
            _count(counts, each.delivered.counts)
        # Before they leave the table: who is killed in between sends them twice, and none is
        # missed when they are counted.
        self._ledger.settle(ledgers.Line("redriven", self._writer, counts=counts, at=_now()))
        letters.commit([*kept, *added], [each.removed for each in opened], marks=marks)
        self._note([each.delivered for each in told])
        done = redriving.Redriven(
            wish.id,
            before,
            counts.sent,
            letters.count,
            next((each.delivered.reason for each in told if each.delivered.reason), ""),
            refused=counts.refused,
            waiting=counts.waiting,
            reasons=redriving.reasons(told),
        )
        redriving.tell(sink.folder, done)
        return done

    def _resent(self, spark: SparkSession, wish: redriving.Wish) -> list[redriving.Resent]:
        sink, files = self._sink, self._letters.files
        folder = self._letters.folder
        parts = sink.parallelism or min(spark.sparkContext.defaultParallelism, len(files))
        reading = redriving.Open(folder, files, frozenset(wish.keys), ranks(folder, files), parts)
        numbers = spark.range(len(files), numPartitions=min(len(files), 8 * parts))
        letters = numbers.mapInArrow(reading, redriving.OPENED_DDL)
        placed = letters.repartitionById(parts, "part").sortWithinPartitions(*redriving.ORDER)
        sending = redriving.Resend(sink, sink.policy, folder)
        rows = placed.mapInArrow(sending, SAID_DDL).collect()
        return [msgspec.json.decode(row["said"], type=redriving.Resent) for row in rows]


def _expect_one_log(told: list[Delivered]) -> None:
    if len(set().union(*(each.seen.epochs for each in told))) > 1:
        raise PipelineError(
            "the batch holds changes of several logs, and their sequences have no common order",
            hint="Give each log a sink of its own.",
        )


def _last(seen: Seen) -> int:
    return seen.last


def _count(total: Counts, more: Counts) -> None:
    for name in Counts.__struct_fields__:
        setattr(total, name, getattr(total, name) + getattr(more, name))


def _now() -> int:
    return time.time_ns() // 1000
