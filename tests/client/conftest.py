"""A server that can be stopped and started again at the same place."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.keys import Made, Wanted
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.serve.service import Service
from tests.changes import Writer, opened_writer


class Place:
    """A log, and a server of it that comes and goes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.settings = ServerSettings(port=0, grpc_port=0)
        self.writer: Writer = stack.enter_context(opened_writer(folder / "log"))
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

    def require_key(self) -> Made:
        """Serve only those with a key; a new one comes back."""
        self.stop()
        self.settings = ServerSettings(port=0, grpc_port=0, require_key=True)
        self.start()
        return self.service.keyring.create(Wanted())

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
