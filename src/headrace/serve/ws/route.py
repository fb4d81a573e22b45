"""GET /v1/stream: changes over a WebSocket, as a conversation in JSON messages.

`messages` has the messages, `session` which may follow which, without input or output;
`connection` moves the frames.
"""

from typing import Any

import msgspec
from litestar import Request, Response, WebSocket, get, websocket

from ..access import OPEN
from ..openapi import operation
from ..problems import Problem, RequestRefused
from ..query import NoQuery, read_query
from .connection import WebSocketConnection, WebSocketStreams
from .frames import EXTENSION, FramesProtocol

__all__ = ["WebSocketStreams", "stream", "upgrade"]


@get(
    "/v1/stream",
    operation_class=operation(NoQuery),
    include_in_schema=False,
    opt=OPEN,
)
async def upgrade(request: Request[Any, Any, Any]) -> Response[Problem]:
    """Respond to a request without an upgrade."""
    message = "this is a WebSocket; connect with ws:// (or wss://) and send an auth message"
    return Response(
        Problem("upgrade_required", message),
        status_code=426,
        headers={"Upgrade": "websocket", "Connection": "Upgrade"},
    )


@websocket("/v1/stream", opt=OPEN)
async def stream(socket: WebSocket[Any, Any, Any]) -> None:
    """The handshake; the conversation follows when this has returned."""
    try:
        read_query(socket, NoQuery)
    except RequestRefused as refused:
        await _refuse(socket, refused)
        return
    extensions: Any = socket.scope["extensions"]
    protocol: FramesProtocol = extensions[EXTENSION]["protocol"]
    await socket.accept()
    protocol.conversation = WebSocketConnection(protocol, socket.app.state.streams).run


async def _refuse(socket: WebSocket[Any, Any, Any], refused: RequestRefused) -> None:
    start: Any = {
        "type": "websocket.http.response.start",
        "status": refused.status_code,
        "headers": [(b"content-type", b"application/json")],
    }
    body: Any = {
        "type": "websocket.http.response.body",
        "body": msgspec.json.encode(refused.problem),
    }
    await socket.send(start)
    await socket.send(body)
