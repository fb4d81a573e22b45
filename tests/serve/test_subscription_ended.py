"""A key that ends while somebody reads: what was not handed over is not passed over either."""

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.change.event import Op
from headrace.formats import Canonical
from headrace.formats.etl import Etl
from headrace.serve.access import Access
from headrace.serve.feed import BLOCK, LogFeed
from headrace.serve.filter import Filter
from headrace.serve.permissions import Permissions
from headrace.serve.sse import Pace, frames, gap_event
from headrace.serve.subscription import FeedPage, LogGap, Subscription
from tests.changes import Writer, make_change, opened_writer

CHANGES = 5 * BLOCK


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    with opened_writer(tmp_path / "log") as writer:
        yield writer


def ending(looks: int) -> Permissions:
    """A grant that ends after it was looked at so often."""
    left = itertools.count(looks, -1)
    return Permissions(valid=lambda: next(left) > 0)


def attempts(run: Callable[[Permissions], tuple[int, int]]) -> None:
    """Let it end at every place there is; it must have handed over all that it says it has."""
    looks = 0
    while True:
        handed, scanned = run(ending(looks))
        assert handed == scanned, f"after {looks} looks"
        if scanned == CHANGES:
            return
        looks += 1


def test_a_page_whose_key_ends_passes_over_nothing(writer: Writer) -> None:
    writer.put_many("users", CHANGES)
    feed = LogFeed(writer.log)

    def run(grant: Permissions) -> tuple[int, int]:
        subscription = Subscription(feed, Canonical(), filter=Filter(), after=0, permissions=grant)
        page = asyncio.run(subscription.page(10_000))
        assert page.scanned == subscription.scanned
        return len(page.events), page.scanned

    attempts(run)


def test_a_page_of_a_format_with_a_memory_passes_over_nothing_either(writer: Writer) -> None:
    writer.put_many("users", CHANGES)
    feed = LogFeed(writer.log)

    def run(grant: Permissions) -> tuple[int, int]:
        subscription = Subscription(feed, Etl(), filter=Filter(), after=0, permissions=grant)
        page = asyncio.run(subscription.page(10_000))
        kinds = [json.loads(payload)["type"] for payload in page.payloads]
        return kinds.count("Insert"), page.scanned

    attempts(run)


def test_a_stream_whose_key_ends_names_no_sequence_beyond_what_it_sent(writer: Writer) -> None:
    tables = writer.table("users"), writer.table("orders")  # each has every second change
    changes = [
        make_change(table=tables[n % 2], key={"id": "1"}, after={}, ordinal=n, last=n == CHANGES)
        for n in range(1, CHANGES + 1)
    ]
    writer.append(changes)
    feed, filter = LogFeed(writer.log), Filter(tables=("users",))

    async def streamed(grant: Permissions) -> bytes:
        subscription = Subscription(
            feed, Canonical(), filter=filter, after=0, upto=CHANGES, permissions=grant
        )
        sent = frames(subscription, Access(), pace=Pace(idle=60.0), gap=gap_event)
        return b"".join([frame async for frame in sent])

    def run(grant: Permissions) -> tuple[int, int]:
        told = asyncio.run(streamed(grant))
        named = [int(id) for id in re.findall(rb"^id: (\d+)$", told, re.MULTILINE)]
        return 2 * told.count(b"data: "), named[-1] if named else 0

    attempts(run)


def test_nothing_that_was_read_goes_out_after_the_key_has_ended(writer: Writer) -> None:
    writer.put_many("users", CHANGES)
    feed, ended = LogFeed(writer.log), False
    read = feed.read

    async def reading(after: int, upto: int) -> object:
        nonlocal ended
        entries = await read(after, upto)
        ended = after > 0  # while the second block was read
        return entries

    feed.read = reading  # type: ignore[method-assign, assignment]
    grant = Permissions(valid=lambda: not ended)
    subscription = Subscription(feed, Canonical(), filter=Filter(), after=0, permissions=grant)
    page = asyncio.run(subscription.page(10_000))
    assert (page.events, page.scanned) == ([], 0)


def test_a_second_gap_is_told_with_the_first(writer: Writer) -> None:
    """A reader who waits and finds nothing may miss changes twice before there is an answer."""
    writer.put_many("users", 10)
    writer.log.trim(4)
    feed = LogFeed(writer.log)
    filter = Filter(operations=frozenset({Op.DELETE}))
    subscription = Subscription(feed, Canonical(), filter=filter, after=0)
    waits = 0

    async def arrival(until: float) -> bool:
        nonlocal waits
        waits += 1
        writer.put_many("users", 5)
        writer.log.trim(writer.log.latest_sequence - 1)
        return waits == 1

    subscription._arrival = arrival  # type: ignore[method-assign]
    page: FeedPage = asyncio.run(subscription.page(10, wait=60))
    assert page.gap == LogGap(1, 13, "trim")
    assert (page.events, page.scanned) == ([], 15)
