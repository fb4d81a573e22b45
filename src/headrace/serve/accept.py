"""Connections as they come: at most so many at once, and never the files that others need."""

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable, Set
from contextlib import suppress

from ..log import files

logger = logging.getLogger(__name__)

AT_ONCE = 16  # connections that are taken before others get their turn
HANDSHAKE_SECONDS = 10.0  # for a client to agree on TLS
SHUTDOWN_SECONDS = 3.0  # for a client to take the end of TLS
PAUSE_SECONDS = 0.5  # until the next try where no file can be opened
LOG_SECONDS = 10.0  # between two lines about connections that were refused


class Acceptor:
    """Takes connections from a listening socket while there is room for them."""

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        *,
        room: Callable[[Set[asyncio.Protocol]], int],
        refusal: bytes,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`room` returns how many more there may be beside those that are being opened.

        `refusal` is sent to the others.
        """
        self._listening = listening
        self._protocol = protocol
        self._room = room
        self._refusal = b"" if tls else refusal  # nobody could read it
        self._tls = tls
        self._opening: dict[asyncio.Task[None], asyncio.Protocol] = {}  # perhaps shaking hands
        self._paused: asyncio.TimerHandle | None = None
        self._refused = RefusalLog()

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._listening.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listening, self._take)

    def stop(self) -> None:
        """Take no more; those that are there stay, but for those in a handshake."""
        if self._paused is not None:
            self._paused.cancel()
        asyncio.get_running_loop().remove_reader(self._listening)
        for task in list(self._opening):
            task.cancel()

    def _take(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the client has gone already
            except OSError as error:
                self._pause(error)
                return
            connection.setblocking(False)
            # Files are numbered from the lowest that is free, so the number says how many there
            # are, whoever opened them.
            limit = files.file_limit()
            crowded = connection.fileno() >= limit - files.reserved_files(limit) // 2
            if crowded or self._room(set(self._opening.values())) <= 0:
                self._refuse(connection)
            else:
                protocol = self._protocol()
                task = asyncio.create_task(self._open(connection, protocol))
                self._opening[task] = protocol
                task.add_done_callback(self._opening.pop)

    async def _open(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        tls = None if self._tls is None else self._tls()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if tls else None,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS if tls else None,
            )
        except (OSError, asyncio.CancelledError) as error:
            # It left, speaks no TLS, or has no certificate that we trust; also ssl.SSLError.
            logger.debug("connection error=%s", error)
            connection.close()

    def _refuse(self, connection: socket.socket) -> None:
        self._refused.count()
        with connection:
            with suppress(OSError):  # nothing has come yet; unread, it would reset the connection
                connection.recv(1 << 16)
            with suppress(OSError):
                connection.send(self._refusal)

    def _pause(self, error: OSError) -> None:
        """Wait until files may be opened again: the socket would be ready all the time."""
        hint = files.HINT if files.is_exhausted(error) else ""
        logger.error("connections cannot be accepted error=%s hint=%s", error, hint)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)
        self._paused = loop.call_later(PAUSE_SECONDS, self.start)


class RefusalLog:
    """Logs how many connections were refused, not each of them."""

    def __init__(self) -> None:
        self._count = 0
        self._next = -math.inf

    def count(self) -> None:
        """One more."""
        self._count += 1
        now = asyncio.get_running_loop().time()
        if now >= self._next:
            self._next = now + LOG_SECONDS
            logger.warning(
                "clients are refused: as many are connected as server.max_connections or the "
                "limit of open files (`ulimit -n`) allows refused=%d",
                self._count,
            )
            self._count = 0
