"""Events sent to a destination, window by window, until each is settled; no Spark.

A row whose event was not accepted waits: that event is retried by a schedule, the row's later
events wait behind it, other rows go on. When the circuit breaker opens, delivery stops at a
checkpoint, from which it can go on later. It also stops after some seconds of sending, and goes on
at once: so its checkpoint is recorded now and then.

An event is put aside after so many attempts, if other events were accepted since its first one;
all attempts before that count as one. Otherwise it may be the destination that fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from ...change.path import table_path
from ...errors import SinkRefused
from ...retry import Backoff
from ...retry.clock import DeliveryClock, SystemClock
from .breaker import LONGEST_NAP, CircuitBreaker
from .contract import ACCEPTED, DeliveryOutcome, Event, Reply
from .events import reference
from .waiting import Pending, WaitingRow, WaitingRows

SendWindow = Callable[[Sequence[Event]], Sequence[Reply]]
Position = tuple[int, int]  # sequence, at

_NARROWER = 2  # after each failure so many powers of two fewer events are tried at once

_ACCEPTED, _REFUSED = DeliveryOutcome.ACCEPTED, DeliveryOutcome.REFUSED
_UNREACHABLE, _UNSENT = DeliveryOutcome.UNREACHABLE, DeliveryOutcome.UNSENT

_LATER = "it wants to be tried again later"  # the reason if an earlier process had it …
_NO_REASON = "it did not say why"  # … and if there was none
_FULL = "dead letters cannot be kept"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How events are handed over."""

    schedule: Backoff
    attempts: int = 5
    batch_size: int = 500
    batch_bytes: int = 1_000_000
    max_event_bytes: int = 0  # 0: any
    reference: bool = False  # a small event with a link is sent instead of one that is too large
    format: str = "savegress"
    gives_up: bool = False  # put aside whatever fails, as long as nothing at all is accepted
    refusals: int = 0  # events that were refused in a row before, with none accepted
    probes: int = 0  # >0: it stopped so often before; begin with one event, further on each time
    moved: float = 0.0  # by the wall clock: when an event of any part was last accepted
    seconds: float = 5.0  # of sending, after which it stops by itself

    def at_once(self, failures: int) -> int:
        """How many events to hand over at once after so many failures; the last time, one."""
        if failures and failures >= self.attempts - 1:
            return 1
        return max(self.batch_size >> _NARROWER * failures, 1)


class DeliveryCheckpoint(msgspec.Struct, frozen=True):
    """Where delivery stopped: all is settled up to here, but for what is pending. On disk."""

    sequence: int = 0
    at: int = -1
    pending: list[Pending] = []
    quiet: float = 0.0  # by the wall clock: nothing is sent before; 0: nothing had failed


_BEGINNING = DeliveryCheckpoint()


class Stopped(msgspec.Struct, frozen=True):
    """Delivery ended before every event was settled."""

    checkpoint: DeliveryCheckpoint
    reason: str  # "": it has sent for long enough, and may go on at once
    retry_after: float = 0.0  # seconds for which the destination wants no request
    reached: bool = True  # whether it replied


class Counts(msgspec.Struct):
    """What a delivery did. On disk."""

    sent: int = 0  # events accepted
    bytes: int = 0  # of them
    requests: int = 0  # windows handed over
    retries: int = 0  # how often an event was handed over that had been before
    refused: int = 0  # put aside for a reason of their own
    waiting: int = 0  # put aside behind these
    skipped: int = 0  # that the dead letters had already
    refusals: int = 0  # of those put aside, that the destination itself refused


class DeadLetterRange(NamedTuple):
    """The positions of a row's dead letters."""

    first: Position
    last: Position


class DeadLetterQueue(Protocol):
    """Takes the events that are put aside."""

    def add(self, event: Event, status: str, reason: str, attempts: int) -> None:
        """Keep an event."""
        ...


@dataclass(slots=True)
class EventDelivery:
    """One delivery of ordered events."""

    send: SendWindow
    policy: Policy
    letters: DeadLetterQueue
    blocked: dict[str, DeadLetterRange] = field(default_factory=dict)  # rows that have dead letters
    checkpoint: DeliveryCheckpoint = _BEGINNING  # go on from here
    clock: DeliveryClock = field(default_factory=SystemClock)
    full: Callable[[], bool] = lambda: False  # whether nothing more can be put aside: then it stops
    counts: Counts = field(default_factory=Counts)
    stopped: Stopped | None = None
    accepted_at: float = 0.0  # by the wall clock: when an event was last accepted
    _fresh: deque[Event] = field(default_factory=deque)
    _waiting: WaitingRows = field(default_factory=WaitingRows)
    _large: bool = False  # whether an event was met that is too large to be sent
    _last_read: Position = (0, -1)  # the last event that is no longer fresh
    _pending: dict[Position, Pending] = field(default_factory=dict)  # those of the checkpoint
    _tried: set[Position] = field(default_factory=set)  # those that were not read again yet
    _handed: set[Position] = field(default_factory=set)  # sent, and not settled since
    _ahead: float = 0.0  # wall clock minus clock
    _breaker: CircuitBreaker = field(init=False)

    def run(self, chunks: Iterable[Sequence[Event]]) -> None:
        """Settle all events, or stop."""
        begun = self._begin()
        reading = self._read(chunks)
        while self.stopped is None:
            now = self.clock.now()
            full = self.full()
            window = [] if full or now < self._breaker.paused_until else self._window(reading, now)
            if window:
                self._send_window(window)
                self._stop_in_time(reading, begun + self.policy.seconds)
            elif full:
                self._stop(_FULL, 0.0, reached=True)
            elif not self._waiting and not self._more(reading):
                break
            else:
                self._rest(now)

    def _begin(self) -> float:
        now = self.clock.now()
        self._ahead = self.clock.wall() - now
        self._breaker = CircuitBreaker(
            self.policy.schedule,
            self.policy.attempts,
            self.policy.gives_up,
            self.policy.refusals,
            # Not the same events each time: the destination may fail at these very ones.
            defer=max(self.policy.probes - 1, 0) * self.policy.attempts,
            paused_until=self.checkpoint.quiet - self._ahead if self.checkpoint.quiet else 0.0,
        )
        self._pending = {each[:2]: each for each in self.checkpoint.pending}
        self._tried = {each[:2] for each in self.checkpoint.pending if each.attempts or each.due}
        self._handed = {
            each[:2] for each in self.checkpoint.pending if each.handed or each.attempts
        }
        return now

    def _stop_in_time(self, reading: Iterator[None], end: float) -> None:
        """Stop if it is time, unless the destination has just failed."""
        now = self.clock.now()
        late = now >= end and not self._breaker.failures and self.stopped is None
        if late and (self._more(reading) or self._waiting.due(now)):
            self.stopped = Stopped(self._current(), "")

    # --- reading ---------------------------------------------------------------------------------

    def _read(self, chunks: Iterable[Sequence[Event]]) -> Iterator[None]:
        """Put events that are to be sent to the fresh ones, a chunk at a time."""
        limit, refers = self.policy.max_event_bytes, self.policy.reference
        for chunk in chunks:
            events = self._beyond(chunk) if self.checkpoint.sequence else chunk
            if limit and max([len(each.payload or b"") for each in events], default=0) > limit:
                events = [self._within(each, limit) for each in events]
                self._large = not refers
            self._fresh.extend(events)
            if self._fresh:
                yield

    def _beyond(self, events: Sequence[Event]) -> Sequence[Event]:
        """Those that were not settled when delivery stopped."""
        begin = self.checkpoint.sequence, self.checkpoint.at
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
        # While the breaker is half-open, other events are tried: if these are accepted, it was not
        # the destination that failed.
        if self._breaker.half_open:
            return self._fresh_ones(reading) or self._due_ones(now)
        return self._due_ones(now) or self._fresh_ones(reading)

    def _fresh_ones(self, reading: Iterator[None]) -> list[Event]:
        window: list[Event] = []
        fresh, most, enough = self._fresh, self._at_once(), self.policy.batch_bytes
        plain = not (self._waiting or self.blocked or self._breaker.defer or self._tried)
        size, event = 0, None
        while len(window) < most and size < enough and (plain or self._room()):
            if not fresh and not self._more(reading):
                break
            event = fresh.popleft()
            length = len(event.payload or b"")
            if self._large and length > self.policy.max_event_bytes:
                plain = False
                if self._may_send(event):  # refused when those before it are settled
                    self._put_to_wait(event)
            elif plain or self._may_send(event):
                window.append(event)
                size += length
        if event is not None:
            self._last_read = event.sequence, event.at
        return window

    def _room(self) -> bool:
        """Whether an event that cannot be sent now can be put somewhere."""
        return self._waiting.room() and not self.full()

    def _at_once(self, attempts: int = 0) -> int:
        if (self.policy.probes or self.policy.gives_up) and not self.counts.sent:
            return 1
        return self.policy.at_once(max(self._breaker.failures, attempts))

    def _may_send(self, event: Event) -> bool:
        """Whether an event may be sent now; if not, it waits or is put aside."""
        position, row = (event.sequence, event.at), event.row
        span = self.blocked.get(row)
        if span is not None and position >= span.first:
            if position <= span.last:
                self.counts.skipped += 1
            else:
                self._put_aside(event, "waiting", "", 0)
            return False
        if self.blocked and self._waits_for_table(event):
            self._put_aside(event, "waiting", "", 0)
            return False
        if row in self._waiting.rows or position in self._tried:
            self._tried.discard(position)
            self._put_to_wait(event)
            return False
        if self._breaker.defers():
            self._put_to_wait(event)
            return False
        return True

    def _waits_for_table(self, event: Event) -> bool:
        """Whether a change of a whole table waits for dead letters of its rows, or a row for it."""
        table = f"{event.source}|{table_path(event.schema, event.table)}"
        if event.row == table:
            rows = f"{table}:"
            return any(row.startswith(rows) for row in self.blocked)
        span = self.blocked.get(table)
        return span is not None and (event.sequence, event.at) > span.first

    def _due_ones(self, now: float) -> list[Event]:
        """Events of waiting rows that are due."""
        window: list[Event] = []
        size, most = 0, self.policy.batch_size
        for row in self._waiting.due(now):
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
                window.append(self._waiting.take(row))
                size += len(window[-1].payload or b"")
        return window

    def _too_large(self, event: Event) -> bool:
        return self._large and len(event.payload or b"") > self.policy.max_event_bytes

    def _refuse_large(self, row: WaitingRow) -> None:
        size, most = len(row.events[0].payload or b""), self.policy.max_event_bytes
        self._give_up(row, f"it has {size} bytes, more than max_event_bytes: {most}", 0)

    def _put_to_wait(self, event: Event) -> None:
        if event.row not in self._waiting.rows:
            self._restore(self._waiting.row(event.row), event)
        self._waiting.add(event)

    def _restore(self, row: WaitingRow, event: Event) -> None:
        """Restore what the checkpoint has of a row's first event."""
        known = self._pending.get((event.sequence, event.at))
        if known is None:
            return
        row.restore(known, self._ahead)
        if known.attempts and not self.checkpoint.quiet:
            row.accepted = 0
        if not row.moved and 0 < known.failed < self.policy.moved:
            row.attempts, row.moved = 1, True

    def _rest(self, now: float) -> None:
        """Wait until something may be sent."""
        due = min((row.due for row in self._waiting.rows.values()), default=now)
        wait = max(due, self._breaker.paused_until) - now
        if wait > LONGEST_NAP:
            reasons = [row.reason for row in self._waiting.rows.values() if row.reason]
            self._stop(reasons[-1] if reasons else _LATER, wait, reached=True)
        elif wait > 0:
            self.clock.sleep(wait)

    # --- replies --------------------------------------------------------------------------------

    def _send_window(self, window: list[Event]) -> None:
        try:
            replies = self.send(window)
        except SinkRefused as error:
            self._apply(window, [Reply(_UNSENT, str(error))] * len(window))
            self._stop(str(error), 0.0, reached=True)
            raise
        assert len(replies) == len(window), "a reply for each event"
        self.counts.requests += 1
        all_accepted = replies.count(ACCEPTED) == len(window)
        if self._handed or not all_accepted:
            self._count_handed(window, replies)
        if all_accepted:
            self._accept(window)
            if self._waiting:
                self._waiting.release({event.row for event in window})
            return
        self._apply(window, replies)

    def _count_handed(self, window: Sequence[Event], replies: Sequence[Reply]) -> None:
        """Count the events that were sent before as retries, and remember the others."""
        for event, reply in zip(window, replies, strict=True):
            if reply.outcome is not _UNSENT or reply.repeats:
                position = event.sequence, event.at
                self.counts.retries += (position in self._handed) + reply.repeats
                self._handed.add(position)

    def _accept(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self._breaker.accepted()
        self.accepted_at = self.clock.now() + self._ahead
        self.counts.sent += len(events)
        self.counts.bytes += sum([len(event.payload or b"") for event in events])
        if self._handed:
            self._handed.difference_update([(event.sequence, event.at) for event in events])

    def _apply(self, window: Sequence[Event], replies: Sequence[Reply]) -> None:
        back: dict[str, list[Event]] = {}
        why: dict[str, Reply] = {}
        accepted: list[Event] = []
        for event, reply in zip(window, replies, strict=True):
            if event.row in back:
                back[event.row].append(event)
            elif reply.outcome is _ACCEPTED:
                accepted.append(event)
            else:
                back[event.row], why[event.row] = [event], reply
        self._accept(accepted)
        self._waiting.release({event.row for event in accepted})
        aside = self.counts.refused
        for row, events in back.items():
            self._return(row, events, why[row])
        if self.counts.refused > aside:
            self._breaker.close()
        elif not accepted:
            opened = self._breaker.fail(list(why.values()), self.clock.now())
            if opened:
                self._stop(opened.reason, opened.retry_after, reached=opened.reached)

    def _return(self, name: str, events: list[Event], reply: Reply) -> None:
        """Events that were handed over and not accepted, to the head of their row."""
        row = self._waiting.row(name)
        if row.accepted < 0:
            self._restore(row, events[0])
        self._waiting.put_back(row, events)
        row.reason = reply.reason
        if reply.outcome is _REFUSED and self._breaker.blames_event:
            self._breaker.refusals += 1
            self.counts.refusals += 1
            self._give_up(row, row.reason, row.attempts + 1)
        elif reply.outcome is not _UNSENT:
            self._count_failure(row, reply)

    def _count_failure(self, row: WaitingRow, reply: Reply) -> None:
        now, moved = self.clock.now(), row.moved_on(self.counts.sent)
        row.attempts += 1
        if row.accepted < 0:
            row.accepted = self.counts.sent
        row.failed = row.failed or now + self._ahead
        impatient = self._breaker.gives_up and reply.outcome is not _UNREACHABLE
        if impatient or (moved and row.attempts >= self.policy.attempts):
            self._give_up(row, row.reason, row.attempts)
        else:
            row.due = now + max(self.policy.schedule.wait(row.attempts), reply.retry_after)

    def _give_up(self, row: WaitingRow, reason: str, attempts: int) -> None:
        """Put a row's first event aside, and what waits behind it."""
        head, *rest = self._waiting.drop(row.events[0].row)
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
        span = self.blocked.get(event.row, DeadLetterRange(position, position))
        self.blocked[event.row] = DeadLetterRange(
            min(span.first, position), max(span.last, position)
        )

    def _stop(self, reason: str, retry_after: float, *, reached: bool) -> None:
        quiet = max(self._breaker.paused_until, self.clock.now()) + self._ahead
        checkpoint = msgspec.structs.replace(self._current(), quiet=quiet)
        self.stopped = Stopped(checkpoint, reason or _NO_REASON, retry_after, reached)

    def _current(self) -> DeliveryCheckpoint:
        now = self.clock.now()
        pending: list[Pending] = []
        for row in self._waiting.rows.values():
            row.moved_on(self.counts.sent)
            pending += row.pending(self._handed, now, self._ahead)
        # What was pending before, and is still to be read.
        pending += [each for each in self.checkpoint.pending if each[:2] > self._last_read]
        sequence, at = max(self._last_read, (self.checkpoint.sequence, self.checkpoint.at))
        return DeliveryCheckpoint(sequence, at, sorted(pending))
