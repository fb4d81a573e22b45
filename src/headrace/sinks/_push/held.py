"""Rows that wait, because an event of theirs was not accepted or is not to be sent yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import Event

HELD_EVENTS = 10_000  # in memory, before nothing further is read
HELD_BYTES = 32_000_000


@dataclass(slots=True)
class Row:
    """A row that waits for its first event."""

    events: deque[Event] = field(default_factory=deque)
    due: float = 0.0
    attempts: int = 0  # at the first one
    accepted: int = -1  # how many others had been when it first failed; -1: it has not
    moved: bool = False  # whether others were since, as far as was looked
    failed: float = 0.0  # by the wall clock: when it first did
    reason: str = ""

    def moved_on(self, accepted: int) -> bool:
        """Whether others were accepted since the first event first failed."""
        if not self.moved and 0 <= self.accepted < accepted:
            # However often it was tried while nothing was accepted: it was not the event's fault.
            self.attempts, self.moved = min(self.attempts, 1), True
        return self.moved


@dataclass(slots=True)
class Held:
    """The rows that wait, each with an event or more."""

    rows: dict[str, Row] = field(default_factory=dict)
    events: int = 0
    bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows)

    def room(self) -> bool:
        """Whether there is room for another event."""
        return self.events < HELD_EVENTS and self.bytes < HELD_BYTES

    def due(self, now: float) -> list[Row]:
        """Rows whose time has come, the longest due first."""
        return sorted((row for row in self.rows.values() if row.due <= now), key=_by_due)

    def row(self, name: str) -> Row:
        """A row, held from now on if it was not."""
        return self.rows.setdefault(name, Row())

    def add(self, event: Event) -> None:
        """Put an event behind those of its row."""
        self.rows[event.row].events.append(event)
        self.events += 1
        self.bytes += len(event.payload or b"")

    def take(self, row: Row) -> Event:
        """The first event of a row, which is still held."""
        event = row.events.popleft()
        self.events -= 1
        self.bytes -= len(event.payload or b"")
        return event

    def put_back(self, row: Row, events: Sequence[Event]) -> None:
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
                    self.rows[name] = Row(row.events)
                else:
                    del self.rows[name]

    def drop(self, name: str) -> Sequence[Event]:
        """Let go of a row; returns its events."""
        events = self.rows.pop(name).events
        self.events -= len(events)
        self.bytes -= sum(len(event.payload or b"") for event in events)
        return events


def _by_due(row: Row) -> float:
    return row.due
