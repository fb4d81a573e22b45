"""The circuit breaker of a delivery: a destination that accepts nothing is left alone for a while.

Closed: events are sent as they come. A window of which nothing was accepted, and nothing refused
for a reason of its own, makes it half-open: after a pause, longer each time, events are tried that
were not tried before. After so many such windows in a row it opens, and delivery stops. The next
delivery, after the writer has waited, begins half-open, with a single event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...retry import Backoff
from .contract import UNSENT, DeliveryOutcome, Reply

LONGEST_NAP = 2.0  # seconds; for longer waits delivery stops
MOST_REFUSALS = 20  # in a row; then it is the destination that refuses, and not the event


class BreakerOpened(NamedTuple):
    """The destination is not to be tried for longer than delivery itself waits."""

    reason: str
    retry_after: float  # seconds
    reached: bool  # whether it replied


@dataclass(slots=True)
class CircuitBreaker:
    """Tells a destination that fails from an event that fails."""

    schedule: Backoff
    attempts: int
    gives_up: bool = False  # patience is over: what fails is put aside, until one is accepted
    refusals: int = 0  # in a row, with nothing accepted between them
    defer: int = 0  # events to pass over before the first window
    paused_until: float = 0.0  # by the clock: nothing is sent before
    failures: int = 0  # windows in a row of which nothing was accepted

    @property
    def half_open(self) -> bool:
        """Whether events are tried that were not before, to see if these are accepted."""
        return bool(self.failures or self.defer)

    @property
    def blames_event(self) -> bool:
        """Whether a refusal is about the event: a destination may also refuse everything."""
        return self.gives_up or self.refusals < MOST_REFUSALS

    def defers(self) -> bool:
        """Whether to pass over the next event."""
        if not self.defer:
            return False
        self.defer -= 1
        return True

    def accepted(self) -> None:
        """Close it: the destination has accepted an event."""
        self.refusals, self.gives_up = 0, False
        self.close()

    def close(self) -> None:
        """Go on as usual: it is not the destination that fails."""
        self.failures, self.paused_until = 0, 0.0

    def fail(self, replies: Sequence[Reply], now: float) -> BreakerOpened | None:
        """Count a window of which nothing was accepted; None: the breaker does not open yet."""
        self.failures += 1
        retry_after = min((reply.retry_after for reply in replies), default=0.0)
        wait = max(self.schedule.wait(self.failures), retry_after)
        self.paused_until = now + wait
        if self.failures < self.attempts and wait <= LONGEST_NAP:
            return None
        sent = [reply for reply in replies if reply != UNSENT] or replies
        reached = any(reply.outcome is not DeliveryOutcome.UNREACHABLE for reply in sent)
        return BreakerOpened(sent[0].reason, wait, reached)
