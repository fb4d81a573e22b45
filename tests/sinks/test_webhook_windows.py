"""A call of the webhook sink has an end, and what is known at that end is told."""

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headrace.errors import SinkRefused
from headrace.sinks.push import DeliveryOutcome, Event
from headrace.sinks.push.delivery import DeliveryCheckpoint, EventDelivery
from headrace.sinks.webhook import channel as module
from headrace.sinks.webhook.channel import HttpChannel
from tests.sinks.hooks import answers, channel, event, sink
from tests.sinks.memory_destination import DeadLetterQueue
from tests.sinks.receiver import OK, Receiver, Request, Script, reply

ACCEPTED, FAILED, UNSENT = DeliveryOutcome.ACCEPTED, DeliveryOutcome.FAILED, DeliveryOutcome.UNSENT


def numbers(requests: Sequence[Request]) -> list[int]:
    """The numbers of all events that came, in their order."""
    bodies = [json.loads(request.body) for request in requests]
    return [each["n"] for body in bodies for each in body.get("events", [body])]


def delivery(
    opened: HttpChannel, point: DeliveryCheckpoint | None = None, **policy: Any
) -> EventDelivery:
    """A delivery through a channel, as a task begins it."""
    usual = {"retry_first_seconds": 0.01, "retry_jitter": 0.0}
    given = msgspec.structs.replace(sink("http://127.0.0.1", **usual).policy, **policy)
    return EventDelivery(
        opened.send, given, DeadLetterQueue(), checkpoint=point or DeliveryCheckpoint()
    )


# --- an endpoint that is gone --------------------------------------------------------------------


def gone_after(count: int) -> Script:
    """Take so many requests, and be gone."""
    left = [count]

    def script(_: Request) -> bytes:
        left[0] -= 1
        return OK if left[0] >= 0 else reply(410)

    return script


BATCHES = [
    pytest.param({}, id="alone"),
    pytest.param({"batch": True, "batch_size": 1}, id="batches"),
]


@pytest.mark.parametrize("limits", BATCHES)
def test_what_was_accepted_before_an_endpoint_was_gone_is_told_first(
    limits: dict[str, Any],
) -> None:
    told = [event(number, number) for number in range(6)]
    with (
        Receiver(gone_after(2)) as receiver,
        channel(receiver, concurrency=1, **limits) as opened,
    ):
        said = opened.send(told)
        assert answers(said) == [ACCEPTED, ACCEPTED, *[UNSENT] * 4]
        assert {each.reason for each in said[2:]} == {"it answered 410 Gone"}
        asked = len(receiver.requests)
        with pytest.raises(SinkRefused, match="410 Gone") as caught:
            opened.send(told[2:])
        assert caught.value.hint
        assert len(receiver.requests) == asked == 3, "it is not asked again"


def test_what_failed_before_an_endpoint_was_gone_is_told_too() -> None:
    def script(request: Request) -> bytes:
        return reply(500 if request.id == "evt_0" else 410)

    with Receiver(script) as receiver, channel(receiver, concurrency=1) as opened:
        said = opened.send([event(number, number) for number in range(4)])
        assert answers(said) == [FAILED, *[UNSENT] * 3]
        with pytest.raises(SinkRefused, match="410 Gone"):
            opened.send([event(9)])


def test_one_that_was_gone_is_asked_again_some_time_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GONE_SECONDS", 0.0)
    with Receiver(gone_after(1)) as receiver, channel(receiver, concurrency=1) as opened:
        assert answers(opened.send([event(1), event(2)])) == [ACCEPTED, UNSENT]
        receiver.script = lambda _: OK
        assert answers(opened.send([event(2)])) == [ACCEPTED]


def test_a_delivery_to_an_endpoint_that_goes_away_knows_all_that_was_accepted() -> None:
    told = [event(number, number % 40) for number in range(1, 201)]
    with Receiver(gone_after(120)) as receiver, channel(receiver, concurrency=4) as opened:
        first = delivery(opened)
        with pytest.raises(SinkRefused, match="410 Gone"):
            first.run([told])
        assert first.counts.sent == 120
        assert first.stopped is not None
        taken = numbers(receiver.requests)[:120]
        receiver.requests.clear()
        receiver.script = lambda _: OK
    with channel(receiver.url) as opened, Receiver(port=receiver.port) as other:
        second = delivery(opened, first.stopped.checkpoint)
        second.run([told])
        assert second.counts.sent == 80
    came = taken + numbers(other.requests)
    assert sorted(came) == list(range(1, 201)), "each once"
    for row in range(40):
        of_row = [number for number in came if number % 40 == row]
        assert of_row == sorted(of_row)


# --- a slow endpoint -----------------------------------------------------------------------------


def slowly(receiver: Receiver, seconds: float) -> Script:
    """Take everything, after so long."""

    def script(_: Request) -> bytes | None:
        return None if receiver.ended.wait(seconds) else OK

    return script


def test_a_call_begins_nothing_more_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_SECONDS", 0.5)
    with Receiver() as receiver, channel(receiver, concurrency=3) as opened:
        receiver.script = slowly(receiver, 0.3)
        said = answers(opened.send([event(number, number) for number in range(60)]))
    taken = said.count(ACCEPTED)
    assert taken == len(receiver.requests) <= 6
    assert said == [*[ACCEPTED] * taken, *[UNSENT] * (60 - taken)]


def test_what_one_row_has_waits_for_the_next_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_SECONDS", 0.1)
    told = [event(number) for number in range(50)]
    with Receiver() as receiver, channel(receiver) as opened:
        receiver.script = slowly(receiver, 0.2)
        assert answers(opened.send(told)) == [ACCEPTED, *[UNSENT] * 49]
        assert answers(opened.send(told[1:])) == [ACCEPTED, *[UNSENT] * 48]
    assert receiver.ids == ["evt_0", "evt_1"]


def test_a_batch_that_is_parted_goes_on_until_something_is_known_of_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WINDOW_SECONDS", 0.0)

    def script(request: Request) -> bytes:
        return reply(422) if 3 in numbers([request]) else OK

    told = [event(number, number) for number in range(16)]
    with Receiver(script) as receiver, channel(receiver, batch=True) as opened:
        said = answers(opened.send(told))
        sizes = [len(numbers([request])) for request in receiver.requests]
        ended = delivery(opened)
        ended.run([told[2:]])
    assert said == [*[ACCEPTED] * 2, *[UNSENT] * 14]
    assert sizes == [16, 8, 4, 2]
    assert ended.counts.sent == 13
    assert ended.counts.refused == 1


@pytest.mark.parametrize("rows", [1, 5, 24])
def test_a_slow_endpoint_gets_each_event_once_and_what_it_took_is_known_in_between(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(module, "WINDOW_SECONDS", 0.2)
    told = [event(number, number % rows) for number in range(1, 25)]
    rounds: list[int] = []
    point = DeliveryCheckpoint()
    with Receiver() as receiver, channel(receiver, concurrency=4) as opened:
        receiver.script = slowly(receiver, 0.15)
        while sum(rounds) < len(told):
            begun = time.monotonic()
            each = delivery(opened, point, seconds=0.4)
            each.run([told])
            assert time.monotonic() - begun < 1.5
            assert (each.counts.retries, each.counts.refused) == (0, 0)
            rounds.append(each.counts.sent)
            if each.stopped is not None:
                assert each.stopped.reason == "", "its time was over"
                assert {known.attempts for known in each.stopped.checkpoint.pending} <= {0}
                point = each.stopped.checkpoint
    came = numbers(receiver.requests)
    assert sorted(came) == list(range(1, 25))
    for row in range(rows):
        of_row = [number for number in came if number % rows == row]
        assert of_row == sorted(of_row)
    assert len(rounds) > 1
    assert all(rounds)


def test_one_that_fails_slowly_at_everything_is_left_alone_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WINDOW_SECONDS", 0.05)
    with Receiver() as receiver, channel(receiver, concurrency=4) as opened:
        receiver.script = lambda _: None if receiver.ended.wait(0.1) else reply(500)
        failed = delivery(opened)
        failed.run([[event(number, number) for number in range(1, 401)]])
    assert failed.stopped is not None
    assert failed.stopped.reason == "it answered 500 Internal Server Error"
    assert len(receiver.requests) < 25, "four at a time, five times"


# --- a connection that closes --------------------------------------------------------------------


def closing(which: str, times: int = 1) -> tuple[list[str], Script]:
    """Take events, and close instead of answering those whose id begins so, so often each."""
    taken: list[str] = []
    lock = threading.Lock()

    def script(request: Request) -> bytes | None:
        with lock:
            taken.append(request.id)
            seen = taken.count(request.id)
        return None if request.id.startswith(which) and seen <= times else OK

    return taken, script


def test_what_is_posted_once_more_on_another_connection_is_told_of() -> None:
    taken, script = closing("evt_2")
    with Receiver(script) as receiver, channel(receiver, concurrency=1) as opened:
        first, second, third = opened.send([event(number, number) for number in (1, 2, 3)])
    assert [first.repeats, second.repeats, third.repeats] == [0, 1, 0]
    assert answers([first, second, third]) == [ACCEPTED] * 3
    assert taken == ["evt_1", "evt_2", "evt_2", "evt_3"]


def test_so_is_what_failed_then() -> None:
    taken, script = closing("evt_2", times=2)
    with Receiver(script) as receiver, channel(receiver, concurrency=1) as opened:
        _, said = opened.send([event(1, 1), event(2, 2)])
    assert (said.outcome, said.repeats) == (FAILED, 1)
    assert said.reason == "it closed the connection without an answer"
    assert taken == ["evt_1", "evt_2", "evt_2"]


def test_so_is_each_event_of_a_batch() -> None:
    taken, script = closing("")
    limits = {"batch": True, "batch_size": 4, "concurrency": 1}
    told: list[Event] = [event(number, number) for number in range(4)]
    with Receiver() as receiver, channel(receiver, **limits) as opened:
        opened.send([event(9)])
        receiver.script = script
        said = opened.send(told)
    assert answers(said) == [ACCEPTED] * 4
    assert {each.repeats for each in said} == {1}
    assert len(taken) == 2


def test_a_delivery_counts_what_was_posted_once_more() -> None:
    _, script = closing("evt_2")
    with Receiver(script) as receiver, channel(receiver, concurrency=1) as opened:
        counted = delivery(opened)
        counted.run([[event(number, number) for number in (1, 2, 3)]])
    assert (counted.counts.sent, counted.counts.retries) == (3, 1)


@pytest.mark.parametrize("status", [429, 410])
def test_so_is_what_was_then_told_not_to_come(status: int) -> None:
    taken: list[str] = []

    def script(request: Request) -> bytes | None:
        taken.append(request.id)
        return None if len(taken) == 1 else reply(status)

    with Receiver() as receiver, channel(receiver, concurrency=1) as opened:
        opened.send([event(1)])
        receiver.script = script
        [said] = opened.send([event(2)])
    assert (said.outcome, said.repeats) == (UNSENT, 1)
    assert taken == ["evt_2", "evt_2"]


def test_what_nobody_is_there_for_any_more_is_not_posted_twice() -> None:
    with Receiver() as receiver, channel(receiver, concurrency=1) as opened:
        opened.send([event(1)])

        def script(_: Request) -> None:
            receiver.leave()

        receiver.script = script
        [said] = opened.send([event(2)])
    assert (said.outcome, said.repeats) == (DeliveryOutcome.UNREACHABLE, 0)
