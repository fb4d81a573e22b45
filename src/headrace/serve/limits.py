"""How much a key may ask at once: connections, requests and events per second."""

import time
from collections.abc import Callable

from ..log.keys import Key

Clock = Callable[[], float]  # seconds that only grow


class Bucket:
    """So many a second on average; after a pause, a second's worth at once."""

    def __init__(self, rate: float, clock: Clock) -> None:
        self._rate = rate
        self._room = max(rate, 1.0)  # of a slow rate, one whole token must fit
        self._clock = clock
        self._level = self._room
        self._at = clock()

    def take(self, count: int = 1) -> None:
        """Take tokens, also those that are not there yet."""
        self._fill()
        self._level -= count

    def wait(self, count: int = 1) -> float:
        """Seconds until so many tokens are there."""
        self._fill()
        return max(min(count, self._room) - self._level, 0.0) / self._rate

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self._rate, self._room)
        self._at = now


class Limiter:
    """What every key has used of its limits."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._connections: dict[str, int] = {}
        self._requests: dict[str, Bucket] = {}
        self._events: dict[str, Bucket] = {}

    def connect(self, key: Key) -> bool:
        """Count a connection; False, and not counted, when the key has all it may have."""
        now = self._connections.get(key.id, 0)
        if key.limits.connections is not None and now >= key.limits.connections:
            return False
        self._connections[key.id] = now + 1
        return True

    def disconnect(self, key: Key) -> None:
        """A connection has ended."""
        self._connections[key.id] -= 1

    def request(self, key: Key) -> float:
        """Count a request; if it came too early, it is not counted: seconds until it may come."""
        bucket = self._bucket(self._requests, key, key.limits.requests_per_second)
        if bucket is None:
            return 0.0
        wait = bucket.wait()
        if not wait:
            bucket.take()
        return wait

    def spend(self, key: Key, events: int) -> float:
        """Count events that were sent; seconds until more may be sent."""
        bucket = self._bucket(self._events, key, key.limits.events_per_second)
        if bucket is None:
            return 0.0
        bucket.take(events)
        # What was sent in one go is paid for before the next.
        return bucket.wait(1)

    def _bucket(self, buckets: dict[str, Bucket], key: Key, rate: float | None) -> Bucket | None:
        if rate is None:
            return None
        bucket = buckets.get(key.id)
        if bucket is None:
            bucket = buckets[key.id] = Bucket(rate, self._clock)
        return bucket
