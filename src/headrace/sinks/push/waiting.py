"""Rows waiting behind a failed event, or whose next event is not to be sent yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .contract import Event

MOST_EVENTS = 10_000  # in memory, before nothing further is read
MOST_BYTES = 32_000_000


class Pending(NamedTuple):
    """An event that was read and not settled; the ledger has it as a list."""

    sequence: int
    at: int
    attempts: int
    moved: bool = False  # whether others were accepted since its first attempt
    due: float = 0.0  # by the wall clock: not to be tried before
    failed: float = 0.0  # by the wall clock: when its first attempt failed
    handed: bool = False  # whether it was sent, and it is not known whether it was accepted


@dataclass(slots=True)
class WaitingRow:
    """A row that waits for its first event."""

    events: deque[Event] = field(default_factory=deque)
    due: float = 0.0
    attempts: int = 0  # at the first one
    accepted: int = -1  # how many others were accepted when it first failed; -1: it has not
    moved: bool = False  # whether others were accepted since, as far as was checked
    failed: float = 0.0  # by the wall clock: when its first attempt failed
    reason: str = ""

    def moved_on(self, accepted: int) -> bool:
        """Whether others were accepted since the first event first failed."""
        if not self.moved and 0 <= self.accepted < accepted:
            # However often it was tried while nothing was accepted: it was not the event's fault.
            self.attempts, self.moved = min(self.attempts, 1), True
        return self.moved

    def restore(self, known: Pending, ahead: float) -> None:
        """Take over the recorded state of the first event; `ahead`: wall clock minus clock."""
        self.attempts, self.moved, self.failed = known.attempts, known.moved, known.failed
        self.due = known.due - ahead if known.due else 0.0

    def pending(
        self, handed: Container[tuple[int, int]], now: float, ahead: float
    ) -> list[Pending]:
        """The events as the ledger records them; `handed`: those that were sent."""
        places = [(event.sequence, event.at) for event in self.events]
        head, *rest = [Pending(*place, 0, handed=place in handed) for place in places]
        due = self.due + ahead if self.due > now else 0.0
        return [
            head._replace(attempts=self.attempts, moved=self.moved, due=due, failed=self.failed),
            *rest,
        ]


@dataclass(slots=True)
class WaitingRows:
    """The waiting rows, each with an event or more."""

    rows: dict[str, WaitingRow] = field(default_factory=dict)
    events: int = 0
    bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows)

    def room(self) -> bool:
        """Whether there is room for another event."""
        return self.events < MOST_EVENTS and self.bytes < MOST_BYTES

    def due(self, now: float) -> list[WaitingRow]:
        """Rows whose time has come, the longest due first."""
        return sorted((row for row in self.rows.values() if row.due <= now), key=_by_due)

    def row(self, name: str) -> WaitingRow:
        """A row, which waits from now on."""
        return self.rows.setdefault(name, WaitingRow())

    def add(self, event: Event) -> None:
        """Put an event behind those of its row."""
        self.rows[event.row].events.append(event)
        self.events += 1
        self.bytes += len(event.payload or b"")

    def take(self, row: WaitingRow) -> Event:
        """Take the first event of a row; the row goes on waiting."""
        event = row.events.popleft()
        self.events -= 1
        self.bytes -= len(event.payload or b"")
        return event

    def put_back(self, row: WaitingRow, events: Sequence[Event]) -> None:
        """Put events before those of their row."""
        row.events.extendleft(reversed(events))
        self.events += len(events)
        self.bytes += sum(len(event.payload or b"") for event in events)

    def release(self, names: Iterable[str]) -> None:
        """Rows whose events so far were accepted: what follows may be sent at once."""
        for name in names:
            row = self.rows.get(name)
            if row is not None:
                if row.events:
                    self.rows[name] = WaitingRow(row.events)
                else:
                    del self.rows[name]

    def drop(self, name: str) -> Sequence[Event]:
        """Remove a row; returns its events."""
        events = self.rows.pop(name).events
        self.events -= len(events)
        self.bytes -= sum(len(event.payload or b"") for event in events)
        return events


def _by_due(row: WaitingRow) -> float:
    return row.due
