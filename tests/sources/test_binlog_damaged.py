"""Whatever the bytes of a binlog are: values, or an error of ours."""

import random
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.change.event import Column, Table
from headrace.errors import DecodeError, ProtocolError, SourceRefused
from headrace.sources.mysql.decode.binaryjson import json_text
from headrace.sources.mysql.decode.binlog import inner_events, parse
from headrace.sources.mysql.decode.columns import ColumnType, MappedColumn, columns_of
from headrace.sources.mysql.decode.events import (
    UNKNOWN,
    FormatDescription,
    Header,
    Payload,
    RowsEvent,
    RowsKind,
    TableMap,
)
from headrace.sources.mysql.decode.rows import BinlogRowDecoder
from tests.effort import times
from tests.sources.binlogs.reading import FILES, events, parsed, raw_events

KINDS = [
    *range(2, 6), 9, 11, *range(13, 20), *range(23, 43), *range(160, 173),
]  # fmt: skip
PLAIN = FormatDescription(Header(0, 15, 1, 0, 0, 0), "8.0.36", 0, b"", checksum=False)
MARIADB = FormatDescription(Header(0, 15, 1, 0, 0, 0), "10.11.19-MariaDB", 0, b"", checksum=False)
OURS = (ProtocolError, SourceRefused, DecodeError)

WRITTEN = [
    (name.startswith("mariadb"), data)
    for name, file in FILES.items()
    for data in list(raw_events(file.read_bytes()))[1:]
]


def unchecked(data: bytes, body: bytes) -> bytes:
    """An event with another body and the size that fits it."""
    return data[:9] + (19 + len(body)).to_bytes(4, "little") + data[13:19] + body


def read(data: bytes, form: FormatDescription) -> None:
    event = parse(data, form)
    if isinstance(event, Payload):
        list(inner_events(event, form))


@given(st.sampled_from(KINDS), st.binary(max_size=120), st.booleans())
@settings(max_examples=times(150, nightly=1500))
def test_any_body_is_an_event_or_an_error(kind: int, body: bytes, mariadb: bool) -> None:
    head = bytes(4) + bytes([kind]) + bytes(14)
    try:
        read(unchecked(head, body), MARIADB if mariadb else PLAIN)
    except OURS:
        return


@given(st.binary(max_size=200))
@example(b"")
def test_any_bytes_are_an_event_or_an_error(data: bytes) -> None:
    for form in (UNKNOWN, PLAIN):
        try:
            parse(data, form)
        except OURS:
            continue


@given(st.sampled_from(WRITTEN), st.data())
@settings(max_examples=times(150, nightly=1500))
def test_a_damaged_event_is_an_event_or_an_error(
    written: tuple[bool, bytes], choices: st.DataObject
) -> None:
    mariadb, data = written
    body = bytearray(data[19:-4])
    if body and choices.draw(st.booleans()):
        at = choices.draw(st.integers(0, len(body) - 1))
        body[at] = choices.draw(st.integers(0, 255))
    cut = choices.draw(st.integers(0, len(body)))
    damaged = unchecked(data, bytes(body) if choices.draw(st.booleans()) else bytes(body[:cut]))
    try:
        read(damaged, MARIADB if mariadb else PLAIN)
    except OURS:
        return


# --- rows ----------------------------------------------------------------------------------------


def described_rows() -> Iterator[tuple[TableMap, RowsEvent]]:
    """Rows whose table map has all that is needed to read them."""
    for file in FILES.values():
        every = list(parsed(raw_events(file.read_bytes())))
        for table_map, event in pairwise(every):
            if not isinstance(table_map, TableMap) or not isinstance(event, RowsEvent):
                continue
            if table_map.columns[0].name is not None and table_map.table != "vectors":
                yield table_map, event


TABLES = list(described_rows())


def decoder(columns: tuple[MappedColumn, ...]) -> BinlogRowDecoder:
    types = columns_of(columns, None)
    shown = tuple(Column(column.name, "", at == 0) for at, column in enumerate(types))
    return BinlogRowDecoder(Table("s", "mysql", "o", "", "db", "t", shown), types)


def with_rows(event: RowsEvent, data: bytes) -> RowsEvent:
    return RowsEvent(
        event.header, event.kind, event.table_id, event.last, event.width, event.present,
        event.present_after, data, 0, len(data),
    )  # fmt: skip


@given(st.sampled_from(TABLES), st.data())
@settings(max_examples=times(210, nightly=2100))
def test_damaged_rows_are_rows_or_an_error(
    written: tuple[TableMap, RowsEvent], choices: st.DataObject
) -> None:
    table_map, event = written
    body = bytearray(event.data[event.at : event.end])
    for _ in range(choices.draw(st.integers(0, 3))):
        at = choices.draw(st.integers(0, len(body) - 1))
        body[at] = choices.draw(st.integers(0, 255))
    cut = choices.draw(st.just(len(body)) | st.integers(0, len(body)))
    try:
        found = decoder(table_map.columns).read(with_rows(event, bytes(body[:cut])))
    except OURS:
        return
    for _, before, _, after, _, _ in found:
        for image in (before, after):
            assert image is None or isinstance(msgspec.json.decode(image), dict)


def test_rows_cut_anywhere_but_at_their_end_are_refused() -> None:
    for table_map, event in TABLES[:40]:
        rows = decoder(table_map.columns)
        whole = event.data[event.at : event.end]
        if len(rows.read(event)) != 1:
            continue  # the first rows alone would be right
        for cut in range(1, len(whole)):
            with pytest.raises((ProtocolError, DecodeError)):
                rows.read(with_rows(event, whole[:cut]))


@given(st.integers(0, 255), st.integers(0, 65535), st.binary(max_size=40), st.booleans())
@settings(max_examples=times(150, nightly=1500))
def test_any_type_of_column_is_read_or_refused(
    code: int, meta: int, data: bytes, unsigned: bool
) -> None:
    column = ColumnType("c", code, meta, nullable=True, unsigned=unsigned, labels=("a", "b"))
    event = RowsEvent(
        Header(0, 30, 1, 0, 0, 0), RowsKind.INSERT, 1, True, 1, b"\x01", b"",
        data, 0, len(data),
    )  # fmt: skip
    table = Table("s", "mysql", "o", "", "db", "t", (Column("c", "", True),))
    try:
        BinlogRowDecoder(table, [column]).read(event)
    except OURS:
        return


# --- documents -----------------------------------------------------------------------------------


@given(st.binary(max_size=200))
@settings(max_examples=times(150, nightly=1500))
def test_any_bytes_are_a_document_or_an_error(data: bytes) -> None:
    try:
        assert json_text(data)
    except DecodeError:
        return


def test_a_document_that_names_itself_is_refused() -> None:
    # An array of two elements, both of which are the array itself.
    looped = bytes([2, 2, 0, 10, 0, 2, 0, 0, 2, 0, 0])
    with pytest.raises(DecodeError):
        json_text(looped)


def test_arrays_that_share_their_elements_do_not_take_for_ever() -> None:
    # Each level has twenty elements, all of which are the level below it.
    levels, width = 30, 20
    data = bytearray([2])
    size = 4 + 3 * width
    for level in range(levels):
        data += width.to_bytes(2, "little") + size.to_bytes(2, "little")
        kind = 2 if level < levels - 1 else 4
        data += (bytes([kind]) + (size if kind == 2 else 0).to_bytes(2, "little")) * width
    with pytest.raises(DecodeError):
        json_text(bytes(data))


def test_a_payload_that_unpacks_to_more_than_it_says_is_read_as_it_comes() -> None:
    generator = random.Random(1)
    header = Header(0, 40, 1, 0, 0, 0)
    for _ in range(50):
        junk = generator.randbytes(generator.randrange(1, 200))
        for compression in (0, 255, 7):
            with pytest.raises(OURS):
                list(inner_events(Payload(header, junk, compression, 10), PLAIN))


def test_a_payload_cut_anywhere_is_refused() -> None:
    first = next(each for each in events("mysql80/payload") if isinstance(each, Payload))
    for size in range(len(first.compressed)):
        cut = msgspec.structs.replace(first, compressed=first.compressed[:size])
        with pytest.raises(ProtocolError):
            list(inner_events(cut, PLAIN))
