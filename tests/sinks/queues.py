"""What the sinks of message queues promise alike, on real servers that are broken on purpose."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import pytest
import yaml
from pyspark.sql import SparkSession

from headrace.config import parse
from headrace.errors import SinkUnavailable
from headrace.secret import Secret
from headrace.sinks.push import ACCEPTED, BrokerSettings, Channel, DeliveryOutcome, Event, Reply
from headrace.sinks.push.channels import ReconnectingChannel, close_all
from headrace.sinks.push.delivery import DeliveryCheckpoint, EventDelivery, Policy
from headrace.sinks.push.writer import PushWriter
from headrace.testing import wait_until
from headrace.testing.processes import ServerProcess
from tests.needs import missing
from tests.sinks.brokers import event, table_name
from tests.sinks.memory_destination import DeadLetterQueue
from tests.sinks.proxies import Cut, Slow, nowhere
from tests.sinks.push_harness import Post
from tests.sinks.socket_sink import Office

SECRET = "hunter2-of-nobody"


class Record(NamedTuple):
    """What a consumer got."""

    value: bytes
    headers: dict[str, str]  # or what the server has in their place

    @property
    def id(self) -> str:
        """The event's."""
        return self.headers["savegress-event-id"]


class Queues(ABC):
    """A server, sinks on it, and a consumer."""

    server: ServerProcess
    drops_repeats = False  # the server does, by their ids

    @abstractmethod
    def sink(self, **settings: Any) -> BrokerSettings:
        """A sink on the server that makes what it needs."""

    @abstractmethod
    def read(self, table: str) -> list[Record]:
        """All that came for a table, in order."""

    def read_on(self, table: str, before: Sequence[Record]) -> list[Record]:
        """What came after what was read before."""
        return self.read(table)[len(before) :]

    @abstractmethod
    def user(self) -> dict[str, Any]:
        """A user on the server that may do all that a sink does, with SECRET in its password."""

    @contextmanager
    def channel(self, **settings: Any) -> Iterator[Channel]:
        """An open channel to the server."""
        with opened(self.sink(**settings)) as channel:
            yield channel


@contextmanager
def opened(sink: BrokerSettings) -> Iterator[Channel]:
    """A channel of a sink until the context ends."""
    channel = sink.connect()
    try:
        yield channel
    finally:
        channel.close()


def certificate(folder: Path) -> Path:
    """The folder with a certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        missing("openssl makes the certificate, and is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    (folder / "key.pem").chmod(0o644)
    return folder


class QueueTests:
    """What every sink of a message queue promises; a subclass gives the fixture `queues`."""

    time = "1731683402123"  # of the events' commits

    @pytest.mark.requirement("S1-38", "S1-41")
    def test_a_message_is_the_event_and_says_what_it_is(self, queues: Queues) -> None:
        table = table_name()
        sent = event(table, 1, 7, op="UPDATE", payload=b'{"id":1}')
        with queues.channel() as channel:
            assert list(channel.send([sent])) == [ACCEPTED]
        [record] = queues.read(table)
        assert record.value == b'{"id":1}'
        assert record.headers == {
            "savegress-event-id": sent.id,
            "savegress-operation": "UPDATE",
            "savegress-table": table,
            "savegress-timestamp": self.time,
        }

    def test_a_snapshot_row_is_an_insert_as_in_the_event(self, queues: Queues) -> None:
        table = table_name()
        with queues.channel() as channel:
            channel.send([event(table, 1, 1, op="READ")])
        [record] = queues.read(table)
        assert record.headers["savegress-operation"] == "INSERT"

    def test_everything_arrives_once_and_in_order(self, queues: Queues) -> None:
        table = table_name()
        events = [event(table, at % 40, at, payload=b"%d" % at) for at in range(3000)]
        with queues.channel() as channel:
            for begin in range(0, len(events), 1000):
                assert set(channel.send(events[begin : begin + 1000])) == {ACCEPTED}
        assert [record.id for record in queues.read(table)] == [each.id for each in events]

    def test_a_large_event_arrives_whole(self, queues: Queues) -> None:
        table = table_name()
        payload = bytes(range(256)) * 3000
        with queues.channel() as channel:
            assert list(channel.send([event(table, 1, 1, payload=payload)])) == [ACCEPTED]
        [record] = queues.read(table)
        assert record.value == payload

    @pytest.mark.requirement("S1-41")
    def test_a_server_that_is_killed_in_a_window_loses_nothing(self, queues: Queues) -> None:
        table = table_name()
        events = [event(table, at % 3000, at, payload=b"x" * 2000) for at in range(6000)]
        line = ReconnectingChannel(queues.sink(timeout_seconds=10.0))
        assert set(line.send(events[:10])) == {ACCEPTED}
        rest: list[Event] = []

        def sending() -> None:
            for begin in range(10, len(events), 1000):
                window = events[begin : begin + 1000]
                rest.extend(unsettled(window, line.send(window), {each.row for each in rest}))

        thread = threading.Thread(target=sending)
        thread.start()
        queues.server.kill()
        thread.join()
        queues.server.start()
        assert rest
        until_accepted(line, rest)
        expect_in_order(queues.read(table), events)

    @pytest.mark.requirement("S1-41")
    @pytest.mark.parametrize("heard", [0, 30, 3000])
    def test_what_was_not_answered_when_a_connection_ends_is_not_accepted(
        self, queues: Queues, heard: int
    ) -> None:
        table = table_name()
        first = event(table, "first", 0)
        events = [event(table, at, at, payload=b"x" * 2000) for at in range(1, 2001)]
        with Cut(queues.server.address) as cut:
            line = ReconnectingChannel(queues.sink(servers=cut.address, timeout_seconds=10.0))
            assert list(line.send([first])) == [ACCEPTED]
            cut.after(heard)
            replies = line.send(events)
            expect_stored(queues.read(table), events, replies)
            if not heard:
                assert {reply.outcome for reply in replies} == {DeliveryOutcome.UNREACHABLE}

    def test_a_server_that_is_down_is_told_of_each_time(self, queues: Queues) -> None:
        table = table_name()
        sent = [event(table, 1, 1), event(table, 1, 2)]
        line = ReconnectingChannel(queues.sink(timeout_seconds=5.0))
        assert list(line.send(sent[:1])) == [ACCEPTED]
        queues.server.kill()
        for _ in range(3):
            reply, *_ = line.send(sent[1:])
            assert reply.outcome is DeliveryOutcome.UNREACHABLE
            assert queues.server.address in reply.reason
        queues.server.start()
        until_accepted(line, sent[1:])
        assert [record.id for record in queues.read(table)] == [each.id for each in sent]

    def test_a_server_that_hangs_and_goes_on_takes_everything(self, queues: Queues) -> None:
        table = table_name()
        events = [event(table, at % 7, at, payload=b"x" * 500) for at in range(1000)]
        with queues.channel() as channel:
            assert list(channel.send(events[:1])) == [ACCEPTED]
            queues.server.pause()
            answers: list[Reply] = []
            thread = threading.Thread(target=lambda: answers.extend(channel.send(events[1:])))
            thread.start()
            queues.server.resume()
            thread.join()
        assert set(answers) == {ACCEPTED}
        assert [record.id for record in queues.read(table)] == [each.id for each in events]

    @pytest.mark.faults
    @pytest.mark.slow
    @pytest.mark.requirement("S1-41")
    def test_a_server_that_takes_ten_seconds_for_an_answer_gets_everything_once(
        self, queues: Queues
    ) -> None:
        table = table_name()
        first, *events = [event(table, at % 3, at) for at in range(1, 14)]
        sink = queues.sink(batch_size=6)
        with Slow(queues.server.address) as way:
            line = ReconnectingChannel(replace(sink, servers=way.address))
            assert list(line.send([first])) == [ACCEPTED]
            with way.slowed(10.0):
                settle(line, sink.policy, events)
        assert [record.id for record in queues.read(table)] == [first.id, *ids(events)]

    @pytest.mark.requirement("S1-41")
    def test_what_was_taken_without_an_answer_comes_again_with_the_same_id(
        self, queues: Queues
    ) -> None:
        table = table_name()
        first, *events = [event(table, 1, at) for at in range(100)]
        with Slow(queues.server.address) as way:
            line = ReconnectingChannel(queues.sink(servers=way.address, timeout_seconds=5.0))
            assert list(line.send([first])) == [ACCEPTED]
            with way.deaf():
                replies = line.send(events)
            assert replies[0].outcome is DeliveryOutcome.UNREACHABLE
            assert ACCEPTED not in replies
            stored = queues.read(table)
            assert ids(stored) == [first.id, *ids(events)], "it has them, and could not say so"
            until_accepted(line, events)
        assert ids(queues.read_on(table, stored)) == ([] if queues.drops_repeats else ids(events))

    def test_a_server_that_hangs_for_too_long_is_asked_again(self, queues: Queues) -> None:
        table = table_name()
        events = [event(table, 1, at) for at in range(100)]
        line = ReconnectingChannel(queues.sink(timeout_seconds=5.0))
        assert list(line.send(events[:1])) == [ACCEPTED]
        queues.server.pause()
        try:
            replies = line.send(events[1:])
        finally:
            queues.server.resume()
        assert replies[0].outcome is DeliveryOutcome.UNREACHABLE
        until_accepted(line, events[1:])
        expect_in_order(queues.read(table), events)

    def test_an_address_that_never_answers_is_named_with_what_to_do(self, queues: Queues) -> None:
        with nowhere() as address:
            line = ReconnectingChannel(queues.sink(servers=address, timeout_seconds=1.0))
            begun = time.monotonic()
            [reply] = line.send([event("users", 1, 1)])
            assert time.monotonic() - begun < 5.0
        assert reply.outcome is DeliveryOutcome.UNREACHABLE
        assert f"{address}: no connection in time; check servers" in reply.reason

    def test_a_wrong_password_is_told_and_not_shown(self, queues: Queues) -> None:
        with pytest.raises(SinkUnavailable) as refused:
            queues.sink(username="alice", password=Secret(SECRET)).connect()
        assert queues.server.address in str(refused.value)
        assert SECRET not in repr(refused.value)
        assert SECRET not in repr(queues.sink(username="alice", password=Secret(SECRET)))

    @pytest.mark.requirement("P-15")
    def test_check_logs_in_as_the_sink_does(self, queues: Queues) -> None:
        [found] = queues.sink(**queues.user()).check()
        assert found.ok, found
        with pytest.raises(SinkUnavailable):
            queues.sink(username="alice", password=Secret(SECRET)).check()
        with nowhere() as address, pytest.raises(SinkUnavailable, match=address):
            queues.sink(servers=address, timeout_seconds=1.0).check()


class Strange:
    """A server that says the same whatever it is told."""

    def __init__(self, *said: bytes) -> None:
        self._said = said
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        close_all()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with client, suppress(OSError):
                for each in self._said:
                    client.sendall(each)
                    client.recv(65536)
                while client.recv(65536):
                    continue


def expect_stored(
    records: Sequence[Record], events: Sequence[Event], replies: Sequence[Reply]
) -> None:
    """What was accepted is there."""
    stored = {record.id for record in records}
    accepted = {each.id for each, reply in zip(events, replies, strict=True) if reply is ACCEPTED}
    assert not accepted - stored


class Mail(Post):
    """A log whose changes are sent to a queue."""

    def __init__(self, spark: SparkSession, folder: Path, queues: Queues) -> None:
        self.queues = queues
        super().__init__(spark, folder, Office())

    def reopen(self, writer: str = "query-1", *, adopt: bool = False, **chosen: Any) -> PushWriter:
        """The sink as a query that starts would open it."""
        given: dict[str, Any] = {
            "name": "post",
            "folder": str(self.folder / "post"),
            "retry_first_seconds": 0.01,
            "timeout_seconds": 20.0,
        }
        made = self.queues.sink(**(given | chosen))
        self.sink = made  # type: ignore[assignment]
        self.writer = made.open(writer, adopt=adopt)
        return self.writer


def through_spark(spark: SparkSession, folder: Path, queues: Queues) -> None:
    """Changes of a log, through Spark's tasks, are each there once and in order."""
    mail = Mail(spark, folder, queues)
    try:
        mail.reopen(batch_size=16, **queues.user())
        mail.users(*((n % 7, f"{n:03}") for n in range(100)))
        assert mail.write(parts=3) == 100
    finally:
        mail.log.close()
    rows: dict[int, list[str]] = {}
    for record in queues.read("users"):
        told = json.loads(record.value)
        assert told["id"] == record.id
        rows.setdefault(told["after"]["id"], []).append(told["after"]["name"])
    assert rows == {row: [f"{n:03}" for n in range(row, 100, 7)] for row in range(7)}
    files = [path for path in (folder / "post").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def settle(line: ReconnectingChannel, policy: Policy, events: Sequence[Event]) -> None:
    """Deliver as a task does, and again where it stopped; nothing is put aside or fails."""
    letters, point = DeadLetterQueue(), DeliveryCheckpoint()
    while True:
        delivery = EventDelivery(line.send, policy, letters, checkpoint=point)
        delivery.run([events])
        assert not letters.kept
        if delivery.stopped is None:
            return
        assert delivery.stopped.reason == ""
        point = delivery.stopped.checkpoint


class Identified(Protocol):
    """An event, sent or stored."""

    @property
    def id(self) -> str: ...


def ids(found: Iterable[Identified]) -> list[str]:
    """The ids of events."""
    return [each.id for each in found]


def until_accepted(line: ReconnectingChannel, events: Sequence[Event]) -> None:
    """Send until all is accepted."""
    wait_until(
        lambda: set(line.send(events)) == {ACCEPTED},
        timeout=120,
        message="a server that is back accepts events",
    )


def unsettled(events: Sequence[Event], answers: Sequence[Reply], rows: set[str]) -> list[Event]:
    """The events of each row from the first on that was not accepted, and all of some rows."""
    held, rest = set(rows), []
    for each, reply in zip(events, answers, strict=True):
        if reply.outcome is not DeliveryOutcome.ACCEPTED:
            held.add(each.row)
        if each.row in held:
            rest.append(each)
    return rest


def expect_in_order(records: Sequence[Record], events: Sequence[Event]) -> None:
    """Everything arrived; without its repeats, each row is in order."""
    rows = {each.id: each.row for each in events}
    seen: dict[str, list[str]] = {}
    for identity in dict.fromkeys(record.id for record in records):
        seen.setdefault(rows[identity], []).append(identity)
    wanted: dict[str, list[str]] = {}
    for each in events:
        wanted.setdefault(each.row, []).append(each.id)
    assert seen == wanted


def documented(name: str, folder: Path, *, further: int = 0, **changed: Any) -> BrokerSettings:
    """The sink whose config is in the docs, with some of the further settings that follow it there.

    `changed` is what must be otherwise than on the page.
    """
    page = (Path(__file__).parents[2] / "docs" / "sinks.md").read_text()
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    first, *more = (part.partition("```")[0] for part in section.split("```yaml\n")[1:])
    content = yaml.safe_load(first)
    content["pipeline"]["url"] = "https://headrace.example"
    [settings] = content["pipeline"]["sinks"].values()
    for block in more[:further]:
        settings |= yaml.safe_load(block)
    settings |= changed
    config = parse(content, folder=folder, environment={f"{name.upper()}_PASSWORD": SECRET})
    assert config.pipeline is not None
    [made] = config.pipeline.sinks
    assert isinstance(made, BrokerSettings)
    assert made.password == Secret(SECRET)
    assert pickle.loads(pickle.dumps(made)) == made
    return made
