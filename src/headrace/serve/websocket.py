"""GET /v1/stream: changes over a WebSocket, as a conversation in JSON messages.

`_wsmessages` says what the messages are, `_wssession` which may follow which, without input or
output; `_wsconnection` moves the frames.
"""

from contextlib import ExitStack
from typing import Any

import msgspec
from litestar import Request, Response, WebSocket, get, websocket

from ._wsconnection import Connection, Streams
from .access import OPEN
from .openapi import asks
from .problems import Problem, Refused
from .query import NoQuery, read_query

__all__ = ["Streams", "stream", "upgrade"]


@get(
    "/v1/stream",
    operation_class=asks(NoQuery),
    include_in_schema=False,
    opt=OPEN,
)
async def upgrade(request: Request[Any, Any, Any]) -> Response[Problem]:
    """A client that asks without an upgrade is told what this is."""
    message = "this is a WebSocket; connect with ws:// (or wss://) and send an auth message"
    return Response(
        Problem("upgrade_required", message),
        status_code=426,
        headers={"Upgrade": "websocket", "Connection": "Upgrade"},
    )


@websocket("/v1/stream", opt=OPEN)
async def stream(socket: WebSocket[Any, Any, Any]) -> None:
    """One client's connection, from the upgrade to its end."""
    try:
        read_query(socket, NoQuery)
    except Refused as refused:
        await _refuse(socket, refused)
        return
    await socket.accept()
    with ExitStack() as held:
        await Connection(socket, socket.app.state.streams, held).run()


async def _refuse(socket: WebSocket[Any, Any, Any], refused: Refused) -> None:
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
