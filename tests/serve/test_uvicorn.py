"""The parts of uvicorn that Headrace uses although nothing documents them.

When a version of uvicorn lacks one, the test says which, and `serve/_http.py`, `serve/ws/frames.py`
or `serve/run.py` must change before the range in pyproject.toml may include it.
"""

import asyncio
import inspect
import re
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from headrace.serve.measured import MeasuredApp, RequestCounts

HTTP_METHODS = (
    "connection_made", "connection_lost", "data_received", "on_message_begin",
    "on_headers_complete", "on_message_complete", "send_400_response", "pause_writing",
    "resume_writing",
)  # fmt: skip
HTTP_STATE = ("loop", "transport", "scope", "cycle")
WEBSOCKET_METHODS = ("handle_connect", "run_asgi", "receive", "send")
WEBSOCKET_STATE = (
    "app", "transport", "scope", "request", "response", "writable", "disconnected", "close_sent",
)  # fmt: skip
SERVER_METHODS = ("run", "startup", "shutdown")
SERVER_STATE = ("started", "should_exit", "server_state", "lifespan", "config")


async def application(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody asks")


def lacking(thing: object, names: tuple[str, ...]) -> set[str]:
    # Some attributes are set only by a request.
    later = set(re.findall(r"self\.(\w+)(?::[^=\n]+)? = ", inspect.getsource(type(thing))))
    return {name for name in names if not hasattr(thing, name) and name not in later}


@pytest.mark.parametrize(
    ("protocol", "names"),
    [
        (HttpToolsProtocol, HTTP_METHODS + HTTP_STATE),
        (WebSocketsSansIOProtocol, WEBSOCKET_METHODS + WEBSOCKET_STATE),
    ],
)
def test_connections_have_what_headrace_extends(
    protocol: type[HttpToolsProtocol | WebSocketsSansIOProtocol], names: tuple[str, ...]
) -> None:
    async def made() -> object:
        config = uvicorn.Config(application)
        config.load()
        return protocol(config, ServerState(), {})

    assert lacking(asyncio.run(made()), names) == set()


def test_a_response_says_whether_it_has_begun_and_ended() -> None:
    source = inspect.getsource(RequestResponseCycle)
    assert "self.response_started = " in source
    assert "self.response_complete = " in source


def test_the_server_starts_and_stops_by_methods_that_headrace_extends() -> None:
    server = uvicorn.Server(uvicorn.Config(application))
    assert lacking(server, SERVER_METHODS + SERVER_STATE) == set()
    assert hasattr(server.server_state, "connections")
    for method in (server.startup, server.shutdown):
        assert list(inspect.signature(method).parameters) == ["sockets"]
        assert inspect.iscoroutinefunction(method)


def test_a_client_that_has_gone_is_an_error_of_its_own() -> None:
    assert issubclass(ClientDisconnected, OSError)


def test_a_client_that_has_left_fails_no_request() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def closed(message: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

    async def broken(message: object) -> None:
        raise RuntimeError("something else")

    app = MeasuredApp(answer, RequestCounts())
    scope: Any = {"type": "http", "method": "GET"}
    receive: Any = None
    asyncio.run(app(scope, receive, closed))
    with pytest.raises(RuntimeError, match="something else"):
        asyncio.run(app(scope, receive, broken))
