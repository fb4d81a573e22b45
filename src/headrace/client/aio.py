"""The client for programs on an event loop."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Unpack

from ..errors import ServerAbsent, ServerError
from ..secret import Secret
from . import _rpc, _talk
from ._address import SILENT_SECONDS, Address
from ._asked import Asked, Filters, cursor_path
from ._http import Answer, Question, ask
from ._sse import Lines
from ._told import Event, Gap, Opened, Progress, Told


class AsyncClient:
    """The same as `Client`, for asyncio."""

    def __init__(
        self,
        url: str,
        key: Secret | str | None = None,
        *,
        grpc: str = "",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
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
    ) -> AsyncIterator[Event]:
        """Every change after a sequence or a named cursor; see `Client.changes`."""
        asked = Asked.of(tables, transport, format, filters)
        return self._followed(asked, cursor, Progress(after, on_gap))

    async def ack(self, cursor: str, event: Event | int) -> None:
        """Note, durably, that everything up to an event is done: a cursor begins after it."""
        sequence = event if isinstance(event, int) else event.sequence
        progress = Progress(0, None)
        while True:
            try:
                await self.put(cursor_path(cursor), {"sequence": sequence})
            except ServerError as error:
                await self._rest(error, progress)
            else:
                return

    async def get(self, path: str) -> Any:
        """The JSON at a path."""
        return await self._json("GET", path)

    async def put(self, path: str, body: object) -> Any:
        """What the server answers when a thing is to be as the document says."""
        return await self._json("PUT", path, body)

    async def _followed(
        self, asked: Asked, cursor: str | None, progress: Progress
    ) -> AsyncGenerator[Event, None]:
        while True:
            try:
                if cursor is not None:
                    progress.begin(await self._stands(cursor, progress.after))
                    cursor = None
                async with aclosing(self._told(asked, progress)) as stream:
                    async for told in stream:
                        if (event := progress.take(told)) is not None:
                            yield event
            except ServerError as error:
                await self._rest(error, progress)

    async def _rest(self, error: ServerError, progress: Progress) -> None:
        """Wait before another attempt; an error that would come again is raised."""
        await self._sleep(progress.pause(error))

    async def _stands(self, cursor: str, after: int) -> int:
        """Where a cursor stands; one that is not there yet is put at `after`."""
        try:
            stands: int = (await self.get(cursor_path(cursor)))["sequence"]
        except ServerError as error:
            if error.word != "unknown_cursor":
                raise
            stands = (await self.put(cursor_path(cursor), {"sequence": after}))["sequence"]
        return stands

    def _told(self, asked: Asked, progress: Progress) -> AsyncGenerator[Told, None]:
        after = progress.after
        if asked.transport == "grpc":
            target = _rpc.Target(self._grpc, self._key)
            return _rpc.subscribed_async(target, asked.message(after))
        if asked.transport == "websocket":
            conversation = _talk.Conversation(self._key, asked.tables, progress)
            return _talk.talked_async(self.url, conversation)
        return self._streamed(asked.path(after), after)

    async def _streamed(self, path: str, after: int) -> AsyncGenerator[Told, None]:
        async with self._asked("GET", path, accept="text/event-stream") as answer:
            await answer.expect_success()
            yield Opened(answer.headers.get("x-headrace-epoch", ""))
            lines = Lines(after)
            async for line in answer.lines(SILENT_SECONDS):
                if (told := lines.take(line)) is not None:
                    yield told
        raise ServerAbsent(f"the server at {self.url} went away")

    async def _json(self, method: str, path: str, body: object = None) -> Any:
        async with self._asked(method, path, body=body) as answer:
            await answer.expect_success()
            return await answer.json()

    def _asked(
        self, method: str, path: str, *, body: object = None, accept: str = "application/json"
    ) -> AbstractAsyncContextManager[Answer]:
        headers = {"Accept": accept}
        if self._key is not None:
            headers["X-API-Key"] = self._key.reveal()
        return ask(self._address, Question(method, path, headers, body))
