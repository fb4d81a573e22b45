"""A real RabbitMQ in a folder.

with RabbitmqServer() as server:
    deliver(server.address)
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from .processes import ServerFailed, ServerProcess, free_port, signalled_at_parent_death

HINT = "Run `scripts/setup.sh rabbitmq`, or install it (Debian: apt-get install rabbitmq-server)."

# Not /usr/sbin/rabbitmq-server: that one becomes the user rabbitmq, with the machine's own data.
_PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

# Starts soon and takes little of the machine.
DEFAULT_SETTINGS: Mapping[str, str] = {
    "disk_free_limit.absolute": "10MB",
    "log.console": "true",
    "log.console.level": "warning",
    "log.file": "false",
    "loopback_users": "none",
}


def rabbitmq_program() -> Path | None:
    """The server on this machine; None: there is none."""
    return _PROGRAM if _PROGRAM.exists() and shutil.which("epmd") else None


class RabbitmqServer(ServerProcess):
    """A RabbitMQ in a folder of its own; its user `guest` has the password `guest`."""

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        """Describe it; `settings` are the server's own, as in rabbitmq.conf."""
        program = rabbitmq_program()
        if program is None:
            raise ServerFailed("RabbitMQ is not installed", hint=HINT)
        super().__init__()
        self._program = program
        self._settings = {**DEFAULT_SETTINGS, **(settings or {})}
        self._between_nodes = free_port()
        self._names_port = free_port()
        self._names: subprocess.Popen[bytes] | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._names is not None:
            self._names.kill()
            self._names.wait()
            self._names = None

    def command(self) -> list[str]:
        """RabbitMQ with its settings in a file."""
        self._serve_names()
        lines = (f"{name} = {value}\n" for name, value in self._settings.items())
        (self.directory / "rabbitmq.conf").write_text("".join(lines))
        (self.directory / "plugins").write_text("[].\n")
        return [str(self._program)]

    def environment(self) -> dict[str, str]:
        """All that the machine's own RabbitMQ would have elsewhere."""
        return {
            "HOME": str(self.directory),  # the nodes' shared cookie is made there
            "ERL_EPMD_PORT": str(self._names_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_ALLOW_INPUT": "true",  # the script becomes the server
            "RABBITMQ_NODENAME": f"headrace{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._between_nodes),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"),
            "RABBITMQ_LOG_BASE": str(self.directory),
            "RABBITMQ_PID_FILE": str(self.directory / "server.pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput +sbwt none +S 2:2",
        }

    def answers(self) -> bool:
        """Whether it greets a client."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return connection.recv(1) == b"\x01"

    def _serve_names(self) -> None:
        """Erlang's names of nodes, which it would start itself and leave behind."""
        if self._names is None:
            self._names = subprocess.Popen(
                [*signalled_at_parent_death("KILL"), "epmd", "-port", str(self._names_port)],
                env={"ERL_EPMD_ADDRESS": "127.0.0.1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
