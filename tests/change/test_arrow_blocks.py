"""The columns of a block are what the images of its rows become, or fail as they do."""

from collections.abc import Callable, Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.arrow import block_table, decode
from headrace.change.block import (
    BlockRows,
    ColumnText,
    RowBlock,
    column_text,
    json_text,
    pack,
)
from headrace.change.event import Column, Table, Transaction
from headrace.change.printed import ENCODERS, Printed
from headrace.errors import DecodeError
from headrace.sources.postgres.position import PostgresPosition

pytestmark = pytest.mark.requirement("C-28")

TEXTS = st.text(st.characters(exclude_characters="\0\t\\", exclude_categories=["Cs"]))
INTEGERS = st.integers(-(2**63), 2**63 - 1).map(str)
DECIMALS = st.decimals(-(10**9), 10**9, places=2).map(str)
FLOATS = st.floats().map(lambda n: {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(
    repr(n), repr(n)
))  # fmt: skip
DATES = st.dates().map(str)
TIMES = st.datetimes().map(lambda moment: moment.isoformat(" "))
UNFIT = st.sampled_from(["infinity", "-infinity", "0044-03-15 BC", "294276-12-31 23:59:59.9"])

# How each type is printed, and what a server may print.
TYPES: dict[str, tuple[Printed, st.SearchStrategy[str]]] = {
    "text": (Printed.TEXT, TEXTS | st.sampled_from(["null", "N", '"', '"a"', "[1]", ""])),
    "public.mood": (Printed.TEXT, TEXTS | st.just('"quoted"')),
    "uuid": (Printed.QUOTED, st.uuids().map(str)),
    "inet": (Printed.QUOTED, st.ip_addresses().map(str)),
    "numeric": (Printed.QUOTED, DECIMALS | st.sampled_from(["NaN", "-Infinity"])),
    "numeric(12,2)": (Printed.QUOTED, DECIMALS | st.sampled_from(["NaN", "12345678901234.00"])),
    "smallint": (Printed.PLAIN, st.integers(-(2**15), 2**15 - 1).map(str) | INTEGERS),
    "bigint": (Printed.PLAIN, INTEGERS),
    "xid8": (Printed.PLAIN, st.integers(0, 2**64 - 1).map(str)),
    "real": (Printed.FLOAT, FLOATS),
    "double precision": (Printed.FLOAT, FLOATS | st.just("-0")),
    "boolean": (Printed.BOOLEAN, st.sampled_from("tf")),
    "date": (Printed.QUOTED, DATES | UNFIT),
    "timestamp without time zone": (Printed.TIMESTAMP, TIMES | UNFIT),
    "timestamp(3) with time zone": (Printed.TIMESTAMPTZ, TIMES.map(lambda t: t + "+00") | UNFIT),
    "time without time zone": (Printed.QUOTED, st.times().map(str) | st.just("24:00:00")),
    "jsonb": (
        Printed.PLAIN,
        st.sampled_from(['{"a": [1, null]}', "null", '"null"', "1", '"é"', "[]"]),
    ),
    "integer[]": (Printed.JSON, st.sampled_from(["[1,null]", "[]", "null", "[[1]]"])),
    "bytea": (Printed.JSON, st.sampled_from(['"AAE="', '""', "null"])),
}


def block_of(column: Column, printed: Printed, values: Sequence[str | None]) -> RowBlock:
    if printed is Printed.JSON:
        text = json_text([b"null" if value is None else value.encode() for value in values])
    else:
        text = column_text(
            [b"\\N" if value is None else value.encode() for value in values], printed
        )
    assert text is not None
    return packed(column, text, len(values))


def packed(column: Column, text: ColumnText, count: int) -> RowBlock:
    table = Table("shop", "postgres", "origin", "db", "public", "things", (column,), version=1)
    at = PostgresPosition(1, 1)
    return RowBlock(pack(table, Transaction("t", 1, 1), (at, at), [text], count))


def outcome(table: pa.Table | DecodeError) -> object:
    # Compared as they are printed: NaN is not equal to itself.
    return str(table) if isinstance(table, DecodeError) else (table.schema, str(table.to_pylist()))


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("as_text", [frozenset(), frozenset({"v"})], ids=["typed", "as text"])
@given(data=st.data())
def test_a_column_is_what_its_images_become(
    type_name: str, as_text: frozenset[str], data: st.DataObject
) -> None:
    printed, strategy = TYPES[type_name]
    values = data.draw(st.lists(st.none() | strategy, min_size=1, max_size=6))
    begin = data.draw(st.integers(0, len(values) - 1))
    count = data.draw(st.integers(1, len(values) - begin))
    column = Column("v", type_name)
    rows = BlockRows(block_of(column, printed, values), 1, begin, count)
    images = [
        b'{"v":%b}' % (b"null" if value is None else ENCODERS[printed](value.encode()))
        for value in values
    ]
    chosen = images[begin : begin + count]
    assert rows.block.images(["v"], 0, len(values)) == images

    def attempt(make: Callable[[], pa.Table]) -> pa.Table | DecodeError:
        try:
            return make()
        except DecodeError as error:
            return error

    typed = attempt(lambda: block_table(rows, [column], connector="postgres", as_text=as_text))
    wanted = attempt(lambda: decode(chosen, [column], connector="postgres", as_text=as_text))
    # A value outside the range may fail where the whole column is tried first: never here.
    assert outcome(typed) == outcome(wanted)
    rescued = block_table(rows, [column], connector="postgres", as_text=as_text, rescue=True)
    wanted = decode(chosen, [column], connector="postgres", as_text=as_text, rescue=True)
    assert outcome(rescued) == outcome(wanted)


def test_a_column_that_the_block_does_not_have_is_null() -> None:
    column = Column("v", "text")
    rows = BlockRows(block_of(column, Printed.TEXT, ["a", "b"]), 1, 0, 2)
    found = block_table(rows, [Column("new", "integer"), column], connector="postgres")
    assert found.to_pydict() == {"new": [None, None], "v": ["a", "b"]}
    assert found.schema.names == ["new", "v"]
