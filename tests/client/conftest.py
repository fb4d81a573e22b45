"""A server that can be stopped and started again at the same place, and clients of both kinds."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.client import AsyncClient, Client, Event
from headrace.log.keys import IssuedKey, KeyRequest
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.serve.service import Service
from tests.changes import Writer, opened_writer

Sleep = Callable[[float], None]


class Place:
    """A log, and a server of it that comes and goes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.settings = ServerSettings(port=0, grpc_port=0)
        self._logs = stack.enter_context(ExitStack())
        self.writer: Writer = self._logs.enter_context(opened_writer(folder / "log"))
        self.service: Service
        self._server: BackgroundServer | None = None
        stack.callback(self.stop)

    def start(self) -> None:
        """Serve, at the port of the first time."""
        app = create_app(self.writer.log, statuses=list, copy_again=None, settings=self.settings)
        self.service = app.state.service
        server = BackgroundServer(app, self.settings)
        server.__enter__()
        self._server, self.url, self.grpc = server, server.url, server.grpc_target
        ports = [int(where.rpartition(":")[2]) for where in (self.url, self.grpc)]
        self.settings = ServerSettings(
            port=ports[0], grpc_port=ports[1], require_key=self.settings.require_key
        )

    def stop(self) -> None:
        """Let every client go."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def reopen_log(self) -> None:
        """Serve the same log, as another process."""
        self.stop()
        self._logs.close()
        numbers = self.writer._numbers  # ids that came before would be left out
        self.writer = self._logs.enter_context(opened_writer(self._folder / "log"))
        self.writer._numbers = numbers
        self.start()

    def require_key(self) -> IssuedKey:
        """Serve only those with a key; a new one comes back."""
        self.stop()
        self.settings = ServerSettings(port=0, grpc_port=0, require_key=True)
        self.start()
        return self.service.keyring.create(KeyRequest())

    def replace_log(self) -> None:
        """Serve another log, as after a disk was lost."""
        self.stop()
        self.writer = self._stack.enter_context(opened_writer(self._folder / "another"))
        self.start()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A server over an empty log."""
    with ExitStack() as stack:
        place = Place(tmp_path, stack)
        place.start()
        yield place


class Both:
    """The asynchronous client as a plain one, so that each test is for both."""

    def __init__(self, url: str, key: str | None = None, *, grpc: str, sleep: Sleep) -> None:
        async def slept(seconds: float) -> None:
            await asyncio.to_thread(sleep, seconds)

        self._runner = asyncio.Runner()
        self._open: list[Generator[Event, None, None]] = []
        self._client = AsyncClient(url, key, grpc=grpc, sleep=slept)

    def changes(self, *tables: Any, **options: Any) -> Iterator[Event]:
        events = self._following(self._client.changes(*tables, **options))
        self._open.append(events)
        return events

    def _following(self, events: AsyncIterator[Event]) -> Generator[Event, None, None]:

        async def following(events: AsyncIterator[Event]) -> Event:
            return await anext(events)

        try:
            while True:
                yield self._runner.run(following(events))
        finally:
            closing: Any = events
            self._runner.run(closing.aclose())

    def ack(self, cursor: str, event: Event | int) -> None:
        self._runner.run(self._client.ack(cursor, event))

    def close(self) -> None:
        for events in self._open:
            events.close()
        self._runner.close()


class Clients:
    """Makes clients of one kind, whose sleep only notes the seconds and does what is scripted."""

    def __init__(self, place: Place, kind: str) -> None:
        self._place = place
        self._kind = kind
        self._made: list[Both] = []
        self.slept: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None

    def __call__(self, key: str | None = None) -> Any:
        url, grpc = self._place.url, self._place.grpc
        if self._kind == "sync":
            return Client(url, key, grpc=grpc, sleep=self._sleep)
        self._made.append(Both(url, key, grpc=grpc, sleep=self._sleep))
        return self._made[-1]

    def close(self) -> None:
        for client in self._made:
            client.close()

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.on_sleep()


@pytest.fixture(params=["sync", "async"])
def clients(place: Place, request: pytest.FixtureRequest) -> Iterator[Clients]:
    clients = Clients(place, request.param)
    yield clients
    clients.close()


def take(events: Iterator[Event], count: int) -> list[int]:
    return [event.sequence for event in itertools.islice(events, count)]
