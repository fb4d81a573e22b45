"""What Prometheus scrapes: how everything is doing, as numbers, without a row or a secret."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from . import __version__
from .log import Cursor, Stats
from .sinks import SinkPhase, SinkStatus
from .sinks.report import PipelineFolder, PipelineOverview, lag_of
from .sources import Phase, Status

# The oldest text format, which every version of every scraper reads.
MEDIA_TYPE = "text/plain; version=0.0.4"  # in UTF-8
MOST_CURSORS = 500  # that are exposed by name: clients make them, and every name is a series
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
class Measurements:
    """Everything that is exposed."""

    health: StrEnum
    log: Stats
    sources: Sequence[Status]
    cursors: Sequence[Cursor]  # all of them
    named: Sequence[Cursor]  # those that the scraper may know by name
    waiting_subscriptions: int
    pipeline: PipelineState | None = None  # None: the config has none


class _Exposed(Collector):
    """Measurements as Prometheus' client library takes them."""

    def __init__(self, measured: Measurements) -> None:
        self._measured = measured

    def collect(self) -> Iterator[Metric]:
        measured = self._measured
        yield from _server(measured)
        yield from _log(measured.log)
        yield from _sources(measured.sources)
        yield from _cursors(measured)
        if measured.pipeline is not None:
            yield from _pipeline(measured.pipeline)
            yield from _kept(measured.pipeline, measured.log)
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


def _log(log: Stats) -> Iterator[Metric]:
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
