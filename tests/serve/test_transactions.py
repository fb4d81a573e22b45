"""Formats that need whole transactions get them, wherever pages begin and end."""

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.change import event
from headrace.change.event import Change
from headrace.errors import LogError
from headrace.formats import Rendered
from headrace.log import Log
from headrace.serve import renderings
from headrace.serve.feed import BLOCK, LogFeed
from headrace.serve.filter import Filter
from headrace.serve.renderings import RenderedTransaction
from headrace.serve.subscription import LogGap, Subscription
from tests.changes import Writer, make_change, opened_writer
from tests.effort import times

EVERY = Filter()


@dataclass(frozen=True)
class Folded:
    """Every second change of a transaction and how many there are; the first is told twice."""

    seen: list[tuple[int, int]] = field(default_factory=list, compare=False)  # first and last
    padding: int = 0

    name: ClassVar[str] = "folded"
    media_type: ClassVar[str] = "application/json"

    def render(self, transaction: Sequence[Change]) -> Sequence[Rendered]:
        self.seen.append((transaction[0].sequence, transaction[-1].sequence))
        events = []
        for change in transaction:
            if change.ordinal % 2:
                told = {"ordinal": change.ordinal, "of": len(transaction), "": "x" * self.padding}
                event = Rendered(change.sequence, json.dumps(told).encode())
                events += [event, event] if change.ordinal == 1 else [event]
        return events


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    with opened_writer(tmp_path / "log") as writer:
        yield writer


def expected(log: Log, *, after: int = 0) -> list[Rendered]:
    """Every event of a log, transaction by transaction."""
    whole = itertools.groupby(
        log.read(after, limit=1_000_000), key=lambda c: c.sequence - c.ordinal
    )
    return [event for _, changes in whole for event in Folded().render(list(changes))]


def read(subscription: Subscription, limit: int) -> list[Any]:
    """Everything there is, in pages of that many events."""

    async def pages() -> list[Any]:
        deliveries: list[Any] = []
        while subscription.scanned < subscription.end:
            deliveries += (await subscription.next(limit)).events
        return deliveries

    return asyncio.run(pages())


def of(payloads: Sequence[Any]) -> list[int]:
    """How many changes each event says that its transaction has."""
    return [json.loads(delivery.payload)["of"] for delivery in payloads]


def test_pages_of_any_size_from_anywhere_hold_the_same_events(writer: Writer) -> None:
    feed, log = LogFeed(writer.log), writer.log

    @settings(
        max_examples=times(18, nightly=180),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.data())
    def check(sizes: list[int], data: st.DataObject) -> None:
        start = log.latest_sequence
        for size in sizes:
            writer.put_many("users", size)
        latest = log.latest_sequence
        after, upto = sorted(start + data.draw(st.integers(0, latest - start)) for _ in "..")
        wanted = [e for e in expected(log, after=start) if after < e.sequence <= upto]
        for limit in (1, 2, 3, 7, 1000):
            subscription = Subscription(feed, Folded(), filter=EVERY, after=after, upto=upto)
            assert read(subscription, limit) == wanted

    check()


def test_a_transaction_is_rendered_once_for_all_pages_and_subscriptions(writer: Writer) -> None:
    writer.put_many("users", 3 * BLOCK)
    writer.put_many("users", 5)
    feed, format = LogFeed(writer.log), Folded()
    for after in (0, 100):
        for limit in (50, 1000):
            read(Subscription(feed, format, filter=EVERY, after=after), limit)
    # Every request is a new subscription with an equal format.
    for after in range(3 * BLOCK + 5):
        read(Subscription(feed, Folded(), filter=EVERY, after=after, upto=after + 1), 1)
    assert format.seen == [(1, 3 * BLOCK), (3 * BLOCK + 1, 3 * BLOCK + 5)]


def test_two_that_ask_at_once_wait_for_one_rendering(writer: Writer) -> None:
    writer.put_many("users", 2 * BLOCK)
    feed, format = LogFeed(writer.log), Folded()

    async def both() -> list[Any]:
        subscriptions = [Subscription(feed, format, filter=EVERY, after=n) for n in (0, 7, 300)]
        return await asyncio.gather(*(each.next(10_000) for each in subscriptions))

    whole, *_ = asyncio.run(both())
    assert of(whole.events) == [2 * BLOCK] * (BLOCK + 1)
    assert format.seen == [(1, 2 * BLOCK)]


def test_a_filter_looks_at_the_change_where_an_event_stands(writer: Writer) -> None:
    users, orders = writer.table("users"), writer.table("orders")
    writer.append(
        [
            make_change(table=table, key={"id": "1"}, after={}, ordinal=n, last=n == 6)
            for n, table in enumerate([users, users, orders, users, users, orders], 1)
        ]
    )
    feed = LogFeed(writer.log)
    for wanted, sequences in [
        (Filter(tables=("orders",)), [3]),
        (Filter(tables=("users",)), [1, 1, 5]),
        (Filter(key_prefix="orders:1"), [3]),
    ]:
        for limit in (1, 2, 10):
            found = read(Subscription(feed, Folded(), filter=wanted, after=0), limit)
            assert [delivery.sequence for delivery in found] == sequences
            assert set(of(found)) == {6}


# --- large ones ----------------------------------------------------------------------------------


def test_a_large_transaction_comes_in_pieces_counted_from_its_start(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event, "PIECE", 5)
    writer.put_many("users", 3)
    writer.put_many("users", 12)
    writer.put_many("users", 2)
    pieces = [(1, 3), (4, 8), (9, 13), (14, 15), (16, 17)]
    for after in range(writer.log.latest_sequence):
        format = Folded()
        found = read(Subscription(LogFeed(writer.log), format, filter=EVERY, after=after), 2)
        assert format.seen == [piece for piece in pieces if piece[1] > after]
        assert all(delivery.sequence > after for delivery in found)
    assert of(found) == []
    whole = read(Subscription(LogFeed(writer.log), Folded(), filter=EVERY, after=0), 1000)
    assert of(whole) == [3, 3, 3, 5, 5, 5, 5, 5, 5, 2, 2, 2, 2][: len(whole)]


def test_pieces_are_of_a_hundred_thousand_changes() -> None:
    change = make_change(ordinal=100_000, last=False, sequence=100_500)
    assert event.ends_piece(change)
    assert event.piece_begin(change.sequence, change.ordinal) == 501
    following = make_change(ordinal=100_001, last=False, sequence=100_501)
    assert not event.ends_piece(following)
    assert event.piece_begin(following.sequence, following.ordinal) == 100_501


@pytest.mark.parametrize("count", [4, 2 * BLOCK])
def test_what_no_memory_could_hold_is_refused_after_what_stands_before_it(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(renderings, "LARGEST", 3 * len(b'{"id":"1"}'))
    writer.put_many("users", 3)
    writer.put_many("users", count)
    for after, limit in [(0, 1), (0, 1000), (2, 1000)]:
        subscription = Subscription(LogFeed(writer.log), Folded(), filter=EVERY, after=after)
        found: list[Any] = []
        while subscription.scanned < 3:
            found += asyncio.run(subscription.next(limit)).events
        assert of(found) == [3, 3, 3][after:]
        with pytest.raises(LogError, match="transaction 2, from change 4 on") as caught:
            asyncio.run(subscription.next(limit))
        assert subscription.scanned == 3
        assert "another format than folded" in caught.value.hint


# --- what is kept --------------------------------------------------------------------------------


def test_what_is_kept_is_bounded_in_bytes(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderings, "BYTES_KEPT", 20_000)
    for _ in range(50):
        writer.put_many("users", 4)
    feed, format = LogFeed(writer.log), Folded(padding=500)
    read(Subscription(feed, format, filter=EVERY, after=0), 10)
    kept = feed.renderings._kept.values()
    assert 5 < len(kept) < 15
    assert sum(rendering.size for rendering in kept) == feed.renderings._size <= 20_000
    assert len(format.seen) == 50


def test_what_is_kept_is_bounded_in_number() -> None:
    kept = renderings.Renderings(log=None)  # type: ignore[arg-type]
    for begin in range(1, renderings.KEPT + 11):
        kept.keep(0, RenderedTransaction(begin, begin, begin, {}, 0))
    assert kept.get(0, make_change(sequence=10)) is None
    assert kept.get(0, make_change(sequence=11)) is not None
    assert len(kept._kept) == renderings.KEPT


def test_one_that_is_kept_twice_counts_once() -> None:
    kept = renderings.Renderings(log=None)  # type: ignore[arg-type]
    for _ in range(2):
        kept.keep(0, RenderedTransaction(1, 1, 2, {}, 700))
    assert kept._size == 700


def test_readers_of_large_transactions_do_not_undo_each_others_work(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderings, "BYTES_KEPT", 1)
    writer.put_many("users", 2 * BLOCK)
    writer.put_many("users", 2 * BLOCK)
    feed, format = LogFeed(writer.log), Folded()

    async def in_turn() -> None:
        readers = [
            Subscription(feed, format, filter=EVERY, after=after, upto=after + 2 * BLOCK)
            for after in (0, 2 * BLOCK)
        ]
        while not all(reader.complete for reader in readers):
            for reader in readers:
                await reader.next(10)

    asyncio.run(in_turn())
    assert format.seen == [(1, 2 * BLOCK), (2 * BLOCK + 1, 4 * BLOCK)]


# --- what is trimmed -----------------------------------------------------------------------------


@pytest.mark.requirement("C-05")
def test_the_rest_of_a_trimmed_transaction_is_rendered_as_it_is(writer: Writer) -> None:
    writer.put_many("users", 9)
    writer.log.trim(4)
    for limit in (1, 3, 100):
        feed, format = LogFeed(writer.log), Folded()
        page = asyncio.run(Subscription(feed, format, filter=EVERY, after=1).next(limit))
        assert page.gap == LogGap(2, 3, "trim")
        assert set(of(page.events)) == {6}
        rest = Subscription(feed, format, filter=EVERY, after=page.scanned)
        assert set(of(read(rest, limit))) <= {6}
        assert format.seen == [(4, 9)]


@pytest.mark.requirement("C-05")
def test_what_is_trimmed_while_it_is_read_is_announced(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.put_many("users", 9)
    feed = LogFeed(writer.log)
    reading = feed.renderings.read

    async def after_a_trim(*asked: Any) -> RenderedTransaction | None:
        writer.log.trim(6)
        return await reading(*asked)

    monkeypatch.setattr(feed.renderings, "read", after_a_trim)
    page = asyncio.run(Subscription(feed, Folded(), filter=EVERY, after=2).next(100))
    assert page.gap == LogGap(3, 5, "trim")
    assert [delivery.sequence for delivery in page.events] == [7, 9]
    assert set(of(page.events)) == {4}


@pytest.mark.requirement("C-05")
@pytest.mark.parametrize("count", [9, 2 * BLOCK])
def test_what_has_begun_to_be_told_goes_on_as_it_began(writer: Writer, count: int) -> None:
    writer.put_many("users", count)
    feed, format = LogFeed(writer.log), Folded()
    subscription = Subscription(feed, format, filter=EVERY, after=0)
    begun = asyncio.run(subscription.next(1))
    assert of(begun.events) == [count] * 2
    writer.log.trim(3)
    # For this reader, for one that asks for the next page, and for one that trims meet again.
    assert set(of(asyncio.run(subscription.next(1)).events)) == {count}
    following = Subscription(feed, format, filter=EVERY, after=2)
    assert set(of(asyncio.run(following.next(2)).events)) == {count}
    writer.log.trim(6)
    gap = asyncio.run(subscription.next(1000))
    assert (gap.gap, set(of(gap.events))) == (LogGap(4, 5, "trim"), {count})
    assert set(of(read(Subscription(feed, format, filter=EVERY, after=6), 1000))) == {count}
    assert format.seen == [(1, count)]


@pytest.mark.requirement("C-05")
def test_a_rest_that_was_rendered_stays_as_it_is_when_more_is_trimmed(writer: Writer) -> None:
    writer.put_many("users", 9)
    writer.log.trim(3)
    feed, format = LogFeed(writer.log), Folded()
    first = asyncio.run(Subscription(feed, format, filter=EVERY, after=2).next(1))
    assert of(first.events) == [7]
    writer.log.trim(5)
    rest = read(Subscription(feed, format, filter=EVERY, after=4), 100)
    assert set(of(rest)) == {7}
    assert format.seen == [(3, 9)]


def test_a_log_that_is_trimmed_whole_is_a_gap(writer: Writer) -> None:
    writer.put_many("users", 9)
    writer.log.trim(10)
    page = asyncio.run(Subscription(LogFeed(writer.log), Folded(), filter=EVERY, after=2).next(100))
    assert (page.gap, page.events, page.scanned) == (LogGap(3, 9, "trim"), [], 9)


def test_changes_apart_from_their_transaction_are_told_of_as_an_error(writer: Writer) -> None:
    users = writer.table("users")
    writer.put_many("users", 3)
    writer.append([make_change(table=users, ordinal=3)])
    with pytest.raises(LogError, match="change 4 does not stand beside"):
        read(Subscription(LogFeed(writer.log), Folded(), filter=EVERY, after=3), 10)
