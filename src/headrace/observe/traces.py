"""Traces of some transactions, from their commit to clients and sinks.

A trace and its first span are derived from the transaction itself. So every process that handles
the transaction adds to the same trace, and nothing about it is stored with the changes; which
transactions are traced is decided alike everywhere.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

_ALL = 1 << 64


class TracedTransaction(NamedTuple):
    """What is known of a transaction wherever one of its changes is; times in µs since 1970."""

    id: str
    commit_time: int
    captured_at: int


class TraceIds(NamedTuple):
    """The trace of a transaction, and its first span."""

    trace: int
    root: int


class TraceSpan(NamedTuple):
    """Something that took from `begin` to `end`, in µs since 1970."""

    ids: TraceIds
    name: str
    begin: int
    end: int
    attributes: Mapping[str, str | int]
    root: bool = False


class SpanExporter(Protocol):
    """Sends spans away, from a thread of its own."""

    def export(self, span: TraceSpan) -> None:
        """Send a span, sooner or later."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class Tracing:
    """Makes the spans of the transactions that are traced."""

    def __init__(self, exporter: SpanExporter, sample: float) -> None:
        """`sample` is the share of transactions that are traced."""
        self._exporter = exporter
        self._below = int(sample * _ALL)

    def captured(self, source: str, transactions: Iterable[TracedTransaction]) -> None:
        """The log has taken these."""
        now = time.time_ns() // 1000
        known = {"headrace.source": source}
        for each in transactions:
            if (ids := self._ids(each)) is None:
                continue
            about = known | {"headrace.transaction": each.id}
            received = max(each.captured_at, each.commit_time)
            self._exporter.export(
                TraceSpan(ids, "transaction", each.commit_time, now, about, root=True)
            )
            self._exporter.export(
                TraceSpan(ids, "capture receive", each.commit_time, received, known)
            )
            self._exporter.export(TraceSpan(ids, "capture store", received, now, known))

    def delivered(self, transactions: Iterable[TracedTransaction]) -> None:
        """Readers get a page with these."""
        now = time.time_ns() // 1000
        for each in transactions:
            if (ids := self._ids(each)) is not None:
                self._exporter.export(TraceSpan(ids, "serve", each.captured_at, now, {}))

    def stored(self, sink: str, transactions: Iterable[TracedTransaction], seconds: float) -> None:
        """A sink has stored a batch with these; it took so long."""
        now = time.time_ns() // 1000
        begin = now - int(seconds * 1e6)
        for each in transactions:
            if (ids := self._ids(each)) is not None:
                about = {"headrace.sink": sink}
                self._exporter.export(TraceSpan(ids, "sink batch", begin, now, about))

    def close(self) -> None:
        """Send what is left."""
        self._exporter.close()

    def _ids(self, transaction: TracedTransaction) -> TraceIds | None:
        """The trace of a transaction; None: it is not traced."""
        known = f"{transaction.id}:{transaction.commit_time}".encode()
        digest = hashlib.sha256(known).digest()
        if int.from_bytes(digest[24:]) >= self._below:
            return None
        # 0 would mean that there is none.
        return TraceIds(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1)


current: Tracing | None = None  # of this process; None: nothing is traced


@contextmanager
def tracing(begun: Tracing | None) -> Iterator[None]:
    """Trace what this process does."""
    global current  # noqa: PLW0603 - as OpenTelemetry's own provider: one for the process
    current = begun
    try:
        yield
    finally:
        current = None
        if begun is not None:
            begun.close()
