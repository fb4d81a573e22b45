"""What a subscription says of each change: one way for each kind of format."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..change.event import Change, Op, ends_piece
from ..formats import AnyFormat, Format, StreamFormat, TransactionFormat
from ..formats.entities import Test
from .feed import BLOCK, Entry, Feed
from .renderings import Rendering, render


class Telling(Protocol):
    """A format within one subscription."""

    async def ready(self, entries: list[Entry]) -> list[Entry]:
        """The first of some neighbouring entries, as many as can be told now.

        None of them: they were trimmed meanwhile and must be read again.
        """

    def tell(self, entry: Entry, *, wanted: bool) -> Sequence[bytes]:
        """The events at an entry that is ready; each is asked for once, in order."""


def telling(
    feed: Feed,
    format: AnyFormat,
    *,
    concerns: Test,
    passes: Test | None = None,
    visible: Test | None = None,
) -> Telling:
    """The way that suits a format.

    The reader may see the changes that are visible, and wants those of them that pass (None: all).
    Of changes that do not concern it, and of transactions without a visible one, not even marks
    are told.
    """
    if isinstance(format, TransactionFormat):
        return _Whole(feed, format)
    if isinstance(format, StreamFormat):
        streamed = _Streamed(feed, format, concerns, passes)
        return streamed if visible is None else _Limited(streamed, feed, visible)
    return _Single(feed, format)


class _Single:
    """Change by change: encoded once, for all subscriptions."""

    def __init__(self, feed: Feed, format: Format) -> None:
        self._format = format
        self._number = feed.number(format)

    async def ready(self, entries: list[Entry]) -> list[Entry]:
        return entries

    def tell(self, entry: Entry, *, wanted: bool) -> Sequence[bytes]:
        return entry.encode(self._format, self._number) if wanted else ()


class _Streamed:
    """As a stream that remembers what it has told: encoded for this subscription alone."""

    def __init__(
        self, feed: Feed, format: StreamFormat, concerns: Test, passes: Test | None
    ) -> None:
        self._feed = feed
        self._format = format
        self._concerns = concerns
        self._passes = passes
        self._stream = format.open()
        self._begun = False
        self._seen: list[bytes] = []  # to be told before the first entry

    async def ready(self, entries: list[Entry]) -> list[Entry]:
        if entries and not self._begun:
            self._begun = True
            await self._see(entries[0].change)
        return entries

    def tell(self, entry: Entry, *, wanted: bool) -> Sequence[bytes]:
        return self.told(entry.change, wanted=wanted)

    def told(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        """The events of a change, and of what the first one needed."""
        if not self._concerns(change):
            return ()
        told = self._stream.encode(change, wanted=wanted)
        if self._seen:
            told, self._seen = [*self._seen, *told], []
        return told

    async def _see(self, first: Change) -> None:
        """Show the stream the earlier changes that its first one needs, where they are left."""
        after, upto = self._format.begin(first) - 1, first.sequence - 1
        while after < upto and (entries := await self._feed.read(after, upto)):
            for entry in entries:
                wanted = self._passes is None or self._passes(entry.change)
                self._seen += self._stream.see(entry.change, wanted=wanted)
            after = entries[-1].sequence


class _Limited:
    """A stream for a reader who may not see everything: it hears only of its own transactions.

    One begins with the first change that is visible. Where it ends is told if its begin was.
    """

    def __init__(self, streamed: _Streamed, feed: Feed, visible: Test) -> None:
        self._streamed = streamed
        self._feed = feed
        self._visible = visible
        self._begun = False
        self._told: int | None = None  # the transaction whose begin was told, perhaps earlier

    async def ready(self, entries: list[Entry]) -> list[Entry]:
        ready = await self._streamed.ready(entries)
        if ready and not self._begun:
            self._begun = True
            first = ready[0].change
            if await self._seen_before(first):
                self._told = _transaction(first)
        return ready

    def tell(self, entry: Entry, *, wanted: bool) -> Sequence[bytes]:
        change = entry.change
        transaction = _transaction(change)
        if not self._visible(change):
            ends = change.last and self._told == transaction
            # A TRUNCATE of several tables is told at the last of them, visible or not.
            if not ends and change.op is not Op.TRUNCATE:
                return ()
            unmarked = msgspec.structs.replace(change, ordinal=0, last=ends)
            return self._streamed.told(unmarked, wanted=False)
        begins, self._told = self._told != transaction, transaction
        told = self._streamed.told(change, wanted=wanted)
        if begins and change.ordinal > 1:
            mark = msgspec.structs.replace(change, op=Op.MESSAGE, ordinal=1, last=False)
            return [*self._streamed.told(mark, wanted=False), *told]
        return told

    async def _seen_before(self, first: Change) -> bool:
        """Whether a change of the same transaction that stands before it is visible.

        The search goes backwards: a page mostly ends with a visible change.
        """
        begin, at = _transaction(first), first.sequence - 1
        while at > begin:
            after = max((at - 1) // BLOCK * BLOCK, begin)
            entries = await self._feed.read(after, at)
            if not entries:
                break  # they were trimmed
            if any(self._visible(entry.change) for entry in reversed(entries)):
                return True
            at = after
        return False


def _transaction(change: Change) -> int:
    """What tells transactions apart: the sequence before the first change."""
    return change.sequence - change.ordinal


class _Whole:
    """As whole transactions: rendered once, for all subscriptions, wherever these begin and end."""

    def __init__(self, feed: Feed, format: TransactionFormat) -> None:
        self._renderings = feed.renderings
        self._format = format
        self._number = feed.number(format)
        self._ready: list[Entry] = []
        self._current: Rendering | None = None  # what is being told

    async def ready(self, entries: list[Entry]) -> list[Entry]:
        if not entries:
            return entries
        first = entries[0].change
        end = next((each.sequence for each in reversed(entries) if ends_piece(each.change)), 0)
        # What has begun to be told is told to its end, also when its head is trimmed meanwhile:
        # a rendering of the rest would tell again of rows that were told with the head.
        if self._current is None or not self._current.covers(first):
            self._current = self._renderings.get(self._number, first)
        if self._current is None and (self._renderings.begin(first) < first.sequence or not end):
            # A part of it is not among the entries.
            self._current = await self._renderings.read(self._format, self._number, first)
            if self._current is None:
                return []
        if self._current is not None:
            end = max(end, self._current.end)
        self._ready = entries[: end + 1 - first.sequence]
        return self._ready

    def tell(self, entry: Entry, *, wanted: bool) -> Sequence[bytes]:
        current = self._current or self._rendered(entry)
        # What is told to its end must not stay here while nothing happens: it may be large.
        self._current = None if entry.sequence == current.end else current
        if entry is self._ready[-1]:
            self._ready = []
        return current.events.get(entry.sequence, ()) if wanted else ()

    def _rendered(self, entry: Entry) -> Rendering:
        """The rendering that begins with an entry, whose end is ready too."""
        rendering = self._renderings.get(self._number, entry.change)
        if rendering is None:
            at = entry.sequence - self._ready[0].sequence
            changes = [entry.change]
            while not ends_piece(changes[-1]):
                at += 1
                changes.append(self._ready[at].change)
            rendering = render(self._format, changes)
            self._renderings.keep(self._number, rendering)
        return rendering
