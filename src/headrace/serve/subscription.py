"""One reader's way through the log: what it wants, how far it has come, when it waits.

Every transport stands on this and only frames the bytes. Nothing is queued for a reader: it takes
the next page when it has sent the last one, so a slow client holds back nobody but itself.
"""

import asyncio
import math
from collections.abc import AsyncIterator

from ..errors import LogError
from ..formats import AnyFormat, StreamFormat, TransactionFormat
from ..formats.entity import Entity
from .feed import BLOCK, Entry, Feed
from .filter import Filter, both
from .grant import EVERYTHING, Grant
from .page import Delivery, Gap, Page, Place
from .telling import telling

__all__ = ["GRANT_SECONDS", "PAGE_BYTES", "Delivery", "Gap", "Page", "Subscription", "spanning"]

GRANT_SECONDS = 0.5  # a reader whose grant may end looks again after so long at the latest
PAGE_BYTES = 8 << 20  # a page ends after the change that goes beyond this


class Subscription:
    """Delivers, in order, what follows `after`, may be seen and passes the filter, until `upto`."""

    def __init__(
        self,
        feed: Feed,
        format: AnyFormat,
        *,
        filter: Filter,
        after: int,
        upto: int | None = None,
        grant: Grant = EVERYTHING,
    ) -> None:
        self.scanned = after
        self._feed = feed
        self._grant = grant
        self._upto = upto
        # An entity event may sum up several changes, so it is asked itself.
        whole = isinstance(format, Entity)
        self._wants = filter.entity.wants if whole and filter.entity else None
        wanted = filter.plain() if whole else filter.predicate(feed.entities)
        visible = grant.predicate(feed.entities)
        self._passes = both(wanted, visible)
        told = grant.format(format, feed.entities)
        self._telling = telling(
            feed, told, concerns=filter.concerns, passes=self._passes, visible=visible
        )
        # What others remember of their stream cannot be shared.
        alike = feed.number(told), filter, grant.tables, grant.tenant
        alone = isinstance(told, StreamFormat | TransactionFormat)
        self._kind = None if alone else feed.pages.kind(alike)

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
        return self.ended or (self._upto is not None and self.scanned >= self._upto)

    @property
    def ended(self) -> bool:
        """Whether the reader may see nothing any more: its key has expired, or was revoked."""
        return self._grant.ended

    async def page(self, limit: int, *, wait: float = 0, room: int = PAGE_BYTES) -> Page:
        """The next changes; when there are none, what arrives within `wait` seconds."""
        until = asyncio.get_running_loop().time() + wait
        page = await self.next(limit, room=room)
        while not page.deliveries and not self.complete:
            if not wait or not await self._arrival(until):
                break
            following = await self.next(limit, room=room)
            gap = spanning(page.gap, following.gap)
            page = Page(following.deliveries, following.scanned, gap)
        return page

    async def follow(
        self, *, until: float, idle: float, room: int = PAGE_BYTES
    ) -> AsyncIterator[Page]:
        """Pages as they come, until `until` (loop time); an empty one after `idle` idle seconds."""
        now = asyncio.get_running_loop().time
        beat = now() + idle
        looks = math.inf if self._grant.valid is None else GRANT_SECONDS
        while not self._feed.closing and not self.ended:
            page = await self.live(until=beat, room=room)
            if page.deliveries or page.gap or now() >= beat:
                handed = [page]
                del page  # it may be large, and its reader may need long for the next
                yield handed.pop()
                beat = now() + idle
            if now() >= until or (self._upto is not None and self.scanned >= self._upto):
                return
            await self._feed.wait(self.scanned, min(beat, until, now() + looks))

    async def live(self, *, until: float = math.inf, room: int = PAGE_BYTES) -> Page:
        """What there is for those who follow the log, who all go as far as they were woken for.

        A reader who wants the same as one before, from the same place on, gets the same page. That
        its grant holds was looked at right before.
        """
        feed = self._feed
        end = feed.latest if self._upto is None else min(feed.latest, self._upto)
        if self._kind is None or self.scanned + 1 < feed.log.first_sequence:
            return await self._read(BLOCK, end, until=until, room=room)
        place = Place(self._kind, self.scanned, end, BLOCK, room)
        page = feed.pages.get(place)
        if page is not None:
            self.scanned = page.scanned
            return page
        page = await self._read(BLOCK, end, until=until, room=room)
        if page.gap is None and not self.ended:
            feed.pages.keep(place, page)
        return page

    async def next(self, limit: int, *, room: int = PAGE_BYTES) -> Page:
        """What there is of the next events, without waiting for more."""
        return await self._read(limit, self.end, room=room)

    async def _read(
        self, limit: int, end: int, *, until: float = math.inf, room: int = PAGE_BYTES
    ) -> Page:
        """What there is of the next events up to `end`, and how far that is.

        The page ends with the change that brings it to `limit` events, or beyond where several
        stand at one sequence, or with the one that leaves no `room` (bytes). A filter may pass over
        millions of changes; at `until` (loop time) the search pauses. When the reader may see
        nothing any more, nothing of it counts: whoever goes on for him must not miss it.
        """
        now, begun = asyncio.get_running_loop().time, self.scanned
        rested = begun
        deliveries: list[Delivery] = []
        gap: Gap | None = None
        while self.scanned < end and len(deliveries) < limit and room > 0 and now() < until:
            if self.ended:
                break
            entries = await self._feed.read(self.scanned, end)
            first = entries[0].sequence if entries else end + 1
            if first > self.scanned + 1:
                gap = spanning(gap, Gap(self.scanned + 1, first - 1))
                self.scanned = first - 1
            try:
                ready = await self._telling.ready(entries)
                room = self._take(ready, deliveries, limit=limit, room=room)
            except LogError:
                if not deliveries:
                    raise
                break  # what stands before it comes first
            if end > self.scanned >= rested + BLOCK:
                rested = self.scanned
                await asyncio.sleep(0)  # other requests come between two blocks
        if self.ended:
            self.scanned = begun
            return Page([], begun)
        return Page(deliveries, self.scanned, gap)

    async def _arrival(self, until: float) -> bool:
        """Until there is more; False at `until` (loop time), when closing or when it has ended."""
        if self._grant.valid is None:
            return await self._feed.wait(self.scanned, until)
        now = asyncio.get_running_loop().time
        while not self.ended and not self._feed.closing:
            if await self._feed.wait(self.scanned, min(until, now() + GRANT_SECONDS)):
                return not self.ended
            if now() >= until:
                break
        return False

    def _take(
        self, entries: list[Entry], deliveries: list[Delivery], *, limit: int, room: int
    ) -> int:
        """Add what is told of some entries while there is room; returns the bytes left."""
        passes, tell, wants = self._passes, self._telling.tell, self._wants
        for entry in entries:
            for payload in tell(entry, wanted=passes is None or passes(entry.change)):
                if wants is not None and not wants(payload):
                    continue
                deliveries.append(Delivery(entry.sequence, payload))
                room -= len(payload)
            self.scanned = entry.sequence
            if room <= 0 or len(deliveries) >= limit:
                break
        return room


def spanning(one: Gap | None, other: Gap | None) -> Gap | None:
    """One gap for two."""
    if one is None or other is None:
        return one or other
    return Gap(min(one.first, other.first), max(one.last, other.last))
