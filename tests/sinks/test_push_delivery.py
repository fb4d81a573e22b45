"""Events are handed over in order, row by row, until each is settled; without Spark or a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SinkRefused
from headrace.sinks.push import ACCEPTED, UNSENT, DeliveryOutcome, Event, Reply
from headrace.sinks.push import waiting as waiting_rows
from headrace.sinks.push.breaker import MOST_REFUSALS
from headrace.sinks.push.delivery import DeliveryCheckpoint, EventDelivery, Stopped
from tests.effort import times
from tests.sinks.memory_destination import (
    FAILED,
    POLICY,
    REFUSED,
    UNREACHABLE,
    DeadLetterQueue,
    Office,
    Rounds,
    Watch,
    deliver,
    event,
    failing,
)

# --- windows -------------------------------------------------------------------------------------


def test_events_are_handed_over_in_windows_of_so_many() -> None:
    office = Office()
    done = deliver(office, [event(n, str(n)) for n in range(1, 21)])
    assert [len(window) for window in office.windows] == [8, 8, 4]
    assert office.sequences() == list(range(1, 21))
    assert (done.counts.sent, done.counts.requests, done.counts.retries) == (20, 3, 0)


def test_a_window_ends_when_it_has_enough_bytes() -> None:
    office = Office()
    events = [event(n, str(n), b"x" * 400) for n in range(1, 8)]
    deliver(office, events, policy={"batch_bytes": 1000})
    assert [len(window) for window in office.windows] == [3, 3, 1]


def test_a_tombstone_has_no_bytes() -> None:
    done = deliver(Office(), [event(1, payload=None)])
    assert (done.counts.sent, done.counts.bytes) == (1, 0)


# --- failures ------------------------------------------------------------------------------------


def test_a_row_that_fails_is_tried_again_while_others_go_on() -> None:
    office, letters = Office(failing(3, lambda each: each.sequence == 2)), DeadLetterQueue()
    events = [event(1, "a"), event(2, "b"), event(3, "c"), event(4, "b"), event(5, "d")]
    done = deliver(office, events, letters)
    assert not letters.kept
    assert office.sequences() == [1, 3, 5, 2, 4]
    assert done.counts.retries == 3
    assert done.stopped is None


def test_waits_double_and_are_as_long_as_the_destination_asks() -> None:
    watch = Watch()
    office = Office(failing(3, lambda each: each.sequence == 2))
    deliver(office, [event(1, "a"), event(2, "b")], clock=watch)
    assert watch.naps == pytest.approx([0.1, 0.2, 0.4])
    asked = Reply(DeliveryOutcome.FAILED, "slow down", retry_after=1.5)
    watch = Watch()
    office = Office(failing(1, lambda each: each.sequence == 2, asked))
    deliver(office, [event(1, "a"), event(2, "b")], clock=watch)
    assert watch.naps == pytest.approx([1.5])


def test_what_fails_for_ever_is_put_aside_if_others_are_taken_since() -> None:
    office = Office(lambda each: FAILED if each.row == "bad" else ACCEPTED)
    letters = DeadLetterQueue()
    events = [event(1, "bad"), event(2, "bad"), *(event(n, str(n)) for n in range(3, 40))]
    done = deliver(office, events, letters, policy={"batch_size": 1})
    assert done.stopped is None
    assert letters.kept[0][1:] == ("refused", "it stumbled", 5)
    assert [told[1] for told in letters.kept] == ["refused", "waiting"]
    assert office.sequences() == list(range(3, 40))


def test_what_fails_with_others_is_tried_with_ever_fewer_and_at_last_alone() -> None:
    """A request that holds one poisonous event fails whole; only that one is put aside."""
    office = Office()

    def send(events: Sequence[Event]) -> list[Reply]:
        office.windows.append(list(events))
        if any(each.sequence == 5 for each in events):
            return [FAILED] * len(events)
        office.taken.extend(events)
        return [ACCEPTED] * len(events)

    letters = DeadLetterQueue()
    policy = msgspec.structs.replace(POLICY, batch_size=100)
    delivery = EventDelivery(send, policy, letters, clock=Watch())
    delivery.run([[event(n, str(n)) for n in range(1, 301)]])
    assert letters.sequences() == [5]
    assert sorted(office.sequences()) == [n for n in range(1, 301) if n != 5]


# --- what is handed over again -------------------------------------------------------------------


def test_every_event_that_is_handed_over_again_is_counted() -> None:
    """Not every row: a destination that takes a window as a whole fails at all its events."""
    office, watch = Office(lambda _: FAILED, careless=True), Watch()
    events = [event(n, str(n % 3)) for n in range(1, 301)]
    done = deliver(office, events, policy={"batch_size": 500, "attempts": 1}, clock=watch)
    assert done.stopped is not None
    assert done.counts.retries == 0
    office.judge = lambda _: ACCEPTED
    watch.sleep(done.stopped.retry_after)
    last = deliver(office, events, checkpoint=done.stopped.checkpoint, clock=watch)
    assert (last.counts.sent, last.counts.retries) == (300, 300)


def test_what_waited_behind_a_failure_was_not_handed_over_before() -> None:
    office = Office(failing(2, lambda each: each.sequence == 1))
    done = deliver(office, [event(n) for n in range(1, 9)])
    assert (done.counts.sent, done.counts.retries) == (8, 2)


def test_what_a_channel_hands_over_again_by_itself_is_counted() -> None:
    twice = ACCEPTED._replace(repeats=1)
    office = Office(lambda each: twice if each.sequence == 3 else ACCEPTED)
    done = deliver(office, [event(n) for n in range(1, 9)])
    assert (done.counts.sent, done.counts.retries) == (8, 1)
    # Also if it was told the second time to come later: the first may have been taken.
    later = UNSENT._replace(repeats=1)
    office = Office(failing(1, lambda each: each.sequence == 3, later))
    done = deliver(office, [event(n, str(n)) for n in range(1, 9)])
    assert (done.counts.sent, done.counts.retries) == (8, 2)


# --- refusals ------------------------------------------------------------------------------------


def test_what_is_refused_is_put_aside_with_all_that_follows_of_its_row() -> None:
    office, letters = (
        Office(lambda each: REFUSED if each.sequence == 2 else ACCEPTED),
        DeadLetterQueue(),
    )
    events = [event(1, "a"), event(2, "a"), event(3, "b"), event(4, "a"), event(12, "a")]
    done = deliver(office, events, letters, policy={"batch_size": 4})
    assert office.sequences() == [1, 3]
    assert [(each.sequence, *told) for each, *told in letters.kept] == [
        (2, "refused", "never this one", 1),
        (4, "waiting", "", 0),
        (12, "waiting", "", 0),
    ]
    assert (done.counts.sent, done.counts.refused, done.counts.waiting) == (2, 1, 2)


def test_one_that_refuses_everything_is_not_believed_for_ever() -> None:
    office, letters = Office(lambda each: REFUSED), DeadLetterQueue()
    events = [event(n, str(n)) for n in range(1, 101)]
    watch = Watch()
    delivery = EventDelivery(office.send, POLICY, letters, clock=watch)
    delivery.run([events])
    assert len(letters.sequences("refused")) == MOST_REFUSALS
    assert delivery.counts.refusals == MOST_REFUSALS
    assert delivery.stopped is not None
    assert delivery.stopped.reason == REFUSED.reason
    watch.sleep(delivery.stopped.retry_after)
    # It goes on to refuse: nothing more is put aside, until patience has ended.
    policy = msgspec.structs.replace(POLICY, refusals=MOST_REFUSALS, probes=1)
    again = EventDelivery(
        office.send,
        policy,
        letters,
        letters.spans(),
        checkpoint=delivery.stopped.checkpoint,
        clock=watch,
    )
    again.run([events])
    assert len(letters.sequences("refused")) == MOST_REFUSALS
    assert again.stopped is not None
    impatient = msgspec.structs.replace(policy, gives_up=True)
    watch.sleep(again.stopped.retry_after)
    last = EventDelivery(
        office.send,
        impatient,
        letters,
        letters.spans(),
        checkpoint=again.stopped.checkpoint,
        clock=watch,
    )
    last.run([events])
    assert last.stopped is None
    assert sorted(letters.sequences("refused")) == list(range(1, 101))


def test_refusals_between_which_something_is_accepted_are_believed() -> None:
    office, letters = (
        Office(lambda each: ACCEPTED if each.sequence % 15 == 0 else REFUSED),
        DeadLetterQueue(),
    )
    delivery = EventDelivery(office.send, POLICY, letters, clock=Watch())
    delivery.run([[event(n, str(n)) for n in range(1, 101)]])
    assert delivery.stopped is None
    assert len(office.taken) == 6
    assert len(letters.sequences("refused")) == 94


def test_a_batch_that_comes_again_is_not_put_aside_twice() -> None:
    office, letters = (
        Office(lambda each: REFUSED if each.sequence == 2 else ACCEPTED),
        DeadLetterQueue(),
    )
    events = [event(1, "a"), event(2, "a"), event(3, "b"), event(4, "a")]
    deliver(office, events, letters)
    again, more = Office(), DeadLetterQueue()
    events.append(event(5, "a"))
    done = deliver(again, events, more, blocked=letters.spans())
    assert again.sequences() == [1, 3]
    assert done.counts.skipped == 2
    assert more.sequences("waiting") == [5]


# --- events that are too large -------------------------------------------------------------------


def test_a_large_event_is_put_aside_and_its_row_waits() -> None:
    office, letters = Office(), DeadLetterQueue()
    events = [event(1), event(2, payload=b"x" * 101), event(3), event(4, "b")]
    deliver(office, events, letters, policy={"max_event_bytes": 100})
    assert office.sequences() == [1, 4]
    assert letters.sequences("refused") == [2]
    assert letters.kept[0][2] == "it has 101 bytes, more than max_event_bytes: 100"
    assert letters.sequences("waiting") == [3]


def test_or_a_small_event_tells_where_to_read_it() -> None:
    office, letters = Office(), DeadLetterQueue()
    large = event(2, payload=b"x" * 1000)._replace(key='{"id":7}')
    deliver(office, [large, event(3)], letters, policy={"max_event_bytes": 500, "reference": True})
    assert not letters.kept
    [told, _] = office.taken
    assert told.id == large.id
    assert msgspec.json.decode(told.payload or b"") == {
        "id": "evt_2",
        "sequence": 2,
        "operation": "INSERT",
        "source": "s",
        "schema": "p",
        "table": "t",
        "key": {"id": 7},
        "bytes": 1000,
        "reference": "/v1/changes?after=1&limit=1&format=savegress",
    }


# --- a destination that takes nothing ------------------------------------------------------------


@pytest.mark.parametrize("how", [FAILED, UNREACHABLE], ids=["failing", "unreachable"])
def test_delivery_stops_and_goes_on_from_there(how: Reply) -> None:
    events = [event(n, str(n % 7)) for n in range(1, 101)]
    office, letters = (
        Office(lambda each: how if each.sequence > 20 else ACCEPTED),
        DeadLetterQueue(),
    )
    watch = Watch()
    done = deliver(office, events, letters, clock=watch)
    assert done.stopped is not None
    assert done.stopped.reached is (how is FAILED)
    assert done.stopped.reason == how.reason
    assert not letters.kept
    office.judge = lambda _: ACCEPTED
    office.windows.clear()
    watch.sleep(done.stopped.retry_after)
    deliver(
        office,
        events,
        letters,
        checkpoint=done.stopped.checkpoint,
        policy={"probes": 1},
        clock=watch,
    )
    assert len(office.windows[0]) == 1, "first one event, to see whether it is back"
    assert sorted(office.sequences()) == list(range(1, 101)), "nothing twice, nothing missing"
    assert_in_order(office)


def test_nothing_is_put_aside_as_long_as_nothing_is_reached() -> None:
    point, letters, watch = DeliveryCheckpoint(), DeadLetterQueue(), Watch()
    for probes in range(6):
        office = Office(lambda _: UNREACHABLE)
        policy = {"probes": probes, "gives_up": True}
        events = [event(1), event(2)]
        done = deliver(office, events, letters, checkpoint=point, policy=policy, clock=watch)
        assert done.stopped is not None
        assert office.windows
        point = done.stopped.checkpoint
        watch.sleep(done.stopped.retry_after)
    assert not letters.kept


def test_patience_ends() -> None:
    letters, watch = DeadLetterQueue(), Watch()
    events = [event(1), event(2), event(3, "b")]
    done = deliver(Office(lambda _: FAILED), events, letters, clock=watch)
    assert done.stopped is not None
    assert not letters.kept
    watch.sleep(done.stopped.retry_after)
    last = deliver(
        Office(lambda _: FAILED),
        events,
        letters,
        checkpoint=done.stopped.checkpoint,
        policy={"probes": 1, "gives_up": True},
        clock=watch,
    )
    assert last.stopped is None
    assert letters.sequences("refused") == [1, 3]
    assert letters.sequences("waiting") == [2]


def test_a_destination_that_fails_at_many_rows_is_not_taken_for_dead() -> None:
    """The first rows always fail, one by one; those behind them are taken in the end."""
    events = [event(n, f"bad{n}" if n <= 30 else str(n)) for n in range(1, 101)]
    office = Office(lambda each: FAILED if each.row.startswith("bad") else ACCEPTED)
    letters = DeadLetterQueue()
    rounds = Rounds(office.send, events, letters, policy={"batch_size": 1})
    assert rounds.run(until=3000.0)
    assert sorted(office.sequences()) == list(range(31, 101))
    assert sorted(letters.sequences("refused")) == list(range(1, 31))


def test_a_long_wait_is_left_to_who_started_it() -> None:
    watch = Watch()
    later = Reply(DeliveryOutcome.FAILED, "in a minute", retry_after=60.0)
    office = Office(failing(1, lambda each: each.sequence == 2, later))
    done = deliver(office, [event(1, "a"), event(2, "b"), event(3, "c")], clock=watch)
    assert isinstance(done.stopped, Stopped)
    assert done.stopped.retry_after == pytest.approx(60.0)
    assert not watch.naps
    assert office.sequences() == [1, 3]
    assert [each[:2] for each in done.stopped.checkpoint.pending] == [(2, 0)]


@pytest.mark.parametrize(("limit", "most"), [("MOST_EVENTS", 50), ("MOST_BYTES", 50 * 1000)])
def test_memory_is_bounded_while_a_row_waits(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(waiting_rows, limit, most)
    office = Office(lambda each: FAILED if each.row == "a" else ACCEPTED)
    given = 0

    def chunks() -> Any:
        nonlocal given
        for n in range(1, 5001):
            given += 1
            yield [event(n, "a" if n > 10 else str(n), b"x" * 1000)]

    delivery = EventDelivery(office.send, POLICY, DeadLetterQueue(), clock=Watch())
    delivery.run(chunks())
    assert delivery.stopped is not None
    assert 50 < given < 100


def test_what_was_on_its_way_to_one_that_wants_nothing_more_is_not_lost() -> None:
    office, letters = Office(), DeadLetterQueue()

    def send(window: Sequence[Event]) -> list[Reply]:
        if len(office.windows) == 2:
            raise SinkRefused("gone")
        return office.send(window)

    events = [event(n, str(n % 5)) for n in range(1, 41)]
    delivery = EventDelivery(send, POLICY, letters, clock=Watch())
    with pytest.raises(SinkRefused):
        delivery.run([events])
    assert delivery.stopped is not None
    point = delivery.stopped.checkpoint
    assert [each.sequence for each in point.pending] == list(range(17, 25))
    assert point.sequence == 24
    deliver(office, events, letters, checkpoint=point)
    assert office.sequences() == list(range(1, 41))
    assert not letters.kept


# --- whatever happens ----------------------------------------------------------------------------


def assert_in_order(office: Office) -> None:
    rows: dict[str, list[int]] = {}
    for each in office.taken:
        rows.setdefault(each.row, []).append(each.sequence)
    for taken in rows.values():
        assert list(dict.fromkeys(taken)) == sorted(set(taken))


class Script:
    """What a destination does, as hypothesis thinks of it."""

    def __init__(self, moods: list[str], poison: dict[int, str]) -> None:
        self._moods = moods
        self._poison = poison
        self._failed: dict[int, int] = {}

    def next(self) -> str:
        return self._moods.pop(0) if self._moods else "well"

    def judge(self, each: Event) -> Reply:
        what = self._poison.get(each.sequence, "")
        if what == "refuse":
            return REFUSED
        if what == "fail":
            return FAILED
        if what == "twice" and self._failed.get(each.sequence, 0) < 2:
            self._failed[each.sequence] = self._failed.get(each.sequence, 0) + 1
            return FAILED
        return ACCEPTED


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[Event], Script]:
    rows = draw(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=60))
    events = [event(n, row) for n, row in enumerate(rows, 1)]
    kinds = st.sampled_from(["refuse", "fail", "twice"])
    poison = draw(st.dictionaries(st.integers(1, len(rows)), kinds, max_size=6))
    moods = st.sampled_from(["well", "well", "well", "down", "failing", "deaf", "hasty"])
    return events, Script(draw(st.lists(moods, max_size=30)), poison)


@settings(max_examples=times(90, nightly=900))
@given(
    scripts(),
    st.integers(1, 12),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([0, 3, 1000]),
    st.data(),
)
def test_every_event_is_settled_once_and_rows_keep_their_order(
    scripted: tuple[list[Event], Script],
    size: int,
    attempts: int,
    careless: bool,
    held: int,
    data: st.DataObject,
) -> None:
    """A destination fails, refuses, goes away and takes without a word; a batch may begin anew."""
    events, script = scripted
    office, letters = Office(script.judge, careless=careless), DeadLetterQueue()

    def send(window: Sequence[Event]) -> list[Reply]:
        mood = script.next()
        if mood == "down":
            return [UNREACHABLE] * len(window)
        if mood == "failing":
            return [FAILED] * len(window)
        if mood == "hasty":  # it has no time for all of them
            begun = window[: len(window) // 2]
            return [*office.send(begun), *[UNSENT] * (len(window) - len(begun))]
        replies = office.send(window)
        return [UNREACHABLE] * len(window) if mood == "deaf" else replies

    handed: list[int] = []

    def send_and_note(window: Sequence[Event]) -> list[Reply]:
        replies = send(window)
        told = zip(window, replies, strict=True)
        handed.extend(
            each.sequence for each, said in told if said.outcome is not DeliveryOutcome.UNSENT
        )
        return replies

    crashed, retries = False, 0
    point, rounds, failures, moved, watch = DeliveryCheckpoint(), 0, 0, 0.0, Watch()
    crashes = data.draw(st.lists(st.booleans(), max_size=5))
    seconds = data.draw(st.sampled_from([0.0, 0.5, 5.0]))  # none: each window by itself
    pieces = data.draw(st.integers(1, 20))
    chunks = [events[at : at + pieces] for at in range(0, len(events), pieces)]
    while True:
        policy = msgspec.structs.replace(
            POLICY,
            batch_size=size,
            attempts=attempts,
            probes=failures,
            gives_up=failures > 3,
            seconds=seconds,
            moved=moved,
        )
        delivery = EventDelivery(
            send_and_note, policy, letters, letters.spans(), checkpoint=point, clock=watch
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(waiting_rows, "MOST_EVENTS", held or 1)
            delivery.run(chunks)
        rounds += 1
        retries += delivery.counts.retries
        failures += bool(delivery.stopped and delivery.stopped.reason)
        moved = max(moved, delivery.accepted_at)
        watch.sleep(delivery.stopped.retry_after if delivery.stopped else 0.0)
        assert rounds < 500, "it ends"
        if crashes and crashes.pop():
            point, crashed = DeliveryCheckpoint(), True  # whoever knew where it stopped has died
        elif delivery.stopped is None:
            break
        else:
            point = msgspec.json.decode(
                msgspec.json.encode(delivery.stopped.checkpoint), type=DeliveryCheckpoint
            )

    assert crashed or retries == len(handed) - len(set(handed))
    taken, put_aside = set(office.sequences()), letters.sequences()
    assert len(put_aside) == len(set(put_aside))
    assert taken | set(put_aside) == set(range(1, len(events) + 1))
    rows = {each.row for each in events}
    for row in rows:
        aside = [each.sequence for each, *_ in letters.kept if each.row == row]
        there = [each.sequence for each in office.taken if each.row == row]
        given_to = sorted(each.sequence for each in events if each.row == row)
        assert sorted(aside) == given_to[len(given_to) - len(aside) :]
        if not careless:
            assert list(dict.fromkeys(there)) == sorted(set(there))
