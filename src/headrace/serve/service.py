"""What every route stands on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from litestar.connection import ASGIConnection

from ..formats.catalogue import Formats
from ..log import Log, LogRetention
from ..sources import Status
from .feed import LogFeed
from .groups import Groups
from .health import HealthCheck
from .keyring import Keyring
from .settings import ServerSettings
from .subscription import FeedPage


@dataclass(frozen=True)
class Service:
    """The log, the way to read it, and what the process knows of its sources."""

    log: Log
    retention: LogRetention
    feed: LogFeed
    statuses: Callable[[], list[Status]]
    copy_again: Callable[[str, list[str]], None] | None  # None: this process captures nothing
    settings: ServerSettings
    health: HealthCheck
    formats: Formats
    keyring: Keyring
    groups: Groups

    @classmethod
    def of(cls, connection: ASGIConnection[Any, Any, Any, Any]) -> Self:
        """The one that the app of this request was made with."""
        service: Self = connection.app.state.service
        return service

    def headers(self, page: FeedPage, *, scanned: int | None = None) -> dict[str, str]:
        """What a reader must know of a page besides its changes."""
        headers = {
            "X-Headrace-Epoch": self.feed.epoch,
            "X-Headrace-Latest": str(self.log.latest_sequence),
            "X-Headrace-Scanned": str(page.scanned if scanned is None else scanned),
        }
        if page.gap:
            headers |= page.gap.headers
        return headers
