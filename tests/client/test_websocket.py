"""The Python client over the WebSocket."""

import itertools
import json
import threading
from collections.abc import Iterable

import pytest

from headrace.client import Client, Event, Gap
from headrace.client.messages import Opened, ReaderProgress, Scanned
from headrace.client.websocket import Conversation
from headrace.errors import ChangesTrimmed, ConfigError, FeedReplaced, ServerBusy, ServerError
from headrace.secret import Secret
from tests.client.conftest import Clients, Place

WS = {"transport": "websocket"}


def rows(events: Iterable[Event]) -> list[str]:
    return [event.data["data"]["id"] for event in events]


def test_it_hears_of_what_is_new(place: Place, clients: Clients) -> None:
    place.writer.put("users", "old")
    events = clients().changes(["users"], **WS)
    begun = threading.Timer(0.5, lambda: place.writer.put_many("users", 3))
    begun.start()
    got = list(itertools.islice(events, 3))
    begun.join()
    assert [event.data["data"]["id"] for event in got] == ["1", "2", "3"]
    assert [event.id for event in got] == [event.data["eventId"] for event in got]
    assert got[0].data["type"] == "cdc_event"


@pytest.mark.requirement("S3-30")
def test_it_reconnects_and_goes_on_without_loss_or_repeat(place: Place, clients: Clients) -> None:
    place.writer.put("users", "0")
    events = clients().changes(["users"], after=1, **WS)
    place.writer.put_many("users", 5)
    assert rows(itertools.islice(events, 5)) == ["1", "2", "3", "4", "5"]
    place.stop()
    place.writer.put("users", "6")
    place.writer.put("users", "7")
    clients.on_sleep = lambda: place.start() if len(clients.slept) == 5 else None
    assert rows(itertools.islice(events, 2)) == ["6", "7"]
    assert clients.slept == [1, 2, 4, 8, 8]


def test_a_cursor_is_where_it_begins(place: Place, clients: Clients) -> None:
    place.writer.put_many("users", 5)
    client = clients()
    client.ack("page", 3)
    events = client.changes(["users"], cursor="page", **WS)
    got = list(itertools.islice(events, 2))
    assert [event.data["data"]["id"] for event in got] == ["4", "5"]
    # Events carry no sequence here, so what may be acked is what the server has confirmed.
    assert all(event.sequence == 3 for event in got)


@pytest.mark.requirement("C-05")
def test_what_is_no_longer_kept_is_raised_or_reported(place: Place, clients: Clients) -> None:
    place.writer.put_many("users", 10)
    place.writer.log.trim(6)
    with pytest.raises(ChangesTrimmed):
        next(clients().changes(["users"], after=2, **WS))
    gaps: list[Gap] = []
    events = clients().changes(["users"], after=2, on_gap=gaps.append, **WS)
    assert rows(itertools.islice(events, 5)) == ["6", "7", "8", "9", "10"]
    assert gaps == [Gap(3, 5)]


def test_another_log_is_noticed(place: Place, clients: Clients) -> None:
    place.writer.put_many("users", 5)
    events = clients().changes(["users"], after=4, **WS)
    assert rows(itertools.islice(events, 1)) == ["5"]
    place.replace_log()
    place.writer.put("users", "x")
    with pytest.raises(FeedReplaced):
        next(events)


def test_a_key_opens_it_and_a_wrong_one_is_not_tried_again(place: Place, clients: Clients) -> None:
    made = place.require_key()
    place.writer.put_many("users", 2)
    events = clients(made.secret).changes(["users"], after=1, **WS)
    assert rows(itertools.islice(events, 1)) == ["2"]
    for wrong in (None, "cdc_" + "0" * 64):
        with pytest.raises(ServerError, match="invalid_api_key"):
            next(clients(wrong).changes(["users"], **WS))
    with pytest.raises(ServerError, match="table_not_found"):
        next(clients(made.secret).changes(["nothing"], **WS))
    assert clients.slept == []


def test_what_the_protocol_cannot_ask_is_refused_at_once(place: Place) -> None:
    client = Client(place.url)
    with pytest.raises(ConfigError, match="tables must be named"):
        client.changes(transport="websocket")
    with pytest.raises(ConfigError, match="no other filters"):
        client.changes(["users"], transport="websocket", trigger="api_*")
    with pytest.raises(ConfigError, match="no other filters"):
        client.changes(["users"], transport="websocket", source="shop")
    with pytest.raises(ConfigError, match="notification"):
        client.changes(["users"], transport="websocket", format="entity")


@pytest.mark.requirement("S3-14", "S3-26", "S3-37", "C-20")
def test_the_conversation_follows_the_protocol() -> None:
    key = "cdc_" + "a" * 64
    talk = Conversation(Secret(key), ["users"], ReaderProgress(0, None))
    assert json.loads(talk.opening()) == {"type": "auth", "apiKey": key}
    assert json.loads(talk.take('{"type":"auth_success"}').reply) == {
        "type": "subscribe",
        "tables": ["users"],
    }
    confirmed = '{"type":"subscription_confirmed","sequence":7,"epoch":"e","new":{"field":1}}'
    assert talk.take(confirmed).messages == [Opened("e"), Scanned(7)]
    ping = '{"type":"ping","timestamp":"2026-01-01T00:00:00Z"}'
    assert json.loads(talk.take(ping).reply) == {
        "type": "pong",
        "timestamp": "2026-01-01T00:00:00Z",
    }
    assert talk.take('{"type":"of a later version"}') == ((), "")
    for word in ("rate_limited", "service_degraded", "server_error", "internal_error"):
        with pytest.raises(ServerBusy):
            talk.take(f'{{"type":"error","error":"{word}","message":"later"}}')
    with pytest.raises(ServerError, match="permission_denied"):
        talk.take('{"type":"error","error":"permission_denied","message":"no"}')


def test_a_reader_that_reconnects_resumes_where_it_was() -> None:
    progress = ReaderProgress(0, None)
    progress.take(Opened("e"))
    progress.take(Scanned(7))
    progress.take(Event("evt_8", 7, None))
    talk = Conversation(None, ["users"], progress)
    resume = json.loads(talk.take('{"type":"auth_success"}').reply)["resume"]
    assert resume == {"lastSequence": 7, "lastEventId": "evt_8", "epoch": "e"}


def test_what_the_log_still_has_is_not_called_trimmed() -> None:
    details = {"gap": {"first": 3, "last": 5}, "firstSequence": 6, "logFirstSequence": 1}
    message = {"type": "error", "error": "service_degraded", "message": "", "details": details}
    talk = Conversation(None, ["users"], ReaderProgress(2, None))
    (gap,) = talk.take(json.dumps(message)).messages
    assert gap == Gap(3, 5, in_log=True)
    with pytest.raises(ChangesTrimmed, match="no longer kept") as raised:
        ReaderProgress(2, None).take(gap)
    assert "after=2" in raised.value.hint
    details["logFirstSequence"] = 6
    assert list(talk.take(json.dumps(message)).messages) == [Gap(3, 5)]
