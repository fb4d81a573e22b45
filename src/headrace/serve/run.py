"""The server in a process: in the foreground, or in a thread beside something else."""

import asyncio
import errno
import socket
import threading
from types import TracebackType
from typing import Self

import uvicorn
from litestar import Litestar

from ..errors import ConfigError, HeadraceError
from .settings import ServerSettings

GRACE_SECONDS = 3  # for a client that does not take the end of its stream
KEEP_ALIVE_SECONDS = 75  # longer than a reverse proxy keeps an idle connection


def serve(app: Litestar, settings: ServerSettings) -> None:
    """Answer requests until the process is told to stop."""
    with _bind(settings) as listening:
        _Server(app).run([listening])


class BackgroundServer:
    """The server in a thread, from entering to leaving the context."""

    def __init__(self, app: Litestar, settings: ServerSettings) -> None:
        self._settings = settings
        self._server = _Server(app)
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._address: tuple[str, int] = (settings.host, settings.port)

    @property
    def url(self) -> str:
        """Where it answers, also when the settings leave the port open."""
        host, port = self._address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def __enter__(self) -> Self:
        self._listening = _bind(self._settings)
        self._address = self._listening.getsockname()[:2]
        self._thread.start()
        self._server.settled.wait()
        if not self._server.started:
            raise HeadraceError("the server did not start; its log says why")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every stream, answer what is being asked, and let go of the port."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._listening as listening:
                self._server.run([listening])
        finally:
            self._server.settled.set()


class _Server(uvicorn.Server):
    """Uvicorn, with streams that end when it stops."""

    def __init__(self, app: Litestar) -> None:
        config = uvicorn.Config(
            app,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        super().__init__(config)
        self.settled = threading.Event()  # started, or failed to
        self._feed = app.state.service.feed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.settled.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Uvicorn waits for open responses before it tells the app to end; streams end only when
        # told, so they are told first.
        self._feed.close()
        cutting_off = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._cut_off)
        await super().shutdown(sockets)
        cutting_off.cancel()

    def _cut_off(self) -> None:
        """Drop the clients that do not take their answer; their responses then end."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def _bind(settings: ServerSettings) -> socket.socket:
    host, port = settings.host, settings.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise _refused(error, host, port) from error


def _refused(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"server.port {port} on {host} is in use by another program",
            hint="Stop that program, or set server.port to a free one.",
        )
    if error.errno == errno.EACCES:
        return ConfigError(
            f"server.port {port} needs rights this user does not have",
            hint="Set server.port to 1024 or above.",
        )
    return ConfigError(
        f"server.host {host!r} is no address of this machine: {error.strerror}",
        hint="Set server.host to 127.0.0.1.",
    )
