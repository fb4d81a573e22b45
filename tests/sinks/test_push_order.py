"""Applied in the order in which they arrive, without repeats, events give exactly the table."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import redis as redis_client
from msgspec.structs import replace

from headrace.change.event import BeforeKind, Change, Column, Op
from headrace.errors import SinkUnavailable
from headrace.pipeline.verify import verify
from headrace.retry import Backoff
from headrace.sinks.push import PushSettings
from headrace.sinks.push import writer as writers
from headrace.sinks.push.writer import PushWriter
from headrace.sinks.redis import Redis
from headrace.testing.kafka import KafkaServer
from headrace.testing.nats import HINT as NATS_HINT
from headrace.testing.nats import NatsServer, nats_program
from headrace.testing.rabbitmq import HINT as RABBITMQ_HINT
from headrace.testing.rabbitmq import RabbitmqServer, rabbitmq_program
from headrace.testing.redis import HINT as REDIS_HINT
from headrace.testing.redis import RedisServer, redis_program
from tests.effort import times
from tests.needs import missing
from tests.sinks.brokers import expect_kafka, read
from tests.sinks.brokers import sink as kafka_sink
from tests.sinks.hooks import sink as webhook
from tests.sinks.lake import Row, change, put, remove, schema, truncate
from tests.sinks.push_harness import USERS
from tests.sinks.receiver import OK, HttpAnswer, Receiver, Request, reply
from tests.sinks.socket_sink import Courier, Office, Taken, kind, opened_office
from tests.sinks.test_nats import Subjects
from tests.sinks.test_push_writer import Local
from tests.sinks.test_rabbitmq import Exchanges

KEYS = range(12)


class Site(NamedTuple):
    """A destination that may fail, and what arrived there."""

    sink: Callable[..., PushSettings]
    arrived: Callable[[], list[Row]]  # events of the format canonical, in order
    mend: Callable[[], object]  # it takes everything from now on


class OrderedPost(Local):
    """A log whose events any sink sends, in tasks that run here one after the other."""

    def __init__(self, folder: Path, site: Site) -> None:
        self.site = site
        none: Any = None
        super().__init__(none, folder, Office())

    def reopen(self, writer: str = "query-1", *, adopt: bool = False, **chosen: Any) -> PushWriter:
        """The sink as a query that starts would open it."""
        given = {"format": "canonical", "folder": str(self.folder / "post"), "batch_size": 5}
        given |= {"retry_first_seconds": 0.002, "attempts": 3}
        self.sink = self.site.sink(**given)  # type: ignore[assignment]
        self.writer = self.sink.open(writer, adopt=adopt)
        return self.writer


class Consumer:
    """What drops repeats and applies everything else as it comes."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.columns: list[Row] = []  # as a SCHEMA shows them

    def apply(self, events: list[Row]) -> dict[int, Row]:
        """The rows that it has in the end."""
        seen: set[str] = set()
        for event in events:
            if event["id"] not in seen:
                seen.add(event["id"])
                self._apply(event)
        return self.rows

    def _apply(self, event: Row) -> None:
        match event["op"]:
            case "TRUNCATE":
                self.rows.clear()
            case "SCHEMA":
                self._alter(event["after"])
            case "DELETE":
                self.rows.pop(event["key"]["id"], None)
            case _:
                self.rows[event["key"]["id"]] = event["after"]

    def _alter(self, stated: Row) -> None:
        if stated.get("dropped"):
            self.rows, self.columns = {}, []
            return
        names = {column["number"]: column["name"] for column in self.columns}
        self.columns = stated["columns"]
        for row in self.rows.values():
            old = dict(row)
            row.clear()
            for column in self.columns:
                known = names.get(column["number"])
                default = column.get("initial_default")
                row[column["name"]] = default if known is None else old[known]


class Users:
    """A table, and the changes that are made to it."""

    def __init__(self, post: OrderedPost, identity: str, chance: random.Random) -> None:
        self.rows: dict[int, Row] = {}
        self._post, self._identity, self._chance = post, identity, chance
        self._numbers = itertools.count(1)
        self._created = [self._create()]  # unless it is in the log

    def transaction(self) -> Iterator[Change]:
        """Some changes, which `rows` follows."""
        while self._created:
            yield self._created.pop()
        on_rows = (self._put, self._put, self._put, self._move, self._move, self._shift)
        on_table = (self._empty, self._drop, self._add, self._rename, self._lose)
        for _ in range(self._chance.randrange(1, 6)):
            yield from self._chance.choice((*on_rows, self._change, self._remove, *on_table))()

    def _put(self) -> Iterator[Change]:
        if free := [key for key in KEYS if key not in self.rows]:
            row = self._row(self._chance.choice(free))
            self.rows[row["id"]] = row
            yield put(self.table, **row)

    def _move(self) -> Iterator[Change]:
        free = [key for key in KEYS if key not in self.rows]
        if self.rows and free:
            was, now = self._any(), self._row(self._chance.choice(free))
            del self.rows[was["id"]]
            self.rows[now["id"]] = now
            yield self._moved(was, now)

    def _shift(self) -> Iterator[Change]:
        """As UPDATE … SET id = id + 1 does it, with a key that is checked at the end."""
        if self.table.identity != "full" or len(self.rows) == len(KEYS):
            return
        left = self._chance.sample(sorted(self.rows), len(self.rows))
        there, self.rows = self.rows, {}
        while left:
            if self._chance.random() < 0.3:  # one that is still to be moved changes first
                key = self._chance.choice(left)
                was, there[key] = there[key], self._row(key)
                yield self._whole(put(self.table, Op.UPDATE, **there[key]), was)
            was = there[left.pop()]
            now = was | {"id": was["id"] + 1}
            self.rows[now["id"]] = now
            yield self._moved(was, now)

    def _change(self) -> Iterator[Change]:
        if self.rows:
            was = self._any()
            self.rows[was["id"]] = now = self._row(was["id"])
            yield self._whole(put(self.table, Op.UPDATE, **now), was)

    def _remove(self) -> Iterator[Change]:
        if self.rows:
            was = self._any()
            del self.rows[was["id"]]
            yield self._whole(remove(self.table, id=was["id"]), was)

    def _empty(self) -> Iterator[Change]:
        if self._chance.random() < 0.3:
            self.rows.clear()
            yield truncate(self.table)

    def _drop(self) -> Iterator[Change]:
        if self._chance.random() < 0.3:
            self.rows.clear()
            yield change(Op.SCHEMA, self.table, after=b'{"dropped":true}')
            yield self._create()

    def _create(self) -> Change:
        ours = [replace(column, number=next(self._numbers)) for column in USERS]
        return self._declare(tuple(ours))

    def _add(self) -> Iterator[Change]:
        if self._chance.random() < 0.5:
            number = next(self._numbers)
            default = f"d{number}"
            column = Column(f"c{number}", "text", number=number, initial_default=f'"{default}"')
            for row in self.rows.values():
                row[column.name] = default
            yield self._declare((*self.table.columns, column))

    def _rename(self) -> Iterator[Change]:
        key, column, *others = self.table.columns
        if self._chance.random() < 0.5:
            renamed = replace(column, name=f"r{next(self._numbers)}")
            for row in self.rows.values():
                row[renamed.name] = row.pop(column.name)
            yield self._declare((key, renamed, *others))

    def _lose(self) -> Iterator[Change]:
        key, column, *others = self.table.columns
        if others and self._chance.random() < 0.5:
            for row in self.rows.values():
                del row[column.name]
            yield self._declare((key, *others))

    def _declare(self, columns: tuple[Column, ...]) -> Change:
        found = self._post.table("users", columns)
        found = replace(found, identity=self._identity, version=0)
        self.table = self._post.log.register(found)
        return schema(self.table)

    def _row(self, key: int) -> Row:
        names = [column.name for column in self.table.columns[1:]]
        return {"id": key} | {name: f"v{self._chance.randrange(10**6)}" for name in names}

    def _any(self) -> Row:
        return self.rows[self._chance.choice(sorted(self.rows))]

    def _moved(self, was: Row, now: Row) -> Change:
        """A row with another key, and the old row as far as the source sends it."""
        return self._whole(put(self.table, Op.UPDATE, was={"id": was["id"]}, **now), was)

    def _whole(self, found: Change, was: Row) -> Change:
        """A change with all of the old row, where the source sends it."""
        if self._identity != "full":
            return found
        return replace(found, before=msgspec.json.encode(was), before_kind=BeforeKind.FULL)


def deliver(post: OrderedPost, parts: int, upto: int, *, interrupted: bool) -> None:
    """Send a batch; where a pipeline ends in the middle of it, the next one sends the rest."""
    if interrupted:
        post.writer.close()
    while interrupted:
        try:
            post.write(upto, parts=parts)
        except SinkUnavailable:
            post.reopen()
            continue
        post.reopen()
        return
    post.write(upto, parts=parts)


def sent(site: Site, folder: Path, patch: pytest.MonkeyPatch, identity: str) -> OrderedPost:
    """A post that has sent everything, some of it again; what it should amount to is checked."""
    patch.setattr(writers, "BACKOFF", Backoff(0.01, 0.1))
    chance = random.Random(18)
    post = OrderedPost(folder, site)
    users = Users(post, identity, chance)
    for _ in range(times(12, nightly=60)):
        for _ in range(chance.randrange(1, 8)):
            if changes := list(users.transaction()):
                post.commit(*changes)
        # A batch may end within a transaction.
        upto = post.log.latest_sequence - chance.choice((0, 0, 1))
        if upto > post.written:
            deliver(post, chance.choice((1, 3, 3)), upto, interrupted=chance.random() < 0.5)
    if post.log.latest_sequence > post.written:
        post.write()
    site.mend()
    while post.letters():
        post.redrive()
    assert Consumer().apply(site.arrived()) == users.rows
    return post


# --- destinations --------------------------------------------------------------------------------


@pytest.fixture
def unkind() -> Iterator[Site]:
    """A server of the tests' own, which fails, hangs up, and refuses what it takes later."""
    chance = random.Random(7)

    def judge(event: Taken) -> tuple[str, str, float]:
        if chance.random() < 0.04:
            office.hang_up_after_taking = 1
        luck = chance.random()
        if luck < 0.08:
            return ("refused", "no thanks", 0.0)
        return ("failed", "not now", 0.0) if luck < 0.2 else kind(event)

    def mend() -> None:
        office.judge = kind

    with opened_office() as office:
        office.judge = judge
        yield Site(
            lambda **given: Courier(name="post", port=office.port, moves=True, **given),
            lambda: [json.loads(event.payload or "{}") for event in office.taken],
            mend,
        )


@pytest.fixture
def hooks() -> Iterator[Site]:
    """A webhook's receiver that fails, refuses, and loses answers."""
    chance, lock, bodies, kinder = random.Random(8), threading.Lock(), list[bytes](), list[bool]()

    def answer(request: Request) -> HttpAnswer:
        with lock:
            luck = 1.0 if kinder else chance.random()
            if luck < 0.1:
                return reply(503)
            if luck < 0.15:
                return reply(400)
            bodies.append(request.body)
            return None if luck < 0.2 else OK

    with Receiver(answer) as receiver:

        def events() -> list[Row]:
            read = map(json.loads, bodies)
            return [each for body in read for each in body.get("events", [body])]

        yield Site(
            lambda **given: webhook(receiver.url, **{**given, "batch_size": 1}),
            events,
            lambda: kinder.append(True),
        )


@pytest.fixture
def redis() -> Iterator[Site]:
    """Redis."""
    if redis_program() is None:
        missing(f"Redis is not there. {REDIS_HINT}")

    def events() -> list[Row]:
        with redis_client.Redis(port=server.port) as client:
            entries = client.xrange("cdc:public:users")
        return [json.loads(fields[b"event"]) for _, fields in entries]

    with RedisServer() as server:
        yield Site(
            lambda **given: Redis(name="events", servers=server.address, **given), events, bool
        )


@pytest.fixture
def nats() -> Iterator[Site]:
    """NATS."""
    if nats_program() is None:
        missing(f"NATS is not there. {NATS_HINT}")
    with NatsServer() as server:
        subjects = Subjects(server)
        yield Site(
            subjects.sink,
            lambda: [json.loads(each.value) for each in subjects.read("users")],
            bool,
        )


@pytest.fixture
def kafka() -> Iterator[Site]:
    """Kafka, with one partition: a consumer knows no order between several."""
    expect_kafka()
    with KafkaServer() as server:
        yield Site(
            lambda **given: kafka_sink(server, create_topics=True, partitions=1, **given),
            lambda: [json.loads(each.value or "") for each in read(server, "cdc.public.users")],
            bool,
        )


@pytest.fixture
def rabbitmq(tmp_path: Path) -> Iterator[Site]:
    """RabbitMQ."""
    if rabbitmq_program() is None:
        missing(f"RabbitMQ is not there. {RABBITMQ_HINT}")
    with RabbitmqServer() as server:
        exchanges = Exchanges(server, tmp_path, tls_port=0)
        yield Site(
            exchanges.sink,
            lambda: [json.loads(each.value) for each in exchanges.read("users")],
            bool,
        )


@pytest.mark.requirement("P-38")
@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("unkind", "full"),
        ("hooks", "default"),
        ("hooks", "full"),
        ("redis", "full"),
        ("nats", "full"),
        ("kafka", "full"),
        ("rabbitmq", "full"),
    ],
)
def test_a_consumer_that_applies_events_as_they_arrive_has_the_table(
    name: str,
    identity: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post = sent(request.getfixturevalue(name), tmp_path, monkeypatch, identity)
    found = verify(post.sink, {"path": str(post.log.path)}, lambda *_: None)
    assert found.complete
    assert not found.surplus
    post.log.close()
