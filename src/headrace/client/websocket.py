"""The WebSocket protocol from the client's side."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from ..errors import ServerAbsent, ServerBusy, ServerError
from ..secret import Secret
from .messages import MissedChanges, Opened, ReaderProgress, ReceivedEvent, Scanned, StreamMessage
from .transport import CONNECT_SECONDS

SILENT_SECONDS = 75.0  # the server pings every 30

# A server on this machine that has no keys takes any that looks like one.
_ANY = Secret("cdc_" + "0" * 64)
_OPTIONS: dict[str, Any] = {
    "open_timeout": CONNECT_SECONDS,
    "close_timeout": 1.0,
    "ping_interval": None,  # the protocol has pings of its own
    "max_size": None,  # a row may have any size
    "compression": None,
    "proxy": None,
}
_PASSING = {"service_degraded", "rate_limited", "server_error", "internal_error"}


class _Turn(NamedTuple):
    """What a message of the server brings, and what to reply."""

    messages: Sequence[StreamMessage] = ()
    reply: str = ""


class Conversation:
    """Which message follows which; no input or output here."""

    def __init__(self, key: Secret | None, tables: Sequence[str], progress: ReaderProgress) -> None:
        self._key = key or _ANY
        self._subscribe: dict[str, Any] = {"type": "subscribe", "tables": list(tables)}
        if progress.begun:
            last = {"lastEventId": progress.last_id} if progress.last_id else {}
            self._subscribe["resume"] = {"lastSequence": progress.after, **last, **progress.place}
        self._sequence = progress.after

    def opening(self) -> str:
        """The first message."""
        return json.dumps({"type": "auth", "apiKey": self._key.reveal()})

    def take(self, text: str | bytes) -> _Turn:
        """What a message of the server means; ServerError when it refuses."""
        message = msgspec.json.decode(text)
        match message["type"]:
            case "cdc_event":
                raw = text.encode() if isinstance(text, str) else text
                event = ReceivedEvent(message["eventId"], self._sequence, json.loads(raw), raw)
                return _Turn([event])
            case "ping":
                reply = {"type": "pong", "timestamp": message["timestamp"]}
                return _Turn(reply=json.dumps(reply))
            case "auth_success":
                return _Turn(reply=json.dumps(self._subscribe))
            case "subscription_confirmed":
                opened = Opened(message["epoch"], message.get("generation", ""))
                return _Turn([opened, self._reached(message["sequence"])])
            case "connection_status" if "sequence" in message:
                return _Turn([self._reached(message["sequence"])])
            case "error" | "auth_failure" | "subscription_rejected":
                return self._refused(message)
        return _Turn()  # of a later version: clients pass over what they do not know

    def _reached(self, sequence: int) -> Scanned:
        self._sequence = max(self._sequence, sequence)
        return Scanned(sequence)

    def _refused(self, message: dict[str, Any]) -> _Turn:
        details = message.get("details") or {}
        if gap := details.get("gap"):
            in_log = details.get("logFirstSequence", gap["last"] + 1) <= gap.get("first", 1)
            return _Turn([MissedChanges(gap.get("first", 1), gap["last"], in_log)])
        kind = ServerBusy if message["error"] in _PASSING else ServerError
        raise kind(f"the server answers {message['error']}: {message['message']}")


def subscribe(
    url: str, conversation: Conversation, tls: ssl.SSLContext
) -> Generator[StreamMessage, None, None]:
    """What the server sends, until it goes away."""
    with _lost(url), connect(_address(url), **_options(url, tls)) as socket:
        socket.send(conversation.opening())
        while True:
            turn = conversation.take(socket.recv(SILENT_SECONDS))
            if turn.reply:
                socket.send(turn.reply)
            yield from turn.messages


async def subscribe_async(
    url: str, conversation: Conversation, tls: ssl.SSLContext
) -> AsyncGenerator[StreamMessage, None]:
    """The same on an event loop."""
    with _lost(url):
        async with connect_async(_address(url), **_options(url, tls)) as socket:
            await socket.send(conversation.opening())
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    text = await socket.recv()
                turn = conversation.take(text)
                if turn.reply:
                    await socket.send(turn.reply)
                for message in turn.messages:
                    yield message


def _options(url: str, tls: ssl.SSLContext) -> dict[str, Any]:
    return _OPTIONS | ({"ssl": tls} if url.startswith("https:") else {})


def _address(url: str) -> str:
    return f"ws{url.removeprefix('http').rstrip('/')}/v1/stream"


@contextmanager
def _lost(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, WebSocketException) as error:  # a TimeoutError is an OSError
        raise ServerAbsent(f"the server at {url} does not answer, or went away") from error
