"""AMQP 0-9-1 without a connection: messages to bytes, and the server's bytes to frames.

What comes for every message is written and read here; all else is pamqp's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from pamqp import commands, header
from pamqp.frame import marshal, unmarshal

GREETING = b"AMQP\x00\x00\x09\x01"
CHANNEL = 1

_METHOD, _HEADER, _BODY, _HEARTBEAT = 1, 2, 3, 8
_END = b"\xce"
_AROUND = 8  # bytes of a frame beside what it holds
_START = struct.Struct(">BHI")
_CONTENT = struct.Struct(">HHQH")  # class, weight, size, which properties follow
_BASIC = 60
_CONFIRM = struct.Struct(">HHQB")
_ACK, _NACK = 80, 120
# content_type, headers, delivery_mode, message_id, timestamp: the order in which they follow
_PROPERTIES = 1 << 15 | 1 << 13 | 1 << 12 | 1 << 7 | 1 << 6
_PERSISTENT = b"\x02"


class PublishConfirm(NamedTuple):
    """The server confirms a message, or all up to it; or it does not accept them."""

    tag: int
    multiple: bool
    accepted: bool


class ReturnedMessage(NamedTuple):
    """A message that no queue takes."""

    message_id: str
    reason: str


class AmqpMethod(NamedTuple):
    """Any other method that the server sends."""

    command: Any  # one of pamqp's classes


AmqpFrame = PublishConfirm | ReturnedMessage | AmqpMethod


def method(command: Any, channel: int = CHANNEL) -> bytes:
    """A command as bytes."""
    written: bytes = marshal(command, channel)
    return written


class MessageEnvelope:
    """What the messages with one address, table and operation have in common."""

    def __init__(self, exchange: str, key: str, headers: dict[str, str], content_type: str) -> None:
        publish = commands.Basic.Publish(exchange=exchange, routing_key=key, mandatory=True)
        self._before = method(publish)
        table = b"".join(_field(name, value.encode()) for name, value in headers.items())
        self._same = _short(content_type) + len(table).to_bytes(4, "big") + table + _PERSISTENT

    def message(self, identity: str, seconds: int, body: bytes, frame_max: int) -> bytes:
        """A persistent message."""
        known = identity.encode()
        buffered = (
            _CONTENT.pack(_BASIC, 0, len(body), _PROPERTIES)
            + self._same
            + len(known).to_bytes(1, "big")
            + known
            + seconds.to_bytes(8, "big", signed=True)
        )
        begun = self._before + _START.pack(_HEADER, CHANNEL, len(buffered)) + buffered + _END
        if len(body) <= frame_max - _AROUND:
            if not body:
                return begun
            return begun + _START.pack(_BODY, CHANNEL, len(body)) + body + _END
        return begun + b"".join(_pieces(body, frame_max - _AROUND))


def _pieces(body: bytes, most: int) -> Iterator[bytes]:
    for begin in range(0, len(body), most):
        piece = body[begin : begin + most]
        yield _START.pack(_BODY, CHANNEL, len(piece)) + piece + _END


def _short(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(1, "big") + data


def _field(name: str, value: bytes) -> bytes:
    return _short(name) + b"S" + len(value).to_bytes(4, "big") + value


class AmqpReader:
    """Splits the bytes of the server into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._returning: commands.Basic.Return | None = None
        self._identity = ""
        self._left = 0  # bytes of a returned message that are still to come

    def feed(self, data: bytes) -> Iterator[AmqpFrame]:
        """The frames that these further bytes complete."""
        buffered = self._bytes
        buffered += data
        at, size = 0, len(buffered)
        try:
            while size - at >= _AROUND:
                kind, _, length = _START.unpack_from(buffered, at)
                end = at + length + _AROUND
                if end > size:
                    break
                if buffered[end - 1] != _END[0]:
                    raise ConnectionAbortedError("it does not speak AMQP 0-9-1")
                begin, at = at, end
                yield from self._frame(kind, begin, end)
        finally:
            del buffered[:at]

    def _frame(self, kind: int, begin: int, end: int) -> Iterator[AmqpFrame]:
        buffered = self._bytes
        if kind == _METHOD:
            about, number = struct.unpack_from(">HH", buffered, begin + 7)
            if about == _BASIC and number in (_ACK, _NACK):
                _, _, tag, bits = _CONFIRM.unpack_from(buffered, begin + 7)
                yield PublishConfirm(tag, bool(bits & 1), number == _ACK)
                return
        if kind == _HEARTBEAT:
            return
        if kind == _BODY:
            self._left -= end - begin - _AROUND
        else:
            _, _, command = unmarshal(bytes(buffered[begin:end]))
            if isinstance(command, commands.Basic.Return):
                self._returning = command
                return
            if isinstance(command, header.ContentHeader):
                self._left = command.body_size
                self._identity = command.properties.message_id or ""
            else:
                yield AmqpMethod(command)
                return
        if not self._left and self._returning is not None:
            returned, self._returning = self._returning, None
            why = (
                f"no queue takes the routing key {returned.routing_key} "
                f"of the exchange {returned.exchange or '(default)'}"
            )
            if returned.reply_code != 312:
                why = f"returned: {returned.reply_text}"
            yield ReturnedMessage(self._identity, why)
