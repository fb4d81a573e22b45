"""The recorded binlogs: their events, their rows, and what SELECT showed at their end."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.change.event import Column, Table
from headrace.sources.mysql.decode.binlog import inner_events, parse
from headrace.sources.mysql.decode.columns import DeclaredColumn, columns_of
from headrace.sources.mysql.decode.events import (
    UNKNOWN,
    Event,
    FormatDescription,
    Payload,
    Query,
    RowsEvent,
    RowsKind,
    TableMap,
)
from headrace.sources.mysql.decode.rows import BinlogRowDecoder, Row
from headrace.sources.mysql.decode.values import text_encoder
from tests.sources.binlogs.record import RecordedTable

HERE = Path(__file__).parent
FILES = {f"{file.parent.name}/{file.stem}": file for file in sorted(HERE.glob("*/*.binlog"))}
MAGIC = b"\xfebin"
HEADER_SIZE = 19

Shown = dict[str, bytes]  # column -> its value as JSON
State = dict[str, dict[bytes | None, Shown]]  # table -> key -> row


def raw_events(data: bytes) -> Iterator[bytes]:
    """The events of a file, undecoded."""
    assert data.startswith(MAGIC)
    at = len(MAGIC)
    while at < len(data):
        size = int.from_bytes(data[at + 9 : at + 13], "little")
        yield data[at : at + size]
        at += size


def parsed(raw: Iterable[bytes], form: FormatDescription = UNKNOWN) -> Iterator[Event]:
    """Events, with those inside of payloads after these."""
    for data in raw:
        event = parse(data, form)
        if isinstance(event, FormatDescription):
            form = event
        yield event
        if isinstance(event, Payload):
            yield from inner_events(event, form)


def events(name: str) -> list[Event]:
    """All events of a recorded file."""
    return list(parsed(raw_events(FILES[name].read_bytes())))


def recorded(name: str) -> dict[str, RecordedTable]:
    """What SELECT showed when the file had been written."""
    content = FILES[name].with_suffix(".json").read_bytes()
    return msgspec.json.decode(content, type=dict[str, RecordedTable])


def decoder(
    event: TableMap, declared: Sequence[DeclaredColumn], key: Sequence[str]
) -> BinlogRowDecoder:
    """The decoder of a table's rows; the table map alone where the columns are others now."""
    names = [column.name for column in event.columns]
    known = names in ([None] * len(declared), [column.name for column in declared])
    types = columns_of(event.columns, tuple(declared) if known else None)
    columns = tuple(Column(each.name, "", each.name in key) for each in types)
    return BinlogRowDecoder(
        Table("s", "mysql", "o", "", event.database, event.table, columns), types
    )


def rows(
    stream: Iterable[Event], tables: dict[str, RecordedTable]
) -> Iterator[tuple[str, RowsKind, Row]]:
    """Every row of the tables, with what happened to it."""
    decoders: dict[int, BinlogRowDecoder] = {}
    for event in stream:
        if isinstance(event, TableMap) and event.table in tables:
            table = tables[event.table]
            decoders[event.id] = decoder(event, table.declared, table.key)
        elif isinstance(event, RowsEvent) and event.table_id in decoders:
            rows = decoders[event.table_id]
            yield from ((rows.table.name, event.kind, row) for row in rows.read(event))
        elif isinstance(event, Query) and event.sql.startswith("TRUNCATE"):
            yield from ((name, RowsKind.DELETE, _EMPTIED) for name in tables)


_EMPTIED: Row = (None, None, msgspec.UNSET, None, None, ())  # type: ignore[assignment]


def replayed(name: str) -> State:
    """The rows of every table at the end of a file, as its changes make them."""
    tables = recorded(name)
    state: State = {table: {} for table in tables}
    for table, kind, row in rows(events(name), tables):
        if row is _EMPTIED:
            state[table].clear()
            continue
        key, before, _, after, _, unchanged = row
        known = state[table]
        old = known.pop(_key(before, tables[table].key) or key, {})
        if kind is not RowsKind.DELETE:
            assert after is not None
            kept = {column: old[column] for column in unchanged if column in old}
            known[key] = kept | taken_apart(after)
    return state


def shown(name: str) -> State:
    """The same as SELECT shows them."""
    return {table: selected(content) for table, content in recorded(name).items()}


def selected(table: RecordedTable) -> dict[bytes | None, Shown]:
    """Rows as SELECT gave them, by their keys."""
    encoders = [text_encoder(column) for column in table.declared]
    found: dict[bytes | None, Shown] = {}
    for row in table.rows:
        values = {
            column.name: b"null" if value is None else encode(value)
            for column, encode, value in zip(table.declared, encoders, row, strict=True)
        }
        parts = [b"%b:%b" % (msgspec.json.encode(name), values[name]) for name in table.key]
        found[b"{%b}" % b",".join(parts) if parts else None] = values
    return found


def taken_apart(image: bytes) -> Shown:
    """An image's columns, each as the bytes that stand there."""
    raw = msgspec.json.decode(image, type=dict[str, msgspec.Raw])
    return {name: bytes(value) for name, value in raw.items()}


def _key(image: bytes | None, key: Sequence[str]) -> bytes | None:
    if image is None:
        return None
    values = taken_apart(image)
    parts = [b"%b:%b" % (msgspec.json.encode(name), values[name]) for name in key]
    return b"{%b}" % b",".join(parts)
