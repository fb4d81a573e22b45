"""The pipeline as a process: it comes back when it is killed, and leaves nothing behind."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.testing import PostgresDatabase, wait_until
from tests.changes import opened_writer
from tests.observe.test_lines import parsed
from tests.pipeline.places import NOWHERE, Place

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("java")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.end()


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

    wait_until(lambda: place.health() == "healthy", timeout=120, message="all is well")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: place.health() == "degraded", timeout=60, message="the loss shows")
    pg.execute("INSERT INTO users SELECT n, 'user ' || n FROM generate_series(11, 20) n")
    place.await_stored(20)
    wait_until(lambda: place.health() == "healthy", timeout=120, message="all is well again")
    assert '"pipeline ended" exit_code=-9 ' in place.output()

    [java] = place.javas()
    java.kill()
    pg.execute("INSERT INTO users SELECT n, 'user ' || n FROM generate_series(21, 30) n")
    place.await_stored(30)
    assert "error: Spark's Java process has ended" in place.output()
    assert '"pipeline ended" exit_code=1 ' in place.output()

    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=120) == 0, place.output()
    assert place.javas() == []
    assert "pipeline: not running; as of" in place.ask("status")
    assert "Traceback" not in place.output()
    started, *logged = place.output().splitlines()
    assert started.startswith("headrace ")  # on the standard output
    lines = [parsed(line) for line in logged]
    [stored] = [line for line in lines if line.get("sink") == "lake" and line.get("phase")][:1]
    assert stored["level"] == "info"
    assert "error" in {line["level"] for line in lines if "Java process" in line.get("msg", "")}


def test_a_pipeline_ends_with_the_run_that_started_it_even_if_its_sink_hangs(place: Place) -> None:
    with opened_writer(place.folder / "data" / "log") as writer:
        writer.put_many("users", 10)
    (place.folder / "lake").mkdir()
    (place.folder / "lake" / "fault-write").write_text("hang")
    place.configure(NOWHERE, cdc={"enabled": False})
    running = place.start("run")
    wait_until((place.folder / "lake" / "hanging").exists, timeout=120, message="it hangs")
    family = [process for process in place.family() if process.pid != running.pid]
    assert {"java"} < {process.name() for process in family}
    running.kill()
    running.wait()
    place.start("run")  # at once: it waits for the orphan
    assert psutil.wait_procs(family, timeout=120)[1] == []
    (place.folder / "lake" / "fault-write").unlink()
    place.await_stored(10)
    assert "pipeline ended" not in place.output()
