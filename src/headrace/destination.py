"""ETL events for a destination written in Python: read from a running server or from a log.

for checkpoint in deliver(ServerEvents("http://127.0.0.1:3000"), destination, after=kept):
    ...
"""

import http.client
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol
from urllib.parse import urlencode, urlsplit

import msgspec

from .errors import LogError, ServerAbsent, ServerError
from .formats.etl import Destination, Event, decode, events
from .log import LogReader
from .serve.filter import Filter

_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 60.0
_WAIT_SECONDS = 10.0  # for a first event, before it is asked for again
_POLL_SECONDS = 0.2  # between two looks at a log that another process may write
_NDJSON = "application/x-ndjson"


class Checkpoint(NamedTuple):
    """How far a destination is: it has everything up to a sequence of a log."""

    sequence: int = 0
    epoch: str = ""  # which log; "": whichever it is


class Page(NamedTuple):
    """Some events in a row; never a part of those that stand at one sequence."""

    events: list[Event]
    scanned: int  # go on after this one
    epoch: str
    gap: str = ""  # sequences that were trimmed before they were read


class Events(Protocol):
    """A place to read events from."""

    def page(self, after: int, *, limit: int, wait: float) -> Page:
        """About `limit` events; when there are none, what comes within `wait` seconds."""
        ...


def deliver(
    source: Events,
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
    while upto is None or after.sequence < upto:
        page = source.page(after.sequence, limit=limit, wait=_WAIT_SECONDS)
        _expect_whole(page, after)
        if page.events:
            destination.write_events(page.events)
        yield (after := Checkpoint(page.scanned, page.epoch))


def _expect_whole(page: Page, after: Checkpoint) -> None:
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

    def __init__(self, log: LogReader, *, tables: Sequence[str] = ()) -> None:
        self._log = log
        self._wanted = Filter(tables=tuple(tables)).passes

    def page(self, after: int, *, limit: int, wait: float) -> Page:
        """About `limit` events; when there are none, what comes within `wait` seconds."""
        until = time.monotonic() + wait
        self._log.refresh()
        while self._log.latest_sequence <= after and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            self._log.refresh()
        first = self._log.first_sequence
        changes = self._log.read(after, limit=limit)
        scanned = changes[-1].sequence if changes else max(after, first - 1)
        gap = f"{after + 1}-{first - 1}" if after + 1 < first else ""
        return Page(list(events(changes, wanted=self._wanted)), scanned, self._log.epoch, gap)


class ServerEvents:
    """The events of a running Headrace, asked for page by page."""

    def __init__(self, url: str, *, tables: Sequence[str] = ()) -> None:
        self.url = url.rstrip("/")
        self._tables = ",".join(tables)

    def page(self, after: int, *, limit: int, wait: float) -> Page:
        """About `limit` events; when there are none, what comes within `wait` seconds."""
        query = {"format": "etl", "after": after, "limit": limit, "wait_ms": int(wait * 1000)}
        if self._tables:
            query["tables"] = self._tables
        answer, body = self._get(f"/v1/changes?{urlencode(query)}")
        if answer.status != 200 or "X-Headrace-Scanned" not in answer.headers:
            raise _refusal(f"{self.url} answers {answer.status}", body)
        return Page(
            [decode(line) for line in body.splitlines()],
            int(answer.headers["X-Headrace-Scanned"]),
            answer.headers["X-Headrace-Epoch"],
            answer.headers.get("X-Headrace-Gap", ""),
        )

    def _get(self, path: str) -> tuple[http.client.HTTPResponse, bytes]:
        address = urlsplit(self.url)
        secure = address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_SECONDS)
            connection.request("GET", address.path + path, headers={"Accept": _NDJSON})
            answer = connection.getresponse()
            return answer, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerAbsent(f"no Headrace answers at {self.url}") from error
        finally:
            connection.close()


class _Said(msgspec.Struct):
    message: str
    hint: str = ""


def _refusal(what: str, body: bytes) -> ServerError:
    """The error that an answer's document describes."""
    try:
        said = msgspec.json.decode(body, type=_Said)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ServerAbsent(f"{what}, as no Headrace does")
    return ServerError(f"{what}: {said.message}", hint=said.hint)
