"""`headrace verify` beside a whole `headrace run`: damage is found, and repaired."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import httpx
import msgspec
import pytest
from deltalake import DeltaTable

from headrace.config import load
from headrace.sinks.verification import noted
from headrace.sources.sqlite import install
from headrace.testing import free_port, wait_until
from tests.java import QUICK_JAVA

pytestmark = [pytest.mark.requirement("P-11"), pytest.mark.slow]

HEADRACE = [sys.executable, "-m", "headrace.cli"]
PATIENCE = 600.0  # seconds; far more than anything here takes, also on a busy machine


class Running:
    """A folder with a database, and a `headrace run` on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "headrace.yaml"
        self.port = free_port()
        database = folder / "shop.db"
        connection = apsw.Connection(str(database))
        connection.execute("PRAGMA journal_mode = wal")
        connection.execute('CREATE TABLE "shop.items" (id INTEGER PRIMARY KEY, secret TEXT)')
        connection.execute(
            """INSERT INTO "shop.items" VALUES (1, 'hush'), (2, 'hush'), (3, 'hush')"""
        )
        connection.close()
        install(str(database), ("*",))
        content = {
            "data_dir": "data",
            "sources": {"shop": {"type": "sqlite", "path": "shop.db"}},
            "server": {"port": self.port},
            "pipeline": {
                "spark": {**QUICK_JAVA, "spark.driver.memory": "1g"},
                # Without vectors, so that delta-rs can damage the tables.
                "sinks": {"lake": {"type": "tables", "path": "lake", "deletes": "rewrite"}},
            },
        }
        self.file.write_bytes(msgspec.json.encode(content))  # JSON is YAML

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the block runs, which begins when the lake has all."""
        with (self.folder / "run.log").open("wb") as log:
            process = subprocess.Popen([*HEADRACE, "run"], cwd=self.folder, stdout=log, stderr=log)
            try:
                wait_until(lambda: self._followed(process), timeout=PATIENCE)
                yield
            finally:
                process.terminate()
                process.wait(PATIENCE)

    def _followed(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, (self.folder / "run.log").read_text()
        try:
            sinks = self.get("/v1/sinks").get("sinks")
        except httpx.HTTPError:
            return False
        return bool(sinks) and sinks[0]["sequence"] >= 3

    def get(self, path: str) -> Any:
        """What the server answers."""
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=60).json()

    def verify(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command."""
        command = [*HEADRACE, "verify", "lake", *arguments]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE, check=False
        )


def test_a_damaged_table_is_found_repaired_and_verified_again_by_the_server(
    java: None, tmp_path: Path
) -> None:
    place = Running(tmp_path)
    with place.running():
        items = DeltaTable(str(tmp_path / "lake" / "main" / "shop.items"))
        items.delete("id = 1")
        items.update({"secret": "'other'"}, predicate="id = 2")
        done = place.verify()
        assert done.returncode == 1, done.stdout + done.stderr
        assert "1: missing" in done.stdout
        assert "2: different in secret" in done.stdout
        assert "hush" not in done.stdout + done.stderr
        [sink] = place.get("/health")["pipeline"]["sinks"]
        assert sink["status"] == "degraded"
        assert sink["verified"]["tables"][0]["missing"] == 1
        done = place.verify("--repair", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["tables"][0]["outcome"] == "equal"
        assert place.verify("--every", "1s").returncode == 0
        folder = load(place.file).sink_dir("lake")
        before = noted(folder)
        assert before is not None

        def again() -> bool:
            last = noted(folder)
            return last is not None and last.at > before.at and last.sound

        wait_until(again, timeout=PATIENCE)
    assert "hush" not in (tmp_path / "run.log").read_text()
