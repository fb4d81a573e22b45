"""A folder with a config, and processes of Headrace in it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from headrace.testing import free_port, wait_until
from tests.java import QUICK_JAVA
from tests.pipeline.sites import PLUGINS

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

    def health(self) -> str:
        """What /health says."""
        port = json.loads((self.folder / "headrace.yaml").read_text())["server"]["port"]
        status: str = httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).json()["status"]
        return status

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
            wait_until(lambda: self.stored() >= count, timeout=300)
        except TimeoutError:
            pytest.fail(f"{self.stored()} of {count} stored; it said:\n{self.output()}")

    def family(self) -> list[psutil.Process]:
        """The process that was started, and all that it started."""
        assert self.process is not None
        started = psutil.Process(self.process.pid)
        return [started, *started.children(recursive=True)]

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process:
            self.process.kill()
            self.process.wait()
        wait_until(lambda: not self.javas(), timeout=120, message="no JVM is left")
