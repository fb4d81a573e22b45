"""The keys that the server knows: read from the log once, changed only through it."""

import threading
import time
from collections.abc import Callable

import msgspec

from ..log import Log, keys
from ..log.keys import Key, Made, Wanted
from .limits import Limiter
from .live import Live


def _now() -> int:
    return time.time_ns() // 1000


class Keyring:
    """Every key of a log, and one of the operator's that is in no log."""

    def __init__(
        self, log: Log, *, operator: Key | None = None, clock: Callable[[], int] = _now
    ) -> None:
        """Read the keys; `clock` tells microseconds since 1970."""
        self.limiter = Limiter()
        self.live = Live(self.valid)
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

    def held(self, holder: str) -> bool:
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

    def create(self, wanted: Wanted) -> Made:
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

    def rotate(self, id: str, *, overlap: float) -> Made | None:
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
