"""What a real server's binlog gives is what its SELECT gives, for values of every type."""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import date, datetime, timedelta
from typing import Any

import pymysql
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.change.arrow import block_table, decode
from headrace.change.block import MARK, BlockRows, RowBlock
from headrace.change.event import Column, Table
from headrace.change.record import Records
from headrace.errors import DecodeError
from headrace.sources.mysql.batches import RowBatches, SnapshotRows
from headrace.sources.mysql.catalog import BinlogEnd
from headrace.sources.mysql.decode.binlog import parse
from headrace.sources.mysql.decode.charsets import _TABLES, decoder, is_ascii_superset
from headrace.sources.mysql.decode.columns import DeclaredColumn
from headrace.sources.mysql.decode.events import UNKNOWN, Event, FormatDescription
from headrace.sources.mysql.decode.values import select_expression
from headrace.sources.mysql.resume import DeclaredTable
from headrace.testing.mysql import MysqlDatabase
from tests.effort import times
from tests.sources.binlogs.reading import parsed, rows, selected, taken_apart
from tests.sources.binlogs.record import RecordedTable

TEXT = st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs"]), max_size=20)
LATIN = st.text(st.characters(codec="latin-1"), max_size=20)
BYTES = st.binary(max_size=12)


def whole(bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    low = -(1 << bits - 1) if signed else 0
    return st.integers(low, low + (1 << bits) - 1)


def exact(precision: int, scale: int) -> st.SearchStrategy[str]:
    def text(number: int) -> str:
        left, right = divmod(abs(number), 10**scale)
        return f"{'-' if number < 0 else ''}{left}.{right:0{scale}d}" if scale else str(number)

    return st.integers(-(10**precision) + 1, 10**precision - 1).map(text)


def durations() -> st.SearchStrategy[str]:
    limit = (838 * 3600 + 59 * 60 + 59) * 10**6

    def text(micro: int) -> str:
        seconds, fraction = divmod(abs(micro), 10**6)
        sign = "-" if micro < 0 else ""
        return f"{sign}{seconds // 3600}:{seconds // 60 % 60}:{seconds % 60}.{fraction:06d}"

    return st.integers(-limit, limit).map(text)


FIRST, EPOCH = datetime.fromisoformat("1000-01-01"), datetime.fromisoformat("1970-01-01")
MOMENTS = st.datetimes(FIRST).map(str) | st.sampled_from(
    ["0000-00-00 00:00:00", "2000-00-01 00:00:00", "2000-01-00 12:00:00.5", "0001-01-01"]
)
STAMPS = st.integers(1, 2**31 - 1).map(lambda s: str(EPOCH + timedelta(seconds=s)))
DATES = st.dates(date(1000, 1, 1)).map(str) | st.sampled_from(
    ["0000-00-00", "2000-00-00", "2000-02-00", "0000-01-01"]
)
DOUBLES = st.floats(allow_nan=False, allow_infinity=False)
LABELS = ("a", "b'c", "é", "x y")
MANY = [f"label {number}" for number in range(300)]


def choice(kind: str, labels: Sequence[str]) -> str:
    quoted = ",".join(f"'{label}'" for label in labels)
    return f"{kind}({quoted})"


TYPES: dict[str, st.SearchStrategy[Any]] = {
    "tinyint": whole(8),
    "tinyint(1)": whole(8),
    "smallint unsigned": whole(16, signed=False),
    "mediumint": whole(24),
    "mediumint unsigned": whole(24, signed=False),
    "int": whole(32),
    "int(9) unsigned zerofill": whole(32, signed=False),
    "bigint": whole(64),
    "bigint unsigned": whole(64, signed=False),
    "decimal(12,2)": exact(12, 2),
    "decimal(65,30)": exact(65, 30),
    "decimal(38,0)": exact(38, 0),
    "decimal(7,7)": exact(7, 7),
    "float": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "double": DOUBLES,
    "double(20,5)": st.floats(-1e12, 1e12),
    "bit(1)": whole(1, signed=False),
    "bit(33)": whole(33, signed=False),
    "bit(64)": whole(64, signed=False),
    "year": st.integers(1901, 2155) | st.just(0),
    "date": DATES,
    "time": durations(),
    "time(2)": durations(),
    "time(3)": durations(),
    "time(6)": durations(),
    "datetime": MOMENTS,
    "datetime(1)": MOMENTS,
    "datetime(4)": MOMENTS,
    "datetime(6)": MOMENTS,
    "timestamp null": STAMPS,
    "timestamp(3) null": STAMPS,
    "timestamp(6) null": STAMPS,
    "char(20)": TEXT,
    "char(255)": TEXT,
    "varchar(20)": TEXT,
    "varchar(300)": TEXT,
    "varchar(20) character set latin1": LATIN,
    "varchar(20) character set ucs2": LATIN,
    "varchar(20) character set utf16le": TEXT,
    "tinytext": TEXT,
    "text": TEXT,
    "mediumtext character set utf32": TEXT,
    "binary(12)": BYTES,
    "varbinary(12)": BYTES,
    "tinyblob": BYTES,
    "blob": BYTES,
    "longblob": BYTES,
    "enum('a','b''c','é','x y')": st.sampled_from(LABELS),
    "set('a','b''c','é','x y')": st.sets(st.sampled_from(LABELS)).map(",".join),
    choice("enum", MANY): st.sampled_from(MANY),
    choice("set", MANY[:64]): st.sets(st.sampled_from(MANY[:64])).map(",".join),
    choice("set", MANY[:20]): st.sets(st.sampled_from(MANY[:20])).map(",".join),
    "json": st.sampled_from(['{"a": 1}', "[1, 2.50]", '"é"', "null", " [1,\n2] "]),
    "point": st.tuples(DOUBLES, DOUBLES),
}
OF_MARIADB: dict[str, st.SearchStrategy[Any]] = {
    "varchar(20) compressed": TEXT,
    "longtext compressed": TEXT.map(lambda text: text * 20),
    "uuid": st.uuids().map(str),
    "inet6": st.ip_addresses(v=6).map(str),
    "inet4": st.ip_addresses(v=4).map(str),
}
EVERY = TYPES | OF_MARIADB
ROWS = st.lists(
    st.tuples(*[st.none() | strategy for strategy in EVERY.values()]), min_size=1, max_size=5
)


def connect(database: MysqlDatabase) -> "pymysql.Connection[Any]":
    plain: Any = pymysql.converters.encoders  # writes Python's values, reads none
    return pymysql.connect(
        host="127.0.0.1",
        port=database.server.port,
        user="root",
        database=database.name,
        charset="utf8mb4",
        autocommit=True,
        conv=plain,
        use_unicode=False,
    )


def binlog_after(database: MysqlDatabase, file: str, position: int) -> Iterator[Event]:
    """What the server has written since then."""
    data = (database.server.data / file).read_bytes()
    size = int.from_bytes(data[13:17], "little")
    form = parse(data[4 : 4 + size], UNKNOWN)
    assert isinstance(form, FormatDescription)
    raw = []
    while position < len(data):
        size = int.from_bytes(data[position + 9 : position + 13], "little")
        raw.append(data[position : position + size])
        position += size
    return parsed(raw, form)


def declared(cursor: Any, table: str, *, mariadb: bool) -> tuple[DeclaredColumn, ...]:
    cursor.execute(
        "SELECT COLUMN_NAME, COLUMN_TYPE, COALESCE(CHARACTER_SET_NAME, '') FROM"
        " information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = %s"
        " ORDER BY ORDINAL_POSITION",
        (table,),
    )
    return tuple(
        DeclaredColumn(
            name.decode(), kind.decode(), charset.decode(), mariadb and name == b"c_json"
        )
        for name, kind, charset in cursor.fetchall()
    )


@pytest.mark.requirement("S0-28", "S0-29", "S0-30", "C-28")
@given(written=ROWS)
@settings(
    max_examples=times(12, nightly=120),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_binlog_says_what_select_says(
    my: MysqlDatabase, written: list[tuple[Any, ...]]
) -> None:
    with closing(connect(my)) as connection:
        cursor = connection.cursor()
        cursor.execute("SET time_zone = '+00:00', sql_mode = 'ALLOW_INVALID_DATES'")
        kinds = list(EVERY if my.server.mariadb else TYPES)
        names = [f"c_{at}" if kind != "json" else "c_json" for at, kind in enumerate(kinds)]
        columns = ", ".join(f"{name} {kind}" for name, kind in zip(names, kinds, strict=True))
        cursor.execute("DROP TABLE IF EXISTS every")
        cursor.execute(f"CREATE TABLE every (id int PRIMARY KEY, {columns})")
        file, position = my.server.end
        insert(cursor, kinds, [row[: len(kinds)] for row in written])
        there = declared(cursor, "every", mariadb=my.server.mariadb)
        shown = ", ".join(select_expression(column, f"`{column.name}`") for column in there)
        cursor.execute(f"SELECT {shown} FROM every")
        table = RecordedTable(there, ("id",), [list(row) for row in cursor.fetchall()])
    events = binlog_after(my, file, position)
    found = {row[0]: taken_apart(row[3] or b"") for _, _, row in rows(events, {"every": table})}
    assert found == selected(table)
    expect_block_of(table)


def expect_block_of(recorded: RecordedTable) -> None:
    """A block of these rows, as the text protocol sends them, reads as the single changes."""
    columns = tuple(
        Column(each.name, each.type, key=each.name == "id") for each in recorded.declared
    )
    table = Table("s", "mysql", "o", "", "shop", "every", columns)
    end = BinlogEnd("binlog.000001", 4, "")
    packets = [b"".join(map(sent, row)) for row in recorded.rows]
    table_rows = SnapshotRows(
        table, DeclaredTable(recorded.declared, ("id",)), end, name="snapshot"
    )
    batches = RowBatches(table_rows, most=10**6)
    assert list(batches.take(packets)) == []
    block = batches.cut().changes
    assert isinstance(block, Records)
    [value] = block.encoded
    assert value[0] == MARK
    changes = list(block)
    shared, last = changes[0].transaction, len(packets)
    assert [replace(change, table=table) for change in changes] == [
        table_rows._change(packet, shared, ordinal, last=ordinal == last)
        for ordinal, packet in enumerate(packets, 1)
    ]
    rows = BlockRows(RowBlock(value), 1, 0, last)
    for column in columns:
        images = [change.after for change in changes]
        try:
            wanted = decode(images, [column], connector="mysql")
        except DecodeError as error:
            with pytest.raises(DecodeError, match=re.escape(str(error))):
                block_table(rows, [column], connector="mysql")
        else:
            found = block_table(rows, [column], connector="mysql")
            assert (found.schema, str(found.to_pylist())) == (
                wanted.schema,
                str(wanted.to_pylist()),
            )


def sent(value: bytes | None) -> bytes:
    """A value as the text protocol has it."""
    if value is None:
        return b"\xfb"
    size = len(value)
    return (bytes([size]) if size < 0xFB else b"\xfc" + size.to_bytes(2, "little")) + value


def insert(cursor: Any, kinds: Sequence[str], written: Sequence[tuple[Any, ...]]) -> None:
    places = ", ".join("Point(%s, %s)" if kind == "point" else "%s" for kind in kinds)
    values: list[Any] = []
    for number, row in enumerate(written):
        values.append(number)
        for kind, value in zip(kinds, row, strict=True):
            if kind == "point":
                values += value or (None, None)
            else:
                values.append(value)
    every = ", ".join([f"(%s, {places})"] * len(written))
    cursor.execute(f"INSERT INTO every VALUES {every}", values)


# Character sets of one byte a character, and some of several.
SINGLE = (
    "latin1", "latin2", "latin5", "latin7", "greek", "hebrew", "cp1250", "cp1251", "cp1257",
    "cp850", "cp852", "cp866", "koi8r", "koi8u", "macce", "macroman", "tis620", "hp8", "ascii",
    *_TABLES,
)  # fmt: skip


@pytest.mark.parametrize("charset", SINGLE)
def test_every_byte_of_a_character_set_is_what_the_server_makes_of_it(
    my: MysqlDatabase, charset: str
) -> None:
    shown = ", ".join(f"HEX(CONVERT(_{charset} 0x{byte:02X} USING utf8mb4))" for byte in range(256))
    ((*found,),) = my.execute(f"SELECT {shown}")
    decode = decoder(charset)
    for byte, text in enumerate(found):
        there = bytes.fromhex(text).decode()
        if there in ("?", "\ufffd") and byte != ord("?"):
            continue  # the server has no character for it
        assert decode(bytes([byte])) == there, f"{byte:02X}"
    assert is_ascii_superset(charset) is (charset != "swe7")


@pytest.mark.parametrize(
    "charset", ["gbk", "gb2312", "euckr", "cp932", "sjis", "ujis", "eucjpms", "big5"]
)
def test_pairs_of_bytes_are_what_the_server_makes_of_them(my: MysqlDatabase, charset: str) -> None:
    pairs = [bytes((high, low)) for high in range(0xA1, 0xF8, 5) for low in range(0xA1, 0xFF, 3)]
    shown = ", ".join(
        f"HEX(CONVERT(CONVERT(0x{pair.hex()} USING {charset}) USING utf8mb4))" for pair in pairs
    )
    ((*found,),) = my.execute(f"SELECT {shown}")
    decode, same, other = decoder(charset), 0, 0
    for pair, text in zip(pairs, found, strict=True):
        there = bytes.fromhex(text or "").decode()
        if not there or "?" in there or "\ufffd" in there:
            continue
        try:
            same += decode(pair) == there
            other += decode(pair) != there
        except UnicodeDecodeError:
            continue  # a character that Python does not know is refused, never another one
    assert (same > 300, other) == (True, 0)
