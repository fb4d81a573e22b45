"""A real NATS server with JetStream in a folder.

with NatsServer() as server:
    deliver(server.address)
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from .processes import ServerFailed, ServerProcess

HINT = "Run `scripts/setup.sh nats`, or install it (Debian: apt-get install nats-server)."

# Debian keeps the server where only root's path leads.
_FOLDERS = (*os.get_exec_path(), "/usr/sbin", "/usr/local/sbin")


def nats_program() -> str | None:
    """The server on this machine; None: there is none."""
    return shutil.which("nats-server", path=os.pathsep.join(_FOLDERS))


class NatsServer(ServerProcess):
    """A NATS server in a folder of its own."""

    def __init__(self, *, settings: str = "", jetstream: bool = True) -> None:
        """Describe it; `settings` are lines of the server's own configuration."""
        program = nats_program()
        if program is None:
            raise ServerFailed("nats-server is not installed", hint=HINT)
        super().__init__()
        self._program = program
        store = f'jetstream {{ store_dir: "{self.directory}" }}\n' if jetstream else ""
        self._settings = f'listen: "{self.address}"\n{store}{settings}\n'

    def command(self) -> list[str]:
        """NATS with its settings in a file."""
        file = Path(self.directory, "nats.conf")
        file.write_text(self._settings)
        return [self._program, "-c", os.fspath(file)]

    def answers(self) -> bool:
        """Whether it greets a client."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            return connection.recv(5) == b"INFO "
