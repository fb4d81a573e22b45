"""Checkpoints in a bucket, by Hadoop's own file system for S3 in Spark's Java.

`scripts/setup.sh s3a` fetches its jars; HEADRACE_S3A_JARS may name another folder.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.change.event import Op
from headrace.log import Log
from headrace.pipeline.hadoop import check_storage
from headrace.sinks import SinkPhase, SinkStatus, report
from headrace.testing import wait_until
from tests.buckets import KEY, SECRET, Bucket
from tests.changes import Writer
from tests.java import QUICK_JAVA
from tests.needs import missing

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("java")]

ADDRESS = "s3://lake/checkpoints"


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with Bucket() as server:
        yield server


@pytest.fixture(scope="module")
def settings(bucket: Bucket) -> dict[str, str]:
    """What Spark is configured with to reach the bucket."""
    folder = Path(os.environ.get("HEADRACE_S3A_JARS") or Path(sys.prefix, "hadoop-aws"))
    if not folder.exists():
        missing("the jars of hadoop-aws are not there (scripts/setup.sh s3a)")
    return {
        "spark.jars": ",".join(map(str, sorted(folder.glob("*.jar")))),
        "spark.hadoop.fs.s3a.endpoint": f"http://{bucket.address}",
        "spark.hadoop.fs.s3a.endpoint.region": "eu-central-1",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": KEY,
        "spark.hadoop.fs.s3a.secret.key": SECRET,
    }


class Machine:
    """A folder from which a pipeline runs; all of them read the same log."""

    def __init__(self, folder: Path, log: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "log").symlink_to(log)
        (folder / "headrace.yaml").write_text(json.dumps(config))
        (folder / "headrace.yaml").chmod(0o600)

    @contextmanager
    def running(self, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
        with subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", "pipeline", *arguments],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.terminate()

    def carry(self) -> SinkStatus:
        """Run it to its end; how its sink was then."""
        with self.running("--once") as process:
            _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert SECRET not in errors
        return self.status()

    def status(self) -> SinkStatus:
        [status] = report.read(self.folder / "data" / "pipeline").sinks
        return status

    def has(self, phase: SinkPhase, sequence: int) -> bool:
        """Whether its sink is in a phase, and has everything up to a sequence."""
        sinks = report.read(self.folder / "data" / "pipeline").sinks
        return [(sink.phase, sink.sequence) for sink in sinks] == [(phase, sequence)]


def configured(bucket: Bucket, settings: dict[str, str]) -> dict[str, Any]:
    lake = {"type": "tables", "path": bucket.uri("now"), "storage": bucket.options}
    return {
        "sources": {"db": {"type": "postgres", "url": "postgresql://127.0.0.1:1/x"}},
        "pipeline": {
            "master": "local[2]",
            "checkpoint_dir": ADDRESS,
            "spark": {**QUICK_JAVA, "spark.ui.enabled": "false", **settings},
            "sinks": {"lake": lake},
        },
    }


def committed(bucket: Bucket) -> set[str]:
    """The batches that the checkpoint has as stored."""
    found = bucket.folder("checkpoints/lake/checkpoint/commits").objects.entries("")
    return {name for each in found if (name := each.path.rpartition("/")[2])}  # no marker


def test_pipelines_go_on_one_after_another_with_a_checkpoint_in_a_bucket(
    tmp_path: Path, bucket: Bucket, settings: dict[str, str]
) -> None:
    def users() -> dict[str, str]:
        rows = bucket.rows("now/public/users", "id", "name").to_pylist()
        return {row["id"]: row["name"] for row in rows}

    config = configured(bucket, settings)
    first = Machine(tmp_path / "first", tmp_path / "log", config)
    second = Machine(tmp_path / "second", tmp_path / "log", config)
    with Log.open(tmp_path / "log") as log:
        writer = Writer(log)
        for number in range(20):
            writer.put("users", str(number), name="new")
        with first.running() as earlier:
            wait_until(lambda: first.has(SinkPhase.STREAMING, 20), timeout=300, message="stored")
            assert users() == {str(number): "new" for number in range(20)}
            # A machine that has nothing but the config takes over, and goes on where that one is.
            status = second.carry()
            assert (status.batch, status.changes, status.sequence) == (-1, 0, 20)
            for number in range(5):
                writer.put("users", str(number), Op.UPDATE, name="paid")
            wait_until(lambda: first.has(SinkPhase.HALTED, 20), timeout=300, message="halted")
            earlier.terminate()
            _, errors = earlier.communicate()
        assert earlier.returncode == 1
        assert f"another pipeline has taken over the checkpoint of sink lake in {ADDRESS}" in errors
        assert SECRET not in errors
        status = second.carry()
        assert (status.changes, status.sequence) == (5, 25)
        assert users() == {str(number): "paid" if number < 5 else "new" for number in range(20)}
        assert committed(bucket) == {str(number) for number in range(status.batch + 1)}
    for machine in (first, second):
        files = [path for path in (machine.folder / "data").rglob("*") if path.is_file()]
        assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_check_writes_to_the_bucket_or_names_what_is_missing(
    bucket: Bucket, settings: dict[str, str]
) -> None:
    address = "s3a://lake/checked"
    found = check_storage(address, settings)
    assert (found.ok, found.detail) == (True, f"{address} can be written")
    left = bucket.folder("checked").objects.entries("")
    assert [each.path for each in left] == [""]  # Hadoop's mark of a folder
    elsewhere = check_storage("s3a://nowhere/checked", settings)
    assert not elsewhere.ok
    assert "cannot be used" in elsewhere.detail
    assert SECRET not in elsewhere.detail
    lacking = check_storage(address, {**settings, "spark.jars": ""})
    assert not lacking.ok
    assert "this Spark lacks the package org.apache.hadoop:hadoop-aws:" in lacking.detail
    assert "\n" not in lacking.detail
