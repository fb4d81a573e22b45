"""The contract between delivery and a destination: events in, one reply for each event out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class Event(NamedTuple):
    """One message, with what its address and headers are made of."""

    sequence: int  # of the change that it stands for
    at: int  # its place among the events of that change
    id: str  # evt_…, the same whenever it is sent
    row: str  # source|schema.table:key; events of one row keep their order
    op: str
    source: str
    schema: str
    table: str
    key: str | None  # JSON, the primary key's columns
    commit_time: int  # microseconds since 1970
    payload: bytes | None  # None: a tombstone


class DeliveryOutcome(Enum):
    """What became of an event that was handed to a destination."""

    ACCEPTED = "accepted"  # the destination has confirmed that it stored the event
    REFUSED = "refused"  # it will never be accepted
    FAILED = "failed"  # the destination failed or sent no reply; it may accept the event later
    UNREACHABLE = "unreachable"  # the destination is away; that is not counted as an attempt
    UNSENT = "unsent"  # an earlier event of its row was not accepted, or there was no time for it


class Reply(NamedTuple):
    """The outcome for one event, and why; no secret and no row value in the reason."""

    outcome: DeliveryOutcome
    reason: str = ""
    retry_after: float = 0.0  # seconds for which the destination wants no request
    repeats: int = 0  # how often the channel sent it again, not knowing if it was accepted


ACCEPTED = Reply(DeliveryOutcome.ACCEPTED)
UNSENT = Reply(DeliveryOutcome.UNSENT)


class Channel(Protocol):
    """A destination, open in one of Spark's Python processes; one call at a time."""

    def send(self, events: Sequence[Event]) -> Sequence[Reply]:
        """Hand over a window of events, in order; returns a reply for each, in the same order.

        ACCEPTED is returned only after the destination has confirmed the event.

        Events of one row reach the destination in this order. When one of them is not accepted,
        the later ones of its row should not be sent; sent or not, they are handed over again.

        REFUSED is for an event that the destination refused by itself. Events that it refuses as a
        group are FAILED: they are handed over again in smaller windows, in the end one by one.

        After UNREACHABLE or SinkUnavailable the channel is closed, and the next attempt opens
        another. SinkRefused is raised for what concerns the destination as a whole and needs a
        person; the sink then halts.
        """
        ...

    def close(self) -> None:
        """Release the connection; may be called twice."""
        ...


class PushDestination(Protocol):
    """Opens channels: a frozen value that is pickled to Spark's tasks."""

    def connect(self) -> Channel:
        """Open a channel, or raise SinkUnavailable; called in a task's process."""
        ...
