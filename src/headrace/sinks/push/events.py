"""Changes rendered as events, inside Spark's tasks.

Changes come in the log's order, each transaction whole within one task. A row is
named `source|schema.table:key`; what happens to a table as a whole, and the rows of a table
without a key, have an empty key.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...change import record
from ...change.event import BeforeKind, Change, Op, Position, Table, change_id
from ...errors import PipelineError
from ...formats import AnyFormat, Format, StreamFormat, TransactionFormat
from ...formats.catalogue import Formats
from ...formats.key import joined, previous_primary_key
from ...transforms.rules import NO_TRANSFORMS, Transforms
from .. import LogRange
from .contract import Event

if TYPE_CHECKING:
    from ...transforms.changes import ShapedChanges
    from .computing import ComputedChanges, ComputedReader

_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode
_UPDATE = Op.UPDATE
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

    def events(self, wanted: LogRange) -> Iterator[Chunk]:
        """The events of the rows of a part."""
        format = _format(self.formats, self.format, wanted.epoch)
        if isinstance(format, TransactionFormat):
            return self._whole_transactions(format, wanted)
        assert not isinstance(format, StreamFormat), f"{format.name} is for streams"
        return self._one_by_one(format, wanted)

    def _whole_transactions(self, format: TransactionFormat, wanted: LogRange) -> Iterator[Chunk]:
        shaped = self.shaped()
        for transactions in wanted.transactions():
            seen = [shaped(each) for each in transactions] if shaped else transactions
            events = self._of_transactions(format, filter(None, seen))
            own = [each for each in events if part_of(each.row, wanted.parts) == wanted.part]
            first, last = transactions[0][0].sequence, transactions[-1][-1].sequence
            yield Chunk(wanted.epoch, last - first + 1, first, last, own)

    def _one_by_one(self, format: Format, wanted: LogRange) -> Iterator[Chunk]:
        rows = _Rows(wanted, self)
        for first, count, records in wanted.pieces():
            before = rows.count
            events = [
                _event(change, at, namer, name, payload)
                for change, at, namer, name in rows.own(first, record.several(records, count))
                if (payload := format.encode(change)) is not None
            ]
            if self.adds_tombstones:
                events = list(_with_tombstones(events))
            yield Chunk(wanted.epoch, rows.count - before, first, first + count - 1, events)

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

    __slots__ = ("_begin", "_length", "prefix", "table")

    def __init__(self, table: Table) -> None:
        self.table = table
        self.prefix = f"{table.source}|{table.schema}.{table.name}:"
        only = table.key[0] if len(table.key) == 1 else None
        self._begin = b"{%b:" % _text(only) if only is not None else None
        self._length = len(self._begin or b"")

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

    def __init__(self, wanted: LogRange, rendering: EventRendering) -> None:
        self.count = 0  # changes of wanted tables, whichever task sends them
        self._part, self._parts = wanted.part, wanted.parts
        self._tables, self._rendering = wanted.tables(), rendering
        self._namers: dict[int, _Namer | None] = {}  # by version; None: of no interest
        self._splits_keys = rendering.splits_keys
        self._shaped = rendering.shaped()
        self._computed = rendering.computed.tables if rendering.computed else {}
        self._reader = rendering.reader()
        self._shaped_namers = _Namers()

    def own(self, first: int, records: Iterable[record.Record[Position]]) -> Iterator[Named]:
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
            self.count += 1
            name = namer.row(each.key)
            own = parts == 1 or crc32(name.encode()) % parts == part
            if splits and each.op is _UPDATE and each.before:
                for change in _split((made(sequence, each, namer.table),)):
                    name = namer.row(change.key)
                    if part_of(name, parts) == part:
                        yield change, _at(change), namer, name
            elif own:
                yield made(sequence, each, namer.table), 0, namer, name

    def _own_shaped(
        self, first: int, records: Iterable[record.Record[Position]], shaped: ShapedChanges
    ) -> Iterator[Named]:
        changes: list[Change] = []
        computed: list[Change] = []
        for sequence, each in enumerate(records, first):
            if each.table not in self._namers:
                self._namers[each.table] = self._namer(each.table)
            if (namer := self._namers[each.table]) is None:
                continue
            self.count += 1
            if each.table in self._computed:
                computed += self._own_computed(sequence, each, namer)
                continue
            # Where no key changes or is masked, others need not be looked at.
            sure = each.before is None and shaped.keeps_key(namer.table)
            if not sure or part_of(namer.row(each.key), self._parts) == self._part:
                changes.append(record.change(sequence, each, namer.table))
        seen: Iterable[Change] = shaped(changes)
        if computed:
            seen = merge(seen, computed, key=_sequence)
        for change in _split(seen) if self._splits_keys else seen:
            namer = self._shaped_namers(change.table)
            name = namer.row(change.key)
            if part_of(name, self._parts) == self._part:
                yield change, _at(change), namer, name

    def _own_computed(
        self, sequence: int, each: record.Record[Position], namer: _Namer
    ) -> Iterator[Change]:
        """What Spark has made of a change, unless it certainly is of another part."""
        assert self._reader
        images = self._reader.find(sequence)
        if images is None:
            return
        if images.before or part_of(namer.row(images.key), self._parts) == self._part:
            yield images.of(record.change(sequence, each, namer.table))

    def _namer(self, version: int) -> _Namer | None:
        table = self._tables[version]
        if not self._rendering.wants(table):
            return None
        if not self._rendering.computes(table):
            return _Namer(table)
        if version not in self._computed:
            # Its rows as they are in the log are nothing that the sink may see.
            raise PipelineError(f"{table.schema}.{table.name} was not computed")
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


# --- keys that change ----------------------------------------------------------------------------


class _OldKeyDeleted(Change, frozen=True, gc=False):
    """The DELETE of a row's old key: an event of its own, so it has an id of its own."""

    @property
    def id(self) -> str:
        """Another one than that of the change, and always the same."""
        at = f"{self.transaction.id}|old key"
        return change_id(self.table.origin, self.position, at, self.ordinal)


class _NewKeyInserted(Change, frozen=True, gc=False):
    """The INSERT of a row at its new key; its id is that of the change."""


def _at(change: Change) -> int:
    """The place of a change's event: the INSERT follows the DELETE and its tombstone."""
    return 2 if type(change) is _NewKeyInserted else 0


def _split(changes: Iterable[Change]) -> Iterator[Change]:
    """Changes, and in place of one that moves a row to another key, two."""
    for change in changes:
        if change.op is _UPDATE and change.before and previous_primary_key(change) is not None:
            yield from _moved(change)
        else:
            yield change


def _moved(change: Change) -> tuple[_OldKeyDeleted, _NewKeyInserted]:
    fields = msgspec.structs.asdict(change)
    assert change.before
    assert change.key
    old = _image(change.before)
    key = _text({name: old[name] for name in _image(change.key)})
    left = {"op": Op.DELETE, "key": key, "after": None, "changed": None, "unchanged": ()}
    came = {"op": Op.INSERT, "before": None, "before_kind": BeforeKind.NONE, "changed": None}
    return _OldKeyDeleted(**(fields | left)), _NewKeyInserted(**(fields | came))


def _with_tombstones(events: Iterable[Event]) -> Iterator[Event]:
    for event in events:
        yield event
        if event.op == "DELETE":
            yield event._replace(at=event.at + 1, id=f"{event.id}-tombstone", payload=None)
