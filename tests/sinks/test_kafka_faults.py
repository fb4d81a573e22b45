"""Kafka while things go wrong: brokers that die, hang, are not there, or let nobody in."""

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from headrace.errors import SinkUnavailable
from headrace.secret import Secret
from headrace.sinks.kafka.channel import KafkaChannel
from headrace.sinks.kafka.sink import Kafka
from headrace.sinks.push import ACCEPTED, DeliveryOutcome, Event, Reply
from headrace.sinks.push.channels import ReconnectingChannel, close_all
from headrace.testing import wait_until
from headrace.testing.kafka import KafkaServer
from tests.needs import missing
from tests.sinks.brokers import channel, event, expect_kafka, read, sink, table_name
from tests.sinks.proxies import Slow, Way, nowhere
from tests.sinks.queues import ids, settle

PASSWORD = "hunter2-of-alice"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    if shutil.which("openssl") is None:
        missing("openssl makes the certificate, and is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    both = (folder / "key.pem").read_text() + (folder / "cert.pem").read_text()
    (folder / "both.pem").write_text(both)
    return folder


class Behind(KafkaServer):
    """A broker that has one more listener, to which it tells clients a way."""

    def __init__(self, way: Way, *, listeners: dict[str, str], settings: dict[str, str]) -> None:
        super().__init__(listeners={**listeners, "WAY": "PLAINTEXT"}, settings=settings)
        self._way = way.address
        way.server = self.listener("WAY")

    def _properties(self) -> dict[str, str]:
        found = super()._properties()
        told = found["advertised.listeners"].replace(self.listener("WAY"), self._way)
        return found | {"advertised.listeners": told}


@pytest.fixture(scope="module")
def way() -> Iterator[Slow]:
    """The way to the broker."""
    with Slow() as made:
        yield made


@pytest.fixture(scope="module")
def kafka(certificate: Path, way: Slow) -> Iterator[KafkaServer]:
    """A broker to break, which also takes passwords, with TLS and without."""
    expect_kafka()
    login = (
        f'org.apache.kafka.common.security.plain.PlainLoginModule required user_alice="{PASSWORD}";'
    )
    settings = {
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl.plain.sasl.jaas.config": login,
        "listener.name.both.plain.sasl.jaas.config": login,
        "listener.name.both.ssl.keystore.type": "PEM",
        "listener.name.both.ssl.keystore.location": str(certificate / "both.pem"),
        "listener.name.tls.ssl.keystore.type": "PEM",
        "listener.name.tls.ssl.keystore.location": str(certificate / "both.pem"),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "allow.everyone.if.no.acl.found": "true",
    }
    listeners = {"SASL": "SASL_PLAINTEXT", "BOTH": "SASL_SSL", "TLS": "SSL"}
    with Behind(way, listeners=listeners, settings=settings) as server:
        yield server


# --- who is let in -------------------------------------------------------------------------------


def _alice(server: KafkaServer, listener: str, password: str = PASSWORD) -> dict[str, Any]:
    protocol = {"SASL": "sasl_plaintext", "BOTH": "sasl_ssl"}[listener]
    return {
        "servers": server.listener(listener),
        "security_protocol": protocol,
        "username": "alice",
        "password": Secret(password),
    }


def test_a_password_is_sent_over_tls(kafka: KafkaServer, certificate: Path) -> None:
    table = table_name()
    ca_file = str(certificate / "cert.pem")
    for at, settings in enumerate(
        (
            _alice(kafka, "SASL"),
            _alice(kafka, "BOTH") | {"ca_file": ca_file},
            {
                "servers": kafka.listener("TLS"),
                "security_protocol": "ssl",
                "ca_file": ca_file,
            },
        )
    ):
        with channel(kafka, **settings) as open_channel:
            assert list(open_channel.send([event(table, at, at)])) == [ACCEPTED]
    assert len(read(kafka, f"cdc.public.{table}")) == 3


def test_a_wrong_password_makes_it_wait_and_does_not_show(kafka: KafkaServer) -> None:
    wrong = "not-the-password"
    given = sink(kafka, **_alice(kafka, "SASL", wrong))
    with pytest.raises(SinkUnavailable) as refused:
        given.connect()
    assert "uthentication" in str(refused.value)
    assert kafka.listener("SASL") in str(refused.value)
    assert wrong not in refused.value.explain() + repr(refused.value) + repr(given)


@pytest.mark.requirement("P-15")
def test_check_logs_in_as_the_sink_does(kafka: KafkaServer) -> None:
    [found] = sink(kafka, **_alice(kafka, "SASL")).check()
    assert found.ok, found
    with pytest.raises(SinkUnavailable, match="uthentication"):
        sink(kafka, **_alice(kafka, "SASL", "not-the-password")).check()


def test_a_certificate_of_nobody_we_know_makes_it_wait(kafka: KafkaServer) -> None:
    with pytest.raises(SinkUnavailable, match="certificate"):
        sink(kafka, servers=kafka.listener("TLS"), security_protocol="ssl").connect()


def test_a_topic_that_we_may_not_write_is_refused_and_others_are_not(kafka: KafkaServer) -> None:
    closed, open_table = table_name(), table_name()
    admin = AdminClient({"bootstrap.servers": kafka.address})
    binding = AclBinding(
        ResourceType.TOPIC,
        f"cdc.public.{closed}",
        ResourcePatternType.LITERAL,
        "User:alice",
        "*",
        AclOperation.WRITE,
        AclPermissionType.DENY,
    )
    for future in admin.create_acls([binding]).values():
        future.result()
    with channel(kafka, **_alice(kafka, "SASL")) as open_channel:
        sent = [event(closed, 1, 1), event(open_table, 1, 2), event(closed, 1, 3)]
        first, second, third = open_channel.send(sent)
        assert (first.outcome, second, third.outcome) == (
            DeliveryOutcome.REFUSED,
            ACCEPTED,
            DeliveryOutcome.REFUSED,
        )
        assert f"cdc.public.{closed}" in first.reason
        assert "uthorization" in first.reason


# --- brokers that are not there ------------------------------------------------------------------


def test_an_address_where_nobody_listens_is_named(kafka: KafkaServer) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(SinkUnavailable, match=f"Kafka at {address}: .*refused"):
            Kafka(name="events", servers=address).connect()


def test_an_address_that_never_answers_is_given_up() -> None:
    expect_kafka()
    with nowhere() as address:
        given = Kafka(name="events", servers=address, timeout_seconds=1.0)
        with pytest.raises(SinkUnavailable, match=f"{address}: no answer in 1 s; check servers"):
            given.connect()


def test_a_broker_that_is_killed_within_a_window_loses_nothing_and_keeps_the_order(
    kafka: KafkaServer,
) -> None:
    table = table_name()
    events = [event(table, at % 7, at, payload=b"x" * 500) for at in range(20_000)]
    with channel(kafka, settings={"batch.num.messages": 20}) as open_channel:
        assert list(open_channel.send(events[:1])) == [ACCEPTED]
        with _sending(open_channel, events) as answers:
            kafka.kill()
        assert any(each.outcome is DeliveryOutcome.UNREACHABLE for each in answers)
        kafka.start()
        rest = _unsettled(events, answers)
        assert rest
        while rest:  # as the common part does
            rest = _unsettled(rest, open_channel.send(rest))
    _expect_in_order(kafka, table, events)


def test_a_broker_that_is_down_for_a_while_is_told_of_each_time(kafka: KafkaServer) -> None:
    table = table_name()
    sent = [event(table, 1, 1), event(table, 1, 2)]
    with channel(kafka, timeout_seconds=2.0) as open_channel:
        kafka.kill()
        for _ in range(3):
            replies = open_channel.send(sent)
            assert {each.outcome for each in replies} == {DeliveryOutcome.UNREACHABLE}
            assert kafka.address in replies[0].reason
        kafka.start()
        _until_accepted(open_channel, sent)
    assert [record.id for record in read(kafka, f"cdc.public.{table}")] == [e.id for e in sent]


def test_a_broker_that_hangs_and_goes_on_takes_everything_once(kafka: KafkaServer) -> None:
    table = table_name()
    events = [event(table, at % 7, at, payload=b"x" * 500) for at in range(5_000)]
    with channel(kafka, settings={"batch.num.messages": 20}) as open_channel:
        assert list(open_channel.send(events[:1])) == [ACCEPTED]
        kafka.pause()
        with _sending(open_channel, events[1:]) as answers:
            kafka.resume()
        assert set(answers) == {ACCEPTED}
    _expect_in_order(kafka, table, events)
    assert len(read(kafka, f"cdc.public.{table}")) == len(events)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.requirement("S1-41")
def test_a_broker_that_takes_ten_seconds_for_an_answer_gets_everything_once(
    kafka: KafkaServer, way: Slow
) -> None:
    table = table_name()
    events = [event(table, at % 3, at) for at in range(1, 14)]
    given = sink(kafka, servers=way.address, batch_size=6)
    line = ReconnectingChannel(given)
    assert list(line.send(events[:1])) == [ACCEPTED]
    with way.slowed(10.0):
        settle(line, given.policy, events[1:])
        close_all()
    _expect_in_order(kafka, table, events)
    assert len(read(kafka, f"cdc.public.{table}")) == len(events)


@pytest.mark.requirement("S1-41")
def test_what_was_taken_without_an_answer_comes_again_with_the_same_id(
    kafka: KafkaServer, way: Slow
) -> None:
    table = table_name()
    first, *events = [event(table, 1, at) for at in range(100)]
    with channel(kafka, servers=way.address, timeout_seconds=5.0) as open_channel:
        assert list(open_channel.send([first])) == [ACCEPTED]
        with way.deaf():
            replies = open_channel.send(events)
        assert {each.outcome for each in replies} <= {
            DeliveryOutcome.FAILED,
            DeliveryOutcome.UNREACHABLE,
        }
        stored = read(kafka, f"cdc.public.{table}")
        assert ids(stored) == [first.id, *ids(events)], "it has them, and could not say so"
        _until_accepted(open_channel, events)
    assert ids(read(kafka, f"cdc.public.{table}"))[100:] == ids(events)


def test_a_broker_that_hangs_for_too_long_is_asked_again(kafka: KafkaServer) -> None:
    table = table_name()
    events = [event(table, 1, at) for at in range(100)]
    with channel(kafka, timeout_seconds=5.0) as open_channel:
        assert list(open_channel.send(events[:1])) == [ACCEPTED]
        kafka.pause()
        try:
            replies = open_channel.send(events[1:])
        finally:
            kafka.resume()
        assert {each.outcome for each in replies} <= {
            DeliveryOutcome.FAILED,
            DeliveryOutcome.UNREACHABLE,
        }
        _until_accepted(open_channel, events[1:])
    _expect_in_order(kafka, table, events)


def test_after_a_fatal_error_the_next_window_has_a_new_producer(kafka: KafkaServer) -> None:
    table = table_name()
    with channel(kafka) as open_channel:
        first = open_channel._producer
        # What librdkafka calls back with when it can no longer tell what brokers have.
        open_channel._errors(KafkaError(KafkaError._FATAL, "lost its place", fatal=True))
        open_channel.send([event(table, 1, 1)])
        _until_accepted(open_channel, [event(table, 1, 1)])
        assert open_channel._producer is not first


@contextmanager
def _sending(open_channel: KafkaChannel, events: list[Event]) -> Iterator[list[Reply]]:
    """Send from a thread; inside, some of it is with the client; afterwards all is answered."""
    answers: list[Reply] = []
    thread = threading.Thread(target=lambda: answers.extend(open_channel.send(events)))
    producer = open_channel._producer
    assert producer is not None
    thread.start()
    try:
        wait_until(lambda: len(producer) > 50, message="the client has some")
        yield answers
    finally:
        thread.join()


def _until_accepted(open_channel: KafkaChannel, events: list[Event]) -> None:
    def sent() -> bool:
        return set(open_channel.send(events)) == {ACCEPTED}

    wait_until(sent, timeout=120, message="a broker that is back accepts events")


def _unsettled(events: Sequence[Event], answers: Sequence[Reply]) -> list[Event]:
    """The events of each row from the first on that was not accepted."""
    assert {each.outcome for each in answers} <= {
        DeliveryOutcome.ACCEPTED,
        DeliveryOutcome.FAILED,
        DeliveryOutcome.UNREACHABLE,
    }
    rows: set[str] = set()
    rest = []
    for each, reply in zip(events, answers, strict=True):
        if reply.outcome is not DeliveryOutcome.ACCEPTED:
            rows.add(each.row)
        if each.row in rows:
            rest.append(each)
    return rest


def _expect_in_order(server: KafkaServer, table: str, events: list[Event]) -> None:
    """Everything arrived; without its repeats, each row is in order."""
    seen: dict[str, list[str]] = {}
    for record in read(server, f"cdc.public.{table}"):
        assert record.key is not None
        seen.setdefault(record.key, []).append(record.id)
    wanted: dict[str, list[str]] = {}
    for each in events:
        wanted.setdefault(f"{table}:{each.row.rpartition(':')[2]}", []).append(each.id)
    assert {key: list(dict.fromkeys(found)) for key, found in seen.items()} == wanted
