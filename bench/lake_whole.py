"""A whole `headrace run`, pipeline included: a table from PostgreSQL into Delta, and idleness."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from headrace.sinks import SinkPhase
from headrace.sinks.report import REPORT, PipelineReport
from headrace.testing import PostgresDatabase, free_port, wait_until

from . import delta, workload
from .family import Family, Kind, spent
from .latency import percentile
from .process import MeasurementFailed, Outcome
from .report import Figure, Figures

MASTER = "local[2]"
IDLE_SECONDS = 60.0
SETTLING_SECONDS = 20.0  # for what compiles and collects after the last batch
IDLE_LIMIT = 5.0  # % of a core
DELAY_RATE = 100  # changes a second
DELAY_SECONDS = 30.0
_START_LIMIT = 180.0  # seconds for Spark to start, on a busy machine
_SNAPSHOT_LIMIT = 1800.0

PIPELINE: tuple[Kind, ...] = ("driver", "JVM", "workers")

Sinks = Mapping[str, Mapping[str, str]]
LAKE = {"lake": {"type": "tables", "path": "lake"}}
TWO = {**LAKE, "audit": {"type": "history", "path": "audit"}}


class Server:
    """A running `headrace run`."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self.folder = folder
        self.pid = process.pid
        self._seen: tuple[int, Any] = (-1, delta.NONE)  # version of the table, and its sequences

    @property
    def table(self) -> Path:
        """The Delta table of the copied table."""
        return self.folder.joinpath("lake", *workload.COPY_TABLE.split("."))

    def rows(self, after: int = 0) -> int:
        """How many rows of the Delta table come from changes after a sequence."""
        self._expect_alive()
        # Asked a hundred times a second, so a version is read once: it is others who are measured.
        if (version := delta.version(self.table)) != self._seen[0]:
            self._seen = version, delta.sequences(self.table)
        return int((self._seen[1] > after).sum())

    def followed(self, rows: int) -> bool:
        """Whether every sink has stored so many changes, and nothing is left to do."""
        self._expect_alive()
        file = self.folder / "data" / "pipeline" / REPORT
        if not file.exists():
            return False
        sinks = msgspec.json.decode(file.read_bytes(), type=PipelineReport).sinks
        return all(
            sink.phase is SinkPhase.STREAMING and sink.changes >= rows and not sink.lag
            for sink in sinks
        )

    def _expect_alive(self) -> None:
        if self._process.poll() is not None:
            log = (self.folder / "server.log").read_text(errors="replace")[-2000:]
            raise MeasurementFailed(f"headrace run ended with {self._process.returncode}:\n{log}")


@contextmanager
def running(
    database: PostgresDatabase, folder: Path, sinks: Sinks, *, trigger: float = 1.0
) -> Iterator[Server]:
    """A `headrace run` that copies the table and has a pipeline with these sinks."""
    config = folder / "headrace.yaml"
    config.write_bytes(msgspec.json.encode(_config(database, sinks, trigger)))  # JSON is YAML
    command = [program(), "run", "--config", str(config)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            yield Server(process, folder)
        finally:
            process.terminate()
            process.wait(60)


def _config(database: PostgresDatabase, sinks: Sinks, trigger: float) -> dict[str, Any]:
    source = {"type": "postgres", "url": database.url, "tables": [workload.COPY_TABLE]}
    return {
        "data_dir": "data",
        "sources": {"bench": source},
        "server": {"port": free_port()},
        "pipeline": {"master": MASTER, "trigger_seconds": trigger, "sinks": sinks},
    }


def snapshot(database: PostgresDatabase, *, rows: int, folder: Path) -> Outcome:
    """A whole table into a Delta table, from the start of the program to its last row there."""
    began = time.perf_counter()
    with running(database, folder, LAKE) as server:
        first = wait_until(server.rows, timeout=_SNAPSHOT_LIMIT, message="rows arrive")
        first_at = time.perf_counter()
        wait_until(
            lambda: server.rows() >= rows, timeout=_SNAPSHOT_LIMIT, message="every row arrives"
        )
        ended = time.perf_counter()
        if (found := server.rows()) != rows:
            raise MeasurementFailed(f"the Delta table has {found} rows, not {rows}")
        notes = {_AGAIN: rows / _again(server, rows)}
    database.drop_slots()
    if rows > first:
        notes["rows/s from the first batch in the table on"] = (rows - first) / (ended - first_at)
    return Outcome(rows, ended - began, notes)


_AGAIN = "rows/s of another snapshot, Spark being there already"


def _again(server: Server, rows: int) -> float:
    """Seconds from the request of another snapshot to its last row in the Delta table."""
    time.sleep(SETTLING_SECONDS)
    last = int(delta.sequences(server.table).max())
    began = time.perf_counter()
    command = [program(), "snapshot", "bench", workload.COPY_TABLE]
    subprocess.run(command, cwd=server.folder, check=True, capture_output=True)
    wait_until(
        lambda: server.rows(after=last) >= rows,
        timeout=_SNAPSHOT_LIMIT,
        message="every row arrives again",
    )
    return time.perf_counter() - began


def program() -> str:
    """The program `headrace` of this environment."""
    return str(Path(sys.executable).with_name("headrace"))


def delay(database: PostgresDatabase, folder: Path, *, rows: int, seconds: float) -> Figures:
    """From the commit of single-row updates in PostgreSQL to the Delta table's version with them.

    The clock of the machine is put into the row right before it is sent.
    """
    with running(database, folder, LAKE, trigger=0.2) as server:
        wait_until(
            lambda: server.rows() >= rows, timeout=_SNAPSHOT_LIMIT, message="every row arrives"
        )
        time.sleep(min(seconds, SETTLING_SECONDS))
        seen = {delta.version(server.table): 0}
        first = max(seen)
        changes = round(seconds * DELAY_RATE)
        writer = threading.Thread(target=_update, args=(database, rows, changes))
        writer.start()
        deadline = time.monotonic() + seconds + 10
        while time.monotonic() < deadline:
            if (version := delta.version(server.table)) not in seen:
                now = time.monotonic_ns()
                seen |= dict.fromkeys(range(max(seen) + 1, version + 1), now)
            time.sleep(0.005)
        writer.join()
    database.drop_slots()
    delays = sorted(
        (seen[version] - int(note)) / 1e6
        for version in seen
        if version > first
        for note in delta.notes_added(server.table, version, "note")
        if note.isdecimal()
    )
    return Figures(
        f"Commit → Delta table of {rows:,} rows, at {DELAY_RATE} changes/s",
        [
            Figure("p50", percentile(delays, 50), "ms", below=1000),
            Figure("p99", percentile(delays, 99), "ms", below=2000),
            Figure("worst", delays[-1], "ms"),
            Figure("changes", len(delays), "rows", at_least=0.9 * changes),
        ],
    )


def _update(database: PostgresDatabase, rows: int, changes: int) -> None:
    picked = random.Random(1).sample(range(1, rows + 1), changes)
    with psycopg.connect(database.url, autocommit=True) as connection:
        began = time.monotonic()
        for number, key in enumerate(picked):
            time.sleep(max(0.0, began + number / DELAY_RATE - time.monotonic()))
            connection.execute(
                "UPDATE public.bench_copy SET note = %s WHERE id = %s",
                (str(time.monotonic_ns()), key),
            )


def idle(database: PostgresDatabase, folder: Path, *, rows: int, seconds: float) -> Figures:
    """What a pipeline of two sinks costs while nothing changes."""
    with running(database, folder, TWO) as server:
        wait_until(
            lambda: server.followed(rows), timeout=_START_LIMIT, message="both sinks have it all"
        )
        time.sleep(min(seconds, SETTLING_SECONDS))
        family = Family(server.pid, "server")
        before, began = family.seconds(), time.perf_counter()
        time.sleep(seconds)
        used, took = spent(before, family.seconds()), time.perf_counter() - began
    database.drop_slots()
    return figures(
        {kind: 100 * seconds_used / took for kind, seconds_used in used.items()}, seconds=took
    )


def figures(percent: Mapping[Kind, float], *, seconds: float) -> Figures:
    """The shares of one core."""
    pipeline = sum(share for kind, share in percent.items() if kind != "server")
    return Figures(
        f"An idle pipeline of two sinks, over {seconds:.0f} s",
        [
            Figure("the pipeline", pipeline, "% of a core", below=IDLE_LIMIT),
            *(Figure(f"of it, {kind}", percent.get(kind, 0.0), "% of a core") for kind in PIPELINE),
            Figure("capture and server beside it", percent.get("server", 0.0), "% of a core"),
        ],
    )
