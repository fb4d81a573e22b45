"""What Prometheus scrapes: how everything is doing, as numbers, without a row or a secret."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from . import __version__
from .change.event import Table
from .log import Cursor, Stats
from .log.counts import Histogram
from .sinks import SinkPhase, SinkStatus
from .sinks.report import PipelineFolder, PipelineOverview, lag_of
from .sinks.verification import Verification
from .sources import CopyProgress, Phase, Status

# The oldest text format, which every version of every scraper reads.
MEDIA_TYPE = "text/plain; version=0.0.4"  # in UTF-8
MOST_CURSORS = 500  # that are exposed by name: clients make them, and every name is a series
MOST_TABLES = 500  # whose changes are counted by name, first come; the others are counted together
OTHERS = "(others)"
_AT_WORK = (SinkPhase.STARTING, SinkPhase.STREAMING)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """What the pipeline of this config last reported."""

    folder: PipelineFolder
    report: PipelineOverview

    @property
    def running(self) -> bool:
        """Whether the report is current: its process lives."""
        return self.report.running

    @property
    def sinks(self) -> list[SinkStatus]:
        """The reported sinks; one that is no longer in the config only while it runs."""
        known = self.folder.sinks
        return [sink for sink in self.report.sinks if self.running or sink.sink in known]

    @property
    def names(self) -> list[str]:
        """Every sink, also those that have not been reported."""
        return list(dict.fromkeys([*self.folder.sinks, *(sink.sink for sink in self.sinks)]))

    def sink(self, name: str) -> SinkStatus | None:
        """What was reported of a sink; None: nothing."""
        return next((sink for sink in self.sinks if sink.sink == name), None)

    def lag(self, name: str, log: Stats) -> int | None:
        """How many changes of the log a sink has not stored; None: not known."""
        status, same_log = self.sink(name), self.folder.same_log
        if status is None:
            # Nothing is known to have arrived, so everything is still to come.
            return log.count if same_log else None
        if same_log:
            return lag_of(status, first=log.first_sequence, latest=log.latest_sequence)
        return status.lag if self.running else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCounts:
    """What the log has taken since it was opened, and where it lies."""

    changes: Sequence[tuple[Table, str, int]]  # by operation, in the order in which they first came
    latency: Mapping[str, Histogram]  # by source
    warnings: int  # of changes that go, or soon will, because there is no room
    disk_free: int  # bytes
    disk_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCounts:
    """What the server has answered and delivered since it began."""

    http: Mapping[tuple[str, str, str], int]  # route, method, status
    http_seconds: Mapping[tuple[str, str], Histogram]
    grpc: Mapping[tuple[str, str], int]  # method, code
    grpc_seconds: Mapping[str, Histogram]
    delivered: Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that is exposed."""

    health: StrEnum
    log: Stats
    sources: Sequence[Status]
    cursors: Sequence[Cursor]  # all of them
    named: Sequence[Cursor]  # those that the scraper may know by name
    waiting_subscriptions: int
    counts: LogCounts
    requests: ServedCounts
    pipeline: PipelineState | None = None  # None: the config has none
    sink_ages: Mapping[str, float | None] = field(default_factory=dict)  # seconds behind


class _Exposed(Collector):
    """Measurements as Prometheus' client library takes them."""

    def __init__(self, measured: Measurements) -> None:
        self._measured = measured

    def collect(self) -> Iterator[Metric]:
        measured = self._measured
        yield from _server(measured)
        yield from _requests(measured.requests)
        yield from _log(measured.log, measured.counts)
        yield from _sources(measured.sources)
        yield from _cursors(measured)
        if measured.pipeline is not None:
            yield from _pipeline(measured.pipeline)
            yield from _kept(measured.pipeline, measured.log)
            yield from _verified(measured.pipeline.sinks)
            yield _ages(measured.sink_ages)
            yield from _at_work(measured.pipeline)


def expose(measured: Measurements) -> bytes:
    """The measurements, and what this process uses, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exposed(measured))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _server(measured: Measurements) -> Iterator[Metric]:
    build = GaugeMetricFamily(
        "headrace_build_info", "The version that runs; always 1.", labels=["version"]
    )
    build.add_metric([__version__], 1)
    yield build
    health = GaugeMetricFamily(
        "headrace_health", "1 for what /health says now, 0 for the rest.", labels=["status"]
    )
    for status in type(measured.health):
        health.add_metric([status.value], status is measured.health)
    yield health
    yield GaugeMetricFamily(
        "headrace_subscriptions_waiting",
        "Streams and long polls that have everything and wait for a change.",
        measured.waiting_subscriptions,
    )


def _requests(served: ServedCounts) -> Iterator[Metric]:
    http = CounterMetricFamily(
        "headrace_http_requests",
        "Requests answered over HTTP; a WebSocket counts with 101, what no route has without one.",
        labels=["route", "method", "status"],
    )
    yield _series(http, served.http)
    seconds = HistogramMetricFamily(
        "headrace_http_request_seconds",
        "Until the head of the answer: a long poll with its waiting, a stream without its events.",
        labels=["route", "method"],
    )
    yield _histograms(seconds, served.http_seconds)
    calls = CounterMetricFamily(
        "headrace_grpc_requests",
        "Calls of gRPC that have ended, by their status.",
        labels=["method", "code"],
    )
    yield _series(calls, served.grpc)
    seconds = HistogramMetricFamily(
        "headrace_grpc_request_seconds",
        "How long calls of gRPC took, streams included.",
        labels=["method"],
    )
    yield _histograms(seconds, {(method,): each for method, each in served.grpc_seconds.items()})
    delivered = HistogramMetricFamily(
        "headrace_commit_to_client_seconds",
        "From the commit of an event until it was handed to a reader that had all before it.",
    )
    yield _histograms(delivered, {(): served.delivered})


def _log(log: Stats, counts: LogCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("headrace_log_changes", "Changes that the log keeps.", log.count)
    yield GaugeMetricFamily("headrace_log_bytes", "Bytes of these changes.", log.total_bytes)
    yield GaugeMetricFamily(
        "headrace_log_first_sequence", "Sequence of the oldest change kept.", log.first_sequence
    )
    yield GaugeMetricFamily(
        "headrace_log_latest_sequence",
        "Sequence of the newest change; its growth is the rate of capture.",
        log.latest_sequence,
    )
    yield GaugeMetricFamily(
        "headrace_log_warnings",
        "Who loses changes, or soon will, because there is no room; /health names them.",
        counts.warnings,
    )
    yield GaugeMetricFamily(
        "headrace_disk_free_bytes", "What the disk of the log has left.", counts.disk_free
    )
    yield GaugeMetricFamily(
        "headrace_disk_size_bytes", "How large the disk of the log is.", counts.disk_size
    )
    changes = CounterMetricFamily(
        "headrace_changes",
        "Changes that the log has taken since the process began.",
        labels=["source", "table", "operation"],
    )
    yield _series(changes, _by_table(counts.changes))
    latency = HistogramMetricFamily(
        "headrace_commit_to_log_seconds",
        "From the commit of a change until the log had it on disk; snapshots are left out.",
        labels=["source"],
    )
    yield _histograms(latency, {(source,): each for source, each in counts.latency.items()})


def _by_table(changes: Sequence[tuple[Table, str, int]]) -> Mapping[tuple[str, str, str], int]:
    """Counts by source, table and operation; at most `MOST_TABLES` tables by name."""
    named: dict[tuple[str, str], str] = {}
    counts: Counter[tuple[str, str, str]] = Counter()
    for table, operation, count in changes:
        key = table.source, table.path if table.name else ""
        # A table keeps the name that it got, or a counter would go down.
        name = named.setdefault(key, key[1] if len(named) < MOST_TABLES else OTHERS)
        counts[table.source, name, operation] += count
    return counts


def _sources(sources: Sequence[Status]) -> Iterator[Metric]:
    yield _phases("source", Phase, {each.source: each.phase for each in sources})

    def gauge(name: str, about: str, value: Callable[[Status], float | None]) -> Metric:
        values = {each.source: value(each) for each in sources}
        family = GaugeMetricFamily(f"headrace_source_{name}", about, labels=["source"])
        return _filled(family, values)

    yield gauge(
        "lag_seconds",
        "Age of the newest change captured while the database has more.",
        lambda each: each.lag_seconds,
    )
    yield gauge(
        "lag_bytes", "What the database has and the log has not.", lambda each: each.lag_bytes
    )
    yield gauge(
        "heard_timestamp_seconds",
        "When the database last sent anything.",
        lambda each: _moment(each.heard_at),
    )
    yield gauge(
        "stored_timestamp_seconds",
        "When the log last took changes of it.",
        lambda each: _moment(each.stored_at),
    )
    yield gauge(
        "errored_tables", "Tables that are not captured any more.", lambda each: len(each.errored)
    )
    yield gauge(
        "copying_tables",
        "Tables whose copy is not done.",
        lambda each: sum(not copy.done for copy in each.copies),
    )
    yield gauge(
        "snapshot_rows",
        "Rows that the present or last snapshot has read.",
        lambda each: sum(copy.rows for copy in each.copies),
    )
    yield gauge(
        "snapshot_estimated_rows",
        "Rows that it will have read, as the database estimates them.",
        lambda each: sum(_estimated(copy) for copy in each.copies),
    )
    yield gauge(
        "inserts_only_tables",
        "Tables of which only inserts are captured.",
        lambda each: len(each.inserts_only),
    )
    yield gauge(
        "retained_bytes",
        "What the database keeps for the source: write-ahead log, or captured event rows.",
        lambda each: each.retained_bytes,
    )
    yield gauge(
        "warnings",
        "What an operator should do before it does harm; /health names it.",
        lambda each: len(each.warnings),
    )


def _estimated(copy: CopyProgress) -> int:
    # The guess may be missing or too low, and what is done is known.
    return copy.rows if copy.done else max(copy.estimated_rows, copy.rows)


def _cursors(measured: Measurements) -> Iterator[Metric]:
    latest = measured.log.latest_sequence
    behind = [latest - cursor.sequence for cursor in measured.cursors]
    yield GaugeMetricFamily("headrace_cursors", "Named cursors.", len(behind))
    yield GaugeMetricFamily(
        "headrace_cursors_lag_changes",
        "Changes that the cursor furthest behind has not acked.",
        max(behind, default=0),
    )
    sequence = GaugeMetricFamily(
        "headrace_cursor_sequence",
        "Up to where a cursor's consumers have everything.",
        labels=["cursor", "owner"],
    )
    lag = GaugeMetricFamily(
        "headrace_cursor_lag_changes",
        "Changes in the log beyond a cursor.",
        labels=["cursor", "owner"],
    )
    for cursor in sorted(measured.named, key=lambda cursor: cursor.sequence)[:MOST_CURSORS]:
        labels = [cursor.name, cursor.owner or ""]
        sequence.add_metric(labels, cursor.sequence)
        lag.add_metric(labels, latest - cursor.sequence)
    yield sequence
    yield lag


def _pipeline(pipeline: PipelineState) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "headrace_pipeline_up",
        "1 while the pipeline's process lives and reports, else 0.",
        pipeline.running,
    )
    for name in ("reported", "told"):  # `told` is the old name
        at = GaugeMetricFamily(
            f"headrace_pipeline_{name}_timestamp_seconds", "When it last reported."
        )
        if pipeline.report.reported_at:
            at.add_metric([], pipeline.report.reported_at / 1e6)
        yield at
    working = {each.sink for each in pipeline.sinks if pipeline.running and each.phase in _AT_WORK}
    up = GaugeMetricFamily(
        "headrace_sink_up",
        "1 while a sink starts or streams; 0: it waits, has halted, or is not reported.",
        labels=["sink"],
    )
    yield _filled(up, {name: name in working for name in pipeline.names})


def _kept(pipeline: PipelineState, log: Stats) -> Iterator[Metric]:
    """What stays as it was last reported when the pipeline ends."""
    gauge = _sinks(pipeline.sinks, GaugeMetricFamily)
    yield gauge(
        "sequence",
        "Up to where everything has arrived, as last reported.",
        lambda each: each.sequence or None,
    )
    lag = GaugeMetricFamily(
        "headrace_sink_lag_changes",
        "Changes in the log beyond that, also while the pipeline is down; none: not known.",
        labels=["sink"],
    )
    yield _filled(lag, {name: pipeline.lag(name, log) for name in pipeline.names})
    yield gauge(
        "dead_letters",
        "Events that the destination has not taken, kept in the dead letters, as last reported.",
        lambda each: each.dead_letters,
    )
    yield gauge(
        "waiting_rows",
        "Rows whose later events wait behind dead letters, as last reported.",
        lambda each: each.waiting_rows,
    )
    for name in ("failed_tables", "troubled_tables"):  # `troubled_tables` is the old name
        yield gauge(
            name,
            "Tables that a sink does not follow any more, as last reported.",
            lambda each: len(each.failed_tables),
        )
    yield _sinks(pipeline.sinks, CounterMetricFamily)(
        "rescued_values",
        "Values that their columns could not hold, kept as text in _rescued, as last reported.",
        lambda each: sum(each.rescued.values()),
    )


def _verified(sinks: Sequence[SinkStatus]) -> Iterator[Metric]:
    """What the last comparison of each sink with its sources has found."""

    def gauge(name: str, about: str, value: Callable[[Verification], float]) -> Metric:
        found = {each.sink: each.verified for each in sinks}
        values = {
            sink: value(verified) if verified and verified.at else None
            for sink, verified in found.items()
        }
        family = GaugeMetricFamily(f"headrace_sink_verified_{name}", about, labels=["sink"])
        return _filled(family, values)

    yield gauge(
        "timestamp_seconds",
        "When the sink's tables were last compared with their sources, all of them.",
        lambda found: found.oldest / 1e6,
    )
    yield gauge("rows", "Rows of the sources that were compared then.", lambda found: found.rows)
    yield gauge(
        "different_rows",
        "Rows that were missing, surplus, repeated or different then.",
        lambda found: found.differences,
    )
    yield gauge(
        "different_tables",
        "Tables that were not equal then, or that the sink did not follow.",
        lambda found: sum(not table.sound for table in found.tables),
    )


def _ages(ages: Mapping[str, float | None]) -> Metric:
    family = GaugeMetricFamily(
        "headrace_sink_lag_seconds",
        "Since the oldest change was captured that a sink has not stored; none: not known.",
        labels=["sink"],
    )
    return _filled(family, ages)


def _at_work(pipeline: PipelineState) -> Iterator[Metric]:
    """What is so only while the pipeline runs, and begins at 0 with each of its processes."""
    sinks = pipeline.sinks if pipeline.running else []
    yield _phases("sink", SinkPhase, {each.sink: each.phase for each in sinks})
    yield _sinks(sinks, GaugeMetricFamily)(
        "last_batch_seconds",
        "How long the last batch with changes took.",
        lambda each: each.batch_seconds or None,
    )
    counter = _sinks(sinks, CounterMetricFamily)
    yield counter("changes", "Changes taken from the log.", lambda each: each.changes)
    yield counter(
        "events_sent", "Events that the destination has accepted.", lambda each: each.sent
    )
    yield counter(
        "requests",
        "Windows of events handed over, in a request or what the destination has for it.",
        lambda each: each.requests,
    )
    yield counter("retries", "Events that were sent again.", lambda each: each.retries)


LabelsT = TypeVar("LabelsT", bound=tuple[str, ...])
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _sinks(
    sinks: Sequence[SinkStatus], family: Family
) -> Callable[[str, str, Callable[[SinkStatus], float | None]], Metric]:
    def metric(name: str, about: str, value: Callable[[SinkStatus], float | None]) -> Metric:
        empty = family(f"headrace_sink_{name}", about, labels=["sink"])
        return _filled(empty, {each.sink: value(each) for each in sinks})

    return metric


def _phases(kind: str, phases: Iterable[StrEnum], now: Mapping[str, StrEnum]) -> Metric:
    name, about = f"headrace_{kind}_phase", f"1 for what a {kind} is doing now, 0 for the rest."
    family = GaugeMetricFamily(name, about, labels=[kind, "phase"])
    for each, phase in now.items():
        for known in phases:
            family.add_metric([each, known.value], known is phase)
    return family


def _series(family: CounterMetricFamily, counts: Mapping[LabelsT, int]) -> Metric:
    # A copy: others count while it is read.
    for labels, count in list(counts.items()):
        family.add_metric(labels, count)
    return family


def _histograms(family: HistogramMetricFamily, histograms: Mapping[LabelsT, Histogram]) -> Metric:
    for labels, each in list(histograms.items()):
        family.add_metric(labels, list(each.buckets()), each.total)
    return family


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float | None]
) -> Metric:
    """The family with a sample for each that is known."""
    for label, value in values.items():
        if value is not None:
            family.add_metric([label], value)
    return family


def _moment(microseconds: int) -> float | None:
    return microseconds / 1e6 if microseconds else None
