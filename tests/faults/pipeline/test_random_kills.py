"""From PostgreSQL to Delta tables, killed at random: at the end every table equals its source."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
import psutil
import pytest

from headrace.change.replay import TableName
from headrace.demo.delta import compare_delta, has_each_once
from headrace.demo.postgres import PostgresShop
from headrace.log import LogReader
from headrace.sinks.report import PipelineReport
from headrace.testing import PostgresDatabase, free_port, wait_until
from tests.faults import workload
from tests.faults.pipeline.runner import QUICK
from tests.faults.workload import Workload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

T = TypeVar("T")

HEADRACE = [sys.executable, "-m", "headrace.cli"]

# What the server alone would know (a default, a rename, a cast) is left out: see docs/pipeline.md.
# The server tells of a table's new columns with the next change of its rows, so each statement
# makes one, whatever the workload has deleted and however soon it ends.
DDL = (
    "ALTER TABLE accounts ADD COLUMN extra int; UPDATE accounts SET extra = id WHERE id % 7 = 0;"
    "INSERT INTO accounts (id, extra) VALUES (-1, 7)",
    "CREATE TABLE notes (id int PRIMARY KEY, line text); INSERT INTO notes VALUES (1, 'a')",
    "ALTER TABLE pages ALTER visits TYPE bigint; UPDATE pages SET visits = 1 << 20 WHERE id < 9;"
    "INSERT INTO pages (id, visits) VALUES (-1, 1 << 20)",
    # Two transactions: a writer that has locked lines may wait for accounts.
    "BEGIN; ALTER TABLE accounts DROP COLUMN extra; INSERT INTO accounts (id) VALUES (-2); COMMIT;"
    "ALTER TABLE lines ADD COLUMN tags text[]; INSERT INTO lines VALUES (-1, 1, 2, 'a', '{b}')",
)
# The journal has no key, so a table cannot follow its updates; its history can.
TABLES = (*(table for table in workload.TABLES if table != "journal"), "notes")


class Place:
    """A folder with a config, and `headrace run` in it, which has a pipeline."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._output = folder / "output.txt"
        self._running: subprocess.Popen[bytes] | None = None
        sinks: dict[str, Any] = {
            "lake": {
                "type": "tables",
                "path": "lake",
                "tables": [f"public.{table}" for table in TABLES],
                "file_mb": 0.2,
                "vacuum_hours": 0,
            },
            "audit": {"type": "history", "path": "audit", "vacuum_hours": 0},
        }
        config = {
            "sources": {"db": {"type": "postgres", "url": url}},
            "server": {"port": free_port()},
            "pipeline": {
                "master": "local[2]",
                "trigger_seconds": 0.2,
                "max_changes_per_batch": 20_000,
                "spark": QUICK,
                "sinks": sinks,
            },
        }
        (folder / "headrace.yaml").write_text(json.dumps(config))

    def start(self) -> None:
        """Begin to capture and to carry."""
        with self._output.open("ab") as output:
            self._running = subprocess.Popen(
                [*HEADRACE, "run"], cwd=self.folder, stdout=output, stderr=output
            )

    def stop(self) -> None:
        """End in order."""
        assert self._running
        self._running.terminate()
        assert self._running.wait(timeout=300) == 0, self.words()

    def finish(self) -> None:
        """Carry what is left."""
        done = subprocess.run(
            [*HEADRACE, "pipeline", "--once"], cwd=self.folder, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{done.stderr.decode()}\n{self.words()}"

    def abort(self) -> None:
        """Leave nothing behind."""
        if self._running:
            self._running.kill()
            self._running.wait()
        wait_until(lambda: not self._javas(), timeout=300, message="no JVM is left")

    def words(self) -> str:
        """What it said, for whoever reads a failed test."""
        return self._output.read_text()[-4000:]

    def await_batch(self, *, after: int) -> int:
        """Wait until a pipeline other than that process has stored a batch; returns its process."""

        def stored() -> int:
            file = self.folder / "data" / "pipeline" / "status.json"
            if not file.exists():
                return 0
            report = msgspec.json.decode(file.read_bytes(), type=PipelineReport)
            return report.pid if report.pid != after and report.sinks[0].batch >= 0 else 0

        try:
            return wait_until(stored, timeout=300, message="a batch is stored")
        except TimeoutError:
            pytest.fail(f"no batch is stored; it said:\n{self.words()}")

    def await_log(self, database: PostgresDatabase) -> int:
        """Wait until everything committed so far is in the log; returns its last sequence."""
        word = uuid4().hex
        database.execute("SELECT pg_logical_emit_message(true, 'faults', %s)", (word,))
        with LogReader.open(self.folder / "data" / "log") as log:

            def arrived() -> bool:
                log.refresh()
                last = log.records(max(log.latest_sequence - 50, 0), limit=50)
                return any(word.encode() in record for _, record in last)

            wait_until(arrived, timeout=300, message=f"the log has caught up: {self.words()}")
            return log.latest_sequence

    # -- kills ------------------------------------------------------------------------------------

    def kill_driver(self, pipeline: int, random: Random) -> None:
        os.kill(pipeline, signal.SIGKILL)

    def kill_java(self, pipeline: int, random: Random) -> None:
        [java] = [each for each in _started(pipeline) if _answer(each.name, "") == "java"]
        java.kill()

    def kill_worker(self, pipeline: int, random: Random) -> None:
        daemons = {each.pid for each in _started(pipeline) if "pyspark.daemon" in _command(each)}
        workers = [each for each in _started(pipeline) if _answer(each.ppid, 0) in daemons]
        if workers:
            random.choice(workers).kill()

    def kill_run(self, pipeline: int, random: Random) -> None:
        assert self._running
        self._running.kill()
        self._running.wait()
        psutil.wait_procs([psutil.Process(pipeline)] if psutil.pid_exists(pipeline) else [], 60)
        self.start()

    def _javas(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if str(self.folder) in _command(each)]


def _started(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _command(process: psutil.Process) -> str:
    return " ".join(_answer(process.cmdline, []))


def _answer(ask: Callable[[], T], ended: T) -> T:
    """What a process says of itself; it may have ended since it was listed."""
    try:
        return ask()
    except psutil.NoSuchProcess:
        return ended


@pytest.fixture
def place(tmp_path: Path, pg: PostgresDatabase) -> Iterator[Place]:
    place = Place(tmp_path, pg.url)
    yield place
    place.abort()


@pytest.mark.requirement("S2-21", "S2-22", "S2-24")
def test_killed_at_random_under_a_workload_with_ddl_every_table_equals_its_source(
    place: Place, pg: PostgresDatabase, seed: int
) -> None:
    random = Random(seed)
    workload.create(pg, pages=500)
    kills: list[Callable[[int, Random], None]] = [
        place.kill_driver, place.kill_java, place.kill_worker, place.kill_run,
    ]  # fmt: skip
    random.shuffle(kills)
    place.start()
    pipeline = place.await_batch(after=0)
    with Workload(pg, seed, writers=1) as load:
        for statement, kill in zip(DDL, kills, strict=True):
            load.wait_for_more(random.randrange(30))
            pg.execute(statement)
            load.wait_for_more(random.randrange(30))
            kill(pipeline, random)
            same = kill == place.kill_worker
            pipeline = place.await_batch(after=0 if same else pipeline)
    latest = place.await_log(pg)
    place.stop()
    place.finish()
    names = [TableName("db", "public", table) for table in TABLES]
    verdicts = compare_delta(PostgresShop(pg.url), place.folder / "lake", names)
    wrong = [verdict for verdict in verdicts if not verdict.equal]
    assert not wrong, (seed, wrong, place.words())
    assert has_each_once(place.folder / "audit", range(1, latest + 1)), seed
