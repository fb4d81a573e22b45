"""Events handed to a destination, window by window, until each is settled; no Spark.

A row whose event was not accepted is held: that event is tried again by a schedule, the row's
later events wait behind it, other rows go on. When a destination takes nothing at all, delivery
stops and says where, so that whoever started it may wait and go on from there. It also stops after
some seconds of sending, to be gone on with at once: so where it stands is noted now and then.

An event is given up after so many tries, if others were accepted since its first; what it was
tried before any was counts as one. Only then may it be the event's fault that nobody was reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from ...errors import SinkRefused
from . import ACCEPTED, Answer, Event, Verdict
from .events import reference
from .held import Held, Pending, Row
from .outage import LONGEST_NAP, Outage
from .retry import Clock, RealClock, Schedule

Send = Callable[[Sequence[Event]], Sequence[Verdict]]
Position = tuple[int, int]  # sequence, at

_NARROWER = 2  # after each failure so many powers of two fewer events are tried at once

_ACCEPTED, _REFUSED = Answer.ACCEPTED, Answer.REFUSED
_UNREACHABLE, _UNSENT = Answer.UNREACHABLE, Answer.UNSENT

_LATER = "it wants to be asked again later"  # what is said if the reason was told long ago …
_UNSAID = "it did not say why"  # … or never was
_FULL = "dead letters cannot be kept"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How events are handed over."""

    schedule: Schedule
    attempts: int = 5
    batch_size: int = 500
    batch_bytes: int = 1_000_000
    max_event_bytes: int = 0  # 0: any
    reference: bool = False  # what is too large is told of by a small event
    format: str = "savegress"
    gives_up: bool = False  # put aside whatever fails, as long as nothing at all is accepted
    refusals: int = 0  # events that were refused in a row before, with none accepted
    probes: int = 0  # >0: it stopped so often before; begin with one event, further on each time
    moved: float = 0.0  # by the wall clock: when any part last had something accepted
    seconds: float = 5.0  # of sending, after which it stops by itself

    def at_once(self, failures: int) -> int:
        """How many events to hand over at once after so many failures; the last time, one."""
        if failures and failures >= self.attempts - 1:
            return 1
        return max(self.batch_size >> _NARROWER * failures, 1)


class Point(msgspec.Struct, frozen=True):
    """Where delivery stopped: all is settled up to here, but for what is pending."""

    sequence: int = 0
    at: int = -1
    pending: list[Pending] = []
    quiet: float = 0.0  # by the wall clock: nothing is to be sent before; 0: nothing was wrong


_BEGINNING = Point()


class Stopped(msgspec.Struct, frozen=True):
    """That delivery ended before its end."""

    point: Point
    reason: str  # "": it has sent for long enough, and may go on at once
    after: float = 0.0  # seconds after which the destination wants to be asked again
    reached: bool = True  # whether it answered


class Counts(msgspec.Struct):
    """What was done."""

    sent: int = 0  # events accepted
    bytes: int = 0  # of them
    requests: int = 0  # windows handed over
    retries: int = 0  # how often an event was handed over that had been before
    refused: int = 0  # put aside for a reason of their own
    waiting: int = 0  # put aside behind these
    skipped: int = 0  # that the dead letters had already
    refusals: int = 0  # of those put aside, that the destination itself refused


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
class Delivery:
    """One delivery of ordered events."""

    send: Send
    policy: Policy
    letters: Letters
    blocked: dict[str, Span] = field(default_factory=dict)  # rows that have dead letters
    point: Point = _BEGINNING  # go on from here
    clock: Clock = field(default_factory=RealClock)
    full: Callable[[], bool] = lambda: False  # whether nothing more can be put aside: then it stops
    counts: Counts = field(default_factory=Counts)
    stopped: Stopped | None = None
    accepted_at: float = 0.0  # by the wall clock: when something last was
    _fresh: deque[Event] = field(default_factory=deque)
    _held: Held = field(default_factory=Held)
    _large: bool = False  # whether an event was met that is too large to be sent
    _taken: Position = (0, -1)  # the last event that is no longer fresh
    _pending: dict[Position, Pending] = field(default_factory=dict)  # those of the point
    _tried: set[Position] = field(default_factory=set)  # of these, not met again yet
    _handed: set[Position] = field(default_factory=set)  # events, and were not settled since
    _ahead: float = 0.0  # of the clock, the wall clock
    _outage: Outage = field(init=False)

    def run(self, chunks: Iterable[Sequence[Event]]) -> None:
        """Settle all events, or stop."""
        begun = self._begin()
        reading = self._read(chunks)
        while self.stopped is None:
            now = self.clock.now()
            full = self.full()
            window = [] if full or now < self._outage.quiet else self._window(reading, now)
            if window:
                self._hand_over(window)
                self._look_up(reading, begun + self.policy.seconds)
            elif full:
                self._stop(_FULL, 0.0, reached=True)
            elif not self._held and not self._more(reading):
                break
            else:
                self._rest(now)

    def _begin(self) -> float:
        now = self.clock.now()
        self._ahead = self.clock.wall() - now
        self._outage = Outage(
            self.policy.schedule,
            self.policy.attempts,
            self.policy.gives_up,
            self.policy.refusals,
            # Not always the same events: these may be the very ones that the destination fails at.
            defer=max(self.policy.probes - 1, 0) * self.policy.attempts,
            quiet=self.point.quiet - self._ahead if self.point.quiet else 0.0,
        )
        self._pending = {each[:2]: each for each in self.point.pending}
        self._tried = {each[:2] for each in self.point.pending if each.attempts or each.due}
        self._handed = {each[:2] for each in self.point.pending if each.handed or each.attempts}
        return now

    def _look_up(self, reading: Iterator[None], end: float) -> None:
        """Stop if it is time, unless the destination has just failed."""
        now = self.clock.now()
        late = now >= end and not self._outage.silent and self.stopped is None
        if late and (self._more(reading) or self._held.due(now)):
            self.stopped = Stopped(self._where(), "")

    # --- reading ---------------------------------------------------------------------------------

    def _read(self, chunks: Iterable[Sequence[Event]]) -> Iterator[None]:
        """Put events that are to be sent to the fresh ones, a chunk at a time."""
        limit, refers = self.policy.max_event_bytes, self.policy.reference
        for chunk in chunks:
            events = self._beyond(chunk) if self.point.sequence else chunk
            if limit and max([len(each.payload or b"") for each in events], default=0) > limit:
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
        if self._outage.doubted:
            return self._fresh_ones(reading) or self._due_ones(now)
        return self._due_ones(now) or self._fresh_ones(reading)

    def _fresh_ones(self, reading: Iterator[None]) -> list[Event]:
        window: list[Event] = []
        fresh, most, enough = self._fresh, self._at_once(), self.policy.batch_bytes
        plain = not (self._held or self.blocked or self._outage.defer or self._tried)
        size, event = 0, None
        while len(window) < most and size < enough and (plain or self._room()):
            if not fresh and not self._more(reading):
                break
            event = fresh.popleft()
            length = len(event.payload or b"")
            if self._large and length > self.policy.max_event_bytes:
                plain = False
                if self._goes(event):  # judged when those before it are settled
                    self._hold(event)
            elif plain or self._goes(event):
                window.append(event)
                size += length
        if event is not None:
            self._taken = event.sequence, event.at
        return window

    def _room(self) -> bool:
        """Whether an event that cannot be sent now can be put somewhere."""
        return self._held.room() and not self.full()

    def _at_once(self, attempts: int = 0) -> int:
        if (self.policy.probes or self.policy.gives_up) and not self.counts.sent:
            return 1
        return self.policy.at_once(max(self._outage.silent, attempts))

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
        if row in self._held.rows or position in self._tried:
            self._tried.discard(position)
            self._hold(event)
            return False
        if self._outage.defers():
            self._hold(event)
            return False
        return True

    def _due_ones(self, now: float) -> list[Event]:
        """Events of rows whose time has come."""
        window: list[Event] = []
        size, most = 0, self.policy.batch_size
        for row in self._held.due(now):
            row.moved_on(self.counts.sent)
            most = min(most, self._at_once(row.attempts))
            if len(window) >= most:
                break
            if self._too_large(row.events[0]):
                self._refuse_large(row)
                continue
            while row.events and len(window) < most and size < self.policy.batch_bytes:
                if self._too_large(row.events[0]):
                    break
                window.append(self._held.take(row))
                size += len(window[-1].payload or b"")
        return window

    def _too_large(self, event: Event) -> bool:
        return self._large and len(event.payload or b"") > self.policy.max_event_bytes

    def _refuse_large(self, row: Row) -> None:
        size, most = len(row.events[0].payload or b""), self.policy.max_event_bytes
        self._give_up(row, f"it has {size} bytes, more than max_event_bytes: {most}", 0)

    def _hold(self, event: Event) -> None:
        if event.row not in self._held.rows:
            self._recall(self._held.row(event.row), event)
        self._held.add(event)

    def _recall(self, row: Row, event: Event) -> None:
        """What is known of a row's first event since delivery stopped."""
        known = self._pending.get((event.sequence, event.at))
        if known is None:
            return
        row.recall(known, self._ahead)
        if known.attempts and not self.point.quiet:
            row.accepted = 0
        if not row.moved and 0 < known.failed < self.policy.moved:
            row.attempts, row.moved = 1, True

    def _rest(self, now: float) -> None:
        """Wait until something may be sent."""
        due = min((row.due for row in self._held.rows.values()), default=now)
        wait = max(due, self._outage.quiet) - now
        if wait > LONGEST_NAP:
            reasons = [row.reason for row in self._held.rows.values() if row.reason]
            self._stop(reasons[-1] if reasons else _LATER, wait, reached=True)
        elif wait > 0:
            self.clock.sleep(wait)

    # --- verdicts --------------------------------------------------------------------------------

    def _hand_over(self, window: list[Event]) -> None:
        try:
            verdicts = self.send(window)
        except SinkRefused as error:
            self._judge(window, [Verdict(_UNSENT, str(error))] * len(window))
            self._stop(str(error), 0.0, reached=True)
            raise
        assert len(verdicts) == len(window), "a verdict for each event"
        self.counts.requests += 1
        taken = verdicts.count(ACCEPTED) == len(window)
        if self._handed or not taken:
            self._count_handed(window, verdicts)
        if taken:
            self._accept(window)
            if self._held:
                self._held.release({event.row for event in window})
            return
        self._judge(window, verdicts)

    def _count_handed(self, window: Sequence[Event], verdicts: Sequence[Verdict]) -> None:
        """Count what was handed over before; what was not has been now."""
        for event, verdict in zip(window, verdicts, strict=True):
            if verdict.answer is not _UNSENT or verdict.repeats:
                position = event.sequence, event.at
                self.counts.retries += (position in self._handed) + verdict.repeats
                self._handed.add(position)

    def _accept(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self._outage.accepted()
        self.accepted_at = self.clock.now() + self._ahead
        self.counts.sent += len(events)
        self.counts.bytes += sum([len(event.payload or b"") for event in events])
        if self._handed:
            self._handed.difference_update([(event.sequence, event.at) for event in events])

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
        self._accept(taken)
        self._held.release({event.row for event in taken})
        aside = self.counts.refused
        for row, events in back.items():
            self._return(row, events, why[row])
        if self.counts.refused > aside:
            self._outage.over()
        elif not taken:
            silence = self._outage.fall_silent(list(why.values()), self.clock.now())
            if silence:
                self._stop(silence.reason, silence.after, reached=silence.reached)

    def _return(self, name: str, events: list[Event], verdict: Verdict) -> None:
        """Events that were handed over and not accepted, to the head of their row."""
        row = self._held.row(name)
        if row.accepted < 0:
            self._recall(row, events[0])
        self._held.put_back(row, events)
        row.reason = verdict.reason
        if verdict.answer is _REFUSED and self._outage.believed:
            self._outage.refusals += 1
            self.counts.refusals += 1
            self._give_up(row, row.reason, row.attempts + 1)
        elif verdict.answer is not _UNSENT:
            self._count_failure(row, verdict)

    def _count_failure(self, row: Row, verdict: Verdict) -> None:
        now, moved = self.clock.now(), row.moved_on(self.counts.sent)
        row.attempts += 1
        if row.accepted < 0:
            row.accepted = self.counts.sent
        row.failed = row.failed or now + self._ahead
        impatient = self._outage.gives_up and verdict.answer is not _UNREACHABLE
        if impatient or (moved and row.attempts >= self.policy.attempts):
            self._give_up(row, row.reason, row.attempts)
        else:
            row.due = now + max(self.policy.schedule.wait(row.attempts), verdict.after)

    def _give_up(self, row: Row, reason: str, attempts: int) -> None:
        """Put a row's first event aside, and what waits behind it."""
        head, *rest = self._held.drop(row.events[0].row)
        self._put_aside(head, "refused", reason, attempts)
        for event in rest:
            self._put_aside(event, "waiting", "", 0)

    def _put_aside(self, event: Event, status: str, reason: str, attempts: int) -> None:
        self.letters.add(event, status, reason, attempts)
        if status == "refused":
            self.counts.refused += 1
        else:
            self.counts.waiting += 1
        position = event.sequence, event.at
        self._handed.discard(position)
        span = self.blocked.get(event.row, Span(position, position))
        self.blocked[event.row] = Span(min(span.first, position), max(span.last, position))

    def _stop(self, reason: str, after: float, *, reached: bool) -> None:
        quiet = max(self._outage.quiet, self.clock.now()) + self._ahead
        point = msgspec.structs.replace(self._where(), quiet=quiet)
        self.stopped = Stopped(point, reason or _UNSAID, after, reached)

    def _where(self) -> Point:
        now = self.clock.now()
        pending: list[Pending] = []
        for row in self._held.rows.values():
            row.moved_on(self.counts.sent)
            pending += row.pending(self._handed, now, self._ahead)
        # What was pending before, and is still to be read.
        pending += [each for each in self.point.pending if each[:2] > self._taken]
        sequence, at = max(self._taken, (self.point.sequence, self.point.at))
        return Point(sequence, at, sorted(pending))
