"""Types and images of MySQL and MariaDB become Arrow columns of the same values."""

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.change.arrow import arrow_schema, arrow_type, decode, widened
from headrace.change.event import Change, Column, Op
from headrace.errors import DecodeError
from headrace.testing.mariadb import MariadbDatabase
from tests.sources.mycapturing import captured

moment = dt.datetime.fromisoformat

STRING, BINARY, INSTANT = pa.string(), pa.binary(), pa.timestamp("us", tz="UTC")

TYPES = [
    ("tinyint(1)", pa.bool_()),
    ("tinyint", pa.int8()),
    ("tinyint(4)", pa.int8()),
    ("tinyint(1) unsigned", pa.int16()),
    ("tinyint(3) unsigned zerofill", pa.int16()),
    ("smallint(6)", pa.int16()),
    ("smallint unsigned", pa.int32()),
    ("mediumint(9)", pa.int32()),
    ("mediumint(8) unsigned", pa.int32()),
    ("int(11)", pa.int32()),
    ("int", pa.int32()),
    ("int(10) unsigned", pa.int64()),
    ("bigint(20)", pa.int64()),
    ("bigint unsigned", pa.decimal128(20, 0)),
    ("decimal(12,2)", pa.decimal128(12, 2)),
    ("decimal(12,2) unsigned", pa.decimal128(12, 2)),
    ("decimal(38,30)", pa.decimal128(38, 30)),
    ("decimal(65,30)", STRING),
    ("float", pa.float32()),
    ("float(7,4)", pa.float32()),
    ("double unsigned", pa.float64()),
    ("bit(1)", pa.int64()),
    ("bit(63)", pa.int64()),
    ("bit(64)", pa.decimal128(20, 0)),
    ("year(4)", pa.int16()),
    ("date", pa.date32()),
    ("datetime", pa.timestamp("us")),
    ("datetime(6)", pa.timestamp("us")),
    ("timestamp", INSTANT),
    ("timestamp(3)", INSTANT),
    ("time(6)", STRING),
    ("set('a','b')", pa.list_(STRING)),
    ("enum('a','b, (c)','it''s')", STRING),
    ("json", STRING),
    ("varchar(50)", STRING),
    ("varchar(50) /*M!100301 COMPRESSED*/", STRING),
    ("longtext", STRING),
    ("uuid", STRING),
    ("inet6", STRING),
    ("varbinary(10)", BINARY),
    ("longblob", BINARY),
    ("point", BINARY),
    ("geomcollection", BINARY),
    ("something new", STRING),
    ("", STRING),
]


@pytest.mark.parametrize(("text", "arrow"), TYPES, ids=[text for text, _ in TYPES])
def test_each_type_has_its_arrow_type(text: str, arrow: pa.DataType) -> None:
    assert arrow_type(text, "mysql") == arrow


def read(type_text: str, *texts: str, as_text: bool = False) -> list[Any]:
    """The values of a column `v` whose JSON texts are these."""
    columns = [Column("v", type_text)]
    named = frozenset({"v"} if as_text else ())
    table = decode([f'{{"v":{text}}}' for text in texts], columns, as_text=named, connector="mysql")
    table.validate(full=True)
    assert table.schema == arrow_schema(columns, as_text=named, connector="mysql")
    return list(table["v"].to_pylist())


def test_the_largest_numbers_keep_every_digit() -> None:
    assert read("bigint unsigned", "18446744073709551615", "0", "null") == [
        Decimal(18446744073709551615),
        Decimal(0),
        None,
    ]
    assert read("bit(64)", "18446744073709551615") == [Decimal(18446744073709551615)]
    digits = "12345678901234567890123456789012345678901234567890.1"
    assert read("decimal(65,1)", f'"{digits}"') == [digits]


@pytest.mark.parametrize(
    ("declared", "zero", "text", "value"),
    [
        ("date", "0000-00-00", "2024-02-29", dt.date(2024, 2, 29)),
        ("datetime", "0000-00-00 00:00:00", "9999-12-31 23:59:59", moment("9999-12-31T23:59:59")),
        (
            "datetime(3)",
            "0000-00-00 00:00:00.000",
            "2024-02-29 00:00:00.125",
            moment("2024-02-29T00:00:00.125"),
        ),
        (
            "timestamp",
            "0000-00-00 00:00:00",
            "2024-02-29T01:02:03Z",
            moment("2024-02-29T01:02:03+00:00"),
        ),
    ],
)
def test_a_zero_date_is_null_and_as_text_keeps_it(
    declared: str, zero: str, text: str, value: dt.date
) -> None:
    texts = (f'"{zero}"', f'"{text}"', "null")
    assert read(declared, *texts) == [None, value, None]
    assert read(declared, *texts, as_text=True) == [zero, text, None]


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ("date", "2024-00-15"),
        ("date", "2024-02-00"),
        ("date", "0000-01-01"),
        ("datetime", "2024-00-00 10:00:00"),
        ("datetime", "0000-12-31 00:00:00"),
    ],
)
def test_a_date_in_part_is_refused_and_named_but_not_shown(declared: str, text: str) -> None:
    with pytest.raises(DecodeError, match="column 'v'") as caught:
        read(declared, '"0000-00-00"', f'"{text}"')
    assert text not in str(caught.value)
    assert "as_text" in caught.value.hint
    assert read(declared, f'"{text}"', as_text=True) == [text]


def test_a_wider_type_takes_what_was_there() -> None:
    for old, new in [
        ("tinyint", "smallint"),
        ("tinyint", "bigint"),
        ("tinyint unsigned", "int"),
        ("int unsigned", "bigint"),
        ("bigint", "bigint unsigned"),
        ("decimal(10,2)", "decimal(12,2)"),
    ]:
        assert widened(arrow_type(old, "mysql"), arrow_type(new, "mysql")), (old, new)
    assert not widened(arrow_type("bigint unsigned", "mysql"), arrow_type("bigint", "mysql"))


# --- a real server -------------------------------------------------------------------------------

VALUES: dict[str, tuple[str, Any]] = {
    "tinyint(1)": ("1", True),
    "tinyint": ("-128", -128),
    "int unsigned": ("4294967295", 4294967295),
    "bigint unsigned": ("18446744073709551615", Decimal(18446744073709551615)),
    "decimal(12,2)": ("-1.50", Decimal("-1.50")),
    "float": ("0.1", pytest.approx(0.1)),
    "double": ("1e308", 1e308),
    "bit(10)": ("b'1000000001'", 513),
    "year": ("2024", 2024),
    "date": ("'2024-02-29'", dt.date(2024, 2, 29)),
    "datetime(6)": ("'2024-02-29 01:02:03.5'", moment("2024-02-29T01:02:03.5")),
    "timestamp null": ("'2024-02-29 01:02:03'", moment("2024-02-29T01:02:03+00:00")),
    "time": ("'-838:59:59'", "-838:59:59"),
    "enum('a','it''s')": ("'it''s'", "it's"),
    "set('a','b','c')": ("'c,a'", ["a", "c"]),
    "json": ("""'{"a": [1.50, null]}'""", '{"a": [1.50, null]}'),
    "varchar(20)": ("'é 水'", "é 水"),
    "blob": ("x'00ff'", b"\x00\xff"),
    "point": ("POINT(1, 2)", bytes.fromhex("0101000000000000000000f03f0000000000000040")),
    "uuid": ("'550e8400-e29b-41d4-a716-446655440000'", "550e8400-e29b-41d4-a716-446655440000"),
}


def typed(changes: list[Change], table: str) -> list[dict[str, Any]]:
    """The new rows of changes as Arrow holds them."""
    chosen = [each for each in changes if each.table.name == table and each.after]
    columns = chosen[0].table.columns
    return list(decode([e.after for e in chosen], columns, connector="mysql").to_pylist())


def test_what_a_server_sends_is_what_it_holds(maria: MariadbDatabase, tmp_path: Path) -> None:
    declared = ", ".join(f"c{at} {kind}" for at, kind in enumerate(VALUES))
    values = ", ".join(text for text, _ in VALUES.values())
    maria.execute(f"CREATE TABLE everything (id int PRIMARY KEY, {declared})")
    maria.execute(f"INSERT INTO everything VALUES (1, {values})")
    with captured(maria, tmp_path) as feed:
        maria.execute(f"INSERT INTO everything VALUES (2, {values})")
        copied, streamed = feed.changes(Op.READ), feed.changes(Op.INSERT)
    expected = {f"c{at}": value for at, (_, value) in enumerate(VALUES.values())}
    assert typed(copied, "everything") == [{"id": 1} | expected]
    assert typed(streamed, "everything") == [{"id": 2} | expected]


def test_zero_dates_of_a_server_are_null(maria: MariadbDatabase, tmp_path: Path) -> None:
    maria.execute(
        "CREATE TABLE days (id int PRIMARY KEY, a date NOT NULL, b datetime(2) NOT NULL,"
        " c timestamp NOT NULL DEFAULT 0)"
    )
    insert = "SET sql_mode = ''; INSERT INTO days VALUES (%s, 0, 0, 0)"
    maria.execute(insert, 1)
    with captured(maria, tmp_path) as feed:
        maria.execute(insert, 2)
        changes = feed.changes(Op.READ, Op.INSERT)
    assert b'"a":"0000-00-00","b":"0000-00-00 00:00:00.00"' in (changes[0].after or b"")
    assert [list(row.values()) for row in typed(changes, "days")] == [
        [1, None, None, None],
        [2, None, None, None],
    ]
