"""What a server tells a reader, and how far that brings it; no input or output here."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ChangesTrimmed, FeedReplaced, ServerError

logger = logging.getLogger("headrace.client")

PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each attempt to reconnect; the last one repeats
SEEN = 10_000  # ids that are remembered, and always all that a new connection may repeat


class Event(NamedTuple):
    """One event, in the format that was asked for."""

    id: str  # "": the format has none
    sequence: int  # with this event, everything up to here was told: resume after it, or ack it
    data: Any  # the decoded JSON; over gRPC the CDCEvent
    raw: bytes = b""  # the JSON itself, with every digit; not over gRPC


class Gap(NamedTuple):
    """Sequences, both ends included, that this reader does not get: mostly they were trimmed."""

    first: int
    last: int
    in_log: bool = False  # a WebSocket holds less than the log: over sse they can still be read


class Opened(NamedTuple):
    """A connection stands."""

    epoch: str  # of the log: a sequence means nothing in another one


class Scanned(NamedTuple):
    """Nothing else was wanted up to a sequence."""

    sequence: int


Told = Event | Gap | Opened | Scanned


class Progress:
    """How far a reader is, over all its connections."""

    def __init__(self, after: int, on_gap: Callable[[Gap], None] | None) -> None:
        self.after = after
        self.begun = after > 0  # whether it has a place to go on from
        self.last_id = ""
        self._on_gap = on_gap
        self._epoch = ""
        self._attempts = 0
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._beyond = 0  # events since there is this place to go on from: they may come again

    def take(self, told: Told) -> Event | None:
        """Note what was told; an event that is new comes back."""
        match told:
            case Opened(epoch):
                self._expect_same(epoch)
                if self._attempts:
                    logger.info("connected again after %d attempts", self._attempts)
                self._attempts = 0
                self.begun = True
            case Gap():
                self._tell(told)
                self._reach(told.last)
            case Scanned(sequence):
                self._reach(sequence)
            case Event():
                self._reach(told.sequence)
                self._beyond += 1
                self.last_id = told.id
                return told if self._is_new(told.id) else None
        return None

    def begin(self, after: int) -> None:
        """Go on from where a cursor stands."""
        self.after, self.begun = after, True

    def pause(self, error: ServerError) -> float:
        """Seconds to wait before the next attempt; an error that would come again is raised."""
        if not error.retry:
            raise error
        if not self._attempts:  # once for all attempts until one connects
            logger.warning("%s; this is tried again until it works", error)
        seconds = PAUSES[min(self._attempts, len(PAUSES) - 1)]
        self._attempts += 1
        return max(seconds, error.after)

    def _reach(self, sequence: int) -> None:
        if sequence > self.after:
            self.after, self._beyond = sequence, 0

    def _is_new(self, id: str) -> bool:
        if not id:
            return True
        if id in self._seen:
            return False
        self._seen[id] = None
        while len(self._seen) > max(SEEN, self._beyond):
            self._seen.popitem(last=False)
        return True

    def _tell(self, gap: Gap) -> None:
        if self._on_gap is None and gap.in_log:
            raise ChangesTrimmed(
                f"changes {gap.first}-{gap.last} are no longer held for a WebSocket",
                hint=f"The log still has them: read on over sse, with after={gap.first - 1}.",
                first=gap.first,
                last=gap.last,
            )
        if self._on_gap is None:
            raise ChangesTrimmed(
                f"changes {gap.first}-{gap.last} were trimmed before they were read",
                first=gap.first,
                last=gap.last,
            )
        self._on_gap(gap)

    def _expect_same(self, epoch: str) -> None:
        if self._epoch and epoch != self._epoch:
            raise FeedReplaced(f"the log is another one, {epoch}, and was {self._epoch}")
        self._epoch = epoch
