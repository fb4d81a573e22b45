"""A connection to NATS that is logged in, with an inbox for answers."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from ...errors import ConfigError, SinkUnavailable
from ...secret import Secret
from ..push.broker import BrokerSettings, hidden
from ..push.wire import Host, Silent, Wire, first_that_answers
from .protocol import Credentials, Line, Message, Reader, Said, request

PORT = 4222

_STRANGE = "it does not speak as NATS does"


@dataclass(frozen=True, slots=True)
class Login:
    """Where to, and who we are."""

    sink: BrokerSettings
    token: Secret | None
    credentials_file: str

    @property
    def timeout(self) -> float:
        """Seconds in which the server answers."""
        return self.sink.timeout_seconds

    def without_secrets(self, text: str) -> str:
        """What the server said, without what is secret."""
        return hidden(text, self.sink.password, self.token)

    def told(self, nonce: str) -> dict[str, str]:
        """Who we are, as the server wants it."""
        sink = self.sink
        if self.credentials_file:
            try:
                known = Credentials.read(Path(self.credentials_file).read_text())
                return {"jwt": known.jwt, "sig": known.sign(nonce)}
            except (OSError, ValueError, ConfigError) as error:
                raise SinkUnavailable(
                    f"credentials_file {self.credentials_file} cannot be used: no such file, or "
                    "no user JWT or no valid seed in it"
                ) from error
        if self.token:
            return {"auth_token": self.token.reveal()}
        if sink.password:
            return {"user": sink.username, "pass": sink.password.reveal()}
        return {"user": sink.username} if sink.username else {}


class Refused(ConnectionError):
    """The server says that something is wrong."""


class Session:
    """One connection."""

    def __init__(self, login: Login, wire: Wire) -> None:
        self.max_payload = 1_048_576
        self.inbox = f"_INBOX.{uuid4().hex}.".encode()
        self._login = login
        self._wire = wire
        self._reader = Reader()
        self._said: deque[Said] = deque()
        self._asked = 0

    @property
    def host(self) -> Host:
        """Where the server is."""
        return self._wire.host

    def log_in(self, context: Any) -> None:
        """Say who we are, and listen at the inbox."""
        line = self._line(b"INFO")
        info = _decoded(line.rest)
        if context is not None:
            self._wire.secure(context, self._login.timeout)
        elif info.get("tls_required"):
            raise Refused("it wants TLS; set tls: true")
        self.max_payload = info.get("max_payload", self.max_payload)
        if not info.get("headers"):
            raise Refused("it takes no headers; JetStream needs NATS 2.2 or newer")
        sink = self._login.sink
        connect = {
            "verbose": False,
            "pedantic": False,
            "lang": "python",
            "version": "1",
            "protocol": 1,
            "headers": True,
            "no_responders": True,
            "name": f"headrace {sink.name}",
            **self._login.told(info.get("nonce", "")),
        }
        said = msgspec.json.encode(connect)
        self.send(b"CONNECT %b\r\nSUB %b* 1\r\nPING\r\n" % (said, self.inbox))
        self._line(b"PONG")

    def send(self, data: bytes) -> None:
        """Send messages; what comes meanwhile is kept for `next`."""
        self._wire.send(data, self._hear, self._login.timeout)

    def next(self, timeout: float) -> Said:
        """What the server says next, or Silent."""
        deadline = time.monotonic() + timeout
        while True:
            while not self._said:
                self._hear(self._wire.receive(deadline - time.monotonic()))
            said = self._said.popleft()
            if not (isinstance(said, Line) and self._noted(said)):
                return said

    def ask(self, subject: str, content: Any) -> dict[str, Any] | None:
        """JetStream's answer to a question; None: nobody is there, or we may not ask."""
        self._asked += 1
        inbox = self.inbox + b"ask-%d" % self._asked
        self.send(request(subject.encode(), inbox, msgspec.json.encode(content)))
        while True:
            said = self.next(self._login.timeout)
            if isinstance(said, Line) and denied(said):
                return None
            if isinstance(said, Message) and said.subject == inbox:
                return None if said.status else _decoded(said.data)

    def alive(self) -> bool:
        """Whether the server has not hung up since."""
        try:
            if data := self._wire.heard():
                self._hear(data)
            while self._said:
                self.next(0)
        except Silent:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Let go of it."""
        self._wire.close()

    def _hear(self, data: bytes) -> None:
        try:
            self._said.extend(self._reader.feed(data))
        except (ValueError, IndexError) as error:
            raise Refused(_STRANGE) from error

    def _line(self, name: bytes) -> Line:
        while True:
            said = self.next(self._login.timeout)
            if isinstance(said, Line) and said.name == name:
                return said

    def _noted(self, line: Line) -> bool:
        """Whether it was about the connection itself; that it is over is raised."""
        if line.name == b"PING":
            self.send(b"PONG\r\n")
            return True
        if line.name == b"-ERR" and not denied(line):
            told = line.rest.decode(errors="replace").strip("'")
            raise Refused(self._login.without_secrets(told))
        return False


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Refused(_STRANGE) from error


def denied(line: Line) -> bool:
    """Whether the server says that we may not publish to a subject."""
    return line.name == b"-ERR" and b"permissions violation" in line.rest.lower()


def opened(login: Login) -> Session:
    """A session with the first server that has us, or SinkUnavailable."""
    context = login.sink.context()

    def greet(wire: Wire) -> Session:
        session = Session(login, wire)
        session.log_in(context)
        return session

    return first_that_answers("NATS", login.sink.hosts(PORT), login.timeout, greet)
