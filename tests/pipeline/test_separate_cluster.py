"""A cluster that shares nothing with its driver but a bucket and two ports.

Workers have folders of their own, and a Python that knows no Headrace. It comes to them packed, in
`spark.archives`; the log comes over HTTP, and every sink is in the bucket.
"""

import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.change.event import Op
from headrace.log import Log
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.testing import SparkCluster, free_port
from tests.buckets import KEY, SECRET, Bucket
from tests.changes import Writer
from tests.java import QUICK_JAVA
from tests.plugins.environments import ROOT, Environment, wheel_of
from tests.sinks.receiver import OK, Receiver, Request, reply

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("java")]

CLUSTER_SECRET = "known-to-the-cluster"
REFUSED = "3"
NAME = "environment"


@dataclass(frozen=True)
class Driver:
    """The machine of a driver: a folder with an environment, packed and unpacked."""

    folder: Path

    @classmethod
    def prepared(cls, folder: Path) -> "Driver":
        Environment.created(folder / NAME, wheel_of(ROOT, folder))
        with tarfile.open(folder / f"{NAME}.tar.gz", "w:gz") as packed:
            packed.add(folder / NAME, arcname=".")
        return cls(folder)

    def pipeline(self, config: dict[str, Any]) -> tuple[int, str, str]:
        """Run it once: its exit code, its output, and the arguments of all processes meanwhile."""
        (self.folder / "headrace.yaml").write_text(json.dumps(config))
        hidden = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
        known = {name: value for name, value in os.environ.items() if name not in hidden}
        seen = set[str]()
        output = self.folder / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [self.folder / NAME / "bin" / "headrace", "pipeline", "--once"],
                cwd=self.folder,
                env=known,
                stdout=file,
                stderr=file,
            )
            while process.poll() is None:
                seen |= set(_arguments())
                try:
                    process.wait(0.3)
                except subprocess.TimeoutExpired:
                    continue
        return process.returncode, output.read_text(), "\n".join(seen)

    def written(self) -> list[Path]:
        """What runs have left here."""
        given = {self.folder / NAME, self.folder / "headrace.yaml"}
        return [
            file
            for file in self.folder.rglob("*")
            if file.is_file() and not given & {file, *file.parents}
        ]


def _arguments() -> Iterator[str]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                yield Path("/proc", name, "cmdline").read_text(errors="replace")
            except OSError:
                continue  # it has ended


def refuse(request: Request) -> bytes:
    return reply(422, b"not this one") if json.loads(request.body)["after"]["id"] == REFUSED else OK


def configured(cluster: SparkCluster, url: str, bucket: Bucket, hook: str) -> dict[str, Any]:
    return {
        "pipeline": {
            "master": cluster.url,
            "url": url,
            "spark": {
                **QUICK_JAVA,
                "spark.driver.host": "127.0.0.1",
                "spark.executor.memory": "512m",
                "spark.authenticate.secret": CLUSTER_SECRET,
                "spark.sql.shuffle.partitions": 2,
                "spark.archives": f"{NAME}.tar.gz#{NAME}",
                "spark.pyspark.python": f"./{NAME}/bin/python",
                # What a history server would show: settings, plans, errors.
                "spark.eventLog.enabled": True,
                "spark.eventLog.compress": False,
                "spark.eventLog.dir": ".",
            },
            "sinks": {
                "lake": {"type": "tables", "path": bucket.uri("now"), "storage": bucket.options},
                "audit": {
                    "type": "history",
                    "path": bucket.uri("audit"),
                    "storage": bucket.options,
                },
                "hooks": {
                    "type": "webhook",
                    "url": hook,
                    "secret": "whsec_" + "a" * 32,
                    "allow_private_networks": True,
                    "dead_letters": bucket.uri("letters"),
                    "dead_letters_storage": bucket.options,
                },
            },
        },
    }


def test_a_cluster_needs_nothing_but_an_archive_a_bucket_and_the_log(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = ServerSettings(port=free_port())
    driver = Driver.prepared(tmp_path)
    with (
        Log.open(tmp_path_factory.mktemp("elsewhere") / "log") as log,
        BackgroundServer(
            create_app(log, statuses=list, copy_again=None, settings=settings), settings
        ) as server,
        Receiver(refuse) as receiver,
        Bucket() as bucket,
        SparkCluster(workers=2, secret=CLUSTER_SECRET, variables={"PYTHONPATH": ""}) as cluster,
    ):
        writer = Writer(log)
        for pk in "12345":
            writer.put("users", pk, name="first")
        for pk in "234":
            writer.put("users", pk, Op.UPDATE, name="second")
        config = configured(cluster, server.url, bucket, f"{receiver.url}/")
        code, output, arguments = driver.pipeline(config)
        assert code == 0, output
        executors = cluster.executors()
        assert len(executors) == 2
        assert all((executor / NAME / "bin" / "python").exists() for executor in executors)

        users = bucket.rows("now/public/users", "id", "name").to_pylist()
        now = {row["id"]: row["name"] for row in users}
        assert now == {"1": "first", "2": "second", "3": "second", "4": "second", "5": "first"}
        sequences = bucket.rows("audit", "sequence")["sequence"].to_pylist()
        assert sorted(sequences) == list(range(1, log.latest_sequence + 1))
        letters = bucket.rows("letters", "status").to_pylist()
        assert sorted(letter["status"] for letter in letters) == ["refused", "waiting"]
        printed = "".join(
            (executor / name).read_text() for executor in executors for name in ("stdout", "stderr")
        )

    files = driver.written()
    assert any(file.name.startswith("events_") for file in files)  # Spark's event log
    assert "CoarseGrainedExecutorBackend" in arguments
    said = (
        output + printed + arguments + "".join(file.read_text(errors="replace") for file in files)
    )
    for secret in (SECRET, KEY, CLUSTER_SECRET):
        assert secret not in said
    assert not [file for file in files if file.suffix == ".parquet"]
