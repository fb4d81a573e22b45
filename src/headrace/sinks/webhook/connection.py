"""A connection that is kept: HTTP/1.1, one request at a time."""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

from .answer import Reply

LONGEST_HEAD = 64 << 10  # bytes of an answer before its body
LONGEST_BODY = 4 << 10  # bytes of a body that are read at all
BODY_SECONDS = 1.0  # how long a body is waited for: the status has said everything


class Lost(Exception):
    """No answer came; `unseen`: the other side may well have closed before it saw the request."""

    def __init__(self, message: str, *, unseen: bool = False) -> None:
        super().__init__(message)
        self.unseen = unseen


class Late(Lost):
    """No answer came in time."""


class Connection(asyncio.Protocol):
    """An open connection; httptools calls its `on_…` methods."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[Reply] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answers = 0
        self._begin()

    def _begin(self) -> None:
        self._status = 0
        self._retry_after = ""
        self._body = b""
        self._heard = 0  # bytes of this answer
        self._draining = False

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def _asked(self) -> bool:
        return self._waiting is not None

    async def ask(self, request: bytes, seconds: float) -> Reply:
        """Send a request; Lost when no answer comes within so many seconds."""
        if self._transport is None or self._transport.is_closing():
            raise Lost("it closed the connection", unseen=True)
        self._begin()
        self._waiting = self._loop.create_future()
        self._timer = self._loop.call_later(seconds, self._late)
        try:
            self._transport.write(request)
            return await self._waiting
        finally:
            self._timer.cancel()
            if self._waiting is not None:  # given up: an answer that still comes is nobody's
                self._waiting = None
                self.close()

    def close(self) -> None:
        """Let go of it, without goodbye: what was not sent is not wanted any more."""
        if self._transport is not None:
            self._transport.abort()

    # --- what the event loop calls ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of another class

    def data_received(self, data: bytes) -> None:
        self._heard += len(data)
        if not self._asked():
            self.close()  # it speaks without being asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._end(Lost("what it answered is not HTTP/1.1"))
            return
        if not self._asked():
            return
        if self._status:
            self._expect_the_rest()
        elif self._heard > LONGEST_HEAD:
            self._end(Lost(f"its answer has more than {LONGEST_HEAD >> 10} KB of headers"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self._asked():
            return
        if self._status:
            self._end(self._reply())
        else:
            unseen = self._answers > 0 and self._heard == 0
            self._end(Lost("it closed the connection without an answer", unseen=unseen))

    # --- what the parser calls -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._asked():
            self.close()  # more than one answer: the rest would be taken for the next one's

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._status = 0 if 100 <= status < 200 and status != 101 else status

    def on_body(self, piece: bytes) -> None:
        if len(self._body) < LONGEST_BODY:
            self._body = (self._body + piece)[:LONGEST_BODY]

    def on_message_complete(self) -> None:
        if not self._status:
            return  # 100 Continue and the like: the answer is still to come
        keep, self._answers = self._parser.should_keep_alive(), self._answers + 1
        self._end(self._reply(), keep=keep)

    # --- the end of a request --------------------------------------------------------------------

    def _expect_the_rest(self) -> None:
        """The status is there and the body is not: it is read only to keep the connection."""
        if len(self._body) >= LONGEST_BODY:
            self._end(self._reply())
        elif self._timer is not None and not self._draining:
            self._draining = True
            self._timer.cancel()
            self._timer = self._loop.call_later(BODY_SECONDS, self._late)

    def _late(self) -> None:
        self._end(self._reply() if self._status else Late("no answer in time"))

    def _reply(self) -> Reply:
        return Reply(self._status, self._retry_after, self._body)

    def _end(self, outcome: Reply | Lost, *, keep: bool = False) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            if isinstance(outcome, Lost):
                waiting.set_exception(outcome)
            else:
                waiting.set_result(outcome)
        if not keep:
            self.close()
