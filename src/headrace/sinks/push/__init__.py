"""Changes pushed to another system: what all push sinks share. A destination is one file beside it.

    a batch ─▶ events ─▶ by row ─▶ windows ─▶ verdicts ─▶ ledger, dead letters

`settings` is what a destination derives from. `events` renders changes in the sink's format and
`delivery` sends them, both in Spark's `tasks`, through `channels` that stay open; `writer` goes on
until every event is settled, `ledger` notes what was, `deadletters` keeps what the other side
refused, `redrive` sends that again, `disabled` notes that it wants nothing more: on the driver.

Events of one row are sent in the log's order, and an event is settled when the destination has
accepted it or the dead letters have it. What is not known to be settled is sent again, with the
same id.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class Event(NamedTuple):
    """One message, with what its address and headers are made of."""

    sequence: int  # of the change that it stands for
    at: int  # its place among the events of that change
    id: str  # evt_…, the same whenever it is sent
    row: str  # whose it is; events of one row keep their order
    op: str
    source: str
    schema: str
    table: str
    key: str | None  # JSON, the primary key's columns
    commit_time: int  # microseconds since 1970
    payload: bytes | None  # None: a tombstone


class Answer(Enum):
    """What became of an event that was handed to a destination."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # it will never be taken
    FAILED = "failed"  # the destination failed at it, or did not say; it may take it later
    UNREACHABLE = "unreachable"  # the destination is not there
    UNSENT = "unsent"  # an earlier event of its row was not accepted, or there was no time for it


class Verdict(NamedTuple):
    """An answer, and why; no secret and no row value in the reason."""

    answer: Answer
    reason: str = ""
    after: float = 0.0  # seconds after which the destination wants to be asked again
    repeats: int = 0  # how often the channel handed it over anew, not knowing if it was taken


ACCEPTED = Verdict(Answer.ACCEPTED)
UNSENT = Verdict(Answer.UNSENT)


class Channel(Protocol):
    """A destination, open in one of Spark's Python processes; one call at a time."""

    def send(self, events: Sequence[Event]) -> Sequence[Verdict]:
        """Hand over some events, in order; returns a verdict for each, in the same order.

        Events of one row reach the destination in this order. When one of them is not accepted,
        those of its row that follow are better not sent; whether they were or not, they come again.
        REFUSED is said of an event that was refused alone: several that are refused as one are
        FAILED, and come again in ever smaller windows, in the end alone. After UNREACHABLE, or
        SinkUnavailable, the channel is closed, and another is opened for the next try.
        What concerns the destination as a whole and needs a person is raised as SinkRefused.
        """
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Destination(Protocol):
    """What a push sink is to the common part: a frozen value that tasks get a copy of."""

    def connect(self) -> Channel:
        """Open the destination, or raise SinkUnavailable; called in a task's process."""
        ...
