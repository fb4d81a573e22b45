"""A `headrace run` whose clients are measured, a writer for it, and who uses the processor."""

import http.client
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import LiteralString, Self

import msgspec
import psutil
import psycopg

from headrace.sources import Phase
from headrace.testing import PostgresDatabase, free_port, wait_until

from .process import MeasurementFailed

TABLE = "bench_delivery"

_TABLE: LiteralString = """
    CREATE TABLE public.bench_delivery (id bigint PRIMARY KEY, stamp bigint NOT NULL, note text);
"""

# Inside the server, so that no process of ours has work with it. The clock is put into the row
# before the insert: what is measured includes the insert and the commit.
_PROCEDURE: LiteralString = """
    CREATE PROCEDURE public.bench_deliver(first bigint, changes int, rate float8, size int)
    LANGUAGE plpgsql AS $$
    DECLARE
        began timestamptz := clock_timestamp();
        early float8;
    BEGIN
        FOR number IN 0..changes - 1 LOOP
            early := number / rate - extract(epoch FROM clock_timestamp() - began);
            IF early > 0 THEN
                PERFORM pg_sleep(early);
            END IF;
            INSERT INTO public.bench_delivery VALUES (
                first + number,
                (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
                repeat('x', size)
            );
            COMMIT;
        END LOOP;
    END $$;
"""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that captures the table and serves it."""

    port: int
    pid: int
    key: str  # that opens everything


@contextmanager
def serving(database: PostgresDatabase, folder: Path) -> Iterator[Serving]:
    """The table in a `headrace run` of its own, as users start it."""
    database.execute(_TABLE)
    database.execute(_PROCEDURE)
    # A server inherits it: every client needs a file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    port = free_port()
    source = {"type": "postgres", "url": database.url, "tables": [f"public.{TABLE}"]}
    config = folder / "headrace.yaml"
    config.write_bytes(  # JSON is YAML
        msgspec.json.encode({"sources": {"bench": source}, "server": {"port": port}})
    )
    program = Path(sys.executable).with_name("headrace")
    with (folder / "server.log").open("wb") as log:
        command = [str(program), "run", "--config", str(config)]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            wait_until(lambda: _streaming(process, port), timeout=60, message="it is streaming")
            yield Serving(port, process.pid, _new_key(port))
        finally:
            process.terminate()
            process.wait(60)


def _streaming(process: subprocess.Popen[bytes], port: int) -> bool:
    if process.poll() is not None:
        raise MeasurementFailed(f"headrace run ended with {process.returncode}")
    try:
        health = msgspec.json.decode(_answered(port, "GET", "/health"))
    except ConnectionRefusedError:
        return False
    return all(source["phase"] == Phase.STREAMING for source in health["sources"])


def _new_key(port: int) -> str:
    """A key, as clients have one anywhere but on the server's own machine."""
    return str(msgspec.json.decode(_answered(port, "POST", "/v1/keys", b"{}"))["secret"])


def _answered(port: int, method: str, path: str, body: bytes | None = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection.getresponse().read()
    finally:
        connection.close()


class Writer:
    """Commits rows at a rate, a transaction each, from a thread that only waits."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._connection: psycopg.Connection[tuple[object, ...]] = database.connect()
        self._thread: threading.Thread | None = None
        self._next = 1
        self._failure: psycopg.Error | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._connection.cancel_safe()
        if self._thread is not None:
            self._thread.join(30)
        self._connection.close()

    def start(self, changes: int, rate: float, *, size: int = 100) -> None:
        """Begin to write rows with a text of so many bytes."""
        given = (self._next, changes, rate, size)
        self._next += changes
        self._thread = threading.Thread(target=self._write, args=(given,))
        self._thread.start()

    def wait(self) -> None:
        """Until everything is written."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise MeasurementFailed("the writer failed") from self._failure

    def _write(self, given: tuple[float, ...]) -> None:
        try:
            self._connection.execute("CALL public.bench_deliver(%s, %s, %s, %s)", given)
        except psycopg.Error as error:
            self._failure = error


class Shares:
    """How much of a core each of some families of processes uses, from now on."""

    def __init__(self, families: Mapping[str, Callable[[], list[psutil.Process]]]) -> None:
        self._families = families
        self._before = self._used()

    @classmethod
    def of(cls, serving: Serving, database: PostgresDatabase) -> Self:
        """The server, the process that captures for it, and PostgreSQL."""
        server, postgres = psutil.Process(serving.pid), _postgres(database)
        return cls(
            {
                "server": lambda: [server],
                "capture": lambda: server.children(recursive=True),
                "PostgreSQL": lambda: [postgres, *postgres.children()],
            }
        )

    def seconds(self) -> dict[str, float]:
        """Processor time since the beginning, by family."""
        now = self._used()
        return {
            name: sum(used - self._before[name].get(pid, 0.0) for pid, used in family.items())
            for name, family in now.items()
        }

    def _used(self) -> dict[str, dict[int, float]]:
        return {
            name: {each.pid: _seconds(each) for each in family()}
            for name, family in self._families.items()
        }


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0  # it ended while it was looked at
    return float(times.user + times.system)


def _postgres(database: PostgresDatabase) -> psutil.Process:
    pid_file = database.server.data / "postmaster.pid"
    return psutil.Process(int(pid_file.read_text().split()[0]))
