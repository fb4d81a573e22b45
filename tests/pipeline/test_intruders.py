"""Other users of the machine: they see no setting, and what they send to Spark has no effect."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.testing import free_port, wait_until
from tests.changes import opened_writer
from tests.java import QUICK_JAVA
from tests.pipeline.places import NOWHERE, Place

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("java")]

HIDDEN = "4711 hunter2"
SECRETS = {
    "spark.hadoop.fs.s3a.secret.key": HIDDEN,
    "spark.driver.hidden": HIDDEN,
    "spark.driver.extraJavaOptions": f'-XX:+UseSerialGC "-Dx={HIDDEN}"',
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.end()


def store(place: Place, count: int, *, total: int) -> None:
    """Write so many changes, and wait until the sink has all that there were."""
    with opened_writer(place.folder / "data" / "log") as writer:
        writer.put_many("users", count)
    if place.process is None:
        place.start("pipeline")
    place.await_stored(total)


def configure(place: Place, **spark: str) -> None:
    section = {
        "master": "local[1]",
        "spark": QUICK_JAVA | spark,
        "trigger_seconds": 0.2,
        "sinks": {
            "lake": {"type": "folder", "path": "lake"},
            "shared": {"type": "tables", "path": "shared", "mode": "0750"},
            "own": {"type": "history", "path": "own"},
        },
    }
    place.configure(NOWHERE, pipeline=section)


def stop_the_executor(port: int) -> str:
    """What an intruder got for it."""
    command = [sys.executable, "-m", "tests.pipeline.intruder", str(port)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.requirement("P-17", "P-40")
def test_whoever_lacks_the_secret_is_refused_and_sees_no_setting(place: Place) -> None:
    port = free_port()
    configure(place, **SECRETS, **{"spark.driver.port": str(port)})
    store(place, 10, total=10)
    family = place.family()
    shown = [line for process in family for line in command_line(process)]
    assert any("org.apache.spark" in line for line in shown)
    assert not [line for line in shown if "hunter2" in line]
    assert stop_the_executor(port).startswith("refused: ")
    replies = [answer(port) for port in listening(family)]
    assert not [reply for reply in replies if b"ForeachBatch" in reply or reply.startswith(b"!y")]
    store(place, 10, total=20)
    expect_modes(place)


def expect_modes(place: Place) -> None:
    """Only what a sink's `mode` opens can be reached by others."""
    wait_until(lambda: [*place.folder.glob("shared/public/users/*.parquet")], timeout=120)
    wait_until(lambda: [*place.folder.glob("own/**/*.parquet")], timeout=120)

    def mode(path: Path) -> str:
        return f"{path.stat().st_mode & 0o777:o}"

    folders = {name: mode(place.folder / name) for name in ("own", "shared", "data/pipeline")}
    assert folders == {"own": "700", "shared": "750", "data/pipeline": "700"}
    checkpoints = place.folder.glob("data/pipeline/*/checkpoint/*/*")
    # Checksums follow the widest of the modes, below a folder that nobody else may enter.
    assert {mode(path) for path in checkpoints if path.is_file()} <= {"600", "640"}
    shared = [*place.folder.glob("shared/**/*")]
    assert {mode(path) for path in shared} == {"750", "640"}


def command_line(process: psutil.Process) -> list[str]:
    """What every user can see; nothing of one that has just ended."""
    try:
        return [" ".join(process.cmdline())]
    except psutil.Error:
        return []


def listening(family: list[psutil.Process]) -> list[int]:
    found = [each for process in family for each in connections(process)]
    return [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]


def connections(process: psutil.Process) -> list[Any]:
    try:
        return process.net_connections()
    except psutil.Error:
        return []


def answer(port: int) -> bytes:
    """What a port answers to a call of the function that gets the batches, without a token."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.settimeout(2)
            connection.sendall(b"c\np0\nlike\ne\n")
            return connection.recv(4096)
    except OSError:
        return b""


def test_a_pipeline_whose_tasks_are_refused_for_ever_ends(place: Place) -> None:
    port = free_port()
    configure(place, **{"spark.driver.port": str(port), "spark.authenticate": "false"})
    store(place, 10, total=10)
    assert stop_the_executor(port) == "stopped\n", "this is what the secret prevents"
    with opened_writer(place.folder / "data" / "log") as writer:
        writer.put_many("users", 10)
    assert place.process is not None
    assert place.process.wait(timeout=120) == 1
    assert "error: Spark takes no more tasks: its executor was stopped" in place.output()
    assert "Traceback" not in place.output()
