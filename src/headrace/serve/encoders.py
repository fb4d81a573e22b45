"""The events of each change in a subscription: an encoder for each kind of format."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..change.event import Change, Op, ends_piece
from ..formats import AnyFormat, Format, StreamFormat, TransactionFormat
from ..formats.entities import Test
from .feed import BLOCK, FeedEntry, LogFeed
from .renderings import RenderedTransaction, render


class EventEncoder(Protocol):
    """A format within one subscription."""

    async def ready(self, entries: list[FeedEntry]) -> list[FeedEntry]:
        """The first of some neighbouring entries, as many as can be encoded now.

        None of them: they were trimmed meanwhile and must be read again.
        """

    def encode(self, entry: FeedEntry, *, wanted: bool) -> Sequence[bytes]:
        """The events at an entry that is ready; each is called once, in order."""


def encoder(
    feed: LogFeed,
    format: AnyFormat,
    *,
    concerns: Test,
    passes: Test | None = None,
    visible: Test | None = None,
) -> EventEncoder:
    """The encoder for a format.

    The reader may see the changes that are visible, and wants those of them that pass (None: all).
    Of changes that do not concern it, and of transactions without a visible one, not even marks
    are sent.
    """
    if isinstance(format, TransactionFormat):
        return _TransactionEncoder(feed, format)
    if isinstance(format, StreamFormat):
        stream = _StreamEncoder(feed, format, concerns, passes)
        return stream if visible is None else _VisibleStreamEncoder(stream, feed, visible)
    return _ChangeEncoder(feed, format)


class _ChangeEncoder:
    """Change by change: encoded once, for all subscriptions."""

    def __init__(self, feed: LogFeed, format: Format) -> None:
        self._format = format
        self._number = feed.number(format)

    async def ready(self, entries: list[FeedEntry]) -> list[FeedEntry]:
        return entries

    def encode(self, entry: FeedEntry, *, wanted: bool) -> Sequence[bytes]:
        return entry.encode(self._format, self._number) if wanted else ()


class _StreamEncoder:
    """As a stream with a memory: encoded for this subscription alone."""

    def __init__(
        self, feed: LogFeed, format: StreamFormat, concerns: Test, passes: Test | None
    ) -> None:
        self._feed = feed
        self._format = format
        self._concerns = concerns
        self._passes = passes
        self._stream = format.open()
        self._begun = False
        self._seen: list[bytes] = []  # to be sent before the first entry

    async def ready(self, entries: list[FeedEntry]) -> list[FeedEntry]:
        if entries and not self._begun:
            self._begun = True
            await self._see(entries[0].change)
        return entries

    def encode(self, entry: FeedEntry, *, wanted: bool) -> Sequence[bytes]:
        return self.events_of(entry.change, wanted=wanted)

    def events_of(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        """The events of a change, and of what the first one needed."""
        if not self._concerns(change):
            return ()
        events = self._stream.encode(change, wanted=wanted)
        if self._seen:
            events, self._seen = [*self._seen, *events], []
        return events

    async def _see(self, first: Change) -> None:
        """Show the stream the earlier changes that its first one needs, where they are left."""
        after, upto = self._format.begin(first) - 1, first.sequence - 1
        while after < upto and (entries := await self._feed.read(after, upto)):
            for entry in entries:
                wanted = self._passes is None or self._passes(entry.change)
                self._seen += self._stream.see(entry.change, wanted=wanted)
            after = entries[-1].sequence


class _VisibleStreamEncoder:
    """A stream for a reader who may not see everything: it gets only its own transactions.

    One begins with the first change that is visible. Its end is sent if its begin was.
    """

    def __init__(self, stream: _StreamEncoder, feed: LogFeed, visible: Test) -> None:
        self._encoder = stream
        self._feed = feed
        self._visible = visible
        self._begun = False
        self._begun_transaction: int | None = (
            None  # the transaction whose begin was sent, perhaps earlier
        )

    async def ready(self, entries: list[FeedEntry]) -> list[FeedEntry]:
        ready = await self._encoder.ready(entries)
        if ready and not self._begun:
            self._begun = True
            first = ready[0].change
            if await self._seen_before(first):
                self._begun_transaction = _transaction(first)
        return ready

    def encode(self, entry: FeedEntry, *, wanted: bool) -> Sequence[bytes]:
        change = entry.change
        transaction = _transaction(change)
        if not self._visible(change):
            ends = change.last and self._begun_transaction == transaction
            # A TRUNCATE of several tables is sent with the last of them, visible or not.
            if not ends and change.op is not Op.TRUNCATE:
                return ()
            unmarked = msgspec.structs.replace(change, ordinal=0, last=ends)
            return self._encoder.events_of(unmarked, wanted=False)
        begins, self._begun_transaction = self._begun_transaction != transaction, transaction
        events = self._encoder.events_of(change, wanted=wanted)
        if begins and change.ordinal > 1:
            mark = msgspec.structs.replace(change, op=Op.MESSAGE, ordinal=1, last=False)
            return [*self._encoder.events_of(mark, wanted=False), *events]
        return events

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


class _TransactionEncoder:
    """As whole transactions: rendered once, for all subscriptions, wherever these begin and end."""

    def __init__(self, feed: LogFeed, format: TransactionFormat) -> None:
        self._renderings = feed.renderings
        self._format = format
        self._number = feed.number(format)
        self._ready: list[FeedEntry] = []
        self._current: RenderedTransaction | None = None  # what is being sent

    async def ready(self, entries: list[FeedEntry]) -> list[FeedEntry]:
        if not entries:
            return entries
        first = entries[0].change
        end = next((each.sequence for each in reversed(entries) if ends_piece(each.change)), 0)
        # What has begun to be sent is sent to its end, also when its head is trimmed meanwhile:
        # a rendering of the rest would repeat rows that were sent with the head.
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

    def encode(self, entry: FeedEntry, *, wanted: bool) -> Sequence[bytes]:
        current = self._current or self._rendered(entry)
        # What is sent to its end must not stay here while nothing happens: it may be large.
        self._current = None if entry.sequence == current.end else current
        if entry is self._ready[-1]:
            self._ready = []
        return current.events.get(entry.sequence, ()) if wanted else ()

    def _rendered(self, entry: FeedEntry) -> RenderedTransaction:
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
