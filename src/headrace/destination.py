"""ETL events for a destination written in Python: read from a running server or from a log.

for checkpoint in deliver(ServerEvents("http://127.0.0.1:3000"), destination, after=kept):
    ...
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple, Protocol

from .change.event import Change
from .client import Client
from .errors import LogError, ServerAbsent
from .formats.etl import Destination, Etl, Event, decode, events
from .log import LogReader
from .secret import Secret
from .serve.filter import Filter
from .sinks.destination import DestinationCalls

_WAIT_SECONDS = 10.0  # for a first event, before the next request


class DestinationCheckpoint(NamedTuple):
    """How far a destination is: it has everything up to a sequence of a log."""

    sequence: int = 0
    epoch: str = ""  # which log; "": whichever it is


# The names by which programs import them.
Checkpoint = DestinationCheckpoint


class EtlPage(NamedTuple):
    """Some events in a row; never a part of those that stand at one sequence."""

    events: list[Event]
    scanned: int  # go on after this one
    epoch: str
    gap: str = ""  # sequences that were trimmed before they were read


class EtlEvents(Protocol):
    """Where events are read from: a server or a log.

    Tables have numbers that differ within a source alone: where a log has several, one stream
    should read one of them.
    """

    def page(self, after: int, *, limit: int, wait: float) -> EtlPage:
        """About `limit` events; when there are none, what comes within `wait` seconds."""
        ...


Events = EtlEvents


def deliver(
    source: EtlEvents,
    destination: Destination,
    *,
    after: Checkpoint = Checkpoint(),  # noqa: B008 - a value that nobody can change
    upto: int | None = None,
    limit: int = 1000,
) -> Iterator[Checkpoint]:
    """Hand events to a destination, about `limit` at once, and say how far it is.

    It ends when the destination has everything up to the sequence `upto`; without one, never.
    What the destination raises comes out here. Begin again after the last checkpoint that was
    kept: what followed it comes again.
    """
    with closing(DestinationCalls(destination)) as calls:
        while upto is None or after.sequence < upto:
            page = source.page(after.sequence, limit=limit, wait=_WAIT_SECONDS)
            _expect_whole(page, after)
            if page.events:
                calls.write(page.events)
            yield (after := Checkpoint(page.scanned, page.epoch))


def _expect_whole(page: EtlPage, after: Checkpoint) -> None:
    if after.epoch and page.epoch != after.epoch:
        raise LogError(
            "the log is another one than the checkpoint belongs to",
            hint="Empty the destination and begin without a checkpoint.",
        )
    if page.gap:
        raise LogError(
            f"changes {page.gap} were trimmed before they were delivered",
            hint="Empty the destination, note the log's latest sequence (`headrace status`), run "
            "`headrace snapshot SOURCE`, and begin after that sequence: the copy follows it.",
        )


class LogEvents:
    """The events of a log on this machine, also while another process writes it."""

    def __init__(self, log: LogReader, *, source: str = "", tables: Sequence[str] = ()) -> None:
        self._log = log
        self._filter = Filter(source=source, tables=tuple(tables))

    def page(self, after: int, *, limit: int, wait: float) -> EtlPage:
        """About `limit` events; when there are none, what comes within `wait` seconds."""
        log = self._log
        log.wait_beyond(after, wait)
        changes = log.read(after, limit=limit)
        first = changes[0].sequence if changes else log.first_sequence
        gap = f"{after + 1}-{first - 1}" if after + 1 < first else ""
        scanned = changes[-1].sequence if changes else max(after, first - 1)
        concerned = list(filter(self._filter.concerns, changes))
        return EtlPage(list(self._events(concerned)), scanned, log.epoch, gap)

    def _events(self, changes: Sequence[Change]) -> Iterator[Event]:
        earlier: Sequence[Change] = ()
        if changes and (begin := Etl().begin(changes[0])) < changes[0].sequence:
            missing = changes[0].sequence - begin
            earlier = self._log.read(begin - 1, limit=missing, upto=changes[0].sequence - 1)
        return events(changes, wanted=self._filter.passes, earlier=earlier)


class ServerEvents:
    """The events of a running Headrace, read page by page, with an API key if it needs one."""

    def __init__(
        self,
        url: str,
        key: Secret | str | None = None,
        *,
        source: str = "",
        tables: Sequence[str] = (),
    ) -> None:
        self._client = Client(url, key)
        self._source = source
        self._tables = ",".join(tables)

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._client.url

    def page(self, after: int, *, limit: int, wait: float) -> EtlPage:
        """About `limit` events; when there are none, what comes within `wait` seconds."""
        lines, headers = self._client.lines(
            "/v1/changes",
            format="etl",
            after=after,
            limit=limit,
            wait_ms=int(wait * 1000),
            source=self._source,
            tables=self._tables,
        )
        if "X-Headrace-Scanned" not in headers:
            raise ServerAbsent(f"what answers at {self.url} is not a Headrace server")
        return EtlPage(
            [decode(line) for line in lines],
            int(headers["X-Headrace-Scanned"]),
            headers["X-Headrace-Epoch"],
            headers.get("X-Headrace-Gap", ""),
        )
