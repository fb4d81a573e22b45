"""One reader's way through the log: what it wants, how far it has come, when it waits.

Every transport stands on this and only frames the bytes. Nothing is queued for a reader: it takes
the next page when it has sent the last one, so a slow client holds back nobody but itself.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from ..change.event import Op
from ..errors import LogError
from ..formats import AnyFormat, StreamFormat, TransactionFormat
from ..formats.entity import Entity
from ..observe import traces
from ..observe.traces import TracedTransaction
from .encoders import encoder
from .feed import BLOCK, READ_ON_LOOP, FeedEntry, LogFeed
from .filter import Filter, both
from .page import FeedPage, LogGap, PageEvent, PageKey
from .permissions import EVERYTHING, Permissions

__all__ = [
    "PAGE_BYTES",
    "RECHECK_SECONDS",
    "FeedPage",
    "LogGap",
    "PageEvent",
    "Subscription",
    "spanning",
]

RECHECK_SECONDS = 0.5  # a reader whose permissions may end looks again after so long at the latest
# A page ends after the change that goes beyond this. A client that does not take its page keeps it
# in memory.
PAGE_BYTES = 1 << 20
# The page of a reader that is behind ends at a multiple of this: readers that come back after a
# restart of the server stand at different places, and share pages from their second one on.
PAGE_SPAN = 4096


class Subscription:
    """Delivers, in order, what follows `after`, may be seen and passes the filter, until `upto`."""

    def __init__(
        self,
        feed: LogFeed,
        format: AnyFormat,
        *,
        filter: Filter,
        after: int,
        upto: int | None = None,
        permissions: Permissions = EVERYTHING,
    ) -> None:
        self.scanned = after
        self._feed = feed
        # A reader that goes through what is old says nothing of how long new changes take.
        self._caught_up = after >= feed.log.latest_sequence
        self._committed_at = 0  # of the last event taken
        self._permissions = permissions
        self._upto = upto
        # An entity event may sum up several changes, so the filter tests the event.
        whole = isinstance(format, Entity)
        self._wants = filter.entity.wants if whole and filter.entity else None
        wanted = filter.plain() if whole else filter.predicate(feed.entities)
        visible = permissions.predicate(feed.entities)
        self._passes = both(wanted, visible)
        permitted = permissions.format(format, feed.entities)
        self._encoder = encoder(
            feed, permitted, concerns=filter.concerns, passes=self._passes, visible=visible
        )
        # What others remember of their stream cannot be shared.
        conditions = feed.number(permitted), filter, permissions.tables, permissions.tenant
        alone = isinstance(permitted, StreamFormat | TransactionFormat)
        self._readers = None if alone else feed.pages.reader_class(conditions)

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
        return self._permissions.ended

    async def page(self, limit: int, *, wait: float = 0, room: int = PAGE_BYTES) -> FeedPage:
        """The next changes; when there are none, what arrives within `wait` seconds."""
        until = asyncio.get_running_loop().time() + wait
        page = await self.next(limit, room=room)
        while not page.events and not self.complete:
            if not wait or not await self._arrival(until):
                break
            following = await self.next(limit, room=room)
            page = replace(following, gap=spanning(page.gap, following.gap))
        return page

    async def follow(
        self, *, until: float, idle: float, room: int = PAGE_BYTES
    ) -> AsyncIterator[FeedPage]:
        """Pages as they come, until `until` (loop time); an empty one after `idle` idle seconds."""
        now = asyncio.get_running_loop().time
        beat = now() + idle
        looks = math.inf if self._permissions.valid is None else RECHECK_SECONDS
        while not self._feed.closing and not self.ended:
            page = await self.live(until=beat, room=room)
            if page.events or page.gap or now() >= beat:
                handed = [page]
                del page  # it may be large, and its reader may need long for the next
                yield handed.pop()
                beat = now() + idle
            if now() >= until or (self._upto is not None and self.scanned >= self._upto):
                return
            await self._feed.wait(self.scanned, min(beat, until, now() + looks))

    async def live(self, *, until: float = math.inf, room: int = PAGE_BYTES) -> FeedPage:
        """What there is for those who follow the log, who all go as far as they were woken for.

        A reader who wants the same as one before, after the same sequence, gets the same page.
        """
        feed = self._feed
        end = feed.latest if self._upto is None else min(feed.latest, self._upto)
        if self._readers is None or self.scanned + 1 < feed.log.first_sequence:
            return await self._read(BLOCK, end, until=until, room=room)
        end = min(end, (self.scanned // PAGE_SPAN + 1) * PAGE_SPAN)
        key = PageKey(self._readers, self.scanned, end, BLOCK, room)
        page = await feed.pages.found(key)
        if self.ended:
            return FeedPage([], self.scanned)
        if page is not None:
            self.scanned = page.scanned
            self._measure(page)
            return page
        with feed.pages.making(key):
            page = await self._read(BLOCK, end, until=until, room=room)
            # One that ran out of time before it came anywhere would hold up everybody.
            if page.gap is None and page.scanned > key.after and not self.ended:
                feed.pages.keep(key, page)
        return page

    async def next(self, limit: int, *, room: int = PAGE_BYTES) -> FeedPage:
        """What there is of the next events, without waiting for more."""
        return await self._read(limit, self.end, room=room)

    def _measure(self, page: FeedPage) -> None:
        """Count how long the events took from their commit."""
        if page.committed_at and self._caught_up:
            seconds = time.time() - page.committed_at / 1e6
            self._feed.delivered.observe(seconds, len(page.events))
        elif self.scanned >= self._feed.latest:
            self._caught_up = True

    async def _read(
        self, limit: int, end: int, *, until: float = math.inf, room: int = PAGE_BYTES
    ) -> FeedPage:
        """What there is of the next events up to `end`, and how far that is.

        The page ends with the change that brings it to `limit` events, or beyond where several
        stand at one sequence, or with the one that leaves no `room` (bytes). A filter may pass over
        millions of changes; at `until` (loop time) the search pauses. When the reader may see
        nothing any more, nothing of it counts: whoever goes on for him must not miss it.
        """
        now, begun = asyncio.get_running_loop().time, self.scanned
        events: list[PageEvent] = []
        gap: LogGap | None = None
        while self.scanned < end and len(events) < limit and room > 0 and now() < until:
            if self.ended:
                break
            try:
                entries = await self._feed.read(self.scanned, end)
                if len(entries) > READ_ON_LOOP:
                    await self._feed.turn()
                first = entries[0].sequence if entries else end + 1
                if first > self.scanned + 1:
                    gap = spanning(gap, self._feed.gap(self.scanned + 1, first - 1))
                    self.scanned = first - 1
                ready = await self._encoder.ready(entries)
                room = self._take(ready, events, limit=limit, room=room)
            except LogError:
                if not events:
                    raise
                break  # what stands before it comes first
        if self.ended:
            self.scanned = begun
            return FeedPage([], begun)
        page = FeedPage(events, self.scanned, gap, self._committed_at if events else 0)
        self._measure(page)
        return page

    async def _arrival(self, until: float) -> bool:
        """Until there is more; False at `until` (loop time), when closing or when it has ended."""
        if self._permissions.valid is None:
            return await self._feed.wait(self.scanned, until)
        now = asyncio.get_running_loop().time
        while not self.ended and not self._feed.closing:
            if await self._feed.wait(self.scanned, min(until, now() + RECHECK_SECONDS)):
                return not self.ended
            if now() >= until:
                break
        return False

    def _take(
        self, entries: list[FeedEntry], events: list[PageEvent], *, limit: int, room: int
    ) -> int:
        """Add the events of some entries while there is room; returns the bytes left."""
        passes, encode, wants = self._passes, self._encoder.encode, self._wants
        begun, last = len(events), None
        for entry in entries:
            for payload in encode(entry, wanted=passes is None or passes(entry.change)):
                if wants is not None and not wants(payload):
                    continue
                events.append(PageEvent(entry.sequence, payload))
                room -= len(payload)
            self.scanned, last = entry.sequence, entry.change
            if room <= 0 or len(events) >= limit:
                break
        if last is not None and len(events) > begun:
            # A snapshot's rows have its time, and it may take hours.
            self._committed_at = 0 if last.op is Op.READ else last.transaction.commit_time
            if traces.current is not None and self._caught_up:
                traces.current.delivered(_traced(entries, events[begun:]))
        return room


def _traced(entries: list[FeedEntry], events: list[PageEvent]) -> Iterator[TracedTransaction]:
    """The transactions that end with one of these events."""
    sequences = {event.sequence for event in events}
    for change in (entry.change for entry in entries if entry.sequence in sequences):
        if change.last:
            known = change.transaction
            yield TracedTransaction(known.id, known.commit_time, known.captured_at)


def spanning(one: LogGap | None, other: LogGap | None) -> LogGap | None:
    """One gap for two."""
    if one is None or other is None:
        return one or other
    reason = max(one, other, key=lambda gap: gap.last).reason
    return LogGap(min(one.first, other.first), max(one.last, other.last), reason)
