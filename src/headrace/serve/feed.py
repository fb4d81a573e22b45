"""The log as every subscription reads it: read once, encoded once, one wake-up for all.

Committed changes never differ, so they are shared: the log is read in blocks of neighbouring
sequences, the blocks used last stay in memory, and each keeps what it was encoded to.
"""

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence

from ..change.event import Change
from ..formats import AnyFormat, Format
from ..formats.entities import Entities
from ..log import LogReader
from ..log.counts import Histogram
from ..log.holding import removal_of
from ..model import Model
from .page import LogGap, PageCache
from .renderings import Renderings, image_size

BLOCK = 256  # changes; reading and encoding one holds the event loop for about 3 ms
BLOCKS_KEPT = 64
BYTES_KEPT = 32 << 20  # of images; what they were encoded to comes on top
READ_ON_LOOP = 64  # at most so many changes are read without a worker thread

# Waking a reader costs about 0.03 ms. Many readers are woken less often and get more at once, so
# that the event loop does not keep the thread that captures from its work.
PAUSE_PER_READER = 0.000_05
LONGEST_PAUSE = 0.02


class FeedEntry:
    """A change, and its bytes in each format that was requested."""

    __slots__ = ("_encoded", "change", "sequence")

    def __init__(self, change: Change) -> None:
        self.change = change
        self.sequence = change.sequence
        self._encoded: dict[int, tuple[bytes, ...]] = {}

    def encode(self, format: Format, number: int) -> tuple[bytes, ...]:
        """The change in a format, which has this number in the feed; () if it is not carried."""
        encoded = self._encoded.get(number)
        if encoded is None:
            payload = format.encode(self.change)
            encoded = self._encoded[number] = () if payload is None else (payload,)
        return encoded


class Block:
    """Neighbouring changes, without holes; the newest block of the log still grows."""

    __slots__ = ("entries", "filling", "size")

    def __init__(self) -> None:
        self.entries: list[FeedEntry] = []
        self.size = 0  # bytes of the images
        self.filling = asyncio.Lock()

    def after(self, sequence: int, upto: int) -> list[FeedEntry]:
        """The entries beyond `sequence`, none beyond `upto`."""
        if not self.entries:
            return []
        first = self.entries[0].sequence
        return self.entries[max(sequence + 1 - first, 0) : max(upto + 1 - first, 0)]

    def lacks(self, sequence: int) -> bool:
        """Whether `sequence`, or everything, is still to be read."""
        return not self.entries or self.entries[-1].sequence < sequence

    def add(self, changes: Sequence[Change]) -> None:
        """Go on with what the log holds next."""
        if self.entries and changes[0].sequence != self.entries[-1].sequence + 1:
            self.entries, self.size = [], 0  # what lay between was trimmed, and so was this
        self.entries.extend(map(FeedEntry, changes))
        self.size += sum(map(image_size, changes))


class LogFeed:
    """What all subscriptions share."""

    def __init__(self, log: LogReader, model: Model | None = None) -> None:
        self.log = log
        self.entities = Entities(model or Model())
        self.renderings = Renderings(log)
        self.pages = PageCache()
        # How far the log went when readers were last woken. Those who follow it go so far and no
        # further, so that all of them get the same page.
        self.latest = log.latest_sequence
        self.epoch = log.epoch
        self.generation = log.generation
        self.closing = False
        self.delivered = Histogram()  # from the commit of an event until a reader got it
        self.waiting = 0  # how many subscriptions wait for a change now
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._numbers: dict[AnyFormat, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._arrivals: dict[asyncio.Future[None], None] = {}  # who waits, first come first woken
        self._waking = False
        self._rested = 0.0  # the loop time from which readers may be woken again
        self._turns = asyncio.Lock()

    def open(self) -> None:
        """Begin to wake subscriptions, on the running event loop, when something is committed."""
        self._blocks.clear()
        self.pages.clear()
        self._arrivals.clear()
        self.closing = False
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self.latest = self.log.latest_sequence

    def close(self) -> None:
        """End every wait and every stream; must be called on the event loop."""
        with self._lock:
            self._loop = None  # the log calls its listeners for as long as it lives
        self.closing = True
        self._wake()

    def gap(self, first: int, last: int) -> LogGap:
        """Changes that a reader has missed, and why they are gone."""
        removal = removal_of(self.log.removals(), last)
        return LogGap(first, last, "" if removal is None else str(removal.reason))

    def announce(self) -> None:
        """Wake whoever waits: there is more; may be called from any thread."""
        # One wake-up on its way is enough for many commits: who wakes looks at the log again.
        with self._lock:
            if self._loop is None or self._waking:
                return
            self._waking = True
            self._loop.call_soon_threadsafe(self._wake_in_time, self._loop)

    def number(self, format: AnyFormat) -> int:
        """The same for equal formats: comparing them takes longer than many an encoding."""
        return self._numbers.setdefault(format, len(self._numbers))

    async def wait(self, after: int, until: float) -> bool:
        """Until the log goes beyond `after`; False at `until` (loop time) or when closing."""
        self.waiting += 1
        try:
            if until == math.inf:
                await self._beyond(after)
            else:
                async with asyncio.timeout_at(until):
                    await self._beyond(after)
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1
        return not self.closing

    async def _beyond(self, after: int) -> None:
        while self.latest <= after and not self.closing:
            arrival = asyncio.get_running_loop().create_future()
            self._arrivals[arrival] = None
            try:
                await arrival
            finally:
                self._arrivals.pop(arrival, None)

    async def read(self, after: int, upto: int) -> list[FeedEntry]:
        """Some of the next entries; none beyond `upto`, which is committed; [] if none is left."""
        after = max(after, self.log.first_sequence - 1)
        if after >= upto:
            return []
        number = after // BLOCK
        last = min(upto, (number + 1) * BLOCK)
        block = self._block(number)
        if block.lacks(last):
            await self._fill(block, last)
        entries = block.after(after, last)
        # Nothing: it was trimmed while it was read.
        return entries or await self.read(last, upto)

    async def turn(self) -> None:
        """Wait for the turn to work on a block, one reader between two looks at all sockets.

        However many read much at once, whoever wants little waits for one block of theirs.
        """
        async with self._turns:
            await asyncio.sleep(0)

    def _block(self, number: int) -> Block:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = Block()
        self._blocks.move_to_end(number)
        return block

    async def _fill(self, block: Block, last: int) -> None:
        async with block.filling:
            if not block.lacks(last):
                return  # another subscription has read it meanwhile
            known = block.entries[-1].sequence if block.entries else (last - 1) // BLOCK * BLOCK
            if last - known <= READ_ON_LOOP:
                changes = self.log.read(known, limit=BLOCK, upto=last)
            else:
                changes = await asyncio.to_thread(self.log.read, known, limit=BLOCK, upto=last)
            if changes:
                block.add(changes)
        self._forget()

    def _forget(self) -> None:
        """Keep the blocks used last, within the limits, but always the newest of them."""
        size = sum(block.size for block in self._blocks.values())
        while len(self._blocks) > 1 and (len(self._blocks) > BLOCKS_KEPT or size > BYTES_KEPT):
            size -= self._blocks.popitem(last=False)[1].size

    def _wake_in_time(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop.time() >= self._rested:
            self._wake()
        else:
            loop.call_at(self._rested, self._wake)

    def _wake(self) -> None:
        self._waking = False
        self.latest = self.log.latest_sequence
        pause = min(self.waiting * PAUSE_PER_READER, LONGEST_PAUSE)
        self._rested = asyncio.get_running_loop().time() + pause
        arrivals, self._arrivals = self._arrivals, {}
        for arrival in arrivals:
            if not arrival.done():
                arrival.set_result(None)
