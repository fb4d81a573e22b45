"""What every channel of a push sink promises, as tests: subclass `ChannelContract`.

    class TestMine(ChannelContract):
        @pytest.fixture
        def trial(self) -> Iterator[ChannelTrial]:
            with MyServer() as server:
                sink = Mine(name="mine", servers=server.address, password=Secret("s3cret-word"))
                yield ChannelTrial(
                    sink,
                    stored=lambda table: [each.id for each in server.read(table)],
                    stop=server.kill,
                    start=server.start,
                    refuse=server.forbid,
                    secrets=("s3cret-word",),
                )

Each test uses tables of its own, so a server may be shared between tests. What a destination cannot
do (be stopped, refuse a table) is left out of the trial, and its tests are skipped. pytest is not
needed to import it; a push sink needs `pip install 'headrace[spark]'`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import SkipTest
from uuid import uuid4

from ..errors import SinkUnavailable
from ..sinks.push import ACCEPTED, Channel, DeliveryOutcome, Event, PushSettings, Reply
from .processes import wait_until

_COMMIT_TIME = 1_731_683_402_123_456
_LARGE = 500_000  # bytes, unless the sink sends only smaller events
_PATIENCE = 120.0  # seconds for a destination that was started


@dataclass(slots=True)
class ChannelTrial:
    """A push sink on trial, and what shows its work."""

    sink: PushSettings  # of a destination that is there and accepts every table
    stored: Callable[[str], Iterable[str]]  # ids of the events of a table, in order, with repeats
    stop: Callable[[], None] | None = None  # make the destination unreachable
    start: Callable[[], None] | None = None  # and reachable again
    refuse: Callable[[str], None] | None = None  # let it accept no event of a table, for ever
    secrets: Sequence[str] = ()  # of the sink's settings; no message may show them


class ChannelContract:
    """The tests; a subclass gives the fixture `trial`."""

    # -- replies ----------------------------------------------------------------------------------

    def test_each_event_gets_exactly_one_reply(self, trial: ChannelTrial) -> None:
        events = _events(_table(), 100, rows=7)
        with _opened(trial.sink) as channel:
            assert len(channel.send(events)) == len(events)
            assert len(channel.send(events[:1])) == 1

    def test_an_accepted_event_is_stored(self, trial: ChannelTrial) -> None:
        """ACCEPTED comes after the destination has confirmed: nothing is waited for here."""
        table = _table()
        events = _events(table, 50, rows=50)
        with _opened(trial.sink) as channel:
            replies = channel.send(events)
            stored = set(trial.stored(table))
        assert {event.id for event in _accepted(events, replies)} == {each.id for each in events}
        assert stored == {each.id for each in events}

    def test_the_events_of_a_row_keep_their_order(self, trial: ChannelTrial) -> None:
        table = _table()
        events = _events(table, 300, rows=5)
        with _opened(trial.sink) as channel:
            for begin in range(0, len(events), 100):
                assert set(channel.send(events[begin : begin + 100])) == {ACCEPTED}
        _expect_in_order(events, trial.stored(table))

    def test_an_event_that_is_sent_again_has_the_same_id(self, trial: ChannelTrial) -> None:
        table = _table()
        events = _events(table, 3, rows=1)
        for _ in range(2):
            with _opened(trial.sink) as channel:
                assert set(channel.send(events)) == {ACCEPTED}
        assert set(trial.stored(table)) == {each.id for each in events}

    def test_a_large_event_is_accepted(self, trial: ChannelTrial) -> None:
        table = _table()
        size = min(trial.sink.max_event_bytes or _LARGE, _LARGE)
        events = _events(table, 3, rows=3)
        events[1] = events[1]._replace(payload=b'"%b"' % (b"x" * (size - 2)))
        with _opened(trial.sink) as channel:
            assert list(channel.send(events)) == [ACCEPTED] * 3
        assert sorted(trial.stored(table)) == sorted(each.id for each in events)

    # -- failures ---------------------------------------------------------------------------------

    def test_a_refused_event_does_not_stop_the_others(self, trial: ChannelTrial) -> None:
        if trial.refuse is None:
            raise SkipTest("the destination refuses no table")
        refused, table = _table(), _table()
        trial.refuse(refused)
        bad, good = _events(refused, 2, rows=1), _events(table, 4, rows=2)
        with _opened(trial.sink) as channel:
            first, *rest, second = channel.send([bad[0], *good, bad[1]])
            alone = channel.send(bad[:1])
        assert rest == [ACCEPTED] * len(good)
        _expect_in_order(good, trial.stored(table))
        assert ACCEPTED not in (first, second), "the row's next event must not get ahead"
        assert first.outcome in (DeliveryOutcome.REFUSED, DeliveryOutcome.FAILED)
        # REFUSED only alone: of several it may be another one that was refused.
        assert [each.outcome for each in alone] in (
            [DeliveryOutcome.REFUSED],
            [DeliveryOutcome.FAILED],
        )
        assert first.reason, "a dead letter says why"

    def test_a_destination_that_is_away_is_unreachable_and_refuses_nothing(
        self, trial: ChannelTrial
    ) -> None:
        table = _table()
        events = _events(table, 10, rows=3)
        with _away(trial):
            replies = _sent(trial.sink, events)
            outcomes = {reply.outcome for reply in replies}
            assert DeliveryOutcome.UNREACHABLE in outcomes
            assert outcomes <= {DeliveryOutcome.UNREACHABLE, DeliveryOutcome.UNSENT}
        _until_accepted(trial.sink, events)
        _expect_in_order(events, trial.stored(table))

    def test_a_channel_whose_destination_goes_away_accepts_nothing(
        self, trial: ChannelTrial
    ) -> None:
        table = _table()
        first, *events = _events(table, 10, rows=3)
        with _opened(trial.sink) as channel:
            assert list(channel.send([first])) == [ACCEPTED]
            with _away(trial):
                try:
                    replies = channel.send(events)
                except SinkUnavailable as error:
                    replies = [Reply(DeliveryOutcome.UNREACHABLE, str(error))]
                assert not _accepted(events, replies)
                assert DeliveryOutcome.REFUSED not in {reply.outcome for reply in replies}
        _until_accepted(trial.sink, events)
        _expect_in_order([first, *events], trial.stored(table))

    def test_no_message_shows_a_secret(self, trial: ChannelTrial) -> None:
        shown = [repr(trial.sink), str(trial.sink)]
        if trial.stop is not None:
            with _away(trial):
                replies = _sent(trial.sink, _events(_table(), 2, rows=2))
                shown += [reply.reason for reply in replies]
        for secret in trial.secrets:
            assert not [text for text in shown if secret in text]

    # -- the channel itself -----------------------------------------------------------------------

    def test_a_channel_may_be_closed_twice(self, trial: ChannelTrial) -> None:
        channel = trial.sink.connect()
        assert set(channel.send(_events(_table(), 2, rows=1))) == {ACCEPTED}
        channel.close()
        channel.close()

    def test_channels_of_several_tasks_work_at_once(self, trial: ChannelTrial) -> None:
        """Each task has a channel of its own, and rows of its own, from a pickled sink."""
        table = _table()
        events = _events(table, 20, rows=2)
        with _opened(_copied(trial.sink)) as one, _opened(_copied(trial.sink)) as other:
            for begin in range(0, len(events), 4):
                window = events[begin : begin + 4]
                assert set(one.send(window[::2])) == {ACCEPTED}
                assert set(other.send(window[1::2])) == {ACCEPTED}
        _expect_in_order(events, trial.stored(table))


def _table() -> str:
    """A table of a test's own."""
    return f"t_{uuid4().hex[:10]}"


def _events(table: str, count: int, *, rows: int) -> list[Event]:
    return [
        Event(
            sequence=number + 1,
            at=0,
            id=f"evt_{table}_{number}",
            row=f"shop|public.{table}:{number % rows}",
            op="INSERT",
            source="shop",
            schema="public",
            table=table,
            key=f'{{"id":{number % rows}}}',
            commit_time=_COMMIT_TIME,
            payload=f'{{"id":"evt_{table}_{number}"}}'.encode(),
        )
        for number in range(count)
    ]


@contextmanager
def _opened(sink: PushSettings) -> Iterator[Channel]:
    channel = sink.connect()
    try:
        yield channel
    finally:
        channel.close()


@contextmanager
def _away(trial: ChannelTrial) -> Iterator[None]:
    if trial.stop is None or trial.start is None:
        raise SkipTest("the destination cannot be stopped")
    trial.stop()
    try:
        yield
    finally:
        trial.start()


def _sent(sink: PushSettings, events: Sequence[Event]) -> Sequence[Reply]:
    """The replies of a new channel, as delivery gets them."""
    try:
        with _opened(sink) as channel:
            return channel.send(events)
    except SinkUnavailable as error:
        return [Reply(DeliveryOutcome.UNREACHABLE, str(error))] * len(events)


def _until_accepted(sink: PushSettings, events: Sequence[Event]) -> None:
    wait_until(
        lambda: set(_sent(sink, events)) == {ACCEPTED},
        timeout=_PATIENCE,
        message="a destination that is back accepts events",
    )


def _accepted(events: Sequence[Event], replies: Sequence[Reply]) -> list[Event]:
    return [
        event
        for event, reply in zip(events, replies, strict=False)
        if reply.outcome is DeliveryOutcome.ACCEPTED
    ]


def _expect_in_order(events: Sequence[Event], stored: Iterable[str]) -> None:
    """All events are stored; without repeats, those of each row are in order."""
    found = list(dict.fromkeys(stored))
    rows: dict[str, list[str]] = {}
    for event in events:
        rows.setdefault(event.row, []).append(event.id)
    known = {event.id: event.row for event in events}
    assert set(found) == set(known)
    for row, ids in rows.items():
        assert [each for each in found if known[each] == row] == ids


def _copied(sink: PushSettings) -> PushSettings:
    copied: PushSettings = pickle.loads(pickle.dumps(sink))
    assert copied == sink
    return copied
