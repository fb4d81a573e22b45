"""The webhook sink: what it posts, in which order, and what it does with a batch."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook as Standard

from headrace.client import webhooks
from headrace.config import parse
from headrace.errors import ConfigError
from headrace.formats import savegress
from headrace.secret import Secret
from headrace.sinks.push import DeliveryOutcome
from headrace.sinks.webhook.sink import Webhook
from headrace.testing import wait_until
from tests.effort import times
from tests.formats.savegress_document import BATCH
from tests.sinks.hooks import PREVIOUS, SECRET, answers, channel, event, rendered, sink
from tests.sinks.receiver import OK, Receiver, Request, Script, reply

ACCEPTED, REFUSED, FAILED, UNSENT = (
    DeliveryOutcome.ACCEPTED,
    DeliveryOutcome.REFUSED,
    DeliveryOutcome.FAILED,
    DeliveryOutcome.UNSENT,
)


# --- what is posted ------------------------------------------------------------------------------


@pytest.mark.requirement("S0-37", "S0-38", "S0-39", "S1-39")
def test_an_event_is_posted_as_it_is_with_the_seeds_headers() -> None:
    told = rendered(7)
    with Receiver() as receiver, channel(receiver, secret=Secret(PREVIOUS)) as opened:
        before = int(time.time())
        assert answers(opened.send([told])) == [ACCEPTED]
    [request] = receiver.requests
    assert request.line == "POST /events HTTP/1.1"
    assert request.body == told.payload
    assert request.headers["content-type"] == "application/json"
    assert request.headers["x-savegress-event-id"] == told.id == json.loads(request.body)["id"]
    assert before <= int(request.headers["x-savegress-timestamp"]) <= int(time.time())
    signature = request.headers["x-savegress-signature"]
    assert webhooks.verify_signature(request.body, signature, PREVIOUS)


@pytest.mark.requirement("C-17")
def test_a_request_is_signed_as_standard_webhooks_says_with_both_secrets_of_a_rotation() -> None:
    told = rendered(7)
    both = {"secret": Secret(SECRET), "previous_secret": Secret(PREVIOUS)}
    with Receiver() as receiver, channel(receiver, **both) as opened:
        opened.send([told])
    [request] = receiver.requests
    assert Standard(SECRET).verify(request.body, request.headers)
    for known in (SECRET, PREVIOUS, [SECRET, PREVIOUS]):
        assert webhooks.verify(request.body, request.headers, known) == told.id
    assert len(request.headers["webhook-signature"].split()) == 2
    # The seed's header has room for one: the new secret's, as a text.
    signature = request.headers["x-savegress-signature"]
    assert webhooks.verify_signature(request.body, signature, SECRET)


def test_without_a_secret_nothing_is_signed() -> None:
    with Receiver() as receiver, channel(receiver) as opened:
        opened.send([event(1)])
    assert not [name for name in receiver.requests[0].headers if "signature" in name]
    assert receiver.requests[0].id == "evt_1"


def test_headers_of_ones_own_are_sent_and_a_query_belongs_to_the_url() -> None:
    given = {"authorization": Secret("Bearer t0k"), "User-Agent": Secret("shop")}
    with (
        Receiver() as receiver,
        channel(f"{receiver.url}/ä?to=a&b=%20c", headers=given) as opened,
    ):
        opened.send([event(1)])
    [request] = receiver.requests
    assert request.line == "POST /events/%C3%A4?to=a&b=%20c HTTP/1.1"
    assert request.headers["authorization"] == "Bearer t0k"
    assert request.headers["user-agent"] == "shop"
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"


def test_a_format_has_its_own_content_type() -> None:
    with Receiver() as receiver, channel(receiver, format="cloudevents") as opened:
        opened.send([event(1)])
    assert receiver.requests[0].headers["content-type"] == "application/cloudevents+json"


@pytest.mark.requirement("S0-36", "C-18")
def test_a_batch_is_the_documents_and_a_repeat_of_it_is_the_same_to_the_byte() -> None:
    told = [rendered(number) for number in (1, 2, 3)]
    with Receiver() as receiver, channel(receiver, batch=True, secret=Secret(SECRET)) as opened:
        assert answers(opened.send(told)) == [ACCEPTED] * 3
        opened.send(told)
        opened.send(told[:2])
    first, second, other = receiver.requests
    batch = json.loads(first.body)
    BATCH.validate(batch)
    assert [each["id"] for each in batch["events"]] == [each.id for each in told]
    assert first.body == second.body
    assert first.body == savegress.batch([each.payload or b"" for each in told])
    assert first.headers["x-savegress-event-id"] == first.id == batch["batch_id"]
    assert other.id != first.id
    assert first.headers["content-type"] == "application/json"
    assert webhooks.verify(first.body, first.headers, SECRET) == batch["batch_id"]


# --- order ---------------------------------------------------------------------------------------


def sequences(requests: Sequence[Request]) -> list[int]:
    """The numbers of all events, in the order they came."""
    bodies = [json.loads(request.body) for request in requests]
    return [each["n"] for body in bodies for each in body.get("events", [body])]


ROWS = st.lists(st.integers(0, 5), min_size=1, max_size=60)


@settings(max_examples=times(6, nightly=60))
@given(ROWS, st.booleans(), st.integers(1, 8))
def test_events_of_a_row_arrive_in_order_and_each_once(
    rows: list[int], batch: bool, size: int
) -> None:
    told = [event(number, row) for number, row in enumerate(rows)]
    limits = {"batch": batch, "batch_size": size, "concurrency": 4}
    with Receiver() as receiver, channel(receiver, **limits) as opened:
        assert set(answers(opened.send(told))) == {ACCEPTED}
    came = sequences(receiver.requests)
    assert sorted(came) == list(range(len(rows)))
    for row in set(rows):
        of_row = [number for number in came if rows[number] == row]
        assert of_row == sorted(of_row)


def test_as_many_rows_are_on_their_way_as_concurrency_says_and_never_two_of_one() -> None:
    together = threading.Barrier(4)
    busy: set[bytes] = set()
    lock = threading.Lock()

    def script(request: Request) -> bytes:
        row = json.loads(request.body)["row"]
        with lock:
            assert row not in busy
            busy.add(row)
        together.wait(30)  # all four lanes have come this far
        with lock:
            busy.discard(row)
        return OK

    told = [event(n, n % 4, b'{"row":%d}' % (n % 4)) for n in range(12)]
    with Receiver(script) as receiver, channel(receiver, concurrency=4) as opened:
        assert set(answers(opened.send(told))) == {ACCEPTED}
    assert receiver.connections == 4


def test_connections_are_kept_from_one_call_to_the_next() -> None:
    with Receiver() as receiver, channel(receiver, concurrency=3) as opened:
        for number in range(5):
            opened.send([event(10 * number + row, row) for row in range(9)])
    assert len(receiver.requests) == 45
    assert receiver.connections <= 3


def test_a_connection_that_the_receiver_closed_meanwhile_costs_no_attempt() -> None:
    with Receiver() as receiver, channel(receiver, concurrency=1) as opened:
        receiver.close_after = 1
        for number in range(4):
            assert answers(opened.send([event(number)])) == [ACCEPTED]
            wait_until(lambda: not receiver._sockets, message="the receiver has closed")
    assert receiver.ids == ["evt_0", "evt_1", "evt_2", "evt_3"]
    assert receiver.connections == 4


def test_what_follows_an_event_of_its_row_that_was_not_accepted_is_not_sent() -> None:
    def script(request: Request) -> bytes:
        return {"evt_2": reply(500), "evt_5": reply(422)}.get(request.id, OK)

    told = [
        event(1, "a"),
        event(2, "a"),
        event(3, "a"),
        event(4, "b"),
        event(5, "c"),
        event(6, "c"),
    ]
    with Receiver(script) as receiver, channel(receiver) as opened:
        said = answers(opened.send(told))
    assert said == [ACCEPTED, FAILED, UNSENT, ACCEPTED, REFUSED, UNSENT]
    assert sorted(receiver.ids) == ["evt_1", "evt_2", "evt_4", "evt_5"]


# --- batches -------------------------------------------------------------------------------------


def refusing(bad: set[int], status: int = 422) -> tuple[list[int], Script]:
    """What was taken, and a script that refuses every batch with one of these events."""
    taken: list[int] = []

    def script(request: Request) -> bytes:
        numbers = sequences([request])
        if bad & set(numbers):
            return reply(status)
        taken.extend(numbers)
        return OK

    return taken, script


@settings(max_examples=times(6, nightly=60))
@given(st.sets(st.integers(0, 39), max_size=6), ROWS)
def test_a_refused_batch_is_parted_until_the_bad_events_are_found(
    bad: set[int], rows: list[int]
) -> None:
    told = [event(number, row) for number, row in enumerate(rows)]
    taken, script = refusing(bad)
    limits = {"batch": True, "batch_size": 16, "concurrency": 2}
    with Receiver(script) as receiver, channel(receiver, **limits) as opened:
        said = answers(opened.send(told))
    refused: set[int] = set()
    for number, row in enumerate(rows):
        expected = UNSENT if row in refused else REFUSED if number in bad else ACCEPTED
        assert said[number] is expected
        if expected is REFUSED:
            refused.add(row)
    assert sorted(taken) == [n for n, answer in enumerate(said) if answer is ACCEPTED]


def test_a_batch_that_is_too_large_for_the_receiver_goes_in_parts() -> None:
    def script(request: Request) -> bytes:
        return reply(413) if len(request.body) > 400 else OK

    told = [event(number, number) for number in range(64)]
    with Receiver(script) as receiver, channel(receiver, batch=True) as opened:
        assert set(answers(opened.send(told))) == {ACCEPTED}
    taken = [request for request in receiver.requests if len(request.body) <= 400]
    assert sequences(taken) == list(range(64))


@pytest.mark.parametrize("status", [301, 401, 404, 405])
def test_what_the_endpoint_refuses_whatever_it_is_sent_is_not_parted(status: int) -> None:
    told = [event(number, number) for number in range(8)]
    with Receiver(lambda _: reply(status)) as receiver, channel(receiver, batch=True) as opened:
        assert set(answers(opened.send(told))) == {REFUSED}
    assert len(receiver.requests) == 1


def test_a_batch_that_failed_comes_again_whole_and_holds_back_its_rows_alone() -> None:
    failing = [True]

    def script(request: Request) -> bytes:
        return reply(500) if failing[0] and 0 in sequences([request]) else OK

    told = [event(0, "a"), event(1, "b"), event(2, "a"), event(3, "c"), event(4, "d")]
    limits = {"batch": True, "batch_size": 2, "concurrency": 1}
    with Receiver(script) as receiver, channel(receiver, **limits) as opened:
        said = answers(opened.send(told))
        failing[0] = False
        again = answers(opened.send(told[:2]))
    assert said == [FAILED, FAILED, UNSENT, ACCEPTED, ACCEPTED]
    assert again == [ACCEPTED, ACCEPTED]
    assert receiver.ids[0] == receiver.ids[-1]


def test_a_batch_has_at_most_so_many_events_and_bytes() -> None:
    told = [event(n, 1, b'{"n":%d,"x":"%b"}' % (n, b"x" * 300)) for n in range(20)]
    limits = {"batch_size": 4, "batch_bytes": 700, "concurrency": 1}
    with Receiver() as receiver, channel(receiver, batch=True, **limits) as opened:
        assert set(answers(opened.send(told))) == {ACCEPTED}
    assert {len(sequences([request])) for request in receiver.requests} == {2}
    assert sequences(receiver.requests) == list(range(20))
    huge = event(1, 1, b'{"n":1,"x":"%b"}' % (b"x" * 5000))
    with Receiver() as receiver, channel(receiver, batch=True, **limits) as opened:
        assert answers(opened.send([huge])) == [ACCEPTED]


def test_a_large_event_arrives_whole() -> None:
    told = event(1, 1, b'{"x":"%b"}' % (b"x" * 5_000_000))
    with Receiver() as receiver, channel(receiver) as opened:
        assert answers(opened.send([told])) == [ACCEPTED]
    assert receiver.requests[0].body == told.payload


def test_a_window_has_a_batch_for_each_request_that_may_be_on_its_way() -> None:
    alone, together = (
        sink("https://hooks.example", batch=batch, batch_size=100).policy for batch in (False, True)
    )
    assert (alone.batch_size, together.batch_size) == (100, 1600)
    assert together.batch_bytes == 16 * alone.batch_bytes


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"headers": {"X-A": Secret("s3cret\r\nX-B: 1")}}, "the value of X-A holds a line end"),
        ({"headers": {"X A": Secret("s3cret")}}, "'X A' is no name of a header"),
        ({"headers": {"Host": Secret("s3cret")}}, "Host is set by the sink itself"),
        ({"headers": {"webhook-ID": Secret("s3cret")}}, "webhook-ID is set by the sink itself"),
        ({"headers": {"Content-Length": Secret("s3cret")}}, "Content-Length is set by the sink"),
        ({"secret": Secret("")}, "secret: it is empty"),
        ({"secret": Secret("whsec_s3cret!")}, "secret: what follows whsec_ is not Base64"),
        ({"previous_secret": Secret("s3cret")}, "previous_secret is set and secret is not"),
        ({"concurrency": 0}, "concurrency must be from 1 to 1000, not 0"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be above 0, up to 600, not 0"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(
    given: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sink("https://hooks.example", **given)
    assert problem in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_config_makes_the_sink_and_shows_no_secret_of_it(tmp_path: Path) -> None:
    given: dict[str, object] = {
        "type": "webhook",
        "url": "https://hooks.example/${TOKEN}",
        "secret": "${SIGNING}",
        "headers": {"Authorization": "Bearer ${TOKEN}"},
        "ca_file": "ca.pem",
    }

    def parsed() -> object:
        content = {"pipeline": {"url": "https://headrace.example", "sinks": {"hooks": given}}}
        secrets = {"TOKEN": "t0ken", "SIGNING": "s1gning"}
        pipeline = parse(content, folder=tmp_path, environment=secrets).pipeline
        assert pipeline is not None
        return pipeline.sinks[0]

    made = parsed()
    assert isinstance(made, Webhook)
    assert made.headers == {"Authorization": Secret("Bearer t0ken")}
    assert made.ca_file == str(tmp_path / "ca.pem")
    assert "t0ken" not in repr(made)
    assert "s1gning" not in repr(made)
    given["headers"] = {"X-Plain": "in the file", "X-Number": 5}
    with pytest.raises(ConfigError, match=r"hooks\.headers: expected text, got \*\*\*") as caught:
        parsed()
    assert "in the file" not in str(caught.value)


def test_defaults_are_those_that_the_field_expects() -> None:
    made = sink("https://hooks.example", timeout_seconds=30.0)
    assert (made.attempts, made.retry_first_seconds, made.retry_longest_seconds) == (5, 0.1, 30.0)
    assert (made.retry_jitter, made.timeout_seconds, made.concurrency) == (0.1, 30.0, 16)
    assert made.batch is False
