"""Pages that readers share: the same for those who want the same, and for nobody else."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.formats import Canonical
from headrace.formats.etl import Etl
from headrace.formats.notification import Notification
from headrace.serve import page as pages
from headrace.serve import subscription
from headrace.serve.feed import READ_ON_LOOP, LogFeed
from headrace.serve.filter import Filter
from headrace.serve.page import FeedPage, PageCache, PageEvent, PageKey
from headrace.serve.permissions import Permissions
from headrace.serve.subscription import Subscription
from tests.changes import Writer, opened_writer

ORDERS = Filter(tables=("orders",))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    with opened_writer(tmp_path / "log") as writer:
        yield writer


@pytest.fixture
def feed(writer: Writer) -> LogFeed:
    for number in range(10):
        writer.put("orders" if number % 2 else "users", str(number))
    return LogFeed(writer.log)


def live(*subscriptions: Subscription) -> list[FeedPage]:
    """What each gets, one after another."""

    async def read() -> list[FeedPage]:
        return [await each.live() for each in subscriptions]

    return asyncio.run(read())


def test_readers_who_want_the_same_from_the_same_place_get_one_page(feed: LogFeed) -> None:
    readers = [Subscription(feed, Notification(), filter=ORDERS, after=2) for _ in range(3)]
    first, second, third = live(*readers)
    assert first is second is third
    assert [each.sequence for each in first.events] == [4, 6, 8, 10]
    assert [each.scanned for each in readers] == [10, 10, 10]
    calls: list[FeedPage] = []

    def make(page: FeedPage) -> bytes:
        calls.append(page)
        return b"frames"

    assert [each.once(make) for each in (first, second, third)] == [b"frames"] * 3
    assert calls == [first]


@pytest.fixture
def long_feed(writer: Writer) -> LogFeed:
    """With so many changes that readers take turns while each reads them."""
    for number in range(2 * READ_ON_LOOP):
        writer.put("orders" if number % 2 else "users", str(number))
    return LogFeed(writer.log)


def test_readers_who_ask_at_once_wait_for_one_page(long_feed: LogFeed) -> None:
    readers = [Subscription(long_feed, Notification(), filter=ORDERS, after=2) for _ in range(3)]

    async def read() -> list[FeedPage]:
        return await asyncio.gather(*(each.live() for each in readers))

    first, second, third = asyncio.run(read())
    assert first is second is third
    assert [each.scanned for each in readers] == [2 * READ_ON_LOOP] * 3


def test_a_page_whose_maker_leaves_is_made_by_the_next(long_feed: LogFeed) -> None:
    one, other = (Subscription(long_feed, Notification(), filter=ORDERS, after=2) for _ in range(2))

    async def read() -> FeedPage:
        leaves, stays = (asyncio.create_task(each.live()) for each in (one, other))
        await asyncio.sleep(0)  # both have begun
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        return await stays

    found = [each.sequence for each in asyncio.run(read()).events]
    assert found == list(range(4, 2 * READ_ON_LOOP + 1, 2))


def test_a_page_that_came_to_nothing_in_time_holds_nobody_up(feed: LogFeed) -> None:
    """A reader may be due to send a sign of life just when it begins to make a page."""
    late, other = (Subscription(feed, Notification(), filter=ORDERS, after=2) for _ in range(2))

    async def read() -> list[FeedPage]:
        past = asyncio.get_running_loop().time() - 1
        return [await late.live(until=past), await late.live(), await other.live()]

    nothing, *pages = asyncio.run(read())
    assert (nothing.events, nothing.scanned) == ([], 2)
    assert [each.scanned for each in pages] == [10, 10]


def test_readers_behind_at_different_places_share_pages_from_their_second_one_on(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "PAGE_SPAN", 8)
    for number in range(40):
        writer.put("orders" if number % 2 else "users", str(number))
    feed = LogFeed(writer.log)
    readers = [Subscription(feed, Notification(), filter=ORDERS, after=n) for n in (0, 3, 5)]
    rounds = [live(*readers) for _ in range(5)]
    assert [each.scanned for each in rounds[0]] == [8, 8, 8]
    for first, second, third in rounds[1:]:
        assert first is second is third
    got = [each.sequence for pages in rounds for each in pages[0].events]
    assert got == list(range(2, 41, 2))


@pytest.mark.parametrize(
    ("filter", "grant", "after"),
    [
        (Filter(tables=("users",)), Permissions(), 0),
        (Filter(), Permissions(), 0),
        (ORDERS, Permissions(tables=("users",)), 0),
        (ORDERS, Permissions(tenant="t1"), 0),
        (ORDERS, Permissions(tenant="t2"), 0),
        (ORDERS, Permissions(), 1),
    ],
)
def test_whoever_wants_or_may_see_something_else_gets_another_page(
    feed: LogFeed, filter: Filter, grant: Permissions, after: int
) -> None:
    one = Subscription(feed, Notification(), filter=ORDERS, after=0)
    other = Subscription(feed, Notification(), filter=filter, after=after, permissions=grant)
    alone = Subscription(
        LogFeed(feed.log), Notification(), filter=filter, after=after, permissions=grant
    )
    first, second = live(one, other)
    assert first is not second
    assert second == live(alone)[0]


def test_another_format_gets_another_page(feed: LogFeed) -> None:
    first, second = live(
        *(
            Subscription(feed, each, filter=ORDERS, after=0)
            for each in (Notification(), Canonical())
        )
    )
    assert first.payloads != second.payloads


def test_a_stream_that_remembers_what_it_told_is_not_shared(feed: LogFeed) -> None:
    first, second = live(*(Subscription(feed, Etl(), filter=ORDERS, after=0) for _ in range(2)))
    assert first is not second
    assert len(first.events) == len(second.events) > 0


def test_what_was_trimmed_meanwhile_is_told_as_a_gap(feed: LogFeed, writer: Writer) -> None:
    early, late = (Subscription(feed, Notification(), filter=ORDERS, after=0) for _ in range(2))
    live(early)
    writer.log.trim(5)
    (page,) = live(late)
    assert page.gap == (1, 4, "trim")
    assert [each.sequence for each in page.events] == [6, 8, 10]


def test_readers_go_as_far_as_they_were_woken_for(feed: LogFeed, writer: Writer) -> None:
    one, other = (Subscription(feed, Notification(), filter=ORDERS, after=0) for _ in range(2))
    (first,) = live(one)
    writer.put("orders", "meanwhile")
    (second,) = live(other)
    assert second is first
    # Whoever asks once gets all there is.
    assert asyncio.run(other.next(10)).scanned == 11


def test_no_more_pages_are_kept_than_the_bounds_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGES_KEPT", 3)
    monkeypatch.setattr(pages, "BYTES_KEPT", 100)
    kept = PageCache()
    kind = kept.reader_class("everything")
    assert kept.reader_class("everything") is kind
    assert kept.reader_class("something else") is not kind

    def place(number: int) -> PageKey:
        return PageKey(kind, number, number + 1, 256, 1024)

    def found(number: int) -> FeedPage | None:
        return asyncio.run(kept.found(place(number)))

    def keep(number: int, size: int) -> None:
        kept.keep(place(number), FeedPage([PageEvent(number + 1, b"x" * size)], number + 1))

    for number in range(5):
        keep(number, 10)
    assert [number for number in range(5) if found(number)] == [2, 3, 4]
    keep(5, 85)
    assert [number for number in range(6) if found(number)] == [4, 5]
    keep(5, 20)  # instead of the one that was there
    keep(6, 60)
    assert [number for number in range(7) if found(number)] == [4, 5, 6]
    kept.clear()
    assert found(6) is None
