"""Pages of events, made once for all readers that want the same after the same sequence."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

PAGES_KEPT = 256
BYTES_KEPT = 16 << 20  # of events; what transports make of them comes on top


class PageEvent(NamedTuple):
    """An event as its reader gets it; several may stand at one sequence."""

    sequence: int
    payload: bytes


class LogGap(NamedTuple):
    """Sequences, both ends included, that were trimmed before this reader came to them."""

    first: int
    last: int
    reason: str = ""  # what removed them, such as cdc.max_log_gb; "": nobody knows any more

    @property
    def headers(self) -> dict[str, str]:
        """The gap as headers of a page."""
        named = {"X-Headrace-Gap": f"{self.first}-{self.last}"}
        return named | ({"X-Headrace-Gap-Reason": self.reason} if self.reason else {})


@dataclass(frozen=True, slots=True)
class FeedPage:
    """What a reader gets at once, in commit order; never a part of what stands at a sequence.

    Many may have the same one, so nobody changes it.
    """

    events: list[PageEvent]
    scanned: int  # everything up to here is delivered, or not wanted, or lost in the gap
    gap: LogGap | None = None
    committed_at: int = 0  # the last event's commit, µs since 1970; 0: none, or of a snapshot
    _made: "dict[Callable[[FeedPage], bytes], bytes]" = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def payloads(self) -> list[bytes]:
        """The encoded events alone."""
        return [event.payload for event in self.events]

    def once(self, make: "Callable[[FeedPage], bytes]") -> bytes:
        """What a transport makes of it, made for the first reader that needs it."""
        made = self._made.get(make)
        if made is None:
            made = self._made[make] = make(self)
        return made


class ReaderClass:
    """Readers with the same format, filter and permissions: they share pages."""

    __slots__ = ("__weakref__",)


class PageKey(NamedTuple):
    """What a page is kept under: its readers, where it begins and ends, how much may be on it."""

    readers: ReaderClass
    after: int
    end: int
    limit: int
    room: int


class PageCache:
    """The pages made last: readers who were woken together ask for the same one after another."""

    def __init__(self) -> None:
        self._classes: WeakValueDictionary[Hashable, ReaderClass] = WeakValueDictionary()
        self._kept: OrderedDict[PageKey, tuple[FeedPage, int]] = OrderedDict()
        self._size = 0
        self._making: dict[PageKey, asyncio.Future[None]] = {}

    def reader_class(self, conditions: Hashable) -> ReaderClass:
        """The same object for the same conditions, while there is a reader."""
        return self._classes.setdefault(conditions, ReaderClass())

    async def found(self, key: PageKey) -> FeedPage | None:
        """The page that another reader has made, or is making; None: make it with `making`."""
        while (kept := self._kept.get(key)) is None and key in self._making:
            await asyncio.wait([self._making[key]])
        return None if kept is None else kept[0]

    @contextmanager
    def making(self, key: PageKey) -> Iterator[None]:
        """Let those who want the same page wait until this one is made, or given up."""
        made = self._making[key] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._making[key]
            made.set_result(None)

    def keep(self, key: PageKey, page: FeedPage) -> None:
        """Keep a page for the next reader, instead of those made first."""
        size = sum(len(event.payload) for event in page.events)
        self._size += size - self._kept.pop(key, (page, 0))[1]
        self._kept[key] = page, size
        while len(self._kept) > PAGES_KEPT or self._size > BYTES_KEPT:
            self._size -= self._kept.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget them all."""
        self._kept.clear()
        self._size = 0
