"""Rows become the same JSON whatever else is in their event, and errors name the column."""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.event import BeforeKind, Column, Table
from headrace.errors import DecodeError, ProtocolError
from headrace.sources.mysql.decode.columns import ColumnType
from headrace.sources.mysql.decode.events import Header, RowsEvent, RowsKind
from headrace.sources.mysql.decode.rows import BinlogRowDecoder
from headrace.sources.mysql.decode.typecodes import BLOB, DOUBLE, LONG, LONGLONG, TINY, VARCHAR

KINDS = {30: RowsKind.INSERT, 31: RowsKind.UPDATE, 32: RowsKind.DELETE}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1) | st.sampled_from(
    ["%", "%b", 'quo"ted', "back\\slash", "ключ", "a.b", "%(x)d"]
)

# Of each kind a type, how its values come about, and their bytes.
TYPES: dict[str, tuple[ColumnType, st.SearchStrategy[Any]]] = {
    "tiny": (ColumnType("", TINY, 0, True), st.integers(-128, 127)),
    "int": (ColumnType("", LONG, 0, True, unsigned=True), st.integers(0, 2**32 - 1)),
    "big": (ColumnType("", LONGLONG, 0, True), st.integers(-(2**63), 2**63 - 1)),
    "double": (ColumnType("", DOUBLE, 8, True), st.floats(allow_nan=False, allow_infinity=False)),
    "short text": (ColumnType("", VARCHAR, 200, True, charset="utf8mb4"), TEXT),
    "text": (ColumnType("", VARCHAR, 4000, True, charset="utf8mb4"), TEXT),
    "medium": (ColumnType("", BLOB, 3, True, charset="utf8mb4"), TEXT),
    "long": (ColumnType("", BLOB, 4, True, charset="utf8mb4"), TEXT),
}
CODES = {TINY: "<b", LONG: "<I", LONGLONG: "<q", DOUBLE: "<d"}


def packed(column: ColumnType, value: Any) -> bytes:
    if column.code in CODES:
        return struct.pack(CODES[column.code], value)
    data: bytes = value.encode()
    prefix = column.meta if column.code == BLOB else (1 if column.meta < 256 else 2)
    if len(data) >= 1 << 8 * prefix:
        data = data[:0]
    return len(data).to_bytes(prefix, "little") + data


def image(columns: Sequence[ColumnType], values: Sequence[Any]) -> bytes:
    """A row as a server packs it; unused bits of the bitmap are set, as some servers do."""
    bits = sum(1 << at for at, value in enumerate(values) if value is None)
    size = (len(columns) + 7) // 8
    bits |= (1 << 8 * size) - (1 << len(columns))
    given_values = [packed(c, v) for c, v in zip(columns, values, strict=True) if v is not None]
    return bits.to_bytes(size, "little") + b"".join(given_values)


def event(
    kind: int,
    width: int,
    data: bytes,
    *,
    present: Sequence[int] = (),
    after: Sequence[int] = (),
) -> RowsEvent:
    size = (width + 7) // 8
    every = range(width)
    old = sum(1 << at for at in present or every).to_bytes(size, "little")
    new = sum(1 << at for at in after or every).to_bytes(size, "little") if kind == 31 else b""
    header = Header(0, kind, 1, 0, 0, 0)
    return RowsEvent(header, KINDS[kind], 1, True, width, old, new, b"xyz" + data, 3, len(data) + 3)


def decoder(
    columns: Sequence[ColumnType],
    *,
    keys: Sequence[str] = (),
    shown: Sequence[str] | None = None,
) -> BinlogRowDecoder:
    names = [column.name for column in columns] if shown is None else shown
    described = tuple(Column(name, "", name in keys) for name in names)
    return BinlogRowDecoder(Table("s", "mysql", "o", "", "db", "things", described), columns)


def stored(column: ColumnType, value: Any) -> Any:
    """What the packed value holds: too long a text was cut to nothing."""
    if value is None or column.code in CODES:
        return value
    prefix = column.meta if column.code == BLOB else (1 if column.meta < 256 else 2)
    return "" if len(value.encode()) >= 1 << 8 * prefix else value


@st.composite
def tables_with_rows(draw: st.DrawFn) -> tuple[list[ColumnType], list[list[Any]]]:
    names = draw(st.lists(NAMES, min_size=1, max_size=20, unique=True))
    kinds = [draw(st.sampled_from(sorted(TYPES))) for _ in names]
    columns = [
        msgspec.structs.replace(TYPES[kind][0], name=name, nullable=draw(st.booleans()))
        for name, kind in zip(names, kinds, strict=True)
    ]
    rows = [
        [
            None if column.nullable and draw(st.integers(0, 3)) == 0 else draw(TYPES[kind][1])
            for column, kind in zip(columns, kinds, strict=True)
        ]
        for _ in range(draw(st.integers(1, 4)))
    ]
    return columns, rows


def expected(columns: Sequence[ColumnType], row: Sequence[Any]) -> dict[str, Any]:
    return {c.name: stored(c, value) for c, value in zip(columns, row, strict=True)}


@given(tables_with_rows())
def test_rows_say_what_was_packed(case: tuple[list[ColumnType], list[list[Any]]]) -> None:
    columns, rows = case
    data = b"".join(image(columns, row) for row in rows)
    for kind in (30, 32):
        found = decoder(columns, keys=[columns[0].name]).read(event(kind, len(columns), data))
        assert len(found) == len(rows)
        for row, (key, before, before_kind, after, changed, unchanged) in zip(
            rows, found, strict=True
        ):
            shown = after if kind == 30 else before
            assert shown is not None
            assert b"\n" not in shown
            values = msgspec.json.decode(shown)
            assert list(values.items()) == list(expected(columns, row).items())
            assert key is not None
            assert msgspec.json.decode(key) == {columns[0].name: stored(columns[0], row[0])}
            assert (changed, unchanged) == (None, ())
            assert before_kind is (BeforeKind.NONE if kind == 30 else BeforeKind.FULL)


@given(tables_with_rows())
def test_updates_tell_both_rows_and_what_differs(
    case: tuple[list[ColumnType], list[list[Any]]],
) -> None:
    columns, rows = case
    pairs = list(zip(rows, [*rows[1:], rows[0]], strict=True))
    data = b"".join(image(columns, old) + image(columns, new) for old, new in pairs)
    found = decoder(columns).read(event(31, len(columns), data))
    for (old, new), (key, before, kind, after, changed, unchanged) in zip(
        pairs, found, strict=True
    ):
        was, now = expected(columns, old), expected(columns, new)
        assert msgspec.json.decode(before or b"") == was
        assert msgspec.json.decode(after or b"") == now
        texts = {
            name: (msgspec.json.encode(was[name]), msgspec.json.encode(now[name])) for name in was
        }
        assert changed == tuple(name for name, (one, two) in texts.items() if one != two)
        assert (key, kind, unchanged) == (None, BeforeKind.FULL, ())


@given(tables_with_rows(), st.data())
def test_columns_that_an_image_leaves_out_are_absent_and_not_null(
    case: tuple[list[ColumnType], list[list[Any]]], choices: st.DataObject
) -> None:
    columns, rows = case
    places = st.sets(st.integers(0, len(columns) - 1), min_size=1).map(sorted)
    old, new = choices.draw(places), choices.draw(places)
    data = b"".join(
        image([columns[at] for at in there], [row[at] for at in there])
        for row in rows
        for there in (old, new)
    )
    names = [column.name for column in columns]
    rows_of = decoder(columns, keys=[names[0]])
    for row, (key, before, kind, after, changed, unchanged) in zip(
        rows, rows_of.read(event(31, len(columns), data, present=old, after=new)), strict=True
    ):
        values = expected(columns, row)
        sent = [names[at] for at in range(len(names)) if at in old or at in new]
        assert msgspec.json.decode(after or b"") == {name: values[name] for name in sent}
        assert unchanged == tuple(name for name in names if name not in sent)
        assert (key is None) is (names[0] not in sent)
        whole = len(old) == len(names)
        assert kind == ("full" if whole else "key" if 0 in old else "none")
        assert (before is None) is (kind == "none")
        # Nothing differs here, where that can be known at all.
        assert changed == (() if set(new) <= set(old) else None)


@given(tables_with_rows(), st.sampled_from(sorted(KINDS)))
def test_events_read_together_say_what_each_says(
    case: tuple[list[ColumnType], list[list[Any]]], kind: int
) -> None:
    columns, written = case
    images = [image(columns, row) * (2 if kind == 31 else 1) for row in written]
    several = [event(kind, len(columns), data) for data in [*images, b"", b"".join(images)]]
    rows = decoder(columns, keys=[columns[0].name])
    assert rows.read_all(several) == [rows.read(each) for each in several]


def test_an_update_without_its_new_row_is_refused_beside_another_one() -> None:
    columns = [ColumnType("c", TINY, 0, True)]
    with pytest.raises(ProtocolError):
        decoder(columns).read_all([event(31, 1, b"\0\x01"), event(31, 1, b"\0\x02")])


def test_a_text_that_says_null_is_not_null() -> None:
    columns = [
        ColumnType("id", LONG, 0, False),
        ColumnType("a", VARCHAR, 200, True, charset="utf8mb4"),
        ColumnType("b", TINY, 0, True),
    ]
    data = image(columns, [1, None, 1]) + image(columns[1:2], ["null"])
    (row,) = decoder(columns).read(event(31, 3, data, after=[1]))
    assert row[1:5] == (
        b'{"id":1,"a":null,"b":1}', BeforeKind.FULL, b'{"id":1,"a":"null","b":1}', ("a",)
    )  # fmt: skip


def test_columns_that_the_table_does_not_show_are_left_out() -> None:
    columns = [ColumnType(name, LONG, 0, False) for name in ("id", "hidden", "n")]
    data = image(columns, [1, 2, 3])
    (row,) = decoder(columns, keys=["id"], shown=["id", "n"]).read(event(30, 3, data))
    assert (row[0], row[3], row[5]) == (b'{"id":1}', b'{"id":1,"n":3}', ())


def test_a_key_of_several_columns_has_all_of_them() -> None:
    columns = [ColumnType(name, LONG, 0, False) for name in ("a", "b", "c")]
    (row,) = decoder(columns, keys=["c", "a"]).read(event(32, 3, image(columns, [1, 2, 3])))
    assert row[0] == b'{"a":1,"c":3}'


def test_a_value_outside_its_character_set_names_table_and_column_and_shows_nothing() -> None:
    columns = [ColumnType("title", VARCHAR, 200, True, charset="utf8mb4")]
    with pytest.raises(DecodeError, match=r"db\.things: the column title .* utf8mb4") as failed:
        decoder(columns).read(event(30, 1, b"\0\x03\xff\xfes"))
    assert "xff" not in str(failed.value)
    assert failed.value.hint


def test_characters_do_not_run_from_one_value_into_the_next() -> None:
    columns = [ColumnType("c", VARCHAR, 200, True, charset="utf8mb4")]
    # Together the two values would be é.
    with pytest.raises(DecodeError):
        decoder(columns).read(event(30, 1, b"\0\x01\xc3\0\x01\xa9"))


def test_rows_of_another_table_or_without_columns_are_refused() -> None:
    columns = [ColumnType("c", TINY, 0, True)]
    with pytest.raises(ProtocolError, match="another number of columns"):
        decoder(columns).read(event(30, 2, b"\0\x01\x01"))
    empty = RowsEvent(Header(0, 30, 1, 0, 0, 0), RowsKind.INSERT, 1, True, 1, b"\0", b"", b"", 0, 0)
    with pytest.raises(DecodeError, match="without any column"):
        decoder(columns).read(empty)


def test_an_event_may_have_no_rows() -> None:
    columns = [ColumnType("c", TINY, 0, True)]
    for kind in KINDS:
        assert decoder(columns, keys=["c"]).read(event(kind, 1, b"")) == []


def test_an_update_from_zero_to_minus_zero_is_told() -> None:
    columns = [ColumnType("amount", DOUBLE, 8, False)]
    data = image(columns, [0.0]) + image(columns, [-0.0])
    ((_, before, _, after, changed, _),) = decoder(columns).read(event(31, 1, data))
    assert (before, after, changed) == (b'{"amount":0.0}', b'{"amount":-0.0}', ("amount",))


def test_bits_beyond_the_last_column_are_no_columns() -> None:
    columns = [ColumnType("id", LONG, 0, False)]
    beyond = msgspec.structs.replace(event(30, 1, b"data"), present=b"\xf0")
    with pytest.raises(DecodeError, match="a row without any column"):
        decoder(columns).read(beyond)


def test_rows_that_show_no_column_are_counted() -> None:
    columns = [ColumnType("hidden", LONG, 0, False)]
    rows = [image(columns, [value]) for value in (1, 2, 3, 4)]
    nothing = decoder(columns, shown=[])
    assert [row[3] for row in nothing.read(event(30, 1, b"".join(rows)))] == [b"{}"] * 4
    updates = nothing.read(event(31, 1, b"".join(rows)))
    assert [(row[3], row[4]) for row in updates] == [(b"{}", ())] * 2


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (["[3", "4]", "1,2"], [b'"[3"', b'"4]"', b'"1,2"']),  # together an array, none by itself
        (['{"a": 1}', "2"], [b'{"a": 1}', b"2"]),
        ([" 1", '{"a":\n1}'], [b"1", b'{"a": 1}']),
        (["1", ""], [b"1", b'""']),
    ],
)
def test_documents_are_such_each_by_itself(values: list[str], texts: list[bytes]) -> None:
    columns = [ColumnType("doc", BLOB, 4, False, charset="utf8mb4", json=True)]
    data = b"".join(image(columns, [value]) for value in values)
    found = decoder(columns).read(event(30, 1, data))
    assert [row[3] for row in found] == [b'{"doc":%b}' % text for text in texts]
