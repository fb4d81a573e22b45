"""The client for programs that wait: commands, scripts, workers."""

import http.client
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, Unpack
from urllib.parse import urlencode

import msgspec

from ..errors import ServerAbsent, ServerError
from ..secret import Secret
from . import _rpc, _sse, _talk
from ._address import ANSWER_SECONDS, CONNECT_SECONDS, SILENT_SECONDS, Address, refusal
from ._asked import Asked, Filters, cursor_path
from ._told import Event, Gap, Opened, Progress, Told

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


class Client:
    """Asks a running Headrace, never through a proxy that the environment names.

    `grpc` is where that answers, such as `127.0.0.1:50051`; `https://…` means with TLS. `sleep` is
    called with the seconds between two attempts to reconnect.
    """

    def __init__(
        self,
        url: str,
        key: Secret | str | None = None,
        *,
        grpc: str = "",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self._address = Address.of(url)
        self._key = Secret(key) if isinstance(key, str) else key
        self._grpc = grpc
        self._sleep = sleep

    def changes(
        self,
        tables: Sequence[str] = (),
        *,
        cursor: str | None = None,
        after: int = 0,
        format: str | None = None,
        transport: str = "sse",
        on_gap: Callable[[Gap], None] | None = None,
        **filters: Unpack[Filters],
    ) -> Iterator[Event]:
        """Every change after a sequence or a named cursor, those to come included, each once.

        A cursor that is not there yet is made, at `after`. A connection that breaks is made anew
        after 1, 2, 4 and then every 8 seconds, and goes on where it was. What was trimmed before
        it was read is told to `on_gap`; without that, ChangesTrimmed is raised. No `format` means
        the one of the transport: canonical over sse, notification over websocket, protobuf over
        grpc. Over websocket, tables are named, a reader without a place to go on from begins with
        what is new, and the server holds five minutes for it.
        """
        asked = Asked.of(tables, transport, format, filters)
        return self._followed(asked, cursor, Progress(after, on_gap))

    def ack(self, cursor: str, event: Event | int) -> None:
        """Note, durably, that everything up to an event is done: a cursor begins after it."""
        sequence = event if isinstance(event, int) else event.sequence
        progress = Progress(0, None)
        while True:
            try:
                self.put(cursor_path(cursor), {"sequence": sequence})
            except ServerError as error:
                self._rest(error, progress)
            else:
                return

    def get(self, path: str, **query: object) -> Any:
        """The JSON at a path."""
        with self._request("GET", _with_query(path, query)) as answer:
            return self._json(path, answer)

    def health(self) -> Any:
        """The server's health, asked for without much patience: maybe nobody is there."""
        with self._request("GET", "/health", seconds=CONNECT_SECONDS) as answer:
            return self._json("/health", answer)

    def post(self, path: str, body: object) -> Any:
        """What the server answers to a JSON document."""
        with self._request("POST", path, body=body) as answer:
            return self._json(path, answer)

    def put(self, path: str, body: object) -> Any:
        """What the server answers when a thing is to be as the document says."""
        with self._request("PUT", path, body=body) as answer:
            return self._json(path, answer)

    def delete(self, path: str) -> Any:
        """What the server answers when a thing is to end."""
        with self._request("DELETE", path) as answer:
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

    def _followed(self, asked: Asked, cursor: str | None, progress: Progress) -> Iterator[Event]:
        while True:
            try:
                if cursor is not None:
                    progress.begin(self._stands(cursor, progress.after))
                    cursor = None
                with closing(self._told(asked, progress)) as stream:
                    for told in stream:
                        if (event := progress.take(told)) is not None:
                            yield event
            except ServerError as error:
                self._rest(error, progress)

    def _rest(self, error: ServerError, progress: Progress) -> None:
        """Wait before another attempt; an error that would come again is raised."""
        self._sleep(progress.pause(error))

    def _stands(self, cursor: str, after: int) -> int:
        """Where a cursor stands; one that is not there yet is put at `after`."""
        try:
            stands: int = self.get(cursor_path(cursor))["sequence"]
        except ServerError as error:
            if error.word != "unknown_cursor":
                raise
            stands = self.put(cursor_path(cursor), {"sequence": after})["sequence"]
        return stands

    def _told(self, asked: Asked, progress: Progress) -> Generator[Told, None, None]:
        after = progress.after
        if asked.transport == "grpc":
            return _rpc.subscribed(_rpc.Target(self._grpc, self._key), asked.message(after))
        if asked.transport == "websocket":
            conversation = _talk.Conversation(self._key, asked.tables, progress)
            return _talk.talked(self.url, conversation)
        return self._streamed(asked.path(after), after)

    def _streamed(self, path: str, after: int) -> Generator[Told, None, None]:
        with self._request(
            "GET", path, accept="text/event-stream", seconds=SILENT_SECONDS
        ) as answer:
            self._expect_success(path, answer)
            yield Opened(answer.headers.get("X-Headrace-Epoch", ""))
            lines = _sse.Lines(after)
            # What breaks off within a line never was one.
            while (line := self._line(answer)).endswith(b"\n"):
                if (told := lines.take(line.rstrip(b"\r\n"))) is not None:
                    yield told
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

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        accept: str = "application/json",
        seconds: float = ANSWER_SECONDS,
    ) -> Iterator[http.client.HTTPResponse]:
        host, port, tls, base = self._address
        kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        headers = {"Accept": accept, "Connection": "close"}
        if self._key is not None:
            headers["X-API-Key"] = self._key.reveal()
        if body is not None:
            headers["Content-Type"] = "application/json"
        with closing(kind(host, port, timeout=CONNECT_SECONDS)) as connection:
            try:
                connection.connect()
                connection.sock.settimeout(seconds)
                content = None if body is None else msgspec.json.encode(body)
                connection.request(method, base + path, content, headers)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise ServerAbsent(f"no Headrace answers at {self.url}") from error
            with answer:
                yield answer

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
        what = f"{self.url}{path} answers {answer.status}"
        after = answer.headers.get("Retry-After")
        raise refusal(what, answer.status, self._read(answer), after=after)

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerAbsent(f"the server at {self.url} went away") from error


def _page(message: Mapping[bytes, bytes]) -> Page:
    if message.get(b"event") != b"gap":
        return Page([message[b"data"]])
    lost = msgspec.json.decode(message[b"data"])
    return Page([], f"{lost['first']}-{lost['last']}")


def _with_query(path: str, query: Mapping[str, object]) -> str:
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path
