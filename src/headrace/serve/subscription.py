"""One reader's way through the log: what it wants, how far it has come, when it waits.

Every transport stands on this and only frames the bytes. Nothing is queued for a reader: it takes
the next page when it has sent the last one, so a slow client holds back nobody but itself.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import LogError
from ..formats import AnyFormat
from .feed import BLOCK, Entry, Feed
from .filter import Filter
from .telling import telling

PAGE_BYTES = 8 << 20  # a page ends after the change that goes beyond this


class Delivery(NamedTuple):
    """An event as its reader gets it; several may stand at one sequence."""

    sequence: int
    payload: bytes


class Gap(NamedTuple):
    """Sequences, both ends included, that were trimmed before this reader came to them."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Page:
    """What a reader gets at once, in commit order; never a part of what stands at a sequence."""

    deliveries: list[Delivery]
    scanned: int  # everything up to here is delivered, or not wanted, or lost in the gap
    gap: Gap | None = None

    @property
    def payloads(self) -> list[bytes]:
        """The encoded events alone."""
        return [delivery.payload for delivery in self.deliveries]


class Subscription:
    """Delivers, in order, what follows `after` and passes the filter, until `upto`."""

    def __init__(
        self,
        feed: Feed,
        format: AnyFormat,
        *,
        filter: Filter,
        after: int,
        upto: int | None = None,
    ) -> None:
        self.scanned = after
        self._feed = feed
        self._passes = filter.predicate()
        self._telling = telling(feed, format, filter)
        self._upto = upto

    @property
    def end(self) -> int:
        """The last sequence that can be delivered now."""
        latest = self._feed.log.latest_sequence
        return latest if self._upto is None else min(self._upto, latest)

    def end_at(self, sequence: int) -> None:
        """Deliver nothing beyond `sequence`, or beyond an earlier end."""
        self._upto = sequence if self._upto is None else min(self._upto, sequence)

    @property
    def complete(self) -> bool:
        """Whether nothing can follow any more."""
        return self._upto is not None and self.scanned >= self._upto

    async def page(self, limit: int, *, wait: float = 0) -> Page:
        """The next changes; when there are none, what arrives within `wait` seconds."""
        until = asyncio.get_running_loop().time() + wait
        page = await self.next(limit)
        while not page.deliveries and not self.complete:
            if not wait or not await self._feed.wait(self.scanned, until):
                break
            following = await self.next(limit)
            page = Page(following.deliveries, following.scanned, page.gap or following.gap)
        return page

    async def follow(self, *, until: float, idle: float) -> AsyncIterator[Page]:
        """Pages as they come, until `until` (loop time); an empty one after `idle` idle seconds."""
        now = asyncio.get_running_loop().time
        beat = now() + idle
        while not self._feed.closing:
            page = await self.next(BLOCK, until=beat)
            if page.deliveries or page.gap or now() >= beat:
                yield page
                beat = now() + idle
            if now() >= until or self.complete:
                return
            await self._feed.wait(self.scanned, min(beat, until))

    async def next(self, limit: int, *, until: float = math.inf) -> Page:
        """What there is of the next events, without waiting for more.

        The page ends with the change that brings it to `limit` events, or beyond where several
        stand at one sequence. A filter may pass over millions of changes; at `until` (loop time)
        the search pauses.
        """
        now, end = asyncio.get_running_loop().time, self.end
        deliveries: list[Delivery] = []
        gap: Gap | None = None
        room = PAGE_BYTES
        while self.scanned < end and len(deliveries) < limit and room > 0 and now() < until:
            entries = await self._feed.read(self.scanned, end)
            first = entries[0].sequence if entries else end + 1
            if first > self.scanned + 1:
                gap = Gap(gap.first if gap else self.scanned + 1, first - 1)
                self.scanned = first - 1
            try:
                ready = await self._telling.ready(entries)
                room = self._take(ready, deliveries, limit=limit, room=room)
            except LogError:
                if not deliveries:
                    raise
                break  # what stands before it comes first
            if self.scanned < end:
                await asyncio.sleep(0)  # other requests come between two blocks
        return Page(deliveries, self.scanned, gap)

    def _take(
        self, entries: list[Entry], deliveries: list[Delivery], *, limit: int, room: int
    ) -> int:
        """Add what is told of some entries while there is room; returns the bytes left."""
        passes, tell = self._passes, self._telling.tell
        for entry in entries:
            for payload in tell(entry, wanted=passes is None or passes(entry.change)):
                deliveries.append(Delivery(entry.sequence, payload))
                room -= len(payload)
            self.scanned = entry.sequence
            if room <= 0 or len(deliveries) >= limit:
                break
        return room
