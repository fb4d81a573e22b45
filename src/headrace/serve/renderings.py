"""Transactions as formats render them whole: once, for every subscription that comes by.

A page may end anywhere in a transaction, and the next one begins there. What was rendered is kept
for it, and for all others who read the same.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..event import Change
from ..formats import TransactionFormat
from ..log import LogReader

PIECE = 100_000  # changes; a larger transaction is rendered in pieces of so many
KEPT = 4096
BYTES_KEPT = 32 << 20

FIRST_READ, NEXT_READ = 256, 4096  # changes; most transactions are small


class Rendering(NamedTuple):
    """The events of a transaction, or of a piece of a large one."""

    begin: int  # sequence of its first change
    end: int  # sequence of its last change
    events: Mapping[int, tuple[bytes, ...]]  # by the sequence at which they stand
    size: int  # bytes, about


def begin_of(change: Change) -> int:
    """The sequence of the first change that is rendered together with this one.

    Changes of a transaction are neighbours in the log, and pieces are counted from its start.
    """
    return change.sequence - (change.ordinal - 1) % PIECE


def is_end(change: Change) -> bool:
    """Whether no later change is rendered together with this one."""
    return change.last or change.ordinal % PIECE == 0


def render(format: TransactionFormat, changes: Sequence[Change]) -> Rendering:
    """What is told of some neighbouring changes of one transaction."""
    events: dict[int, tuple[bytes, ...]] = {}
    size = 0
    for sequence, payload in format.render(changes):
        events[sequence] = (*events.get(sequence, ()), payload)
        size += len(payload) + 200  # for the objects around it
    return Rendering(changes[0].sequence, changes[-1].sequence, events, size)


class Renderings:
    """The renderings used last, under the number of their format and where they begin."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._kept: OrderedDict[tuple[int, int], Rendering] = OrderedDict()
        self._size = 0
        self._reading: dict[tuple[int, int], asyncio.Lock] = {}

    def get(self, number: int, begin: int) -> Rendering | None:
        """What was rendered of the changes that begin there."""
        rendering = self._kept.get((number, begin))
        if rendering is not None:
            self._kept.move_to_end((number, begin))
        return rendering

    def keep(self, number: int, rendering: Rendering) -> None:
        """Keep a rendering instead of those used longest ago; the newest one always stays."""
        replaced = self._kept.pop((number, rendering.begin), None)
        self._kept[number, rendering.begin] = rendering
        self._size += rendering.size - (replaced.size if replaced else 0)
        while len(self._kept) > 1 and (len(self._kept) > KEPT or self._size > BYTES_KEPT):
            self._size -= self._kept.popitem(last=False)[1].size

    async def read(self, format: TransactionFormat, number: int, begin: int) -> Rendering | None:
        """Read from the log and render what begins there; None: it was trimmed meanwhile."""
        reading = self._reading.setdefault((number, begin), asyncio.Lock())
        try:
            async with reading:
                rendering = self.get(number, begin)
                if rendering is None:
                    # In a thread: it may be a hundred thousand changes.
                    rendering = await asyncio.to_thread(self._rendered, format, begin)
                    if rendering is not None:
                        self.keep(number, rendering)
        finally:
            self._reading.pop((number, begin), None)
        return rendering

    def _rendered(self, format: TransactionFormat, begin: int) -> Rendering | None:
        changes = self._together(begin)
        return render(format, changes) if changes else None

    def _together(self, begin: int) -> list[Change] | None:
        """The changes from `begin` to the end of their transaction or piece; None: not there."""
        together: list[Change] = []
        limit = FIRST_READ
        while True:
            after = begin + len(together) - 1
            following = self._log.read(after, limit=limit)
            if not following and after >= self._log.latest_sequence:
                return together or None
            if not following or following[0].sequence != after + 1:
                return None
            for change in following:
                together.append(change)
                if is_end(change):
                    return together
            limit = NEXT_READ
