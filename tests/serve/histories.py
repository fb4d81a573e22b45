"""Random histories in a log, and what a format says of them when it sees them whole."""

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from headrace.change.event import Change
from headrace.formats import AnyFormat, StreamFormat, TransactionFormat
from headrace.log import LogReader
from tests.changes import Writer
from tests.formats.generated import transactions

HISTORIES = st.lists(transactions(), min_size=1, max_size=4)


class Told(NamedTuple):
    """An event, and the sequence at which it stands."""

    sequence: int
    payload: bytes


def write(writer: Writer, history: Sequence[Sequence[Change]]) -> int:
    """Append transactions; returns the sequence before the first of them."""
    before = writer.log.latest_sequence
    for transaction in history:
        tables = {change.table: writer.log.register(_unnumbered(change)) for change in transaction}
        writer.append([msgspec.structs.replace(c, table=tables[c.table]) for c in transaction])
    return before


def _unnumbered(change: Change) -> Any:
    return msgspec.structs.replace(change.table, version=0)


def told(log: LogReader, format: AnyFormat, *, after: int = 0) -> list[Told]:
    """What a format says of every change after `after`, none of it filtered."""
    changes = log.read(after, limit=1_000_000)
    if isinstance(format, TransactionFormat):
        whole = itertools.groupby(changes, key=lambda change: change.sequence - change.ordinal)
        return [
            Told(*event) for _, transaction in whole for event in format.render(list(transaction))
        ]
    if isinstance(format, StreamFormat):
        stream = format.open()
        return [
            Told(change.sequence, event)
            for change in changes
            for event in stream.encode(change, wanted=True)
        ]
    encoded = [(change.sequence, format.encode(change)) for change in changes]
    return [Told(sequence, payload) for sequence, payload in encoded if payload is not None]


def parsed(events: Sequence[Told]) -> list[Any]:
    """The events as a client reads them."""
    return [json.loads(event.payload) for event in events]


def without_relations(events: Sequence[Any]) -> list[Any]:
    """Events but for those that each stream tells anew."""
    return [event for event in events if event.get("type") != "Relation"]
