"""The server in a process: in the foreground, or in a thread beside something else."""

import asyncio
import errno
import socket
import threading
from collections.abc import Set
from types import TracebackType
from typing import Self

import uvicorn
from litestar import Litestar

from ..errors import ConfigError, HeadraceError
from ._http import STALLED_SECONDS, TOO_MANY_CONNECTIONS, BoundedProtocol
from .accept import Acceptor
from .grpc import GrpcServer
from .measured import MeasuredApp
from .origins import sharing
from .service import Service
from .settings import ServerSettings
from .tls import CertificateFiles
from .ws.frames import FramesProtocol
from .ws.messages import LARGEST_MESSAGE

GRACE_SECONDS = 3  # for a client that does not take the end of its stream
UNSENT_BYTES = 256 << 10  # that the kernel takes for a client beyond what is on its way
KEEP_ALIVE_SECONDS = 75  # longer than a reverse proxy keeps an idle connection


def serve(app: Litestar, settings: ServerSettings) -> None:
    """Answer requests until the process is to stop."""
    with _bind(settings) as listening:
        _Server(app).run([listening])


class BackgroundServer:
    """The server in a thread, from entering to leaving the context."""

    def __init__(self, app: Litestar, settings: ServerSettings) -> None:
        self._settings = settings
        self._server = _Server(app)
        self._failure: HeadraceError | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._address: tuple[str, int] = (settings.host, settings.port)

    @property
    def url(self) -> str:
        """Where it answers, also when the settings leave the port open."""
        host, port = self._address
        scheme = "http" if self._settings.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def grpc_target(self) -> str:
        """Where gRPC answers, as its clients write it; "": nowhere."""
        if self._server.grpc is None:
            return ""
        host, port = self._address[0], self._server.grpc.port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __enter__(self) -> Self:
        self._listening = _bind(self._settings)
        self._address = self._listening.getsockname()[:2]
        self._thread.start()
        self._server.settled.wait()
        if not self._server.started:
            failed = HeadraceError("the server did not start; its log says why")
            raise self._failure or failed
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every stream, answer open requests, and let go of the port."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._listening as listening:
                self._server.run([listening])
        except HeadraceError as error:
            self._failure = error
        finally:
            self._server.settled.set()


class _Server(uvicorn.Server):
    """Uvicorn, with streams that end when it stops."""

    def __init__(self, app: Litestar) -> None:
        self._service: Service = app.state.service
        config = uvicorn.Config(
            MeasuredApp(sharing(app, self._service.origins), self._service.requests),
            lifespan="on",
            http=BoundedProtocol,
            ws=FramesProtocol,
            ws_max_size=LARGEST_MESSAGE,
            ws_ping_interval=None,  # sessions have pings of their own
            ws_per_message_deflate=False,  # 64 KB and more for each client
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        super().__init__(config)
        self.settled = threading.Event()  # started, or failed to
        self.grpc: GrpcServer | None = None
        self._acceptors: list[Acceptor] = []
        tls = self._service.settings.tls
        self._tls = None if tls is None else CertificateFiles(tls)
        self._watching: asyncio.Task[None] | None = None
        self._most: int = self._service.settings.connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Its port may be taken, which must be known before anything else begins.
        if self._service.settings.grpc_port is not None:
            self.grpc = GrpcServer(self._service, self._tls)
        await super().startup([])
        for listening in sockets or []:
            acceptor = Acceptor(
                listening,
                self._protocol,
                room=self._room,
                refusal=TOO_MANY_CONNECTIONS,
                tls=None if self._tls is None else self._tls.context,
            )
            acceptor.start()
            self._acceptors.append(acceptor)
        if self._tls is not None:
            self._watching = asyncio.create_task(self._tls.watch())
        if self.grpc is not None:
            await self.grpc.start()
        self.settled.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Uvicorn waits for open responses before it ends the app; streams end only when the feed
        # closes, so that comes first.
        self._service.feed.close()
        for acceptor in self._acceptors:
            acceptor.stop()
        if self._watching is not None:
            self._watching.cancel()
        cutting_off = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._cut_off)
        stopping = [super().shutdown(sockets)]
        if self.grpc is not None:
            stopping.append(self.grpc.stop(GRACE_SECONDS))
        await asyncio.gather(*stopping)
        cutting_off.cancel()

    def _protocol(self) -> BoundedProtocol:
        return BoundedProtocol(self.config, self.server_state, self.lifespan.state)

    def _room(self, opening: Set[asyncio.Protocol]) -> int:
        return self._most - len(opening | self.server_state.connections)

    def _cut_off(self) -> None:
        """Drop the clients that do not take their answer; their responses then end."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def _bind(settings: ServerSettings) -> socket.socket:
    host, port = settings.host, settings.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise _refused(error, host, port) from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # For every connection it accepts: a client that vanished without a word acknowledges
        # nothing, and would otherwise be found after a quarter of an hour.
        milliseconds = int(STALLED_SECONDS * 1000)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # Also for every connection: else the kernel keeps up to 4 MB for one that reads nothing.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    return listening


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
