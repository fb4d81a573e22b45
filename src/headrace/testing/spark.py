"""A Spark cluster of real processes on this machine: a master and workers, one core each.

with SparkCluster(workers=2) as cluster:
    session = SparkSession.builder.master(cluster.url).getOrCreate()
"""

import http.client
import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import ClassVar, Self

import msgspec

from .processes import ServerFailed, ServerProcess, free_port, temporary_directory


class _SparkDaemon(ServerProcess):
    """A process of a standalone cluster."""

    program: ClassVar[str]
    settings: Mapping[str, str] = MappingProxyType({})
    variables: Mapping[str, str] = MappingProxyType({})
    ORPHAN_SIGNAL: ClassVar[str] = "TERM"  # a worker then ends its executors

    def __init__(self, directory: Path, *arguments: object) -> None:
        directory.mkdir()
        super().__init__(directory)
        self.page_port = free_port()
        self._arguments = arguments

    def command(self) -> list[str]:
        name = f"org.apache.spark.deploy.{self.program}"
        # Not in the environment or the arguments: they may hold a secret.
        file = self.directory / "spark.conf"
        file.touch(mode=0o600)
        file.write_text("".join(f"{name} {value}\n" for name, value in self.settings.items()))
        own = ["--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(self.page_port)]
        own += ["--properties-file", str(file)]
        return [_spark_class(), name, *own, *map(str, self._arguments)]

    def environment(self) -> dict[str, str]:
        return {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"}

    def answers(self) -> bool:
        return self.state() is not None

    def state(self) -> dict[str, object] | None:
        """What the process reports of itself; None: it does not answer yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.page_port, timeout=5)
        try:
            connection.request("GET", "/json/")
            response = connection.getresponse()
            content = response.read()
            if response.status != http.client.OK:
                return None  # it has opened its port, but not every page yet
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        try:
            state: dict[str, object] = msgspec.json.decode(content)
        except msgspec.DecodeError:
            return None  # a page that is not complete yet
        return state


class _SparkMaster(_SparkDaemon):
    program = "master.Master"

    def workers(self) -> set[int]:
        """The ports of the workers that are registered and alive."""
        workers = msgspec.convert((self.state() or {}).get("workers", []), list[_Registered])
        return {worker.port for worker in workers if worker.state == "ALIVE"}


class _Registered(msgspec.Struct):
    """A worker as the master lists it."""

    port: int
    state: str


class _SparkWorker(_SparkDaemon):
    program = "worker.Worker"

    def __init__(self, directory: Path, master: _SparkMaster, *, memory: str) -> None:
        url = f"spark://{master.address}"
        super().__init__(directory, "--cores", 1, "--memory", memory, "--work-dir", directory, url)
        self._master = master

    def environment(self) -> dict[str, str]:
        # Executors are its children: what they spill goes to its own folder too.
        return {**super().environment(), "SPARK_LOCAL_DIRS": str(self.directory), **self.variables}

    def answers(self) -> bool:
        return self.port in self._master.workers()


class SparkCluster:
    """A standalone master and its workers; nothing of them outlives this process.

    Workers run what the driver names in PYSPARK_PYTHON, with the environment of this process.
    Each has a folder of its own, in which its executors run and to which they spill.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        memory: str = "1g",
        secret: str = "",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Describe the cluster; `memory` is what each worker may give to executors.

        With a `secret` it takes nothing from whoever does not have it. `variables` are added to the
        environment of the workers.
        """
        self._directory = temporary_directory()
        self._master = _SparkMaster(self._directory / "master")
        self._workers = [
            _SparkWorker(self._directory / f"worker-{number}", self._master, memory=memory)
            for number in range(workers)
        ]
        for worker in self._workers:
            worker.variables = variables
        if secret:
            settings = {"spark.authenticate": "true", "spark.authenticate.secret": secret}
            for process in (self._master, *self._workers):
                process.settings = settings

    @property
    def url(self) -> str:
        """What a session calls its master."""
        return f"spark://{self._master.address}"

    def __enter__(self) -> Self:
        try:
            self._master.start()
            for worker in self._workers:
                worker.launch()
            for worker in self._workers:
                worker.wait_until_ready()
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
        for process in (*self._workers, self._master):
            process.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def executors(self) -> list[Path]:
        """The folders of the executors that ran here, with what each printed."""
        return sorted(self._directory.glob("worker-*/app-*/*"))


def _spark_class() -> str:
    # Only located: importing Spark is not needed to run the programs inside it.
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ServerFailed("pyspark is not installed")
    return str(Path(spec.origin).parent / "bin" / "spark-class")
