"""Dead letters sent again: asked for with a file in the sink's folder, done between batches.

Whoever asks need not be the process that sends. The file `redrive.json` is the wish, and
`redriven.json` says what came of the last one.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import SinkRefused
from ..lake.storage import Added, Folder
from ..results import Batches, result
from . import Destination, Event
from .channels import Line
from .deadletters import EARLIER, FILE, REFUSED, SCHEMA, events_of
from .delivery import Delivery, Policy, Position, Span
from .events import part_of
from .tasks import Delivered, Refusal

logger = logging.getLogger(__name__)

_ASKED, _TOLD = "redrive.json", "redriven.json"

MOST_LETTERS = 5000  # sent again before it is noted, and others get their turn
_MOST_BYTES = 32_000_000
_MOST_REASONS = 20
_CHUNK = 1000
SLICE = "redrive"  # what the file is called that tasks get letters by
_PLACE = ["epoch", "row", "sequence", "at"]


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
    file = Path(folder, _ASKED)
    try:
        return msgspec.json.decode(file.read_bytes(), type=Wish)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        logger.warning("file=%s cannot be read and is removed; ask once more", file)
        file.unlink(missing_ok=True)
        return None


def tell(folder: str, told: Redriven) -> None:
    """Say what came of it."""
    _write(Path(folder, _TOLD), told)
    if told.done:
        _take_away(Path(folder, _ASKED), told.id)


def _take_away(file: Path, wish_id: str) -> None:
    """Remove a wish that is answered; one that has just taken its place stays."""
    aside = file.with_suffix(f".{uuid.uuid4().hex}")
    try:
        file.rename(aside)
    except FileNotFoundError:
        return
    try:
        if msgspec.json.decode(aside.read_bytes(), type=Wish).id != wish_id and not file.exists():
            os.link(aside, file)
    except (FileExistsError, msgspec.DecodeError) as error:
        # A still newer wish is there, or what was there says nothing.
        logger.debug("file=%s was dropped, error=%s", file, type(error).__name__)
    finally:
        aside.unlink()


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


# --- the letters that come next ------------------------------------------------------------------


class Slice(NamedTuple):
    """Some dead letters that are sent again together."""

    letters: pa.Table  # in order
    files: list[str]  # of the table, which they are in
    last: bool  # no others are to be sent again


@dataclass(slots=True)
class Round:
    """A wish that is being done, slice by slice."""

    wish: Wish
    letters: int  # that were there
    places: Places
    sent: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    reason: str = ""  # why it ended before its end
    # Rows of which a letter was refused again: what they have is not tried once more.
    stuck: set[str] = field(default_factory=set)

    def wants(self, row: str) -> bool:
        """Whether a row's letters are to be sent."""
        if row in self.stuck:
            return False
        return self.asks_for(row)

    def asks_for(self, row: str) -> bool:
        """Whether somebody asked for a row's letters."""
        if not self.wish.keys:
            return True
        # source|schema.table:key
        name = row.partition("|")[2]
        return name in self.wish.keys or name.partition(".")[2] in self.wish.keys

    def add(self, told: Resent) -> None:
        """Count what a task has done."""
        self.sent += len(told.sent)
        self.refused += len(told.refused)
        self.reasons.update(each.reason for each in told.refused if each.reason)
        stuck = {each.row for each in told.refused} - self.stuck
        self.stuck |= stuck
        self.places.forget(stuck)
        self.reason = self.reason or told.delivered.reason

    def answer(self, left: int, waiting: int, *, done: bool = True) -> Redriven:
        """What came of it so far."""
        return Redriven(
            self.wish.id,
            self.letters,
            self.sent,
            left,
            self.reason,
            done,
            self.refused,
            waiting,
            dict(self.reasons.most_common(_MOST_REASONS)),
        )


class Place(NamedTuple):
    """Where a letter comes, and where it lies."""

    rank: int  # of its log
    sequence: int
    at: int
    number: int  # among the letters of its file
    file: int  # which one of those that make up the table


_ORDER = [(name, "ascending") for name in Place._fields[:3]]


@dataclass(slots=True)
class Places:
    """Where the letters lie that a wish is for; no file ever changes, so each is listed once."""

    folder: Folder
    ranks: dict[str, int]  # of the logs, in the order in which they were followed
    _files: dict[str, pa.Table] = field(default_factory=dict)  # by file: its letters, in order

    def chosen(self, files: Sequence[str], wants: Callable[[str], bool]) -> Slice:
        """The first letters of wanted rows, in the order of the logs."""
        known = self._files
        self._files = {
            file: known[file] if file in known else self._listed(file, wants) for file in files
        }
        heads = [
            table.slice(0, MOST_LETTERS).append_column("file", pa.repeat(pa.scalar(at), count))
            for at, table in enumerate(self._files.values())
            if (count := min(table.num_rows, MOST_LETTERS))
        ]
        first = _places(pa.concat_tables(heads)) if heads else []
        letters = _within(self._read(files, first))
        opened = [files[at] for at in sorted({place.file for place in first})]
        wanted = sum(table.num_rows for table in self._files.values())
        return Slice(letters, opened, letters.num_rows == wanted)

    def forget(self, rows: Collection[str]) -> None:
        """Leave out the letters of rows that are no longer wanted."""
        if rows:
            left_out = pa.array(rows, pa.string())
            for file, table in self._files.items():
                self._files[file] = table.filter(pc.invert(pc.is_in(table["row"], left_out)))

    def _listed(self, file: str, wants: Callable[[str], bool]) -> pa.Table:
        letters = self.folder.read(file, _PLACE)
        for epoch in letters["epoch"].unique().to_pylist():
            self.ranks.setdefault(epoch, len(self.ranks))  # one that is new is the latest
        ranks = [self.ranks[epoch] for epoch in letters["epoch"].to_pylist()]
        wanted = [wants(row) for row in letters["row"].to_pylist()]
        columns = {
            "rank": pa.array(ranks, pa.int32()),
            "sequence": letters["sequence"],
            "at": letters["at"],
            "number": pa.array(range(letters.num_rows), pa.int64()),
            "row": letters["row"],
        }
        return pa.table(columns).filter(pa.array(wanted, pa.bool_())).sort_by(_ORDER)

    def _read(self, files: Sequence[str], places: Sequence[Place]) -> pa.Table:
        """The letters at some places, in their order."""
        if not places:
            return SCHEMA.empty_table()
        parts, order = [], list[int]()
        for file in sorted({place.file for place in places}):
            own = [at for at, place in enumerate(places) if place.file == file]
            numbers = pa.array([places[at].number for at in own], pa.int64())
            parts.append(self.folder.read(files[file]).take(numbers))
            order += own
        return pa.concat_tables(parts).take(pa.array(_inverse(order), pa.int64()))


def _places(listed: pa.Table) -> list[Place]:
    """The first of those that are listed, in order."""
    first = listed.sort_by(_ORDER).slice(0, MOST_LETTERS)
    columns = [first[name].to_pylist() for name in Place._fields]
    return [Place(*each) for each in zip(*columns, strict=True)]


def _rows(letters: pa.Table) -> Iterator[tuple[str, str, int, int]]:
    return zip(*(letters[name].to_pylist() for name in _PLACE), strict=True)


def _inverse(numbers: Sequence[int]) -> list[int]:
    """The places of the numbers, from the least number to the largest."""
    return sorted(range(len(numbers)), key=numbers.__getitem__)


def _within(letters: pa.Table) -> pa.Table:
    """As many of the letters as a task may have in memory, and at least one."""
    total = 0
    for count, event in enumerate(letters["event"]):
        total += len(event.as_buffer()) if event.is_valid else 0
        if total > _MOST_BYTES and count:
            return letters.slice(0, count)
    return letters


class Rewritten(NamedTuple):
    """What takes the place of files whose letters were sent again."""

    removed: list[str]
    added: list[Added]


def rewritten(folder: Folder, files: Sequence[str], told: Sequence[Resent]) -> Rewritten:
    """Files without the letters that were accepted, and with the reasons of those refused again."""
    gone = {tuple(place) for each in told for place in each.sent}
    again = {(each.epoch, each.sequence, each.at): each for one in told for each in one.refused}
    result = Rewritten([], [])
    for file in files:
        letters = folder.read(file)
        places = [(epoch, sequence, at) for epoch, _, sequence, at in _rows(letters)]
        if not any(place in gone or place in again for place in places):
            continue
        letters = _judged_anew(letters, [again.get(place) for place in places])
        kept = letters.filter(pa.array([place not in gone for place in places], pa.bool_()))
        result.removed.append(file)
        if kept.num_rows:
            result.added.append(folder.write(kept, FILE, {}))
    return result


def _judged_anew(letters: pa.Table, verdicts: Sequence[RefusedAgain | None]) -> pa.Table:
    if not any(verdicts):
        return letters
    now = time.time_ns() // 1000
    told = {
        "status": [each and REFUSED for each in verdicts],
        "reason": [each and each.reason for each in verdicts],
        "attempts": [each and each.attempts for each in verdicts],
        "refused_at": [each and now for each in verdicts],
    }
    for name, values in told.items():
        at = SCHEMA.get_field_index(name)
        known = letters[name].combine_chunks()
        fresh = pa.array(values, SCHEMA.field(name).type)
        column = [
            new if each else old for each, new, old in zip(verdicts, fresh, known, strict=True)
        ]
        letters = letters.set_column(
            at, SCHEMA.field(name), pa.array([value.as_py() for value in column], fresh.type)
        )
    return letters


# --- tasks ---------------------------------------------------------------------------------------


class RefusedAgain(msgspec.Struct, frozen=True):
    """A dead letter that was refused again."""

    epoch: str
    sequence: int
    at: int
    row: str
    reason: str
    attempts: int


class Resent(msgspec.Struct):
    """A task's word to the driver."""

    delivered: Delivered
    sent: list[tuple[str, int, int]] = []  # log, sequence and place of what was accepted
    refused: list[RefusedAgain] = []


class _Aside:
    """Takes what is refused again; what waits behind it stays as it is."""

    def __init__(self, epoch: str, resent: Resent) -> None:
        self.places: set[Position] = set()
        self._epoch = epoch
        self._resent = resent

    def add(self, event: Event, status: str, reason: str, attempts: int) -> None:
        self.places.add((event.sequence, event.at))
        if status == REFUSED:
            place = self._epoch, event.sequence, event.at
            self._resent.refused.append(RefusedAgain(*place, event.row, reason, attempts))


@dataclass(frozen=True, slots=True)
class Resend:
    """A task that sends dead letters, in order; the driver sees to those that are not accepted."""

    destination: Destination
    policy: Policy
    folder: Folder
    file: str
    parts: int

    def __call__(self, batches: Batches) -> Batches:
        """Send those of a part."""
        for part in (part for batch in batches for part in batch.column(0).to_pylist()):
            yield result(self.resent(part))

    def resent(self, part: int) -> Resent:
        """Send the letters of a part, until one log's are not settled."""
        resent = Resent(Delivered(part, self.parts))
        blocked: dict[str, Span] = {}
        own = (
            (epoch, event)
            for epoch, event in events_of(self.folder.read(self.file))
            if part_of(event.row, self.parts) == part
        )
        for epoch, events in groupby(own, itemgetter(0)):
            self._send(resent, epoch, blocked, [event for _, event in events])
            if resent.delivered.open or resent.delivered.refusal:
                break
            blocked = dict.fromkeys(blocked, EARLIER)
        return resent

    def _send(
        self, resent: Resent, epoch: str, blocked: dict[str, Span], events: list[Event]
    ) -> None:
        told, aside = resent.delivered, _Aside(epoch, resent)
        line = Line(self.destination)
        delivery = Delivery(line.send, self.policy, aside, blocked, counts=told.counts)
        try:
            delivery.run(events[at : at + _CHUNK] for at in range(0, len(events), _CHUNK))
        except SinkRefused as error:
            told.refusal = Refusal(str(error), error.hint)
        told.stopped = delivery.stopped
        unsettled = aside.places | _unsettled(delivery, events)
        places = [(event.sequence, event.at) for event in events]
        resent.sent += [(epoch, *place) for place in places if place not in unsettled]


def _unsettled(delivery: Delivery, events: Sequence[Event]) -> set[Position]:
    if delivery.stopped is None:
        return set()
    point = delivery.stopped.point
    pending = {(each.sequence, each.at) for each in point.pending}
    places = {(event.sequence, event.at) for event in events}
    return {place for place in places if place in pending or place > (point.sequence, point.at)}
