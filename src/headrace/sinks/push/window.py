"""A window of events whose replies come one by one, in any order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from .contract import ACCEPTED, UNSENT, DeliveryOutcome, Event, Reply

_NO_REPLY = Reply(DeliveryOutcome.FAILED, "no answer came")


class ReplyWindow:
    """Collects the replies of one call; an event without one is not accepted."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.accepted = 0
        self.failed: dict[int, Reply] = {}  # by the event's place
        self.failed_rows: set[str] = set()
        self.otherwise = _NO_REPLY  # for events that nothing is known about
        self._confirmed = bytearray(len(events))

    def accept(self, at: int) -> None:
        """The destination has confirmed an event."""
        self._confirmed[at] = 1
        self.accepted += 1

    def fail(self, at: int, reply: Reply) -> None:
        """An event is not accepted, nor are those of its row that follow."""
        self.failed.setdefault(at, reply)
        self.failed_rows.add(self.events[at].row)

    def replies(self) -> list[Reply]:
        """One for each event; those of a row that follow one that failed are UNSENT."""
        if not self.failed and 0 not in self._confirmed:
            return [ACCEPTED] * len(self.events)
        found: list[Reply] = []
        failed_rows: set[str] = set()
        for at, event in enumerate(self.events):
            reply = UNSENT if event.row in failed_rows else self._reply(at)
            if reply is not ACCEPTED:
                failed_rows.add(event.row)
            found.append(reply)
        return found

    def _reply(self, at: int) -> Reply:
        return self.failed.get(at) or (ACCEPTED if self._confirmed[at] else self.otherwise)


def waves(events: Sequence[Event], places: Iterable[int]) -> list[list[int]]:
    """Places of events, so divided that each part has at most one event of a row, in order."""
    found: list[list[int]] = []
    counts: dict[str, int] = defaultdict(int)
    for at in places:
        row = events[at].row
        number = counts[row]
        counts[row] += 1
        if number == len(found):
            found.append([])
        found[number].append(at)
    return found
