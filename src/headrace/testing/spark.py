"""A Spark cluster of real processes on this machine: a master and workers, one core each.

with SparkCluster(workers=2) as cluster:
    session = SparkSession.builder.master(cluster.url).getOrCreate()
"""

import http.client
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from ..errors import HeadraceError
from .processes import dies_with_us, free_port, temporary_directory, wait_until

_STOP_SECONDS = 20.0
_START_SECONDS = 90.0


class ClusterFailed(HeadraceError):
    """A Spark cluster of the test kit does not start."""


class SparkCluster:
    """A standalone master and its workers; nothing of them outlives this process.

    Workers run what the driver names in PYSPARK_PYTHON, with the environment of this process.
    """

    def __init__(self, *, workers: int = 2, memory: str = "1g") -> None:
        """Describe the cluster; `memory` is what each worker may give to executors."""
        self._workers = workers
        self._memory = memory
        self._port, self._page = free_port(), free_port()
        self._folder = temporary_directory()
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """What a session calls its master."""
        return f"spark://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        try:
            self._start("master.Master", "--port", self._port, "--webui-port", self._page)
            wait_until(self._answers, timeout=_START_SECONDS, message="the master answers")
            for number in range(self._workers):
                folder = self._folder / f"worker-{number}"
                own = ("--cores", 1, "--memory", self._memory, "--work-dir", folder)
                self._start("worker.Worker", *own, "--webui-port", free_port(), self.url)
            wait_until(self._complete, timeout=_START_SECONDS, message="every worker is there")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process of the cluster, workers first: they end their executors."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def executors(self) -> list[Path]:
        """The folders of the executors that ran here, with what each printed."""
        return sorted(self._folder.glob("worker-*/app-*/*"))

    def _start(self, program: str, *arguments: object) -> None:
        name = f"{program.rpartition('.')[2].lower()}-{len(self._processes)}"
        command = [_spark_class(), f"org.apache.spark.deploy.{program}", "--host", "127.0.0.1"]
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*dies_with_us("TERM"), *command, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"},
                start_new_session=True,  # Ctrl-C is for us: we stop them, in our order
            )
        self._processes.append(process)

    def _answers(self) -> bool:
        return self._state() is not None

    def _complete(self) -> bool:
        state = self._state() or {}
        alive = [worker for worker in state.get("workers", []) if worker["state"] == "ALIVE"]
        return len(alive) == self._workers

    def _state(self) -> dict[str, list[dict[str, str]]] | None:
        """What the master says of itself; None: it does not answer yet."""
        if any(process.poll() is not None for process in self._processes):
            logs = [path.read_text(errors="replace") for path in self._folder.glob("*.log")]
            raise ClusterFailed("a process of Spark ended; it said:\n" + "\n".join(logs))
        asking = http.client.HTTPConnection("127.0.0.1", self._page, timeout=5)
        try:
            asking.request("GET", "/json/")
            answer = asking.getresponse()
            content = answer.read()
            if answer.status != http.client.OK:
                return None  # it has opened its port, but not every page yet
        except (OSError, http.client.HTTPException):
            return None
        finally:
            asking.close()
        state: dict[str, list[dict[str, str]]] = msgspec.json.decode(content)
        return state


def _spark_class() -> str:
    # Only located: importing Spark is not needed to run the programs inside it.
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ClusterFailed("pyspark is not installed")
    return str(Path(spec.origin).parent / "bin" / "spark-class")
