"""The changes as the command line reads them: from the running server, or from the disk."""

import http.client
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode, urlsplit

import msgspec

from .errors import ServerAbsent, ServerError
from .formats import Canonical
from .log import LogReader
from .serve.filter import Filter

_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.2  # between two looks at a log that another process may write
_WAIT_SECONDS = 30.0
_PAGE = 1000


class Page(NamedTuple):
    """Some changes in a row, each as canonical JSON."""

    changes: list[bytes]
    scanned: int  # go on after this one
    gap: str = ""  # sequences that were trimmed before they were read


class Changes(Protocol):
    """A place to read changes from."""

    def page(self, after: int, *, limit: int, wait: float, tables: Sequence[str]) -> Page:
        """The next changes; when there are none, what arrives within `wait` seconds."""
        ...


class Client:
    """Asks a running Headrace over HTTP, never through a proxy: it is on this machine or near."""

    def __init__(self, url: str) -> None:
        self.url = url
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80

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

    def page(self, after: int, *, limit: int, wait: float, tables: Sequence[str]) -> Page:
        """The next changes; when there are none, what arrives within `wait` seconds."""
        query = {
            "after": after,
            "limit": limit,
            "wait_ms": int(wait * 1000),
            "tables": ",".join(tables),
        }
        path = _with_query("/v1/changes", query)
        with self._request("GET", path, accept="application/x-ndjson") as answer:
            self._expect_success(path, answer)
            lines = self._read(answer).splitlines()
            scanned = int(answer.headers.get("X-Headrace-Scanned", after))
            return Page(lines, scanned, answer.headers.get("X-Headrace-Gap", ""))

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        accept: str = "application/json",
        seconds: float = _ANSWER_SECONDS,
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        headers = {"Accept": accept, "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
            connection.sock.settimeout(seconds)
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, content, headers)
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

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader

    def page(self, after: int, *, limit: int, wait: float, tables: Sequence[str]) -> Page:
        """The next changes; when there are none, what arrives within `wait` seconds."""
        until = time.monotonic() + wait
        while self._reader.latest_sequence <= after and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            self._reader.refresh()
        first = self._reader.stats().first_sequence
        gap = f"{after + 1}-{first - 1}" if after + 1 < first else ""
        changes = self._reader.read(after, limit=limit)
        wanted = Filter(tables=tuple(tables)).passes
        lines = [Canonical().encode(change) for change in changes if wanted(change)]
        return Page(lines, changes[-1].sequence if changes else max(after, first - 1), gap)


def follow(
    changes: Changes, after: int, *, tables: Sequence[str], limit: int | None, wait: bool
) -> Iterator[Page]:
    """Page after page, until `limit` changes or, without waiting, until there are no more."""
    left = limit
    while left is None or left > 0:
        most = _PAGE if left is None else min(left, _PAGE)
        page = changes.page(after, limit=most, wait=_WAIT_SECONDS if wait else 0, tables=tables)
        yield page
        if page.scanned == after and not wait:
            return
        after = page.scanned
        left = None if left is None else left - len(page.changes)


def _with_query(path: str, query: Mapping[str, object]) -> str:
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def _refusal(what: str, body: bytes) -> ServerError:
    """The error that an answer's document describes."""
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        document = None
    if not isinstance(document, dict) or not {"error", "message"} <= document.keys():
        return ServerAbsent(f"{what}, as no Headrace does")
    return ServerError(f"{what}: {document['message']}", hint=document.get("hint") or "")
