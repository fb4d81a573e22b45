"""On a cluster, executors read the log over HTTP and nothing else is shared with them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.log import Log
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.testing import SparkCluster, free_port
from tests.changes import Writer
from tests.deltas import stored
from tests.java import QUICK_JAVA

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("java")]

TRANSACTIONS = 8
ROWS = 5000
SECRET = "known to the cluster"


def test_a_cluster_carries_the_log_into_its_sinks(tmp_path: Path) -> None:
    settings = ServerSettings(port=free_port())
    served = tmp_path / "elsewhere"  # not where the driver's config says that a log would be
    with Log.open(served) as log, SparkCluster(workers=2, secret=SECRET) as cluster:
        writer = Writer(log)
        for _ in range(TRANSACTIONS):
            writer.put_many("users", ROWS)
        with BackgroundServer(
            create_app(log, statuses=list, copy_again=None, settings=settings), settings
        ) as server:
            config = {
                "sources": {"db": {"type": "postgres", "url": "postgresql://127.0.0.1:1/x"}},
                "pipeline": {
                    "master": cluster.url,
                    "url": server.url,
                    "shared_disk": True,
                    "spark": {
                        "spark.executor.memory": "512m",
                        "spark.driver.host": "127.0.0.1",
                        "spark.authenticate.secret": SECRET,
                        **QUICK_JAVA,
                        "spark.sql.shuffle.partitions": 2,
                    },
                    "sinks": {
                        "lake": {"type": "tables", "path": "lake"},
                        "audit": {"type": "history", "path": "audit"},
                    },
                },
            }
            (tmp_path / "headrace.yaml").write_text(json.dumps(config))
            done = subprocess.run(
                [sys.executable, "-m", "headrace.cli", "pipeline", "--once"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        assert len(cluster.executors()) == 2
    users = stored(tmp_path / "lake" / "public" / "users")
    assert users.num_rows == ROWS  # each transaction writes the same ones
    audit = stored(tmp_path / "audit", ["sequence"])
    sequences = sorted(audit["sequence"].to_pylist())
    assert sequences == list(range(1, TRANSACTIONS * ROWS + 1))
