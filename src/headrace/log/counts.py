"""What a log has taken since it was opened, counted by the run and not by the change."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter

from ..change.event import Op
from ..change.record import ChangeRun

# Seconds, from a fast disk to an outage.
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_READ = Op.READ.value
_TABLE_AND_OP = itemgetter(0, 1)


class Histogram:
    """How often something took how long; one thread observes, any may read."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0  # seconds

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count something that took so long; a clock that is ahead makes it 0."""
        seconds = max(seconds, 0.0)
        self._counts[bisect_left(BUCKETS, seconds)] += times
        self.total += seconds * times

    def buckets(self) -> Iterator[tuple[str, float]]:
        """The upper bound of each bucket, and how many were within it."""
        yield from zip(map(str, (*BUCKETS, "+Inf")), accumulate(self._counts), strict=True)


class AppendCounts:
    """Changes by version of a table and operation, and how long after the commit they were stored.

    Of a transaction that comes in several batches nothing counts before its end.
    """

    def __init__(self) -> None:
        self.changes: Counter[tuple[int, str]] = Counter()
        self.latency: dict[str, Histogram] = {}  # by source
        self._pending: list[ChangeRun] = []

    def take(self, source: str, runs: Iterable[ChangeRun], *, complete: bool) -> None:
        """Count what was written; `complete`: it is durable and visible."""
        self._pending.extend(runs)
        if not complete:
            return
        runs, self._pending = self._pending, []
        self._count(self.latency.setdefault(source, Histogram()), runs)

    def abandon(self) -> None:
        """Forget a transaction that does not end."""
        self._pending = []

    def _count(self, latency: Histogram, runs: Sequence[ChangeRun]) -> None:
        now, observe = time.time(), latency.observe
        for (table, op), group in groupby(runs, _TABLE_AND_OP):
            total = 0
            for _, _, commit_time, count in group:
                total += count
                # The rows of a snapshot have its time, and it may take hours.
                if op != _READ:
                    observe(now - commit_time / 1e6, count)
            self.changes[table, op] += total
