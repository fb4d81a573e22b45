"""Transactions as formats render them whole: once, for every subscription that comes by.

A page may end anywhere in a transaction, and the next one begins there. What was rendered is kept
for it, and for all others who read the same.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..change.event import Change, ends_piece, piece_begin
from ..errors import LogError
from ..formats import TransactionFormat
from ..log import LogReader

KEPT = 4096
BYTES_KEPT = 32 << 20
LARGEST = 512 << 20  # bytes of images that are rendered together

FIRST_READ, NEXT_READ = 256, 4096  # changes; most transactions are small


class RenderedTransaction(NamedTuple):
    """The events of a transaction, or of a piece of a large one."""

    piece: int  # sequence at which it began before it was trimmed
    begin: int  # sequence of its first change
    end: int  # sequence of its last change
    events: Mapping[int, tuple[bytes, ...]]  # by the sequence at which they stand
    size: int  # bytes, about

    def covers(self, change: Change) -> bool:
        """Whether it has the events of a change."""
        return self.begin <= change.sequence <= self.end


def render(format: TransactionFormat, changes: Sequence[Change]) -> RenderedTransaction:
    """The events of some neighbouring changes of one transaction."""
    _expect_room(format, changes[0], sum(map(image_size, changes)))
    events: dict[int, tuple[bytes, ...]] = {}
    size = 0
    for sequence, payload in format.render(changes):
        events[sequence] = (*events.get(sequence, ()), payload)
        size += len(payload) + 200  # for the objects around it
    first, last = changes[0], changes[-1]
    return RenderedTransaction(_piece(first), first.sequence, last.sequence, events, size)


def image_size(change: Change) -> int:
    """How many bytes a change's rows have."""
    return len(change.after or b"") + len(change.before or b"")


class Renderings:
    """The renderings used last, under the number of their format and where their piece began."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._kept: OrderedDict[tuple[int, int], RenderedTransaction] = OrderedDict()
        self._size = 0
        self._reading: dict[tuple[int, int], asyncio.Lock] = {}

    def begin(self, change: Change) -> int:
        """The sequence of the first change that is left of those rendered with this one."""
        return min(max(_piece(change), self._log.first_sequence), change.sequence)

    def get(self, number: int, change: Change) -> RenderedTransaction | None:
        """What was rendered of a change, perhaps before others of its transaction were trimmed."""
        rendering = self._kept.get((number, _piece(change)))
        if rendering is None or not rendering.covers(change):
            return None
        self._kept.move_to_end((number, rendering.piece))
        return rendering

    def keep(self, number: int, rendering: RenderedTransaction) -> None:
        """Keep a rendering instead of those used longest ago; the newest one always stays."""
        replaced = self._kept.pop((number, rendering.piece), None)
        self._kept[number, rendering.piece] = rendering
        self._size += rendering.size - (replaced.size if replaced else 0)
        while len(self._kept) > 1 and (len(self._kept) > KEPT or self._size > BYTES_KEPT):
            self._size -= self._kept.popitem(last=False)[1].size

    async def read(
        self, format: TransactionFormat, number: int, change: Change
    ) -> RenderedTransaction | None:
        """Read from the log and render what a change belongs to; None: it was trimmed meanwhile."""
        piece = _piece(change)
        reading = self._reading.setdefault((number, piece), asyncio.Lock())
        try:
            async with reading:
                rendering = self.get(number, change)
                if rendering is None:
                    # In a thread: it may be a hundred thousand changes.
                    begin = self.begin(change)
                    rendering = await asyncio.to_thread(self._rendered, format, begin)
                    if rendering is not None:
                        _expect_beside(rendering, change)
                        self.keep(number, rendering)
        finally:
            self._reading.pop((number, piece), None)
        return rendering

    def _rendered(self, format: TransactionFormat, begin: int) -> RenderedTransaction | None:
        changes = self._together(format, begin)
        return render(format, changes) if changes else None

    def _together(self, format: TransactionFormat, begin: int) -> list[Change] | None:
        """The changes from `begin` to the end of their transaction or piece; None: not there."""
        together: list[Change] = []
        limit, size = FIRST_READ, 0
        while True:
            after = begin + len(together) - 1
            following = self._log.read(after, limit=limit)
            if not following and after >= self._log.latest_sequence:
                return together or None
            if not following or following[0].sequence != after + 1:
                return None
            for change in following:
                together.append(change)
                size += image_size(change)
                if ends_piece(change):
                    return together
            _expect_room(format, together[0], size)
            limit = NEXT_READ


def _piece(change: Change) -> int:
    begin: int = piece_begin(change.sequence, change.ordinal)
    return begin


def _expect_room(format: TransactionFormat, first: Change, size: int) -> None:
    # Pieces with fewer changes would not end at the same places for every reader.
    if size > LARGEST:
        raise LogError(
            f"the rows of transaction {first.transaction.id}, from change {first.sequence} on, "
            f"have more than {LARGEST >> 20} MB, which is too much for an event of the whole",
            hint=f"Read it in another format than {format.name}, and go on after its last change.",
        )


def _expect_beside(rendering: RenderedTransaction, change: Change) -> None:
    if rendering.end < change.sequence:
        # No source of ours leaves holes in its ordinals; going on would never end.
        raise LogError(
            f"change {change.sequence} does not stand beside the rest of its transaction"
        )
