"""Five real destinations, each behind a password, and what a consumer of each got."""

from __future__ import annotations

import asyncio
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import nats
import pika
import redis
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic
from nats.aio.client import Client
from nats.js.api import StreamConfig

from headrace.client import webhooks
from headrace.errors import SignatureInvalid
from headrace.testing import free_port
from headrace.testing.kafka import KafkaServer
from headrace.testing.nats import HINT as NATS_HINT
from headrace.testing.nats import NatsServer, nats_program
from headrace.testing.rabbitmq import HINT as RABBITMQ_HINT
from headrace.testing.rabbitmq import RabbitmqServer, rabbitmq_program
from headrace.testing.redis import HINT as REDIS_HINT
from headrace.testing.redis import RedisServer, redis_program
from tests.needs import missing
from tests.sinks import brokers
from tests.sinks.receiver import OK, HttpAnswer, Receiver, Request, reply

USER = "alice"
PARTITIONS = 4  # of a topic
SMALL = 3_000  # bytes; what a topic or a stream takes that is made small


class Got(NamedTuple):
    """An event as its consumer saw it."""

    id: str
    row: str
    number: int  # of the row's changes
    size: int  # bytes


def got(identity: str, body: bytes) -> Got:
    """What a payload says."""
    told = json.loads(body)
    assert told["id"] == identity
    return Got(identity, told["after"]["id"], told["after"]["number"], len(body))


class PushDestination(ABC):
    """A server that is killed, stopped, started again, and read; each table has a place there."""

    name: ClassVar[str]
    server: Any  # of the test kit

    @property
    def variable(self) -> str:
        """The variable of the environment that the config takes its secret from."""
        return f"{self.name.upper()}_SECRET"

    @property
    def secret(self) -> str:
        """What lets the sink in, and nobody may read."""
        return f"s3cret-of-{self.name}-Zq7x"

    @abstractmethod
    def sink(self) -> dict[str, Any]:
        """The sink's settings."""

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return bool(self.server.running)

    def start(self) -> None:
        """Start it, or start it again with what it had."""
        self.server.start()

    def kill(self) -> None:
        """End it at once."""
        self.server.kill()

    def pause(self) -> None:
        """Let it answer nothing."""
        self.server.pause()

    def resume(self) -> None:
        """Let it go on."""
        self.server.resume()

    def close(self) -> None:
        """Leave nothing behind."""
        self.server.__exit__(None, None, None)

    @abstractmethod
    def make(self, table: str, *, small: bool = False) -> None:
        """Make the place for a table; a small one takes no large events, if there is such."""

    @abstractmethod
    def count(self, table: str) -> int:
        """How many messages came for a table."""

    @abstractmethod
    def read(self, table: str) -> list[Got]:
        """What came for a table, each row's in order."""


class Hooks(PushDestination):
    """A receiver of webhooks."""

    name = "hooks"

    def __init__(self) -> None:
        self._port = free_port()
        self._receiver: Receiver | None = None
        self._seen: list[Request] = []  # and accepted, in order
        self._going = threading.Event()
        self._going.set()
        self.judge: Callable[[Request], HttpAnswer] = lambda _: OK

    def sink(self) -> dict[str, Any]:
        return {
            "type": "webhook",
            "url": f"http://127.0.0.1:{self._port}/events/${{{self.variable}}}",
            "secret": f"${{{self.variable}}}",
            "headers": {"Authorization": f"${{{self.variable}}}"},
            "allow_private_networks": True,
        }

    @property
    def running(self) -> bool:
        return self._receiver is not None

    def start(self) -> None:
        self._receiver = Receiver(self._answer, port=self._port)
        self._receiver.__enter__()

    def kill(self) -> None:
        if self._receiver is not None:
            self._receiver.__exit__(None, None, None)
        self._receiver = None

    def pause(self) -> None:
        self._going.clear()

    def resume(self) -> None:
        self._going.set()

    def make(self, table: str, *, small: bool = False) -> None:
        """Its url takes every table."""

    def count(self, table: str) -> int:
        return sum(f'"table":"{table}"'.encode() in each.body for each in list(self._seen))

    def read(self, table: str) -> list[Got]:
        wanted = [each for each in self._seen if json.loads(each.body)["table"] == table]
        return [got(each.id, each.body) for each in wanted]

    def close(self) -> None:
        self.resume()
        self.kill()

    def _answer(self, request: Request) -> HttpAnswer:
        try:
            webhooks.verify(request.body, request.headers, self.secret)
        except SignatureInvalid:
            # One that tells everybody what it was told.
            return reply(401, f"{request.headers['authorization']}? {request.line}!".encode())
        answer = self.judge(request)
        if answer == OK:
            self._seen.append(request)
        self._going.wait()
        return answer


class Topics(PushDestination):
    """A Kafka with a listener for those that have a password, and one for the test."""

    name = "topics"
    server: KafkaServer

    def __init__(self) -> None:
        brokers.expect_kafka()
        module = "org.apache.kafka.common.security.plain.PlainLoginModule"
        settings = {
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl.plain.sasl.jaas.config": (
                f'{module} required user_{USER}="{self.secret}";'
            ),
        }
        self.server = KafkaServer(listeners={"SASL": "SASL_PLAINTEXT"}, settings=settings)

    def sink(self) -> dict[str, Any]:
        return {
            "type": "kafka",
            "servers": self.server.listener("SASL"),
            "security_protocol": "sasl_plaintext",
            "username": USER,
            "password": f"${{{self.variable}}}",
        }

    def make(self, table: str, *, small: bool = False) -> None:
        config = {"max.message.bytes": str(SMALL)} if small else {}
        topic = NewTopic(_subject(table), PARTITIONS, 1, config=config)
        admin = self._admin()
        for made in admin.create_topics([topic]).values():
            made.result(120)

    def enlarge(self, table: str) -> None:
        """Let a topic take what it was too small for."""
        entry = ConfigEntry(
            "max.message.bytes", "10000000", incremental_operation=AlterConfigOpType.SET
        )
        resource = ConfigResource(ResourceType.TOPIC, _subject(table), incremental_configs=[entry])
        admin = self._admin()
        for made in admin.incremental_alter_configs([resource]).values():
            made.result(120)

    def count(self, table: str) -> int:
        own = {"bootstrap.servers": self.server.address, "group.id": "count", "log_level": 0}
        consumer = Consumer(own)
        try:
            parts = [TopicPartition(_subject(table), number) for number in range(PARTITIONS)]
            return sum(brokers._end(consumer, part) for part in parts)
        finally:
            consumer.close()

    def read(self, table: str) -> list[Got]:
        records = brokers.read(self.server, _subject(table))
        return [got(each.id, each.value or b"") for each in records]

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.server.address, "log_level": 0})


class Exchanges(PushDestination):
    """A RabbitMQ with an exchange, and a queue for each table."""

    name = "exchange"
    server: RabbitmqServer

    def __init__(self) -> None:
        if rabbitmq_program() is None:
            missing(f"RabbitMQ is not there. {RABBITMQ_HINT}")
        settings = {"default_user": USER, "default_pass": self.secret}
        self.server = RabbitmqServer(settings=settings)
        self._read: dict[str, list[Got]] = {}  # a queue is empty once it was read

    def sink(self) -> dict[str, Any]:
        return {
            "type": "rabbitmq",
            "servers": self.server.address,
            "username": USER,
            "password": f"${{{self.variable}}}",
            "declare_exchange": "topic",
        }

    def make(self, table: str, *, small: bool = False) -> None:
        with self._client() as connection:
            channel = connection.channel()
            channel.exchange_declare("cdc", "topic", durable=True)
            channel.queue_declare(table, durable=True)
            channel.queue_bind(table, "cdc", f"public.{table}")

    def count(self, table: str) -> int:
        with self._client() as connection:
            told = connection.channel().queue_declare(table, passive=True)
            return int(told.method.message_count)

    def read(self, table: str) -> list[Got]:
        found = self._read.setdefault(table, [])
        with self._client() as connection:
            channel = connection.channel()
            left = channel.queue_declare(table, passive=True).method.message_count
            for _, properties, body in channel.consume(table, auto_ack=True) if left else ():
                found.append(got(properties.message_id, body))
                left -= 1
                if not left:
                    break
            channel.cancel()
        return found

    def _client(self) -> Any:
        login = pika.PlainCredentials(USER, self.secret)
        return pika.BlockingConnection(
            pika.ConnectionParameters(port=self.server.port, credentials=login)
        )


class Subjects(PushDestination):
    """A NATS server with a stream for each table."""

    name = "subjects"
    server: NatsServer

    def __init__(self) -> None:
        if nats_program() is None:
            missing(f"NATS is not there. {NATS_HINT}")
        login = f'user: {USER}, password: "{self.secret}"'
        self.server = NatsServer(settings=f"authorization {{ {login} }}")

    def sink(self) -> dict[str, Any]:
        return {
            "type": "nats",
            "servers": self.server.address,
            "username": USER,
            "password": f"${{{self.variable}}}",
        }

    def make(self, table: str, *, small: bool = False) -> None:
        async def made(client: Client) -> None:
            await client.jetstream().add_stream(self._stream(table, SMALL if small else -1))

        self._ask(made)

    def enlarge(self, table: str) -> None:
        """Let a stream take what it was too small for."""

        async def altered(client: Client) -> None:
            await client.jetstream().update_stream(self._stream(table, -1))

        self._ask(altered)

    def count(self, table: str) -> int:
        async def counted(client: Client) -> int:
            return (await client.jetstream().stream_info(table)).state.messages

        return int(self._ask(counted))

    def read(self, table: str) -> list[Got]:
        async def consumed(client: Client) -> list[Got]:
            jetstream = client.jetstream()
            left = (await jetstream.stream_info(table)).state.messages
            consumer = await jetstream.subscribe(_subject(table), ordered_consumer=True)
            messages = [await consumer.next_msg(timeout=10) for _ in range(left)]
            return [got((each.headers or {})["Nats-Msg-Id"], each.data) for each in messages]

        found: list[Got] = self._ask(consumed)
        return found

    def _stream(self, table: str, most: int) -> StreamConfig:
        return StreamConfig(name=table, subjects=[_subject(table)], max_msg_size=most)

    def _ask(self, question: Callable[[Client], Any]) -> Any:
        async def asked() -> Any:
            client = await nats.connect(self.server.address, user=USER, password=self.secret)
            try:
                return await question(client)
            finally:
                await client.close()

        return asyncio.run(asked())


class Streams(PushDestination):
    """A Redis."""

    name = "streams"
    server: RedisServer

    def __init__(self) -> None:
        if redis_program() is None:
            missing(f"Redis is not there. {REDIS_HINT}")
        self.server = RedisServer(settings={"requirepass": self.secret})

    def sink(self) -> dict[str, Any]:
        return {
            "type": "redis",
            "servers": self.server.address,
            "password": f"${{{self.variable}}}",
        }

    def make(self, table: str, *, small: bool = False) -> None:
        """The sink makes it."""

    def bar(self, table: str) -> None:
        """Let a text be where the stream would be."""
        with self._client() as client:
            client.set(self._key(table), "no stream")

    def unbar(self, table: str) -> None:
        """Make room for the stream."""
        with self._client() as client:
            client.delete(self._key(table))

    def count(self, table: str) -> int:
        with self._client() as client:
            return int(client.xlen(self._key(table)))

    def read(self, table: str) -> list[Got]:
        with self._client() as client:
            entries: list[Any] = client.xrange(self._key(table))
        return [got(fields[b"id"].decode(), fields[b"event"]) for _, fields in entries]

    def _client(self) -> redis.Redis:
        return redis.Redis(port=self.server.port, password=self.secret)

    @staticmethod
    def _key(table: str) -> str:
        return f"cdc:public:{table}"


def _subject(table: str) -> str:
    return f"cdc.public.{table}"


class Town(NamedTuple):
    """All five."""

    hooks: Hooks
    topics: Topics
    exchange: Exchanges
    subjects: Subjects
    streams: Streams

    @property
    def secrets(self) -> dict[str, str]:
        """By the variables that the config takes them from."""
        return {each.variable: each.secret for each in self}

    def make(self, table: str) -> None:
        """A place for a table at each of them."""
        for each in self:
            each.make(table)

    def kill(self) -> None:
        """End all at once."""
        for each in self:
            each.kill()

    def start(self) -> None:
        """Start those that do not run."""
        for each in self:
            if not each.running:
                each.start()


@contextmanager
def opened_town() -> Iterator[Town]:
    """All five, running."""
    town = Town(Hooks(), Topics(), Exchanges(), Subjects(), Streams())
    try:
        town.start()
        yield town
    finally:
        for each in town:
            each.close()
