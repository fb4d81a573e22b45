"""One sink kept going: its query started, watched, and started again when it fails."""

import logging
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ..errors import ChangesLost, HeadraceError, LogError, QueryFailed
from ..retry import Backoff
from ..sinks import DeliveryStatus, Progress, SinkPhase, SinkStatus, SinkWriter
from ..sinks.checkpoints import offset_progress
from ..sinks.requests import Requests
from .failures import passing, understood
from .lag import position_of
from .query import Batches, QueryPlan, Stored
from .traced import trace_batch

logger = logging.getLogger(__name__)

BACKOFF = Backoff(first=1.0, longest=60.0)
TRIES = 10  # in a row without a batch stored, for a failure of unknown kind
TRIES_ONCE = 3  # where somebody waits for the end
LOOK_SECONDS = 0.25
GRACE_SECONDS = 5.0  # for a running batch, when the pipeline stops
# A sink that sends notes every few seconds how far it is. To wait for it leaves no task behind that
# goes on sending, and nothing is sent again.
SENDER_GRACE_SECONDS = 20.0
PAUSE_GRACE_SECONDS = 60.0  # nobody waits for a pause, and a batch that is cut off comes again
_PAUSED = "`headrace resume {}` lets it go on; the log keeps what it has not stored."
_WAITS = "Everything waits in the log and is sent when it is back; the other sinks go on."


class Supervised:
    """A sink with a thread that looks after its query."""

    def __init__(self, plan: QueryPlan, spark: SparkSession) -> None:
        self.plan = plan = plan.reached_by(spark)
        self._spark = spark
        self._driver = str(uuid4()) if plan.checkpoint.address else ""
        self._claiming = True
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        # Up to where it has everything; None: not known. A storage may keep one waiting for long.
        self.position = None if plan.checkpoint.address else position_of(plan)
        self._status = SinkStatus(
            sink=plan.sink.name, phase=SinkPhase.STARTING, sequence=self.position or 0
        )
        self._looked_at = -1  # the batch of the last progress that was seen
        self._failures = 0  # in a row, without a batch stored between them …
        self._unknown = 0  # … and those of them that may never pass
        self._unmaintained = -1
        self._before = self._status  # as it was when the query began
        self._adopting = plan.adopt
        self._ending = False  # the query is to end before it has failed
        self._writer: SinkWriter[Any] | None = None
        self._requests = Requests(plan.checkpoint.notes)
        self._thread = threading.Thread(target=self._keep, name=f"sink {plan.sink.name}")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Ask the query to end after the batch that it is at."""
        self._stopping.set()
        if writer := self._writer:
            writer.close()  # the thread may be waiting within it

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return not self._thread.is_alive()

    def same(self, plan: QueryPlan | None) -> bool:
        """Whether another plan is for the very same sink, read from the same log."""
        return plan is not None and (plan.sink, plan.feed) == (self.plan.sink, self.plan.feed)

    def status(self) -> SinkStatus:
        """How the sink is doing."""
        return self._status

    def _note(self, **changed: Any) -> None:
        with self._lock:
            self._status = msgspec.structs.replace(self._status, **changed)

    def _keep(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._requests.paused:
                    if not self._rested():
                        break
                elif self._tried():
                    if not self._goes_on():
                        break
                else:
                    self._wait(BACKOFF.wait(self._failures))
        except BaseException:
            self._note(phase=SinkPhase.HALTED, error="the sink's thread failed")
            raise
        if self._status.phase not in (SinkPhase.HALTED, SinkPhase.PAUSED):
            self._note(phase=SinkPhase.STOPPED)

    def _tried(self) -> bool:
        """Run the query to its end; returns whether that is the end of the sink."""
        try:
            self._run()
        except Exception as error:
            if self._ending or self._interrupted():
                return True  # that interrupts what is at work
            logger.debug("sink=%s failed", self.plan.sink.name, exc_info=True)
            return self._failed(understood(error))
        return True

    def _failed(self, error: HeadraceError) -> bool:
        self._failures += 1
        passes = passing(error)
        self._unknown += not passes
        known = passes or isinstance(error, QueryFailed | LogError)
        spent = self._failures >= TRIES_ONCE if self.plan.once else self._unknown >= TRIES
        halted = not known or spent
        phase = SinkPhase.HALTED if halted else SinkPhase.WAITING
        cut_off = isinstance(error, ChangesLost)
        hint = self.plan.sink.lost_changes_hint() if cut_off else error.hint
        self._note(phase=phase, error=str(error), hint=hint)
        return halted

    def _interrupted(self) -> bool:
        """Whether the query is to end: for good, for a pause or for a reset."""
        return self._stopping.is_set() or (not self.plan.once and self._requests.interrupts)

    def _wait(self, seconds: float) -> None:
        """Wait before the next try; a request ends that."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._interrupted():
            self._stopping.wait(LOOK_SECONDS)

    def _rested(self) -> bool:
        """Wait until the sink is no longer paused; False: it is over."""
        # The query may have ended before it was seen how far its last batch came.
        self.position = position_of(self.plan)
        hint = _PAUSED.format(self.plan.sink.name)
        self._note(phase=SinkPhase.PAUSED, sequence=self.position or 0, error="", hint=hint)
        while self._requests.paused:
            if self.plan.once or self._stopping.wait(LOOK_SECONDS):
                return False
        self._failures = self._unknown = 0
        return True

    def _goes_on(self) -> bool:
        """After its query has ended, whether it begins once more; False: it is over."""
        if self.plan.once or self._stopping.is_set():
            return False
        if self._status.phase is not SinkPhase.HALTED:
            return True  # it was paused, or is to be reset
        if self.plan.sink.keeps_dead_letters:
            self._decline()
        self._requests.take_resume()  # one from before it halted is no answer to that
        while not self._stopping.wait(LOOK_SECONDS):
            if self._resumed():
                self._failures = self._unknown = 0
                return True
        return False

    def _resumed(self) -> bool:
        """Whether a halted sink is to go on."""
        sink = self.plan.sink
        if sink.redrive_requested():
            logger.info("sink=%s goes on, a redrive was requested", sink.name)
            return True
        return self._requests.interrupts or self._requests.take_resume()

    def _decline(self) -> None:
        sink = self.plan.sink
        try:
            sink.decline_redrive(self._status.error)
        except (HeadraceError, OSError) as error:
            # It is answered when the sink halts the next time: the request is still there.
            logger.warning("sink=%s cannot report that it halts: %s", sink.name, error)

    def _run(self) -> None:
        plan, checkpoint, name = self.plan, self.plan.checkpoint, self.plan.sink.name
        self._ending = False
        self._note(phase=SinkPhase.STARTING)
        self._take()
        if self._adopting and (aside := checkpoint.set_aside()):
            logger.info("sink=%s adopted, its checkpoint so far is in %s", name, aside)
        self._adopting = False
        self._reset()
        checkpoint.examine()
        if self._claiming:
            checkpoint.claim(self._driver)
        self._claiming = False
        checkpoint.note(checkpoint.committed())
        # Until a batch is stored: later, whoever else took over is not to be pushed out again.
        adopt = plan.adopt and self._status.batch < 0
        writer = plan.sink.open(checkpoint.writer(), adopt=adopt)
        try:
            self._follow(writer)
        finally:
            writer.close()  # whatever runs beside its batches ends

    def _follow(self, writer: SinkWriter[Any]) -> None:
        plan = self.plan
        starting = plan.starting(writer)
        self._arrived(plan.checkpoint.sequence() if starting is None else starting - 1)
        self._note(
            failed_tables=tuple(writer.failed_tables()), rescued=dict(writer.rescued_values())
        )
        batches = plan.batches(writer, self._stored, self._driver)
        batches.unmaintained = self._unmaintained
        self._before = self._status
        self._writer = writer
        query = plan.start(self._spark, batches, starting)
        try:
            self._watch(query, batches, writer)
        except StreamingQueryException as error:
            raise batches.error or error from None
        finally:
            self._unmaintained = batches.unmaintained
            writer.close()  # or a batch that waits would go on in Spark's thread
            if query.isActive:
                query.stop()

    def _take(self) -> None:
        """Take a checkpoint in a storage when the sink starts; later it must still be ours."""
        checkpoint = self.plan.checkpoint
        if not self._claiming:
            checkpoint.expect_claimed(self._driver)
        # Until it is known again: a reset may go back behind what was noted.
        checkpoint.note(None)

    def _reset(self) -> None:
        """Begin again, if that is requested; done from its beginning if it is interrupted."""
        request = self._requests.to_reset
        if request is None:
            return
        checkpoint, sink = self.plan.checkpoint, self.plan.sink
        try:
            sink.reset_effect()  # before anything is touched: some sinks cannot begin again
            checkpoint.begin_after(request.epoch, request.after)
            self._claiming = True  # what was moved aside has taken the claim with it
            sink.reset(checkpoint.writer())
        except HeadraceError as error:
            if not passing(error):
                self._requests.finish_reset()
            raise
        self._requests.finish_reset()
        self._looked_at, self.position = -1, request.after
        self._note(batch=-1, sequence=request.after)
        logger.info("sink=%s begins again after_sequence=%d", sink.name, request.after)

    def _watch(self, query: StreamingQuery, batches: Batches, writer: SinkWriter[Any]) -> None:
        while not _ended(query, within=LOOK_SECONDS):  # raises when the query failed
            self._look(query)
            self._look_at_catalog(writer)
            if (status := writer.status()) is not None:
                self._watch_deliveries(writer, status)
            if self._interrupted():
                self._ending = True
                writer.close()
                self._end(query, batches, sends=status is not None)
                return
        writer.finish()
        self._look(query)
        self._look_at_catalog(writer)
        if (status := writer.status()) is not None:
            self._count(status)

    def _look_at_catalog(self, writer: SinkWriter[Any]) -> None:
        if (failure := writer.catalog_failure()) != self._status.catalog:
            self._note(catalog=failure)

    def _watch_deliveries(self, writer: SinkWriter[Any], status: DeliveryStatus) -> None:
        """See how a sink that sends is doing, and let it do what was requested."""
        self._count(status)
        if status.reason:
            since = datetime.fromtimestamp(status.since, UTC)
            error = f"{status.reason}; nothing has been taken since {since:%Y-%m-%d %H:%M:%S} UTC"
            self._note(phase=SinkPhase.WAITING, error=error, hint=_WAITS)
            if self.plan.once and status.rounds >= TRIES_ONCE:
                writer.close()
        elif self._status.phase is SinkPhase.WAITING:
            self._note(phase=SinkPhase.STREAMING, error="", hint="")
        if not self._interrupted():
            writer.serve_requests(self._spark)

    def _count(self, status: DeliveryStatus) -> None:
        before = self._before
        self._note(
            sent=before.sent + status.sent,
            requests=before.requests + status.requests,
            retries=before.retries + status.retries,
            dead_letters=status.dead_letters,
            waiting_rows=status.waiting_rows,
        )

    def _end(self, query: StreamingQuery, batches: Batches, *, sends: bool) -> None:
        """Stop between two batches, if the running one ends in time."""
        batches.close()
        grace = SENDER_GRACE_SECONDS if sends else GRACE_SECONDS
        if not self._stopping.is_set():
            grace = PAUSE_GRACE_SECONDS
        deadline = time.monotonic() + grace
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
            _ended(query, within=0.05)

    def _stored(self, stored: Stored) -> None:
        """Called by Spark's thread after each batch."""
        if stored.batch > self._status.batch:
            self._failures = self._unknown = 0
        rate: dict[str, float] = {}
        if stored.changes:
            rate["changes_per_second"] = stored.changes / stored.seconds
            rate["batch_seconds"] = stored.seconds
        self._note(
            phase=SinkPhase.STREAMING,
            batch=stored.batch,
            changes=self._status.changes + stored.changes,
            failed_tables=stored.failed_tables,
            rescued=dict(stored.rescued),
            error="",
            hint="",
            **rate,
        )

    def _look(self, query: StreamingQuery) -> None:
        """See how far the query is; asking Spark costs, so only after a batch."""
        if self._status.phase is SinkPhase.STARTING:
            if query.status["message"].startswith("Waiting"):  # it has looked: nothing is new
                self._note(phase=SinkPhase.STREAMING, error="", hint="")
        elif self._looked_at < self._status.batch:
            self._look_closely(query.lastProgress)

    def _look_closely(self, progress: Any) -> None:
        if progress is None:
            return
        # What an idle query reports bears the number of the batch to come.
        ran = "addBatch" in progress["durationMs"]
        self._looked_at = progress["batchId"] if ran else progress["batchId"] - 1
        [source] = progress["sources"]
        if (end := _progress(source["endOffset"])) is not None:
            with suppress(OSError):  # what was noted before holds as well
                self.plan.checkpoint.note(end)
            self._arrived(end.sequence)

    def _arrived(self, sequence: int) -> None:
        status, plan = self._status, self.plan
        trace_batch(plan.feed, plan.sink.name, status.sequence, sequence, status.batch_seconds)
        self.position = sequence
        self._note(sequence=sequence)


def _ended(query: StreamingQuery, *, within: Any) -> bool:
    # Seconds may have a fraction there, whatever its annotation says.
    return bool(query.awaitTermination(within))


def _progress(offset: str | None) -> Progress | None:
    return offset_progress(offset) if offset and offset != "null" else None
