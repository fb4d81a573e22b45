"""Whether /health is right, judged by what was done to the parts and by what comes out of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

WRONG_SECONDS = 5.0  # so long it may be wrong
FRESH_SECONDS = 4.0  # a part that brought something so lately works


@dataclass
class Down:
    """Parts that are known to be down, and since when."""

    since: dict[str, float] = field(default_factory=dict)

    def begin(self, part: str) -> None:
        """It is down from now on."""
        self.since[part] = time.monotonic()

    def end(self, part: str) -> None:
        """It answers again."""
        self.since.pop(part, None)

    def longest(self) -> float:
        """How long the part has been down that is down for longest; 0: none is."""
        return max((time.monotonic() - at for at in self.since.values()), default=0.0)


class HealthJudge:
    """Asks /health twice a second, and writes down when it was wrong for too long."""

    def __init__(
        self, url: str, down: Down, flows: Callable[[], dict[str, float]], begun: float
    ) -> None:
        """`flows` says when (time.monotonic) each part last brought something new."""
        self._url = url
        self._down = down
        self._flows = flows
        self._begun = begun
        self._well_since: float | None = None  # everything has come out of every part
        self.history: list[tuple[float, str]] = []
        self.wrong: list[str] = []
        self._red_since: float | None = None

    def look(self) -> None:
        """Ask once."""
        status, reasons = self._asked()
        now = time.monotonic()
        if not self.history or self.history[-1][1] != status:
            self.history.append((now - self._begun, status))
        if status == "healthy" and self._down.longest() > WRONG_SECONDS:
            parts = ", ".join(self._down.since)
            self._note(now, f"healthy while down for {self._down.longest():.1f} s: {parts}")
        self._judge_red(now, status, reasons)

    def _judge_red(self, now: float, status: str, reasons: list[str]) -> None:
        fresh = all(now - at < FRESH_SECONDS for at in self._flows().values())
        if status in ("healthy", "") or self._down.since or not fresh:
            self._red_since = None
        elif self._red_since is None:
            self._red_since = now
        elif now - self._red_since > WRONG_SECONDS:
            self._note(now, f"{status} while everything arrives everywhere: {reasons}")

    def _note(self, now: float, what: str) -> None:
        self.wrong.append(f"{now - self._begun:.0f} s: {what}")

    def _asked(self) -> tuple[str, list[str]]:
        try:
            document = httpx.get(f"{self._url}/health", timeout=5).json()
        except httpx.HTTPError:
            return "", []
        pipeline = document.get("pipeline") or {"reasons": [], "sinks": []}
        parts = [*document["sources"], pipeline, *pipeline["sinks"], document["log"]]
        return document["status"], [reason for part in parts for reason in part["reasons"]]
