"""The Python client, both of its kinds, against a real server over every transport."""

import itertools
import threading
from typing import Any

import pytest

from headrace.change.event import Op
from headrace.client import AsyncClient, Client, Event, Gap
from headrace.client.messages import REMEMBERED_IDS, ChangesRequest, ReaderProgress, Scanned
from headrace.errors import (
    ChangesTrimmed,
    ConfigError,
    FeedReplaced,
    ServerAbsent,
    ServerError,
)
from headrace.log import Generation
from headrace.testing import wait_until
from headrace.v1 import changefeed_pb2 as v1
from tests.client.conftest import Clients, Place, take

TRANSPORTS = ("sse", "grpc")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_change_comes_and_those_to_come(
    place: Place, clients: Clients, transport: str
) -> None:
    place.writer.put_many("users", 300)
    events = clients().changes(transport=transport)
    assert take(events, 300) == list(range(1, 301))
    for sequence in (301, 302):
        place.writer.put("users", str(sequence))
        assert take(events, 1) == [sequence]
    events.close()
    wait_until(lambda: place.service.feed.waiting == 0, message="the server has let it go")


def test_an_event_is_what_its_format_says(place: Place, clients: Clients) -> None:
    place.writer.put("users", "alice", big=12345678901234567890)
    canonical = next(clients().changes())
    assert canonical.data["after"] == {"id": "alice", "big": 12345678901234567890}
    assert b"12345678901234567890" in canonical.raw
    entity = next(clients().changes(format="entity"))
    notification = next(clients().changes(format="notification"))
    message = next(clients().changes(transport="grpc"))
    assert isinstance(message.data, v1.CDCEvent)
    # One id in every format, over every transport.
    assert canonical.id == notification.id == message.id == canonical.data["id"]
    assert entity.id == entity.data["event_id"]


def test_tables_and_filters_hold(place: Place, clients: Clients, transport: str) -> None:
    place.writer.put("users", "alice")
    place.writer.put("orders", "1")
    place.writer.put("orders", "1", Op.UPDATE)
    place.writer.put("users", "alice", Op.UPDATE)
    client = clients()
    events = client.changes(["ord*"], operations=["update"], transport=transport)
    assert take(events, 1) == [3]
    events = client.changes(entity_type="User", event_type="entity:upd*", transport=transport)
    assert take(events, 1) == [4]
    assert take(client.changes(after=2, transport=transport), 2) == [3, 4]


def test_one_source_alone_can_be_requested(place: Place, clients: Clients, transport: str) -> None:
    place.writer.put("orders", "1")
    place.writer.put_from("crm", "orders", "1")
    place.writer.put("orders", "2")
    assert take(clients().changes(source="crm", transport=transport), 1) == [2]
    assert take(clients().changes(source="shop", transport=transport), 2) == [1, 3]


@pytest.mark.requirement("S3-30")
def test_it_reconnects_after_1_2_4_and_then_every_8_seconds(
    place: Place, clients: Clients, transport: str
) -> None:
    place.writer.put("users", "alice")
    events = clients().changes(transport=transport)
    assert take(events, 1) == [1]
    place.stop()
    clients.on_sleep = lambda: place.start() if len(clients.slept) == 6 else None
    place.writer.put("users", "bob")
    assert take(events, 1) == [2]
    assert clients.slept == [1, 2, 4, 8, 8, 8]
    # What has connected begins anew.
    place.stop()
    clients.on_sleep = place.start
    place.writer.put("users", "carol")
    assert take(events, 1) == [3]
    assert clients.slept[6:] == [1]


def test_a_server_that_is_not_there_yet_is_waited_for(place: Place, clients: Clients) -> None:
    place.writer.put("users", "alice")
    place.stop()
    clients.on_sleep = lambda: place.start() if len(clients.slept) == 2 else None
    assert take(clients().changes(cursor="billing"), 1) == [1]


def test_nothing_is_lost_or_repeated_while_the_server_comes_and_goes(
    place: Place, clients: Clients, transport: str
) -> None:
    total, seen = 3000, list[int]()
    stop = threading.Event()

    def trouble() -> None:
        while not stop.wait(0.3):
            place.restart()

    def write() -> None:
        for _ in range(30):
            place.writer.put_many("users", total // 30)
            stop.wait(0.05)

    threads = [threading.Thread(target=each) for each in (trouble, write)]
    for thread in threads:
        thread.start()
    clients.on_sleep = lambda: _wait(stop)
    try:
        seen = take(clients().changes(transport=transport), total)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert seen == list(range(1, total + 1))
    assert clients.slept


@pytest.mark.requirement("S1-41")
def test_an_event_that_comes_again_is_skipped() -> None:
    progress = ReaderProgress(0, None)
    first, second = Event("evt_1", 1, None), Event("evt_2", 1, None)
    assert [progress.take(each) for each in (first, second, first, second)] == [
        first,
        second,
        None,
        None,
    ]
    assert progress.take(Scanned(9)) is None
    assert progress.after == 9


@pytest.mark.requirement("S1-41")
def test_all_that_a_new_connection_may_repeat_is_remembered() -> None:
    progress = ReaderProgress(5, None)
    # As over the WebSocket, whose events name no sequence: all of these may come again.
    many = [Event(f"evt_{number}", 5, None) for number in range(REMEMBERED_IDS + 100)]
    assert [progress.take(each) for each in many] == many
    assert [progress.take(each) for each in many] == [None] * len(many)
    progress.take(Scanned(REMEMBERED_IDS + 105))
    later = [Event(f"evt_later_{number}", number, None) for number in range(REMEMBERED_IDS)]
    assert [progress.take(each) for each in later] == later
    assert progress.take(many[0]) is not None  # forgotten: it cannot come again


def test_an_event_without_an_id_is_never_taken_for_another() -> None:
    progress = ReaderProgress(0, None)
    event = Event("", 1, None)
    assert [progress.take(event), progress.take(event)] == [event, event]


def test_a_reader_resumes_past_what_its_filter_left_out(
    place: Place, clients: Clients, monkeypatch: Any
) -> None:
    place.writer.put_many("users", 500)
    place.writer.put("orders", "1")
    place.writer.put_many("users", 500)
    events = clients().changes(["orders"])
    assert take(events, 1) == [501]
    positions: list[int] = []
    place.stop()
    clients.on_sleep = place.start
    place.writer.put("orders", "2")
    path = ChangesRequest.path

    def noting(self: ChangesRequest, progress: ReaderProgress) -> str:
        positions.append(progress.after)
        return path(self, progress)

    monkeypatch.setattr(ChangesRequest, "path", noting)
    assert take(events, 1) == [1002]
    assert positions == [1001]


@pytest.mark.requirement("C-05")
def test_what_was_trimmed_is_raised_or_reported(
    place: Place, clients: Clients, transport: str
) -> None:
    place.writer.put_many("users", 10)
    place.writer.log.trim(6)
    with pytest.raises(ChangesTrimmed) as caught:
        next(clients().changes(after=2, transport=transport))
    assert (caught.value.first, caught.value.last) == (3, 5)
    gaps: list[Gap] = []
    events = clients().changes(after=2, transport=transport, on_gap=gaps.append)
    assert take(events, 5) == [6, 7, 8, 9, 10]
    assert gaps == [Gap(3, 5)]


def test_another_log_is_noticed(place: Place, clients: Clients, transport: str) -> None:
    place.writer.put_many("users", 5)
    events = clients().changes(transport=transport)
    assert take(events, 5) == [1, 2, 3, 4, 5]
    place.replace_log()
    with pytest.raises(FeedReplaced):
        next(events)


@pytest.mark.parametrize("name", [".", "..", "a.b"])
def test_a_cursor_may_be_called_by_dots(place: Place, clients: Clients, name: str) -> None:
    place.writer.put_many("users", 2)
    client = clients()
    client.ack(name, 1)
    assert take(client.changes(cursor=name), 1) == [2]
    assert [cursor.name for cursor in place.writer.log.cursors()] == [name]


def test_a_cursor_moves_by_acks_alone(place: Place, clients: Clients, transport: str) -> None:
    place.writer.put_many("users", 5)
    client = clients()
    events = client.changes(cursor="billing", transport=transport)
    read = list(itertools.islice(events, 3))
    client.ack("billing", read[1])
    assert take(clients().changes(cursor="billing", transport=transport), 3) == [3, 4, 5]
    client.ack("billing", 5)
    place.writer.put("users", "late")
    assert take(clients().changes(cursor="billing", transport=transport), 1) == [6]
    [cursor] = place.writer.log.cursors()
    assert (cursor.name, cursor.sequence) == ("billing", 5)
    with pytest.raises(ServerError, match="billing"):
        client.ack("billing", 1)


@pytest.mark.requirement("P-06")
def test_an_ack_of_what_a_log_that_was_put_back_lacks_is_refused(
    place: Place, clients: Clients, transport: str
) -> None:
    place.writer.put_many("users", 5)
    client, log = clients(), place.writer.log
    read = list(itertools.islice(client.changes(cursor="billing", transport=transport), 4))
    # As if the log had been put back from a copy that ended at 2, and had gone on since.
    log._lineage = [*log.lineage, Generation(log.epoch, "abc", 3)]
    client.ack("billing", read[1])
    with pytest.raises(FeedReplaced, match="put back"):
        client.ack("billing", read[3])
    assert [cursor.sequence for cursor in log.cursors()] == [2]
    assert clients.slept == []


@pytest.mark.requirement("P-06")
def test_a_place_that_was_read_before_or_after_the_first_change_of_a_start_stays_good(
    place: Place, clients: Clients, transport: str
) -> None:
    place.writer.put_many("users", 2)
    place.reopen_log()
    client = clients()
    events = client.changes(transport=transport)
    before = list(itertools.islice(events, 2))
    place.reopen_log()  # the start before has added nothing
    place.writer.put("users", "late")
    after = next(events)
    place.reopen_log()
    for event in (*before, after):
        client.ack("billing", event)
    place.writer.put("users", "later")
    assert take(events, 1) == [4]


def test_an_ack_waits_for_a_server_that_is_away(place: Place, clients: Clients) -> None:
    place.writer.put_many("users", 5)
    client = clients()
    next(client.changes(cursor="billing"))
    place.stop()
    clients.on_sleep = place.start
    client.ack("billing", 3)
    assert clients.slept == [1]
    assert place.writer.log.cursors()[0].sequence == 3


def test_a_key_opens_the_server(place: Place, clients: Clients, transport: str) -> None:
    made = place.require_key()
    place.writer.put("users", "alice")
    assert take(clients(made.secret).changes(transport=transport, cursor="mine"), 1) == [1]
    for wrong in (None, "cdc_" + "0" * 64):
        with pytest.raises(ServerError) as caught:
            next(clients(wrong).changes(transport=transport))
        assert not isinstance(caught.value, ServerAbsent)
        assert "cdc_" not in str(caught.value)
    assert clients.slept == []
    assert made.secret not in repr(vars(clients(made.secret)))


def test_a_revoked_key_ends_the_reading(place: Place, clients: Clients, transport: str) -> None:
    made = place.require_key()
    place.writer.put("users", "alice")
    events = clients(made.secret).changes(transport=transport)
    next(events)
    place.service.keyring.revoke(made.key.id)
    with pytest.raises(ServerError, match="key"):
        next(events)


def test_a_request_that_cannot_be_made_is_refused_at_once(place: Place, clients: Clients) -> None:
    client = Client(place.url)
    for options in ({"transport": "pigeon"}, {"transport": "grpc", "format": "entity"}):
        wrong: Any = options
        with pytest.raises(ConfigError):
            client.changes(**wrong)
    with pytest.raises(ConfigError, match="list"):
        client.changes("orders")
    with pytest.raises(ConfigError, match="at which gRPC answers"):
        next(client.changes(transport="grpc"))
    for url in ("127.0.0.1:3000", "http://127.0.0.1:none", "http://127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="http://"):
            Client(url)
    for make in (Client, AsyncClient):
        with pytest.raises(ConfigError, match="no user and no password") as refused:
            make("http://user:hunter2@127.0.0.1:3000")
        assert "hunter2" not in f"{refused.value}{refused.value.hint}"
    with pytest.raises(ServerError, match="format must be one of"):
        next(clients().changes(format="no such"))
    assert clients.slept == []


def _wait(stop: threading.Event) -> None:
    stop.wait(0.05)
