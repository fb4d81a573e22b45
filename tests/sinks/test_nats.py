"""NATS JetStream on a real server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import pytest
from pyspark.sql import SparkSession

from headrace.errors import ConfigError, SinkUnavailable
from headrace.secret import Secret
from headrace.sinks.nats.protocol import NatsLine, NatsMessage, NatsReader
from headrace.sinks.nats.sink import Nats
from headrace.sinks.push import ACCEPTED, UNSENT, DeliveryOutcome, Template
from headrace.sinks.push.channels import ReconnectingChannel, close_all
from headrace.testing import free_port, wait_until
from headrace.testing.nats import HINT, NatsServer, nats_program
from tests.needs import missing
from tests.sinks.brokers import event, table_name
from tests.sinks.nkeys import Trust, another_seed
from tests.sinks.proxies import Cut
from tests.sinks.queues import (
    SECRET,
    Queues,
    QueueTests,
    Record,
    Strange,
    certificate,
    documented,
    expect_stored,
    through_spark,
)

USERS = f"""
authorization {{
  users: [
    {{ user: alice, password: "right-{SECRET}", permissions: {{
        publish: ["cdc.public.>", "$JS.API.>"], subscribe: ["_INBOX.>"] }} }}
    {{ user: all, password: all }}
  ]
}}
no_auth_user: all
"""


class Subjects(Queues):
    """Subjects of a NATS server."""

    drops_repeats = True

    def __init__(self, server: NatsServer) -> None:
        self.server = server

    def sink(self, **settings: Any) -> Nats:
        """A sink on it that makes its stream."""
        given = {"name": "events", "servers": self.server.address, "stream": "CDC"}
        return Nats(**(given | settings))

    def read(self, table: str) -> list[Record]:
        """A subject as nats-py reads it."""
        return self.stored("CDC", f"cdc.public.{table}")

    def user(self) -> dict[str, Any]:
        """As the server's settings have it."""
        return {"username": "alice", "password": Secret(f"right-{SECRET}")}

    def stored(self, stream: str, subject: str) -> list[Record]:
        """A subject of any stream."""
        return asyncio.run(self._read(stream, subject))

    async def _read(self, name: str, subject: str) -> list[Record]:
        client = await nats.connect(self.server.address)
        stream = client.jetstream()
        consumer = await stream.subscribe(subject, ordered_consumer=True)
        found: list[Record] = []
        asked = json.dumps({"subjects_filter": subject}).encode()
        told = json.loads((await client.request(f"$JS.API.STREAM.INFO.{name}", asked)).data)
        left = told["state"].get("subjects", {}).get(subject, 0)
        while len(found) < left:
            message = await consumer.next_msg(timeout=10)
            headers = dict(message.headers or {})
            assert headers.pop("Nats-Msg-Id") == headers["savegress-event-id"]
            found.append(Record(message.data, headers))
        await client.close()
        return found

    def ask(self, subject: str, content: Any) -> Any:
        """JetStream's answer to a question."""

        async def asked() -> Any:
            client = await nats.connect(self.server.address)
            answer = await client.request(f"$JS.API.{subject}", json.dumps(content).encode())
            await client.close()
            return json.loads(answer.data)

        return asyncio.run(asked())


@contextmanager
def answering(queues: Subjects, subject: str, answer: bytes) -> Iterator[None]:
    """A service that is no stream answers on a subject."""
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        client = await nats.connect(queues.server.address)
        subscription = await client.subscribe(subject)
        await client.flush()
        ready.set()
        while not over.is_set():
            with suppress(TimeoutError):
                await (await subscription.next_msg(timeout=0.1)).respond(answer)
        await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(120)
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def queues() -> Iterator[Subjects]:
    """The server that these tests share."""
    if nats_program() is None:
        missing(f"NATS is not there. {HINT}")
    with NatsServer(settings=USERS) as server:
        yield Subjects(server)


class TestNats(QueueTests):
    """What every queue promises."""


def test_a_repeat_is_dropped_by_the_stream(queues: Subjects) -> None:
    table = table_name()
    sent = [event(table, 1, at) for at in range(10)]
    with queues.channel() as channel:
        assert set(channel.send(sent)) == set(channel.send(sent)) == {ACCEPTED}
    assert len(queues.read(table)) == 10


def test_a_subject_that_no_stream_has_is_told_with_what_to_do(queues: Subjects) -> None:
    table = table_name()
    with queues.channel(subject=Template("other.${table}"), stream="") as channel:
        [reply] = channel.send([event(table, 1, 1)])
    assert reply.outcome is DeliveryOutcome.UNREACHABLE
    assert f"no stream has the subject other.{table}" in reply.reason
    made = Template(f"{table}.${{schema}}")
    with queues.channel(subject=made, stream=table) as channel:
        sent = [event(table, 1, 1), event("x", 1, 2, schema="public"), event(table, 1, 3)]
        assert set(channel.send(sent)) == {ACCEPTED}


def test_where_others_are_taken_one_without_a_stream_fails_alone(queues: Subjects) -> None:
    one, two = table_name(), table_name()
    queues.ask(f"STREAM.CREATE.{one}", {"name": one, "subjects": [f"only.{one}"]})
    with queues.channel(subject=Template("only.${table}"), stream="") as channel:
        first, second = channel.send([event(one, 1, 1), event(two, 1, 2)])
        [again] = channel.send([event(two, 1, 2)])
        queues.ask(f"STREAM.DELETE.{one}", {})
        [gone] = channel.send([event(one, 1, 3)])
    assert first is ACCEPTED
    assert second.outcome is DeliveryOutcome.FAILED
    assert "create a stream" in second.reason
    assert again == second, "also when it is alone"
    assert gone.outcome is DeliveryOutcome.UNREACHABLE, (
        "of one that had a stream, JetStream may be off"
    )


def test_a_stream_that_is_full_keeps_rows_in_order(queues: Subjects) -> None:
    name, table = table_name(), table_name()
    settings: dict[str, Any] = {"max_msgs": 3, "discard": "new"}
    subject = Template(f"{name}.${{table}}")
    sent = [event(table, 1, at) for at in range(5)] + [event(table, 2, 9)]
    with queues.channel(subject=subject, stream=name, stream_settings=settings) as channel:
        replies = channel.send(sent)
        taken = [at for at, reply in enumerate(replies) if reply is ACCEPTED]
        assert taken == [0, 1, 5]
        assert replies[2].outcome is DeliveryOutcome.FAILED
        assert "maximum messages exceeded" in replies[2].reason
        assert replies[3] is replies[4] is UNSENT
        queues.ask(f"STREAM.PURGE.{name}", {})
        assert set(channel.send(sent[2:5])) == {ACCEPTED}


def test_what_is_too_large_is_refused_and_its_row_waits(queues: Subjects) -> None:
    name, table = table_name(), table_name()
    subject = Template(f"{name}.${{table}}")
    huge = event(table, 1, 1, payload=b"x" * 1_100_000)
    large = event(table, 2, 2, payload=b"x" * 10_000)
    sent = [huge, large, event(table, 1, 3), event(table, 2, 4), event(table, 3, 5)]
    settings: dict[str, Any] = {"max_msg_size": 5000}
    with queues.channel(subject=subject, stream=name, stream_settings=settings) as channel:
        first, second, third, fourth, fifth = channel.send(sent)
    assert first.outcome is second.outcome is DeliveryOutcome.REFUSED
    assert "max_payload" in first.reason
    assert "size exceeds maximum" in second.reason
    assert (third, fourth, fifth) == (UNSENT, UNSENT, ACCEPTED)
    assert queues.ask(f"STREAM.INFO.{name}", {})["state"]["messages"] == 1


@pytest.mark.requirement("S1-41")
@pytest.mark.parametrize("heard", [200, 8_000, 40_000])
def test_where_one_of_a_row_is_sent_at_a_time_what_was_not_sent_is_not_accepted(
    queues: Subjects, heard: int
) -> None:
    name, table = table_name(), table_name()
    chosen: dict[str, Any] = {
        "subject": Template(f"{name}.${{table}}"),
        "stream": name,
        "stream_settings": {"max_msg_size": 5000},
        "timeout_seconds": 10.0,
    }
    events = [event(table, at % 500, at) for at in range(1000)]
    with Cut(queues.server.address) as cut:
        sender = ReconnectingChannel(queues.sink(servers=cut.address, **chosen))
        assert list(sender.send([event(table, "first", 5000)])) == [ACCEPTED]
        cut.after(heard)
        replies = sender.send(events)
        expect_stored(queues.stored(name, f"{name}.{table}"), events, replies)
    assert replies[-1].outcome in (DeliveryOutcome.UNREACHABLE, DeliveryOutcome.UNSENT)


def test_an_account_with_a_limit_keeps_rows_in_order(queues: Subjects) -> None:
    settings = "accounts { A { jetstream { max_file: 300K }, users: [{user: a, password: a}] } }"
    table = table_name()
    sent = [event(table, 1, 1, payload=b"x" * 400_000), event(table, 1, 2), event(table, 2, 3)]
    with NatsServer(settings=settings) as server:
        limited = Subjects(server)
        with limited.channel(username="a", password=Secret("a")) as channel:
            first, second, third = channel.send(sent)
            assert first.outcome is DeliveryOutcome.FAILED
            assert "limits" in first.reason
            assert (second, third) == (UNSENT, ACCEPTED)


def test_an_answer_that_is_no_stream_s_accepts_nothing(queues: Subjects) -> None:
    name = table_name()
    chosen = {"subject": Template(f"{name}.${{table}}"), "stream": ""}
    with answering(queues, f"{name}.*", b"hello"), queues.channel(**chosen) as channel:
        [reply] = channel.send([event("users", 1, 1)])
    assert reply.outcome is DeliveryOutcome.FAILED
    assert f"subject {name}.users: something answered" in reply.reason


def test_a_stream_may_be_called_error(queues: Subjects) -> None:
    with queues.channel(subject=Template("error.${table}"), stream="error") as channel:
        assert list(channel.send([event("users", 1, 1)])) == [ACCEPTED]


def test_a_file_of_credentials_is_taken(queues: Subjects, tmp_path: Path) -> None:
    trust = Trust.made()
    with NatsServer(settings=trust.settings) as server:
        secured = Subjects(server)
        right = trust.write(tmp_path / "right.creds")
        with secured.channel(credentials_file=right) as channel:
            assert list(channel.send([event("users", 1, 1)])) == [ACCEPTED]
        wrong = trust.write(tmp_path / "wrong.creds", another_seed())
        with pytest.raises(SinkUnavailable, match="Authorization Violation"):
            secured.sink(credentials_file=wrong).connect()


@pytest.mark.parametrize("seed", ["SU1!!NOTBASE", "SUAA", ""])
def test_a_file_of_credentials_that_does_not_do_is_named(
    queues: Subjects, tmp_path: Path, seed: str
) -> None:
    file = tmp_path / "broken.creds"
    if seed:
        Trust.made().write(file, seed)
    with pytest.raises(SinkUnavailable, match=r"broken\.creds cannot be used"):
        queues.sink(credentials_file=str(file)).connect()


@pytest.mark.parametrize(
    "said",
    [
        (b"SSH-2.0-OpenSSH\r\nINFO no\r\n",),
        (b"INFO []\r\n",),
        (b'INFO {"headers":true}\r\n', b"PONG\r\nMSG x 1 y\r\n\r\n"),
    ],
)
def test_what_is_no_nats_is_told(said: tuple[bytes, ...]) -> None:
    with Strange(*said) as strange:
        line = ReconnectingChannel(Nats(name="events", servers=strange.address, stream="CDC"))
        [reply] = line.send([event("users", 1, 1)])
    assert reply.outcome is DeliveryOutcome.UNREACHABLE
    assert "does not speak as NATS does" in reply.reason


def test_a_user_publishes_where_he_may(queues: Subjects) -> None:
    table = table_name()
    with queues.channel(username="alice", password=Secret(f"right-{SECRET}")) as channel:
        first, second = channel.send([event(table, 1, 1), event(table, 1, 2, schema="private")])
    assert first is ACCEPTED
    assert second.outcome is DeliveryOutcome.REFUSED
    assert f'"cdc.private.{table}"' in second.reason


def test_a_server_without_jetstream_is_told(queues: Subjects) -> None:
    with NatsServer(jetstream=False) as server:
        plain = Subjects(server)
        with pytest.raises(SinkUnavailable, match="JetStream is off"):
            plain.sink().connect()
        with plain.channel(stream="") as channel:
            [reply] = channel.send([event("users", 1, 1)])
    assert reply.outcome is DeliveryOutcome.UNREACHABLE
    assert "JetStream is off" in reply.reason


def test_a_token_is_taken_with_tls(queues: Subjects, tmp_path: Path) -> None:
    folder = certificate(tmp_path)
    settings = f"""
    authorization {{ token: "{SECRET}" }}
    tls {{ cert_file: "{folder}/cert.pem", key_file: "{folder}/key.pem" }}
    """
    with NatsServer(settings=settings) as server:
        secured = Subjects(server)
        chosen = {"tls": True, "ca_file": str(folder / "cert.pem"), "token": Secret(SECRET)}
        with secured.channel(**chosen) as channel:
            assert list(channel.send([event("users", 1, 1)])) == [ACCEPTED]
        for wrong, told in (
            ({"ca_file": ""}, "not trusted"),
            ({"tls": False, "ca_file": ""}, "set tls: true"),
            ({"token": Secret("wrong")}, "Authorization Violation"),
        ):
            with pytest.raises(SinkUnavailable, match=told) as refused:
                secured.sink(**(chosen | wrong)).connect()
            assert SECRET not in repr(refused.value)


def test_the_pipeline_sends_from_the_log(
    spark: SparkSession, tmp_path: Path, queues: Subjects
) -> None:
    through_spark(spark, tmp_path, queues)


def test_a_table_s_name_ends_no_header_and_no_subject(queues: Subjects) -> None:
    name = table_name()
    table = f"{name} a.b\r\nNats-Msg-Id: x"
    with queues.channel() as channel:
        sent = event(table, 1, 1)._replace(id="evt_1")
        assert list(channel.send([sent])) == [ACCEPTED]
    [record] = queues.read(f"{name}-20a-2Eb-0D-0ANats-Msg-Id-3A-20x")
    assert record.headers["savegress-table"] == f"{name} a.b%0D%0ANats-Msg-Id: x"


def test_what_the_server_says_is_read_however_it_is_cut() -> None:
    said = (
        b'INFO {"a":1}\r\nMSG in.1 1 5\r\nab\r\nc\r\nPING\r\n'
        b"HMSG in.2 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n-ERR 'x y'\r\n"
    )
    wanted = [
        NatsLine(b"INFO", b'{"a":1}'),
        NatsMessage(b"in.1", b"", b"ab\r\nc"),
        NatsLine(b"PING", b""),
        NatsMessage(b"in.2", b"503", b""),
        NatsLine(b"-ERR", b"'x y'"),
    ]
    for size in range(1, len(said)):
        reader = NatsReader()
        pieces = [said[at : at + size] for at in range(0, len(said), size)]
        assert [each for piece in pieces for each in reader.feed(piece)] == wanted


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"servers": "nats://u:secret@h"}, "servers: name each server as host:port"),
        ({"subject": Template("a b.${table}")}, "has ' ' in it"),
        ({"subject": Template("a..${table}")}, "has nothing between two dots"),
        ({"stream": "a.b"}, "has a character that no stream's name has"),
        ({"stream_settings": {"max_msgs": 1}}, "stream_settings are not used without stream"),
        ({"username": "a", "token": Secret("secret")}, "only one of username, token"),
    ],
)
def test_a_setting_that_does_not_do_is_named(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Nats(**{"name": "events", "servers": "nats", **settings})
    assert told in str(refused.value)
    assert "secret" not in str(refused.value)


def test_the_config_in_the_docs_works(tmp_path: Path, queues: Subjects) -> None:
    assert isinstance(documented("nats", tmp_path), Nats)
    table = table_name()
    with cluster(3) as servers:
        addresses = ",".join(server.address for server in servers)
        # What is asked before a leader is chosen has no answer, and is asked again soon.
        sink = documented("nats", tmp_path, servers=addresses, tls=False, timeout_seconds=2.0)
        wait_until(
            lambda: set(ReconnectingChannel(sink).send([event(table, 1, 1)])) == {ACCEPTED},
            timeout=120,
            message="the cluster has a leader and makes the stream",
        )
        close_all()
        one = Subjects(servers[0])
        told = one.ask("STREAM.INFO.CDC", {})["config"]
        assert (told["subjects"], told["num_replicas"]) == (["cdc.*.*"], 3)
        assert len(one.read(table)) == 1


@contextmanager
def cluster(count: int) -> Iterator[list[NatsServer]]:
    """Servers that keep streams together."""
    ports = [free_port() for _ in range(count)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    users = f'{{ user: headrace, password: "{SECRET}" }}, {{ user: all, password: all }}'
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                NatsServer(
                    settings=f"""
                    server_name: "server-{port}"
                    cluster {{ name: "test", listen: "127.0.0.1:{port}", routes: [{routes}] }}
                    authorization {{ users: [{users}] }}
                    no_auth_user: all
                    """
                )
            )
            for port in ports
        ]
