"""A connection on which both sides may talk at once, in plain or in TLS.

What the other side says while we send is heard at once: it may stop listening until it is.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

from ...errors import SinkUnavailable

Heard = Callable[[bytes], None]
T = TypeVar("T")

_PIECE = 262_144
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH)

LOOK = "check servers, and that no firewall is in between"


class Silent(TimeoutError):
    """The other side said nothing in time."""


class Host(NamedTuple):
    """Where a server listens."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


class Wire:
    """One connection."""

    def __init__(self, host: Host, timeout: float) -> None:
        """Connect, or raise OSError."""
        self.host = host
        self._socket = socket.create_connection(host, timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._watch()

    def secure(self, context: ssl.SSLContext, timeout: float) -> None:
        """Go on in TLS."""
        self._socket.settimeout(timeout)
        # It closes the socket itself where it fails.
        self._socket = context.wrap_socket(self._socket, server_hostname=self.host.name)
        self._watch()

    def send(self, data: bytes, heard: Heard, timeout: float) -> None:
        """Send all of it within some seconds, and hand on what comes meanwhile."""
        left, deadline = memoryview(data), time.monotonic() + timeout
        while left:
            try:
                left = left[self._socket.send(left[:_PIECE]) :]
            except _AGAIN as error:
                only_read = isinstance(error, ssl.SSLWantReadError)
                self._wait(select.POLLIN | (0 if only_read else select.POLLOUT), deadline)
            if said := self.heard():
                heard(said)

    def heard(self) -> bytes:
        """What has come; b"": nothing yet. A connection that has ended is a ConnectionError."""
        try:
            said = self._socket.recv(_PIECE)
        except _AGAIN:
            return b""
        if not said:
            raise ConnectionResetError("the connection was closed")
        return said

    def receive(self, timeout: float) -> bytes:
        """What comes next, within some seconds."""
        deadline = time.monotonic() + timeout
        while not (said := self.heard()):
            self._wait(select.POLLIN, deadline)
        return said

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()

    def _watch(self) -> None:
        self._socket.setblocking(False)
        self._poll = select.poll()

    def _wait(self, mask: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        self._poll.register(self._socket, mask)
        if left <= 0 or not self._poll.poll(left * 1000):
            raise Silent


def why(error: OSError) -> str:
    """An error of a connection in words."""
    if isinstance(error, Silent):
        return "no answer in time"
    if isinstance(error, TimeoutError):
        return f"no connection in time; {LOOK}"
    if error.errno in _NO_WAY:
        return f"{error.strerror}; {LOOK}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or type(error).__name__}"
    return error.strerror or str(error) or type(error).__name__


def first_that_answers(
    what: str, hosts: Iterable[Host], timeout: float, greet: Callable[[Wire], T]
) -> T:
    """What `greet` makes of a connection to the first server that has us, or SinkUnavailable."""
    reasons = []
    for host in hosts:
        try:
            with ExitStack() as stack:
                wire = Wire(host, timeout)
                stack.callback(wire.close)
                greeted = greet(wire)
                stack.pop_all()
                return greeted
        except OSError as error:
            reasons.append(f"{host}: {why(error)}")
    raise SinkUnavailable(f"{what} at {'; '.join(reasons)}")


def unavailable(what: str, at: object, reason: str) -> SinkUnavailable:
    """That a server is not reached."""
    return SinkUnavailable(f"{what} at {at}: {reason}")
