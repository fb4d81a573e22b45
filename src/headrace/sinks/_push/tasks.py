"""What Spark's tasks do for a push sink: render, part by row, deliver, and tell the driver.

A batch that one task reads is rendered and delivered by it. One that several read is parted by
row, so that all events of a row meet in one task. Between tasks events travel as bytes, many in a
row, which the JVM need not take apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import pyarrow as pa
from pyspark import TaskContext

from ...errors import SinkRefused
from .._store import Added, Folder
from . import Destination, Event
from .channels import Line
from .deadletters import LetterBox, spans
from .delivery import Counts, Delivery, Point, Policy, Stopped
from .events import Chunk, Rendering

SAID_DDL = "said string"
PARTED_DDL = "part int, first long, at int, events binary, seen binary"
ORDER = ("first", "at")  # where a pack begins

_SAID = pa.schema([("said", pa.string())])
_PARTED = pa.schema(
    [
        ("part", pa.int32()),
        ("first", pa.int64()),
        ("at", pa.int32()),
        ("events", pa.binary()),
        ("seen", pa.binary()),
    ]
)
_PACK_EVENTS = 2000
_PACK_BYTES = 2_000_000

_to_json = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode

Batches = Iterator[pa.RecordBatch]
Told = tuple[str, list[Event]]  # a log, and events of it


class Seen(msgspec.Struct):
    """The changes that a task has read."""

    changes: int = 0
    first: int = 0
    last: int = 0
    epochs: set[str] = set()

    def add(self, other: Chunk | Seen) -> None:
        """Count these too."""
        self.changes += other.changes
        self.first = (
            min(self.first, other.first)
            if self.first and other.first
            else self.first or other.first
        )
        self.last = max(self.last, other.last)
        self.epochs |= {other.epoch} if isinstance(other, Chunk) else other.epochs


_seen = msgspec.msgpack.Decoder(Seen).decode


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
class Straight:
    """A task that reads a whole batch, and delivers it."""

    render: Rendering
    deliver: Deliver

    def __call__(self, batches: Batches) -> Batches:
        """Render and deliver."""
        seen = Seen()
        yield said(self.deliver.delivered(0, self._chunks(batches, seen), seen))

    def _chunks(self, batches: Batches, seen: Seen) -> Iterator[Told]:
        for chunk in self.render(batches):
            seen.add(chunk)
            yield chunk.epoch, chunk.events


@dataclass(frozen=True, slots=True)
class Part:
    """A task that reads some of a batch, and parts its events by row."""

    render: Rendering
    parts: int
    open: frozenset[int]  # the parts that are not settled yet

    def __call__(self, batches: Batches) -> Batches:
        """Render, and send each event to the part of its row."""
        seen = Seen()
        for chunk in self.render(batches):
            seen.add(chunk)
            for part, events in self._parted(chunk.events):
                yield _parted(part, chunk.epoch, events)
        yield pa.record_batch([[0], [0], [0], [None], [_pack(seen)]], _PARTED)

    def _parted(self, events: Iterable[Event]) -> Iterator[tuple[int, list[Event]]]:
        held: list[list[Event]] = [[] for _ in range(self.parts)]
        sizes = [0] * self.parts
        for event in events:
            part = part_of(event.row, self.parts)
            if part not in self.open:
                continue
            held[part].append(event)
            sizes[part] += len(event.payload or b"")
            if len(held[part]) >= _PACK_EVENTS or sizes[part] >= _PACK_BYTES:
                yield part, held[part]
                held[part], sizes[part] = [], 0
        yield from ((part, rest) for part, rest in enumerate(held) if rest)


def part_of(row: str, parts: int) -> int:
    """The part that sends a row's events."""
    return zlib.crc32(row.encode()) % parts


def _parted(part: int, epoch: str, events: list[Event]) -> pa.RecordBatch:
    first = events[0]
    columns = [[part], [first.sequence], [first.at], [_pack((epoch, events))], [None]]
    return pa.record_batch(columns, _PARTED)


@dataclass(frozen=True, slots=True)
class Parted:
    """A task that delivers a part; events come in the order of their packs."""

    deliver: Deliver

    def __call__(self, batches: Batches) -> Batches:
        """Deliver."""
        context = TaskContext.get()
        assert context is not None
        seen = Seen()
        yield said(self.deliver.delivered(context.partitionId(), _unpacked(batches, seen), seen))


_pair = msgspec.msgpack.Decoder(tuple[str, list[Event]]).decode


def _unpacked(batches: Batches, seen: Seen) -> Iterator[Told]:
    for batch in batches:
        for pack, told in zip(batch["events"], batch["seen"], strict=True):
            if told.is_valid:
                seen.add(_seen(told.as_buffer()))
            if pack.is_valid:
                yield _pair(pack.as_buffer())


def said(what: msgspec.Struct) -> pa.RecordBatch:
    """A task's word to the driver."""
    return pa.RecordBatch.from_pylist([{"said": _to_json(what).decode()}], _SAID)
