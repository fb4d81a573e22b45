"""Whether capture keeps up: healthy, degraded or unhealthy, and why."""

import time
from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from ..log import Log
from ..sources import Phase, Status
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


class LogHealth(msgspec.Struct, frozen=True):
    """What the log holds."""

    epoch: str
    total_events: int
    first_sequence: int
    latest_sequence: int
    total_size_bytes: int


class HealthReport(msgspec.Struct, frozen=True):
    """The answer of /health; the worst source decides.

    Whoever has no key where one is needed, or one of a part only, gets the status alone.
    """

    status: HealthStatus
    sources: list[SourceHealth] | msgspec.UnsetType = msgspec.UNSET
    log: LogHealth | msgspec.UnsetType = msgspec.UNSET


class HealthCheck:
    """Judges statuses; remembers when each source was last heard."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._started = clock()
        self._heard: dict[str, float] = {}

    def report(self, statuses: Sequence[Status], log: Log) -> HealthReport:
        """The state of everything now."""
        sources = [self._source(status) for status in statuses]
        order = list(HealthStatus)
        worst = max((source.status for source in sources), key=order.index, default=order[0])
        return HealthReport(worst, sources, _log(log))

    def _source(self, status: Status) -> SourceHealth:
        bad, poor = self._failures(status), _shortcomings(status)
        health = (
            HealthStatus.UNHEALTHY
            if bad
            else HealthStatus.DEGRADED
            if poor
            else HealthStatus.HEALTHY
        )
        return SourceHealth(
            status.source,
            health,
            [*bad, *poor],
            status.phase,
            status.lag_seconds,
            status.lag_bytes,
            status.heard_at,
            status.errored,
        )

    def _failures(self, status: Status) -> list[str]:
        silence, settings = self._silence(status), self._settings
        failures = []
        if status.phase is Phase.HALTED:
            failures.append(" ".join(filter(None, ("it has halted:", status.error, status.hint))))
        elif status.phase is not Phase.STOPPED and silence > settings.stall_seconds:
            failures.append(
                f"it has stalled: nothing heard for {silence:.0f} s, "
                f"server.stall_seconds is {settings.stall_seconds:g}. {status.error}".strip()
            )
        if status.lag_seconds > settings.max_lag_seconds:
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
    return shortcomings


def _log(log: Log) -> LogHealth:
    stats = log.stats()
    return LogHealth(
        log.epoch, stats.count, stats.first_sequence, stats.latest_sequence, stats.total_bytes
    )
