"""The changes as the command line reads them: from the running server, or from the disk."""

import asyncio
import http.client
import math
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode, urlsplit

import msgspec

from .errors import ServerAbsent, ServerError
from .formats.catalogue import Formats
from .log import LogReader
from .serve.feed import Feed
from .serve.filter import Filter
from .serve.subscription import Subscription

_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 60.0  # longer than a stream is silent: it has heartbeats
_POLL_SECONDS = 0.2  # between two looks at a log that another process may write
_PAGE = 1000
_NDJSON = "application/x-ndjson"


class Wanted(NamedTuple):
    """Which changes, and how they are written down."""

    tables: tuple[str, ...] = ()  # globs; none: all
    format: str = "canonical"
    preserve_transactions: bool = False


class Page(NamedTuple):
    """Some events in a row, as JSON."""

    events: list[bytes]
    gap: str = ""  # sequences that were trimmed before they were read


class Lines(NamedTuple):
    """An answer that is NDJSON."""

    lines: list[bytes]
    headers: http.client.HTTPMessage


class Changes(Protocol):
    """A place to read changes from."""

    def pages(self, after: int, upto: int | None, wanted: Wanted) -> Iterator[Page]:
        """What follows `after`, page after page, as one stream; without `upto` for ever."""
        ...


class Client:
    """Asks a running Headrace over HTTP, never through a proxy: it is on this machine or near."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._address = urlsplit(self.url)

    def get(self, path: str, **query: object) -> Any:
        """The JSON at a path."""
        with self._request("GET", _with_query(path, query)) as answer:
            return self._json(path, answer)

    def health(self) -> Any:
        """The server's health, asked for without much patience: maybe nobody is there."""
        with self._request("GET", "/health", seconds=_CONNECT_SECONDS) as answer:
            return self._json("/health", answer)

    def post(self, path: str, body: object) -> Any:
        """What the server answers to a JSON document."""
        with self._request("POST", path, body=body) as answer:
            return self._json(path, answer)

    def lines(self, path: str, **query: object) -> Lines:
        """The lines at a path."""
        with self._request("GET", _with_query(path, query), accept=_NDJSON) as answer:
            self._expect_success(path, answer)
            return Lines(self._read(answer).splitlines(), answer.headers)

    def pages(self, after: int, upto: int | None, wanted: Wanted) -> Iterator[Page]:
        """What follows `after`, page after page, as one stream; without `upto` for ever."""
        query = {
            "after": after,
            "upto": upto,
            "tables": ",".join(wanted.tables),
            "format": wanted.format,
            "preserve_transactions": "true" if wanted.preserve_transactions else "",
        }
        path = _with_query("/v1/changes/stream", query)
        with self._request("GET", path, accept="text/event-stream") as answer:
            self._expect_success(path, answer)
            reached = yield from self._messages(answer, after)
        # A server that stops ends its streams in good order.
        if upto is None or reached < upto:
            raise ServerAbsent(f"the server at {self.url} went away")

    def _messages(self, answer: http.client.HTTPResponse, after: int) -> Generator[Page, None, int]:
        """What a stream says; at its end, the sequence up to which that is everything."""
        reached, fields = after, dict[bytes, bytes]()
        while (line := self._line(answer)).endswith(b"\n"):
            if line != b"\n":
                name, _, value = line[:-1].partition(b": ")
                fields[name] = value
                continue
            # An empty line ends a message; what is cut off before it was not said.
            if b"data" in fields:
                yield _page(fields)
            reached = int(fields.get(b"id", reached))
            fields.clear()
        return reached

    def _line(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.readline()
        except (OSError, http.client.HTTPException) as error:
            raise ServerAbsent(f"the server at {self.url} went away") from error

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        accept: str = "application/json",
        seconds: float = _ANSWER_SECONDS,
    ) -> http.client.HTTPResponse:
        address = self._address
        secure = address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=_CONNECT_SECONDS)
        headers = {"Accept": accept, "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
            connection.sock.settimeout(seconds)
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, address.path + path, content, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerAbsent(f"no Headrace answers at {self.url}") from error

    def _json(self, path: str, answer: http.client.HTTPResponse) -> Any:
        self._expect_success(path, answer)
        try:
            return msgspec.json.decode(self._read(answer))
        except msgspec.DecodeError as error:
            raise ServerAbsent(f"what answers at {self.url}{path} is no Headrace") from error

    def _expect_success(self, path: str, answer: http.client.HTTPResponse) -> None:
        # /health answers 503 with a document that says why.
        if answer.status < 300 or (path == "/health" and answer.status == 503):
            return
        raise _refusal(f"{self.url}{path} answers {answer.status}", self._read(answer))

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerAbsent(f"the server at {self.url} went away") from error


class DiskChanges:
    """Reads the log itself, also while another process writes it."""

    def __init__(self, reader: LogReader, formats: Formats) -> None:
        self._reader = reader
        self._formats = formats

    def pages(self, after: int, upto: int | None, wanted: Wanted) -> Iterator[Page]:
        """What follows `after`, page after page, as one stream; without `upto` for ever."""
        format = self._formats.named(wanted.format, markers=wanted.preserve_transactions)
        subscription = Subscription(
            Feed(self._reader),
            format,
            filter=Filter(tables=wanted.tables),
            after=after,
            upto=upto,
        )
        with asyncio.Runner() as loop:
            while True:
                page = loop.run(subscription.next(_PAGE))
                yield Page(page.payloads, f"{page.gap.first}-{page.gap.last}" if page.gap else "")
                if subscription.complete:
                    return
                wait_beyond(self._reader, subscription.scanned)


def wait_beyond(log: LogReader, sequence: int, seconds: float = math.inf) -> None:
    """Look at a log that another process may write, until it has more or the time is over."""
    until = time.monotonic() + seconds
    log.refresh()
    while log.latest_sequence <= sequence and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        log.refresh()


def follow(
    changes: Changes, after: int, wanted: Wanted, *, upto: int | None = None, limit: int | None
) -> Iterator[Page]:
    """Page after page, until `upto` or until there were `limit` events."""
    left = limit
    if left == 0:
        return
    for page in changes.pages(after, upto, wanted):
        yield page._replace(events=page.events[:left])
        if left is not None:
            left -= len(page.events)
            if left <= 0:
                return


def _page(message: Mapping[bytes, bytes]) -> Page:
    if message.get(b"event") != b"gap":
        return Page([message[b"data"]])
    lost = msgspec.json.decode(message[b"data"])
    return Page([], f"{lost['first']}-{lost['last']}")


def _with_query(path: str, query: Mapping[str, object]) -> str:
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def _refusal(what: str, body: bytes) -> ServerError:
    """The error that an answer's document describes."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        document = None
    if not isinstance(document, dict) or not {"error", "message"} <= document.keys():
        return ServerAbsent(f"{what}, as no Headrace does")
    return ServerError(f"{what}: {document['message']}", hint=document.get("hint") or "")
