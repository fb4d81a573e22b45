"""A connection to RabbitMQ that is logged in, with one AMQP channel that confirms messages."""

from __future__ import annotations

import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from pamqp import commands
from pamqp.exceptions import PAMQPException

from ..push.broker import BrokerSettings
from ..push.wire import Host, Silent, Wire, first_that_answers
from .frames import GREETING, Method, Reader, Said, method

PORT, TLS_PORT = 5672, 5671

_FRAME = 131_072
_CAPABILITIES: Any = {
    "authentication_failure_close": True,  # it says what is wrong with a password
    "basic.nack": True,
    "connection.blocked": True,
    "publisher_confirms": True,
}


@dataclass(frozen=True, slots=True)
class Login:
    """Where to, and who we are."""

    sink: BrokerSettings
    virtual_host: str

    @property
    def timeout(self) -> float:
        """Seconds in which the server answers."""
        return self.sink.timeout_seconds


class ChannelClosed(Exception):
    """The server has closed the AMQP channel: something on it was not allowed."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


class ConnectionClosed(ConnectionError):
    """The server has closed the connection, and said why."""


class Session:
    """One connection."""

    def __init__(self, login: Login, wire: Wire) -> None:
        self.frame_max = _FRAME
        self.blocked = ""  # why the server takes nothing for now
        self.published = 0  # the tag of the last message
        self._login = login
        self._wire = wire
        self._reader = Reader()
        self._said: deque[Said] = deque()
        self._log_in()
        self.reopen()

    @property
    def host(self) -> Host:
        """Where the server is."""
        return self._wire.host

    def reopen(self) -> None:
        """A new AMQP channel; tags of messages begin at 1."""
        self._said.clear()
        self.published = 0
        try:
            self.ask(commands.Channel.Open(), commands.Channel.OpenOk)
            self.ask(commands.Confirm.Select(), commands.Confirm.SelectOk)
        except ChannelClosed as error:
            raise ConnectionClosed(error.text) from error

    def publish(self, messages: list[bytes]) -> None:
        """Send messages; what comes meanwhile is kept for `next`."""
        self.published += len(messages)
        self._send(b"".join(messages))

    def _send(self, data: bytes) -> None:
        self._wire.send(data, self._hear, self._login.timeout)

    def next(self, timeout: float) -> Said:
        """What the server says next, or Silent."""
        deadline = time.monotonic() + timeout
        while not self._said:
            self._hear(self._wire.receive(deadline - time.monotonic()))
        said = self._said.popleft()
        if isinstance(said, Method):
            self._check(said.command)
        return said

    def alive(self) -> bool:
        """Whether the server has not hung up since."""
        try:
            if data := self._wire.heard():
                self._hear(data)
            while self._said:
                self.next(0)
        except Silent:
            return True
        except (OSError, ChannelClosed):
            return False
        return True

    def ask(self, command: Any, answer: type[Any], channel: int | None = None) -> Any:
        """Give a command and wait for its answer."""
        at = 1 if channel is None else channel
        self._send(method(command, at))
        while True:
            said = self.next(self._login.timeout)
            if isinstance(said, Method) and isinstance(said.command, answer):
                return said.command

    def close(self) -> None:
        """Let go of it."""
        self._wire.close()

    def _hear(self, data: bytes) -> None:
        try:
            for said in self._reader.feed(data):
                # Heard at once: a server that is low on memory says so and then reads no more.
                if not (isinstance(said, Method) and self._paused(said.command)):
                    self._said.append(said)
        except (PAMQPException, ValueError, LookupError, struct.error) as error:
            raise ConnectionAbortedError("it does not speak AMQP 0-9-1") from error

    def _paused(self, command: Any) -> bool:
        """Whether it was about the server taking nothing for now, or something again."""
        if isinstance(command, commands.Connection.Blocked):
            self.blocked = command.reason or "it is blocked"
        elif isinstance(command, commands.Connection.Unblocked):
            self.blocked = ""
        else:
            return False
        return True

    def _check(self, command: Any) -> None:
        """Raise that the connection or the AMQP channel was closed."""
        if isinstance(command, commands.Connection.Close):
            raise ConnectionClosed(self._login.sink.without_secrets(command.reply_text))
        if isinstance(command, commands.Channel.Close):
            self._send(method(commands.Channel.CloseOk()))
            raise ChannelClosed(
                command.reply_code or 0, self._login.sink.without_secrets(command.reply_text)
            )

    def _log_in(self) -> None:
        self._send(GREETING)
        while not isinstance(self.next(self._login.timeout), Method):
            continue
        sink = self._login.sink
        start = commands.Connection.StartOk(
            client_properties={
                "product": "headrace",
                "connection_name": f"headrace {sink.name}",
                "capabilities": _CAPABILITIES,
            },
            mechanism="PLAIN",
            response=f"\0{sink.username}\0{sink.password.reveal() if sink.password else 'guest'}",
        )
        tune = self.ask(start, commands.Connection.Tune, channel=0)
        self.frame_max = min(tune.frame_max or _FRAME, _FRAME)
        # No heartbeats: nobody is there to send them between two batches.
        tuned = commands.Connection.TuneOk(tune.channel_max, self.frame_max, 0)
        self._send(method(tuned, 0))
        opened = commands.Connection.Open(virtual_host=self._login.virtual_host)
        self.ask(opened, commands.Connection.OpenOk, channel=0)


def opened(login: Login) -> Session:
    """A session with the first server that has us, or SinkUnavailable."""
    sink = login.sink
    context = sink.context()

    def greet(wire: Wire) -> Session:
        if context is not None:
            wire.secure(context, login.timeout)
        return Session(login, wire)

    hosts = sink.hosts(TLS_PORT if sink.tls else PORT)
    return first_that_answers("RabbitMQ", hosts, login.timeout, greet)
