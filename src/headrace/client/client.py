"""The client for programs that wait: commands, scripts, workers."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Unpack

from ..errors import ServerError
from ..secret import Secret
from . import grpc as rpc
from . import websocket
from .messages import (
    ChangesRequest,
    Filters,
    MissedChanges,
    Opened,
    ReaderProgress,
    ReceivedEvent,
    StreamMessage,
    acked,
    cursor_path,
    opened,
)
from .sse import SseDecoder, SseFrame, gap_of, message_of
from .transport import (
    CONNECT_SECONDS,
    NDJSON,
    SSE,
    STREAM_SECONDS,
    HttpRequest,
    HttpTransport,
    with_query,
)
from .trust import TlsTrust


class PageRequest(NamedTuple):
    """Which changes, and how they are written down."""

    tables: tuple[str, ...] = ()  # globs; none: all
    format: str = "canonical"
    preserve_transactions: bool = False
    operations: tuple[str, ...] = ()  # INSERT, UPDATE, …; none: all


class EventPage(NamedTuple):
    """Some events in a row, as JSON."""

    events: list[bytes]
    gap: str = ""  # sequences that were trimmed before they were read


class NdjsonResponse(NamedTuple):
    """A response that is NDJSON."""

    lines: list[bytes]
    headers: Mapping[str, str]


class Client:
    """Reads from a running Headrace, never through a proxy that the environment names.

    `grpc` is where that answers, such as `127.0.0.1:50051`; `https://…` means with TLS. `tls` says
    which certificates are trusted, and which is shown. `sleep` is called with the seconds between
    two attempts to reconnect.
    """

    def __init__(
        self,
        url: str,
        key: Secret | str | None = None,
        *,
        grpc: str = "",
        tls: TlsTrust | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._key = Secret(key) if isinstance(key, str) else key
        self._http = HttpTransport(url, self._key.reveal if self._key else str, tls)
        self._grpc = rpc.GrpcTarget(grpc, self._key, tls)
        self._sleep = sleep

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._http.url

    def changes(
        self,
        tables: Sequence[str] = (),
        *,
        cursor: str | None = None,
        after: int = 0,
        format: str | None = None,
        transport: str = "sse",
        on_gap: Callable[[MissedChanges], None] | None = None,
        **filters: Unpack[Filters],
    ) -> Iterator[ReceivedEvent]:
        """Every change after a sequence or a named cursor, those to come included, each once.

        A cursor that is not there yet is made, at `after`. A connection that breaks is made anew
        after 1, 2, 4 and then every 8 seconds, and goes on where it was. What was trimmed before
        it was read is reported to `on_gap`; without that, ChangesTrimmed is raised. No `format`
        means the one of the transport: canonical over sse, notification over websocket, protobuf
        over grpc. Over websocket, tables are named, a reader without a sequence to resume after
        begins with what is new, and the server keeps five minutes for it.
        """
        request = ChangesRequest.of(tables, transport, format, filters)
        return self._followed(request, cursor, ReaderProgress(after, on_gap))

    def ack(self, cursor: str, event: ReceivedEvent | int) -> None:
        """Store, durably, that everything up to an event is done: a cursor begins after it.

        FeedReplaced: the log was put back from an older copy, and has another change there. Of a
        sequence without its event, that is noticed only beyond the newest one.
        """
        progress = ReaderProgress(0, None)
        while True:
            try:
                self.put(cursor_path(cursor), acked(event))
            except ServerError as error:
                self._sleep(progress.pause(error))
            else:
                return

    def get(self, path: str, **query: object) -> Any:
        """The JSON at a path."""
        return self._http.json(HttpRequest("GET", with_query(path, query)))

    def health(self) -> Any:
        """The server's health; it waits three seconds at most, as maybe no server runs."""
        return self._http.json(HttpRequest("GET", "/health", seconds=CONNECT_SECONDS))

    def post(self, path: str, body: object) -> Any:
        """The response to a JSON document."""
        return self._http.json(HttpRequest("POST", path, body))

    def put(self, path: str, body: object) -> Any:
        """The response to a JSON document that replaces what is at a path."""
        return self._http.json(HttpRequest("PUT", path, body))

    def delete(self, path: str) -> Any:
        """The response to the removal of what is at a path."""
        return self._http.json(HttpRequest("DELETE", path))

    def lines(self, path: str, **query: object) -> NdjsonResponse:
        """The lines at a path."""
        request = HttpRequest("GET", with_query(path, query), accept=NDJSON)
        body, headers = self._http.read(request)
        return NdjsonResponse(body.splitlines(), headers)

    def pages(self, after: int, upto: int | None, wanted: PageRequest) -> Iterator[EventPage]:
        """What follows `after`, page after page, as one stream; without `upto` for ever."""
        query = {
            "after": after,
            "upto": upto,
            "tables": ",".join(wanted.tables),
            "operations": ",".join(wanted.operations),
            "format": wanted.format,
            "preserve_transactions": "true" if wanted.preserve_transactions else "",
        }
        reached = after
        for frame in self._frames(with_query("/v1/changes/stream", query), after):
            if isinstance(frame, Opened):
                continue
            if frame.data:
                yield _page(frame)
            reached = frame.id
        # A server that stops ends its streams in good order.
        if upto is None or reached < upto:
            raise self._http.gone()

    def _followed(
        self, request: ChangesRequest, cursor: str | None, progress: ReaderProgress
    ) -> Iterator[ReceivedEvent]:
        while True:
            try:
                if cursor is not None:
                    progress.resume(self._cursor(cursor, progress.after))
                    cursor = None
                with closing(self._messages(request, progress)) as stream:
                    for message in stream:
                        if (event := progress.take(message)) is not None:
                            yield event
            except ServerError as error:
                self._sleep(progress.pause(error))

    def _cursor(self, name: str, after: int) -> int:
        """The sequence of a cursor; one that is not there yet is made, at `after`."""
        try:
            sequence: int = self.get(cursor_path(name))["sequence"]
        except ServerError as error:
            if error.word != "unknown_cursor":
                raise
            sequence = self.put(cursor_path(name), {"sequence": after})["sequence"]
        return sequence

    def _messages(
        self, request: ChangesRequest, progress: ReaderProgress
    ) -> Generator[StreamMessage, None, None]:
        after = progress.after
        if request.transport == "grpc":
            return rpc.subscribe(self._grpc, request.message(progress))
        if request.transport == "websocket":
            conversation = websocket.Conversation(self._key, request.tables, progress)
            return websocket.subscribe(self.url, conversation, self._http.tls)
        return self._streamed(request.path(progress), after)

    def _streamed(self, path: str, after: int) -> Generator[StreamMessage, None, None]:
        for frame in self._frames(path, after):
            yield frame if isinstance(frame, Opened) else message_of(frame)
        raise self._http.gone()

    def _frames(self, path: str, after: int) -> Iterator[Opened | SseFrame]:
        request = HttpRequest("GET", path, accept=SSE, seconds=STREAM_SECONDS)
        decoder = SseDecoder(after)
        with self._http.open(request) as response:
            yield opened(response.headers)
            for piece in self._http.pieces(response):
                yield from decoder.feed(piece)


def _page(frame: SseFrame) -> EventPage:
    if frame.event != b"gap":
        return EventPage([frame.data])
    lost = gap_of(frame)
    return EventPage([], f"{lost.first}-{lost.last}")
