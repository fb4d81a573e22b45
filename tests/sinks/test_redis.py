"""Redis Streams on a real server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis as client
from pyspark.sql import SparkSession

from headrace.change.event import Op
from headrace.errors import ConfigError, SinkUnavailable
from headrace.secret import Secret
from headrace.sinks.push import ACCEPTED, UNSENT, DeliveryOutcome, Template
from headrace.sinks.push.channels import ReconnectingChannel, close_all
from headrace.sinks.redis import Redis
from headrace.testing import free_port, wait_until
from headrace.testing.redis import HINT, RedisServer, redis_program
from headrace.transforms.rules import TableTransform
from tests.needs import missing
from tests.pipeline.sites import Site
from tests.sinks.brokers import event, table_name
from tests.sinks.queues import (
    SECRET,
    Queues,
    QueueTests,
    Record,
    Strange,
    certificate,
    documented,
    opened,
    through_spark,
    until_accepted,
)


class Streams(Queues):
    """Streams of a Redis."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def sink(self, **settings: Any) -> Redis:
        """A sink on it."""
        return Redis(**{"name": "events", "servers": self.server.address, **settings})

    def read(self, table: str) -> list[Record]:
        """A stream as redis-py reads it."""
        with self.client() as connection:
            return [_record(fields) for _, fields in connection.xrange(f"cdc:public:{table}")]

    def user(self) -> dict[str, Any]:
        """With the commands that the docs name."""
        rights = ("on", f">{SECRET}", "~cdc:*", "+xadd", "+multi", "+exec", "+role")
        with self.client() as connection:
            connection.execute_command("ACL", "SETUSER", "headrace", *rights)
        return {"username": "headrace", "password": Secret(SECRET)}

    def client(self) -> client.Redis:
        """A client of the library."""
        return client.Redis(port=self.server.port)


def _record(fields: dict[bytes, bytes]) -> Record:
    named = {"id": "event-id", "operation": "operation", "table": "table", "timestamp": "timestamp"}
    headers = {f"savegress-{name}": fields[key.encode()].decode() for key, name in named.items()}
    assert set(fields) == {*map(str.encode, named), b"event"}
    return Record(fields[b"event"], headers)


@pytest.fixture(scope="module")
def queues() -> Iterator[Streams]:
    """The server that these tests share."""
    if redis_program() is None:
        missing(f"Redis is not there. {HINT}")
    with RedisServer() as server:
        yield Streams(server)


class TestRedis(QueueTests):
    """What every queue promises."""


def test_a_stream_is_kept_short_and_its_name_is_as_it_is_told(queues: Streams) -> None:
    table = table_name()
    stream = Template("x.${source}.${table}")
    with queues.channel(stream=stream, max_length=100) as channel:
        for begin in range(0, 2000, 500):
            channel.send([event(table, 1, begin + at) for at in range(500)])
    with queues.client() as connection:
        assert 100 <= connection.xlen(f"x.pg.{table}") < 400


def test_two_tables_never_share_a_stream_by_their_names(queues: Streams) -> None:
    one, two = event("b:c", 1, 1, schema="a"), event("c", 1, 2, schema="a:b")
    with queues.channel() as channel:
        channel.send([one, two])
    with queues.client() as connection:
        assert connection.xlen("cdc:a:b-3Ac") == connection.xlen("cdc:a-3Ab:c") == 1


def test_a_key_that_is_no_stream_holds_up_its_own_table_only(queues: Streams) -> None:
    bad, good = table_name(), table_name()
    with queues.client() as connection:
        connection.set(f"cdc:public:{bad}", "text")
    with queues.channel() as channel:
        sent = [event(bad, 1, 1), event(good, 1, 2), event(bad, 1, 3), event(bad, 2, 4)]
        first, second, third, fourth = channel.send(sent)
    assert (second, third) == (ACCEPTED, UNSENT)
    assert first.outcome is fourth.outcome is DeliveryOutcome.REFUSED
    assert f"cdc:public:{bad}: the key is there, and is no stream" in first.reason
    assert len(queues.read(good)) == 1


def test_memory_that_is_full_fails_whole_windows_until_there_is_room(queues: Streams) -> None:
    table = table_name()
    sent = [event(table, 1, 1), event(table, 1, 2), event(table, 2, 3)]
    with queues.channel() as channel, queues.client() as connection:
        connection.config_set("maxmemory-policy", "noeviction")
        connection.config_set("maxmemory", "500kb")
        try:
            first, second, third = channel.send(sent)
        finally:
            connection.config_set("maxmemory", "0")
        assert first.outcome is third.outcome is DeliveryOutcome.FAILED
        assert "maxmemory" in first.reason
        assert second is UNSENT
        assert set(channel.send(sent)) == {ACCEPTED}
    assert [each.id for each in queues.read(table)] == [each.id for each in sent]


def test_a_replica_is_passed_over_and_one_that_becomes_it_is_left(queues: Streams) -> None:
    table = table_name()
    primary = queues.server.port
    with RedisServer() as other:
        replica = Streams(other)
        with replica.channel() as channel, replica.client() as connection:
            connection.replicaof("127.0.0.1", str(primary))
            [reply] = channel.send([event(table, 1, 1)])
            assert reply.outcome is DeliveryOutcome.UNREACHABLE
            assert "replica" in reply.reason
        with pytest.raises(SinkUnavailable, match="replica"):
            replica.sink().connect()
        both = f"{other.address},{queues.server.address}"
        with queues.channel(servers=both) as channel:
            assert list(channel.send([event(table, 1, 1)])) == [ACCEPTED]


@pytest.mark.parametrize("allowed", ["+xadd", "+xadd +multi +discard", "+xadd +exec"])
def test_a_user_without_transactions_is_told_before_anything_is_added(
    queues: Streams, allowed: str
) -> None:
    table, user = table_name(), table_name()
    rights = ("on", f">{SECRET}", "~cdc:*", *allowed.split())
    with queues.client() as connection:
        connection.execute_command("ACL", "SETUSER", user, *rights)
    line = ReconnectingChannel(queues.sink(username=user, password=Secret(SECRET)))
    for _ in range(2):
        [reply] = line.send([event(table, 1, 1)])
        assert reply.outcome is DeliveryOutcome.UNREACHABLE
        assert f"{user} needs the commands multi, exec and xadd" in reply.reason
        assert SECRET not in reply.reason
    assert not queues.read(table)


def test_a_user_with_three_commands_is_enough_and_one_that_loses_them_is_told(
    queues: Streams,
) -> None:
    table, user = table_name(), table_name()
    line = ReconnectingChannel(queues.sink(username=user, password=Secret(SECRET)))
    with queues.client() as connection:
        rights = ("on", f">{SECRET}", "~cdc:*", "+xadd", "+multi", "+exec")
        connection.execute_command("ACL", "SETUSER", user, *rights)
        assert list(line.send([event(table, 1, 1)])) == [ACCEPTED]
        for lost in ("-exec", "-multi"):
            connection.execute_command("ACL", "SETUSER", user, "+multi", "+exec")
            until_accepted(line, [event(table, 1, 1)])
            connection.execute_command("ACL", "SETUSER", user, lost)
            for _ in range(2):
                [reply] = line.send([event(table, 1, 2)])
                assert reply.outcome is DeliveryOutcome.UNREACHABLE
                assert "needs the commands" in reply.reason
        connection.execute_command("ACL", "SETUSER", user, "+multi", "+exec")
        assert list(line.send([event(table, 1, 2)])) == [ACCEPTED]
    close_all()


def test_a_server_that_reads_its_data_is_waited_for(queues: Streams) -> None:
    table = table_name()
    with RedisServer(settings={"enable-debug-command": "yes"}) as server:
        slow = Streams(server)
        with slow.client() as connection:
            for at in range(200):
                connection.set(f"key{at}", os.urandom(2000))  # it answers between two pieces
            connection.config_set("key-load-delay", "50000")  # microseconds a key
            connection.config_set("loading-process-events-interval-bytes", "1024")
        with slow.channel() as channel, slow.client() as connection:
            reload = threading.Thread(target=reloaded, args=(slow,))
            reload.start()
            wait_until(
                lambda: connection.info("persistence")["loading"] == 1,
                timeout=120,
                message="the server is reading its data",
            )
            [reply] = channel.send([event(table, 1, 1)])
            connection.config_set("key-load-delay", "0")
            reload.join()
        assert reply.outcome is DeliveryOutcome.UNREACHABLE
        assert "it is reading its data" in reply.reason
        with slow.channel() as channel:
            assert list(channel.send([event(table, 1, 1)])) == [ACCEPTED]


def reloaded(streams: Streams) -> None:
    """Have a server write its data and read it again."""
    with streams.client() as connection:
        connection.execute_command("DEBUG", "RELOAD")


def test_a_node_of_a_cluster_says_that_another_has_the_stream(queues: Streams) -> None:
    here, there = RedisServer(settings=node()), RedisServer(settings=node())
    with here, there:
        one, two = Streams(here), Streams(there)
        with one.client() as first, two.client() as second:
            first.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
            second.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
            bus = second.config_get("cluster-port")["cluster-port"]
            first.execute_command("CLUSTER", "MEET", "127.0.0.1", there.port, bus)
            wait_until(
                lambda: first.cluster("info")["cluster_state"] == "ok",
                timeout=120,
                message="the nodes have met",
            )
            tables = [f"t{at}" for at in range(20)]
            slots = [int(first.cluster("keyslot", f"cdc:public:{each}")) for each in tables]
        elsewhere = next(each for each, slot in zip(tables, slots, strict=True) if slot > 8191)
        with one.channel() as channel:
            [reply] = channel.send([event(elsewhere, 1, 1)])
    assert reply.outcome is DeliveryOutcome.UNREACHABLE
    assert "another node of its cluster has the stream" in reply.reason


def node() -> dict[str, str]:
    """The settings of a node of a cluster."""
    return {"cluster-enabled": "yes", "cluster-port": str(free_port()), "appendonly": "no"}


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n+OK\r\n*0\r\n" * 2])
def test_what_is_no_redis_is_told(said: bytes) -> None:
    with Strange(said) as strange:
        line = ReconnectingChannel(
            Redis(name="events", servers=strange.address, timeout_seconds=2.0)
        )
        replies = line.send([event("users", 1, 1)])
    assert [reply.outcome for reply in replies] == [DeliveryOutcome.UNREACHABLE]
    assert strange.address in replies[0].reason


def test_a_user_writes_where_he_may_with_tls(tmp_path: Path, queues: Streams) -> None:
    folder = certificate(tmp_path)
    settings = {
        "tls-port": str(port := free_port()),
        "tls-auth-clients": "no",
        "tls-cert-file": str(folder / "cert.pem"),
        "tls-key-file": str(folder / "key.pem"),
        "user": f"alice on >{SECRET} ~cdc:public:* +@all",
    }
    chosen = {
        "servers": f"127.0.0.1:{port}",
        "tls": True,
        "ca_file": str(folder / "cert.pem"),
        "username": "alice",
        "password": Secret(SECRET),
    }
    with RedisServer(settings=settings) as server:
        secured = Streams(server)
        with secured.channel(**chosen) as channel:
            good, bad = event("users", 1, 1), event("users", 1, 2, schema="private")
            first, second = channel.send([good, bad])
        with pytest.raises(SinkUnavailable, match="not trusted"):
            secured.sink(**(chosen | {"ca_file": ""})).connect()
    assert first is ACCEPTED
    assert second.outcome is DeliveryOutcome.REFUSED
    assert "may not write" in second.reason


def test_the_pipeline_sends_from_the_log(
    spark: SparkSession, tmp_path: Path, queues: Streams
) -> None:
    through_spark(spark, tmp_path, queues)


def test_streams_get_the_rows_that_spark_computes(
    spark: SparkSession, tmp_path: Path, queues: Streams
) -> None:
    site = Site(tmp_path, spark)
    with site.writing() as writer:
        writer.put("loud", "1", name="ann")
        writer.put("loud", "2", name="hidden")
        writer.put("loud", "1", Op.UPDATE, name="eve")
        writer.put("loud", "1", Op.UPDATE, name="hidden")
    statement = "SELECT _sequence, id, upper(name) AS name FROM changes WHERE name <> 'hidden'"
    site.once(queues.sink(transforms={"public.loud": TableTransform(sql=statement)}))
    events = [msgspec.json.decode(record.value) for record in queues.read("loud")]
    assert [(event["operation"], event["before"], event["after"]) for event in events] == [
        ("INSERT", None, {"id": "1", "name": "ANN"}),
        ("UPDATE", None, {"id": "1", "name": "EVE"}),
        ("DELETE", {"id": "1"}, None),
    ]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"servers": "redis://u:secret@h"}, "servers: name each server as host:port"),
        ({"servers": ""}, "servers: name each server as host:port"),
        ({"stream": Template("")}, "stream: an empty text"),
        ({"max_length": -1}, "max_length must not be below 0"),
        ({"ca_file": "x.pem"}, "ca_file is not used without tls"),
        ({"tls": True, "key_file": "x.pem"}, "key_file needs certificate_file"),
        ({"username": "", "password": Secret("secret")}, "password needs username"),
        ({"timeout_seconds": 0}, "timeout_seconds must be above 0"),
    ],
)
def test_a_setting_that_does_not_do_is_named(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Redis(**{"name": "events", "servers": "redis", **settings})
    assert told in str(refused.value)
    assert "secret" not in str(refused.value)


def test_the_config_in_the_docs_works(tmp_path: Path, queues: Streams) -> None:
    queues.user()  # the docs tell what it may
    assert isinstance(documented("redis", tmp_path), Redis)
    sink = documented("redis", tmp_path, servers=queues.server.address, tls=False)
    table = table_name()
    with opened(sink) as channel, queues.client() as connection:
        connection.config_set("slowlog-log-slower-than", "0")
        assert list(channel.send([event(table, 1, 1)])) == [ACCEPTED]
        connection.config_set("slowlog-log-slower-than", "-1")
        commands = [entry["command"] for entry in connection.slowlog_get(10)]
    assert len(queues.read(table)) == 1
    added = f"XADD cdc:public:{table} MAXLEN ~ 1000000 * id ".encode()
    assert [each for each in commands if each.startswith(added)]
