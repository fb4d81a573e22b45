"""The channels of all push sinks keep the contract that ships to others, on real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as redis_client

from headrace.secret import Secret
from headrace.sinks.kafka.sink import Kafka
from headrace.sinks.redis import Redis
from headrace.sinks.webhook.sink import Webhook
from headrace.testing import ChannelContract, ChannelTrial
from headrace.testing.kafka import KafkaServer
from headrace.testing.nats import HINT as NATS_HINT
from headrace.testing.nats import NatsServer, nats_program
from headrace.testing.rabbitmq import HINT as RABBITMQ_HINT
from headrace.testing.rabbitmq import RabbitmqServer, rabbitmq_program
from headrace.testing.redis import HINT as REDIS_HINT
from headrace.testing.redis import RedisServer, redis_program
from tests.needs import missing
from tests.sinks.brokers import expect_kafka
from tests.sinks.brokers import read as read_kafka
from tests.sinks.hooks import SECRET as SIGNING
from tests.sinks.receiver import OK, HttpAnswer, Receiver, Request, reply
from tests.sinks.test_nats import Subjects
from tests.sinks.test_rabbitmq import Exchanges

SECRET = "hunter2-of-nobody"


class Endpoint:
    """An endpoint that can be away, and refuse tables."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.refused: set[str] = set()
        self.receiver = Receiver(self._answer)
        self.port = self.receiver.port

    def start(self) -> None:
        self.receiver = Receiver(self._answer, port=self.port)
        self.receiver.__enter__()

    def stop(self) -> None:
        self.receiver.__exit__(None, None, None)

    def ids(self, table: str) -> list[str]:
        """Of the events of a table that were accepted."""
        return [each.id for each in self.requests if f"_{table}_" in each.id]

    def _answer(self, request: Request) -> HttpAnswer:
        if any(f"_{table}_" in request.id for table in self.refused):
            return reply(400, b"no such table")
        json.loads(request.body)
        self.requests.append(request)
        return OK


class TestWebhook(ChannelContract):
    """The webhook sink."""

    @pytest.fixture
    def trial(self) -> Iterator[ChannelTrial]:
        endpoint = Endpoint()
        endpoint.receiver.__enter__()
        sink = Webhook(
            name="hooks",
            url=Secret(f"http://127.0.0.1:{endpoint.port}/{SECRET}"),
            secret=Secret(SIGNING),
            allow_private_networks=True,
            timeout_seconds=10.0,
        )
        yield ChannelTrial(
            sink,
            stored=endpoint.ids,
            stop=endpoint.stop,
            start=endpoint.start,
            refuse=endpoint.refused.add,
            secrets=(SECRET, SIGNING),
        )
        endpoint.stop()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A server that the tests share."""
    if redis_program() is None:
        missing(f"Redis is not there. {REDIS_HINT}")
    with RedisServer(settings={"user": f"headrace on >{SECRET} ~cdc:* +@all"}) as server:
        yield server


class TestRedis(ChannelContract):
    """The Redis sink."""

    @pytest.fixture
    def trial(self, redis: RedisServer) -> ChannelTrial:
        def stored(table: str) -> list[str]:
            with redis_client.Redis(port=redis.port) as client:
                entries = client.xrange(f"cdc:public:{table}")
            return [fields[b"id"].decode() for _, fields in entries]

        def refuse(table: str) -> None:
            with redis_client.Redis(port=redis.port) as client:
                client.set(f"cdc:public:{table}", "no stream")

        sink = Redis(
            name="events",
            servers=redis.address,
            username="headrace",
            password=Secret(SECRET),
            timeout_seconds=10.0,
        )
        return ChannelTrial(sink, stored, redis.kill, redis.start, refuse=refuse, secrets=(SECRET,))


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    """A server that the tests share."""
    if nats_program() is None:
        missing(f"NATS is not there. {NATS_HINT}")
    with NatsServer() as server:
        yield server


class TestNats(ChannelContract):
    """The NATS sink; a stream takes only subjects that it has."""

    @pytest.fixture
    def trial(self, nats: NatsServer) -> ChannelTrial:
        subjects = Subjects(nats)
        return ChannelTrial(
            subjects.sink(timeout_seconds=10.0),
            lambda table: [record.id for record in subjects.read(table)],
            nats.kill,
            nats.start,
        )


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[RabbitmqServer]:
    """A server that the tests share."""
    if rabbitmq_program() is None:
        missing(f"RabbitMQ is not there. {RABBITMQ_HINT}")
    with RabbitmqServer() as server:
        yield server


class TestRabbitmq(ChannelContract):
    """The RabbitMQ sink."""

    @pytest.fixture
    def trial(self, rabbitmq: RabbitmqServer, tmp_path: Path) -> ChannelTrial:
        exchanges = Exchanges(rabbitmq, tmp_path, 0)
        return ChannelTrial(
            exchanges.sink(timeout_seconds=20.0),
            lambda table: [record.id for record in exchanges.read(table)],
            rabbitmq.kill,
            rabbitmq.start,
        )


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaServer]:
    """A server that the tests share."""
    expect_kafka()
    with KafkaServer() as server:
        yield server


class TestKafka(ChannelContract):
    """The Kafka sink; events of different partitions have no common order."""

    @pytest.fixture
    def trial(self, kafka: KafkaServer) -> ChannelTrial:
        sink = Kafka(name="events", servers=kafka.address, timeout_seconds=10.0)

        def stored(table: str) -> list[str]:
            return [record.id for record in read_kafka(kafka, f"cdc.public.{table}")]

        return ChannelTrial(sink, stored, kafka.kill, kafka.start)
