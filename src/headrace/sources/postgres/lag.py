"""How far the log is behind a PostgreSQL server: only what is of this source counts.

The server's log also has what other databases and other tables write. What of it is ours shows
only once the server has read it: it then sends it, or reports that it has come this far.
"""

from __future__ import annotations

import threading
from collections import deque

_LOOKS = 64


class WalLag:
    """What the log may lack, and since when; may be used from any thread."""

    def __init__(self, position: int) -> None:
        self._lock = threading.Lock()
        self._stored = position
        self._end = position  # of the server's log, as far as is known
        self._sent = position  # of ours, the server has sent all before
        self._looks: deque[tuple[int, float]] = deque()  # ends beyond that, and when
        self._unstored: deque[tuple[int, float]] = deque()  # transactions: their end, their commit
        self._begun = 0.0  # commit time of a transaction that was handed over in part

    def looked(self, end: int, now: float) -> None:
        """The server's log reaches to `end` now."""
        with self._lock:
            self._end = max(self._end, end)
            if end > self._sent and len(self._looks) < _LOOKS:
                self._looks.append((end, now))

    def sent(self, position: int) -> None:
        """The server has sent everything of ours before `position`."""
        with self._lock:
            self._end = max(self._end, position)
            self._sent = max(self._sent, position)
            while self._looks and self._looks[0][0] <= self._sent:
                self._looks.popleft()

    def received(self, position: int | None, commit_time: float) -> None:
        """Changes were handed over to the log; None: their transaction goes on."""
        with self._lock:
            self._begun = self._begun or commit_time
            if position is not None:
                self._unstored.append((position, self._begun))
                self._begun = 0.0

    def stored(self, position: int) -> None:
        """The log has everything of ours before `position`."""
        with self._lock:
            self._stored = max(self._stored, position)
            while self._unstored and self._unstored[0][0] <= position:
                self._unstored.popleft()

    @property
    def foreign(self) -> bool:
        """Whether the server's log goes on after the position that the log has."""
        return self._end > self._stored

    def now(self, now: float) -> tuple[int, float]:
        """Bytes of the server's log, and seconds, that the log is behind; zeros: it has all."""
        with self._lock:
            since = [self._begun] if self._begun else []
            since += [at for _, at in (*list(self._unstored)[:1], *list(self._looks)[:1])]
            if not since:
                return 0, 0.0
            return max(self._end - self._stored, 0), max(now - min(since), 0.0)
