"""(1) -> (2): append to the log, then let the source forget."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import msgspec

from .change.event import Batch, Table
from .errors import HeadraceError, LogError, SourceUnavailable
from .log import Log
from .log.files import HINT, is_exhausted
from .retry import Backoff
from .sources import Phase, Source, Status, Stream
from .sources.redact import ColumnRules
from .sources.retained import RetainedWatch
from .sources.worker import Apart

logger = logging.getLogger(__name__)

BACKOFF = Backoff(first=0.5, longest=30.0, jitter=0.25)
_PAUSED = (
    "paused since {since:%Y-%m-%d %H:%M:%S} UTC; meanwhile the database keeps what is not captured "
    "(PostgreSQL: the WAL after the slot), so its disk can fill; `headrace resume {source}` goes on"
)
_BUG = "This is a mistake in Headrace: please report it with the log of this run. Nothing that was \
not stored has been acknowledged; starting again goes on from there."


def copy(stream: Stream, log: Log, source: str) -> None:
    """Move batches from an open source to the log until the stream ends."""
    for batch in stream:
        log.append(source, batch)  # durable first,
        if batch.resume is not None:
            stream.ack(batch.resume)  # forgotten second


@contextmanager
def _waiting_for_files() -> Iterator[None]:
    """That no file can be opened now is no mistake of ours: it is tried again."""
    try:
        yield
    except OSError as error:
        if not is_exhausted(error):
            raise
        raise SourceUnavailable(f"no file can be opened: {error.strerror}", hint=HINT) from error


class Capture:
    """Keeps one source flowing into the log, in a thread of its own."""

    def __init__(self, source: Source, log: Log) -> None:
        self.source = source
        self._log = log
        self._stream: Stream | None = None
        self._status = Status(source=source.name, phase=Phase.STARTING)
        self._failure: HeadraceError | None = None  # of the last attempt
        self._retained = RetainedWatch(source)
        settings = source.source if isinstance(source, Apart) else source
        self._rules = ColumnRules.of_source(settings)
        self._stopping = threading.Event()
        self._waking = threading.Event()  # whoever waits has something to do
        self._paused_at = 0  # microseconds since 1970; 0: it is not paused
        self._copies: list[tuple[str, ...]] = []  # requested, not begun
        self._lock = threading.Lock()
        self._restarting = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"capture-{source.name}", daemon=True
        )

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()
        self._retained.start()

    def close(self) -> None:
        """End after the batch at hand, without waiting for that."""
        self._stopping.set()
        self._waking.set()
        self._retained.close()
        self._close_stream()

    def stop(self) -> None:
        """End after the batch at hand, and wait for that."""
        self.close()
        with self._restarting:
            if self._thread.is_alive():
                self._thread.join()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has halted or was stopped."""
        self._thread.join(timeout)

    def pause(self, at: int) -> None:
        """Let go of the source after the batch at hand, until `resume`; `at` is the present."""
        with self._restarting:
            self._paused_at = at
            self._waking.set()
            self._close_stream()
            if self._halted and not self._stopping.is_set():
                self._restart()

    def resume(self) -> None:
        """Go on: after a pause, or once more after it has halted."""
        with self._restarting:
            self._paused_at = 0
            self._waking.set()
            if self._halted and not self._stopping.is_set():
                self._restart()

    @property
    def _halted(self) -> bool:
        with self._lock:
            return self._status.phase is Phase.HALTED

    def copy_again(self, tables: Sequence[str]) -> None:
        """Copy these tables (none: all) anew, as soon as the batch at hand is stored."""
        # A table that is not there is an error for the caller, and the capture goes on.
        self.source.copy_again(self._log.resume(self.source.name), tables)
        with self._restarting:
            with self._lock:
                self._copies.append(tuple(tables))
            self._waking.set()
            self._close_stream()
            if self._halted and not self._stopping.is_set():
                self._restart()

    def _restart(self) -> None:
        self._thread.join()
        self._failure = None
        self._status = msgspec.structs.replace(
            self._status, phase=Phase.STARTING, error="", hint=""
        )
        self._thread = threading.Thread(
            target=self._run, name=f"capture-{self.source.name}", daemon=True
        )
        self._thread.start()

    def status(self) -> Status:
        """How the source is doing; may be called from any thread."""
        stream, failure = self._stream, self._failure
        status = stream.status() if stream is not None else self._status
        if status.phase is Phase.STARTING and failure is not None:
            status = self._with(status, Phase.WAITING, failure)  # until an attempt has worked
        return self._retained.add_to(status)

    def _run(self) -> None:
        failures = 0  # one after the other
        while self._awake():
            began = time.monotonic()
            try:
                if self._paused_at:
                    self._rest()
                    continue
                with _waiting_for_files():
                    self._once()
            except HeadraceError as error:
                failure = error
            except Exception as error:  # a bug of ours; the thread must not end in silence
                logger.exception("source=%s failed", self.source.name)
                failure = HeadraceError(f"unexpected {error!r}", hint=_BUG)
            else:
                continue
            if not failure.retry and self._halts(failure):
                return
            # What was requested meanwhile ends the wait at once.
            self._report(Phase.WAITING, failure)
            failures = 1 if time.monotonic() - began > BACKOFF.longest else failures + 1
            self._waking.wait(BACKOFF.wait(failures))
        self._status = msgspec.structs.replace(self._status, phase=Phase.STOPPED)

    def _awake(self) -> bool:
        """Whether to go on; what is requested from here on ends the next wait."""
        self._waking.clear()
        return not self._stopping.is_set()

    def _once(self) -> None:
        """One connection, from opening to its end."""
        name = self.source.name
        self._begin_copies()
        stream = self.source.open(self._log.resume(name), self._register)
        self._stream = stream
        try:
            if self._stopping.is_set() or self._copies or self._paused_at:
                return  # requested while there was no stream to close
            copy(stream, self._log, name)
        finally:
            self._status = stream.status()
            if self._status.phase is not Phase.STARTING:
                self._failure = None
            self._stream = None
            stream.close()
            self._log.abandon(name)

    def _register(self, table: Table) -> Table:
        if self._rules:
            self._rules.expect_no_rename(self._log.tables(), table)
        return self._log.register(table)

    def _rest(self) -> None:
        """Stay paused until something is requested."""
        self._begin_copies()  # noted in the log, so that it is done after a restart too
        resume = self._log.resume(self.source.name)
        since = datetime.fromtimestamp(self._paused_at / 1e6, UTC)
        warning = _PAUSED.format(since=since, source=self.source.name)
        self._status = msgspec.structs.replace(
            self.source.describe(resume),
            phase=Phase.PAUSED,
            warnings=(warning,),
        )
        if self._paused_at and not self._stopping.is_set():
            self._waking.wait()

    def _begin_copies(self) -> None:
        with self._lock:
            requested, self._copies = self._copies, []
        for tables in requested:
            resume = self.source.copy_again(self._log.resume(self.source.name), tables)
            if resume is not None:
                self._log.append(self.source.name, Batch((), resume))

    def _close_stream(self) -> None:
        stream = self._stream
        if stream is not None:
            stream.close()

    def _halts(self, error: HeadraceError) -> bool:
        """Halt, unless something has just been requested: it may be the way out."""
        with self._lock:
            halts = not self._copies and not self._paused_at
            if halts:
                self._report(Phase.HALTED, error)
            return halts

    def _report(self, phase: Phase, error: HeadraceError) -> None:
        self._status = self._with(self._status, phase, error)
        self._failure = error
        logger.warning("source=%s phase=%s error=%s", self.source.name, phase, self._status.error)

    def _with(self, status: Status, phase: Phase, error: HeadraceError) -> Status:
        reason = str(error)
        if isinstance(error, LogError) and error.__cause__ is not None:
            reason = f"{reason}: {error.__cause__}"
        hint = error.hint.replace("SOURCE", self.source.name)
        return msgspec.structs.replace(status, phase=phase, error=reason, hint=hint)
