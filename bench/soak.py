"""A long run under load, in which every part is restarted again and again: `make soak`.

A PostgreSQL database takes 5,000 changes a second; 200 clients together take 20,000 events a
second; three sinks store them. In each period the database, `headrace run` (kill -9), the pipeline
(kill -9) and Redis are restarted in turn. In the end everything must be everywhere, /health must
not have been wrong for longer than 5 s, and memory must not have grown.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import psutil
import psycopg
import redis
import typer

from headrace.testing import PostgresServer, free_port, postgres_installs, wait_until
from headrace.testing.processes import temporary_directory
from headrace.testing.redis import RedisServer

from .process import ROOT, environment, module
from .soak_checks import compare
from .soak_clients import ClientTotals
from .soak_judge import Down, HealthJudge
from .soak_plot import drawing

TABLES = [f"work_{number:02d}" for number in range(20)]
TICKS = 10  # transactions a second
INSERTED, UPDATED = 175, 150  # rows of a transaction, and as many deleted as inserted: 500
CLIENTS = 200
OF_WORK = 78  # clients with a table of work, at 250 events a second; the others have `ticks`
KEPT = 5000  # rows of a table
RESTARTS = ("database", "run", "pipeline", "redis")
LOOK_SECONDS = 0.5
CATCH_UP_SECONDS = 600.0
GROWTH = 1.3  # what the last third of a run may use of what the second third did
PLOT = ROOT / "bench" / "soak.svg"


# --- the load ------------------------------------------------------------------------------------


class Load(threading.Thread):
    """Writes 5,000 rows a second; `ticks` says what was really committed."""

    def __init__(self, url: str, stopping: threading.Event) -> None:
        super().__init__(name="load")
        self._url = url
        self._stopping = stopping
        self.tick = 0
        self.late = 0.0  # seconds behind its plan

    @staticmethod
    def prepare(url: str) -> None:
        """Create the tables."""
        with psycopg.connect(url, autocommit=True) as connection:
            for table in TABLES:
                connection.execute(
                    f"CREATE TABLE {table} (id bigserial PRIMARY KEY, n bigint, body text)"
                )
            connection.execute(
                "CREATE TABLE ticks (id bigint PRIMARY KEY, work int, inserted bigint, "
                "updated bigint, deleted bigint, n bigint DEFAULT 0)"
            )

    def run(self) -> None:
        """Until it is to stop, whatever happens to the database."""
        due = time.monotonic()
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self._url) as connection:
                    while not self._stopping.is_set():
                        self._commit(connection)
                        due += 1 / TICKS
                        self.late = max(time.monotonic() - due, 0.0)
                        due = max(due, time.monotonic() - 30)  # half a minute is made up for
                        self._stopping.wait(max(due - time.monotonic(), 0))
            except psycopg.Error:
                self._stopping.wait(0.2)

    def _commit(self, connection: psycopg.Connection[tuple[int, ...]]) -> None:
        number = (self.tick + 1) % len(TABLES)
        table = TABLES[number]
        inserted = connection.execute(
            f"INSERT INTO {table} (n, body) SELECT %s, repeat('x', 60) FROM generate_series(1, %s)",
            (self.tick, INSERTED),
        ).rowcount
        newest = f"(SELECT max(id) FROM {table})"
        updated = connection.execute(
            f"UPDATE {table} SET n = n + 1 WHERE id > {newest} - %s", (UPDATED,)
        ).rowcount
        deleted = connection.execute(
            f"DELETE FROM {table} WHERE id <= {newest} - %s", (KEPT,)
        ).rowcount
        connection.execute(
            "INSERT INTO ticks (id, work, inserted, updated, deleted) "
            "SELECT coalesce(max(id), 0) + 1, %s, %s, %s, %s FROM ticks",
            (number, inserted, updated, deleted),
        )
        connection.commit()
        self.tick += 1


class Clients:
    """The process of the clients, and what it last reported."""

    def __init__(self, port: int) -> None:
        tables = [TABLES[n % len(TABLES)] for n in range(OF_WORK)]
        tables += ["ticks"] * (CLIENTS - OF_WORK)
        self.had: list[ClientTotals] = []
        self.moved = time.monotonic()  # when the first client of `ticks` last had a new event
        self._process = subprocess.Popen(
            module("soak_clients", str(port), json.dumps(tables)),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            had = msgspec.json.decode(line, type=list[ClientTotals])
            if not self.had or had[-1].last > self.had[-1].last:
                self.moved = time.monotonic()
            self.had = had

    def behind(self, latest: int) -> int:
        """How far the slowest client is behind; one of `work` has nothing new for two seconds."""
        return max((latest - had.last for had in self.had), default=0)

    @property
    def failed(self) -> bool:
        """Whether one of them had an event twice, or out of order."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


# --- the parts -----------------------------------------------------------------------------------


class Installation:
    """A folder with a config, and `headrace run` in it."""

    def __init__(self, folder: Path, url: str, redis_port: int) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        sinks = {
            "lake": {"type": "tables", "path": "lake", "vacuum_hours": 0.1},
            "history": {"type": "history", "path": "history"},
            "stream": {
                "type": "redis",
                "servers": f"127.0.0.1:{redis_port}",
                "tables": ["public.ticks"],
            },
        }
        content = {
            "sources": {"shop": {"type": "postgres", "url": url}},
            "server": {"port": self.port},
            "pipeline": {"master": "local[2]", "trigger_seconds": 1, "sinks": sinks},
        }
        (folder / "headrace.yaml").write_text(json.dumps(content))

    def start(self) -> None:
        """Start it, without waiting for it to answer."""
        with (self.folder / "output.txt").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.cli", "run"],
                cwd=self.folder,
                env=environment(),
                stdout=output,
                stderr=output,
            )

    def answers(self) -> bool:
        """Whether the server answers."""
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/livez", timeout=5).status_code == 200
        return False

    def streams(self) -> bool:
        """Whether its source sends every change as it comes."""
        with suppress(httpx.HTTPError):
            sources = httpx.get(f"{self.url}/v1/sources", timeout=5).json()["sources"]
            return all(source["phase"] == "streaming" for source in sources)
        return False

    def kill(self) -> None:
        """End it as a power cut would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it in order."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(120)

    def kill_pipeline(self) -> None:
        """End the pipeline's process; `headrace run` starts it again."""
        with suppress(OSError, ValueError, KeyError):
            report = json.loads((self.folder / "data/pipeline/status.json").read_text())
            os.kill(report["pid"], signal.SIGKILL)

    def memory(self) -> dict[str, float]:
        """Megabytes by kind of process."""
        assert self._process is not None
        used = {"server": 0.0, "source": 0.0, "pipeline": 0.0, "java": 0.0}
        with suppress(psutil.Error):
            server = psutil.Process(self._process.pid)
            for process in (server, *server.children(recursive=True)):
                with suppress(psutil.Error):
                    kind = _kind(process, server)
                    used[kind] += process.memory_info().rss / 1e6
        return used

    def latest(self) -> int:
        """The last change in the log; 0: not known now."""
        with suppress(httpx.HTTPError):
            return int(httpx.get(f"{self.url}/health", timeout=5).json()["log"]["latest_sequence"])
        return 0

    def lag(self) -> int | None:
        """Changes that some sink has not stored; None: that is not known now."""
        try:
            document = httpx.get(f"{self.url}/health", timeout=5).json()
        except httpx.HTTPError:
            return None
        lags = [sink["lag"] for sink in document["pipeline"]["sinks"]]
        running = document["pipeline"]["running"]
        return sum(lags) if running and None not in lags else None


def _kind(process: psutil.Process, server: psutil.Process) -> str:
    if process.pid == server.pid:
        return "server"
    if process.name() == "java":
        return "java"
    return "source" if "headrace.sources.worker" in " ".join(process.cmdline()) else "pipeline"


# --- the run -------------------------------------------------------------------------------------


class Soak:
    """Everything at work, from entering to leaving."""

    def __init__(self, seconds: float, period: float) -> None:
        self._seconds = seconds
        self._period = period
        self._stack = ExitStack()
        self._down = Down()
        self._memory: dict[str, list[tuple[float, float]]] = {}
        self._restarts: list[tuple[float, str]] = []
        self._behind: list[int] = []  # changes that the slowest client had not had
        self._stopping = threading.Event()

    def run(self) -> list[str]:
        """All of it; returns what was wrong."""
        with ExitStack() as stack:
            folder = temporary_directory()
            install = postgres_installs()[max(postgres_installs())]
            self._postgres = stack.enter_context(PostgresServer(install))
            database = stack.enter_context(self._postgres.database())
            self._redis = stack.enter_context(RedisServer())
            Load.prepare(database.url)
            place = self._place = Installation(folder, database.url, self._redis.port)
            place.start()
            stack.callback(place.kill)
            # What is there before would come as rows of a snapshot.
            wait_until(place.streams, timeout=120, message="the source streams")
            self._load = Load(database.url, self._stopping)
            clients = self._clients = Clients(place.port)
            stack.callback(clients.close)
            self._load.start()
            stack.callback(self._stopping.set)
            self._begun = time.monotonic()
            judge = HealthJudge(place.url, self._down, self._flows(folder), self._begun)
            with self._restarting():
                self._watch(judge)
            self._settle()
            wrong = judge.wrong + self._grown()
            self._draw(judge)
            clients.close()
            place.stop()
            print(self._summary(clients), flush=True)
            return wrong + compare(database.url, folder, [*TABLES, "ticks"], clients.had)

    def _watch(self, judge: HealthJudge) -> None:
        sampled = 0.0
        while (now := time.monotonic()) - self._begun < self._seconds:
            judge.look()
            if now - sampled > 5:
                sampled = now
                for kind, used in self._place.memory().items():
                    self._memory.setdefault(kind, []).append((now - self._begun, used))
                if latest := self._place.latest():
                    self._behind.append(self._clients.behind(latest))
            if self._clients.failed:
                raise SystemExit("a client had an event twice, or out of order")
            time.sleep(LOOK_SECONDS)

    def _settle(self) -> None:
        """Stop writing, and wait until everything has arrived everywhere."""
        self._stopping.set()
        self._load.join()
        wait_until(
            lambda: self._place.lag() == 0,
            timeout=CATCH_UP_SECONDS,
            message="every sink has everything",
        )
        before: list[int] = []

        def quiet() -> bool:
            nonlocal before
            last, before = before, [had.events for had in self._clients.had]
            time.sleep(2)
            return last == before

        wait_until(quiet, timeout=CATCH_UP_SECONDS, message="every client has everything")

    # --- restarts --------------------------------------------------------------------------------

    @contextmanager
    def _restarting(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._restart, args=(ended,), name="restarts")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _restart(self, ended: threading.Event) -> None:
        """Each part in turn, a part a quarter of the period."""
        acts: dict[str, Callable[[], None]] = {
            "database": self._restart_database,
            "run": self._restart_run,
            "pipeline": self._restart_pipeline,
            "redis": self._restart_redis,
        }
        while True:
            for name in RESTARTS:
                if ended.wait(self._period / len(RESTARTS)):
                    return
                self._restarts.append((time.monotonic() - self._begun, name))
                acts[name]()

    def _restart_database(self) -> None:
        self._postgres.stop()  # which goes on for as long as its last checkpoint takes
        self._down.begin("database")
        time.sleep(8)
        self._postgres.start()
        self._down.end("database")

    def _restart_run(self) -> None:
        self._place.kill()
        time.sleep(1)
        self._place.start()
        wait_until(self._place.answers, timeout=60, message="the server answers again")

    def _restart_pipeline(self) -> None:
        self._place.kill_pipeline()

    def _restart_redis(self) -> None:
        self._redis.stop()
        self._down.begin("redis")
        time.sleep(12)
        self._redis.start()
        self._down.end("redis")

    # --- what comes out --------------------------------------------------------------------------

    def _flows(self, folder: Path) -> Callable[[], dict[str, float]]:
        """When each part last brought something new."""
        seen: dict[str, tuple[object, float]] = {}

        def moved(part: str, now_at: object) -> float:
            known, at = seen.get(part, (None, 0.0))
            if now_at != known:
                at = time.monotonic()
                seen[part] = now_at, at
            return at

        def flows() -> dict[str, float]:
            return {
                "clients": self._clients.moved,
                "lake": moved("lake", _newest(folder / "lake/public/ticks/_delta_log")),
                "history": moved("history", _newest(folder / "history/_delta_log")),
                "redis": moved("redis", self._stream_length()),
            }

        return flows

    def _stream_length(self) -> object:
        client = redis.Redis(port=self._redis.port, socket_timeout=2)
        with suppress(redis.RedisError, OSError), client:
            return client.xlen("cdc:public:ticks")
        return None

    def _grown(self) -> list[str]:
        found: list[str] = []
        if self._seconds < 4 * self._period:
            return found  # every process is still filling its caches
        for kind, series in self._memory.items():
            used = [value for _, value in series if value]
            third = len(used) // 3
            if third >= 3:
                before, after = (
                    statistics.fmean(used[third:-third]),
                    statistics.fmean(used[-third:]),
                )
                if after > before * GROWTH:
                    found.append(f"{kind} grew from {before:.0f} to {after:.0f} MB")
        return found

    def _draw(self, judge: HealthJudge) -> None:
        PLOT.write_text(drawing(self._memory, judge.history, self._restarts))

    def _summary(self, clients: Clients) -> str:
        events = sum(had.events for had in clients.had)
        again = sum(had.reconnects for had in clients.had) - CLIENTS
        minutes = self._seconds / 60
        return (
            f"{minutes:g} min: {self._load.tick} transactions of {2 * INSERTED + UPDATED} rows "
            f"({self._load.tick * 500 / self._seconds:,.0f} changes/s), {events:,} deliveries "
            f"({events / self._seconds:,.0f}/s), {again} reconnects, "
            f"{len(self._restarts)} restarts, the load is {self._load.late:.1f} s late, the "
            f"slowest client was {statistics.median(self._behind):,.0f} changes behind (median; "
            f"at most {max(self._behind):,}); {PLOT}"
        )


def _newest(folder: Path) -> object:
    """The newest entry of a Delta log; None: there is none yet."""
    with suppress(OSError):
        return max(entry.name for entry in os.scandir(folder) if entry.name.endswith(".json"))
    return None


def main(
    minutes: Annotated[float, typer.Option(help="How long it lasts.")] = 60.0,
    period: Annotated[float, typer.Option(help="Seconds in which each part restarts.")] = 120.0,
) -> None:
    """Run for an hour, and say what was wrong."""
    wrong = Soak(minutes * 60, period).run()
    for each in wrong:
        print(f"WRONG {each}")
    if wrong:
        raise typer.Exit(1)
    print("nothing was lost, /health was right, memory was flat")


if __name__ == "__main__":
    typer.run(main)
