"""The API keys that the server knows, what each has used of its limits, and its connections."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from ..log import Log, keys
from ..log.keys import IssuedKey, Key, KeyRequest

LOOK_SECONDS = 0.5  # between two looks at the keys of those who are connected

End = Callable[[], None]
Seconds = Callable[[], float]  # that only grow


def _now() -> int:
    return time.time_ns() // 1000


class Keyring:
    """Every key of a log, read once and changed only through it, and an operator's own."""

    def __init__(
        self, log: Log, *, operator: Key | None = None, clock: Callable[[], int] = _now
    ) -> None:
        """Read the keys; `clock` returns microseconds since 1970."""
        self.limiter = Limiter()
        self.connections = KeyConnections(self.valid)
        self._log = log
        self._changing = threading.Lock()  # or a rotation could bring a revoked key back
        self._clock = clock
        stored = log.keys()
        self._kept = {key.id: key for key in stored}
        self._by_hash = {key.hash: key for key in stored}
        self._by_holder: dict[str, dict[str, Key]] = {}
        for key in stored:
            self._by_holder.setdefault(key.holder, {})[key.id] = key
        if operator is not None:
            self._by_hash[operator.hash] = operator
            self._by_holder[operator.holder] = {operator.id: operator}

    def find(self, secret: str) -> Key | None:
        """The valid key that this is; None whatever is wrong with it."""
        return keys.find(self._by_hash, secret, now=self._clock())

    def valid(self, key: Key) -> bool:
        """Whether a key that was found earlier still opens anything."""
        return self._by_hash[key.hash].valid(self._clock())

    def holds_valid_key(self, holder: str) -> bool:
        """Whether a holder still has a valid key: the first one, or one it was rotated to."""
        now = self._clock()
        return any(key.valid(now) for key in list(self._by_holder.get(holder, {}).values()))

    def all(self) -> list[Key]:
        """Every key of the log, also those that have ended, oldest first."""
        return sorted(self._kept.values(), key=lambda key: (key.created_at, key.id))

    @property
    def usable(self) -> bool:
        """Whether the log has a key that opens anything now."""
        now = self._clock()
        return any(key.valid(now) for key in self._kept.values())

    def create(self, wanted: KeyRequest) -> IssuedKey:
        """Make a key; it is durable when this returns."""
        made = keys.make(wanted, now=self._clock())
        self._put(made.key)
        return made

    def revoke(self, id: str) -> Key | None:
        """End a key now, and the streams that live by it; None: there is none of this id."""
        with self._changing:
            key = self._kept.get(id)
            if key is None or key.revoked_at is not None:
                return key
            revoked = msgspec.structs.replace(key, revoked_at=self._clock())
            self._put(revoked)
        return revoked

    def rotate(self, id: str, *, overlap: float) -> IssuedKey | None:
        """A new key with the rights of a valid one, which ends after `overlap` seconds."""
        with self._changing:
            now = self._clock()
            key = self._kept.get(id)
            if key is None or not key.valid(now):
                return None
            made, ending = keys.rotate(key, overlap=overlap, now=now)
            # The new one first: whatever happens between the two, somebody holds a valid key.
            self._put(made.key)
            self._put(ending)
        return made

    def _put(self, key: Key) -> None:
        self._log.put_key(key)  # durable first
        self._kept[key.id] = self._by_hash[key.hash] = key
        self._by_holder.setdefault(key.holder, {})[key.id] = key


# --- limits and connections ----------------------------------------------------------------------


class Bucket:
    """So many a second on average; after a pause, a second's worth at once."""

    def __init__(self, rate: float, clock: Seconds) -> None:
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

    def __init__(self, clock: Seconds = time.monotonic) -> None:
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


class KeyConnections:
    """The connections of each key; all of it on one event loop.

    A connection ends with its key, also where the client takes nothing.
    """

    def __init__(self, valid: Callable[[Key], bool]) -> None:
        self._valid = valid
        self._ends: dict[str, Counter[End]] = {}
        self._keys: dict[str, Key] = {}
        self._looking: asyncio.TimerHandle | None = None

    def enter(self, key: Key, end: End) -> None:
        """Call `end`, at every look, from when the key has ended until `leave`."""
        self._ends.setdefault(key.id, Counter())[end] += 1
        self._keys[key.id] = key
        if self._looking is None:
            self._look_later()

    def holds(self, key: Key, end: End) -> bool:
        """Whether a connection with this `end` has entered and not left."""
        return end in self._ends.get(key.id, ())

    def leave(self, key: Key, end: End) -> None:
        """The connection has ended."""
        ends = self._ends[key.id]
        ends[end] -= 1
        if not ends[end]:
            del ends[end]
        if not ends:
            del self._ends[key.id], self._keys[key.id]
        if not self._ends and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        # That every connection looks by itself would keep a core busy.
        self._look_later()
        ended = [id for id, key in self._keys.items() if not self._valid(key)]
        for end in [end for id in ended for end in self._ends[id]]:
            end()
