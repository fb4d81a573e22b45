"""How fast a snapshot may read: `snapshot_rows_per_second`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RowPace:
    """Lets a snapshot read no more than so many rows a second; may be used from any thread."""

    def __init__(
        self, rows_per_second: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Without a limit nothing ever waits."""
        self._rate = rows_per_second
        self._clock = clock
        self._free = 0.0  # when the rows that were taken so far are paid for
        self._lock = threading.Lock()

    def piece(self, most: int) -> int:
        """How many rows to read at once: what one second allows, and at most `most`."""
        return most if self._rate is None else min(most, self._rate)

    def delay(self, rows: int) -> float:
        """Seconds to wait before rows that have been read are handed over, and more are read."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._free = max(self._free, now) + rows / self._rate
            return self._free - now
