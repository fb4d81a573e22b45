"""Changes rendered as events, inside Spark's tasks.

Changes come in the log's order, each transaction whole within one task. A row is
named `source|schema.table:key`; the rows of a table without a key have an empty one. A TRUNCATE and
a SCHEMA are named `source|schema.table`: they are of all rows.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...change import record
from ...change.event import Change, Op, Position, Table
from ...errors import ChangesLost, PipelineError
from ...formats import AnyFormat, Format, StreamFormat, TransactionFormat
from ...formats.catalogue import Formats
from ...formats.key import joined
from ...transforms.rules import NO_TRANSFORMS, Transforms
from .. import LogRange
from .contract import Event
from .moves import PassedKeys, place, split

if TYPE_CHECKING:
    from ...transforms.changes import ShapedChanges
    from .computing import ComputedChanges, ComputedReader

_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode
_UPDATE = Op.UPDATE
_TRUNCATE, _SCHEMA = Op.TRUNCATE, Op.SCHEMA
_BEGINS_WITH_ID = b'{"id":"evt_'
_ID = slice(7, 47)  # evt_ and a UUID
_OWN_ID = re.compile(rb'"(?:event_)?id":"(evt_[^"]{36,})"')  # the first one is the event's


class Chunk(NamedTuple):
    """The events of some neighbouring changes."""

    epoch: str
    changes: int
    first: int  # sequences of the first and the last change, whether they have an event or not
    last: int
    events: list[Event]


@dataclass(slots=True)
class Barrier:
    """Where reading ends: at a TRUNCATE or a SCHEMA, before which everything is to be settled."""

    passed: int = 0  # the sequence of the last one that may be read
    met: int = 0  # that at which reading has ended; 0: at none
    last: int = 0  # the last one behind it, with no row between them


@dataclass(frozen=True, slots=True)
class EventRendering:
    """Turns changes into the events of a sink; a value that is pickled to tasks."""

    formats: Formats
    format: str
    tables: tuple[str, ...] = ()  # globs of those whose changes events may stand for; none: all
    splits_keys: bool = False  # a key that changes: DELETE of the old one, INSERT of the new one
    adds_tombstones: bool = False  # an event without payload after each DELETE
    transforms: Transforms = NO_TRANSFORMS  # what happens to rows before
    computed: ComputedChanges | None = field(default=None, compare=False)  # of the range to come
    schema_barriers: bool = True  # a SCHEMA is of all rows of its table, as a TRUNCATE is

    def events(self, wanted: LogRange, barrier: Barrier | None = None) -> Iterator[Chunk]:
        """The events of the rows of a part, up to a barrier.

        Formats that need whole transactions have no barriers.
        """
        format = _format(self.formats, self.format, wanted.epoch)
        if isinstance(format, TransactionFormat):
            return self._whole_transactions(format, wanted)
        assert not isinstance(format, StreamFormat), f"{format.name} is for streams"
        return self._one_by_one(format, wanted, barrier)

    def _whole_transactions(self, format: TransactionFormat, wanted: LogRange) -> Iterator[Chunk]:
        shaped = self.shaped()
        for transactions in wanted.transactions():
            seen = [shaped(each) for each in transactions] if shaped else transactions
            events = self._of_transactions(format, filter(None, seen))
            own = [each for each in events if part_of(each.row, wanted.parts) == wanted.part]
            first, last = transactions[0][0].sequence, transactions[-1][-1].sequence
            yield Chunk(wanted.epoch, last - first + 1, first, last, own)

    def _one_by_one(
        self, format: Format, wanted: LogRange, barrier: Barrier | None
    ) -> Iterator[Chunk]:
        rows = _Rows(wanted, self, format, barrier)
        for first, count, packed in wanted.pieces():
            records = record.several(packed, count)
            if first == wanted.after + 1:
                rows.look_back(records[0])
            before = rows.count
            events = [
                _event(change, at, namer, name, payload)
                for change, at, namer, name in rows.own(first, records)
                if (payload := format.encode(change)) is not None
            ]
            if self.adds_tombstones:
                events = list(_with_tombstones(events))
            last = barrier.met - 1 if barrier and barrier.met else first + count - 1
            if last >= first:
                yield Chunk(wanted.epoch, rows.count - before, first, last, events)
            if barrier and barrier.met:
                break

    @property
    def whole(self) -> bool:
        """Whether it needs every change of a transaction, and looks for its tables by itself."""
        return isinstance(self.formats.named(self.format), TransactionFormat)

    def _of_transactions(
        self,
        format: TransactionFormat,
        transactions: Iterable[Sequence[Change]],
    ) -> list[Event]:
        events: list[Event] = []
        namers = _Namers()
        for transaction in transactions:
            changes = {change.sequence: change for change in transaction}
            for sequence, same in groupby(format.render(transaction), itemgetter(0)):
                change = changes[sequence]
                if self.wants(change.table):
                    namer = namers(change.table)
                    events += [
                        _of_several(_event(change, at, namer, namer.row(change.key), payload))
                        for at, (_, payload) in enumerate(same)
                    ]
        return events

    def wants(self, table: Table) -> bool:
        """Whether events may stand for changes of a table."""
        return not self.tables or any(map(table.matches, self.tables))

    def computes(self, table: Table) -> bool:
        """Whether Spark computes what the events of a table show."""
        known = self.transforms.computed(table.schema, table.name)
        return known is not None and self.wants(table)

    def shaped(self) -> ShapedChanges | None:
        """What makes of changes what events may show; None: they are as they are."""
        if not self.transforms:
            return None
        # Only here: it needs pyarrow.
        from ...transforms.changes import ShapedChanges  # noqa: PLC0415

        return ShapedChanges(self.transforms)

    def reader(self) -> ComputedReader | None:
        """What finds that which Spark has computed; None: nothing was."""
        if self.computed is None:
            return None
        # Only here, as above.
        from .computing import ComputedReader  # noqa: PLC0415

        return ComputedReader(self.computed)


@lru_cache(maxsize=64)
def _format(formats: Formats, name: str, epoch: str) -> AnyFormat:
    # Kept for all tasks of a process: a format remembers what the changes of a table wanted.
    return formats.of_log(epoch).named(name)


class _Namer:
    """Names the rows of one version of a table, mostly without reading their keys."""

    __slots__ = ("_begin", "_length", "prefix", "table", "whole_rows")

    def __init__(self, table: Table) -> None:
        self.table = table
        self.whole_rows = table.identity == "full" and bool(table.key)
        self.prefix = f"{table.source}|{table.path}:"
        only = table.key[0] if len(table.key) == 1 else None
        self._begin = b"{%b:" % _text(only) if only is not None else None
        self._length = len(self._begin or b"")

    @property
    def all_rows(self) -> str:
        """What a TRUNCATE and a SCHEMA are of."""
        return self.prefix[:-1]

    def row(self, key: bytes | None) -> str:
        """The row that has this key."""
        if not key:
            return self.prefix
        if self._begin is not None and key.startswith(self._begin):
            value = key[self._length : -1]
            if not value.startswith(b'"'):
                return self.prefix + value.decode()
            if b"\\" not in value:
                return self.prefix + value[1:-1].decode()
        return self.prefix + joined(_image(key))


class _Namers(dict[int, _Namer]):
    """A namer for each table, found by the table's address: hashing one takes longer."""

    def __call__(self, table: Table) -> _Namer:
        found = self.get(id(table))
        if found is None:
            found = self[id(table)] = _Namer(table)
        return found


def _event(change: Change, at: int, namer: _Namer, name: str, payload: bytes) -> Event:
    table, key = namer.table, change.key
    # Some formats begin with the id, and working it out takes longer than all the rest.
    begins = payload.startswith(_BEGINS_WITH_ID)
    return Event(
        change.sequence,
        at,
        payload[_ID].decode() if begins else change.id,
        name,
        change.op._value_,
        table.source,
        table.schema,
        table.name,
        key.decode() if key else None,
        change.transaction.commit_time,
        payload,
    )


def _of_several(event: Event) -> Event:
    """One of several events of a change, with an id of its own: it is no repeat of the first."""
    if event.at == 0:
        return event
    found = _OWN_ID.search(event.payload or b"")
    return event._replace(id=found[1].decode() if found else f"{event.id}-{event.at}")


# --- changes of a part ---------------------------------------------------------------------------


def part_of(row: str, parts: int) -> int:
    """The part that sends a row's events."""
    return zlib.crc32(row.encode()) % parts if parts > 1 else 0


Named = tuple[Change, int, _Namer, str]  # a change, the place of its event, and its row


class _Rows:
    """Picks the changes whose events a task sends."""

    def __init__(
        self,
        wanted: LogRange,
        rendering: EventRendering,
        format: Format,
        barrier: Barrier | None = None,
    ) -> None:
        self.count = 0  # changes of wanted tables, whichever task sends them
        self._barrier = barrier or Barrier(passed=wanted.upto)
        self._wanted, self._part, self._parts = wanted, wanted.part, wanted.parts
        self._tables, self._rendering, self._format = wanted.tables(), rendering, format
        self._namers: dict[int, _Namer | None] = {}  # by version; None: of no interest
        self._splits_keys = rendering.splits_keys
        self._table_ops = (_TRUNCATE, _SCHEMA) if rendering.schema_barriers else (_TRUNCATE,)
        self._shaped = rendering.shaped()
        self._computed = rendering.computed.tables if rendering.computed else {}
        self._reader = rendering.reader()
        self._shaped_namers = _Namers()
        self._keys = PassedKeys()
        self._looks_back = False

    def look_back(self, begin: record.Record[Position]) -> None:
        """Learn which rows have come to keys in the transaction within which reading begins."""
        back = 0 if begin.op is Op.READ else PassedKeys.back(begin.ordinal)
        if not back:
            return
        after, known = self._wanted.after, self._barrier
        self._barrier, self._looks_back = Barrier(passed=after), True
        with suppress(ChangesLost):  # its head is no longer in the log
            for first, count, packed in replace(
                self._wanted, after=after - back, upto=after
            ).pieces():
                if any(
                    map(self._has_whole_rows, {each.table for each in record.heads(packed, count)})
                ):
                    deque(self.own(first, record.several(packed, count)), maxlen=0)
        self._barrier, self._looks_back, self.count = known, False, 0
        self._namers.clear()

    def own(self, first: int, records: Sequence[record.Record[Position]]) -> Iterator[Named]:
        """Those among neighbouring changes, from sequence `first` on."""
        if self._shaped is not None:
            yield from self._own_shaped(first, records, self._shaped)
            return
        part, parts, namers, splits = self._part, self._parts, self._namers, self._splits_keys
        crc32, made = zlib.crc32, record.change  # called for every change
        for sequence, each in enumerate(records, first):
            version = each.table
            if version not in namers:
                namers[version] = self._namer(version)
            namer = namers[version]
            if namer is None:
                continue
            key = each.key
            if key is None and each.op in self._table_ops:
                if self._stops(sequence, records[sequence - first :]):
                    return
                name = namer.all_rows
                if namer.whole_rows:
                    self._keys.empty(made(sequence, each, namer.table))
            else:
                name = namer.row(key)
            self.count += 1
            own = parts == 1 or crc32(name.encode()) % parts == part
            if splits and each.op is _UPDATE and each.before:
                yield from self._own_of(split((made(sequence, each, namer.table),)), namer)
            elif own:
                change = made(sequence, each, namer.table)
                if not namer.whole_rows or self._keys.shows(change, name):
                    yield change, 0, namer, name

    def _stops(self, sequence: int, records: Sequence[record.Record[Position]]) -> bool:
        """Whether reading ends at the first of these, which is of a table as a whole."""
        barrier = self._barrier
        if sequence <= barrier.passed or not self._has_event(sequence, records[0]):
            return False
        barrier.met = sequence
        for at, each in enumerate(records, sequence):
            if each.table not in self._namers:
                self._namers[each.table] = self._namer(each.table)
            if self._namers[each.table] is None:
                continue
            if each.op not in self._table_ops:
                break
            barrier.last = at
        return True

    def _has_event(self, sequence: int, each: record.Record[Position]) -> bool:
        change = record.change(sequence, each, self._tables[each.table])
        return self._format.encode(change) is not None

    def _has_whole_rows(self, version: int) -> bool:
        table = self._tables[version]
        return self._rendering.wants(table) and _Namer(table).whole_rows

    def _own_of(self, changes: Iterable[Change], namer: _Namer) -> Iterator[Named]:
        for change in changes:
            name = namer.row(change.key)
            if part_of(name, self._parts) != self._part:
                continue
            if not namer.whole_rows or self._keys.shows(change, name):
                yield change, place(change), namer, name

    def _own_shaped(
        self, first: int, records: Sequence[record.Record[Position]], shaped: ShapedChanges
    ) -> Iterator[Named]:
        changes: list[Change] = []
        computed: list[Change] = []
        for sequence, each in enumerate(records, first):
            if each.table not in self._namers:
                self._namers[each.table] = self._namer(each.table)
            if (namer := self._namers[each.table]) is None:
                continue
            if each.op in self._table_ops and self._stops(sequence, records[sequence - first :]):
                break
            self.count += 1
            if each.table in self._computed:
                computed += self._own_computed(sequence, each, namer)
                continue
            # Where no key changes or is masked, others need not be looked at.
            sure = each.before is None and shaped.keeps_key(namer.table)
            sure = sure and each.op not in self._table_ops
            if not sure or part_of(namer.row(each.key), self._parts) == self._part:
                changes.append(record.change(sequence, each, namer.table))
        seen: Iterable[Change] = shaped(changes)
        if computed:
            seen = merge(seen, computed, key=_sequence)
        for change in split(seen) if self._splits_keys else seen:
            namer = self._shaped_namers(change.table)
            of_table = change.op in self._table_ops
            name = namer.all_rows if of_table else namer.row(change.key)
            if of_table and namer.whole_rows:
                self._keys.empty(change)
            if part_of(name, self._parts) != self._part:
                continue
            if not namer.whole_rows or self._keys.shows(change, name):
                yield change, place(change), namer, name

    def _own_computed(
        self, sequence: int, each: record.Record[Position], namer: _Namer
    ) -> Iterator[Change]:
        """What Spark has made of a change, unless it certainly is of another part."""
        assert self._reader
        images = self._reader.find(sequence)
        if images is None:
            return
        unsure = images.before or each.op in self._table_ops
        if unsure or part_of(namer.row(images.key), self._parts) == self._part:
            yield images.of(record.change(sequence, each, namer.table))

    def _namer(self, version: int) -> _Namer | None:
        table = self._tables[version]
        if not self._rendering.wants(table):
            return None
        if not self._rendering.computes(table):
            return _Namer(table)
        if version not in self._computed:
            if self._looks_back:
                return None
            # Its rows as they are in the log are nothing that the sink may see.
            raise PipelineError(f"{table.path} was not computed")
        return _Namer(self._computed[version])


def _sequence(change: Change) -> int:
    return change.sequence


def reference(event: Event, format: str) -> bytes:
    """A small event with the address at which a large one can be read."""
    content = {
        "id": event.id,
        "sequence": event.sequence,
        "operation": event.op,
        "source": event.source,
        "schema": event.schema,
        "table": event.table,
        "key": msgspec.Raw(event.key.encode()) if event.key else None,
        "bytes": len(event.payload or b""),
        "reference": f"/v1/changes?after={event.sequence - 1}&limit=1&format={format}",
    }
    return msgspec.json.encode(content)


def _with_tombstones(events: Iterable[Event]) -> Iterator[Event]:
    for event in events:
        yield event
        if event.op == "DELETE":
            yield event._replace(at=event.at + 1, id=f"{event.id}-tombstone", payload=None)
