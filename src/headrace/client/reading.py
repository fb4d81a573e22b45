"""The changes as the command line reads them: from the running server, or from the disk."""

import asyncio
import math
import time
from collections.abc import Iterator
from typing import Protocol

from ..formats.catalogue import Formats
from ..log import LogReader
from ..serve.feed import Feed
from ..serve.filter import Filter
from ..serve.subscription import Subscription
from .client import Page, Wanted

_POLL_SECONDS = 0.2  # between two looks at a log that another process may write
_PAGE = 1000


class Changes(Protocol):
    """A place to read changes from."""

    def pages(self, after: int, upto: int | None, wanted: Wanted) -> Iterator[Page]:
        """What follows `after`, page after page, as one stream; without `upto` for ever."""
        ...


class DiskChanges:
    """Reads the log itself, also while another process writes it."""

    def __init__(self, reader: LogReader, formats: Formats) -> None:
        self._reader = reader
        self._formats = formats

    def pages(self, after: int, upto: int | None, wanted: Wanted) -> Iterator[Page]:
        """What follows `after`, page after page, as one stream; without `upto` for ever."""
        format = self._formats.named(wanted.format, markers=wanted.preserve_transactions)
        subscription = Subscription(
            Feed(self._reader),
            format,
            filter=Filter(tables=wanted.tables),
            after=after,
            upto=upto,
        )
        with asyncio.Runner() as loop:
            while True:
                page = loop.run(subscription.next(_PAGE))
                yield Page(page.payloads, f"{page.gap.first}-{page.gap.last}" if page.gap else "")
                if subscription.complete:
                    return
                wait_beyond(self._reader, subscription.scanned)


def wait_beyond(log: LogReader, sequence: int, seconds: float = math.inf) -> None:
    """Look at a log that another process may write, until it has more or the time is over."""
    until = time.monotonic() + seconds
    log.refresh()
    while log.latest_sequence <= sequence and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        log.refresh()


def follow(
    changes: Changes, after: int, wanted: Wanted, *, upto: int | None = None, limit: int | None
) -> Iterator[Page]:
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
