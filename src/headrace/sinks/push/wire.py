"""A socket that reads while it writes, in plain or in TLS.

What the server sends while we send is read at once: it may stop reading until then.
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

OnReceived = Callable[[bytes], None]
T = TypeVar("T")

_PIECE = 262_144
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH)

LOOK = "check servers, and that no firewall is in between"


class ReplyTimeout(TimeoutError):
    """Nothing was received in time."""


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
        self._make_nonblocking()

    def secure(self, context: ssl.SSLContext, timeout: float) -> None:
        """Go on in TLS."""
        self._socket.settimeout(timeout)
        # It closes the socket itself where it fails.
        self._socket = context.wrap_socket(self._socket, server_hostname=self.host.name)
        self._make_nonblocking()

    def send(self, data: bytes, received: OnReceived, timeout: float) -> None:
        """Send all of it within some seconds, and pass on what is received meanwhile."""
        left, deadline = memoryview(data), time.monotonic() + timeout
        while left:
            try:
                left = left[self._socket.send(left[:_PIECE]) :]
            except _AGAIN as error:
                only_read = isinstance(error, ssl.SSLWantReadError)
                self._wait(select.POLLIN | (0 if only_read else select.POLLOUT), deadline)
            if incoming := self.available():
                received(incoming)

    def available(self) -> bytes:
        """What was received; b"": nothing yet. A connection that has ended is a ConnectionError."""
        try:
            data = self._socket.recv(_PIECE)
        except _AGAIN:
            return b""
        if not data:
            raise ConnectionResetError("the connection was closed")
        return data

    def receive(self, timeout: float) -> bytes:
        """What comes next, within some seconds."""
        deadline = time.monotonic() + timeout
        while not (data := self.available()):
            self._wait(select.POLLIN, deadline)
        return data

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _make_nonblocking(self) -> None:
        self._socket.setblocking(False)
        self._poll = select.poll()

    def _wait(self, mask: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        self._poll.register(self._socket, mask)
        if left <= 0 or not self._poll.poll(left * 1000):
            raise ReplyTimeout


def client_context(
    ca_file: str = "", certificate_file: str = "", key_file: str = ""
) -> ssl.SSLContext:
    """A TLS context that checks the server's certificate; the files are PEM.

    Without `ca_file` the machine's own authorities are trusted. SinkUnavailable: a file cannot be
    read.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
        if certificate_file:
            context.load_cert_chain(certificate_file, key_file or None, _no_password)
    except (OSError, ValueError) as error:
        given = {"ca_file": ca_file, "certificate_file": certificate_file, "key_file": key_file}
        names = ", ".join(f"{name} {file}" for name, file in given.items() if file)
        raise SinkUnavailable(f"{names} cannot be read: {type(error).__name__}") from error
    return context


def _no_password() -> str:
    # Otherwise OpenSSL prompts at the terminal.
    return ""


def why(error: OSError) -> str:
    """An error of a connection in words."""
    if isinstance(error, ReplyTimeout):
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
    """What `greet` returns for the first server that lets us log in, or SinkUnavailable."""
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
    """The error for a server that is not reached."""
    return SinkUnavailable(f"{what} at {at}: {reason}")
