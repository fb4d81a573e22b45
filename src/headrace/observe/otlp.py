"""Spans as OpenTelemetry sends them, over OTLP and HTTP. It needs the extra `otel`."""

import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    set_span_in_context,
)

from .traces import TraceIds, TraceSpan

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _Ids(IdGenerator):
    """Random numbers, but for the first span of a transaction's trace."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self._next = threading.local()

    def begin(self, ids: TraceIds) -> None:
        """The next span of this thread has these."""
        self._next.ids = ids

    def generate_trace_id(self) -> int:
        ids: TraceIds | None = getattr(self._next, "ids", None)
        return self._random.generate_trace_id() if ids is None else ids.trace

    def generate_span_id(self) -> int:
        ids: TraceIds | None = getattr(self._next, "ids", None)
        self._next.ids = None
        return self._random.generate_span_id() if ids is None else ids.root


class OtlpExporter:
    """Sends spans to a collector; what it does not take in time is dropped, and that is logged."""

    def __init__(self, endpoint: str, *, service: str) -> None:
        """`endpoint` is the collector's address, without the path of traces."""
        self._ids = _Ids()
        resource = Resource.create({"service.name": service})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        url = f"{endpoint.rstrip('/')}/v1/traces"
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("headrace")

    def export(self, span: TraceSpan) -> None:
        """Send a span, sooner or later."""
        context = None
        if span.root:
            self._ids.begin(span.ids)
        else:
            parent = SpanContext(*span.ids, is_remote=True, trace_flags=_SAMPLED)
            context = set_span_in_context(NonRecordingSpan(parent))
        begun = self._tracer.start_span(
            span.name,
            context=context,
            kind=SpanKind.INTERNAL,
            attributes=dict(span.attributes),
            start_time=span.begin * 1000,
        )
        begun.end(end_time=max(span.end, span.begin) * 1000)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
