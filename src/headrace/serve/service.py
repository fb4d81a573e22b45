"""What every route stands on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol, Self

from litestar.connection import ASGIConnection

from ..config import ConfigDifference
from ..formats.catalogue import Formats
from ..log import Log, LogRetention
from ..sinks.report import PipelineOverview
from ..sinks.requests import Beginning
from ..sources import Status
from .feed import LogFeed
from .groups import Groups
from .health import HealthCheck
from .keyring import Keyring
from .measured import RequestCounts
from .origins import AllowedOrigins
from .retention import sink_holders
from .settings import ServerSettings
from .subscription import FeedPage


class PartKind(StrEnum):
    """What can be paused, resumed and reset."""

    SOURCE = "source"
    SINK = "sink"


class Control(Protocol):
    """What the process lets an operator do; every method may wait, so it is called in a thread."""

    def names(self, kind: PartKind) -> list[str]:
        """The sources or the sinks there are."""
        ...

    def sinks(self) -> PipelineOverview:
        """How the sinks are doing."""
        ...

    def pause(self, kind: PartKind, name: str) -> None:
        """Stop one source or sink, until it is resumed; it stays paused after a restart."""
        ...

    def resume(self, kind: PartKind, name: str) -> None:
        """Let one go on: after a pause, or once more after it has halted."""
        ...

    def reset(self, kind: PartKind, name: str, beginning: Beginning, *, dry_run: bool) -> str:
        """Let one begin again; returns what that does. A ConfigError: it cannot."""
        ...

    def reload(self, *, dry_run: bool) -> ConfigDifference:
        """Take up the config file as it is now. A ConfigError: it is wrong, and nothing changes."""
        ...


@dataclass
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
    control: Control | None = None  # set once the process captures; None: it only serves
    requests: RequestCounts = field(default_factory=RequestCounts)

    @cached_property
    def origins(self) -> AllowedOrigins:
        """Pages of other sites that may use the server."""
        return AllowedOrigins(self.settings.allowed_origins)

    @classmethod
    def of(cls, connection: ASGIConnection[Any, Any, Any, Any]) -> Self:
        """The one that the app of this request was made with."""
        service: Self = connection.app.state.service
        return service

    def take_up(self, settings: ServerSettings, formats: Formats) -> None:
        """Answer by other settings from now on; streams that are open stay as they are."""
        self.settings, self.formats = settings, formats
        self.health.take_up(settings)
        self.retention.take_up(
            settings.retention, lambda: sink_holders(self.log, settings.pipeline)
        )

    def headers(self, page: FeedPage, *, scanned: int | None = None) -> dict[str, str]:
        """What a reader must know of a page besides its changes."""
        headers = {
            "X-Headrace-Epoch": self.feed.epoch,
            "X-Headrace-Generation": self.feed.generation,
            "X-Headrace-Latest": str(self.log.latest_sequence),
            "X-Headrace-Scanned": str(page.scanned if scanned is None else scanned),
        }
        if page.gap:
            headers |= page.gap.headers
        return headers
