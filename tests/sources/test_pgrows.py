"""A row becomes the same JSON however it was sent, and broken bytes become an error of ours."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.block import RowBlock, pack
from headrace.change.event import BeforeKind, Change, Column, Op, Table, Transaction
from headrace.change.record import encode
from headrace.errors import DecodeError, ProtocolError
from headrace.sources.postgres.position import PostgresPosition
from headrace.sources.postgres.rows import Rows
from tests.sources.recorded import decoder, text_tuple

COPY_ESCAPES = (r"\b", r"\f", r"\n", r"\r", r"\t", r"\v", r"\\")
HEAD = (16384).to_bytes(4, "big")
BOOL, INT8, TEXT, NUMERIC, JSONB, FLOAT8, BYTEA = 16, 20, 25, 1700, 3802, 701, 17

# Text never holds a zero byte; lengths around a byte's and two bytes' limits matter to decoders.
PLAIN = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
TEXTS = PLAIN | st.sampled_from(
    ["", "%", "%b %s %%", '"', "\\", "t\x01", "ttt", "x" * 255, "y" * 256, "é" * 200, "z" * 65_536]
)
VALUES = {
    TEXT: TEXTS,
    INT8: st.integers(-(2**63), 2**63 - 1).map(str),
    BOOL: st.sampled_from("tf"),
    NUMERIC: st.decimals(allow_nan=False, allow_infinity=False).map(lambda n: format(n, "f")),
    JSONB: st.recursive(
        st.none() | st.booleans() | st.integers() | PLAIN,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
        max_leaves=5,
    ).map(lambda value: json.dumps(value, ensure_ascii=False)),
    BYTEA: st.binary(max_size=300).map(lambda value: "\\x" + value.hex()),
}
NAMES = st.text(min_size=1).filter(lambda name: "\0" not in name) | st.sampled_from(
    ["%", "%b", 'quo"ted', "back\\slash", "ключ", "a.b"]
)


def table_of(*columns: Column) -> Table:
    return Table("shop", "postgres", "origin", "db", "public", "things", columns)


def rows_of(*columns: tuple[str, int, bool]) -> Rows:
    """The decoder of a table of (name, type, whether in the key)."""
    described = [Column(name, "", key, type_id) for name, type_id, key in columns]
    return decoder(table_of(*described), {})


@st.composite
def tables_with_rows(draw: st.DrawFn) -> tuple[Rows, list[list[bytes | None]]]:
    """A table of any columns, and some rows of it."""
    names = draw(st.lists(NAMES.filter(lambda n: n.isprintable()), min_size=1, unique=True))
    kinds = [draw(st.sampled_from(sorted(VALUES))) for _ in names]
    keys = [draw(st.booleans()) for _ in names]
    rows = [
        [
            None if not key and draw(st.integers(0, 4)) == 0 else draw(VALUES[kind]).encode()
            for kind, key in zip(kinds, keys, strict=True)
        ]
        for _ in range(draw(st.integers(1, 4)))
    ]
    return rows_of(*zip(names, kinds, keys, strict=True)), rows


def insert_of(values: list[bytes | None]) -> bytes:
    return b"I" + HEAD + b"N" + text_tuple(values)


def copied_line(values: list[bytes | None]) -> bytes:
    """A line of COPY's text format with its ctid, as the server escapes it."""
    escapes = {ord(c): e for c, e in zip("\b\f\n\r\t\v\\", COPY_ESCAPES, strict=True)}
    fields = [r"\N" if v is None else v.decode().translate(escapes) for v in values]
    return "\t".join(["(0,1)", *fields]).encode() + b"\n"


def expected_of(rows: Rows, values: list[bytes | None]) -> dict[str, Any]:
    """What the image must say, computed another way."""
    said: dict[str, Any] = {}
    for column, value in zip(rows.table.columns, values, strict=True):
        if value is None:
            said[column.name] = None
        elif column.type_id == BOOL:
            said[column.name] = value == b"t"
        elif column.type_id == INT8:
            said[column.name] = int(value)
        elif column.type_id == JSONB:
            said[column.name] = json.loads(value)
        elif column.type_id == BYTEA:
            encoded = bytes.fromhex(value.decode()[2:])
            said[column.name] = msgspec.to_builtins(encoded)
        else:
            said[column.name] = value.decode()
    return said


# --- the same row, however it comes --------------------------------------------------------------


@given(tables_with_rows())
def test_an_insert_says_what_the_server_sent(case: tuple[Rows, list[list[bytes | None]]]) -> None:
    rows, sent = case
    for values in sent:
        key, before, kind, after, changed, unchanged = rows.insert(insert_of(values))
        assert after is not None
        expected = expected_of(rows, values)
        assert list(json.loads(after).items()) == list(expected.items())
        assert b"\n" not in after
        names = rows.table.key
        assert (json.loads(key) if key else None) == (
            {name: expected[name] for name in names} if names else None
        )
        assert (before, kind, changed, unchanged) == (None, BeforeKind.NONE, None, ())


@given(tables_with_rows())
def test_every_way_of_sending_a_row_gives_the_same_bytes(
    case: tuple[Rows, list[list[bytes | None]]],
) -> None:
    rows, sent = case
    for values in sent:
        new = b"N" + text_tuple(values)
        inserted = rows.insert(b"I" + HEAD + new)
        assert rows.update(b"U" + HEAD + new) == inserted
        # An old row before it makes a decoder take the long way.
        key, _, _, after, changed, _ = rows.update(b"U" + HEAD + b"O" + text_tuple(values) + new)
        assert (key, after, changed) == (inserted[0], inserted[3], ())
        deleted = rows.delete(b"D" + HEAD + b"O" + text_tuple(values))
        assert deleted[:3] == (inserted[0], inserted[3], BeforeKind.FULL)


@given(tables_with_rows())
def test_a_copied_row_has_the_bytes_of_a_streamed_one(
    case: tuple[Rows, list[list[bytes | None]]],
) -> None:
    rows, sent = case
    streamed = [rows.insert(insert_of(values)) for values in sent]
    keys, images = rows.lines().images([copied_line(values) for values in sent])
    assert list(keys) == [row[0] for row in streamed]
    assert images == [row[3] for row in streamed]


@given(tables_with_rows(), st.data())
def test_a_block_of_copied_rows_is_the_same_changes(
    case: tuple[Rows, list[list[bytes | None]]], data: st.DataObject
) -> None:
    rows, sent = case
    lines = [copied_line(values) for values in sent]
    columns = rows.lines().columns(lines)
    assert columns is not None
    count, shared, position = len(lines), Transaction("t", 1, 2), PostgresPosition(3, 3)
    ended = PostgresPosition(3, 3, 3)
    block = RowBlock(pack(rows.table, shared, (position, ended), columns, count))
    keys, images = rows.lines().images(lines)
    changes = [
        Change(Op.READ, rows.table, key, None, BeforeKind.NONE, image, None, (), shared, ordinal,
               ended if ordinal == count else position, ordinal == count)
        for ordinal, (key, image) in enumerate(zip(keys, images, strict=True), 1)
    ]  # fmt: skip
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    assert block.records(begin, end) == encode(changes)[begin:end]
    assert block.records(0, count) == encode(changes)


# --- old rows ------------------------------------------------------------------------------------

THINGS = rows_of(("id", INT8, True), ("name", TEXT, False), ("big", TEXT, False))


def update_of(old: bytes, *new: bytes | None) -> bytes:
    return b"U" + HEAD + old + b"N" + text_tuple(new)


@pytest.mark.requirement("S2-05")
def test_an_old_key_is_carried_without_the_columns_that_pad_it() -> None:
    old = b"K" + text_tuple([b"1", None, None])
    key, before, kind, after, changed, unchanged = THINGS.update(update_of(old, b"2", b"a", None))
    assert (key, before, kind) == (b'{"id":2}', b'{"id":1}', BeforeKind.KEY)
    assert after == b'{"id":2,"name":"a","big":null}'
    assert (changed, unchanged) == (None, ())


@pytest.mark.requirement("S2-06")
def test_a_full_old_row_tells_what_changed() -> None:
    old = b"O" + text_tuple([b"1", b"a", None])
    key, before, kind, after, changed, unchanged = THINGS.update(update_of(old, b"1", b"b", None))
    assert (key, before, kind) == (b'{"id":1}', b'{"id":1,"name":"a","big":null}', BeforeKind.FULL)
    assert after == b'{"id":1,"name":"b","big":null}'
    assert (changed, unchanged) == (("name",), ())


def test_a_column_that_was_not_sent_is_listed_and_absent() -> None:
    row = b"\0\3" + b"t\0\0\0\1" + b"1" + b"n" + b"u"
    key, before, _, after, changed, unchanged = THINGS.update(b"U" + HEAD + b"N" + row)
    assert (key, before, after) == (b'{"id":1}', None, b'{"id":1,"name":null}')
    assert (changed, unchanged) == (None, ("big",))


def test_a_column_that_was_not_sent_is_taken_from_the_full_old_row() -> None:
    old = b"O" + text_tuple([b"1", b"a", b"large"])
    new = b"N\0\3" + b"t\0\0\0\1" + b"1" + b"n" + b"u"
    _, before, _, after, changed, unchanged = THINGS.update(b"U" + HEAD + old + new)
    assert before == b'{"id":1,"name":"a","big":"large"}'
    assert after == b'{"id":1,"name":null,"big":"large"}'
    assert (changed, unchanged) == (("name",), ())


def test_a_deleted_row_is_known_by_its_key() -> None:
    row = THINGS.delete(b"D" + HEAD + b"K" + text_tuple([b"1", None, None]))
    assert row == (b'{"id":1}', b'{"id":1}', BeforeKind.KEY, None, None, ())


def test_a_composite_key_has_its_columns_in_table_order() -> None:
    rows = rows_of(("b", INT8, True), ("x", TEXT, False), ("a", TEXT, True))
    assert rows.insert(insert_of([b"1", b"-", b"z"]))[0] == b'{"b":1,"a":"z"}'


def test_a_row_of_a_table_without_columns_is_an_empty_object() -> None:
    assert rows_of().insert(b"I" + HEAD + b"N\0\0")[3] == b"{}"


# --- broken bytes --------------------------------------------------------------------------------

ANY = rows_of(
    ("id", INT8, True), ("name", TEXT, False), ("doc", JSONB, False), ("raw", BYTEA, True)
)


@st.composite
def mutated_messages(draw: st.DrawFn) -> bytes:
    """A row message of any kind with some bytes replaced, left out or put in."""
    kind = draw(st.sampled_from([b"I", b"U", b"D"]))
    values = [b"1", b"name", b'{"a": 1}', b"\\xff"]
    old = draw(st.sampled_from([b"", b"K" + text_tuple(values), b"O" + text_tuple(values)]))
    data = bytearray(kind + HEAD + old + b"N" + text_tuple([*values[:3], draw(st.binary())]))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


@given(st.binary(max_size=60) | mutated_messages())
def test_arbitrary_rows_are_read_or_refused_with_an_error_of_ours(data: bytes) -> None:
    for read in (ANY.insert, ANY.update, ANY.delete):
        try:
            row = read(data)
        except (ProtocolError, DecodeError):
            continue
        assert isinstance(row, tuple)


@given(st.lists(st.binary(max_size=40).map(lambda b: b + b"\n"), min_size=1, max_size=4))
def test_arbitrary_lines_are_read_or_refused_with_an_error_of_ours(lines: list[bytes]) -> None:
    try:
        ANY.lines().images(lines)
    except (ProtocolError, DecodeError):
        return


@given(st.lists(st.text('ab\\nN\x80"', max_size=6), min_size=4, max_size=4))
def test_lines_of_the_right_width_are_read_or_refused_as_well(fields: list[str]) -> None:
    line = "\t".join(["(0,1)", *fields]).encode("latin-1") + b"\n"
    try:
        ANY.lines().images([line])
    except (ProtocolError, DecodeError):
        return


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"I",
        b"I" + HEAD,
        b"I" + HEAD + b"N",
        b"I" + HEAD + b"N\0\3",
        b"I" + HEAD + b"N\0\3" + b"nnx",
        b"I" + HEAD + b"N\0\3" + b"nnn" + b"more",
        b"I" + HEAD + b"N\0\3" + b"nnt\0\0\0\4abc",
        b"I" + HEAD + b"K\0\3" + b"nnn",
        b"I" + HEAD + b"N\0\3" + b"nnt\xff\xff\xff\xff",
    ],
)
def test_a_row_that_the_protocol_does_not_allow_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="things"):
        THINGS.insert(data)


def test_a_row_of_other_columns_than_were_told_fails_its_table() -> None:
    with pytest.raises(DecodeError, match="another number of columns"):
        THINGS.insert(b"I" + HEAD + b"N\0\2" + b"nn")


def test_an_error_never_shows_a_value() -> None:
    with pytest.raises(DecodeError) as caught:
        THINGS.insert(insert_of([b"1", b"secret \xff", None]))
    assert "secret" not in str(caught.value)
