"""A real MariaDB in a folder, and fresh databases in it.

with MariadbServer() as server, server.database() as database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    capture(database.url)
"""

import atexit
import functools
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote
from uuid import uuid4

import pymysql
from pymysql.constants import CLIENT

from ..errors import HeadraceError
from .processes import dies_with_us, free_port, temporary_directory, wait_until

Setting = str | int | bool

# Debian keeps the server where only root's path leads.
_FOLDERS = (*os.get_exec_path(), "/usr/sbin", "/usr/local/sbin", "/usr/local/mysql/bin")
_STOP_SIGNALS = {"fast": signal.SIGTERM, "immediate": signal.SIGKILL}

DEFAULT_SETTINGS: Mapping[str, Setting] = {
    "bind_address": "127.0.0.1",
    "server_id": 1,
    "log_bin": "mysql-bin",
    "binlog_format": "ROW",
    "binlog_row_metadata": "FULL",
    # A killed server loses nothing without fsync; only a killed machine does.
    "innodb_flush_log_at_trx_commit": 2,
    "sync_binlog": 0,
    "innodb_buffer_pool_size": "32M",
    "innodb_log_file_size": "64M",
    "performance_schema": False,
    "skip_name_resolve": True,
}


class MariadbFailed(HeadraceError):
    """A MariaDB server of the test kit does not start or stop."""


@dataclass(frozen=True, slots=True)
class MariadbInstall:
    """The programs of a MariaDB on this machine."""

    version: str
    server: Path  # mariadbd
    create: Path  # mariadb-install-db
    binlog: Path | None  # mariadb-binlog


@functools.cache
def mariadb_install() -> MariadbInstall | None:
    """The MariaDB on this machine; None: there is none."""
    server, create = _program("mariadbd"), _program("mariadb-install-db")
    if server is None or create is None:
        return None
    # mariadbd  Ver 10.11.19-MariaDB-0+deb12u1 for debian-linux-gnu on x86_64 (Debian 12)
    words = subprocess.check_output([server, "--no-defaults", "--version"], text=True).split()
    return MariadbInstall(words[2].partition("-")[0], server, create, _program("mariadb-binlog"))


def _program(name: str) -> Path | None:
    found = shutil.which(name, path=os.pathsep.join(_FOLDERS))
    return None if found is None else Path(found)


def _identity() -> dict[str, Any]:
    """The arguments that make `subprocess` run a program as a user who is not root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("mysql") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


class MariadbServer:
    """A MariaDB server in a folder of its own; nothing of it outlives this process."""

    def __init__(
        self, directory: Path | None = None, *, settings: Mapping[str, Setting] | None = None
    ) -> None:
        """Describe the server; without `directory` it lives in a temporary one.

        `start()` on a directory that already holds a server goes on with that server's data.
        """
        install = mariadb_install()
        if install is None:
            raise MariadbFailed(
                "MariaDB is not installed", hint="Debian: apt-get install mariadb-server"
            )
        self.install = install
        self.directory = directory or temporary_directory()
        self.settings = {**DEFAULT_SETTINGS, **(settings or {})}
        self.port = int(self.settings.setdefault("port", free_port()))
        self._temporary = directory is None
        self._identity = _identity()
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<MariaDB {self.install.version} port={self.port} directory={self.directory}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop("immediate" if self._temporary else "fast")
        if self._temporary:
            shutil.rmtree(self.directory)

    @property
    def data(self) -> Path:
        """The server's data directory; its binary log is there too."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        """The file the server writes its messages to."""
        return self.directory / "server.log"

    @property
    def running(self) -> bool:
        """Whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int:
        """The number of the server's process."""
        if self._process is None:
            raise MariadbFailed(f"{self!r} does not run")
        return self._process.pid

    def url(self, database: str = "") -> str:
        """The address, as a source's `url` has it."""
        return f"mysql://root@127.0.0.1:{self.port}/{quote(database)}"

    def start(self) -> None:
        """Start the server and return when it accepts connections."""
        if self.running:
            raise MariadbFailed(f"{self!r} already runs")
        if not (self.data / "mysql").exists():
            self._create()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*dies_with_us("KILL"), *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for us: we stop the server, in our order
                **self._identity,
            )
        _started.add(self)
        wait_until(self._ready, timeout=60, message=f"{self!r} accepts connections")

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server: in order, or (`immediate`) as if it crashed."""
        if self._process is not None:
            self._process.send_signal(_STOP_SIGNALS[mode])
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired as error:
                self._process.kill()
                self._process.wait()
                raise MariadbFailed(f"{self!r} did not stop within 60 s and was killed") from error
        self._forget()

    def kill(self) -> None:
        """End the server at once, as a power cut would."""
        self.stop("immediate")

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server if it runs, and start it on the same port with the same data."""
        self.stop(mode)
        self.start()

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run statements on a connection of their own, outside of any database."""
        return MariadbDatabase(self, "").execute(statement, *parameters)

    @contextmanager
    def database(self) -> Iterator["MariadbDatabase"]:
        """A new, empty database, dropped at the end."""
        database = MariadbDatabase(self, f"test_{uuid4().hex[:12]}")
        self.execute(f"CREATE DATABASE {database.name} CHARACTER SET utf8mb4")
        try:
            yield database
        finally:
            if self.running:
                self.execute(f"DROP DATABASE IF EXISTS {database.name}")

    def _command(self) -> list[str | Path]:
        given = {"datadir": str(self.data), "socket": self._socket(), "pid_file": "server.pid"}
        settings = {**given, **self.settings}
        options = [f"--{name}={_setting(value)}" for name, value in settings.items()]
        return [self.install.server, "--no-defaults", *options]

    def _create(self) -> None:
        if self._identity:
            os.chown(self.directory, self._identity["user"], self._identity["group"])
        result = subprocess.run(
            [
                self.install.create,
                "--no-defaults",
                f"--datadir={self.data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            ],
            capture_output=True,
            check=False,
            text=True,
            cwd=self.directory,
            env=self._environment,
            **self._identity,
        )
        if result.returncode:
            said = (result.stderr or result.stdout).strip()
            raise MariadbFailed(
                f"mariadb-install-db in {self.directory} failed: {said}",
                hint="Every folder above it must be open to the user that runs MariaDB.",
            )

    @property
    def _environment(self) -> dict[str, str]:
        # Our own folder for temporary files may be closed to the user that runs the server.
        return {**os.environ, "TMPDIR": str(self.directory)}

    def _socket(self) -> str:
        # The system allows about a hundred bytes for a socket's path; then another place is chosen.
        own = self.directory / "server.sock"
        return str(own) if len(os.fsencode(own)) < 100 else f"/tmp/headrace-{self.port}.sock"

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            self._forget()
            last_lines = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
            raise MariadbFailed(f"{self!r} did not start; its last messages:\n{last_lines}")
        with suppress(pymysql.err.OperationalError):
            self.execute("SELECT 1")
            return True
        return False

    def _forget(self) -> None:
        self._process = None
        _started.discard(self)


@dataclass(frozen=True, slots=True)
class MariadbDatabase:
    """One database of a server."""

    server: MariadbServer
    name: str

    @property
    def url(self) -> str:
        """The database's address, as a source's `url` has it."""
        return self.server.url(self.name)

    def connect(self, **options: Any) -> pymysql.Connection:
        """A new connection, in autocommit mode unless `options` say otherwise."""
        given = {
            "host": "127.0.0.1",
            "port": self.server.port,
            "user": "root",
            "database": self.name or None,
            "autocommit": True,
            "client_flag": CLIENT.MULTI_STATEMENTS,
        }
        return pymysql.connect(**{**given, **options})

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run statements on a connection of their own and return the rows of the last."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            rows = list(cursor.fetchall())
            while cursor.nextset():
                rows = list(cursor.fetchall())
            return rows


_started: set[MariadbServer] = set()


@atexit.register
def _end_all() -> None:
    """A server that a program forgot to stop does not outlive it."""
    for server in list(_started):
        server.kill()


def _setting(value: Setting) -> str:
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value)
