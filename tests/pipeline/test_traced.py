"""Traces of a change from its commit to clients and sinks, as a collector gets them."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pyspark.sql import SparkSession

from headrace.change.event import Transaction
from headrace.config import load
from headrace.errors import ConfigError
from headrace.observe import traces
from headrace.run import traced
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.testing import wait_until
from tests.changes import make_change, opened_writer
from tests.pipeline.sites import Site
from tests.serve.sse import Reader
from tests.sinks.socket_sink import Courier, opened_office

COMMIT, CAPTURED = 1_730_250_000_000_000, 1_730_250_000_250_000


class Collector:
    """An OTLP receiver, which decodes what it gets."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []  # with the name of the service
        collected = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collected.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            [service] = [
                each.value.string_value
                for each in resource.resource.attributes
                if each.key == "service.name"
            ]
            for scope in resource.scope_spans:
                self.spans += [(service, span) for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    thread.join()
    collector.server.server_close()


def config(folder: Path, **telemetry: object) -> Any:
    file = folder / "headrace.yaml"
    given = ", ".join(f"{name}: {value!r}" for name, value in telemetry.items())
    source = "sources: {db: {type: postgres, url: 'postgresql://127.0.0.1:1/x'}}\n"
    file.write_text(source + f"telemetry: {{{given}}}\n")
    return load(file)


def test_a_transaction_is_one_trace_through_all_processes(
    tmp_path: Path, spark: SparkSession, collector: Collector
) -> None:
    site, settings = Site(tmp_path, spark), ServerSettings(port=0)
    traced_config = config(tmp_path, endpoint=collector.url, sample=1)
    with opened_writer(site.log) as writer:
        app = create_app(writer.log, statuses=list, copy_again=None, settings=settings)
        table, moment = writer.table("users"), Transaction("4711", COMMIT, CAPTURED)
        change = make_change(table=table, key={"id": "1"}, after={"id": "1"}, transaction=moment)
        feed = app.state.service.feed
        with (
            BackgroundServer(app, settings) as server,
            traced(traced_config, "headrace"),
            Reader(f"{server.url}/v1/changes/stream"),
        ):
            wait_until(lambda: feed.waiting == 1)
            writer.append([change])
            wait_until(lambda: dict(feed.delivered.buckets())["+Inf"] == 1)
    with opened_office() as office, traced(traced_config, "headrace-pipeline"):
        site.once(Courier(name="post", port=office.port, batch_seconds=0.1))
    spans = {span.name: (service, span) for service, span in collector.spans}
    assert {name: service for name, (service, _) in spans.items()} == {
        "transaction": "headrace",
        "capture receive": "headrace",
        "capture store": "headrace",
        "serve": "headrace",
        "sink batch": "headrace-pipeline",
    }
    [trace] = {span.trace_id for _, span in collector.spans}
    root = spans["transaction"][1]
    assert not root.parent_span_id
    children = [span for _, span in collector.spans if span.name != "transaction"]
    assert {span.parent_span_id for span in children} == {root.span_id}
    received = spans["capture receive"][1]
    assert (received.start_time_unix_nano, received.end_time_unix_nano) == (
        COMMIT * 1000, CAPTURED * 1000,
    )  # fmt: skip
    attributes = {each.key: each.value.string_value for each in root.attributes}
    assert attributes["headrace.transaction"] == "4711"
    assert len(trace) == 16
    assert traces.current is None


def test_the_same_transactions_are_sampled_everywhere() -> None:
    class Kept:
        def __init__(self) -> None:
            self.spans: list[traces.TraceSpan] = []

        def export(self, span: traces.TraceSpan) -> None:
            self.spans.append(span)

        def close(self) -> None: ...

    many = [traces.TracedTransaction(str(n), COMMIT + n, CAPTURED) for n in range(2000)]
    capture, sink = Kept(), Kept()
    traces.Tracing(capture, 0.1).captured("shop", many)
    traces.Tracing(sink, 0.1).stored("lake", many, 1.0)
    traced_there = {span.ids for span in sink.spans}
    assert {span.ids for span in capture.spans} == traced_there
    assert 100 < len(traced_there) < 320


def test_what_is_wrong_with_the_settings_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"headrace\.telemetry.*http://127\.0\.0\.1:4318"):
        config(tmp_path, endpoint="127.0.0.1:4318")
    with pytest.raises(ConfigError, match="sample"):
        config(tmp_path, endpoint="http://127.0.0.1:4318", sample=2)
    good = config(tmp_path, endpoint="http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "headrace.observe.otlp", None)
    with pytest.raises(ConfigError) as refused, traced(good, "headrace"):
        pass
    assert "headrace[otel]" in refused.value.hint
