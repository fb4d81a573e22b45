"""Consumers that share a named cursor: each leases some events, and acks them when it is done.

    lease -> events that nobody holds, in order -> ack -> the cursor moves to the lowest not acked

A row's later change is never handed out while an earlier one of the same row is leased and not
acked, except together with it. A lease that expires is handed on. Leases live in memory: a restart
ends them all. What was acked is durable.
"""

import asyncio
import secrets
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ..event import Change
from ..formats.key import previous_primary_key, primary_key
from ..log import Cursor, Log
from .feed import Feed
from .subscription import Delivery, Gap, Subscription

WINDOW = 1000  # events; what lies further beyond the lowest that is not acked has to wait
WINDOW_BYTES = 8 << 20
PROGRESS = 10_000  # changes that a filter left out while a consumer waits, until that is kept


class Touch(NamedTuple):
    """The rows that a change is about."""

    table: tuple[str, str, str]
    rows: frozenset[str]  # none: the whole table

    @classmethod
    def of(cls, change: Change) -> "Touch":
        """An update that replaces a key is about two rows."""
        table = (change.table.source, change.table.schema, change.table.name)
        if not change.key:
            return cls(table, frozenset())
        keys = (primary_key(change), previous_primary_key(change))
        return cls(table, frozenset(key for key in keys if key is not None))


class Busy:
    """Rows and tables of which an earlier change is not acked."""

    def __init__(self) -> None:
        self._rows: set[tuple[Hashable, str]] = set()
        self._touched: set[Hashable] = set()
        self._whole: set[Hashable] = set()

    def add(self, touch: Touch) -> None:
        """What comes later for these rows has to wait."""
        self._touched.add(touch.table)
        self._rows.update((touch.table, row) for row in touch.rows)
        if not touch.rows:
            self._whole.add(touch.table)

    def blocks(self, touch: Touch) -> bool:
        """Whether a change has to wait."""
        if not touch.rows:
            return touch.table in self._touched
        return touch.table in self._whole or any(
            (touch.table, row) in self._rows for row in touch.rows
        )


@dataclass(slots=True)
class _Item:
    """What stands at a sequence and is not acked."""

    sequence: int
    touch: Touch
    payloads: list[bytes] = field(default_factory=list)
    lease: str = ""
    consumer: str = ""
    until: float = 0.0  # loop time


class Lease(NamedTuple):
    """What a consumer got."""

    id: str  # "": nothing
    deliveries: list[Delivery]
    cursor: Cursor
    gap: Gap | None = None  # what was trimmed before anybody got it


class Held(msgspec.Struct, frozen=True):
    """A lease as others see it."""

    lease: str
    consumer: str
    events: int
    expires_in_ms: int


class Acked(NamedTuple):
    """What came of an ack."""

    cursor: Cursor
    lost: list[int]  # not acked: the lease no longer held them


class Group:
    """A named cursor whose consumers read with one question."""

    def __init__(self, feed: Feed, log: Log, cursor: Cursor, subscription: Subscription) -> None:
        self._feed = feed
        self._log = log
        self._cursor = cursor
        self._subscription = subscription  # begins after the cursor
        self._waiting = frozenset(cursor.waiting)
        self._items: dict[int, _Item] = {}  # by sequence, in order
        self._size = 0
        self._gap: Gap | None = None
        self._ended = False
        self._turn = asyncio.Lock()
        self._moved = asyncio.Event()

    @property
    def held(self) -> list[Held]:
        """Every lease that has not expired."""
        now = asyncio.get_running_loop().time()
        leases: dict[str, list[_Item]] = {}
        for item in self._items.values():
            if item.until > now:
                leases.setdefault(item.lease, []).append(item)
        return [
            Held(id, items[0].consumer, len(items), int((items[0].until - now) * 1000))
            for id, items in leases.items()
        ]

    async def lease(self, consumer: str, *, limit: int, seconds: float, wait: float) -> Lease:
        """Events for a consumer; when there are none, what becomes free within `wait` seconds."""
        until = asyncio.get_running_loop().time() + wait
        while True:
            async with self._turn:
                if self._ended:
                    break
                self._moved.clear()
                items = await self._free(limit)
                if items:
                    return self._handed(items, consumer, seconds)
                # Not for every commit that a filter leaves out: each time waits for the disk.
                await self._note_progress(PROGRESS)
            if not await self._chance(until):
                break
        async with self._turn:
            await self._note_progress(1)
        return Lease("", [], self._cursor, self._told_gap())

    async def ack(self, lease: str, sequences: Iterable[int]) -> Acked:
        """Note, durably, that a consumer is done with events; twice does no harm."""
        async with self._turn:
            asked = set(sequences)
            if self._ended:
                return Acked(self._cursor, sorted(asked))
            known = asked & self._items.keys()
            done = {each for each in known if self._items[each].lease == lease}
            # What this group has not come to yet, and none before a restart had acked.
            unknown = {each for each in asked if each > self._subscription.scanned}
            unknown = {each for each in unknown if not self._was_acked(each)}
            if done:
                await self._store(self._items.keys() - done, max(done))
            for sequence in done:
                self._size -= sum(map(len, self._items.pop(sequence).payloads))
            self._moved.set()
            return Acked(self._cursor, sorted((known - done) | unknown))

    @property
    def ended(self) -> bool:
        """Whether nothing comes of it any more: another has to begin."""
        return self._ended or self._subscription.ended

    async def end(self) -> None:
        """Hand out nothing more, and take no acks."""
        async with self._turn:
            self._ended = True
            self._items.clear()
            self._moved.set()

    async def _free(self, limit: int) -> list[_Item]:
        """Items that can be handed out now, at most `limit` events unless one alone has more."""
        if len(self._items) < limit:
            await self._fill()
        items = self._choose(limit)
        while not items and await self._fill():
            items = self._choose(limit)
        return items

    def _choose(self, limit: int) -> list[_Item]:
        now = asyncio.get_running_loop().time()
        busy, chosen, room = Busy(), list[_Item](), limit
        for item in self._items.values():
            if room <= 0:
                break
            if item.until > now or busy.blocks(item.touch):
                busy.add(item.touch)
            else:
                chosen.append(item)
                room -= len(item.payloads)
        return chosen

    async def _fill(self) -> bool:
        """Read on; False: there is nothing more now, or too much is not acked."""
        room = WINDOW - len(self._items)
        if room <= 0 or self._size >= WINDOW_BYTES:
            return False
        before = self._subscription.scanned
        with self._ending():
            page = await self._subscription.next(room)
            if page.gap:
                self._gap = Gap(self._gap.first if self._gap else page.gap.first, page.gap.last)
            for sequence, payload in page.deliveries:
                if not self._was_acked(sequence):
                    await self._add(sequence, payload)
        return self._subscription.scanned > before

    @contextmanager
    def _ending(self) -> Iterator[None]:
        # Cut off in the middle, this group would know less than it has read or written. The next
        # one begins with what is on disk, as after a restart.
        try:
            yield
        except BaseException:
            self._ended = True
            raise

    def _was_acked(self, sequence: int) -> bool:
        """Whether something beyond what this group has read was acked before a restart."""
        return sequence <= self._cursor.reached and sequence not in self._waiting

    async def _add(self, sequence: int, payload: bytes) -> None:
        item = self._items.get(sequence)
        if item is None:
            entries = await self._feed.read(sequence - 1, sequence)
            if not entries:  # trimmed meanwhile, by force
                self._gap = Gap(self._gap.first if self._gap else sequence, sequence)
                return
            item = self._items[sequence] = _Item(sequence, Touch.of(entries[0].change))
        item.payloads.append(payload)
        self._size += len(payload)

    def _handed(self, items: list[_Item], consumer: str, seconds: float) -> Lease:
        id = f"lease_{secrets.token_hex(12)}"
        until = asyncio.get_running_loop().time() + seconds
        for item in items:
            item.lease, item.consumer, item.until = id, consumer, until
        deliveries = [Delivery(item.sequence, each) for item in items for each in item.payloads]
        return Lease(id, deliveries, self._cursor, self._told_gap())

    def _told_gap(self) -> Gap | None:
        gap, self._gap = self._gap, None
        return gap

    async def _note_progress(self, least: int) -> None:
        """Let a cursor pass what its filter leaves out, so that it does not hold back trimming."""
        if self._ended or self._items:
            return
        if self._subscription.scanned - self._cursor.sequence >= least:
            await self._store(set(), 0)

    async def _store(self, open: set[int], done: int) -> None:
        """Keep that all is acked up to where the group has read, but for what is open."""
        reached, scanned = max(done, self._cursor.reached), self._subscription.scanned
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
        ends = [item.until for item in self._items.values() if item.until > now()]
        wake = min([until, *ends, now() + 1.0])  # a second: keys end, too
        full = len(self._items) >= WINDOW or self._size >= WINDOW_BYTES
        waits = [asyncio.create_task(_told(self._moved))]
        if not full:
            waits.append(asyncio.create_task(self._feed.wait(self._subscription.scanned, wake)))
        try:
            await asyncio.wait(
                waits, timeout=max(wake - now(), 0), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for each in waits:
                each.cancel()
        over = now() >= until or self._feed.closing or self._subscription.ended
        return not over


async def _told(event: asyncio.Event) -> bool:
    return await event.wait()


class Groups:
    """The cursors of a log that consumers share now."""

    def __init__(self, feed: Feed, log: Log) -> None:
        self._feed = feed
        self._log = log
        self._groups: dict[str, tuple[Hashable, Group]] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    def turn(self, name: str) -> asyncio.Lock:
        """Held by whoever makes, moves or drops a cursor, or begins its group."""
        return self._turns.setdefault(name, asyncio.Lock())

    def find(self, name: str) -> Group | None:
        """The group of a cursor; None: nobody has leased anything since the server started."""
        _, group = self._groups.get(name, (None, None))
        return None if group is None or group.ended else group

    def held(self, name: str) -> list[Held]:
        """The leases of a cursor that have not expired."""
        group = self.find(name)
        return [] if group is None else group.held

    def asking(self, name: str, question: Hashable) -> Group | None:
        """The group of a cursor if its consumers ask this question."""
        asked, _ = self._groups.get(name, (None, None))
        return self.find(name) if asked == question else None

    def begin(self, cursor: Cursor, question: Hashable, subscription: Subscription) -> Group:
        """A new group, in the place of one that holds no leases."""
        group = Group(self._feed, self._log, cursor, subscription)
        self._groups[cursor.name] = question, group
        return group

    async def forget(self, name: str) -> None:
        """End a group and its leases: when this returns, it writes its cursor no more."""
        _, group = self._groups.pop(name, (None, None))
        if group is not None:
            await group.end()
