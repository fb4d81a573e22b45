"""A client that was away: what it gets when it comes back, and what it is told."""

import asyncio
import itertools
import json
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect

from headrace.change.event import Change, Transaction
from headrace.config import WebSocketSection
from headrace.log import Log
from headrace.log.keys import KeyRequest
from headrace.serve import ServerSettings
from headrace.serve.ws.messages import ResumeRequest
from headrace.serve.ws.resume import ClientSubscription, ClientSubscriptions, ReplayWindow
from headrace.testing import wait_until
from tests.changes import Writer, make_change, opened_writer
from tests.effort import times
from tests.serve.conftest import Site, Sites
from tests.serve.ws import ANY_KEY, Message, Talk

FOREVER = WebSocketSection()


def put(site: Site, *numbers: int, table: str = "orders") -> None:
    for number in numbers:
        site.writer.put(table, str(number))


def ids(events: list[Message]) -> list[int]:
    return [int(event["data"]["id"]) for event in events]


def with_settings(**settings: Any) -> ServerSettings:
    return ServerSettings(port=0, websocket=WebSocketSection(**settings))


def came(site: Site, count: int, *tables: str) -> tuple[Message, list[Message]]:
    """Subscribe, get so many events, leave: the confirmation and the events."""
    with Talk(site.url) as talk:
        confirmed = talk.auth().subscribe(*tables or ("orders",))
        put(site, *range(count))
        return confirmed, talk.events(count)


def back(site: Site, **resume: Any) -> tuple[Message, Talk]:
    """Come back: the confirmation, and the connection."""
    talk = Talk(site.url).auth()
    return talk.subscribe("orders", resume=resume), talk


@pytest.fixture
def shop(site: Site) -> Site:
    put(site, 1000)
    return site


# --- what it gets --------------------------------------------------------------------------------


@pytest.mark.requirement("S3-31", "C-21")
@pytest.mark.parametrize("last", [0, 1, 4])
def test_who_names_its_last_event_gets_what_follows(shop: Site, last: int) -> None:
    confirmed, events = came(shop, 5)
    put(shop, 5, 6)
    again, talk = back(
        shop, subscriptionId=confirmed["subscriptionId"], lastEventId=events[last]["eventId"]
    )
    with talk:
        assert again["subscriptionId"] == confirmed["subscriptionId"]
        put(shop, 7)
        assert ids(talk.events(7 - last)) == list(range(last + 1, 8))


@pytest.mark.requirement("C-21")
def test_an_event_id_or_a_sequence_alone_is_enough(shop: Site) -> None:
    confirmed, events = came(shop, 5)
    for resume in (
        {"lastEventId": events[2]["eventId"]},
        {"lastSequence": confirmed["sequence"] + 3, "epoch": confirmed["epoch"]},
        # A sequence from before, and the event that came last.
        {"lastSequence": confirmed["sequence"], "lastEventId": events[2]["eventId"]},
    ):
        again, talk = back(shop, **resume)
        with talk:
            assert again["sequence"] == confirmed["sequence"] + 3
            assert ids(talk.events(2)) == [3, 4]


@pytest.mark.requirement("S3-31", "C-21")
def test_a_subscriptions_id_alone_loses_nothing(sites: Sites) -> None:
    site = sites(with_settings(ping_seconds=0.1))
    put(site, 1000)
    with Talk(site.url) as talk:
        confirmed = talk.auth().subscribe("orders")
        put(site, 0, 1, 2)
        talk.events(3)
        for _ in range(3):  # the answer to the last one is not awaited
            talk.say(type="pong", timestamp=talk.await_type("ping")["timestamp"])
        put(site, 3, 4)  # these are sent, and nobody knows whether they were read
        site.await_waiting()
    put(site, 5)
    again, talk = back(site, subscriptionId=confirmed["subscriptionId"])
    with talk:
        # What a pong has proven does not come again.
        assert again["sequence"] == confirmed["sequence"] + 3
        assert ids(talk.events(3)) == [3, 4, 5]


@pytest.mark.requirement("C-21")
def test_without_an_answered_ping_it_begins_where_the_subscription_began(shop: Site) -> None:
    confirmed, _ = came(shop, 5)
    again, talk = back(shop, subscriptionId=confirmed["subscriptionId"])
    with talk:
        assert again["sequence"] == confirmed["sequence"]
        assert ids(talk.events(5)) == [0, 1, 2, 3, 4]


@pytest.mark.requirement("C-05", "C-21")
def test_what_the_client_says_counts_more_than_its_pongs(sites: Sites) -> None:
    site = sites(with_settings(ping_seconds=0.1))
    put(site, 1000)
    with Talk(site.url) as talk:
        confirmed = talk.auth().subscribe("orders")
        put(site, 0, 1, 2, 3)
        events = talk.events(4)
        for _ in range(3):  # the answer to the last one is not awaited
            talk.say(type="pong", timestamp=talk.await_type("ping")["timestamp"])
    kept, first = {"subscriptionId": confirmed["subscriptionId"]}, confirmed["sequence"]
    for resume in ({"lastEventId": events[1]["eventId"]}, {"lastSequence": first + 2}):
        again, talk = back(site, **kept, **resume)
        with talk:
            assert again["sequence"] == first + 2
            assert ids(talk.events(2)) == [2, 3]


@pytest.mark.requirement("C-05")
def test_a_replaced_subscription_leaves_nothing_unsent(shop: Site) -> None:
    """What was not sent to the one before is sent to the one that replaces it."""
    with Talk(shop.url) as talk:
        began = talk.auth().subscribe("orders")["sequence"]
        # Far more than all buffers on the way take, and nothing of it is read yet.
        for number in range(200):
            shop.writer.put("orders", str(number), photo="x" * (1 << 17))
        talk.say(type="subscribe", tables=["orders"])
        seen: list[int] = []
        confirmed = None
        while len(seen) < 200:
            message = talk.hear()
            if message["type"] == "cdc_event":
                seen.append(int(message["data"]["id"]))
            elif message["type"] == "subscription_confirmed":
                confirmed = message
                assert message["sequence"] == began + len(seen)
            else:
                assert message["type"] in ("ping", "connection_status"), message
        assert confirmed is not None
        assert seen == list(range(200))


@pytest.mark.requirement("C-21")
def test_a_rotated_key_takes_up_the_subscription(shop: Site) -> None:
    keyring = shop.service.keyring
    old = keyring.create(KeyRequest())
    with Talk(shop.url) as talk:
        confirmed = talk.auth(old.secret).subscribe("orders")
    put(shop, 1)
    new = keyring.rotate(old.key.id, overlap=3600)
    assert new is not None
    with Talk(shop.url) as talk:
        resume = {"subscriptionId": confirmed["subscriptionId"]}
        again = talk.auth(new.secret).subscribe("orders", resume=resume)
        assert again["subscriptionId"] == confirmed["subscriptionId"]
        assert ids(talk.events(1)) == [1]


@pytest.mark.requirement("C-21")
def test_a_subscription_belongs_to_its_key(shop: Site) -> None:
    keyring = shop.service.keyring
    mine, other = (keyring.create(KeyRequest()).secret for _ in range(2))
    with Talk(shop.url) as talk:
        confirmed = talk.auth(mine).subscribe("orders")
    put(shop, 1)
    resume = {"subscriptionId": confirmed["subscriptionId"]}
    with Talk(shop.url) as talk:
        stolen = talk.auth(other).subscribe("orders", resume=resume)
        assert stolen["subscriptionId"] != confirmed["subscriptionId"]
        assert "first" not in talk.hear()["details"]["gap"]
    with Talk(shop.url) as talk:
        again = talk.auth(mine).subscribe("orders", resume=resume)
        assert again["subscriptionId"] == confirmed["subscriptionId"]
        assert len(talk.events(1)) == 1


# --- what it is told -----------------------------------------------------------------------------


@pytest.mark.requirement("S3-24", "S3-32", "S3-33", "S3-34", "C-05", "C-21")
def test_of_too_many_events_the_oldest_are_dropped_and_that_is_told(sites: Sites) -> None:
    site = sites(with_settings(held_events=10))
    put(site, 1000)
    confirmed, events = came(site, 3)
    for number in range(3, 33):
        put(site, number)
        put(site, number, table="users")
    again, talk = back(site, lastEventId=events[-1]["eventId"])
    with talk:
        notice = talk.hear()
        assert (notice["type"], notice["error"]) == ("error", "service_degraded")
        gap = notice["details"]["gap"]
        assert gap["first"] == confirmed["sequence"] + 4
        assert gap["last"] == again["sequence"] == notice["details"]["firstSequence"] - 1
        assert notice["details"]["logFirstSequence"] == 1
        assert "current state" in notice["message"]
        assert ids(talk.events(10)) == list(range(23, 33))


@pytest.mark.requirement("S3-31", "C-05")
def test_what_is_too_old_is_dropped_and_that_is_told(sites: Sites) -> None:
    site = sites(with_settings(held_seconds=2.0))
    put(site, 1000)
    _, events = came(site, 3)
    put(site, 3)
    captured = site.log.read(site.log.latest_sequence - 1, limit=1)[0].transaction.captured_at
    wait_until(lambda: _now() - captured > 2_000_000, message="it is two seconds old")
    put(site, 4)
    _, talk = back(site, lastEventId=events[-1]["eventId"])
    with talk:
        assert talk.hear()["error"] == "service_degraded"
        assert ids(talk.events(1)) == [4]


def test_a_log_trimmed_before_the_client_came_back_is_told(shop: Site) -> None:
    _, events = came(shop, 3)
    put(shop, 3, 4)
    shop.log.trim(shop.log.latest_sequence)
    _, talk = back(shop, lastSequence=shop.log.latest_sequence - 2)
    with talk:
        notice = talk.hear()
        assert notice["details"] == {
            "gap": {"first": 5, "last": 5, "reason": "trim"},
            "firstSequence": 6, "logFirstSequence": 6,
        }  # fmt: skip
        assert ids(talk.events(1)) == [4]
    assert events


def test_changes_of_other_tables_are_no_gap(sites: Sites) -> None:
    site = sites(with_settings(held_events=2))
    put(site, 1000)
    _, events = came(site, 1)
    put(site, *range(20), table="users")
    put(site, 1)
    _, talk = back(site, lastEventId=events[0]["eventId"])
    with talk:
        assert ids(talk.events(1)) == [1]


@pytest.mark.requirement("C-05")
@pytest.mark.parametrize(
    "resume",
    [
        {"lastEventId": "evt_nobody"},
        {"subscriptionId": "sub_nobody"},
        {"lastSequence": 10**12},
        {"lastSequence": 1, "epoch": "another log"},
        {"lastSequence": 1, "generation": "abc"},
        {},
    ],
)
def test_who_nobody_remembers_is_told_and_gets_what_is_held(
    shop: Site, resume: dict[str, Any]
) -> None:
    put(shop, 1, 2)
    _, talk = back(shop, **resume)
    with talk:
        notice = talk.hear()
        assert notice["error"] == "service_degraded"
        assert notice["details"]["gap"] == {"last": 0}
        assert ids(talk.events(3)) == [1000, 1, 2]


def test_a_log_trimmed_under_a_slow_reader_is_told(sites: Sites) -> None:
    site = sites()
    put(site, 1000)
    with Talk(site.url) as talk:
        talk.auth().subscribe("orders")
        rows = ["x" * 50_000] * 400
        for number, row in enumerate(rows):
            site.writer.put("orders", str(number), row=row)
        site.log.trim(site.log.latest_sequence)
        for _ in range(len(rows)):
            message = talk.hear()
            if message["type"] == "error":
                break
        assert message["error"] == "service_degraded"
        assert message["details"]["firstSequence"] == site.log.latest_sequence
        assert ids(talk.events(1)) == [len(rows) - 1]


# --- the window alone ----------------------------------------------------------------------------


class History(NamedTuple):
    """Changes by table and age in seconds, oldest first, and what was trimmed of them."""

    changes: list[tuple[str, int]]
    trimmed: int
    position: int


@st.composite
def histories(draw: st.DrawFn) -> History:
    ages = sorted(draw(st.lists(st.integers(0, 600), min_size=1, max_size=40)), reverse=True)
    changes = [(draw(st.sampled_from(["orders", "users"])), age) for age in ages]
    return History(changes, draw(st.integers(0, len(changes))), draw(st.integers(0, len(changes))))


NOW = 1_800_000_000_000_000


@settings(max_examples=times(18, nightly=180), deadline=None)
@given(histories(), st.booleans())
def test_what_is_held_is_the_newest_and_every_loss_is_told(
    tmp_path_factory: pytest.TempPathFactory, history: History, by_id: bool
) -> None:
    settings = WebSocketSection(held_seconds=300, held_events=5)
    with opened_writer(tmp_path_factory.mktemp("log")) as writer:
        changes = [_put(writer, table, age) for table, age in history.changes]
        writer.log.trim(history.trimmed + 1)
        resume, position = ResumeRequest(last_sequence=history.position), history.position
        if by_id and history.position and changes[history.position - 1].table.name == "orders":
            resume = ResumeRequest(last_event_id=changes[history.position - 1].id)
        start = ReplayWindow(writer.log, _wants, settings, NOW).start(resume, None)
    mine = [change for change in changes if _wants(change) and change.sequence > position]
    if resume.last_event_id and position <= history.trimmed:
        assert start.lost is not None  # its last event is gone, so nobody knows
        return
    fresh = [
        change for change in mine
        if NOW - change.transaction.captured_at <= 300_000_000 and change.sequence > history.trimmed
    ][-5:]  # fmt: skip
    assert [change for change in mine if change.sequence > start.after] == fresh
    if len(fresh) < len(mine):
        assert start.lost is not None
    elif position >= history.trimmed:
        assert start.lost is None


def _wants(change: Change) -> bool:
    return change.table.name == "orders"


def _put(writer: Writer, table: str, age: int) -> Change:
    moment = NOW - age * 1_000_000
    number = writer.log.latest_sequence + 1
    sequence = writer.append(
        [
            make_change(
                table=writer.table(table),
                key={"id": "1"},
                after={"id": "1"},
                transaction=Transaction(str(number), moment, moment),
            )
        ]
    )
    (change,) = writer.log.read(sequence - 1, limit=1)
    return change


@pytest.mark.requirement("S3-31")
def test_a_subscription_is_kept_for_five_minutes() -> None:
    now = [0.0]
    kept = ClientSubscriptions(FOREVER, lambda: now[0])
    mine, standing = (
        ClientSubscription("sub_1", "key", 5, 5),
        ClientSubscription("sub_2", "key", 5, 5),
    )
    kept.begin(mine)
    kept.begin(standing)
    now[0] = 1000.0
    kept.end(mine)
    now[0] += 300.0
    assert kept.find("sub_1", "key") is mine
    assert kept.find("sub_1", "another") is None
    now[0] += 0.1
    assert kept.find("sub_1", "key") is None
    assert kept.find("sub_2", "key") is standing


def test_one_owners_subscriptions_push_out_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serve.ws.resume.MOST_KEPT", 2)
    kept = ClientSubscriptions(FOREVER, lambda: 0.0)
    for id, owner in [("a", "one"), *((str(number), "other") for number in range(4))]:
        ended = ClientSubscription(id, owner, 5, 5)
        kept.begin(ended)
        kept.end(ended)
    assert kept.find("a", "one") is not None
    assert [kept.find(str(number), "other") is not None for number in range(4)] == [
        False, False, True, True,
    ]  # fmt: skip


@pytest.mark.requirement("S3-31", "S3-32")
def test_five_minutes_and_ten_thousand_events_are_held() -> None:
    assert (FOREVER.held_seconds, FOREVER.held_events) == (300.0, 10_000)


# --- many, after a restart -----------------------------------------------------------------------

CLIENTS = 1000


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for both ends of all connections; often a process may have a thousand files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Client:
    """A client that comes back until it has everything."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.ids: list[str] = []
        self.resume: dict[str, Any] | None = None

    async def run(self, url: str, until: int) -> None:
        """Read until this number has come, or the connection ends."""
        async with connect(url, compression=None, origin=None) as connection:
            await connection.send(json.dumps({"type": "auth", "apiKey": ANY_KEY}))
            await connection.recv()
            await connection.send(json.dumps(self._wanted()))
            await self._read(connection, until)

    def _wanted(self) -> dict[str, Any]:
        wanted: dict[str, Any] = {"type": "subscribe", "tables": ["orders"]}
        if self.ids:
            wanted["resume"] = {**(self.resume or {}), "lastEventId": self.ids[-1]}
        elif self.resume:
            wanted["resume"] = self.resume
        return wanted

    async def _read(self, connection: ClientConnection, until: int) -> None:
        async for text in connection:
            message = json.loads(text)
            if message["type"] == "subscription_confirmed":
                fields = {"subscriptionId": "subscriptionId", "sequence": "lastSequence"}
                self.resume = {name: message[field] for field, name in fields.items()}
            elif message["type"] == "cdc_event":
                self.numbers.append(int(message["data"]["id"]))
                self.ids.append(message["eventId"])
                if self.numbers[-1] >= until:
                    return
            else:
                assert message["type"] in ("ping", "connection_status"), message


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
@pytest.mark.requirement("S3-31")
def test_many_clients_come_back_after_a_restart_and_miss_nothing(tmp_path: Path) -> None:
    numbers = itertools.count()

    async def meet(log: Log, site: Site, clients: list[Client], until: int) -> None:
        url = site.url.replace("http", "ws") + "/v1/stream"
        reading = [asyncio.create_task(client.run(url, until)) for client in clients]
        await asyncio.to_thread(site.await_waiting, len(clients))
        for _ in range(30):
            await asyncio.to_thread(site.writer.put, "orders", str(next(numbers)))
        if until > 10**6:
            # While the last events are on their way, to some of them.
            await asyncio.to_thread(site.server.stop)
        await asyncio.gather(*reading, return_exceptions=until > 10**6)

    with opened_writer(tmp_path / "log") as writer:
        writer.table("orders")
        clients = [Client() for _ in range(CLIENTS)]
        with ExitStack() as stack:
            site = Site(writer, ServerSettings(port=0), stack)
            asyncio.run(meet(writer.log, site, clients, 10**9))
        for _ in range(20):
            writer.put("orders", str(next(numbers)))
        with ExitStack() as stack:
            site = Site(writer, ServerSettings(port=0), stack)
            asyncio.run(meet(writer.log, site, clients, 79))
        for client in clients:
            assert client.numbers == list(range(80))
            assert len(set(client.ids)) == 80


def _now() -> int:
    return time.time_ns() // 1000
