"""A connection to RabbitMQ that is logged in, with one AMQP channel that confirms messages."""

from __future__ import annotations

import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from pamqp import commands
from pamqp.exceptions import PAMQPException

from ..push import BrokerSettings
from ..push.wire import Host, ReplyTimeout, Wire, first_that_answers
from .frames import GREETING, AmqpFrame, AmqpMethod, AmqpReader, method

PORT, TLS_PORT = 5672, 5671

_FRAME = 131_072
_CAPABILITIES: Any = {
    "authentication_failure_close": True,  # it reports a wrong password
    "basic.nack": True,
    "connection.blocked": True,
    "publisher_confirms": True,
}


@dataclass(frozen=True, slots=True)
class AmqpLogin:
    """The address and the login."""

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
    """The server has closed the connection, with a reason."""


class AmqpSession:
    """One connection."""

    def __init__(self, login: AmqpLogin, wire: Wire) -> None:
        self.frame_max = _FRAME
        self.blocked = ""  # why the server takes nothing for now
        self.published = 0  # the tag of the last message
        self._login = login
        self._wire = wire
        self._reader = AmqpReader()
        self._frames: deque[AmqpFrame] = deque()
        self._log_in()
        self.reopen()

    @property
    def host(self) -> Host:
        """Where the server is."""
        return self._wire.host

    def reopen(self) -> None:
        """A new AMQP channel; tags of messages begin at 1."""
        self._frames.clear()
        self.published = 0
        try:
            self.call(commands.Channel.Open(), commands.Channel.OpenOk)
            self.call(commands.Confirm.Select(), commands.Confirm.SelectOk)
        except ChannelClosed as error:
            raise ConnectionClosed(error.text) from error

    def publish(self, messages: list[bytes]) -> None:
        """Send messages; frames that come meanwhile are kept for `next`."""
        self.published += len(messages)
        self._send(b"".join(messages))

    def _send(self, data: bytes) -> None:
        self._wire.send(data, self._receive, self._login.timeout)

    def next(self, timeout: float) -> AmqpFrame:
        """The next frame of the server, or ReplyTimeout."""
        deadline = time.monotonic() + timeout
        while not self._frames:
            self._receive(self._wire.receive(deadline - time.monotonic()))
        frame = self._frames.popleft()
        if isinstance(frame, AmqpMethod):
            self._check(frame.command)
        return frame

    def alive(self) -> bool:
        """Whether the connection is still open."""
        try:
            if data := self._wire.available():
                self._receive(data)
            while self._frames:
                self.next(0)
        except ReplyTimeout:
            return True
        except (OSError, ChannelClosed):
            return False
        return True

    def call(self, command: Any, reply: type[Any], channel: int | None = None) -> Any:
        """Send a command and wait for its reply."""
        at = 1 if channel is None else channel
        self._send(method(command, at))
        while True:
            frame = self.next(self._login.timeout)
            if isinstance(frame, AmqpMethod) and isinstance(frame.command, reply):
                return frame.command

    def close(self) -> None:
        """Close the connection."""
        self._wire.close()

    def _receive(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                # Handled at once: a server that is low on memory sends it and then reads no more.
                if not (isinstance(frame, AmqpMethod) and self._is_blocking(frame.command)):
                    self._frames.append(frame)
        except (PAMQPException, ValueError, LookupError, struct.error) as error:
            raise ConnectionAbortedError("it does not speak AMQP 0-9-1") from error

    def _is_blocking(self, command: Any) -> bool:
        """Whether the command blocks or unblocks publishing."""
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
        while not isinstance(self.next(self._login.timeout), AmqpMethod):
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
        tune = self.call(start, commands.Connection.Tune, channel=0)
        self.frame_max = min(tune.frame_max or _FRAME, _FRAME)
        # No heartbeats: nobody is there to send them between two batches.
        tuned = commands.Connection.TuneOk(tune.channel_max, self.frame_max, 0)
        self._send(method(tuned, 0))
        opened = commands.Connection.Open(virtual_host=self._login.virtual_host)
        self.call(opened, commands.Connection.OpenOk, channel=0)


def opened(login: AmqpLogin) -> AmqpSession:
    """A session with the first server that lets us log in, or SinkUnavailable."""
    sink = login.sink
    context = sink.context()

    def greet(wire: Wire) -> AmqpSession:
        if context is not None:
            wire.secure(context, login.timeout)
        return AmqpSession(login, wire)

    hosts = sink.hosts(TLS_PORT if sink.tls else PORT)
    return first_that_answers("RabbitMQ", hosts, login.timeout, greet)
