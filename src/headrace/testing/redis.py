"""A real Redis in a folder.

with RedisServer(settings={"maxmemory": "20mb"}) as server:
    deliver(server.address)
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping

from .processes import ServerFailed, ServerProcess

HINT = "Run `scripts/setup.sh redis`, or install it (Debian: apt-get install redis-server)."

# A killed server has what it acknowledged: it writes before it replies.
DEFAULT_SETTINGS: Mapping[str, str] = {"appendonly": "yes", "appendfsync": "no", "save": '""'}


def redis_program() -> str | None:
    """The server on this machine; None: there is none."""
    return shutil.which("redis-server")


class RedisServer(ServerProcess):
    """A Redis in a folder of its own."""

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        """Describe it; `settings` are the server's own, as in redis.conf."""
        program = redis_program()
        if program is None:
            raise ServerFailed("Redis is not installed", hint=HINT)
        super().__init__()
        own = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.directory)}
        self._program = program
        self._settings = {**DEFAULT_SETTINGS, **own, **(settings or {})}

    def command(self) -> list[str]:
        """Redis with its settings in a file."""
        file = self.directory / "redis.conf"
        # A name that is there more than once, such as `user`, ends in #1, #2, …
        lines = (f"{name.partition('#')[0]} {value}\n" for name, value in self._settings.items())
        file.write_text("".join(lines))
        return [self._program, os.fspath(file)]

    def answers(self) -> bool:
        """Whether it has read its data and replies, if only that it needs a password."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(100).startswith((b"+PONG", b"-NOAUTH"))
