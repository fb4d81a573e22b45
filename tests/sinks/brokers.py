"""Kafka in tests: events to send, a channel to send them with, and a consumer that reads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import uuid4

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from headrace.sinks.kafka.channel import KafkaChannel
from headrace.sinks.kafka.sink import Kafka
from headrace.sinks.push import Event
from headrace.testing import wait_until
from headrace.testing.kafka import HINT, KafkaServer, kafka_jars
from tests.needs import missing


def expect_kafka() -> None:
    """Without Kafka the test is skipped, but in CI it fails."""
    if kafka_jars() is None:
        missing(f"Apache Kafka is not there. {HINT}")


def table_name() -> str:
    """A table of a test's own, and with it a topic."""
    return f"t_{uuid4().hex[:8]}"


def event(
    table: str,
    key: object,
    sequence: int,
    *,
    op: str = "INSERT",
    payload: bytes | None = b"{}",
    schema: str = "public",
) -> Event:
    """An event of a row, as the common part makes it."""
    row = f"pg|{schema}.{table}:{key}"
    identity = f"evt_{table}_{sequence}"
    return Event(
        sequence, 0, identity, row, op, "pg", schema, table, "{}", 1_731_683_402_123_456, payload
    )


class Record(NamedTuple):
    """What a consumer got."""

    partition: int
    key: str | None
    value: bytes | None
    headers: dict[str, str]

    @property
    def id(self) -> str:
        """The event's."""
        return self.headers["savegress-event-id"]


def sink(server: KafkaServer, **settings: Any) -> Kafka:
    """A sink on the server."""
    return Kafka(**{"name": "events", "servers": server.address, **settings})


@contextmanager
def channel(server: KafkaServer, **settings: Any) -> Iterator[KafkaChannel]:
    """An open channel to the server."""
    opened = sink(server, **settings).connect()
    try:
        yield opened
    finally:
        opened.close()


def read(server: KafkaServer, topic: str) -> list[Record]:
    """All that a topic has, partition by partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": server.address,
            "group.id": "test",
            "enable.auto.commit": False,
            "enable.partition.eof": False,
            "log_level": 0,
        }
    )
    try:
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        parts = [TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions]
        ends = [_end(consumer, part) for part in parts]
        consumer.assign(parts)
        records: list[Record] = []
        while len(records) < sum(ends):
            records += map(_record, consumer.consume(1000, timeout=0.2))
        return sorted(records, key=lambda record: record.partition)  # stable: order is kept
    finally:
        consumer.close()


def _end(consumer: Consumer, part: TopicPartition) -> int:
    """Where a partition ends; a broker that has just come back may not lead it yet."""

    def marks() -> tuple[int, int] | None:
        try:
            return consumer.get_watermark_offsets(part, timeout=10)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION:
                raise
            return None

    found = wait_until(marks, timeout=120, message=f"{part} has a leader")
    assert found is not None
    return found[1]


def _record(message: Message) -> Record:
    assert message.error() is None, message.error()
    partition, key, value = message.partition(), message.key(), message.value()
    assert partition is not None
    assert isinstance(key, bytes | None)
    assert isinstance(value, bytes | None)
    headers = dict[str, bytes](message.headers() or [])  # type: ignore[arg-type]  # a list of pairs
    told = {name: text.decode() for name, text in headers.items()}
    return Record(partition, key.decode() if key is not None else None, value, told)
