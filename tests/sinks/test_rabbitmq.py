"""RabbitMQ on a real server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pika
import pytest
from pyspark.sql import SparkSession

from headrace.errors import ConfigError, SinkUnavailable
from headrace.secret import Secret
from headrace.sinks.push import ACCEPTED, UNSENT, DeliveryOutcome, Template
from headrace.sinks.push.channels import ReconnectingChannel, close_all
from headrace.sinks.rabbitmq.sink import Rabbitmq
from headrace.testing import free_port
from headrace.testing.rabbitmq import HINT, RabbitmqServer, rabbitmq_program
from tests.needs import missing
from tests.sinks.brokers import event, table_name
from tests.sinks.proxies import Cut, Gate
from tests.sinks.queues import (
    SECRET,
    Queues,
    QueueTests,
    Record,
    Strange,
    certificate,
    documented,
    expect_stored,
    ids,
    opened,
    through_spark,
    until_accepted,
)

CONTROL = "/usr/lib/rabbitmq/bin/rabbitmqctl"


class Exchanges(Queues):
    """Exchanges and queues of a RabbitMQ."""

    def __init__(self, server: RabbitmqServer, folder: Path, tls_port: int) -> None:
        self.server = server
        self.folder = folder
        self.tls = f"127.0.0.1:{tls_port}"
        self._users: set[str] = set()

    def sink(self, **settings: Any) -> Rabbitmq:
        """A sink on it that makes what it needs."""
        given: dict[str, Any] = {
            "name": "events",
            "servers": self.server.address,
            "declare_exchange": "topic",
            "declare_queue": Template("${schema}.${table}"),
        }
        return Rabbitmq(**(given | settings))

    def read(self, table: str) -> list[Record]:
        """A queue as pika reads it; it is empty afterwards."""
        found: list[Record] = []
        with self.client() as connection:
            channel, queue = connection.channel(), f"public.{table}"
            left = channel.queue_declare(queue, passive=True).method.message_count
            for _, properties, body in channel.consume(queue, auto_ack=True) if left else ():
                assert properties.delivery_mode == 2
                assert properties.content_type == "application/json"
                told = {
                    "savegress-event-id": properties.message_id,
                    "savegress-timestamp": str(properties.timestamp),
                }
                assert set(properties.headers) == {"savegress-operation", "savegress-table"}
                found.append(Record(body, told | properties.headers))
                if len(found) == left:
                    break
            channel.cancel()
        return found

    def read_on(self, table: str, before: Sequence[Record]) -> list[Record]:
        """What was read is no longer there."""
        return self.read(table)

    def user(self, name: str = "headrace", writes: str = ".*") -> dict[str, Any]:
        """Made by the server's own functions; `writes` are the exchanges it may publish to."""
        made = f'rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"{SECRET}">>, <<"test">>)'
        configures = ".*" if writes == ".*" else "^$"
        rights = ", ".join(f'<<"{each}">>' for each in (name, "/", configures, writes, ".*"))
        allowed = f'rabbit_auth_backend_internal:set_permissions({rights}, <<"test">>)'
        if name not in self._users:
            self.control(f"{made}, {allowed}.")
            self._users.add(name)
        return {"username": name, "password": Secret(SECRET)}

    def control(self, expression: str) -> None:
        """Have the server evaluate something, as `rabbitmqctl eval` does."""
        node = self.server.environment()
        subprocess.run(
            [CONTROL, "-n", node["RABBITMQ_NODENAME"], "eval", expression],
            env={"PATH": os.environ["PATH"], **node},
            check=True,
            capture_output=True,
        )

    def client(self) -> pika.BlockingConnection:
        """A client of the library."""
        return pika.BlockingConnection(pika.ConnectionParameters(port=self.server.port))


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exchanges]:
    """The server that these tests share; its start takes seconds."""
    if rabbitmq_program() is None:
        missing(f"RabbitMQ is not there. {HINT}")
    folder, tls_port = certificate(tmp_path_factory.mktemp("certificate")), free_port()
    settings = {
        "max_message_size": "2000000",
        "listeners.ssl.default": f"127.0.0.1:{tls_port}",
        "ssl_options.cacertfile": str(folder / "cert.pem"),
        "ssl_options.certfile": str(folder / "cert.pem"),
        "ssl_options.keyfile": str(folder / "key.pem"),
    }
    with RabbitmqServer(settings=settings) as server:
        yield Exchanges(server, folder, tls_port)


class TestRabbitmq(QueueTests):
    """What every queue promises."""

    time = "1731683402"  # as AMQP has it, in seconds


def test_a_message_that_no_queue_takes_is_refused_and_others_go(queues: Exchanges) -> None:
    bound, other = table_name(), table_name()
    with queues.channel() as channel:
        assert list(channel.send([event(bound, 1, 0)])) == [ACCEPTED]
    with queues.channel(declare_queue=Template("")) as channel:
        sent = [event(bound, 1, 1), event(other, 1, 2), event(bound, 1, 3), event(other, 1, 4)]
        first, second, third, fourth = channel.send(sent)
    assert (first, third, fourth) == (ACCEPTED, ACCEPTED, UNSENT)
    assert second.outcome is DeliveryOutcome.REFUSED
    assert second.reason == f"no queue takes the routing key public.{other} of the exchange cdc"
    assert len(queues.read(bound)) == 3


def test_an_exchange_that_is_not_there_fails_with_what_to_do(queues: Exchanges) -> None:
    chosen = {"declare_exchange": "", "declare_queue": Template("")}
    with queues.channel(exchange=Template(table_name()), **chosen) as channel:
        first, second = channel.send([event("users", 1, 1), event("users", 1, 2)])
        assert first.outcome is DeliveryOutcome.FAILED
        assert "no exchange" in first.reason
        assert "declare_exchange" in first.reason
        assert second is UNSENT


def test_a_message_that_is_too_large_is_refused_when_it_is_alone(queues: Exchanges) -> None:
    table = table_name()
    large = event(table, 1, 2, payload=b"x" * 2_100_000)
    with queues.channel() as channel:
        assert list(channel.send([event(table, 1, 1)])) == [ACCEPTED]
        replies = channel.send([large, event(table, 2, 3)])
        assert replies[0].outcome is DeliveryOutcome.FAILED
        [reply] = channel.send([large])
        assert reply.outcome is DeliveryOutcome.REFUSED
        assert "larger than" in reply.reason
        assert list(channel.send([event(table, 2, 3)])) == [ACCEPTED]


def test_a_queue_that_is_full_fails_until_there_is_room(queues: Exchanges) -> None:
    table = table_name()
    arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
    sent = [event(table, at, at) for at in range(20)]
    with queues.channel(queue_arguments=arguments) as channel:
        assert list(channel.send(sent[:2])) == [ACCEPTED, ACCEPTED]
        replies = channel.send([event(table, 50, 50), event(table, 50, 51)])
        assert replies[0].outcome is DeliveryOutcome.FAILED
        assert "a queue is full" in replies[0].reason
        assert replies[1] is UNSENT
        assert len(queues.read(table)) == 2
        assert list(channel.send([event(table, 50, 50)])) == [ACCEPTED]


@pytest.mark.requirement("S1-41")
@pytest.mark.parametrize("heard", [0, 21, 42])
def test_where_one_of_a_row_is_sent_at_a_time_what_was_not_sent_is_not_accepted(
    queues: Exchanges, heard: int
) -> None:
    full, table = table_name(), table_name()
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    with queues.channel() as channel:  # without a limit; the sink below is told that it is there
        assert list(channel.send([event(table, "first", 5000)])) == [ACCEPTED]
    with queues.channel(queue_arguments=arguments) as channel:
        assert list(channel.send([event(full, "first", 0)])) == [ACCEPTED]
    events = [event(table, at % 1000, at) for at in range(2000)]
    with Cut(queues.server.address) as cut:
        line = ReconnectingChannel(queues.sink(servers=cut.address, declare_queue=Template("")))
        nacked = line.send([event(full, at, at) for at in range(1, 9)])
        assert DeliveryOutcome.FAILED in {reply.outcome for reply in nacked}
        assert list(line.send([event(full, "last", 9), event(table, "next", 5001)]))[1] is ACCEPTED
        cut.after(heard)
        replies = line.send(events)
        expect_stored(queues.read(table), events, replies)


def test_an_exchange_and_a_queue_that_were_deleted_are_made_again(queues: Exchanges) -> None:
    exchange, table = table_name(), table_name()
    line = ReconnectingChannel(queues.sink(exchange=Template(exchange)))
    assert list(line.send([event(table, 1, 1)])) == [ACCEPTED]
    with queues.client() as client:
        client.channel().exchange_delete(exchange)
    [reply] = line.send([event(table, 1, 2)])
    assert reply.outcome is DeliveryOutcome.FAILED
    assert "no exchange" in reply.reason
    assert list(line.send([event(table, 1, 2)])) == [ACCEPTED]
    with queues.client() as client:
        client.channel().queue_delete(f"public.{table}")
    first, second = line.send([event(table, 1, 3), event(table, 1, 4)])
    assert first.outcome is DeliveryOutcome.FAILED
    assert "no queue takes the routing key" in first.reason
    assert second is UNSENT
    assert set(line.send([event(table, 1, 3), event(table, 1, 4)])) == {ACCEPTED}
    assert len(queues.read(table)) == 2
    close_all()


def test_a_connection_that_ends_while_an_exchange_is_looked_for_is_told(queues: Exchanges) -> None:
    chosen = {"declare_exchange": "", "declare_queue": Template(""), "exchange": Template("nope")}
    said = len("NOT_FOUND - no exchange 'nope' in vhost '/'") + 20  # a whole Channel.Close
    with Cut(queues.server.address) as cut:
        line = ReconnectingChannel(queues.sink(servers=cut.address, **chosen))
        [reply] = line.send([event("users", 1, 1)])
        assert reply.outcome is DeliveryOutcome.FAILED
        cut.after(said)
        [reply] = line.send([event("users", 1, 1)])
        assert reply.outcome is DeliveryOutcome.UNREACHABLE
        assert cut.address in reply.reason


def test_a_table_with_a_long_name_has_an_exchange_and_a_queue(queues: Exchanges) -> None:
    chosen = {"exchange": Template("cdc.${table}"), "declare_queue": Template("q.${table}")}
    with queues.channel(**chosen) as channel:
        sent = [event("ж" * 31, 1, 1), event("ж" * 60, 1, 2), event("ж" * 61, 1, 3)]
        assert set(channel.send(sent)) == {ACCEPTED}


def test_a_server_that_is_low_on_memory_is_waited_for(queues: Exchanges) -> None:
    table = table_name()
    large = [event(table, at, at, payload=b"x" * 20_000) for at in range(1000)]
    line = ReconnectingChannel(queues.sink(timeout_seconds=2.0))
    assert list(line.send([event(table, "first", 5000)])) == [ACCEPTED]
    queues.control("vm_memory_monitor:set_vm_memory_high_watermark(0.000001).")
    try:
        for sent in (large, large[:1]):
            replies = line.send(sent)
            assert {reply.outcome for reply in replies} == {DeliveryOutcome.UNREACHABLE}
            assert "it takes nothing for now: low on memory" in replies[0].reason
    finally:
        queues.control("vm_memory_monitor:set_vm_memory_high_watermark(0.9).")
    until_accepted(line, large[:10])
    close_all()


def test_a_user_publishes_where_he_may(queues: Exchanges) -> None:
    open_to, closed, table = table_name(), table_name(), table_name()
    with queues.channel(exchange=Template(open_to)) as channel:
        assert list(channel.send([event(table, 1, 0)])) == [ACCEPTED]
    with queues.channel(exchange=Template(closed)) as channel:
        assert list(channel.send([event(table, 1, 0)])) == [ACCEPTED]
    chosen = {
        **queues.user("bob", f"^{open_to}$"),
        "declare_exchange": "",
        "declare_queue": Template(""),
    }
    with queues.channel(exchange=Template(open_to), **chosen) as channel:
        assert list(channel.send([event(table, 1, 1)])) == [ACCEPTED]
    with queues.channel(exchange=Template(closed), **chosen) as channel:
        first, second = channel.send([event(table, 1, 1), event(table, 2, 2)])
        assert (
            first.outcome is second.outcome is DeliveryOutcome.FAILED
        )  # which of them, it does not say
        [reply] = channel.send([event(table, 1, 1)])
        assert reply.outcome is DeliveryOutcome.REFUSED
        assert "ACCESS_REFUSED" in reply.reason
        assert SECRET not in reply.reason
    with queues.channel(
        exchange=Template(closed), **chosen | {"declare_exchange": "topic"}
    ) as other:
        [reply] = other.send([event(table, 1, 1)])
        assert reply.outcome is DeliveryOutcome.FAILED
        assert "ACCESS_REFUSED" in reply.reason


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\1\0\0\0\0\0\4zzzz\xce"])
def test_what_is_no_rabbitmq_is_told(said: bytes) -> None:
    with Strange(said) as strange:
        line = ReconnectingChannel(
            Rabbitmq(name="events", servers=strange.address, timeout_seconds=2.0)
        )
        [reply] = line.send([event("users", 1, 1)])
    assert reply.outcome is DeliveryOutcome.UNREACHABLE
    assert strange.address in reply.reason


def test_a_message_says_what_its_format_writes(queues: Exchanges) -> None:
    for chosen, wanted in (
        ({}, "application/json"),
        ({"format": "cloudevents"}, "application/cloudevents+json"),
        ({"format": "cloudevents", "content_type": "text/x"}, "text/x"),
    ):
        table = table_name()
        with queues.channel(**chosen) as channel:
            assert list(channel.send([event(table, 1, 1)])) == [ACCEPTED]
        with queues.client() as client:
            _, properties, _ = client.channel().basic_get(f"public.{table}", auto_ack=True)
            assert properties is not None
            assert properties.content_type == wanted


def test_the_default_exchange_leads_to_the_queue_of_the_name(queues: Exchanges) -> None:
    table = table_name()
    chosen = {"exchange": Template(""), "declare_exchange": ""}
    with queues.channel(**chosen) as channel:
        assert list(channel.send([event(table, 1, 1)])) == [ACCEPTED]
    assert len(queues.read(table)) == 1


def test_tls_is_spoken_and_a_stranger_s_certificate_is_not_trusted(queues: Exchanges) -> None:
    table = table_name()
    chosen = {"servers": queues.tls, "tls": True, "ca_file": str(queues.folder / "cert.pem")}
    events = [event(table, at, at, payload=b"x" * 2000) for at in range(1000)]
    with queues.channel(**chosen) as channel:
        assert set(channel.send(events)) == {ACCEPTED}
    with pytest.raises(SinkUnavailable, match="not trusted"):
        queues.sink(**(chosen | {"ca_file": ""})).connect()
    with pytest.raises(SinkUnavailable, match="vhost nowhere not found"):
        queues.sink(virtual_host="nowhere").connect()


def test_the_pipeline_sends_from_the_log(
    spark: SparkSession, tmp_path: Path, queues: Exchanges
) -> None:
    through_spark(spark, tmp_path, queues)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"servers": "amqp://u:secret@h"}, "servers: name each server as host:port"),
        ({"exchange": Template(""), "declare_exchange": "topic"}, "the default exchange is"),
        ({"queue_arguments": {"x": 1}}, "queue_arguments are not used without declare_queue"),
        ({"exchange": Template(""), "routing_key": Template("")}, "needs the name of a queue"),
        ({"exchange": Template("a*b")}, "exchange: a*b has '*' in it"),
        ({"declare_queue": Template("a?")}, "declare_queue: a? has '?' in it"),
        ({"routing_key": Template("ж")}, "routing_key: ж has"),
        ({"exchange": Template("x" * 128)}, "exchange: a name has at most 127 characters"),
        ({"username": "", "password": Secret("secret")}, "password needs username"),
    ],
)
def test_a_setting_that_does_not_do_is_named(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Rabbitmq(**{"name": "events", "servers": "rabbitmq", **settings})
    assert told in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("further", [0, 1])
def test_the_config_in_the_docs_works(tmp_path: Path, queues: Exchanges, further: int) -> None:
    assert isinstance(documented("rabbitmq", tmp_path), Rabbitmq)
    queues.user()
    sink = documented(
        "rabbitmq", tmp_path, further=further, servers=queues.server.address, tls=False
    )
    close_all()  # of other tests, which know the exchange
    table = table_name()
    kind, arguments = ("direct", {"x-queue-type": "quorum"}) if further else ("topic", {})
    with opened(sink) as channel, queues.client() as client:
        consumer = client.channel()
        consumer.exchange_delete("cdc")
        [reply] = channel.send([event(table, 1, 1)])
        # The same as it was made; of another make it would be refused.
        consumer.exchange_declare("cdc", exchange_type=kind, durable=True)
        consumer.queue_declare(f"public.{table}", durable=True, arguments=arguments)
        if further:
            assert reply is ACCEPTED
        else:
            assert reply.outcome is DeliveryOutcome.REFUSED, "the queue is the consumer's"
            consumer.queue_bind(f"public.{table}", "cdc", "public.#")
            assert list(channel.send([event(table, 1, 1)])) == [ACCEPTED]
        consumer.exchange_delete("cdc")
    assert len(queues.read(table)) == 1


def test_a_queue_that_the_sink_made_lets_no_event_get_ahead_when_it_is_full(
    queues: Exchanges,
) -> None:
    table = table_name()
    arguments = {"x-max-length": 2, "x-overflow": "reject-publish"}
    full = [event(table, "x", 1), event(table, "x", 2)]
    first, other, second = (
        event(table, 1, 3),
        event(table, 2, 4, payload=b"x" * 300_000),  # a way hands on less at a time
        event(table, 1, 5),
    )
    with Gate(queues.server.address) as gate:
        line = ReconnectingChannel(queues.sink(servers=gate.address, queue_arguments=arguments))
        assert set(line.send(full)) == {ACCEPTED}
        gate.once(lambda: queues.read(table))  # there is room once the first was refused
        replies = line.send([first, other, second])
        assert [reply.outcome for reply in replies] == [
            DeliveryOutcome.FAILED,
            DeliveryOutcome.ACCEPTED,
            DeliveryOutcome.UNSENT,
        ]
        assert ids(queues.read(table)) == [other.id]
        assert set(line.send([first, second])) == {ACCEPTED}
    assert ids(queues.read(table)) == [first.id, second.id]
