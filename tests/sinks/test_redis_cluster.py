"""Redis Streams in a real cluster, and behind real sentinels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis as client
from redis.cluster import ClusterNode, RedisCluster

from headrace.config import parse
from headrace.errors import ConfigError, SinkUnavailable
from headrace.secret import Secret
from headrace.sinks.push import ACCEPTED, DeliveryOutcome
from headrace.sinks.push.channels import ReconnectingChannel
from headrace.sinks.redis import Redis, RedisSentinel
from headrace.testing import free_port, wait_until
from headrace.testing.redis import HINT, RedisServer, redis_program
from tests.needs import missing
from tests.sinks.brokers import event, table_name
from tests.sinks.queues import SECRET, certificate, ids, until_accepted

SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))


def ready(connection: client.Redis) -> bool:
    """Whether a node sees all slots, on two other nodes too."""
    info = connection.cluster("info")
    return (info["cluster_state"], info["cluster_known_nodes"]) == ("ok", "3")


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[RedisServer]]:
    """Three nodes; one that is down leaves the others' streams."""
    if redis_program() is None:
        missing(f"Redis is not there. {HINT}")
    with ExitStack() as stack:
        nodes, clients, buses = [], [], []
        for slots in SLOTS:
            settings = {
                "cluster-enabled": "yes",
                "cluster-port": str(free_port()),
                "cluster-require-full-coverage": "no",
            }
            nodes.append(stack.enter_context(RedisServer(settings=settings)))
            buses.append(settings["cluster-port"])
            clients.append(stack.enter_context(client.Redis(port=nodes[-1].port)))
            clients[-1].execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
        for node, bus in zip(nodes[1:], buses[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        wait_until(lambda: all(map(ready, clients)), timeout=120, message="the nodes have met")
        yield nodes


def sink(cluster: Sequence[RedisServer], **settings: Any) -> Redis:
    servers = ",".join(node.address for node in cluster)
    given: dict[str, Any] = {"name": "events", "servers": servers, "cluster": True}
    return Redis(**(given | settings))


def stored(cluster: Sequence[RedisServer], table: str) -> list[str]:
    """The ids in a stream, in order."""
    nodes = [ClusterNode("127.0.0.1", node.port) for node in cluster]
    with RedisCluster(startup_nodes=nodes) as connection:
        entries = connection.xrange(f"cdc:public:{table}")
    return [fields[b"id"].decode() for _, fields in entries]


def table_on(cluster: Sequence[RedisServer], number: int) -> str:
    """A table whose stream is on one of the nodes."""
    first, last = SLOTS[number]
    with client.Redis(port=cluster[0].port) as connection:
        while True:
            table = table_name()
            slot = connection.execute_command("CLUSTER", "KEYSLOT", f"cdc:public:{table}")
            if first <= int(slot) <= last:
                return table


def test_streams_of_all_nodes_get_their_rows_in_order(cluster: list[RedisServer]) -> None:
    tables = [table_on(cluster, at % 3) for at in range(6)]
    events = [event(tables[at % 6], at % 30, at) for at in range(900)]
    channel = sink(cluster).connect()
    assert set(channel.send(events)) == {ACCEPTED}
    channel.close()
    channel.close()
    for table in tables:
        assert stored(cluster, table) == [each.id for each in events if each.table == table]


def test_one_node_that_is_enough_to_start_from_finds_the_others(
    cluster: list[RedisServer],
) -> None:
    tables = [table_on(cluster, at) for at in range(3)]
    channel = ReconnectingChannel(sink(cluster[:1]))
    assert set(channel.send([event(table, 1, 1) for table in tables])) == {ACCEPTED}


def test_a_node_that_is_away_delays_its_own_streams_and_is_no_attempt(
    cluster: list[RedisServer],
) -> None:
    here, there = table_on(cluster, 0), table_on(cluster, 1)
    sent = [event(here, 1, 1), event(there, 1, 2), event(there, 1, 3), event(here, 2, 4)]
    channel = ReconnectingChannel(sink(cluster, timeout_seconds=5.0))
    assert set(channel.send([event(here, 9, 8), event(there, 9, 9)])) == {ACCEPTED}
    cluster[1].kill()
    first, second, third, fourth = channel.send(sent)
    assert (first, fourth) == (ACCEPTED, ACCEPTED)
    assert second.outcome is third.outcome is DeliveryOutcome.UNSENT
    assert cluster[1].address in second.reason
    assert set(channel.send([event(here, 3, 5)])) == {ACCEPTED}, "others go on"
    cluster[1].start()
    until_accepted(channel, sent[1:3])
    assert ids([event(there, 9, 9), *sent[1:3]]) == stored(cluster, there)


def test_a_cluster_of_which_nothing_is_there_is_unreachable_until_it_is() -> None:
    if redis_program() is None:
        missing(f"Redis is not there. {HINT}")
    settings = {
        "cluster-enabled": "yes",
        "cluster-port": str(free_port()),
        "cluster-require-full-coverage": "no",
        "requirepass": SECRET,
    }
    with RedisServer(settings=settings) as node, ExitStack() as stack:
        login = {"password": Secret(SECRET)}
        one = event(table_name(), 1, 1)

        def outcome(**chosen: Any) -> tuple[DeliveryOutcome, str]:
            [reply] = ReconnectingChannel(sink([node], **(login | chosen))).send([one])
            return reply.outcome, reply.reason.removeprefix(f"Redis at {node.address}: ")

        away = DeliveryOutcome.UNREACHABLE
        assert outcome() == (away, "its cluster is down"), "no node has a slot"
        connection = stack.enter_context(client.Redis(port=node.port, password=SECRET))
        slot = int(connection.execute_command("CLUSTER", "KEYSLOT", f"cdc:public:{one.table}"))
        connection.execute_command("CLUSTER", "ADDSLOTS", (slot + 1) % 16384)
        wrong = (away, "username or password is wrong for default")
        assert outcome(password=Secret("wrong")) == wrong
        wait_until(lambda: outcome()[0] is not away, timeout=60, message="it has a slot")
        found, reason = outcome()
        assert found is DeliveryOutcome.UNSENT
        assert "not covered" in reason
        connection.execute_command("CLUSTER", "ADDSLOTS", slot)
        until_accepted(ReconnectingChannel(sink([node], **login)), [one])
        node.kill()
        assert outcome(timeout_seconds=5.0) == (away, "Connection refused")


def test_a_stream_that_has_moved_is_found_on_its_new_node(cluster: list[RedisServer]) -> None:
    table = table_on(cluster, 2)
    channel = ReconnectingChannel(sink(cluster))
    assert list(channel.send([event(table, 1, 1)])) == [ACCEPTED]
    with ExitStack() as stack:
        clients = [stack.enter_context(client.Redis(port=node.port)) for node in cluster]
        slot = int(clients[0].execute_command("CLUSTER", "KEYSLOT", f"cdc:public:{table}"))
        clients[2].delete(f"cdc:public:{table}")
        target = clients[0].execute_command("CLUSTER", "MYID")
        for each in clients:
            each.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target)
        until_accepted(channel, [event(table, 1, 2)])
        assert clients[0].xlen(f"cdc:public:{table}") == 1


# --- sentinels -----------------------------------------------------------------------------------


class SentinelServer(RedisServer):
    """A sentinel that watches a server."""

    def __init__(self, watched_port: int, *settings: str) -> None:
        super().__init__()
        self._watched_port = watched_port
        self._lines = settings

    def command(self) -> list[str]:
        file = self.directory / "sentinel.conf"
        lines = (
            f"port {self.port}",
            f"dir {self.directory}",
            *self._lines,
            f"sentinel monitor shop 127.0.0.1 {self._watched_port} 1",
            "sentinel down-after-milliseconds shop 1000",
            "sentinel failover-timeout shop 5000",
        )
        file.write_text("\n".join(lines) + "\n")
        return [redis_program() or "", os.fspath(file), "--sentinel"]


def test_the_primary_that_a_sentinel_names_is_written_to_before_and_after_a_failover() -> None:
    if redis_program() is None:
        missing(f"Redis is not there. {HINT}")
    table = table_name()
    with RedisServer() as first, ExitStack() as stack:
        second = stack.enter_context(RedisServer(settings={"replicaof": f"127.0.0.1 {first.port}"}))
        sentinel = stack.enter_context(SentinelServer(first.port))
        watching = stack.enter_context(client.Redis(port=sentinel.port))
        wait_until(
            lambda: watching.sentinel_slaves("shop"), timeout=120, message="it knows the replica"
        )
        watched = RedisSentinel(master="shop", nodes=(sentinel.address,))
        channel = ReconnectingChannel(Redis(name="events", sentinel=watched, timeout_seconds=5.0))
        assert list(channel.send([event(table, 1, 1)])) == [ACCEPTED]
        replica = stack.enter_context(client.Redis(port=second.port))
        wait_until(lambda: replica.xlen(f"cdc:public:{table}"), timeout=60)
        first.kill()
        [reply] = channel.send([event(table, 1, 2)])
        assert reply.outcome is DeliveryOutcome.UNREACHABLE
        until_accepted(channel, [event(table, 1, 2)])
        found = [fields[b"id"].decode() for _, fields in replica.xrange(f"cdc:public:{table}")]
        assert found == ids([event(table, 1, 1), event(table, 1, 2)])
        other = RedisSentinel(master="nothing", nodes=(sentinel.address,))
        with pytest.raises(SinkUnavailable, match="no sentinel knows a primary nothing"):
            Redis(name="events", sentinel=other, timeout_seconds=2.0).connect()


def test_sentinels_are_reached_by_tls_where_the_servers_are(tmp_path: Path) -> None:
    if redis_program() is None:
        missing(f"Redis is not there. {HINT}")
    table, pem = table_name(), certificate(tmp_path)
    files = {
        "tls-auth-clients": "no",
        "tls-cert-file": str(pem / "cert.pem"),
        "tls-key-file": str(pem / "key.pem"),
        "tls-ca-cert-file": str(pem / "cert.pem"),
    }
    served, watching = free_port(), free_port()
    lines = [f"{name} {value}" for name, value in files.items()]
    with (
        RedisServer(settings={"tls-port": str(served), **files}),
        SentinelServer(served, f"tls-port {watching}", "tls-replication yes", *lines),
    ):
        watched = RedisSentinel(master="shop", nodes=(f"127.0.0.1:{watching}",))
        sink = Redis(name="events", sentinel=watched, tls=True, ca_file=str(pem / "cert.pem"))
        assert list(ReconnectingChannel(sink).send([event(table, 1, 1)])) == [ACCEPTED]
        with pytest.raises(SinkUnavailable, match="no sentinel"):
            Redis(name="events", sentinel=watched, timeout_seconds=2.0).connect()


# --- settings ------------------------------------------------------------------------------------


def test_a_url_says_what_the_settings_would() -> None:
    url = f"rediss://alice:{SECRET}@redis.example:6380/2"
    sink = Redis(name="events", url=Secret(url))
    assert (sink.servers, sink.tls, sink.database) == ("redis.example:6380", True, 2)
    assert (sink.username, sink.password) == ("alice", Secret(SECRET))
    assert SECRET not in repr(sink)
    assert Redis(name="events", url=Secret("redis://here")).servers == "here:6379"
    assert Redis(name="events", url=Secret("redis://here"), tls=True).tls


def test_sentinels_are_set_in_a_config_file(tmp_path: Path) -> None:
    given = {
        "type": "redis",
        "sentinel": {"master": "shop", "nodes": ["s1:26379", "s2"], "password": "${SENTINEL}"},
    }
    content = {"pipeline": {"url": "https://headrace.example", "sinks": {"events": given}}}
    config = parse(content, folder=tmp_path, environment={"SENTINEL": SECRET})
    assert config.pipeline is not None
    [sink] = config.pipeline.sinks
    assert isinstance(sink, Redis)
    assert sink.sentinel == RedisSentinel(
        master="shop", nodes=("s1:26379", "s2"), password=Secret(SECRET)
    )
    assert [str(each) for each in sink.sentinels()] == ["s1:26379", "s2:26379"]
    assert SECRET not in repr(sink)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "servers: name each server as host:port"),
        ({"url": Secret("http://h")}, "url: it does not begin with redis:// or rediss://"),
        ({"url": Secret("redis://u:secret@h:x")}, "url: it cannot be read"),
        ({"url": Secret("redis://h/shop")}, "after the server comes the number of a database"),
        ({"url": Secret("redis://h?ssl_ca_certs=x&socket_timeout=1")}, "url: socket_timeout, ssl_"),
        ({"url": Secret("redis://h"), "servers": "other"}, "url and servers are both set"),
        ({"servers": "h", "cluster": True, "database": 1}, "a cluster has only database 0"),
        (
            {"servers": "h", "sentinel": RedisSentinel(master="m", nodes=("s",))},
            "sentinel finds the server",
        ),
        ({"sentinel": RedisSentinel(master="", nodes=("s",))}, "sentinel: set master and nodes"),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Redis(**{"name": "events", **settings})
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)
