"""The WebSocket protocol from the client's side."""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from ..errors import ServerAbsent, ServerBusy, ServerError
from ..secret import Secret
from ._address import CONNECT_SECONDS
from ._told import Event, Gap, Opened, Progress, Scanned, Told

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


class Said(NamedTuple):
    """What a message tells, and what to answer."""

    told: Sequence[Told] = ()
    answer: str = ""


class Conversation:
    """Which message follows which; no input or output here."""

    def __init__(self, key: Secret | None, tables: Sequence[str], progress: Progress) -> None:
        self._key = key or _ANY
        self._subscribe: dict[str, Any] = {"type": "subscribe", "tables": list(tables)}
        if progress.begun:
            last = {"lastEventId": progress.last_id} if progress.last_id else {}
            self._subscribe["resume"] = {"lastSequence": progress.after, **last}
        self._sequence = progress.after

    def opening(self) -> str:
        """The first message."""
        return json.dumps({"type": "auth", "apiKey": self._key.reveal()})

    def take(self, text: str | bytes) -> Said:
        """What the server says; ServerError when it refuses."""
        message = msgspec.json.decode(text)
        match message["type"]:
            case "cdc_event":
                raw = text.encode() if isinstance(text, str) else text
                event = Event(message["eventId"], self._sequence, json.loads(raw), raw)
                return Said([event])
            case "ping":
                answer = {"type": "pong", "timestamp": message["timestamp"]}
                return Said(answer=json.dumps(answer))
            case "auth_success":
                return Said(answer=json.dumps(self._subscribe))
            case "subscription_confirmed":
                return Said([Opened(message["epoch"]), self._reached(message["sequence"])])
            case "connection_status" if "sequence" in message:
                return Said([self._reached(message["sequence"])])
            case "error" | "auth_failure" | "subscription_rejected":
                return self._refused(message)
        return Said()  # of a later version: clients pass over what they do not know

    def _reached(self, sequence: int) -> Scanned:
        self._sequence = max(self._sequence, sequence)
        return Scanned(sequence)

    def _refused(self, message: dict[str, Any]) -> Said:
        details = message.get("details") or {}
        if gap := details.get("gap"):
            in_log = details.get("logFirstSequence", gap["last"] + 1) <= gap.get("first", 1)
            return Said([Gap(gap.get("first", 1), gap["last"], in_log)])
        kind = ServerBusy if message["error"] in _PASSING else ServerError
        raise kind(f"the server answers {message['error']}: {message['message']}")


def talked(url: str, conversation: Conversation) -> Generator[Told, None, None]:
    """What the server tells, until it goes away."""
    with _lost(url), connect(_address(url), **_OPTIONS) as socket:
        socket.send(conversation.opening())
        while True:
            said = conversation.take(socket.recv(SILENT_SECONDS))
            if said.answer:
                socket.send(said.answer)
            yield from said.told


async def talked_async(url: str, conversation: Conversation) -> AsyncGenerator[Told, None]:
    """The same on an event loop."""
    with _lost(url):
        async with connect_async(_address(url), **_OPTIONS) as socket:
            await socket.send(conversation.opening())
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    text = await socket.recv()
                said = conversation.take(text)
                if said.answer:
                    await socket.send(said.answer)
                for told in said.told:
                    yield told


def _address(url: str) -> str:
    return f"ws{url.removeprefix('http').rstrip('/')}/v1/stream"


@contextmanager
def _lost(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, WebSocketException) as error:  # a TimeoutError is an OSError
        raise ServerAbsent(f"the server at {url} does not answer, or went away") from error
