"""Ways to a server that end, are slow, lose answers or lead nowhere."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

from headrace.sinks.push.channels import close_all

_PIECE = 65536


class Way:
    """A port of this machine that leads to a server."""

    def __init__(self, server: str = "") -> None:
        self.server = server  # its address; it may become known later
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._listen)]
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        close_all()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()

    def go(self, said: bytes, server: socket.socket) -> None:
        """Hand on what a client says."""
        server.sendall(said)

    def heard(self, server: socket.socket) -> bytes:
        """What the server says next; b"": no more."""
        return server.recv(_PIECE)

    def back(self, said: bytes, client: socket.socket) -> bool:
        """Hand on what the server says; returns whether the way goes on."""
        client.sendall(said)
        return True

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            host, _, port = self.server.rpartition(":")
            try:
                server = socket.create_connection((host, int(port)))
            except OSError:
                client.close()
                continue
            threads = [
                threading.Thread(target=self._there, args=(client, server)),
                threading.Thread(target=self._back, args=(server, client)),
            ]
            self._threads += threads
            for thread in threads:
                thread.start()

    def _there(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while said := client.recv(_PIECE):
                self.go(said, server)
        _hang_up(client, server)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with server, client, suppress(OSError):
            while (said := self.heard(server)) and self.back(said, client):
                continue
            _hang_up(client, server)


class Cut(Way):
    """A way that ends once so many more bytes came back on it."""

    _left: int | None = None

    def after(self, count: int) -> None:
        """The next so many bytes pass, and no more."""
        self._left = count

    def back(self, said: bytes, client: socket.socket) -> bool:
        """Hand on what is left to be."""
        left, self._left = self._left, None
        if left is None:
            client.sendall(said)
            return True
        client.sendall(said[:left])
        self._left = left - len(said) if left > len(said) else None
        return self._left is not None


class Slow(Way):
    """A way on which answers take their time, or are lost."""

    _seconds = 0.0
    _loses = False

    @contextmanager
    def slowed(self, seconds: float) -> Iterator[None]:
        """An answer takes so long until the context ends."""
        self._seconds = seconds
        try:
            yield
        finally:
            self._seconds = 0.0

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Answers are lost until the context ends."""
        self._loses = True
        try:
            yield
        finally:
            self._loses = False

    def heard(self, server: socket.socket) -> bytes:
        """What has come when the time is over."""
        select.select([server], [], [])
        self._over.wait(self._seconds)
        return server.recv(_PIECE)

    def back(self, said: bytes, client: socket.socket) -> bool:
        """Hand it on, unless it is lost."""
        return self._loses or super().back(said, client)


class Gate(Way):
    """A way on which what a client says is parted, so that something happens in between."""

    _between: Callable[[], object] | None = None
    _answered = threading.Event()

    def once(self, between: Callable[[], object]) -> None:
        """The next piece passes; when the server has answered, `between` is done, then the rest."""
        self._answered = threading.Event()
        self._between = between

    def go(self, said: bytes, server: socket.socket) -> None:
        """Hand it on, and wait if it is the piece."""
        super().go(said, server)
        between, self._between = self._between, None
        if between is not None:
            assert self._answered.wait(60)
            between()

    def back(self, said: bytes, client: socket.socket) -> bool:
        """Hand it on, and note that it came."""
        self._answered.set()
        return super().back(said, client)


@contextmanager
def nowhere() -> Iterator[str]:
    """An address where a connection hangs, as one does that no network leads to."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


def _hang_up(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
