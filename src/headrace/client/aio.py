"""The client for programs on an event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Unpack

from ..errors import ServerError
from ..secret import Secret
from . import grpc as rpc
from . import websocket
from .messages import (
    ChangesRequest,
    Filters,
    MissedChanges,
    ReaderProgress,
    ReceivedEvent,
    StreamMessage,
    acked,
    cursor_path,
    opened,
)
from .sse import SseDecoder, message_of
from .transport import SSE, STREAM_SECONDS, HttpRequest, HttpTransport
from .trust import TlsTrust


class AsyncClient:
    """The same as `Client`, for asyncio."""

    def __init__(
        self,
        url: str,
        key: Secret | str | None = None,
        *,
        grpc: str = "",
        tls: TlsTrust | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
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
    ) -> AsyncIterator[ReceivedEvent]:
        """Every change after a sequence or a named cursor; see `Client.changes`."""
        request = ChangesRequest.of(tables, transport, format, filters)
        return self._followed(request, cursor, ReaderProgress(after, on_gap))

    async def ack(self, cursor: str, event: ReceivedEvent | int) -> None:
        """Store, durably, that everything up to an event is done; see `Client.ack`."""
        progress = ReaderProgress(0, None)
        while True:
            try:
                await self.put(cursor_path(cursor), acked(event))
            except ServerError as error:
                await self._sleep(progress.pause(error))
            else:
                return

    async def get(self, path: str) -> Any:
        """The JSON at a path."""
        return await self._http.json_async(HttpRequest("GET", path))

    async def put(self, path: str, body: object) -> Any:
        """The response to a JSON document that replaces what is at a path."""
        return await self._http.json_async(HttpRequest("PUT", path, body))

    async def _followed(
        self, request: ChangesRequest, cursor: str | None, progress: ReaderProgress
    ) -> AsyncGenerator[ReceivedEvent, None]:
        while True:
            try:
                if cursor is not None:
                    progress.resume(await self._cursor(cursor, progress.after))
                    cursor = None
                async with aclosing(self._messages(request, progress)) as stream:
                    async for message in stream:
                        if (event := progress.take(message)) is not None:
                            yield event
            except ServerError as error:
                await self._sleep(progress.pause(error))

    async def _cursor(self, name: str, after: int) -> int:
        """The sequence of a cursor; one that is not there yet is made, at `after`."""
        try:
            sequence: int = (await self.get(cursor_path(name)))["sequence"]
        except ServerError as error:
            if error.word != "unknown_cursor":
                raise
            sequence = (await self.put(cursor_path(name), {"sequence": after}))["sequence"]
        return sequence

    def _messages(
        self, request: ChangesRequest, progress: ReaderProgress
    ) -> "_SseStream | AsyncGenerator[StreamMessage, None]":
        after = progress.after
        if request.transport == "grpc":
            target = self._grpc
            return rpc.subscribe_async(target, request.message(progress))
        if request.transport == "websocket":
            conversation = websocket.Conversation(self._key, request.tables, progress)
            return websocket.subscribe_async(self.url, conversation, self._http.tls)
        return _SseStream(self._http, request.path(progress), after)


class _SseStream:
    """The messages of one connection.

    No generator: when an event loop ends, it closes all generators at once, and one that closes
    another one then fails.
    """

    def __init__(self, http: HttpTransport, path: str, after: int) -> None:
        self._http = http
        self._request = HttpRequest("GET", path, accept=SSE, seconds=STREAM_SECONDS)
        self._decoder = SseDecoder(after)
        self._client = http.connections_async()
        self._pieces: AsyncIterator[bytes] | None = None
        self._ready: deque[StreamMessage] = deque()

    def __aiter__(self) -> "_SseStream":
        return self

    async def __anext__(self) -> StreamMessage:
        while not self._ready:
            await self._receive()
        return self._ready.popleft()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _receive(self) -> None:
        if self._pieces is None:
            response = await self._http.send_async(self._request, self._client)
            self._pieces = response.aiter_raw()
            self._ready.append(opened(response.headers))
            return
        piece = await self._http.next_piece(self._pieces)
        if piece is None:
            raise self._http.gone()
        self._ready.extend(map(message_of, self._decoder.feed(piece)))
