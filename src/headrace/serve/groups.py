"""Consumers that share a named cursor: each leases some events, and acks them when it is done.

    lease -> events that nobody holds, in order -> ack -> the cursor moves to the lowest not acked

A row's later change is never handed out while an earlier one of the same row is leased and not
acked, except together with it. A lease that expires is handed on; so is one whose holder has no
valid key any more. Leases live in memory: a restart ends them all. What was acked is durable.
"""

import asyncio
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from ..formats import AnyFormat, TransactionFormat
from ..log import Cursor, Log
from .affected import AffectedRows, AffectedRowsFinder, BlockedRows
from .feed import LogFeed
from .filter import Filter
from .permissions import Permissions
from .subscription import PAGE_BYTES, RECHECK_SECONDS, LogGap, PageEvent, Subscription, spanning

WINDOW = 1000  # events; what lies further beyond the lowest that is not acked has to wait
WINDOW_BYTES = 8 << 20
AHEAD_BYTES = 64 << 10  # of events that nobody has yet; others are read again when they are due
PROGRESS = 10_000  # changes that a filter left out while a consumer waits, until that is kept
IDLE_SECONDS = 60.0  # after which a group without leases is forgotten: the disk knows all of it


class LeaseSubscription(NamedTuple):
    """What all consumers of a cursor read: they must ask for the same."""

    format: AnyFormat
    filter: Filter
    permissions: Permissions  # they do not end: every request is checked for itself

    def reading(self, feed: LogFeed, *, after: int, upto: int | None = None) -> Subscription:
        """A reader of its events."""
        return Subscription(
            feed,
            self.format,
            filter=self.filter,
            after=after,
            upto=upto,
            permissions=self.permissions,
        )


def _always() -> bool:
    return True


class Consumer(NamedTuple):
    """One of the consumers that share a cursor."""

    name: str
    valid: Callable[[], bool] = _always  # whether it may still be handed anything
    lasting: Callable[[], bool] = _always  # whether what it leased is still its own


@dataclass(slots=True)
class _Lease:
    """A lease that was given."""

    id: str
    consumer: Consumer
    until: float  # loop time
    gap: LogGap | None  # reported with it as missing

    def lives(self, now: float) -> bool:
        return self.until > now and self.consumer.lasting()


@dataclass(slots=True)
class _Item:
    """What stands at a sequence and is not acked."""

    sequence: int
    affected: AffectedRows
    events: int
    size: int  # bytes
    payloads: list[bytes] = field(default_factory=list)  # none: they are read again
    lease: _Lease | None = None


class LeasedEvents(NamedTuple):
    """What a consumer got."""

    id: str  # "": nothing
    events: list[PageEvent]
    cursor: Cursor
    gap: LogGap | None = None  # what was trimmed before anybody got it


class ActiveLease(msgspec.Struct, frozen=True):
    """A lease as others see it."""

    lease: str
    consumer: str
    events: int
    expires_in_ms: int


class AckResult(NamedTuple):
    """Where the cursor is after an ack."""

    cursor: Cursor
    lost: list[int]  # not acked: the lease no longer holds them


class Group:
    """A named cursor whose consumers read with one subscription."""

    def __init__(
        self, feed: LogFeed, log: Log, cursor: Cursor, subscription: LeaseSubscription
    ) -> None:
        self._feed = feed
        self._log = log
        self._cursor = cursor
        self._wanted = subscription
        self._reader = subscription.reading(feed, after=cursor.sequence)
        together = isinstance(subscription.format, TransactionFormat)
        self._finder = AffectedRowsFinder(feed, together=together)
        self._waiting = frozenset(cursor.waiting)
        self._items: dict[int, _Item] = {}  # by sequence, in order
        self._size = 0
        self._gap: LogGap | None = None
        self._turn = asyncio.Lock()
        self._moved = asyncio.Event()
        self._asking = 0  # how many consumers ask for events now
        self._used = 0.0  # loop time
        self.ended = False  # nothing comes of it any more: another has to begin

    @property
    def leases(self) -> list[ActiveLease]:
        """Every lease that is still somebody's."""
        now, live = asyncio.get_running_loop().time(), self._live()
        leases: dict[str, list[_Item]] = {}
        for item in self._items.values():
            if item.lease is not None and item.lease.id in live:
                leases.setdefault(item.lease.id, []).append(item)
        return [
            ActiveLease(id, live[id].consumer.name, len(items), int((live[id].until - now) * 1000))
            for id, items in leases.items()
        ]

    def idle(self) -> bool:
        """Whether nobody has used it for a while, and nobody holds a lease."""
        if self._asking or self._turn.locked() or self._live():
            return False
        return asyncio.get_running_loop().time() - self._used >= IDLE_SECONDS

    async def lease(
        self, consumer: Consumer, *, limit: int, seconds: float, wait: float
    ) -> LeasedEvents:
        """Events for a consumer; when there are none, what becomes free within `wait` seconds."""
        with self._used_now():
            return await self._leased(consumer, limit, seconds, wait)

    async def ack(self, lease: str, sequences: Iterable[int]) -> AckResult:
        """Note, durably, that a consumer is done with events; twice does no harm."""
        with self._used_now():
            async with self._turn:
                return await self._acked(lease, set(sequences))

    async def end(self) -> None:
        """Hand out nothing more, and take no acks."""
        async with self._turn:
            self.drop()

    def drop(self) -> None:
        """The same for one that nobody uses now."""
        self.ended = True
        self._items.clear()
        self._moved.set()

    @contextmanager
    def _used_now(self) -> Iterator[None]:
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1
            self._used = asyncio.get_running_loop().time()

    # --- leases ---

    async def _leased(
        self, consumer: Consumer, limit: int, seconds: float, wait: float
    ) -> LeasedEvents:
        until = asyncio.get_running_loop().time() + wait
        while True:
            async with self._turn:
                if self.ended:
                    break
                self._moved.clear()
                items = await self._free(limit)
                if items and consumer.valid():
                    return self._handed(items, consumer, seconds)
                self._lighten()
                # Not for every commit that a filter leaves out: each time waits for the disk.
                await self._note_progress(PROGRESS)
            if not consumer.valid() or not await self._chance(until):
                break
        if not consumer.valid():
            return LeasedEvents("", [], self._cursor)
        async with self._turn:
            await self._note_progress(1)
        return LeasedEvents("", [], self._cursor, self._gap)

    def _handed(self, items: list[_Item], consumer: Consumer, seconds: float) -> LeasedEvents:
        until = asyncio.get_running_loop().time() + seconds
        lease = _Lease(f"lease_{secrets.token_hex(12)}", consumer, until, self._gap)
        events = [PageEvent(item.sequence, each) for item in items for each in item.payloads]
        for item in items:
            item.lease, item.payloads = lease, []
        self._lighten()
        return LeasedEvents(lease.id, events, self._cursor, self._gap)

    def _live(self) -> dict[str, _Lease]:
        """The leases that are still somebody's."""
        now = asyncio.get_running_loop().time()
        leases = {
            item.lease.id: item.lease for item in self._items.values() if item.lease is not None
        }
        return {id: lease for id, lease in leases.items() if lease.lives(now)}

    async def _free(self, limit: int) -> list[_Item]:
        """Items that can be handed out now, at most `limit` events unless one alone has more."""
        items = self._choose(limit)
        if sum(item.events for item in items) < limit:
            await self._fill(limit)
            items = self._choose(limit)
        while not items and await self._fill(limit):
            items = self._choose(limit)
        return [item for item in items if item.payloads or await self._read_again(item)]

    def _choose(self, limit: int) -> list[_Item]:
        live = self._live()
        busy, chosen, room, size = BlockedRows(), list[_Item](), limit, PAGE_BYTES
        for item in self._items.values():
            if room <= 0 or size <= 0:
                break
            leases = item.lease is not None and item.lease.id in live
            if leases or busy.blocks(item.affected):
                busy.add(item.affected)
            else:
                chosen.append(item)
                room -= item.events
                size -= item.size
        return chosen

    # --- what there is ---

    async def _fill(self, limit: int) -> bool:
        """Read on; False: there is nothing more now, or too much is not acked."""
        events, room = min(WINDOW - len(self._items), limit), WINDOW_BYTES - self._size
        if events <= 0 or room <= 0:
            return False
        before = self._reader.scanned
        with self._ending():
            page = await self._reader.next(events, room=room)
            self._gap = spanning(self._gap, page.gap)
            for sequence, together in groupby(page.events, key=attrgetter("sequence")):
                if not self._was_acked(sequence):
                    await self._add(sequence, [event.payload for event in together])
        return self._reader.scanned > before

    @contextmanager
    def _ending(self) -> Iterator[None]:
        # Cut off in the middle, this group would know less than it has read or written. The next
        # one begins with what is on disk, as after a restart.
        try:
            yield
        except BaseException:
            self.ended = True
            raise

    def _was_acked(self, sequence: int) -> bool:
        """Whether something beyond what this group has read was acked before a restart."""
        return sequence <= self._cursor.reached and sequence not in self._waiting

    async def _add(self, sequence: int, payloads: list[bytes]) -> None:
        affected = await self._finder.at(sequence, payloads)
        if affected is None:  # trimmed meanwhile, by force
            self._gap = spanning(self._gap, self._feed.gap(sequence, sequence))
            return
        size = sum(map(len, payloads))
        self._items[sequence] = _Item(sequence, affected, len(payloads), size, payloads)
        self._size += size

    async def _read_again(self, item: _Item) -> bool:
        """Read the events of an item once more; False: they were trimmed meanwhile, by force."""
        at = item.sequence
        page = await self._wanted.reading(self._feed, after=at - 1, upto=at).next(1)
        item.payloads = page.payloads
        if not item.payloads:
            self._gap = spanning(self._gap, self._feed.gap(at, at))
            self._size -= self._items.pop(at).size
        return bool(item.payloads)

    def _lighten(self) -> None:
        """Keep little of what nobody has yet: a key may have many cursors."""
        room = AHEAD_BYTES
        for item in self._items.values():
            room -= item.size if item.payloads else 0
            if room < 0:
                item.payloads = []

    # --- what is done ---

    async def _acked(self, lease: str, sequences: set[int]) -> AckResult:
        if self.ended:
            return AckResult(self._cursor, sorted(sequences))
        known = sequences & self._items.keys()
        done = {each for each in known if self._is_of(lease, self._items[each])}
        # What this group has not come to yet, and none before a restart had acked.
        unknown = {each for each in sequences if each > self._reader.scanned}
        unknown = {each for each in unknown if not self._was_acked(each)}
        if done:
            await self._store(self._items.keys() - done, max(done))
        for sequence in done:
            item = self._items.pop(sequence)
            self._size -= item.size
            if item.lease is not None and item.lease.gap == self._gap:
                self._gap = None  # an answer that came with it has arrived
        self._moved.set()
        return AckResult(self._cursor, sorted((known - done) | unknown))

    @staticmethod
    def _is_of(lease: str, item: _Item) -> bool:
        return item.lease is not None and item.lease.id == lease

    async def _note_progress(self, least: int) -> None:
        """Let a cursor pass what its filter leaves out, so that it does not hold back trimming."""
        if self.ended or self._items:
            return
        if self._reader.scanned - self._cursor.sequence >= least:
            await self._store(set(), 0)

    async def _store(self, open: set[int], done: int) -> None:
        """Keep that all is acked up to where the group has read, but for what is open."""
        reached, scanned = max(done, self._cursor.reached), self._reader.scanned
        # After a restart, what was waiting then is read again little by little.
        open = open | {each for each in self._waiting if each > scanned}
        cursor = msgspec.structs.replace(
            self._cursor,
            sequence=min(min(open, default=scanned + 1) - 1, scanned),
            reached=reached,
            waiting=tuple(sorted(each for each in open if each < reached)),
        )
        with self._ending():
            # In a thread: it waits for the disk.
            self._cursor = await asyncio.to_thread(self._log.put_cursor, cursor)

    async def _chance(self, until: float) -> bool:
        """Wait until something may have become free; False at `until` (loop time) or at the end."""
        now = asyncio.get_running_loop().time
        if now() >= until:
            return False
        ends = [lease.until for lease in self._live().values()]
        wake = min([until, *ends, now() + RECHECK_SECONDS])  # keys end, too
        full = len(self._items) >= WINDOW or self._size >= WINDOW_BYTES
        waits = [asyncio.create_task(_wait_for(self._moved))]
        if not full:
            waits.append(asyncio.create_task(self._feed.wait(self._reader.scanned, wake)))
        try:
            await asyncio.wait(
                waits, timeout=max(wake - now(), 0), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for each in waits:
                each.cancel()
        return now() < until and not self._feed.closing


async def _wait_for(event: asyncio.Event) -> bool:
    return await event.wait()


class Groups:
    """The cursors of a log that consumers share now, each under its `id`."""

    def __init__(self, feed: LogFeed, log: Log) -> None:
        self._feed = feed
        self._log = log
        self._groups: dict[Hashable, tuple[LeaseSubscription, Group]] = {}
        # Only while somebody holds or awaits them: anybody may ask for any name.
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def turn(self, id: Hashable) -> asyncio.Lock:
        """Held by whoever makes, moves or drops a cursor, or begins its group."""
        return self._turns.setdefault(id, asyncio.Lock())

    def find(self, id: Hashable) -> Group | None:
        """The group of a cursor; None: nobody has leased anything lately."""
        _, group = self._groups.get(id, (None, None))
        return None if group is None or group.ended else group

    def leases(self, id: Hashable) -> list[ActiveLease]:
        """The leases of a cursor that are still somebody's."""
        group = self.find(id)
        return [] if group is None else group.leases

    def reading(self, id: Hashable, subscription: LeaseSubscription) -> Group | None:
        """The group of a cursor if its consumers read with this subscription."""
        sequences, _ = self._groups.get(id, (None, None))
        return self.find(id) if sequences == subscription else None

    def begin(self, cursor: Cursor, subscription: LeaseSubscription) -> Group:
        """A new group of a cursor that has none, as the cursor is on disk now."""
        group = Group(self._feed, self._log, cursor, subscription)
        self._groups[cursor.id] = subscription, group
        self._look_later(cursor.id, group)
        return group

    async def forget(self, id: Hashable) -> None:
        """End a group and its leases: when this returns, it writes its cursor no more."""
        _, group = self._groups.get(id, (None, None))
        if group is not None:
            await group.end()
            self._groups.pop(id, None)

    def _look_later(self, id: Hashable, group: Group) -> None:
        asyncio.get_running_loop().call_later(IDLE_SECONDS, self._look, id, group)

    def _look(self, id: Hashable, group: Group) -> None:
        """Forget a group that is not used; otherwise look again later."""
        _, kept = self._groups.get(id, (None, None))
        if kept is not group:
            return
        if group.ended or group.idle():
            group.drop()
            del self._groups[id]
        else:
            self._look_later(id, group)
