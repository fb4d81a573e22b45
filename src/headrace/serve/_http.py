"""HTTP connections with bounds: uvicorn waits for ever for a request of any size.

It uses parts of uvicorn that are not documented; tests/serve/test_uvicorn.py names each of them.
"""

import asyncio
import socket
import struct
import sys
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .problems import Problem

if sys.platform == "linux":
    import fcntl
    import termios

_INT = struct.Struct("@i")
REQUEST_SECONDS = 30.0  # for a request to come whole, from its first byte or the connection's start
LARGEST_HEAD = 64 << 10  # bytes of a request before its body; uvicorn's parser has no bound
EXTENSION = "headrace.http"  # of a request's scope: `let_go` ends a client that takes nothing

# A client that takes nothing of its answer for so long is gone, however slow one that takes a
# little all the time may be. Longer than a reader works on what it has; whoever comes back later
# goes on where it was.
STALLED_SECONDS = 300.0


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP, which lets go of clients that neither send nor take what they should."""

    _in_head = _in_request = False
    _head_size = 0
    _coming: asyncio.TimerHandle | None = None  # runs until the request is whole
    _stalled: asyncio.TimerHandle | None = None  # runs while the client takes nothing

    def connection_made(  # type: ignore[override]  # as uvicorn's own
        self, transport: asyncio.Transport
    ) -> None:
        """A client has connected, and must send a request in time."""
        super().connection_made(transport)
        self._coming = self.loop.call_later(REQUEST_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected."""
        self._has_come()
        self._takes_again()
        super().connection_lost(exc)

    # --- its requests ---

    def data_received(self, data: bytes) -> None:
        """Read on; what is not whole yet must be so in time."""
        super().data_received(data)
        if self._in_head:
            self._head_size += len(data)
            if self._head_size > LARGEST_HEAD:
                self._refuse(431, "head_too_large", f"a head has at most {LARGEST_HEAD} bytes")
        if self._in_request and self._coming is None:
            self._coming = self.loop.call_later(REQUEST_SECONDS, self._too_slow)

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._in_head = self._in_request = True
        self._head_size = 0
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"let_go": self.let_go}}

    def on_headers_complete(self) -> None:
        """Its body follows, if it has one."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Its last byte."""
        self._in_request = False
        self._has_come()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Respond to what is no HTTP in JSON, as to everything."""
        self._refuse(400, "bad_request", msg)

    def _has_come(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            self._coming = None

    def _too_slow(self) -> None:
        self._refuse(408, "request_timeout", f"a request must come within {REQUEST_SECONDS:g} s")

    def _refuse(self, status: int, error: str, message: str) -> None:
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle
        # Where an answer is on its way, another one would be a part of it.
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_answer(status, Problem(error, message)))
        self._in_head = self._in_request = False
        self.transport.close()

    # --- its responses ---

    def pause_writing(self) -> None:
        """The client does not take what is sent."""
        super().pause_writing()
        if self._stalled is None:
            self._wait_for_less()

    def _wait_for_less(self) -> None:
        left = self._untaken()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self._look_for_less, left)

    def _look_for_less(self, left: int) -> None:
        # While writing is paused nothing is added, so less is left when the client has taken some.
        if self._untaken() < left:
            self._wait_for_less()
        else:
            self.transport.abort()

    def _untaken(self) -> int:
        """Bytes that the client has not taken, those that the kernel has for it included."""
        left: int = self.transport.get_write_buffer_size()
        if sys.platform == "linux":
            # It takes more from us only when it has got rid of a third of what it may keep.
            connection: socket.socket = self.transport.get_extra_info("socket")
            unsent = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_INT.size))
            left += int(_INT.unpack(unsent)[0])
        return left

    def resume_writing(self) -> None:
        """It does again."""
        self._takes_again()
        super().resume_writing()

    def let_go(self) -> None:
        """End the answer if the client leaves some of it; else it ends by itself."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _takes_again(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def _answer(status: int, problem: Problem) -> bytes:
    body = msgspec.json.encode(problem)
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


TOO_MANY_CONNECTIONS = _answer(
    503, Problem("too_many_connections", "the server has as many connections as it may; try again")
)
