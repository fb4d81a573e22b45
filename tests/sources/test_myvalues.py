"""Types become the JSON that the documents require, and the catalogue's types are understood."""

import struct
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.block import RowBlock, pack
from headrace.change.event import Column, Table, Transaction
from headrace.errors import DecodeError
from headrace.sources.mysql.batches import _column
from headrace.sources.mysql.decode import typecodes as t
from headrace.sources.mysql.decode.charsets import charset_of, decoder
from headrace.sources.mysql.decode.columns import (
    ColumnType,
    DeclaredColumn,
    MappedColumn,
    columns_of,
    declared_type,
)
from headrace.sources.mysql.decode.decimals import decimal_size, decimals
from headrace.sources.mysql.decode.layouts import layout, shortest
from headrace.sources.mysql.decode.values import printed_as, select_expression, text_encoder
from headrace.sources.mysql.position import MysqlPosition


def shown(column: ColumnType, *values: Any) -> list[bytes]:
    """Values of the binlog as JSON."""
    slot, texts = layout(column).convert(values)
    return [slot % text for text in texts]


def selected(kind: str, value: bytes, **more: Any) -> bytes:
    """A value of SELECT as JSON."""
    return text_encoder(DeclaredColumn("c", kind, **more))(value)


# --- what the documents ask for ------------------------------------------------------------------


@pytest.mark.requirement("S0-28")
def test_numbers_decimals_booleans_and_text() -> None:
    assert shown(ColumnType("c", t.LONG, 0, True), 42, -1) == [b"42", b"-1"]
    assert shown(ColumnType("c", t.LONGLONG, 0, True, unsigned=True), 2**64 - 1) == [
        b"18446744073709551615"
    ]
    assert shown(ColumnType("c", t.NEWDECIMAL, 2 << 8 | 4, True), b"\x8c\x32") == [b'"12.50"']
    assert shown(ColumnType("c", t.TINY, 0, True, boolean=True), 0, 1, -7) == [
        b"false", b"true", b"-7"
    ]  # fmt: skip
    assert shown(ColumnType("c", t.TINY, 0, True), 0, 1) == [b"0", b"1"]
    assert shown(ColumnType("c", t.VARCHAR, 20, True, charset="latin1"), b"\xe9\x80\x81") == [
        '"é€\x81"'.encode()
    ]


@pytest.mark.requirement("S0-29")
def test_dates_and_times() -> None:
    moment = ((2025 * 13 + 1) << 5 | 15) << 17 | 10 << 12 | 30 << 6
    packed = (moment | 1 << 39).to_bytes(5, "big")
    assert shown(ColumnType("c", t.DATETIME2, 0, True), packed) == [b'"2025-01-15 10:30:00"']
    seconds = struct.pack(">I", 1736937000)
    assert shown(ColumnType("c", t.TIMESTAMP2, 0, True), seconds) == [b'"2025-01-15T10:30:00Z"']
    assert shown(
        ColumnType("c", t.DATE, 0, True), (2025 << 9 | 1 << 5 | 15).to_bytes(3, "little")
    ) == [b'"2025-01-15"']
    assert selected("datetime", b"2025-01-15 10:30:00") == b'"2025-01-15 10:30:00"'
    assert selected("timestamp", b"2025-01-15 10:30:00") == b'"2025-01-15T10:30:00Z"'
    assert selected("timestamp(3)", b"0000-00-00 00:00:00.000") == b'"0000-00-00 00:00:00.000"'


def test_a_timestamp_of_zero_is_no_moment() -> None:
    assert shown(ColumnType("c", t.TIMESTAMP2, 0, True), bytes(4)) == [b'"0000-00-00 00:00:00"']
    assert shown(ColumnType("c", t.TIMESTAMP2, 3, True), bytes(6)) == [b'"0000-00-00 00:00:00.000"']


def test_times_of_servers_before_fractions_are_read() -> None:
    assert shown(ColumnType("c", t.DATETIME, 0, True), 20250115103000, 0) == [
        b'"2025-01-15 10:30:00"', b'"0000-00-00 00:00:00"'
    ]  # fmt: skip
    assert shown(ColumnType("c", t.TIMESTAMP, 0, True), 1736937000, 0) == [
        b'"2025-01-15T10:30:00Z"', b'"0000-00-00 00:00:00"'
    ]  # fmt: skip
    packed = (-8385959).to_bytes(3, "little", signed=True)
    assert shown(ColumnType("c", t.TIME, 0, True), packed) == [b'"-838:59:59"']


@pytest.mark.requirement("S0-30")
def test_documents_bytes_and_labels() -> None:
    labels = ("a", "b'c", "d")
    assert shown(ColumnType("c", t.ENUM, 1, True, labels=labels), 2, 0) == [b'"b\'c"', b'""']
    assert shown(ColumnType("c", t.SET, 1, True, labels=labels), b"\x05", b"\0") == [
        b'["a","d"]', b"[]"
    ]  # fmt: skip
    assert shown(ColumnType("c", t.BLOB, 2, True), b"\0\xff") == [b'"AP8="']
    text = ColumnType("c", t.BLOB, 4, True, charset="utf8mb4", json=True)
    assert shown(text, b' {"a":\n[1.50]} ', b"not one") == [b'{"a": [1.50]}', b'"not one"']
    assert selected("longtext", b'{"a":\n1}', json=True) == b'{"a": 1}'
    assert selected("set('a','b')", b"a,b") == b'["a","b"]'


def test_bytes_of_a_fixed_length_get_their_zeros_back() -> None:
    assert shown(ColumnType("c", t.STRING, 4, True), b"ab", b"") == [b'"YWIAAA=="', b'"AAAAAA=="']


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (ColumnType("price", t.ENUM, 1, True, labels=("a",)), 2),
        (ColumnType("price", t.SET, 1, True, labels=("a",)), b"\x02"),
        (ColumnType("price", t.JSON, 4, True), b"\xff"),
        (ColumnType("price", t.VARCHAR, 9, True, charset="ascii"), b"\xff"),
        (ColumnType("price", t.VARCHAR, 9, True, charset="ucs2"), b"\xd8"),
        (ColumnType("price", t.VARCHAR, 9, True, charset="swe7"), b"\x80"),
        (ColumnType("price", t.VARCHAR_COMPRESSED, 9, True), b"\x8ajunk"),
        (ColumnType("price", t.BLOB, 4, True, charset="utf8mb4", json=True), b"\xff"),
    ],
)
def test_a_value_that_cannot_be_read_names_its_column(column: ColumnType, value: Any) -> None:
    with pytest.raises(DecodeError, match="column price") as failed:
        shown(column, value)
    assert "junk" not in str(failed.value)


@pytest.mark.parametrize("code", [t.VECTOR, t.TYPED_ARRAY, t.DECIMAL, 99])
def test_a_type_that_is_not_read_names_its_column(code: int) -> None:
    with pytest.raises(DecodeError, match="column price") as failed:
        layout(ColumnType("price", code, 0, True))
    assert failed.value.hint


@pytest.mark.parametrize(
    ("code", "meta"),
    [
        (t.NEWDECIMAL, 0),
        (t.NEWDECIMAL, 200),
        (t.BIT, 0x0900),
        (t.BLOB, 7),
        (t.TIME2, 7),
        (t.ENUM, 3),
    ],
)
def test_a_layout_that_no_server_writes_is_refused(code: int, meta: int) -> None:
    with pytest.raises(DecodeError, match="column price"):
        layout(ColumnType("price", code, meta, True))


def test_an_unknown_character_set_or_collation_is_refused_by_name() -> None:
    with pytest.raises(DecodeError, match="klingon"):
        decoder("klingon")
    with pytest.raises(DecodeError, match="65000"):
        charset_of(65000)


# --- numbers -------------------------------------------------------------------------------------


def packed_decimal(number: int, precision: int, scale: int) -> bytes:
    """How the servers pack number / 10 ** scale, group by group."""
    sizes = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
    digits = str(abs(number)).rjust(precision, "0")
    whole, fraction = digits[: precision - scale], digits[precision - scale :]
    first = len(whole) % 9
    groups = [whole[:first]] if first else []
    groups += [whole[at : at + 9] for at in range(first, len(whole), 9)]
    groups += [fraction[at : at + 9] for at in range(0, scale, 9)]
    data = b"".join(int(group).to_bytes(sizes[len(group)], "big") for group in groups)
    if number < 0:
        data = bytes(byte ^ 0xFF for byte in data)
    return bytes([data[0] ^ 0x80]) + data[1:]


@st.composite
def exact_numbers(draw: st.DrawFn) -> tuple[int, int, int]:
    precision = draw(st.integers(1, 65))
    scale = draw(st.integers(0, min(precision, 30)))
    return draw(st.integers(-(10**precision) + 1, 10**precision - 1)), precision, scale


@given(exact_numbers())
def test_decimals_keep_every_digit(case: tuple[int, int, int]) -> None:
    number, precision, scale = case
    data = packed_decimal(number, precision, scale)
    assert len(data) == decimal_size(precision, scale)
    whole, fraction = divmod(abs(number), 10**scale)
    text = f"{'-' if number < 0 else ''}{whole}" + (f".{fraction:0{scale}d}" if scale else "")
    assert decimals(precision, scale)([data]) == [text.encode()]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float_is_the_shortest_number_that_is_the_same_float(value: float) -> None:
    short = shortest(value)
    assert struct.pack("<f", short) == struct.pack("<f", value)
    assert digits(short) <= min(9, digits(value))


def digits(value: float) -> int:
    return len(Decimal(repr(value)).normalize().as_tuple().digits)


def test_a_float_is_shown_without_the_digits_of_a_double() -> None:
    stored = struct.unpack("<f", struct.pack("<f", 0.1))
    assert shown(ColumnType("c", t.FLOAT, 4, True), *stored) == [b"0.1"]
    assert selected("float", b"0.10000000149011612") == b"0.1"


def test_select_asks_so_that_nothing_is_lost() -> None:
    assert select_expression(DeclaredColumn("f", "float(7,2)"), "`f`") == "`f` * 1e0"
    assert select_expression(DeclaredColumn("b", "bit(9)"), "`b`") == "`b` + 0"
    assert select_expression(DeclaredColumn("i", "int(11)"), "`i`") == "`i`"


def test_zeros_that_fill_a_number_are_not_part_of_it() -> None:
    assert selected("int(8) unsigned zerofill", b"00000042") == b"42"
    assert selected("decimal(8,2) unsigned zerofill", b"000012.50") == b'"12.50"'
    assert selected("year(4)", b"0000") == b"0"


# --- what the catalogue has ----------------------------------------------------------------------


def test_a_declared_type_is_taken_apart() -> None:
    assert declared_type("int(10) unsigned").unsigned
    assert declared_type("INT ZEROFILL").unsigned
    assert declared_type("tinyint(1)").boolean
    assert not declared_type("tinyint(1) unsigned").boolean
    assert not declared_type("tinyint(4)").boolean
    assert declared_type("varchar(9) /*M!100301 COMPRESSED*/").base == "varchar"
    assert declared_type(r"enum('a','b''c','d\\e','n\nl','x,y','(')").labels == (
        "a", "b'c", "d\\e", "n\nl", "x,y", "("
    )  # fmt: skip
    with pytest.raises(DecodeError):
        declared_type("")


def mapped(code: int, **fields: Any) -> MappedColumn:
    return MappedColumn(code, 0, True, **fields)


def test_what_the_table_map_tells_counts_before_the_catalogue() -> None:
    (column,) = columns_of(
        (mapped(t.LONG, unsigned=True, name="n"),), (DeclaredColumn("n", "int(11)"),)
    )
    assert column.unsigned
    (column,) = columns_of(
        (MappedColumn(t.ENUM, 1, True, collation=8, labels=(b"\xe9",)),),
        (DeclaredColumn("e", "enum('x')", "utf8mb4"),),
    )
    assert (column.labels, column.charset) == (("é",), "latin1")


@pytest.mark.parametrize(
    ("columns", "declared"),
    [
        ((mapped(t.LONG),), ()),
        ((mapped(t.LONG),), (DeclaredColumn("n", "varchar(9)", "utf8mb4"),)),
        ((mapped(t.LONG, name="m"),), (DeclaredColumn("n", "int(11)"),)),
        ((mapped(t.LONG),), None),
        ((mapped(t.VARCHAR),), (DeclaredColumn("n", "varchar(9)"),)),
        ((mapped(t.LONG),), (DeclaredColumn("n", "hologram"),)),
        ((mapped(t.DATETIME),), (DeclaredColumn("n", "datetime(3) /* mariadb-5.3 */"),)),
    ],
)
def test_columns_that_do_not_fit_their_table_map_are_refused(
    columns: tuple[MappedColumn, ...], declared: tuple[DeclaredColumn, ...] | None
) -> None:
    with pytest.raises(DecodeError):
        columns_of(columns, declared)


def test_collations_name_their_character_set() -> None:
    assert [charset_of(number) for number in (8, 63, 45, 255, 33, 1027, 2304, 35)] == [
        "latin1", "binary", "utf8mb4", "utf8mb4", "utf8mb3", "dec8", "utf8mb4", "ucs2"
    ]  # fmt: skip


# --- blocks --------------------------------------------------------------------------------------


@pytest.mark.requirement("C-28")
@pytest.mark.parametrize(
    ("declared", "values"),
    [
        ("varchar(9)", [b"\\N", None, b"a"]),
        ("varchar(9)", [b"\\N\\N", None, None]),
        ("varchar(9)", [b"a\tb", None, "é".encode()]),
        ("varchar(9)", [b"", None, b"null"]),
        ("timestamp", [b"0000-00-00 00:00:00", None, b"2025-01-15 10:30:00"]),
        ("timestamp(6)", [b"0000-00-00 00:00:00.000000"]),
        ("timestamp", [b"2025-01-15 10:30:00", None]),
        ("tinyint(1)", [b"0", None, b"2"]),
        ("int(5) unsigned zerofill", [b"00012", None]),
        ("float", [b"1.5", None, b"1e20"]),
        ("bit(3)", [b"5", None]),
        ("set('a','b')", [b"a,b", b"", None]),
    ],
)
def test_a_column_of_a_block_is_written_as_its_values_are(
    declared: str, values: list[bytes | None]
) -> None:
    column = DeclaredColumn("v", declared, "utf8mb4")
    encode = text_encoder(column)
    found = _column(values, printed_as(column), encode)
    assert found is not None
    table = Table("s", "mysql", "o", "", "shop", "t", (Column("v", declared),))
    at = MysqlPosition("binlog.000001", 4, "", 4)
    block = RowBlock(pack(table, Transaction("t", 1, 1), (at, at), [found], len(values)))
    assert block.images(["v"], 0, len(values)) == [
        b'{"v":%b}' % (b"null" if value is None else encode(value)) for value in values
    ]
