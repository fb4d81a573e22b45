"""The changes as the command line reads them: from the running server, or from the disk."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

from ..change.event import Op
from ..client.client import EventPage, PageRequest
from ..formats.catalogue import Formats
from ..log import LogReader
from ..serve.feed import LogFeed
from ..serve.filter import Filter
from ..serve.subscription import Subscription

_PAGE = 1000
_WIDER = 8  # times as many changes are looked through when too few of them were wanted
_NEAR = 100  # sequences that are looked at for one that has a change


class Changes(Protocol):
    """A place to read changes from."""

    def pages(self, after: int, upto: int | None, wanted: PageRequest) -> Iterator[EventPage]:
        """What follows `after`, page after page, as one stream; without `upto` for ever."""
        ...


class DiskChanges:
    """Reads the log itself, also while another process writes it."""

    def __init__(self, reader: LogReader, formats: Formats) -> None:
        self._reader = reader
        self._formats = formats

    def pages(self, after: int, upto: int | None, wanted: PageRequest) -> Iterator[EventPage]:
        """What follows `after`, page after page, as one stream; without `upto` for ever."""
        format = self._formats.named(wanted.format, markers=wanted.preserve_transactions)
        subscription = Subscription(
            LogFeed(self._reader),
            format,
            filter=Filter(tables=wanted.tables, operations=frozenset(map(Op, wanted.operations))),
            after=after,
            upto=upto,
        )
        with asyncio.Runner() as loop:
            while True:
                page = loop.run(subscription.next(_PAGE))
                yield EventPage(
                    page.payloads, f"{page.gap.first}-{page.gap.last}" if page.gap else ""
                )
                if subscription.complete:
                    return
                self._reader.wait_beyond(subscription.scanned)


def follow(
    changes: Changes, after: int, wanted: PageRequest, *, upto: int | None = None, limit: int | None
) -> Iterator[EventPage]:
    """Page after page, until `upto` or until there were `limit` events."""
    left = limit
    if left == 0:
        return
    for page in changes.pages(after, upto, wanted):
        yield page._replace(events=page.events[:left])
        if left is not None:
            left -= len(page.events)
            if left <= 0:
                return


class _Captured(msgspec.Struct):
    """What is looked at of a canonical change."""

    sequence: int
    captured_at: int


def before_last(changes: Changes, count: int, latest: int, wanted: PageRequest) -> int:
    """The sequence after which the last `count` wanted changes come."""
    if not (wanted.tables or wanted.operations):
        return max(latest - count, 0)
    plain = PageRequest(wanted.tables, operations=wanted.operations)
    span = count
    while count:
        after = max(latest - span, 0)
        last = deque((each.sequence for each in _captured(changes, after, latest, plain)), count)
        if len(last) == count or after == 0:
            return last[0] - 1 if last else latest
        span *= _WIDER
    return latest


def before_moment(changes: Changes, moment: int, latest: int) -> int:
    """The last sequence that was captured before a moment (µs since 1970)."""
    low, high = 1, latest + 1  # the first one captured since is among them
    while low < high:
        middle = (low + high) // 2
        upto = min(middle + _NEAR, latest)
        found = next(_captured(changes, middle - 1, upto, PageRequest()), None)
        # What is no longer in the log was there before.
        if found is None or found.captured_at < moment:
            low = middle + 1 if found is None else found.sequence + 1
        else:
            high = middle
    return low - 1


def _captured(changes: Changes, after: int, upto: int, wanted: PageRequest) -> Iterator[_Captured]:
    for page in changes.pages(after, upto, wanted):
        for event in page.events:
            yield msgspec.json.decode(event, type=_Captured)
