"""What Spark's tasks do for a push sink: render, deliver, and tell the driver.

Each task reads all changes of a batch from the log, and renders and sends those of its own rows:
to look at the others costs far less than to bring changes from task to task, through the JVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import msgspec

from ...errors import SinkRefused, SinkUnavailable
from .. import LogRange
from ..lake.storage import Added, Folder
from . import Destination, Event
from .channels import Line
from .deadletters import REFUSED, LetterBox, spans
from .delivery import Counts, Delivery, Point, Policy, Stopped
from .events import Rendering
from .held import Pending
from .ledger import Seen
from .parcel import EMPTY, Parcel

_LAST_PLACE = 2**31 - 1  # of an event among those of its change: all of them are before it

_to_msgpack = msgspec.msgpack.Encoder().encode

Told = tuple[str, list[Event]]  # a log, and events of it


class Refusal(msgspec.Struct, frozen=True):
    """That the destination refuses everything, until a person acts."""

    message: str
    hint: str


class Stand(msgspec.Struct, frozen=True):
    """How far a part is."""

    point: Point = Point()
    read: Seen = msgspec.field(default_factory=Seen)  # changes of which nothing is left to be sent


_stands = msgspec.msgpack.Decoder(dict[int, Stand])


def packed(stands: dict[int, Stand]) -> bytes:
    """Where parts stand, as tasks get it."""
    return _to_msgpack(stands)


class Delivered(msgspec.Struct):
    """A task's word to the driver."""

    part: int
    parts: int = 1
    seen: Seen = msgspec.field(default_factory=Seen)
    read: Seen = msgspec.field(default_factory=Seen)  # as in Stand
    counts: Counts = msgspec.field(default_factory=Counts)
    added: list[Added] = []
    stopped: Stopped | None = None
    refusal: Refusal | None = None
    unread: str = ""  # why it could not begin; "": it did
    accepted_at: float = 0.0  # by the wall clock: when something last was
    again: bool = False  # Spark had run the task before, and nobody knows what that one sent

    @property
    def open(self) -> bool:
        """Whether something is left to be sent."""
        return self.stopped is not None or bool(self.unread)

    @property
    def reason(self) -> str:
        """Why it ended before its end; "": it did not, or its time was over."""
        if self.refusal:
            return self.refusal.message
        return self.stopped.reason if self.stopped else self.unread


@dataclass(frozen=True, slots=True)
class Deliver:
    """How a task delivers its events."""

    destination: Destination
    policy: Policy
    letters: Folder
    blocked: Parcel = EMPTY  # rows that have dead letters
    stands: Parcel = EMPTY  # where parts stopped before

    def stand(self, part: int) -> Stand:
        """Where a part stopped before; SinkUnavailable: nobody knows now."""
        content = self.stands.open(self.letters)
        return _stands.decode(content).get(part, Stand()) if content else Stand()

    def delivered(self, told: Delivered, point: Point, chunks: Iterable[Told]) -> None:
        """Settle all events of a part, or stop; `told` gets to know it."""
        box = LetterBox(self.letters)
        box.epoch, events = _first_epoch(iter(chunks))
        delivery = Delivery(
            Line(self.destination).send,
            self.policy,
            box,
            blocked=spans(self.blocked.open(self.letters), box.epoch),
            point=point,
            full=lambda: box.full,
        )
        try:
            delivery.run(events)
        except SinkRefused as error:
            told.refusal = Refusal(str(error), error.hint)
        if delivery.stopped is None and told.refusal is None:
            for _ in events:  # what was read is to be counted to its end
                pass
        box.flush()
        told.counts, told.added, told.stopped = delivery.counts, box.added, delivery.stopped
        told.accepted_at = delivery.accepted_at
        if box.error:
            told.stopped = _unsaved(told, box, box.error)


def _unsaved(told: Delivered, box: LetterBox, error: SinkUnavailable) -> Stopped:
    """Where a part stands whose dead letters were not kept: these are still to be sent."""
    stopped = told.stopped or Stopped(Point(told.seen.last, _LAST_PLACE), "")
    held = [
        Pending(sequence, at, 0, handed=status == REFUSED) for sequence, at, status in box.unsaved
    ]
    refused = sum(status == REFUSED for *_, status in box.unsaved)
    told.counts.refused -= refused
    told.counts.waiting -= len(held) - refused
    pending = sorted([*stopped.point.pending, *held])
    point = msgspec.structs.replace(stopped.point, pending=pending)
    return Stopped(point, f"dead letters cannot be kept: {error}")


def _first_epoch(chunks: Iterator[Told]) -> tuple[str, Iterator[list[Event]]]:
    head = list(islice(chunks, 1))
    rest = (events for part in (head, chunks) for _, events in part)
    return (head[0][0] if head else ""), rest


@dataclass(frozen=True, slots=True)
class Send:
    """A task that reads changes, and sends the events of its own rows."""

    render: Rendering
    deliver: Deliver
    open: frozenset[int] | None = None  # the parts that are not settled yet; None: all
    parts: int = 0  # into which the batch was divided then; otherwise they are of no use
    after: int = 0  # changes up to this one are settled in any case

    def __call__(self, wanted: LogRange) -> Delivered | None:
        """Deliver a part, if it is to be delivered."""
        known = self.open is not None and wanted.parts == self.parts
        if known and wanted.part not in (self.open or ()):
            return None
        return self.delivered(wanted, known=known)

    def delivered(self, wanted: LogRange, *, known: bool) -> Delivered:
        """Deliver a part; `known`: from where it stands."""
        told = Delivered(wanted.part, wanted.parts, again=_repeated())
        try:
            stand = self.deliver.stand(wanted.part) if known else Stand()
            self.deliver.blocked.open(self.deliver.letters)
        except SinkUnavailable as error:
            told.unread = str(error)  # not raised: other parts have something to tell
            return told
        wanted = wanted.beyond(max(self.after, stand.read.last))
        reading = _Reading(stand.read)
        chunks = reading.chunks(self.render, wanted)
        told.seen = reading.seen
        self.deliver.delivered(told, stand.point, chunks)
        if told.stopped:
            told.read = reading.settled(told.stopped.point)
        return told


def _repeated() -> bool:
    """Whether Spark runs a task once more, because it lost the one before."""
    # Not at the top: settings of sinks are read without Spark.
    from pyspark import TaskContext  # noqa: PLC0415

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


class _Reading:
    """What is read in a task, chunk by chunk."""

    def __init__(self, read: Seen) -> None:
        self.seen = read.copy()
        self._ends = [read]  # what was seen after each chunk

    def chunks(self, render: Rendering, wanted: LogRange) -> Iterator[Told]:
        for chunk in render.events(wanted):
            self.seen.add(chunk)
            self._ends.append(self.seen.copy())
            yield chunk.epoch, chunk.events

    def settled(self, point: Point) -> Seen:
        """The changes of which nothing is left: whoever goes on from a point begins after them."""
        first = min([point.sequence, *(each.sequence for each in point.pending[:1])])
        return [end for end in self._ends if end.last < first or end is self._ends[0]][-1]
