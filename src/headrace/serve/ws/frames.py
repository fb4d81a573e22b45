"""WebSocket frames as they are written to a socket, without the server's own copy of each event.

Uvicorn speaks the protocol. It takes one message at a time, keeps all that the handshake needed,
and has no way to give up a client that reads nothing; that is different here.
"""

import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

# Bytes that the kernel keeps for a client that does not read; it may take twice as many. Without
# this it takes up to 4 MB for each.
SEND_BUFFER = 256 << 10

EXTENSION = "headrace.frames"

_TEXT = 0x81  # the whole message in one frame; frames of a server are not masked
_MIDDLE, _LONG = struct.Struct(">BBH"), struct.Struct(">BBQ")


def framed(payloads: Iterable[bytes]) -> bytes:
    """Messages of text as the frames that carry them."""
    return b"".join(part for payload in payloads for part in (_head(len(payload)), payload))


def _head(size: int) -> bytes:
    if size < 126:
        return bytes((_TEXT, size))
    if size < 1 << 16:
        return _MIDDLE.pack(_TEXT, 126, size)
    return _LONG.pack(_TEXT, 127, size)


class FramesProtocol(WebSocketsSansIOProtocol):
    """Uvicorn's protocol, which an app may also give frames."""

    conversation: Callable[[], Awaitable[None]] | None = None  # what follows the handshake

    def handle_connect(self, event: Request) -> None:
        """Answer an upgrade; the app finds this object in its scope."""
        super().handle_connect(event)
        if not self.close_sent:
            listening: socket.socket = self.transport.get_extra_info("socket")
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            extensions = self.scope["extensions"]
            assert extensions is not None
            extensions[EXTENSION] = {"protocol": self}

    async def run_asgi(self) -> None:
        """Let the app do the handshake; then, with all of that forgotten, talk.

        Within the app's routing, middleware and request an idle client would take twice the memory.
        """
        app: Any = self.app

        async def call(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            if self.conversation is not None:
                del scope, self.scope, self.request, self.response
                await self.conversation()

        self.app = call
        await super().run_asgi()

    async def write(self, frames: bytes) -> None:
        """Write frames as soon as the client has taken most of what came before."""
        await self.writable.wait()
        if self.disconnected or self.close_sent or self.transport.is_closing():
            raise ClientDisconnected
        self.transport.write(frames)

    def abort(self) -> None:
        """End the connection now, whatever the client has not taken."""
        self.transport.abort()
