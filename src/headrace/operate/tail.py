"""The changes as the command line reads them: from the running server, or from the disk."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from ..client.client import EventPage, PageRequest
from ..formats.catalogue import Formats
from ..log import LogReader
from ..serve.feed import LogFeed
from ..serve.filter import Filter
from ..serve.subscription import Subscription

_PAGE = 1000


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
            filter=Filter(tables=wanted.tables),
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
