"""A real MySQL in a folder, and fresh databases in it.

with MysqlServer() as server, server.database() as database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    capture(database.url)

`HEADRACE_MYSQLD` names the server's program, or several of them; else it is looked for where
programs are. `headrace.testing.mariadb` starts a MariaDB, which is used in the same way.
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote
from uuid import uuid4

import pymysql
from pymysql.constants import CLIENT

from .processes import (
    ServerFailed,
    ServerProcess,
    ServiceAccount,
    Setting,
    temporary_directory,
)

ENVIRONMENT = "HEADRACE_MYSQLD"

# Debian keeps the server where only root's path leads.
_FOLDERS = (*os.get_exec_path(), "/usr/sbin", "/usr/local/sbin", "/usr/local/mysql/bin")

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

    def creation(self, data: Path) -> list[str | Path]:
        """The command that makes the data of a server whose administrator has no password."""
        return [
            self.server,
            "--no-defaults",
            "--initialize-insecure",
            f"--datadir={data}",
            "--skip-log-bin",
            "--innodb-doublewrite=OFF",
            "--innodb-flush-method=nosync",
            "--innodb-redo-log-capacity=64M",
        ]


@functools.cache
def mysql_installs() -> tuple[MysqlInstall, ...]:
    """Every MySQL on this machine that is known of."""
    named = os.environ.get(ENVIRONMENT, "")
    servers = [Path(each) for each in named.split(os.pathsep) if each]
    servers = servers or [found for found in [program("mysqld")] if found is not None]
    return tuple(found for server in servers if (found := _install(server)) is not None)


def _install(server: Path) -> MysqlInstall | None:
    # mysqld  Ver 8.0.46-0ubuntu0.24.04.5 for Linux on x86_64 ((Ubuntu))
    output = subprocess.check_output([server, "--no-defaults", "--version"], text=True)
    if "MariaDB" in output:
        return None  # which has the program under its old name too
    version = output.split(" Ver ")[1].split()[0].partition("-")[0]
    return MysqlInstall(version, server, program("mysqlbinlog"))


@functools.cache
def _template(install: MysqlInstall, account: ServiceAccount | None) -> Path:
    """The data of a server that was never started: made once, since it takes many seconds."""
    directory = temporary_directory()
    if account:
        account.own(directory)
    command = install.creation(directory / "data")
    result = subprocess.run(
        command,
        capture_output=True,
        check=False,
        text=True,
        cwd=directory,
        env={**os.environ, "TMPDIR": str(directory)},
        **(account.identity if account else {}),
    )
    if result.returncode:
        output = (result.stderr or result.stdout).strip()
        raise ServerFailed(
            f"{Path(command[0]).name} in {directory} failed: {output}",
            hint="Every folder above it must be open to the user that runs the server.",
        )
    return directory / "data"


def program(name: str) -> Path | None:
    """A program of this machine."""
    found = shutil.which(name, path=os.pathsep.join(_FOLDERS))
    return None if found is None else Path(found)


class MysqlServer(ServerProcess):
    """A MySQL server in a directory of its own."""

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
        self.account = ServiceAccount.choose("mysql")
        self.settings = {**DEFAULT_SETTINGS, **self.install.settings, **(settings or {})}
        super().__init__(directory, port=int(self.settings.get("port", 0)))
        self.settings["port"] = self.port

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

    def command(self) -> list[str]:
        """The server with its settings as options."""
        if not (self.data / "mysql").exists():
            self._create()
        given = {"datadir": str(self.data), "socket": self._socket(), "pid_file": "server.pid"}
        settings = {**given, **self.settings}
        options = [f"--{name}={_setting(value)}" for name, value in settings.items()]
        return [str(self.install.server), "--no-defaults", *options]

    def environment(self) -> dict[str, str]:
        """A directory for temporary files that the user who runs the server may enter."""
        return {"TMPDIR": str(self.directory)}

    def answers(self) -> bool:
        """Whether it runs a query."""
        with suppress(pymysql.MySQLError):
            return self.execute("SELECT 1") == [(1,)]
        return False

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

    def _create(self) -> None:
        # Without auto.cnf: a server makes its own name when it finds none.
        template = _template(self.install, self.account)
        shutil.copytree(template, self.data, ignore=shutil.ignore_patterns("auto.cnf"))
        if self.account:
            self.account.own(self.directory, self.data, *self.data.rglob("*"))

    def _socket(self) -> str:
        # The system allows about a hundred bytes for a socket's path; then another place is chosen.
        own = self.directory / "server.sock"
        return str(own) if len(os.fsencode(own)) < 100 else f"/tmp/headrace-{self.port}.sock"


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
        """A new connection, in autocommit mode unless `options` set another."""
        given = {
            "host": "127.0.0.1",
            "port": self.server.port,
            "user": "root",
            "database": self.name or None,
            "autocommit": True,
            "client_flag": CLIENT.MULTI_STATEMENTS,
            # Else each connection reads the machine's certificates, slower than any query.
            "ssl_disabled": not options.keys() & {"ssl", "password"},
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


def _setting(value: Setting) -> str:
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value)
