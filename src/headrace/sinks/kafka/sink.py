"""Kafka: each table's events in a topic of its own, keyed by the row.

    a window ─▶ one idempotent producer ─▶ every in-sync replica has it ─▶ accepted

Events of a row have the same key, so they are in one partition, in the log's order. A row whose key
changes is deleted under the old one and inserted under the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from ...errors import ConfigError
from ...secret import Secret
from ..push import PushSettings, Template
from . import names
from .channel import KafkaChannel, KafkaLink, TopicCreation, objection

ClientValue = str | int | float | bool

# Room for a key, headers and the record's frame beside the largest event.
_BESIDE = 48_000
_ANY_SIZE = 1_000_000_000  # librdkafka's own limit
_SHORTEST_SECRET = 4  # letters; a value of fewer is no secret, and may be any word's part
_TOPIC = Template("cdc.${schema}.${table}")

# Why a setting of librdkafka cannot be set: what would be lost, or which setting to use.
_RESERVED = {
    "acks": "an event counts as accepted when every in-sync replica has it",
    "delivery.report.only.error": "an event counts as accepted when the brokers say so",
    "delivery.timeout.ms": "set timeout_seconds",
    "enable.gapless.guarantee": "it would end the producer where it can go on",
    "enable.idempotence": "without it, retries would repeat and reorder events",
    "max.in.flight": "the idempotent producer chooses it",
    "max.in.flight.requests.per.connection": "the idempotent producer chooses it",
    "message.max.bytes": "set max_event_bytes",
    "message.send.max.retries": "the idempotent producer chooses it",
    "message.timeout.ms": "set timeout_seconds",
    "queuing.strategy": "a row's events are sent in order",
    "request.required.acks": "an event counts as accepted when every in-sync replica has it",
    "retries": "the idempotent producer chooses it",
    "transactional.id": "windows are no transactions",
    "bootstrap.servers": "set servers",
    "metadata.broker.list": "set servers",
    "compression.codec": "set compression",
    "compression.type": "set compression",
    "sasl.mechanism": "set sasl_mechanism",
    "sasl.mechanisms": "set sasl_mechanism",
    "sasl.password": "set password",
    "sasl.username": "set username",
    "security.protocol": "set security_protocol",
    "ssl.ca.location": "set ca_file",
    "ssl.certificate.location": "set certificate_file",
    "ssl.key.location": "set key_file",
    "ssl.key.password": "set key_password",
}
_PARTITIONER = "partitioner"
_BY_KEY = ("murmur2_random", "murmur2", "consistent_random", "consistent", "fnv1a_random", "fnv1a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kafka(PushSettings):
    """Events in topics of an Apache Kafka cluster."""

    task_packages: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"confluent-kafka": "confluent_kafka"}
    )

    servers: str  # host:port of some brokers, with commas between
    topic: Template = _TOPIC
    key: Literal["table:pk", "schema.table:pk"] = "table:pk"
    tombstones: bool = False  # a message without a value after each delete, for compacted topics
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    timeout_seconds: float = 30.0  # in which the brokers accept a window
    create_topics: bool = False  # by us; False: the brokers make them, or somebody has
    partitions: int = -1  # of topics we make; -1: as the brokers are set
    replication: int = -1
    topic_settings: Mapping[str, str] = field(default_factory=dict)  # of topics we make
    security_protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    username: str = ""
    password: Secret | None = None
    ca_file: str = ""  # PEM; "": the machine's own authorities
    certificate_file: str = ""  # PEM, for brokers that ask for one
    key_file: str = ""
    key_password: Secret | None = None
    # Any other of librdkafka's; they may be secret, so they do not print.
    settings: Mapping[str, ClientValue] = field(default_factory=dict, repr=False)

    # A window is a round trip, so it is large; brokers take up to 1 MiB a message as they come.
    batch_size: int = 10_000
    batch_bytes: int = 10_000_000
    max_event_bytes: int = 1_000_000
    max_changes_per_batch: int | None = 250_000  # some seconds

    def __post_init__(self) -> None:
        PushSettings.__post_init__(self)
        names.check(self.topic)
        if not self.servers.strip():
            raise ConfigError("servers: name at least one broker as host:port")
        if self.timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds must be above 0, not {self.timeout_seconds}")
        for name in ("partitions", "replication"):
            if (value := getattr(self, name)) != -1 and value < 1:
                raise ConfigError(f"{name} must be 1 or more, or -1 for the brokers' own choice")
        self._check_security()
        self._check_settings()

    def connect(self) -> KafkaChannel:
        """Open a producer, or raise SinkUnavailable."""
        creation = TopicCreation(self.partitions, self.replication, self.topic_settings)
        return KafkaChannel(
            KafkaLink(
                client=self._client,
                template=self.topic,
                with_schema=self.key == "schema.table:pk",
                timeout=self.timeout_seconds,
                creation=creation if self.create_topics else None,
                secrets=self._secrets,
            )
        )

    @property
    def _secrets(self) -> tuple[str, ...]:
        """Texts that no reason may show; a setting may hold several words, each with a name."""
        texts = {_revealed(self.password), _revealed(self.key_password)} - {""}
        for given in self.settings.values():
            if isinstance(given, str):
                words = {given, *given.split()}
                words |= {word.partition("=")[2] for word in words}
                texts |= {word for word in words if len(word) >= _SHORTEST_SECRET}
        return tuple(sorted(texts, key=len, reverse=True))

    @property
    def address(self) -> str:
        """The brokers."""
        return self.servers

    @property
    def adds_tombstones(self) -> bool:
        """For topics that keep only the last message of a key."""
        return self.tombstones

    @property
    def _client(self) -> dict[str, Any]:
        """The settings of librdkafka."""
        return {
            # Java's own: whoever writes or joins by the same keys finds the same partition.
            _PARTITIONER: "murmur2_random",
            "linger.ms": 50,  # the end of a window is not waited with
            "batch.size": 1_000_000,
            "reconnect.backoff.max.ms": 1_000,
            "topic.metadata.propagation.max.ms": 10_000,
            "log_level": 0,  # what it would log comes back as a reason
            "queue.buffering.max.messages": max(2 * self.batch_size, 1_000),
            **self.settings,
            **self._security,
            "bootstrap.servers": self.servers,
            "client.id": self.settings.get("client.id", f"headrace-{self.name}"),
            "compression.type": self.compression,
            "message.max.bytes": self.max_event_bytes + _BESIDE
            if self.max_event_bytes
            else _ANY_SIZE,
            # Of itself no message ever fails for its age: a row's next one could then get ahead.
            "message.timeout.ms": 0,
            "enable.idempotence": True,  # and with it acks=all
            # What it has sent and does not hold any more was accepted, unless it reports an error.
            "delivery.report.only.error": True,
        }

    @property
    def _security(self) -> dict[str, str]:
        given = {
            "security.protocol": self.security_protocol,
            "ssl.ca.location": self.ca_file,
            "ssl.certificate.location": self.certificate_file,
            "ssl.key.location": self.key_file,
            "ssl.key.password": _revealed(self.key_password),
        }
        if self.security_protocol.startswith("sasl"):
            given["sasl.mechanism"] = self.sasl_mechanism
            given["sasl.username"] = self.username
            given["sasl.password"] = _revealed(self.password)
        return {name: value for name, value in given.items() if value}

    def _check_security(self) -> None:
        protocol = self.security_protocol
        sasl, tls = protocol.startswith("sasl"), protocol.endswith("ssl")
        if sasl and not (self.username and self.password):
            raise ConfigError(f"security_protocol: {protocol} needs username and password")
        if not sasl and (self.username or self.password):
            raise ConfigError(
                f"username and password are not used with security_protocol: {protocol}; "
                "set sasl_ssl, or sasl_plaintext"
            )
        for name in ("ca_file", "certificate_file", "key_file"):
            if getattr(self, name) and not tls:
                raise ConfigError(
                    f"{name} is not used with security_protocol: {protocol}; set ssl or sasl_ssl"
                )

    def _check_settings(self) -> None:
        for name in self.settings:
            if name in _RESERVED:
                raise ConfigError(f"settings: {name} cannot be set here: {_RESERVED[name]}")
        if self.settings.get(_PARTITIONER, _BY_KEY[0]) not in _BY_KEY:
            raise ConfigError(
                f"settings: {_PARTITIONER} must choose by the key, or a row's events lose their "
                f"order; there are: {', '.join(_BY_KEY)}"
            )
        if complaint := objection(self._client):
            raise ConfigError(f"settings: {complaint}")


def _revealed(secret: Secret | None) -> str:
    return secret.reveal() if secret else ""
