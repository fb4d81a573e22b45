"""Whether everything works: healthy, degraded or unhealthy, and why.

Nothing is remembered of a part but when a source was last heard: every answer is made anew from
what the parts report, so that it is as current as they are.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

import msgspec

from ..errors import LogDamaged
from ..log import Log, RetentionStatus
from ..metrics import PipelineState
from ..sinks import SinkPhase, SinkStatus
from ..sinks.verification import Verification
from ..sources import FORMER, Phase, Status
from .settings import ServerSettings


class HealthStatus(StrEnum):
    """How well a thing does, best first."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # it works, but not all of it
    UNHEALTHY = "unhealthy"


class SourceHealth(msgspec.Struct, frozen=True):
    """How a source does."""

    source: str
    status: HealthStatus
    reasons: list[str]
    phase: Phase
    lag_seconds: float
    lag_bytes: int
    heard_at: int  # µs since 1970; 0: never
    errored: dict[str, str]  # table -> reason
    inserts_only: dict[str, str]  # table -> the statement after which all of it is captured
    notes: list[str]  # what is as an operator wants it, and good to know


class SinkHealth(msgspec.Struct, frozen=True):
    """How a sink does."""

    sink: str
    status: HealthStatus
    reasons: list[str]
    phase: SinkPhase | None  # None: it is not reported
    lag: int | None  # changes; None: not known
    lag_seconds: float | None  # since the oldest of these was captured; None: not known
    notes: list[str]
    verified: Verification | None = (
        None  # its last comparison with its sources; None: there is none
    )


class PipelineHealth(msgspec.Struct, frozen=True):
    """How the pipeline and its sinks do; the worst of them decides."""

    status: HealthStatus
    reasons: list[str]
    running: bool
    reported_at: int  # µs since 1970; 0: never
    sinks: list[SinkHealth]


class LogHealth(msgspec.Struct, frozen=True):
    """What the log holds."""

    epoch: str
    total_events: int
    first_sequence: int
    latest_sequence: int
    total_size_bytes: int
    status: HealthStatus
    reasons: list[str]  # who loses changes, or soon will, because there is no room


class HealthReport(msgspec.Struct, frozen=True):
    """The answer of /health; the worst of sources, sinks and the log decides.

    Whoever has no key where one is needed, or one of a part only, gets the status alone.
    """

    status: HealthStatus
    sources: list[SourceHealth] | msgspec.UnsetType = msgspec.UNSET
    pipeline: PipelineHealth | msgspec.UnsetType | None = msgspec.UNSET  # None: there is none
    log: LogHealth | msgspec.UnsetType = msgspec.UNSET

    @property
    def sink_ages(self) -> dict[str, float | None]:
        """How many seconds each sink is behind."""
        sinks = self.pipeline.sinks if isinstance(self.pipeline, PipelineHealth) else []
        return {sink.sink: sink.lag_seconds for sink in sinks}


class HealthCheck:
    """Judges statuses; remembers when each source was last heard."""

    def __init__(
        self,
        settings: ServerSettings,
        clock: Callable[[], float] = time.time,
        room: Callable[[], RetentionStatus] = RetentionStatus,
    ) -> None:
        self._settings = settings
        self._room = room
        self._clock = clock
        self._started = clock()
        self._heard: dict[str, float] = {}

    def take_up(self, settings: ServerSettings) -> None:
        """Judge by other settings from now on."""
        self._settings = settings

    def report(
        self, statuses: Sequence[Status], log: Log, pipeline: PipelineState | None = None
    ) -> HealthReport:
        """The state of everything now."""
        sources = [self._source(status) for status in statuses]
        sinks = None if pipeline is None else self._pipeline(pipeline, log)
        kept = _log(log, self._room())
        parts = [*(source.status for source in sources), kept.status]
        parts += [sinks.status] if sinks else []
        return HealthReport(_worst(parts), sources, sinks, kept)

    def _source(self, status: Status) -> SourceHealth:
        bad, poor = self._failures(status), _shortcomings(status)
        return SourceHealth(
            status.source,
            _verdict(bad, poor),
            [*bad, *poor],
            status.phase,
            status.lag_seconds,
            status.lag_bytes,
            status.heard_at,
            status.errored,
            status.inserts_only,
            list(_notes(status)),
        )

    def _pipeline(self, pipeline: PipelineState, log: Log) -> PipelineHealth:
        sinks = [self._sink(name, pipeline, log) for name in pipeline.names]
        reasons = [] if pipeline.running else [f"the pipeline: {pipeline.report.detail}"]
        return PipelineHealth(
            _worst([_verdict([], reasons), *(sink.status for sink in sinks)]),
            reasons,
            pipeline.running,
            pipeline.report.reported_at,
            sinks,
        )

    def _sink(self, name: str, pipeline: PipelineState, log: Log) -> SinkHealth:
        status = pipeline.sink(name)
        lag, age = pipeline.lag(name, log.stats()), _age(self._clock(), name, pipeline, log)
        paused = status is not None and status.phase is SinkPhase.PAUSED
        most = self._settings.max_sink_lag_seconds
        reasons = list(_sink_shortcomings(status)) if status else []
        if not pipeline.running and not paused:
            reasons.insert(0, "the pipeline does not run")
        elif status is None:
            reasons.append("the running pipeline does not have it")
        if age is not None and age > most and not paused:
            reasons.append(f"it is {age:.0f} s behind, server.max_sink_lag_seconds is {most:g}")
        return SinkHealth(
            name,
            _verdict([], reasons),
            reasons,
            status.phase if status else None,
            lag,
            age,
            list(_sink_notes(status)) if status else [],
            status.verified if status else None,
        )

    def _failures(self, status: Status) -> list[str]:
        silence, settings = self._silence(status), self._settings
        failures = []
        if status.phase is Phase.HALTED:
            failures.append(" ".join(filter(None, ("it has halted:", status.error, status.hint))))
        elif status.phase not in (Phase.STOPPED, Phase.PAUSED) and silence > settings.stall_seconds:
            failures.append(
                f"it has stalled: nothing heard for {silence:.0f} s, "
                f"server.stall_seconds is {settings.stall_seconds:g}. {status.error}".strip()
            )
        if status.lag_seconds > settings.max_lag_seconds and status.phase is not Phase.PAUSED:
            failures.append(
                f"it is {status.lag_seconds:.0f} s behind, "
                f"server.max_lag_seconds is {settings.max_lag_seconds:g}"
            )
        return failures

    def _silence(self, status: Status) -> float:
        """Seconds since the source sent anything.

        A source that cannot reconnect may have forgotten when that was, so it is remembered here;
        one never heard has been silent since the server began.
        """
        heard = max(status.heard_at, status.stored_at) / 1e6
        heard = max(heard, self._heard.get(status.source, self._started))
        self._heard[status.source] = heard
        return self._clock() - heard


def _shortcomings(status: Status) -> list[str]:
    shortcomings = [
        f"table {table} is not captured: {reason}" for table, reason in status.errored.items()
    ]
    if status.phase is Phase.STOPPED:
        shortcomings.append("it is stopped")
    if status.phase is Phase.WAITING:
        shortcomings.append(f"it does not answer and is tried again: {status.error}")
    return [*shortcomings, *status.warnings]


def _notes(status: Status) -> Iterator[str]:
    if status.phase is Phase.PAUSED:
        yield "it is paused"
    for table, statement in status.inserts_only.items():
        yield f"table {table} is captured for inserts only; all of it after: {statement}"
    for table in status.former:
        yield f"table {table} {FORMER}"


def _sink_shortcomings(status: SinkStatus) -> Iterator[str]:
    if status.phase is SinkPhase.HALTED:
        yield " ".join(filter(None, ("it has halted:", status.error, status.hint)))
    elif status.error and status.phase is not SinkPhase.PAUSED:
        # Also while it starts again: between two attempts nothing is well.
        yield f"it is tried again: {status.error}"
    elif status.phase is SinkPhase.STOPPED:
        yield "it is stopped"
    elif status.phase is SinkPhase.STARTING:
        # Only once it is open does it know which tables it cannot follow.
        yield "it is starting"
    for failed in status.failed_tables:
        yield " ".join(
            filter(None, (f"table {failed.table} is not followed:", failed.reason, failed.hint))
        )
    if status.catalog:
        yield status.catalog
    if status.verified and not status.verified.sound:
        yield (
            f"{status.verified.summary()}; `headrace verify {status.sink}` names the rows, "
            "and with --repair takes new snapshots"
        )
    if status.dead_letters:
        yield (
            f"{status.dead_letters} dead letters wait; "
            f"`headrace redrive {status.sink}` sends them again"
        )


def _sink_notes(status: SinkStatus) -> Iterator[str]:
    if status.phase is SinkPhase.PAUSED:
        yield "it is paused"
    if status.verified and status.verified.sound:
        yield status.verified.summary()


def _age(now: float, name: str, pipeline: PipelineState, log: Log) -> float | None:
    """Seconds since the oldest change was captured that a sink has not stored."""
    status = pipeline.sink(name)
    lag = pipeline.lag(name, log.stats())
    if not lag:
        return None if lag is None else 0.0
    if not pipeline.folder.same_log:
        return None
    first = max(status.sequence + 1 if status else 0, log.first_sequence)
    try:
        waiting = log.place(first)
    except LogDamaged:
        return None  # the log's own health says it
    return None if waiting is None else max(now - waiting.captured_at / 1e6, 0.0)


def _verdict(bad: Sequence[str], poor: Sequence[str]) -> HealthStatus:
    if bad:
        return HealthStatus.UNHEALTHY
    return HealthStatus.DEGRADED if poor else HealthStatus.HEALTHY


def _worst(statuses: Sequence[HealthStatus]) -> HealthStatus:
    order = list(HealthStatus)
    return max(statuses, key=order.index, default=order[0])


def _log(log: Log, room: RetentionStatus) -> LogHealth:
    stats = log.stats()
    damage = [f"{log.damage}. {LogDamaged.hint}"] if log.damage else []
    return LogHealth(
        log.epoch,
        stats.count,
        stats.first_sequence,
        stats.latest_sequence,
        stats.total_bytes,
        _verdict(damage, room.reasons),
        [*damage, *room.reasons],
    )
