"""How long to wait before trying again."""

from __future__ import annotations

import random
from typing import NamedTuple


class Schedule(NamedTuple):
    """Waits that double up to a longest one, each a little longer or shorter at random."""

    first: float  # seconds
    longest: float
    jitter: float = 0.0

    def wait(self, failures: int) -> float:
        """Seconds until the next try, after so many failed ones."""
        # Not 2 ** failures: it would overflow for somebody who waits for days.
        plain = min(self.first * 2.0 ** min(failures - 1, 60), self.longest)
        return plain * random.uniform(1 - self.jitter, 1 + self.jitter)
