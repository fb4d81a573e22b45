"""The time, as delivery sees it and as a test moves it."""

from __future__ import annotations

import time
from typing import Protocol


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
