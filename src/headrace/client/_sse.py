"""Server-sent events, line by line; no input or output here."""

import json

import msgspec

from ._told import Event, Gap, Scanned, Told


class _Identified(msgspec.Struct):
    """The id of an event, by the name that its format has for it."""

    id: str = ""
    event_id: str = ""
    eventId: str = ""  # noqa: N815 - the protocol's own name


_identified = msgspec.json.Decoder(_Identified).decode


class Lines:
    """The lines of a stream that begins after a sequence."""

    def __init__(self, after: int) -> None:
        self._id = after
        self._told = after  # the sequence that was told last
        self._name = b""
        self._data = b""

    def take(self, line: bytes) -> Told | None:
        """What a line completes, if anything."""
        name, _, value = line.partition(b": ")
        match name:
            case b"":
                return self._completed()
            case b"id":
                self._id = int(value)
            case b"event":
                self._name = value
            case b"data":
                self._data = value
        return None

    def _completed(self) -> Told | None:
        name, data, before = self._name, self._data, self._told
        self._name, self._data, self._told = b"", b"", self._id
        if name == b"gap":
            lost = json.loads(data)
            return Gap(lost["first"], lost["last"])
        if data:
            return decoded(data, self._id)
        return Scanned(self._id) if self._id > before else None


def decoded(data: bytes, sequence: int) -> Event:
    """An event from its JSON."""
    try:
        found = _identified(data)
        id = found.id or found.event_id or found.eventId
    except msgspec.ValidationError:  # an `id` that is no text is none of ours
        id = ""
    return Event(id, sequence, json.loads(data), data)
