"""What becomes of an event that fails: whose fault it was, and when it is tried again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from headrace.retry import Backoff
from headrace.sinks.push import ACCEPTED, UNSENT, DeliveryOutcome, Event, Reply
from headrace.sinks.push.breaker import MOST_REFUSALS
from headrace.sinks.push.delivery import DeliveryCheckpoint, EventDelivery
from headrace.sinks.push.waiting import Pending
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
from tests.sinks.socket_sink import Courier

HOUR = 3600.0


def rows(count: int) -> list[Event]:
    return [event(n, f"row{n}") for n in range(1, count + 1)]


# --- whose fault ---------------------------------------------------------------------------------


def test_an_event_at_which_the_destination_hangs_up_is_put_aside_if_others_are_taken() -> None:
    def send(window: Sequence[Event]) -> list[Reply]:
        poison = any(each.sequence == 7 for each in window)
        return [UNREACHABLE if poison else ACCEPTED] * len(window)

    letters = DeadLetterQueue()
    rounds = Rounds(send, rows(50), letters, policy={"batch_size": 500})
    assert rounds.run(until=HOUR)
    assert rounds.accepted == 49
    assert [(each.sequence, *told) for each, *told in letters.kept] == [
        (7, "refused", UNREACHABLE.reason, 5)
    ]


def test_an_outage_between_two_accepted_events_leaves_no_dead_letter() -> None:
    office, letters, watch = Office(), DeadLetterQueue(), Watch()
    office.judge = lambda _: UNREACHABLE if office.taken and watch.time < 600 else ACCEPTED
    rounds = Rounds(office.send, rows(50), letters, policy={"batch_size": 10})
    rounds.watch = watch
    assert rounds.run(until=HOUR)
    assert not letters.kept


@pytest.mark.parametrize("flaps", [1, 3, 5])
@pytest.mark.parametrize(("size", "count"), [(1, 5), (500, 20), (500, 100)])
def test_tries_while_nothing_was_accepted_do_not_count_afterwards(
    size: int, count: int, flaps: int
) -> None:
    """A destination fails at everything for a while, takes one event, and fails a little more."""
    letters, requests = DeadLetterQueue(), 0

    def send(window: Sequence[Event]) -> list[Reply]:
        nonlocal requests
        if rounds.watch.now() < 1200:
            return [FAILED] * len(window)
        requests += 1
        return [FAILED if 1 < requests <= 1 + flaps else ACCEPTED] * len(window)

    rounds = Rounds(send, rows(count), letters, policy={"batch_size": size})
    assert rounds.run(until=2 * HOUR)
    assert not letters.kept
    assert rounds.accepted == count


def test_tries_before_others_were_accepted_count_as_one() -> None:
    """Also within one delivery: it fails twice, another does, then this is taken."""
    tries = 0

    def judge(each: Event) -> Reply:
        nonlocal tries
        if each.sequence != 1:
            return ACCEPTED if tries > 1 else FAILED
        tries += 1
        return FAILED

    office, letters = Office(judge), DeadLetterQueue()
    done = deliver(office, [event(1, "a"), event(2, "b")], letters, policy={"batch_size": 1})
    assert done.stopped is None
    assert office.sequences() == [2]
    assert [told[1:] for told in letters.kept] == [("refused", FAILED.reason, 5)]
    assert tries == 6


def test_what_other_parts_had_accepted_since_counts() -> None:
    """A poisonous row, alone in its part."""
    office, letters, watch = Office(lambda _: FAILED), DeadLetterQueue(), Watch()
    first = deliver(office, [event(1)], letters, clock=watch)
    assert first.stopped is not None
    watch.sleep(first.stopped.retry_after)
    point = first.stopped.checkpoint
    # Accepted before it failed: it may be that nothing is accepted any more.
    before = deliver(
        office, [event(1)], letters, checkpoint=point, policy={"moved": 1.0}, clock=watch
    )
    assert before.stopped is not None
    assert not letters.kept
    watch.sleep(before.stopped.retry_after)
    office.windows.clear()
    since = deliver(
        office,
        [event(1)],
        letters,
        checkpoint=before.stopped.checkpoint,
        policy={"moved": watch.wall()},
        clock=watch,
    )
    assert since.stopped is None
    assert [told[1:] for told in letters.kept] == [("refused", FAILED.reason, 5)]
    assert len(office.windows) == 4, "all tries before count as one"


def test_when_something_was_accepted_is_told() -> None:
    watch = Watch()
    watch.sleep(7.0)
    assert deliver(Office(), [event(1)], clock=watch).accepted_at == watch.wall()
    assert deliver(Office(lambda _: FAILED), [event(1)], clock=watch).accepted_at == 0.0


# --- patience ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [FAILED, REFUSED], ids=["failing", "refusing"])
def test_when_patience_is_over_all_that_fails_is_put_aside_soon(how: Reply) -> None:
    letters = DeadLetterQueue()
    rounds = Rounds(lambda window: [how] * len(window), rows(3000), letters)
    assert rounds.run(until=1.1 * HOUR)
    assert len(letters.sequences("refused")) == 3000


def test_one_that_takes_something_again_has_new_patience() -> None:
    """It came back, and fails at windows that hold one poisonous event."""
    office, letters = Office(), DeadLetterQueue()

    def send(window: Sequence[Event]) -> list[Reply]:
        poison = any(each.sequence == 40 for each in window)
        return [FAILED] * len(window) if poison else office.send(window)

    policy = {"batch_size": 100, "gives_up": True, "probes": 1}
    delivery = EventDelivery(
        send, msgspec.structs.replace(POLICY, **policy), letters, clock=Watch()
    )
    delivery.run([rows(100)])
    assert letters.sequences() == [40]
    assert len(office.taken) == 99


def test_only_what_the_destination_refused_counts_as_a_refusal() -> None:
    large = [event(n, str(n), b"x" * 50) for n in range(1, MOST_REFUSALS + 11)]
    done = deliver(Office(), large, policy={"max_event_bytes": 10})
    assert (done.counts.refused, done.counts.refusals) == (MOST_REFUSALS + 10, 0)
    office = Office(lambda each: REFUSED if each.sequence == 2 else ACCEPTED)
    assert deliver(office, rows(3)).counts.refusals == 1


# --- when it is tried again ----------------------------------------------------------------------


def test_whoever_goes_on_is_told_to_wait_as_long_as_delivery_would() -> None:
    policy = {"schedule": Backoff(10.0, 30.0)}
    done = deliver(Office(lambda _: FAILED), [event(1)], policy=policy)
    assert done.stopped is not None
    assert done.stopped.retry_after == pytest.approx(10.0)


@pytest.mark.parametrize(("failures", "plain"), [(1, 0.5), (3, 2.0), (99, 30.0)])
def test_waits_are_a_little_longer_or_shorter_at_random(failures: int, plain: float) -> None:
    """Or all tasks that failed together would come back together."""
    waits = [Backoff(0.5, 30.0, jitter=0.2).wait(failures) for _ in range(1000)]
    assert 0.8 * plain <= min(waits) < 0.85 * plain
    assert 1.15 * plain < max(waits) <= 1.2 * plain


def test_the_schedule_is_that_of_the_settings() -> None:
    sink = Courier(
        name="post",
        port=1,
        retry_first_seconds=0.2,
        retry_longest_seconds=7.0,
        retry_jitter=0.3,
    )
    assert sink.policy.schedule == Backoff(0.2, 7.0, 0.3)


def test_rows_that_fail_together_are_tried_again_apart_from_each_other() -> None:
    late = {each.row for each in rows(8)[1:]}
    policy = {"schedule": Backoff(1.0, 30.0, jitter=0.5)}
    office = Office(failing(1, lambda each: each.row in late))
    rounds = Rounds(office.send, rows(8), DeadLetterQueue(), policy=policy)
    assert rounds.run(until=HOUR)
    again = [at for at, each in rounds.tried if each.row in late][len(late) :]
    assert len(set(again)) == len(late)
    assert all(0.5 <= at <= 1.5 for at in again)


def test_a_row_is_not_tried_sooner_than_asked_because_of_another() -> None:
    asks = {
        "slow": Reply(DeliveryOutcome.FAILED, "429", 600.0),
        "quick": Reply(DeliveryOutcome.FAILED, "", 3.0),
    }
    events = [event(1, "slow"), event(2, "quick"), event(3, "plain")]
    rounds = Rounds(
        Office(lambda each: asks.get(each.row, ACCEPTED)).send, events, DeadLetterQueue()
    )
    rounds.run(until=700.0)
    times = {row: [at for at, each in rounds.tried if each.row == row] for row in asks}
    first, second = times["slow"]
    assert second - first >= 600.0
    assert len(times["quick"]) > 2


def test_nothing_is_sent_to_one_that_asked_for_a_pause() -> None:
    """Whoever goes on may come too early: another part was asked for less."""
    watch, events = Watch(), rows(20)
    office = Office(lambda _: Reply(DeliveryOutcome.FAILED, "429", 600.0))
    done = deliver(office, events, clock=watch)
    assert done.stopped is not None
    watch.sleep(100.0)
    office = Office()
    early = deliver(
        office, events, checkpoint=done.stopped.checkpoint, policy={"probes": 1}, clock=watch
    )
    assert early.stopped is not None
    assert early.stopped.reason
    assert early.stopped.retry_after == pytest.approx(500.0)
    assert not office.windows
    watch.sleep(early.stopped.retry_after)
    deliver(office, events, checkpoint=early.stopped.checkpoint, policy={"probes": 2}, clock=watch)
    assert sorted(office.sequences()) == list(range(1, 21))


def test_a_point_that_was_noted_before_is_still_read() -> None:
    noted = b'{"sequence":3,"at":0,"pending":[[1,0,4,true],[2,0,0]]}'
    point = msgspec.json.decode(noted, type=DeliveryCheckpoint)
    assert point.pending == [Pending(1, 0, 4, True), Pending(2, 0, 0)]
    office, letters = (
        Office(lambda each: FAILED if each.sequence == 1 else ACCEPTED),
        DeadLetterQueue(),
    )
    deliver(
        office, [event(1), event(2), *(event(n, str(n)) for n in (3, 4))], letters, checkpoint=point
    )
    assert office.sequences() == [4]
    assert [told[3] for told in letters.kept] == [5, 0], "the fifth try was the last"


# --- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 8], ids=["windows of one", "one window"])
def test_a_large_event_waits_for_those_before_it(size: int) -> None:
    events = [event(1), event(2, payload=b"x" * 101), event(3)]
    letters, watch = DeadLetterQueue(), Watch()
    policy = {"max_event_bytes": 100, "batch_size": size}
    done = deliver(Office(lambda _: UNREACHABLE), events, letters, policy=policy, clock=watch)
    assert done.stopped is not None
    assert not letters.kept
    watch.sleep(done.stopped.retry_after)
    office = Office()
    deliver(office, events, letters, checkpoint=done.stopped.checkpoint, policy=policy, clock=watch)
    assert office.sequences() == [1]
    assert (letters.sequences("refused"), letters.sequences("waiting")) == ([2], [3])


# --- a while at a time ---------------------------------------------------------------------------


class Slow:
    """A destination that takes a second for each window."""

    def __init__(self, office: Office, watch: Watch) -> None:
        self._office, self._watch = office, watch

    def send(self, window: Sequence[Event]) -> list[Reply]:
        self._watch.sleep(1.0)
        return self._office.send(window)


def test_delivery_stops_by_itself_after_some_seconds_and_goes_on() -> None:
    office, watch, point = Office(), Watch(), DeliveryCheckpoint()
    events = rows(100)
    stops = 0
    while True:
        delivery = EventDelivery(
            Slow(office, watch).send, POLICY, DeadLetterQueue(), checkpoint=point, clock=watch
        )
        delivery.run([events])
        if delivery.stopped is None:
            break
        stops += 1
        assert (delivery.stopped.reason, delivery.stopped.retry_after) == ("", 0.0)
        assert not delivery.stopped.checkpoint.pending
        point = delivery.stopped.checkpoint
    assert stops == 2
    assert office.sequences() == list(range(1, 101))
    assert len(office.windows) == 13, "as many as without a stop"


def test_it_does_not_stop_when_nothing_is_left() -> None:
    office, watch = Office(), Watch()
    delivery = EventDelivery(Slow(office, watch).send, POLICY, DeadLetterQueue(), clock=watch)
    delivery.run([rows(40)])
    assert watch.now() == POLICY.seconds
    assert delivery.stopped is None


def test_it_does_not_stop_so_while_nothing_is_accepted() -> None:
    """Else nobody would ever see that it is an outage."""
    office, watch = Office(lambda _: UNREACHABLE), Watch()
    delivery = EventDelivery(Slow(office, watch).send, POLICY, DeadLetterQueue(), clock=watch)
    delivery.run([rows(40)])
    assert delivery.stopped is not None
    assert delivery.stopped.reason == UNREACHABLE.reason
    assert len(office.windows) == POLICY.attempts


# --- windows that end early ----------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 5.0], ids=["a window a round", "several"])
def test_what_a_channel_had_no_time_for_is_gone_on_with_at_once_and_in_order(
    seconds: float,
) -> None:
    """It has begun some events of a window, and says of the others that they were not sent."""
    office, letters = Office(), DeadLetterQueue()

    def send(window: Sequence[Event]) -> list[Reply]:
        rounds.watch.sleep(1.0)
        taken = office.send(window[:3])
        return [*taken, *[UNSENT] * len(window[3:])]

    events = [event(n, str(n % 5)) for n in range(1, 101)]
    rounds = Rounds(send, events, letters, policy={"attempts": 2, "seconds": seconds})
    assert rounds.run(until=60.0)
    assert not letters.kept
    assert sorted(office.sequences()) == list(range(1, 101)), "none twice"
    for row in range(5):
        own = [n for n in office.sequences() if n % 5 == row]
        assert own == sorted(own)
    assert (rounds.rounds, rounds.retries) == (0, 0), "nothing has failed"
    assert set(rounds.watch.naps) == {1.0}, "nobody has waited"


@pytest.mark.parametrize("first", [True, False], ids=["said first", "said last"])
def test_what_was_not_sent_tells_nothing_of_who_is_there(first: bool) -> None:
    def send(window: Sequence[Event]) -> list[Reply]:
        rest = [UNSENT] * (len(window) - 1)
        return [UNREACHABLE, *rest] if first else [*rest, UNREACHABLE]

    policy = msgspec.structs.replace(POLICY, schedule=Backoff(10.0, 30.0))
    delivery = EventDelivery(send, policy, DeadLetterQueue(), clock=Watch())
    delivery.run([rows(8)])
    assert delivery.stopped is not None
    assert (delivery.stopped.reason, delivery.stopped.reached) == (UNREACHABLE.reason, False)


# --- a while at a time, and failures -------------------------------------------------------------


@pytest.mark.parametrize("how", [FAILED, UNREACHABLE], ids=["failing", "unreachable"])
@pytest.mark.parametrize("seconds", [0.0, 2.5, 1e9])
def test_tries_are_counted_as_if_it_had_not_stopped(how: Reply, seconds: float) -> None:
    office, letters = (
        Office(lambda each: how if each.sequence == 3 else ACCEPTED),
        DeadLetterQueue(),
    )
    policy = {"batch_size": 1, "seconds": seconds}
    rounds = Rounds(office.send, rows(30), letters, policy=policy)
    rounds.send = Slow(office, rounds.watch).send
    assert rounds.run(until=300.0)
    assert [told[1:] for told in letters.kept] == [("refused", how.reason, 5)]
    assert sum(each.sequence == 3 for _, each in rounds.tried) == 5
