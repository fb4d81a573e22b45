"""Exponential backoff."""

import random
from typing import NamedTuple


class Backoff(NamedTuple):
    """Waits that double up to a longest one, each a little longer or shorter at random."""

    first: float  # seconds
    longest: float
    jitter: float = 0.0  # 0.25: a quarter more or less

    def wait(self, failures: int) -> float:
        """Seconds until the next attempt, after so many failed ones."""
        # Not 2 ** failures: it would overflow after days of failures.
        plain = min(self.first * 2.0 ** min(failures - 1, 60), self.longest)
        return plain * random.uniform(1 - self.jitter, 1 + self.jitter)
