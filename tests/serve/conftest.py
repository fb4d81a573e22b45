"""A real server over a real log, asked over real HTTP."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.formats.catalogue import Formats
from headrace.log.keys import KeyRequest
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.serve.feed import LogFeed
from headrace.serve.service import Service
from headrace.sources import Phase, Status
from headrace.testing import wait_until
from tests.changes import Writer, opened_writer


class Site:
    """A server, the log behind it, and a client."""

    def __init__(
        self,
        writer: Writer,
        settings: ServerSettings,
        stack: ExitStack,
        formats: Formats | None = None,
    ) -> None:
        self.writer = writer
        self.log = writer.log
        self.settings = settings
        self.statuses: list[Status] = []
        self.copies: list[tuple[str, list[str]]] = []
        self.copy_error: Exception | None = None  # what copying again fails with
        app = create_app(
            writer.log,
            statuses=lambda: self.statuses,
            copy_again=self._copy_again,
            settings=settings,
            formats=formats,
        )
        self.service: Service = app.state.service
        self.feed: LogFeed = self.service.feed
        self.server = stack.enter_context(BackgroundServer(app, settings))
        self.url = self.server.url
        self.http = stack.enter_context(httpx.Client(base_url=self.url, timeout=30))

    def _copy_again(self, source: str, tables: list[str]) -> None:
        if self.copy_error:
            raise self.copy_error
        self.copies.append((source, tables))

    @property
    def address(self) -> tuple[str, int]:
        """Where a socket connects."""
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def get(self, path: str, **parameters: object) -> httpx.Response:
        """What a good request is answered."""
        given = {name: str(value) for name, value in parameters.items()}
        response = self.http.get(path, params=given)
        assert response.status_code == 200, response.text
        return response

    def key(self, **wanted: Any) -> dict[str, str]:
        """The header of a new API key."""
        return {"X-API-Key": self.service.keyring.create(KeyRequest(**wanted)).secret}

    def await_waiting(self, count: int = 1) -> None:
        """Return once so many subscriptions wait for a change."""
        wait_until(
            lambda: self.feed.waiting >= count, message=f"{count} subscriptions wait for a change"
        )


class Sites:
    """Starts servers for a test, each on a log of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._started = 0

    def __call__(
        self, settings: ServerSettings | None = None, *, formats: Formats | None = None
    ) -> Site:
        self._started += 1
        folder = self._folder / f"log-{self._started}"
        writer = self._stack.enter_context(opened_writer(folder))
        return Site(writer, settings or ServerSettings(port=0), self._stack, formats)


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    """Starts servers with settings of the test's own."""
    with ExitStack() as stack:
        yield Sites(tmp_path, stack)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One server over five changes, for tests that change nothing."""
    with ExitStack() as stack:
        writer = stack.enter_context(opened_writer(tmp_path_factory.mktemp("shared")))
        # The source in its list never says anything, which must not make it unhealthy.
        site = Site(writer, ServerSettings(port=0, stall_seconds=86_400.0), stack)
        site.statuses = [Status(source="shop", phase=Phase.STREAMING)]
        writer.put_many("users", 5)
        yield site


@pytest.fixture
def site(sites: Sites) -> Site:
    """A server over an empty log."""
    return sites()
