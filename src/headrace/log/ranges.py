"""Where readers that share the work may cut the log: between transactions, never inside one.

Nothing is scanned: a record says how far into its transaction it stands, so the place where that
transaction began is known from one look, and the place where it ends from a few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ..change.record import RecordHead
from .holding import explained, removal_of
from .lineage import UNKNOWN_GENERATION, Generation, likely_fork, shared_upto

if TYPE_CHECKING:
    from .reader import LogReader

SMALLEST = 5_000  # changes; a smaller range costs more to hand out than to read


class Ranges(msgspec.Struct, frozen=True):
    """Neighbouring ranges of a log: each begins after the end of the one before."""

    epoch: str
    first_sequence: int  # of the oldest change kept
    latest_sequence: int
    ends: list[int]  # in order; none: there is nothing to read
    removed: str = ""  # why what follows `after` is gone, to be added to a sentence
    lineage: list[Generation] = []  # none: the server is an earlier version's
    left_since: int = 0  # when the first change beyond the ends was captured (µs); 0: none is left
    since: int = 0  # the first sequence captured at a time or after it, where one was given

    @property
    def generation(self) -> str:
        """The generation that a reader of these ranges is in."""
        return self.lineage[-1].id if self.lineage else UNKNOWN_GENERATION

    def shared_upto(self, epoch: str, generation: str) -> int | None:
        """Up to which sequence a place in another log or history holds here; None: nowhere."""
        if not self.lineage and epoch == self.epoch:
            return self.latest_sequence
        return shared_upto(self.lineage, epoch, generation, self.latest_sequence)

    def likely_fork(self, epoch: str, generation: str) -> int | None:
        """Up to where this log and that history of it are likely the same; None: nowhere."""
        upto = self.shared_upto(epoch, generation)
        if upto is None:
            return likely_fork(self.lineage, epoch, generation, self.latest_sequence)
        return upto


def plan(
    log: LogReader, after: int, *, limit: int | None = None, upto: int | None = None, parts: int = 1
) -> Ranges:
    """Ranges that hold what follows `after`.

    Without `upto` the last of them ends a transaction and they hold at most `limit` changes,
    unless one transaction alone has more. There are at most `parts`.
    """
    first, latest = log.first_sequence, log.latest_sequence
    gone = after + 1 < first
    removed = explained(removal_of(log.removals(), after + 1)) if gone else ""
    after = max(after, first - 1)
    cuts = _Cuts(log.place, latest)
    end = latest if upto is None else min(upto, latest)
    if limit is not None and end - after > limit:
        end = min(cuts.near(after + limit, after), end)
    ends = cuts.split(after, end, parts) if end > after else []
    left = log.place(end + 1) if ends and end < latest else None
    left_since = left.captured_at if left else 0
    # After `latest`: a generation that begins meanwhile has room for a place before it, and the one
    # that ends has none for a place after it.
    return Ranges(log.epoch, first, latest, ends, removed, log.lineage, left_since)


class _Cuts:
    """Finds the ends of transactions."""

    def __init__(self, place: Callable[[int], RecordHead | None], latest: int) -> None:
        self._place = place
        self._latest = latest  # always the end of a transaction

    def split(self, after: int, end: int, parts: int) -> list[int]:
        """Ends of ranges of about the same size."""
        parts = max(1, min(parts, (end - after) // SMALLEST))
        ends: list[int] = []
        for part in range(1, parts):
            begun = ends[-1] if ends else after
            cut = self.near(after + (end - after) * part // parts, begun)
            if begun < cut < end:
                ends.append(cut)
        return [*ends, end]

    def near(self, target: int, after: int) -> int:
        """The last end of a transaction up to `target`, or the first beyond it if none is left."""
        if target >= self._latest:
            return self._latest
        following = self._place(target + 1)
        if following is None:  # trimmed meanwhile; whoever reads the range will notice
            return target
        before = target + 1 - following.ordinal
        if before > after and self._ends(before):
            return before
        return self._end_of(target + 1, following)

    def _end_of(self, sequence: int, place: RecordHead) -> int:
        """The end of the transaction that a change belongs to."""
        inside, step = sequence, 1
        while step:
            there = inside + step
            if there <= self._latest and self._together(sequence, place, there):
                inside, step = there, step * 2
            else:
                step //= 2
        return inside if self._ends(inside) else self._next_end(inside)

    def _together(self, sequence: int, place: RecordHead, other: int) -> bool:
        there = self._place(other)
        return (
            there is not None
            and there.transaction == place.transaction
            and other - there.ordinal == sequence - place.ordinal
        )

    def _ends(self, sequence: int) -> bool:
        place = self._place(sequence)
        return place is not None and place.last

    def _next_end(self, sequence: int) -> int:
        # Only where ordinals have a hole, which no source of ours leaves.
        while sequence < self._latest and not self._ends(sequence):
            sequence += 1
        return sequence
