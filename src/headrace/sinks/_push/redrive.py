"""Dead letters sent again: asked for with a file in the sink's folder, done between batches.

Whoever asks need not be the process that sends. The file `redrive.json` is the wish, and
`redriven.json` says what came of the last one.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import SinkRefused
from .._store import Added, Folder
from . import Destination, Event
from .channels import Line
from .deadletters import EARLIER, FILE, LetterBox, events_of
from .delivery import Counts, Delivery, Policy, Span
from .events import part_of
from .tasks import Batches, Delivered, Refusal, Seen, said

_ASKED, _TOLD = "redrive.json", "redriven.json"

OPENED_DDL = "part int, rank int, sequence long, at int, event binary, told binary"
_OPENED = pa.schema(
    [
        ("part", pa.int32()),
        ("rank", pa.int32()),
        ("sequence", pa.int64()),
        ("at", pa.int32()),
        ("event", pa.binary()),
        ("told", pa.binary()),
    ]
)
_CHUNK = 1000
_MOST_REASONS = 20
ORDER = ("rank", "sequence", "at")

_pack = msgspec.msgpack.Encoder().encode
_event = msgspec.msgpack.Decoder(tuple[str, Event]).decode


class Wish(msgspec.Struct, frozen=True):
    """What somebody wants to be sent again."""

    id: str
    keys: list[str] = []  # table:key, as in a dead letter's row; none: all
    at: int = 0  # microseconds since 1970


class Redriven(msgspec.Struct, frozen=True):
    """What came of a wish."""

    id: str
    letters: int = 0  # that were there
    sent: int = 0  # and were accepted
    left: int = 0  # that are there now
    reason: str = ""  # why some are left: the last one told
    done: bool = True  # False: it has begun
    refused: int = 0  # of those that were sent again, refused again …
    waiting: int = 0  # … and behind these
    reasons: dict[str, int] = {}  # why, each with how many


def ask(folder: str, keys: Sequence[str] = ()) -> Wish:
    """Ask for it; a wish that nobody has come to yet is replaced."""
    wish = Wish(uuid.uuid4().hex, list(keys), time.time_ns() // 1000)
    _write(Path(folder, _ASKED), wish)
    return wish


def asked(folder: str) -> Wish | None:
    """What is asked for; None: nothing."""
    try:
        return msgspec.json.decode(Path(folder, _ASKED).read_bytes(), type=Wish)
    except FileNotFoundError:
        return None


def tell(folder: str, told: Redriven) -> None:
    """Say what came of it."""
    _write(Path(folder, _TOLD), told)
    wish = asked(folder)
    if told.done and wish is not None and wish.id == told.id:
        Path(folder, _ASKED).unlink()


def told(folder: str, wish: Wish) -> Redriven | None:
    """What came of a wish; None: nobody has come to it yet."""
    try:
        last = msgspec.json.decode(Path(folder, _TOLD).read_bytes(), type=Redriven)
    except FileNotFoundError:
        return None
    return last if last.id == wish.id else None


def _write(file: Path, what: Wish | Redriven) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(what))
    fresh.replace(file)


# --- tasks ---------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True):
    """A file whose letters are sent again, and the one that has those which are not."""

    removed: str
    added: list[Added]


@dataclass(frozen=True, slots=True)
class Open:
    """A task that reads files of dead letters, and parts those that are wanted by row."""

    folder: Folder
    files: list[str]
    keys: frozenset[str]
    ranks: dict[str, int]  # logs, in the order in which they were followed
    parts: int

    def __call__(self, batches: Batches) -> Batches:
        """Read the files whose numbers come."""
        for batch in batches:
            for at in batch.column("id").to_pylist():
                yield from self._opened(self.files[at])

    def _opened(self, file: str) -> Batches:
        letters = self.folder.read(file)
        wanted = pa.array([self._wants(row) for row in letters["row"].to_pylist()], pa.bool_())
        chosen, rest = letters.filter(wanted), letters.filter(pc.invert(wanted))
        if not chosen.num_rows:
            return
        kept = [self.folder.write(rest, FILE, {})] if rest.num_rows else []
        yield self._told(Opened(file, kept))
        for at in range(0, chosen.num_rows, 1000):
            yield self._parted(events_of(chosen.slice(at, 1000)))

    def _wants(self, row: str) -> bool:
        if not self.keys:
            return True
        # source|schema.table:key
        name = row.partition("|")[2]
        return name in self.keys or name.partition(".")[2] in self.keys

    def _told(self, opened: Opened) -> pa.RecordBatch:
        return pa.record_batch([[0], [-1], [0], [0], [None], [_pack(opened)]], _OPENED)

    def _parted(self, events: Sequence[tuple[str, Event]]) -> pa.RecordBatch:
        rows = [
            (part_of(event.row, self.parts), self.ranks[epoch], event.sequence, event.at)
            for epoch, event in events
        ]
        columns = [list(column) for column in zip(*rows, strict=True)]
        packed = [_pack(each) for each in events]
        return pa.record_batch([*columns, packed, [None] * len(rows)], _OPENED)


class Resent(msgspec.Struct):
    """A task's word to the driver."""

    delivered: Delivered
    opened: list[Opened] = []
    reasons: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Resend:
    """A task that sends dead letters, and keeps what is not accepted."""

    destination: Destination
    policy: Policy
    letters: Folder

    def __call__(self, batches: Batches) -> Batches:
        """Send what comes, in order."""
        resent = Resent(Delivered(0, Seen(), Counts()))
        box = LetterBox(self.letters)
        blocked: dict[str, Span] = {}
        for epoch, events in groupby(_unpacked(batches, resent.opened), itemgetter(0)):
            box.epoch = epoch
            self._send(resent.delivered, box, blocked, _chunks(event for _, event in events))
            blocked = dict.fromkeys(blocked, EARLIER)
        box.flush()
        resent.delivered.added, resent.reasons = box.added, box.reasons
        yield said(resent)

    def _send(
        self,
        told: Delivered,
        box: LetterBox,
        blocked: dict[str, Span],
        events: Iterator[list[Event]],
    ) -> None:
        line = Line(self.destination)
        delivery = Delivery(line.send, self.policy, box, blocked, counts=told.counts)
        if told.stopped or told.refusal:
            delivery.abandon(events, told.reason)
            return
        try:
            delivery.run(events)
        except SinkRefused as error:
            told.refusal = Refusal(str(error), error.hint)
        told.stopped = delivery.stopped
        if told.stopped or told.refusal:
            delivery.abandon(events, told.reason)


def reasons(told: Sequence[Resent]) -> dict[str, int]:
    """Why letters were not accepted, the most frequent reasons first."""
    total: Counter[str] = Counter()
    for each in told:
        total.update(each.reasons)
    return dict(total.most_common(_MOST_REASONS))


def _chunks(events: Iterator[Event]) -> Iterator[list[Event]]:
    while chunk := list(islice(events, _CHUNK)):
        yield chunk


def _unpacked(batches: Batches, opened: list[Opened]) -> Iterator[tuple[str, Event]]:
    rows = chain.from_iterable(zip(b["event"], b["told"], strict=True) for b in batches)
    for event, told_of in rows:
        if told_of.is_valid:
            opened.append(msgspec.msgpack.decode(told_of.as_buffer(), type=Opened))
        else:
            yield _event(event.as_buffer())
