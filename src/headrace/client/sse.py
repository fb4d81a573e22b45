"""Server-sent events, decoded piece by piece; no input or output here."""

import json
from typing import NamedTuple

import msgspec

from .messages import MissedChanges, ReceivedEvent, Scanned, StreamMessage


class _Identified(msgspec.Struct):
    """The id of an event, by the name that its format has for it."""

    id: str = ""
    event_id: str = ""
    eventId: str = ""  # noqa: N815 - the protocol's own name


_identified = msgspec.json.Decoder(_Identified).decode


class SseFrame(NamedTuple):
    """What stands between two empty lines of a stream."""

    id: int  # the last one that the stream gave
    event: bytes
    data: bytes


class SseDecoder:
    """Cuts a stream that begins after a sequence into frames."""

    def __init__(self, after: int) -> None:
        self._id = after
        self._event = b""
        self._data = b""
        self._rest: list[bytes] = []  # of a line; a long one comes in many pieces

    def feed(self, piece: bytes) -> list[SseFrame]:
        """The frames that a piece completes; what breaks off within one never was one."""
        self._rest.append(piece)
        if b"\n" not in piece:
            return []
        *lines, rest = b"".join(self._rest).split(b"\n")
        self._rest = [rest]
        return [frame for line in lines if (frame := self._take(line.removesuffix(b"\r")))]

    def _take(self, line: bytes) -> SseFrame | None:
        name, _, value = line.partition(b": ")
        match name:
            case b"":
                frame = SseFrame(self._id, self._event, self._data)
                self._event, self._data = b"", b""
                return frame
            case b"id":
                self._id = int(value)
            case b"event":
                self._event = value
            case b"data":
                self._data = value
        return None


def message_of(frame: SseFrame) -> StreamMessage:
    """What a frame of a stream of changes means."""
    if frame.event == b"gap":
        return gap_of(frame)
    return decoded(frame.data, frame.id) if frame.data else Scanned(frame.id)


def gap_of(frame: SseFrame) -> MissedChanges:
    """The sequences that a stream says are missing."""
    lost = json.loads(frame.data)
    return MissedChanges(lost["first"], lost["last"])


def decoded(data: bytes, sequence: int) -> ReceivedEvent:
    """An event from its JSON."""
    try:
        found = _identified(data)
        id = found.id or found.event_id or found.eventId
    except msgspec.ValidationError:  # an `id` that is no text is none of ours
        id = ""
    return ReceivedEvent(id, sequence, json.loads(data), data)
