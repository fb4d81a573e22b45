"""What Spark's tasks do for a push sink: render, deliver, and tell the driver.

Each task reads all changes of a batch from the log, and renders and sends those of its own rows:
to look at the others costs far less than to bring changes from task to task, through the JVM.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import pyarrow as pa

from ... import frame
from ...errors import SinkRefused
from .._store import Added, Folder
from . import Destination, Event
from .channels import Line
from .deadletters import LetterBox, spans
from .delivery import Counts, Delivery, Point, Policy, Stopped
from .events import Chunk, Rendering

SAID_DDL = "said string"

_SAID = pa.schema([("said", pa.string())])

_to_json = msgspec.json.Encoder().encode

Batches = Iterator[pa.RecordBatch]
Told = tuple[str, list[Event]]  # a log, and events of it


class Seen(msgspec.Struct):
    """The changes that a task has read."""

    changes: int = 0
    first: int = 0
    last: int = 0
    epochs: set[str] = set()

    def add(self, chunk: Chunk) -> None:
        """Count these too."""
        self.changes += chunk.changes
        self.first = self.first or chunk.first
        self.last = max(self.last, chunk.last)
        self.epochs |= {chunk.epoch}


class Refusal(msgspec.Struct, frozen=True):
    """That the destination refuses everything, until a person acts."""

    message: str
    hint: str


class Delivered(msgspec.Struct):
    """A task's word to the driver."""

    part: int
    seen: Seen = msgspec.field(default_factory=Seen)
    counts: Counts = msgspec.field(default_factory=Counts)
    added: list[Added] = []
    stopped: Stopped | None = None
    refusal: Refusal | None = None

    @property
    def reason(self) -> str:
        """Why it ended before its end; "": it did not."""
        if self.refusal:
            return self.refusal.message
        return self.stopped.reason if self.stopped else ""


@dataclass(frozen=True, slots=True)
class Deliver:
    """How a task delivers its events."""

    destination: Destination
    policy: Policy
    letters: Folder
    blocked: bytes = b""  # rows that have dead letters
    points: dict[int, Point] = field(default_factory=dict)  # where parts stopped before

    def delivered(
        self, part: int, chunks: Iterable[tuple[str, list[Event]]], seen: Seen
    ) -> Delivered:
        """Settle all events of a part, or stop."""
        box = LetterBox(self.letters)
        epoch, events = _first_epoch(iter(chunks))
        box.epoch = epoch
        delivery = Delivery(
            Line(self.destination).send,
            self.policy,
            box,
            blocked=spans(self.blocked, epoch),
            point=self.points.get(part, Point()),
        )
        refusal = None
        try:
            delivery.run(events)
        except SinkRefused as error:
            refusal = Refusal(str(error), error.hint)
        if delivery.stopped is None and refusal is None:
            for _ in events:  # what was read is to be counted to its end
                pass
        box.flush()
        return Delivered(part, seen, delivery.counts, box.added, delivery.stopped, refusal)


def _first_epoch(chunks: Iterator[Told]) -> tuple[str, Iterator[list[Event]]]:
    head = list(islice(chunks, 1))
    rest = (events for part in (head, chunks) for _, events in part)
    return (head[0][0] if head else ""), rest


@dataclass(frozen=True, slots=True)
class Send:
    """A task that reads changes, and sends the events of its own rows."""

    render: Rendering
    deliver: Deliver
    open: frozenset[int]  # the parts that are not settled yet

    def __call__(self, batches: Batches) -> Batches:
        """Deliver a part, if it is to be delivered."""
        for packed in (each for batch in batches for each in batch.column(0)):
            # Pickled by this very query's source, as Spark itself does with this function.
            share: frame.Share = pickle.loads(packed.as_buffer())
            if share.part in self.open:
                seen = Seen()
                yield said(self.deliver.delivered(share.part, self._chunks(share, seen), seen))

    def _chunks(self, share: frame.Share, seen: Seen) -> Iterator[Told]:
        for chunk in self.render.shared(share):
            seen.add(chunk)
            yield chunk.epoch, chunk.events


def said(what: msgspec.Struct) -> pa.RecordBatch:
    """A task's word to the driver."""
    return pa.RecordBatch.from_pylist([{"said": _to_json(what).decode()}], _SAID)
