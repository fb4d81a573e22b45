"""What a key may ask at once, on a clock that the test moves."""

import pytest

from headrace.log import keys
from headrace.log.keys import Key, KeyLimits, KeyRequest
from headrace.serve.keyring import Bucket, Limiter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def key(**limits: float) -> Key:
    return keys.make(KeyRequest(limits=KeyLimits(**limits)), now=0).key  # type: ignore[arg-type]


def test_a_bucket_gives_a_seconds_worth_at_once_and_then_its_rate(clock: Clock) -> None:
    bucket = Bucket(10.0, clock)
    bucket.take(10)
    assert bucket.wait() == pytest.approx(0.1)
    clock.now += 0.1
    assert bucket.wait() == pytest.approx(0, abs=1e-9)
    clock.now += 3600
    bucket.take(10)  # no more than a second's worth was saved up
    assert bucket.wait() == pytest.approx(0.1)


def test_a_bucket_slower_than_one_a_second_still_gives_one(clock: Clock) -> None:
    bucket = Bucket(0.5, clock)
    assert bucket.wait() == 0
    bucket.take()
    assert bucket.wait() == pytest.approx(2.0)


def test_requests_beyond_the_rate_are_told_when_to_come_back(clock: Clock) -> None:
    limiter, limited = Limiter(clock), key(requests_per_second=2.0)
    assert [limiter.request(limited) for _ in range(3)] == [0, 0, pytest.approx(0.5)]
    # What was refused is not counted: whoever waits as told is served.
    assert limiter.request(limited) == pytest.approx(0.5)
    clock.now += 0.5
    assert limiter.request(limited) == 0


def test_events_are_paid_for_afterwards(clock: Clock) -> None:
    limiter, limited = Limiter(clock), key(events_per_second=100.0)
    assert limiter.spend(limited, 50) == 0
    assert limiter.spend(limited, 1050) == pytest.approx(10.01)
    clock.now += 10.01
    assert limiter.spend(limited, 0) == pytest.approx(0, abs=1e-9)


def test_connections_are_counted_while_they_stand(clock: Clock) -> None:
    limiter, limited = Limiter(clock), key(connections=2)
    assert [limiter.connect(limited) for _ in range(3)] == [True, True, False]
    limiter.disconnect(limited)
    assert limiter.connect(limited)
    assert not limiter.connect(limited)


def test_every_key_has_limits_of_its_own_and_most_have_none(clock: Clock) -> None:
    limiter = Limiter(clock)
    one, other, free = (
        key(requests_per_second=1.0, connections=1),
        key(requests_per_second=1.0, connections=1),
        key(),
    )
    assert limiter.request(one) == limiter.request(other) == 0
    assert limiter.connect(one)
    assert limiter.connect(other)
    assert limiter.request(one) > 0
    for _ in range(1000):
        assert limiter.request(free) == limiter.spend(free, 1000) == 0
        assert limiter.connect(free)
