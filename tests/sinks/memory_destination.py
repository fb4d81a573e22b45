"""A destination, dead letters and a clock in memory, to see how events are handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.retry import Backoff
from headrace.sinks.push import ACCEPTED, UNSENT, DeliveryOutcome, Event, Reply
from headrace.sinks.push.delivery import (
    DeadLetterRange,
    DeliveryCheckpoint,
    EventDelivery,
    Policy,
    SendWindow,
    Stopped,
)

POLICY = Policy(schedule=Backoff(0.1, 30.0), attempts=5, batch_size=8)
FAILED = Reply(DeliveryOutcome.FAILED, "it stumbled")
REFUSED = Reply(DeliveryOutcome.REFUSED, "never this one")
UNREACHABLE = Reply(DeliveryOutcome.UNREACHABLE, "nobody is there")


def event(sequence: int, row: str = "a", payload: bytes | None = b"{}", at: int = 0) -> Event:
    return Event(sequence, at, f"evt_{sequence}", row, "INSERT", "s", "p", "t", None, 0, payload)


class Watch:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.time = 0.0
        self.naps: list[float] = []

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 1_000_000.0 + self.time

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.time += seconds


@dataclass
class DeadLetterQueue:
    """Dead letters in memory."""

    kept: list[tuple[Event, str, str, int]] = field(default_factory=list)

    def add(self, event: Event, status: str, reason: str, attempts: int) -> None:
        self.kept.append((event, status, reason, attempts))

    def spans(self) -> dict[str, DeadLetterRange]:
        found: dict[str, DeadLetterRange] = {}
        for each, *_ in self.kept:
            at = each.sequence, each.at
            span = found.get(each.row, DeadLetterRange(at, at))
            found[each.row] = DeadLetterRange(min(span.first, at), max(span.last, at))
        return found

    def sequences(self, status: str | None = None) -> list[int]:
        return [each.sequence for each, told, *_ in self.kept if status in (None, told)]


Judge = Callable[[Event], Reply]


class Office:
    """A destination that judges each event, and remembers what it took."""

    def __init__(self, judge: Judge = lambda _: ACCEPTED, *, careless: bool = False) -> None:
        self.judge = judge
        self.careless = careless  # it takes later events of a row, although it failed at one
        self.windows: list[list[Event]] = []
        self.taken: list[Event] = []

    def send(self, events: Sequence[Event]) -> list[Reply]:
        self.windows.append(list(events))
        stuck: set[str] = set()
        replies: list[Reply] = []
        for each in events:
            blocked = each.row in stuck and not self.careless
            reply = UNSENT if blocked else self.judge(each)
            if reply.outcome is DeliveryOutcome.ACCEPTED:
                self.taken.append(each)
            else:
                stuck.add(each.row)
            replies.append(reply)
        return replies

    def sequences(self) -> list[int]:
        return [each.sequence for each in self.taken]


def deliver(
    office: Office, events: Sequence[Event], letters: DeadLetterQueue | None = None, **chosen: Any
) -> EventDelivery:
    policy = msgspec.structs.replace(POLICY, **chosen.pop("policy", {}))
    chosen.setdefault("clock", Watch())
    delivery = EventDelivery(office.send, policy, letters or DeadLetterQueue(), **chosen)
    delivery.run([events])
    return delivery


def failing(count: int, which: Callable[[Event], bool], how: Reply = FAILED) -> Judge:
    """Fail so often at each of some events, then take it."""
    times: dict[int, int] = {}

    def judge(each: Event) -> Reply:
        if not which(each):
            return ACCEPTED
        times[each.sequence] = times.get(each.sequence, 0) + 1
        return how if times[each.sequence] <= count else ACCEPTED

    return judge


class Rounds:
    """Deliveries of a batch until it is settled, as the driver has them done."""

    def __init__(
        self,
        send: SendWindow,
        events: Sequence[Event],
        letters: DeadLetterQueue,
        policy: dict[str, Any] | None = None,
        patience: float = 3600.0,
    ) -> None:
        self.watch = Watch()
        self.tried: list[tuple[float, Event]] = []  # when
        self.accepted = 0
        self.retries = 0
        self.rounds = 0  # that ended before everything was settled, with nothing accepted
        self.send = send
        self._events = events
        self._letters = letters
        self._policy = msgspec.structs.replace(POLICY, **(policy or {}))
        self._patience = patience
        self._since = 0.0  # nothing was accepted
        self._refusals = 0
        self._moved = 0.0
        self._point = DeliveryCheckpoint()

    def run(self, until: float) -> bool:
        """Go on until then at most; returns whether everything is settled."""
        while self.watch.now() <= until:
            if (stopped := self._deliver()) is None:
                return True
            self._point = msgspec.json.decode(
                msgspec.json.encode(stopped.checkpoint), type=DeliveryCheckpoint
            )
            if stopped.reason:
                wait = min(2.0 ** min(max(self.rounds - 1, 0), 20), 60.0)
                self.watch.sleep(max(wait, stopped.retry_after))
        return False

    def _deliver(self) -> Stopped | None:
        impatient = self.watch.now() - self._since >= self._patience
        policy = msgspec.structs.replace(
            self._policy,
            gives_up=self._point.sequence > 0 and impatient,
            refusals=self._refusals,
            probes=self.rounds,
            moved=self._moved,
        )
        delivery = EventDelivery(
            self._sent, policy, self._letters, self._letters.spans(), self._point, self.watch
        )
        delivery.run([self._events])
        counts, stopped = delivery.counts, delivery.stopped
        self.accepted += counts.sent
        self.retries += counts.retries
        self._moved = max(self._moved, delivery.accepted_at)
        self._refusals += counts.refusals
        if counts.sent:
            self._refusals, self._since = 0, self.watch.now()
        failed = stopped is not None and bool(stopped.reason)
        self.rounds = int(failed) if counts.sent or counts.refused else self.rounds + 1
        return stopped

    def _sent(self, window: Sequence[Event]) -> Sequence[Reply]:
        self.tried += [(self.watch.now(), each) for each in window]
        return self.send(window)
