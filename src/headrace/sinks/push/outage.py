"""Whether it is the destination that fails, and not an event: it is then left alone for a while.

A window of which nothing was accepted, nor refused for a reason of its own, is a silent one. After
each there is a pause, longer each time; after so many in a row the destination is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import UNSENT, Answer, Verdict
from .retry import Schedule

LONGEST_NAP = 2.0  # seconds; for longer waits delivery stops
MOST_REFUSALS = 20  # in a row; then it is the destination that refuses, and not the event


class Silence(NamedTuple):
    """That a destination is not to be asked for longer than delivery itself waits."""

    reason: str
    after: float  # seconds
    reached: bool  # whether it answered


@dataclass(slots=True)
class Outage:
    """What a delivery knows of a destination that takes nothing."""

    schedule: Schedule
    attempts: int
    gives_up: bool = False  # patience is over: what fails is put aside, until one is accepted
    refusals: int = 0  # in a row, with nothing accepted between them
    defer: int = 0  # events to pass over before the first window
    quiet: float = 0.0  # nothing is handed over before
    silent: int = 0  # windows in a row

    @property
    def doubted(self) -> bool:
        """Whether events are tried that were not before, to see if these are accepted."""
        return bool(self.silent or self.defer)

    @property
    def believed(self) -> bool:
        """Whether a refusal is the event's own: one that refuses all has another reason."""
        return self.gives_up or self.refusals < MOST_REFUSALS

    def defers(self) -> bool:
        """Whether to pass over the next event."""
        if not self.defer:
            return False
        self.defer -= 1
        return True

    def accepted(self) -> None:
        """Something was."""
        self.refusals, self.gives_up = 0, False
        self.over()

    def over(self) -> None:
        """It is not the destination that fails."""
        self.silent, self.quiet = 0, 0.0

    def fall_silent(self, verdicts: Sequence[Verdict], now: float) -> Silence | None:
        """A window was silent; returns whether to wait for the destination."""
        self.silent += 1
        after = min((verdict.after for verdict in verdicts), default=0.0)
        wait = max(self.schedule.wait(self.silent), after)
        self.quiet = now + wait
        if self.silent < self.attempts and wait <= LONGEST_NAP:
            return None
        said = [verdict for verdict in verdicts if verdict != UNSENT] or verdicts
        reached = any(verdict.answer is not Answer.UNREACHABLE for verdict in said)
        return Silence(said[0].reason, wait, reached)
