"""The demo from its start to the comparison at its end."""

import importlib
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import yaml
from rich.console import Console

from ..change.replay import TableName
from ..config import load
from ..errors import HeadraceError
from ..operate.show import RunProgress, complaints
from ..plugins import require_spark
from ..run import LOOK_SECONDS, Run
from ..sources import Phase
from .database import TABLES, ShopDatabase
from .lake import HISTORY, LAKE, Lake, pipeline_settings
from .shop import Shop
from .verify import SinkFolders, compare_all, say

SOURCE = "shop"
PORTS_TRIED = 100
CATCH_UP_SECONDS = 120.0
LAKE_SECONDS = 400.0  # on a busy machine, starting Spark alone may take a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """How long it runs, and where."""

    seconds: float | None  # None: until it is stopped
    source: Literal["postgres", "mysql", "sqlite"] = "postgres"
    port: int = 3000
    keep_dir: bool = False
    lake: bool = True  # whether Spark fills Delta tables, too

    def run(self, console: Console, stopping: threading.Event) -> bool:
        """Run until the time is over or `stopping` is set; True when everything is equal."""
        if self.lake:
            require_spark("a demo with Delta tables (without them: --no-lake)")
        # Of the other databases, what they need may not be installed.
        module = importlib.import_module(f"{__package__}.{self.source}")
        title = module.title()
        port = _free_port(self.port)
        lake = self.lake and _has_java(console)
        with ExitStack() as stack:
            folder = self._folder(stack, console, module.SCHEMA_NAME, lake=lake)
            say(console, f"starting {title} with a small shop in it")
            database: ShopDatabase = stack.enter_context(module.opened(folder))
            database.build()
            file = _config_file(folder, database, port, lake=lake)
            stage = _RunningDemo.opened(stack, database, file)
            if port != self.port:
                say(console, f"port {self.port} is taken, so it is port {port}")
            with RunProgress(
                console, footer=_hints(stage), plain_seconds=2, always=True
            ) as progress:
                self._watch(stage, stopping, progress)
                stage.shop.stop()
                progress.print_line("the shop is closed; what is on its way arrives")
                _catch_up(stage, progress)
            for line in stage.lake.complaints if stage.lake else ():
                say(console, line)
            folders = SinkFolders(folder / LAKE, folder / HISTORY) if lake else None
            names = [TableName(SOURCE, database.schema, name) for name in TABLES]
            return compare_all(console, stage.running.log, database, names, folders)

    def _folder(self, stack: ExitStack, console: Console, schema: str, *, lake: bool) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="headrace-demo-"))
        folder.chmod(0o755)  # a server may have to run as another user
        if not self.keep_dir:
            stack.callback(shutil.rmtree, folder)
            return folder
        if lake:
            table = folder / LAKE / schema / "orders"
            look = f"polars.read_delta('{table}'), or in DuckDB: FROM delta_scan('{table}')"
            stack.callback(say, console, f"the Delta tables are there too; look with {look}")
        stack.callback(say, console, f"the log and the database are left in {folder}")
        return folder

    def _watch(
        self, stage: "_RunningDemo", stopping: threading.Event, progress: RunProgress
    ) -> None:
        """Show how it goes, until the time is over or something is wrong."""
        ended = threading.Event()
        until = time.monotonic() + self.seconds if self.seconds else None

        def look() -> None:
            stage.show(progress)
            over = until is not None and time.monotonic() >= until
            if over or stopping.is_set() or stage.shop.error or stage.halted:
                ended.set()

        stage.running.work(ended, look)
        _raise_failure(stage)


@dataclass(frozen=True, slots=True)
class _RunningDemo:
    """All parts of a demo that runs."""

    database: ShopDatabase
    running: Run
    shop: Shop
    lake: Lake | None

    @classmethod
    def opened(cls, stack: ExitStack, database: ShopDatabase, file: Path) -> "_RunningDemo":
        """Open the shop, captured and served at once; Spark follows when it has started."""
        config = load(file)
        running = stack.enter_context(Run(config))
        shop = Shop(database)
        stack.callback(shop.stop)
        shop.start()
        lake = stack.enter_context(Lake(config, file)) if config.pipeline else None
        return cls(database, running, shop, lake)

    def show(self, progress: RunProgress) -> None:
        """Show how everything is doing."""
        stats = self.running.log.stats()
        sinks = self.lake.statuses(stats.latest_sequence) if self.lake else ()
        progress.show(self.running.statuses(), stats, sinks)

    @property
    def halted(self) -> list[str]:
        """Why an operator would have to act."""
        sources = [line for status in self.running.halted for line in complaints(status)]
        return sources + (self.lake.halted if self.lake else [])


def _has_java(console: Console) -> bool:
    # Here, since a demo without Delta tables runs where Spark is not installed.
    from ..pipeline.session import check_java  # noqa: PLC0415

    java = check_java()
    if not java.ok:
        say(console, f"Delta tables are left out: {java.detail}. {java.fix}")
    return java.ok


def _config_file(folder: Path, database: ShopDatabase, port: int, *, lake: bool) -> Path:
    """The demo's config, as a person would write it: other commands can use it as well."""
    settings: dict[str, Any] = {
        "data_dir": "data",
        "sources": {SOURCE: database.source},
        "server": {"port": port},
    }
    if lake:
        settings["pipeline"] = pipeline_settings(folder)
    file = folder / "headrace.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


def _hints(stage: _RunningDemo) -> list[str]:
    """What to try while it runs."""
    url = stage.running.server.url
    return [
        f"read:   curl '{url}/changefeed?from_seq=0&limit=5'",
        f"follow: curl -N '{url}/changefeed/stream?keep_alive=true'",
        f"write:  {stage.database.shell}",
    ]


def _free_port(wanted: int) -> int:
    for port in range(wanted, min(wanted + PORTS_TRIED, 65_536)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise HeadraceError(f"no port from {wanted} on is free", hint="Name another with --port.")


def _raise_failure(stage: _RunningDemo) -> None:
    if stage.shop.error:
        raise HeadraceError("the shop had to close") from stage.shop.error
    if stage.halted:
        raise HeadraceError("; ".join(stage.halted))


def _catch_up(stage: _RunningDemo, progress: RunProgress) -> None:
    """Wait until the log has everything the shop committed, and then the Delta tables."""
    log = stage.running.log
    closed = _EverythingCaptured(stage)

    def arrives(arrived: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not (there := arrived()) and time.monotonic() < until:
            _raise_failure(stage)
            stage.show(progress)
            log.wait(log.latest_sequence, timeout=LOOK_SECONDS)
        return there

    if not arrives(closed, CATCH_UP_SECONDS):
        raise _log_is_late(stage.running)
    if lake := stage.lake:
        latest = log.latest_sequence
        if not arrives(lambda: lake.has(latest), LAKE_SECONDS):
            raise lake.late(LAKE_SECONDS)
    stage.show(progress)


class _EverythingCaptured:
    """Whether the log has everything: a last customer comes when the shop is closed."""

    def __init__(self, stage: _RunningDemo) -> None:
        self._running = stage.running
        self._after = stage.running.log.latest_sequence
        self._name = f"last{uuid4().hex}"
        self._came = False
        session = stage.database.connect()
        try:
            session.attempt(stage.database.register, {"name": self._name})
        finally:
            session.close()

    def __call__(self) -> bool:
        return self._has_come() and _copied(self._running)

    def _has_come(self) -> bool:
        name = self._name.encode()
        while not self._came and (news := self._running.log.read(self._after, limit=1000)):
            self._after = news[-1].sequence
            self._came = any(name in (change.after or b"") for change in news)
        return self._came


def _copied(running: Run) -> bool:
    [status] = running.statuses()
    return status.phase is Phase.STREAMING and all(copy.done for copy in status.copies)


def _log_is_late(running: Run) -> HeadraceError:
    [status] = running.statuses()
    return HeadraceError(
        f"the log did not have everything within {CATCH_UP_SECONDS:.0f} s; "
        f"the source is {status.phase} at {status.position or 'no position'}"
    )
