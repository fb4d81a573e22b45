"""A real Apache Kafka in a folder: one process that is broker and controller.

with KafkaServer() as server:
    deliver(server.address)
"""

import functools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from .jvm import LOGS_LITTLE, STARTS_SOON, java
from .processes import ServerFailed, ServerProcess, free_port

HINT = "Run `scripts/setup.sh kafka`; it takes Java 17, Maven and a way to Maven Central."

_CLUSTER = "aGVhZHJhY2UtdGVzdHMtMQ"  # 16 bytes in Base64, as Kafka wants them
_PLAIN = "PLAIN"  # the listener of clients without a password
_OWN = "CONTROLLER"  # the listener that the process talks to itself on

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


@functools.cache
def kafka_jars() -> Path | None:
    """The folder with the broker's jars; None: they were not fetched, or Java is missing."""
    jars = Path(sys.prefix, "kafka")
    return jars if jars.is_dir() and java() is not None else None


class KafkaServer(ServerProcess):
    """A Kafka in a folder of its own."""

    def __init__(
        self,
        *,
        listeners: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
        options: Sequence[str] = STARTS_SOON,
    ) -> None:
        """Describe it: `listeners` are further ones, by name, each with its protocol.

        `settings` are the broker's own, `options` Java's.
        """
        jars = kafka_jars()
        if jars is None:
            raise ServerFailed("Apache Kafka's jars are not there", hint=HINT)
        super().__init__()
        self._java = [java() or "java", *options, LOGS_LITTLE, "-cp", f"{jars}/*"]
        self._protocols = {**(listeners or {}), _PLAIN: "PLAINTEXT", _OWN: "PLAINTEXT"}
        self._ports = {name: free_port() for name in self._protocols} | {_PLAIN: self.port}
        self._settings = dict(settings or {})

    def listener(self, name: str) -> str:
        """Where one of the further listeners is."""
        return f"127.0.0.1:{self._ports[name]}"

    def command(self) -> list[str]:
        """Kafka with its settings in a file."""
        if not (self.directory / "data").exists():
            self._create()
        return [*self._java, "kafka.Kafka", str(self._file)]

    def answers(self) -> bool:
        """Whether it lists its brokers."""
        # What a client logs before the broker answers is of no interest.
        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        try:
            return bool(admin.list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    @property
    def _file(self) -> Path:
        return self.directory / "server.properties"

    def _create(self) -> None:
        lines = (f"{name}={value}\n" for name, value in self._properties().items())
        self._file.write_text("".join(lines))
        tool = ["kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(self._file)]
        result = subprocess.run([*self._java, *tool], capture_output=True, check=False, text=True)
        if result.returncode:
            raise ServerFailed(f"no data for {self!r} could be made: {result.stderr.strip()}")

    def _properties(self) -> dict[str, str]:
        at = {name: f"{name}://127.0.0.1:{port}" for name, port in self._ports.items()}
        protocols = [f"{name}:{protocol}" for name, protocol in self._protocols.items()]
        own = {
            "log.dirs": str(self.directory / "data"),
            "listeners": ",".join(at.values()),
            "advertised.listeners": ",".join(at[name] for name in at if name != _OWN),
            "listener.security.protocol.map": ",".join(protocols),
            "inter.broker.listener.name": _PLAIN,
            "controller.listener.names": _OWN,
            "controller.quorum.voters": f"1@127.0.0.1:{self._ports[_OWN]}",
        }
        return {**DEFAULT_SETTINGS, **own, **self._settings}
