"""The pipeline as a process: it comes back when it is killed, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.testing import PostgresDatabase, free_port, wait_until
from tests.changes import opened_writer
from tests.java import QUICK_JAVA
from tests.pipeline.sites import PLUGINS

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("java")]

HEADRACE = [sys.executable, "-m", "headrace.cli"]
NOWHERE = "postgresql://127.0.0.1:1/shop"


class Place:
    """A folder with a config, and processes of Headrace in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": str(PLUGINS)}
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, url: str, **sections: Any) -> None:
        content = {
            "sources": {"db": {"type": "postgres", "url": url}},
            "server": {"port": free_port()},
            "pipeline": {
                "master": "local[1]",
                "spark": QUICK_JAVA,
                "trigger_seconds": 0.2,
                "sinks": {"lake": {"type": "folder", "path": "lake"}},
            },
            **sections,
        }
        (self.folder / "headrace.yaml").write_text(json.dumps(content))

    def start(self, command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [*HEADRACE, command],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
            )
        return self.process

    def ask(self, *command: str) -> str:
        return subprocess.check_output(
            [*HEADRACE, *command], cwd=self.folder, env=self.environment, text=True
        )

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def pipeline_pid(self) -> int:
        return int(json.loads((self.folder / "data/pipeline/status.json").read_text())["pid"])

    def javas(self) -> list[psutil.Process]:
        """The JVMs that work for this folder."""
        return [p for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.name() == "java" and str(self.folder) in " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            return False

    def stored(self) -> int:
        """How many rows have arrived."""
        files = (self.folder / "lake").glob("*.json")
        rows = [row for file in files for row in json.loads(file.read_text())]
        return sum(row["op"] in ("READ", "INSERT") for row in rows)

    def await_stored(self, count: int) -> None:
        try:
            wait_until(lambda: self.stored() >= count, timeout=120)
        except TimeoutError:
            pytest.fail(f"{self.stored()} of {count} stored; it said:\n{self.output()}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    if place.process:
        place.process.kill()
        place.process.wait()
    wait_until(lambda: not place.javas(), timeout=120, message="no JVM is left")


def test_run_starts_the_pipeline_and_starts_it_again(place: Place, pg: PostgresDatabase) -> None:
    pg.execute("CREATE TABLE public.users (id int PRIMARY KEY, name text)")
    pg.execute("INSERT INTO users SELECT n, 'user ' || n FROM generate_series(1, 10) n")
    place.configure(pg.url)
    running = place.start("run")
    place.await_stored(10)
    first = place.pipeline_pid()

    def told() -> bool:
        status = json.loads(place.ask("status", "--json"))["pipeline"]
        return bool(status["running"] and status["sinks"][0]["sequence"] >= 10)

    # The account of a batch comes a moment after the batch.
    wait_until(told, timeout=120, message="status tells how far the sink is")
    shown = place.ask("status")
    assert f"pipeline: process {first} runs; as of" in shown
    assert "lake  streaming" in shown

    os.kill(first, signal.SIGKILL)
    pg.execute("INSERT INTO users SELECT n, 'user ' || n FROM generate_series(11, 20) n")
    place.await_stored(20)
    assert "pipeline ended exit_code=-9 " in place.output()

    [java] = place.javas()
    java.kill()
    pg.execute("INSERT INTO users SELECT n, 'user ' || n FROM generate_series(21, 30) n")
    place.await_stored(30)
    assert "error: Spark's Java process has ended" in place.output()
    assert "pipeline ended exit_code=1 " in place.output()

    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=120) == 0, place.output()
    assert place.javas() == []
    assert "pipeline: not running; as of" in place.ask("status")
    assert "Traceback" not in place.output()


def test_a_pipeline_ends_with_the_run_that_started_it_even_if_its_sink_hangs(place: Place) -> None:
    with opened_writer(place.folder / "data" / "log") as writer:
        writer.put_many("users", 10)
    (place.folder / "lake").mkdir()
    (place.folder / "lake" / "fault-write").write_text("hang")
    place.configure(NOWHERE, cdc={"enabled": False})
    running = place.start("run")
    wait_until((place.folder / "lake" / "hanging").exists, timeout=120, message="it hangs")
    pipeline = psutil.Process(place.pipeline_pid())
    running.kill()
    psutil.wait_procs([pipeline], timeout=120)
    assert not pipeline.is_running()
