"""A real MySQL in a folder, and fresh databases in it.

with MysqlServer() as server, server.database() as database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    capture(database.url)

`HEADRACE_MYSQLD` names the server's program, or several of them; else it is looked for where
programs are. `headrace.testing.mariadb` starts a MariaDB, which is the same to whoever uses it.
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
from typing import Any, ClassVar, Literal, Self
from urllib.parse import quote
from uuid import uuid4

import pymysql
from pymysql.constants import CLIENT

from ..errors import HeadraceError
from .processes import dies_with_us, free_port, temporary_directory, wait_until

Setting = str | int | bool
ENVIRONMENT = "HEADRACE_MYSQLD"

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
    "performance_schema": False,
}


class ServerFailed(HeadraceError):
    """A MySQL or MariaDB server of the test kit does not start or stop."""


@dataclass(frozen=True, slots=True)
class MysqlInstall:
    """The programs of a MySQL on this machine."""

    version: str
    server: Path  # mysqld
    binlog: Path | None  # mysqlbinlog

    product: ClassVar[str] = "MySQL"
    settings: ClassVar[Mapping[str, Setting]] = {
        "enforce_gtid_consistency": True,
        "gtid_mode": True,
        # It need not outlive the machine.
        "innodb_doublewrite": False,
        "innodb_flush_method": "nosync",
        "innodb_redo_log_capacity": "64M",
        "mysqlx": False,
        "secure_file_priv": "NULL",  # else a folder that packages make
    }

    @property
    def numbers(self) -> tuple[int, int]:
        """The version, to compare."""
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)

    def create(self, directory: Path) -> None:
        """Make the data of a new server, whose administrator has no password."""
        # It takes many seconds, so it is done once. Nobody may have the name of another server.
        data = directory / "data"
        shutil.copytree(_made(self), data, ignore=shutil.ignore_patterns("auto.cnf"))
        identity = process_identity()
        for path in (data, *data.rglob("*")) if identity else ():
            os.chown(path, identity["user"], identity["group"])


@functools.cache
def mysql_installs() -> tuple[MysqlInstall, ...]:
    """Every MySQL on this machine that is known of."""
    named = os.environ.get(ENVIRONMENT, "")
    servers = [Path(each) for each in named.split(os.pathsep) if each]
    servers = servers or [found for found in [program("mysqld")] if found is not None]
    return tuple(found for server in servers if (found := _install(server)) is not None)


def _install(server: Path) -> MysqlInstall | None:
    # mysqld  Ver 8.0.46-0ubuntu0.24.04.5 for Linux on x86_64 ((Ubuntu))
    said = subprocess.check_output([server, "--no-defaults", "--version"], text=True)
    if "MariaDB" in said:
        return None  # which has the program under its old name too
    version = said.split(" Ver ")[1].split()[0].partition("-")[0]
    return MysqlInstall(version, server, program("mysqlbinlog"))


@functools.cache
def _made(install: MysqlInstall) -> Path:
    """The data of a server that was never started."""
    directory = temporary_directory()
    data = directory / "data"
    made_by(
        [
            install.server,
            "--no-defaults",
            "--initialize-insecure",
            f"--datadir={data}",
            "--skip-log-bin",
            "--innodb-doublewrite=OFF",
            "--innodb-flush-method=nosync",
            "--innodb-redo-log-capacity=64M",
        ],
        directory,
    )
    return data


def program(name: str) -> Path | None:
    """A program of this machine."""
    found = shutil.which(name, path=os.pathsep.join(_FOLDERS))
    return None if found is None else Path(found)


def process_identity() -> dict[str, Any]:
    """The arguments that make `subprocess` run a program as a user who is not root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("mysql") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def made_by(command: list[str | Path], directory: Path) -> None:
    """Run the program that makes the data of a new server below a folder."""
    identity = process_identity()
    if identity:
        os.chown(directory, identity["user"], identity["group"])
    result = subprocess.run(
        command,
        capture_output=True,
        check=False,
        text=True,
        cwd=directory,
        env=_environment(directory),
        **identity,
    )
    if result.returncode:
        said = (result.stderr or result.stdout).strip()
        raise ServerFailed(
            f"{Path(command[0]).name} in {directory} failed: {said}",
            hint="Every folder above it must be open to the user that runs the server.",
        )


def _environment(directory: Path) -> dict[str, str]:
    # Our own folder for temporary files may be closed to the user that runs the server.
    return {**os.environ, "TMPDIR": str(directory)}


class MysqlServer:
    """A MySQL server in a folder of its own; nothing of it outlives this process."""

    install: MysqlInstall

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settings: Mapping[str, Setting] | None = None,
        install: MysqlInstall | None = None,
    ) -> None:
        """Describe the server; without `directory` it lives in a temporary one.

        `start()` on a directory that already holds a server goes on with that server's data.
        """
        self.install = install or self.found()
        self.directory = directory or temporary_directory()
        self.settings = {**DEFAULT_SETTINGS, **self.install.settings, **(settings or {})}
        self.port = int(self.settings.setdefault("port", free_port()))
        self._temporary = directory is None
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def found(cls) -> MysqlInstall:
        """The install to take where none is given."""
        installs = mysql_installs()
        if not installs:
            raise ServerFailed(
                "MySQL is not installed", hint=f"Set {ENVIRONMENT} to where its mysqld is."
            )
        return installs[0]

    def __repr__(self) -> str:
        product, version = self.install.product, self.install.version
        return f"<{product} {version} port={self.port} directory={self.directory}>"

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
            raise ServerFailed(f"{self!r} does not run")
        return self._process.pid

    @property
    def mariadb(self) -> bool:
        """Whether it is a MariaDB."""
        return self.install.product == "MariaDB"

    @property
    def end(self) -> tuple[str, int]:
        """Where the binary log ends now: the file, and the position in it."""
        newer = not self.mariadb and self.install.numbers >= (8, 4)
        statement = "SHOW BINARY LOG STATUS" if newer else "SHOW MASTER STATUS"
        file, position, *_ = self.execute(statement)[0]
        return str(file), int(position)

    def url(self, database: str = "") -> str:
        """The address, as a source's `url` has it."""
        return f"mysql://root@127.0.0.1:{self.port}/{quote(database)}"

    def start(self) -> None:
        """Start the server and return when it accepts connections."""
        if self.running:
            raise ServerFailed(f"{self!r} already runs")
        if not (self.data / "mysql").exists():
            self._create()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*dies_with_us("KILL"), *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=_environment(self.directory),
                start_new_session=True,  # Ctrl-C is for us: we stop the server, in our order
                **process_identity(),
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
                raise ServerFailed(f"{self!r} did not stop within 60 s and was killed") from error
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
        return MysqlDatabase(self, "").execute(statement, *parameters)

    @contextmanager
    def database(self) -> Iterator["MysqlDatabase"]:
        """A new, empty database, dropped at the end."""
        database = MysqlDatabase(self, f"test_{uuid4().hex[:12]}")
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
        identity = process_identity()
        if identity:
            os.chown(self.directory, identity["user"], identity["group"])
        self.install.create(self.directory)

    def _socket(self) -> str:
        # The system allows about a hundred bytes for a socket's path; then another place is chosen.
        own = self.directory / "server.sock"
        return str(own) if len(os.fsencode(own)) < 100 else f"/tmp/headrace-{self.port}.sock"

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            self._forget()
            last_lines = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
            raise ServerFailed(f"{self!r} did not start; its last messages:\n{last_lines}")
        with suppress(pymysql.err.OperationalError):
            self.execute("SELECT 1")
            return True
        return False

    def _forget(self) -> None:
        self._process = None
        _started.discard(self)


@dataclass(frozen=True, slots=True)
class MysqlDatabase:
    """One database of a server."""

    server: MysqlServer
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


_started: set[MysqlServer] = set()


@atexit.register
def _end_all() -> None:
    """A server that a program forgot to stop does not outlive it."""
    for server in list(_started):
        server.kill()


def _setting(value: Setting) -> str:
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value)
