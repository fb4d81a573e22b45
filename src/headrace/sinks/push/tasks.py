"""What Spark's tasks do for a push sink: render, deliver, and report to the driver.

Each task reads all changes of a batch from the log, and renders and sends those of its own rows:
to look at the others costs far less than to bring changes from task to task, through the JVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import msgspec

from ...errors import SinkRefused, SinkUnavailable
from .. import LogRange
from ..lake.storage import Added, Folder
from .channels import ReconnectingChannel
from .contract import Event, PushDestination
from .deadletters import REFUSED, DeadLetterBuffer, blocked_rows
from .delivery import Counts, DeliveryCheckpoint, EventDelivery, Policy, Stopped
from .events import Barrier, EventRendering
from .ledger import ReadChanges
from .spill import EMPTY, Spill
from .waiting import Pending

LAST_PLACE = 2**31 - 1  # of an event among those of its change: all of them are before it

_to_msgpack = msgspec.msgpack.Encoder().encode

EpochEvents = tuple[str, list[Event]]  # a log, and events of it


class DestinationRefusal(msgspec.Struct, frozen=True):
    """The destination refuses everything until a person acts."""

    message: str
    hint: str


class PartProgress(msgspec.Struct, frozen=True):
    """How far a part is, from one round to the next."""

    checkpoint: DeliveryCheckpoint = DeliveryCheckpoint()
    read: ReadChanges = msgspec.field(
        default_factory=ReadChanges
    )  # changes of which nothing is left to be sent


_progress = msgspec.msgpack.Decoder(dict[int, PartProgress])


def packed(progress: dict[int, PartProgress]) -> bytes:
    """The progress of parts, as tasks read it."""
    return _to_msgpack(progress)


class TaskReport(msgspec.Struct):
    """What a task reports to the driver."""

    part: int
    parts: int = 1
    seen: ReadChanges = msgspec.field(default_factory=ReadChanges)
    read: ReadChanges = msgspec.field(default_factory=ReadChanges)  # as in PartProgress
    counts: Counts = msgspec.field(default_factory=Counts)
    added: list[Added] = []
    stopped: Stopped | None = None
    refusal: DestinationRefusal | None = None
    unread: str = ""  # why it could not begin; "": it did
    accepted_at: float = 0.0  # by the wall clock: when an event was last accepted
    again: bool = False  # Spark had run the task before, and what that run sent is not known
    barrier: int = 0  # the change before which it has ended; 0: it has read everything
    barrier_last: int = 0  # see Barrier

    @property
    def open(self) -> bool:
        """Whether something is left to be sent."""
        return self.stopped is not None or bool(self.unread)

    @property
    def reason(self) -> str:
        """Why it stopped early; "": it did not, or its time was over."""
        if self.refusal:
            return self.refusal.message
        return self.stopped.reason if self.stopped else self.unread


@dataclass(frozen=True, slots=True)
class DeliveryTask:
    """How a task delivers its events."""

    destination: PushDestination
    policy: Policy
    letters: Folder
    blocked: Spill = EMPTY  # rows that have dead letters
    progress: Spill = EMPTY  # how far parts are

    def progress_of(self, part: int) -> PartProgress:
        """How far a part is; SinkUnavailable: that cannot be read now."""
        content = self.progress.open(self.letters)
        return _progress.decode(content).get(part, PartProgress()) if content else PartProgress()

    def run(
        self, report: TaskReport, checkpoint: DeliveryCheckpoint, chunks: Iterable[EpochEvents]
    ) -> None:
        """Settle all events of a part, or stop; the result is in the report."""
        letters = DeadLetterBuffer(self.letters)
        letters.epoch, events = _first_epoch(iter(chunks))
        delivery = EventDelivery(
            ReconnectingChannel(self.destination).send,
            self.policy,
            letters,
            blocked=blocked_rows(self.blocked.open(self.letters), letters.epoch),
            checkpoint=checkpoint,
            full=lambda: letters.full,
        )
        try:
            delivery.run(events)
        except SinkRefused as error:
            report.refusal = DestinationRefusal(str(error), error.hint)
        if delivery.stopped is None and report.refusal is None:
            for _ in events:  # what was read is to be counted to its end
                pass
        letters.flush()
        report.counts, report.added, report.stopped = (
            delivery.counts,
            letters.added,
            delivery.stopped,
        )
        report.accepted_at = delivery.accepted_at
        if letters.error:
            report.stopped = _unsaved(report, letters, letters.error)


def _unsaved(report: TaskReport, letters: DeadLetterBuffer, error: SinkUnavailable) -> Stopped:
    """Where a part stops whose dead letters were not kept: these are still to be sent."""
    stopped = report.stopped or Stopped(DeliveryCheckpoint(report.seen.last, LAST_PLACE), "")
    unsaved = [
        Pending(sequence, at, 0, handed=status == REFUSED)
        for sequence, at, status in letters.unsaved
    ]
    refused = sum(status == REFUSED for *_, status in letters.unsaved)
    report.counts.refused -= refused
    report.counts.waiting -= len(unsaved) - refused
    pending = sorted([*stopped.checkpoint.pending, *unsaved])
    checkpoint = msgspec.structs.replace(stopped.checkpoint, pending=pending)
    return Stopped(checkpoint, f"dead letters cannot be kept: {error}")


def _first_epoch(chunks: Iterator[EpochEvents]) -> tuple[str, Iterator[list[Event]]]:
    head = list(islice(chunks, 1))
    rest = (events for part in (head, chunks) for _, events in part)
    return (head[0][0] if head else ""), rest


@dataclass(frozen=True, slots=True)
class SendTask:
    """A task that reads changes, and sends the events of its own rows."""

    render: EventRendering
    delivery: DeliveryTask
    open: frozenset[int] | None = None  # the parts that are not settled yet; None: all
    parts: int = 0  # into which the batch was divided then; otherwise they are of no use
    after: int = 0  # changes up to this one are settled in any case
    barrier: int = 0  # the last TRUNCATE or SCHEMA that may be sent …
    alone: bool = False  # … with nothing after it

    def __call__(self, wanted: LogRange) -> TaskReport | None:
        """Deliver a part, if it is to be delivered."""
        known = self.open is not None and wanted.parts == self.parts
        if known and wanted.part not in (self.open or ()):
            return None
        return self.delivered(wanted, known=known)

    def delivered(self, wanted: LogRange, *, known: bool) -> TaskReport:
        """Deliver a part; `known`: from where it stopped."""
        report = TaskReport(wanted.part, wanted.parts, again=_repeated())
        try:
            progress = self.delivery.progress_of(wanted.part) if known else PartProgress()
            self.delivery.blocked.open(self.delivery.letters)
        except SinkUnavailable as error:
            report.unread = str(error)  # not raised: other parts have something to report
            return report
        wanted = wanted.beyond(max(self.after, progress.read.last))
        if known and self.alone:
            wanted = replace(wanted, upto=self.barrier)
        barrier = Barrier(self.barrier if known else 0)
        reading = _Reading(progress.read)
        chunks = reading.chunks(self.render, wanted, barrier)
        report.seen = reading.seen
        self.delivery.run(report, progress.checkpoint, chunks)
        if report.stopped:
            report.read = reading.settled(report.stopped.checkpoint)
        else:
            report.barrier, report.barrier_last = barrier.met, barrier.last
        return report


def _repeated() -> bool:
    """Whether Spark runs a task once more, because it lost the one before."""
    # Not at the top: settings of sinks are read without Spark.
    from pyspark import TaskContext  # noqa: PLC0415

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


class _Reading:
    """What is read in a task, chunk by chunk."""

    def __init__(self, read: ReadChanges) -> None:
        self.seen = read.copy()
        self._ends = [read]  # what was seen after each chunk

    def chunks(
        self, render: EventRendering, wanted: LogRange, barrier: Barrier
    ) -> Iterator[EpochEvents]:
        for chunk in render.events(wanted, barrier):
            self.seen.add(chunk)
            self._ends.append(self.seen.copy())
            yield chunk.epoch, chunk.events

    def settled(self, checkpoint: DeliveryCheckpoint) -> ReadChanges:
        """The changes before a checkpoint, of which nothing is left to be sent."""
        first = min([checkpoint.sequence, *(each.sequence for each in checkpoint.pending[:1])])
        return [end for end in self._ends if end.last < first or end is self._ends[0]][-1]
