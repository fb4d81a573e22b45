"""Events handed to a destination, window by window, until each is settled; no Spark.

A row whose event was not accepted is held: that event is tried again by a schedule, the row's
later events wait behind it, other rows go on. When a destination takes nothing at all, delivery
stops and says where, so that whoever started it may wait and go on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

import msgspec

from ...errors import SinkRefused
from . import Answer, Event, Verdict
from .events import reference
from .retry import Clock, RealClock, Schedule

Send = Callable[[Sequence[Event]], Sequence[Verdict]]
Position = tuple[int, int]  # sequence, at

HELD_EVENTS = 10_000  # waiting in memory behind what failed, before nothing further is read
HELD_BYTES = 32_000_000
LONGEST_NAP = 2.0  # seconds; for longer waits delivery stops
MOST_REFUSALS = 20  # in a row; then it is the destination that refuses, and not the event
_NARROWER = 2  # after each failure so many powers of two fewer events are tried at once

_ACCEPTED, _REFUSED = Answer.ACCEPTED, Answer.REFUSED
_FAILED, _UNREACHABLE = Answer.FAILED, Answer.UNREACHABLE


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How events are handed over."""

    schedule: Schedule
    attempts: int = 5
    batch_size: int = 500
    batch_bytes: int = 1_000_000
    max_event_bytes: int = 0  # 0: any
    reference: bool = False  # what is too large is told of by a small event
    format: str = "savegress"
    gives_up: bool = False  # put aside what failed so often, even if nothing else is accepted
    refusals: int = 0  # events that were refused in a row before, with none accepted
    probes: int = 0  # >0: it stopped so often before; begin with one event, further on each time

    def at_once(self, failures: int) -> int:
        """How many events to hand over at once after so many failures; the last time, one."""
        if failures and failures >= self.attempts - 1:
            return 1
        return max(self.batch_size >> _NARROWER * failures, 1)


class Pending(NamedTuple):
    """An event that was read and not settled."""

    sequence: int
    at: int
    attempts: int
    moved: bool = False  # whether others were accepted since the first of these


class Point(msgspec.Struct, frozen=True):
    """Where delivery stopped: all is settled up to here, but for what is pending."""

    sequence: int = 0
    at: int = -1
    pending: list[Pending] = []


_BEGINNING = Point()


class Stopped(msgspec.Struct, frozen=True):
    """That delivery ended before its end."""

    point: Point
    reason: str
    after: float = 0.0  # seconds after which the destination wants to be asked again
    reached: bool = True  # whether it answered


class Counts(msgspec.Struct):
    """What was done."""

    sent: int = 0  # events accepted
    bytes: int = 0  # of them
    requests: int = 0  # windows handed over
    retries: int = 0  # events handed over again
    refused: int = 0  # put aside for a reason of their own
    waiting: int = 0  # put aside behind these
    skipped: int = 0  # that the dead letters had already


class Span(NamedTuple):
    """The positions of a row's dead letters."""

    first: Position
    last: Position


class Letters(Protocol):
    """Takes what is put aside."""

    def add(self, event: Event, status: str, reason: str, attempts: int) -> None:
        """Keep an event."""
        ...


@dataclass(slots=True)
class _Held:
    """A row that waits for its first event."""

    events: deque[Event]
    due: float = 0.0
    attempts: int = 0  # at the first one
    accepted: int = -1  # how many others had been when it first failed; -1: it has not
    moved: bool = False  # whether others were, the last time that delivery stopped
    reason: str = ""


@dataclass(slots=True)
class Delivery:
    """One delivery of ordered events."""

    send: Send
    policy: Policy
    letters: Letters
    blocked: dict[str, Span] = field(default_factory=dict)  # rows that have dead letters
    point: Point = _BEGINNING  # go on from here
    clock: Clock = field(default_factory=RealClock)
    counts: Counts = field(default_factory=Counts)
    stopped: Stopped | None = None
    _fresh: deque[Event] = field(default_factory=deque)
    _held: dict[str, _Held] = field(default_factory=dict)
    _large: bool = False  # whether an event was met that is too large to be sent
    _held_events: int = 0
    _held_bytes: int = 0
    _taken: Position = (0, -1)  # the last event that is no longer fresh
    _pending: dict[Position, Pending] = field(default_factory=dict)  # those of the point
    _silent: int = 0  # windows in a row of which nothing was accepted
    _quiet: float = 0.0  # nothing is handed over before
    _defer: int = 0  # events to pass over before the first window
    _refusals: int = 0  # in a row, with nothing accepted between them

    def run(self, chunks: Iterable[Sequence[Event]]) -> None:
        """Settle all events, or stop."""
        self._begin()
        reading = self._read(chunks)
        while self.stopped is None:
            now = self.clock.now()
            window = self._window(reading, now) if now >= self._quiet else []
            if window:
                self._hand_over(window)
            elif not self._held and not self._more(reading):
                break
            else:
                self._rest(now)

    def abandon(self, chunks: Iterable[Sequence[Event]], reason: str) -> None:
        """Put everything aside that is not settled."""
        for name, row in list(self._held.items()):
            row.reason = row.reason or reason
            self._give_up(name, row, row.attempts)
        rest = chain(self._fresh, chain.from_iterable(chunks))
        for event in rest:
            if event.row in self.blocked:
                self._put_aside(event, "waiting", "", 0)
            else:
                self._put_aside(event, "refused", reason, 0)
        self._fresh.clear()

    def _begin(self) -> None:
        self._refusals = self.policy.refusals
        self._pending = {(each.sequence, each.at): each for each in self.point.pending}
        if self.policy.probes:
            # Not always the same events: these may be the very ones that the destination fails at.
            self._defer = (self.policy.probes - 1) * self.policy.attempts

    # --- reading ---------------------------------------------------------------------------------

    def _read(self, chunks: Iterable[Sequence[Event]]) -> Iterator[None]:
        """Put events that are to be sent to the fresh ones, a chunk at a time."""
        limit, refers = self.policy.max_event_bytes, self.policy.reference
        for chunk in chunks:
            events = self._beyond(chunk) if self.point.sequence else chunk
            if limit and max(map(_size, events), default=0) > limit:
                events = [self._within(each, limit) for each in events]
                self._large = not refers
            self._fresh.extend(events)
            if self._fresh:
                yield

    def _beyond(self, events: Sequence[Event]) -> Sequence[Event]:
        """Those that were not settled when delivery stopped."""
        begin = self.point.sequence, self.point.at
        return [
            event
            for event in events
            if (event.sequence, event.at) > begin or (event.sequence, event.at) in self._pending
        ]

    def _within(self, event: Event, limit: int) -> Event:
        if event.payload is None or len(event.payload) <= limit or not self.policy.reference:
            return event
        return event._replace(payload=reference(event, self.policy.format))

    def _more(self, reading: Iterator[None]) -> bool:
        """Whether there is a fresh event."""
        return bool(self._fresh) or next(reading, reading) is not reading

    # --- windows ---------------------------------------------------------------------------------

    def _window(self, reading: Iterator[None], now: float) -> list[Event]:
        """The next events to hand over; none: there are none, or not yet."""
        # After a window of which nothing was accepted, others are tried: if these are accepted,
        # it was not the destination that failed.
        if self._silent or self._defer:
            return self._fresh_ones(reading) or self._due_ones(now)
        return self._due_ones(now) or self._fresh_ones(reading)

    def _fresh_ones(self, reading: Iterator[None]) -> list[Event]:
        window: list[Event] = []
        fresh, most, enough = self._fresh, self._at_once(), self.policy.batch_bytes
        plain = not self._held and not self.blocked and not self._defer
        size, event = 0, None
        while len(window) < most and size < enough and (plain or self._room()):
            if not fresh and not self._more(reading):
                break
            event = fresh.popleft()
            length = len(event.payload or b"")
            if self._large and length > self.policy.max_event_bytes:
                self._refuse_large(event)
                plain = False
            elif plain or self._goes(event):
                window.append(event)
                size += length
        if event is not None:
            self._taken = event.sequence, event.at
        return window

    def _at_once(self) -> int:
        if self.policy.probes and not self.counts.sent:
            return 1
        return self.policy.at_once(self._silent)

    def _room(self) -> bool:
        return self._held_events < HELD_EVENTS and self._held_bytes < HELD_BYTES

    def _goes(self, event: Event) -> bool:
        """Whether an event may be sent now; if not, it is put where it belongs."""
        position, row = (event.sequence, event.at), event.row
        span = self.blocked.get(row)
        if span is not None and position >= span.first:
            if position <= span.last:
                self.counts.skipped += 1
            else:
                self._put_aside(event, "waiting", "", 0)
            return False
        if row in self._held:
            self._hold(event)
            return False
        if self._defer:
            self._defer -= 1
            self._hold(event)
            return False
        return True

    def _refuse_large(self, event: Event) -> None:
        span = self.blocked.get(event.row)
        position = event.sequence, event.at
        if span is not None and span.first <= position <= span.last:
            self.counts.skipped += 1
            return
        size, most = len(event.payload or b""), self.policy.max_event_bytes
        reason = f"it has {size} bytes, more than max_event_bytes: {most}"
        self._put_aside(event, "waiting" if span else "refused", "" if span else reason, 0)

    def _due_ones(self, now: float) -> list[Event]:
        """Events of rows whose time has come."""
        window: list[Event] = []
        size, most = 0, self.policy.batch_size
        for row in sorted((row for row in self._held.values() if row.due <= now), key=_by_due):
            most = min(most, self.policy.at_once(row.attempts), self._at_once())
            if len(window) >= most:
                break
            if row.attempts:
                self.counts.retries += 1
            while row.events and len(window) < most and size < self.policy.batch_bytes:
                event = row.events.popleft()
                self._held_events -= 1
                length = len(event.payload or b"")
                self._held_bytes -= length
                size += length
                window.append(event)
        return window

    def _hold(self, event: Event) -> None:
        row = self._held.get(event.row) or self._new_row(event)
        row.events.append(event)
        self._held_events += 1
        self._held_bytes += len(event.payload or b"")

    def _new_row(self, event: Event) -> _Held:
        """A row that is to be held from this event on."""
        row = self._held[event.row] = _Held(deque())
        known = self._pending.get((event.sequence, event.at))
        if known is not None and known.attempts:
            row.attempts, row.accepted, row.moved = known.attempts, 0, known.moved
        return row

    def _moved_on(self, row: _Held) -> bool:
        """Whether others were accepted since a row's first event first failed."""
        return row.moved or 0 <= row.accepted < self.counts.sent

    def _rest(self, now: float) -> None:
        """Wait until something may be sent."""
        due = min((row.due for row in self._held.values()), default=now)
        wait = max(due, self._quiet) - now
        if wait > LONGEST_NAP:
            reasons = [row.reason for row in self._held.values() if row.reason]
            self._stop(reasons[-1] if reasons else "", wait, reached=True)
        elif wait > 0:
            self.clock.sleep(wait)

    # --- verdicts --------------------------------------------------------------------------------

    def _hand_over(self, window: list[Event]) -> None:
        try:
            verdicts = self.send(window)
        except SinkRefused as error:
            self._judge(window, [Verdict(_UNREACHABLE, str(error))] * len(window))
            self._stop(str(error), 0.0, reached=True)
            raise
        assert len(verdicts) == len(window), "a verdict for each event"
        self.counts.requests += 1
        if all(verdict.answer is _ACCEPTED for verdict in verdicts):
            self._accept(window)
            if self._held:
                self._release({event.row for event in window})
            self._silent, self._quiet = 0, 0.0
            return
        self._judge(window, verdicts)

    def _accept(self, events: Sequence[Event]) -> None:
        self.counts.sent += len(events)
        self._refusals = 0 if events else self._refusals
        self.counts.bytes += sum([len(event.payload or b"") for event in events])

    def _release(self, rows: Iterable[str]) -> None:
        """Rows whose events so far were accepted: what follows may be sent at once."""
        for name in rows:
            row = self._held.get(name)
            if row is not None:
                if row.events:
                    self._held[name] = _Held(row.events)
                else:
                    del self._held[name]

    def _judge(self, window: Sequence[Event], verdicts: Sequence[Verdict]) -> None:
        back: dict[str, list[Event]] = {}
        why: dict[str, Verdict] = {}
        taken: list[Event] = []
        for event, verdict in zip(window, verdicts, strict=True):
            if event.row in back:
                back[event.row].append(event)
            elif verdict.answer is _ACCEPTED:
                taken.append(event)
            else:
                back[event.row], why[event.row] = [event], verdict
        before = self.counts.sent
        self._accept(taken)
        self._release({event.row for event in taken} - back.keys())
        heads = {event.row for event in taken}
        aside = self.counts.refused
        for row, events in back.items():
            self._return(row, events, why[row], first=row not in heads)
        if self.counts.sent > before or self.counts.refused > aside:
            self._silent, self._quiet = 0, 0.0
        else:
            self._fall_silent(list(why.values()))

    def _return(self, name: str, events: list[Event], verdict: Verdict, *, first: bool) -> None:
        """Events that were handed over and not accepted, to the head of their row."""
        row = self._held.get(name) or self._new_row(events[0])
        if not first:  # the event that failed before has been accepted
            row.attempts, row.accepted, row.moved = 0, -1, False
        row.events.extendleft(reversed(events))
        self._held_events += len(events)
        self._held_bytes += sum(len(event.payload or b"") for event in events)
        row.reason = verdict.reason
        now = self.clock.now()
        if verdict.answer is _REFUSED and self._believes():
            self._refusals += 1
            self._give_up(name, row, row.attempts + 1)
        elif verdict.answer in (_REFUSED, _FAILED):
            row.attempts += 1
            if row.accepted < 0:
                row.accepted = self.counts.sent
            gives_up = self.policy.gives_up or self._moved_on(row)
            if row.attempts >= self.policy.attempts and gives_up:
                self._give_up(name, row, row.attempts)
            else:
                row.due = now + max(self.policy.schedule.wait(row.attempts), verdict.after)
        else:
            row.due = now + verdict.after

    def _believes(self) -> bool:
        """Whether a refusal is the event's own: one that refuses all has another reason."""
        return self.policy.gives_up or self._refusals < MOST_REFUSALS

    def _give_up(self, name: str, row: _Held, attempts: int) -> None:
        """Put a row's first event aside, and what waits behind it."""
        del self._held[name]
        self._held_events -= len(row.events)
        self._held_bytes -= sum(len(event.payload or b"") for event in row.events)
        head = row.events.popleft()
        self._put_aside(head, "refused", row.reason, attempts)
        for event in row.events:
            self._put_aside(event, "waiting", "", 0)

    def _put_aside(self, event: Event, status: str, reason: str, attempts: int) -> None:
        self.letters.add(event, status, reason, attempts)
        if status == "refused":
            self.counts.refused += 1
        else:
            self.counts.waiting += 1
        position = event.sequence, event.at
        span = self.blocked.get(event.row, Span(position, position))
        self.blocked[event.row] = Span(min(span.first, position), max(span.last, position))

    def _fall_silent(self, verdicts: Sequence[Verdict]) -> None:
        self._silent += 1
        after = min((verdict.after for verdict in verdicts), default=0.0)
        wait = max(self.policy.schedule.wait(self._silent), after)
        reached = any(verdict.answer is not _UNREACHABLE for verdict in verdicts)
        if self._silent >= self.policy.attempts or wait > LONGEST_NAP:
            self._stop(verdicts[0].reason, after, reached=reached)
        else:
            self._quiet = self.clock.now() + wait

    def _stop(self, reason: str, after: float, *, reached: bool) -> None:
        pending = [
            Pending(event.sequence, event.at, row.attempts, self._moved_on(row))
            if event is row.events[0]
            else Pending(event.sequence, event.at, 0)
            for row in self._held.values()
            for event in row.events
        ]
        # What was pending before, and is still to be read.
        pending += [each for each in self.point.pending if each[:2] > self._taken]
        sequence, at = max(self._taken, (self.point.sequence, self.point.at))
        self.stopped = Stopped(Point(sequence, at, sorted(pending)), reason, after, reached)


def _size(event: Event) -> int:
    return len(event.payload or b"")


def _by_due(row: _Held) -> float:
    return row.due
