"""A window of events whose answers come one by one, in any order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from . import ACCEPTED, UNSENT, Answer, Event, Verdict

_UNANSWERED = Verdict(Answer.FAILED, "no answer came")


class Window:
    """What became of the events of one call; one without an answer of its own is not accepted."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.accepted = 0
        self.failed: dict[int, Verdict] = {}  # by the event's place
        self.held: set[str] = set()  # rows of which an event failed
        self.otherwise = _UNANSWERED  # of events that nothing is known about
        self._taken = bytearray(len(events))

    def accept(self, at: int) -> None:
        """The destination has said that it has an event."""
        self._taken[at] = 1
        self.accepted += 1

    def fail(self, at: int, verdict: Verdict) -> None:
        """An event is not accepted, nor are those of its row that follow."""
        self.failed.setdefault(at, verdict)
        self.held.add(self.events[at].row)

    def verdicts(self) -> list[Verdict]:
        """One for each event; what follows one that failed comes again, wherever it was."""
        if not self.failed and 0 not in self._taken:
            return [ACCEPTED] * len(self.events)
        found: list[Verdict] = []
        held: set[str] = set()
        for at, event in enumerate(self.events):
            verdict = UNSENT if event.row in held else self._verdict(at)
            if verdict is not ACCEPTED:
                held.add(event.row)
            found.append(verdict)
        return found

    def _verdict(self, at: int) -> Verdict:
        return self.failed.get(at) or (ACCEPTED if self._taken[at] else self.otherwise)


def waves(events: Sequence[Event], places: Iterable[int]) -> list[list[int]]:
    """Places of events, so divided that each part has at most one event of a row, in order."""
    found: list[list[int]] = []
    seen: dict[str, int] = defaultdict(int)
    for at in places:
        row = events[at].row
        number = seen[row]
        seen[row] += 1
        if number == len(found):
            found.append([])
        found[number].append(at)
    return found
