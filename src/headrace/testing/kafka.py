"""A real Apache Kafka in a folder: one process that is broker and controller.

with KafkaServer() as server:
    deliver(server.address())
"""

import atexit
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from ..errors import HeadraceError
from .processes import dies_with_us, free_port, temporary_directory, wait_until

HINT = "Run `scripts/setup.sh kafka`; it takes Java 17, Maven and a way to Maven Central."

_CLUSTER = "aGVhZHJhY2UtdGVzdHMtMQ"  # 16 bytes in Base64, as Kafka wants them
_OWN = "CONTROLLER"  # the listener that the process talks to itself on
_STARTS_SOON = ("-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_LOGS_LITTLE = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"

DEFAULT_SETTINGS: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.enable": "false",
    # A killed one comes back as soon as it is known to be gone.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
}


class KafkaFailed(HeadraceError):
    """A Kafka of the test kit does not start or stop."""


@functools.cache
def kafka_jars() -> Path | None:
    """The folder with the broker's jars; None: they were not fetched, or Java is missing."""
    jars = Path(sys.prefix, "kafka")
    return jars if jars.is_dir() and _java() is not None else None


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else shutil.which("java")


class KafkaServer:
    """A Kafka in a folder of its own; nothing of it outlives this process."""

    def __init__(
        self,
        *,
        listeners: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
        options: Sequence[str] = _STARTS_SOON,
    ) -> None:
        """Describe it: `listeners` are further ones, by name, each with its protocol.

        `settings` are the broker's own, `options` Java's.
        """
        jars = kafka_jars()
        if jars is None:
            raise KafkaFailed("Apache Kafka's jars are not there", hint=HINT)
        self._java = [_java() or "java", *options, _LOGS_LITTLE, "-cp", f"{jars}/*"]
        self.directory = temporary_directory()
        self.protocols = {"PLAIN": "PLAINTEXT", **(listeners or {}), _OWN: "PLAINTEXT"}
        self.ports = {name: free_port() for name in self.protocols}
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<Kafka {self.address()} directory={self.directory}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self.directory)

    def address(self, listener: str = "PLAIN") -> str:
        """Where a client begins, as `bootstrap.servers` has it."""
        return f"127.0.0.1:{self.ports[listener]}"

    @property
    def log(self) -> Path:
        """The file that its messages go to."""
        return self.directory / "server.log"

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and return when it answers."""
        if self.running:
            raise KafkaFailed(f"{self!r} already runs")
        if not (self.directory / "data").exists():
            self._create()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*dies_with_us("KILL"), *self._java, "kafka.Kafka", str(self._file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,  # Ctrl-C is for us: we stop it, in our order
            )
        _started.add(self)
        wait_until(self._ready, timeout=60, message=f"{self!r} answers")

    def stop(self) -> None:
        """Stop it in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Let it answer nothing, with every connection still open, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._signal(signal.SIGCONT)

    @property
    def _file(self) -> Path:
        return self.directory / "server.properties"

    def _create(self) -> None:
        lines = (f"{name}={value}\n" for name, value in self._properties().items())
        self._file.write_text("".join(lines))
        tool = ["kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(self._file)]
        result = subprocess.run([*self._java, *tool], capture_output=True, check=False, text=True)
        if result.returncode:
            raise KafkaFailed(f"no data for {self!r} could be made: {result.stderr.strip()}")

    def _properties(self) -> dict[str, str]:
        at = {name: f"{name}://127.0.0.1:{port}" for name, port in self.ports.items()}
        protocols = [f"{name}:{protocol}" for name, protocol in self.protocols.items()]
        own = {
            "log.dirs": str(self.directory / "data"),
            "listeners": ",".join(at.values()),
            "advertised.listeners": ",".join(at[name] for name in at if name != _OWN),
            "listener.security.protocol.map": ",".join(protocols),
            "inter.broker.listener.name": "PLAIN",
            "controller.listener.names": _OWN,
            "controller.quorum.voters": f"1@127.0.0.1:{self.ports[_OWN]}",
        }
        return {**DEFAULT_SETTINGS, **own, **self._settings}

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            last_lines = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
            self._process = None
            _started.discard(self)
            raise KafkaFailed(f"{self!r} did not start; its last messages:\n{last_lines}")
        # What a client logs while nobody answers yet is of no interest.
        admin = AdminClient({"bootstrap.servers": self.address(), "log_level": 0})
        try:
            return bool(admin.list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise KafkaFailed(f"{self!r} does not run")
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired as error:
                self._process.kill()
                self._process.wait()
                raise KafkaFailed(f"{self!r} did not stop within 60 s and was killed") from error
        self._process = None
        _started.discard(self)


_started: set[KafkaServer] = set()


@atexit.register
def _end_all() -> None:
    """A server that a program forgot to stop does not outlive it."""
    for server in list(_started):
        server.kill()
