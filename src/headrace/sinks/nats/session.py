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
from ..push import BrokerSettings, without_secrets
from ..push.wire import Host, ReplyTimeout, Wire, first_that_answers
from .protocol import NatsCredentials, NatsFrame, NatsLine, NatsMessage, NatsReader, request

PORT = 4222

_NO_NATS = "it does not speak as NATS does"


@dataclass(frozen=True, slots=True)
class NatsLogin:
    """The address and the login."""

    sink: BrokerSettings
    token: Secret | None
    credentials_file: str

    @property
    def timeout(self) -> float:
        """Seconds in which the server answers."""
        return self.sink.timeout_seconds

    def without_secrets(self, text: str) -> str:
        """A text of the server without secrets."""
        return without_secrets(text, self.sink.password, self.token)

    def credentials(self, nonce: str) -> dict[str, str]:
        """The fields of CONNECT that log us in."""
        sink = self.sink
        if self.credentials_file:
            try:
                known = NatsCredentials.read(Path(self.credentials_file).read_text())
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


class NatsRefused(ConnectionError):
    """The server has sent an error."""


class NatsSession:
    """One connection."""

    def __init__(self, login: NatsLogin, wire: Wire) -> None:
        self.max_payload = 1_048_576
        self.inbox = f"_INBOX.{uuid4().hex}.".encode()
        self._login = login
        self._wire = wire
        self._reader = NatsReader()
        self._frames: deque[NatsFrame] = deque()
        self._requests = 0

    @property
    def host(self) -> Host:
        """Where the server is."""
        return self._wire.host

    def log_in(self, context: Any) -> None:
        """Log in, and subscribe to the inbox."""
        line = self._line(b"INFO")
        info = _decoded(line.rest)
        if context is not None:
            self._wire.secure(context, self._login.timeout)
        elif info.get("tls_required"):
            raise NatsRefused("it wants TLS; set tls: true")
        self.max_payload = info.get("max_payload", self.max_payload)
        if not info.get("headers"):
            raise NatsRefused("it takes no headers; JetStream needs NATS 2.2 or newer")
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
            **self._login.credentials(info.get("nonce", "")),
        }
        options = msgspec.json.encode(connect)
        self.send(b"CONNECT %b\r\nSUB %b* 1\r\nPING\r\n" % (options, self.inbox))
        self._line(b"PONG")

    def send(self, data: bytes) -> None:
        """Send messages; frames that come meanwhile are kept for `next`."""
        self._wire.send(data, self._receive, self._login.timeout)

    def next(self, timeout: float) -> NatsFrame:
        """The next frame of the server, or ReplyTimeout."""
        deadline = time.monotonic() + timeout
        while True:
            while not self._frames:
                self._receive(self._wire.receive(deadline - time.monotonic()))
            frame = self._frames.popleft()
            if not (isinstance(frame, NatsLine) and self._handled(frame)):
                return frame

    def request(self, subject: str, content: Any) -> dict[str, Any] | None:
        """JetStream's reply to a request; None: there is no responder, or no permission."""
        self._requests += 1
        inbox = self.inbox + b"request-%d" % self._requests
        self.send(request(subject.encode(), inbox, msgspec.json.encode(content)))
        while True:
            frame = self.next(self._login.timeout)
            if isinstance(frame, NatsLine) and denied(frame):
                return None
            if isinstance(frame, NatsMessage) and frame.subject == inbox:
                return None if frame.status else _decoded(frame.data)

    def alive(self) -> bool:
        """Whether the connection is still open."""
        try:
            if data := self._wire.available():
                self._receive(data)
            while self._frames:
                self.next(0)
        except ReplyTimeout:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self._wire.close()

    def _receive(self, data: bytes) -> None:
        try:
            self._frames.extend(self._reader.feed(data))
        except (ValueError, IndexError) as error:
            raise NatsRefused(_NO_NATS) from error

    def _line(self, name: bytes) -> NatsLine:
        while True:
            frame = self.next(self._login.timeout)
            if isinstance(frame, NatsLine) and frame.name == name:
                return frame

    def _handled(self, line: NatsLine) -> bool:
        """Whether the line is about the connection itself; an error of the server is raised."""
        if line.name == b"PING":
            self.send(b"PONG\r\n")
            return True
        if line.name == b"-ERR" and not denied(line):
            text = line.rest.decode(errors="replace").strip("'")
            raise NatsRefused(self._login.without_secrets(text))
        return False


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise NatsRefused(_NO_NATS) from error


def denied(line: NatsLine) -> bool:
    """Whether the server says that we may not publish to a subject."""
    return line.name == b"-ERR" and b"permissions violation" in line.rest.lower()


def opened(login: NatsLogin) -> NatsSession:
    """A session with the first server that lets us log in, or SinkUnavailable."""
    context = login.sink.context()

    def greet(wire: Wire) -> NatsSession:
        session = NatsSession(login, wire)
        session.log_in(context)
        return session

    return first_that_answers("NATS", login.sink.hosts(PORT), login.timeout, greet)
