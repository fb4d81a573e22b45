"""What readers get at once, made once for all who want the same and stand at the same place."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

PAGES_KEPT = 256
BYTES_KEPT = 16 << 20  # of events; what transports make of them comes on top


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
    """What a reader gets at once, in commit order; never a part of what stands at a sequence.

    Many may have the same one, so nobody changes it.
    """

    deliveries: list[Delivery]
    scanned: int  # everything up to here is delivered, or not wanted, or lost in the gap
    gap: Gap | None = None
    _made: "dict[Callable[[Page], bytes], bytes]" = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def payloads(self) -> list[bytes]:
        """The encoded events alone."""
        return [delivery.payload for delivery in self.deliveries]

    def once(self, make: "Callable[[Page], bytes]") -> bytes:
        """What a transport makes of it, made for the first reader who asks."""
        made = self._made.get(make)
        if made is None:
            made = self._made[make] = make(self)
        return made


class Kind:
    """Readers who are told the same of every change."""

    __slots__ = ("__weakref__",)


class Place(NamedTuple):
    """Where a page begins and ends at the latest, and how much may be on it."""

    kind: Kind
    after: int
    end: int
    limit: int
    room: int


class Pages:
    """The pages made last: readers who were woken together ask for the same one after another."""

    def __init__(self) -> None:
        self._kinds: WeakValueDictionary[Hashable, Kind] = WeakValueDictionary()
        self._kept: OrderedDict[Place, tuple[Page, int]] = OrderedDict()
        self._size = 0

    def kind(self, told: Hashable) -> Kind:
        """The same for all readers of whom this is the same, while there is one."""
        return self._kinds.setdefault(told, Kind())

    def get(self, place: Place) -> Page | None:
        """The page that was made for another reader at the same place."""
        kept = self._kept.get(place)
        return None if kept is None else kept[0]

    def keep(self, place: Place, page: Page) -> None:
        """Keep a page for the next reader, instead of those made first."""
        size = sum(len(delivery.payload) for delivery in page.deliveries)
        self._size += size - self._kept.pop(place, (page, 0))[1]
        self._kept[place] = page, size
        while len(self._kept) > PAGES_KEPT or self._size > BYTES_KEPT:
            self._size -= self._kept.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget them all."""
        self._kept.clear()
        self._size = 0
