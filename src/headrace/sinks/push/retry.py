"""How long to wait before trying again, and the time itself."""

from __future__ import annotations

import random
import time
from typing import NamedTuple, Protocol


class RetrySchedule(NamedTuple):
    """Exponential backoff with jitter: waits double up to a longest one."""

    first: float  # seconds
    longest: float
    jitter: float = 0.0

    def wait(self, failures: int) -> float:
        """Seconds until the next try, after so many failed ones."""
        # Not 2 ** failures: it would overflow after days of retries.
        plain = min(self.first * 2.0 ** min(failures - 1, 60), self.longest)
        return plain * random.uniform(1 - self.jitter, 1 + self.jitter)


class DeliveryClock(Protocol):
    """The clock of a delivery; tests move it by hand."""

    def now(self) -> float:
        """Seconds."""
        ...

    def wall(self) -> float:
        """Seconds since 1970."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
