"""A source's types and JSON images become Arrow columns of the same values."""

import datetime as dt
import json
import math
import struct
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.change import arrow as arrows
from headrace.change.arrow import (
    RESCUED,
    columns_of,
    references_of,
    row_schema,
    widened,
)
from headrace.change.event import Column, Reference, Table
from headrace.errors import ConfigError, DecodeError
from headrace.sources.postgres.values import SESSION_SETTINGS, TYPES_SQL, PgType, encoder, pg_types
from tests.effort import times

decode = partial(arrows.decode, connector="postgres")
arrow_schema = partial(arrows.arrow_schema, connector="postgres")
arrow_type = partial(arrows.arrow_type, connector="postgres")

UTC = dt.UTC
STRING, INSTANT = pa.string(), pa.timestamp("us", tz="UTC")


def read(type_text: str, *texts: str, as_text: bool = False) -> list[Any]:
    """The values of a column `v` whose JSON texts are these."""
    images = [f'{{"v":{text}}}' for text in texts]
    named = frozenset({"v"} if as_text else ())
    table = decode(images, [Column("v", type_text)], as_text=named)
    table.validate(full=True)
    assert table.schema == arrow_schema([Column("v", type_text)], as_text=named)
    return list(table["v"].to_pylist())


# --- types ---------------------------------------------------------------------------------------

TYPES = [
    ("smallint", pa.int16()),
    ("integer", pa.int32()),
    ("bigint", pa.int64()),
    ("oid", pa.int64()),
    ("real", pa.float32()),
    ("double precision", pa.float64()),
    ("boolean", pa.bool_()),
    ("bytea", pa.binary()),
    ("date", pa.date32()),
    ("timestamp without time zone", pa.timestamp("us")),
    ("timestamp(3) without time zone", pa.timestamp("us")),
    ("timestamp with time zone", INSTANT),
    ("timestamp(0) with time zone", INSTANT),
    ("numeric(12,2)", pa.decimal128(12, 2)),
    ("numeric(5,0)", pa.decimal128(5, 0)),
    ("numeric(38,38)", pa.decimal128(38, 38)),
    ("numeric", STRING),
    ("numeric(39,2)", STRING),
    ("numeric(3,5)", STRING),
    ("numeric(3,-2)", STRING),
    ("integer[]", pa.list_(pa.int32())),
    ("numeric(12,2)[]", pa.list_(pa.decimal128(12, 2))),
    ("numeric[]", pa.list_(STRING)),
    ("timestamp(3) without time zone[]", pa.list_(pa.timestamp("us"))),
    ("character varying(20)[]", pa.list_(STRING)),
    ("public.mood[]", pa.list_(STRING)),
    ('public."odd [name](1)"[]', pa.list_(STRING)),
    ('public."odd(1)"', STRING),
    *(
        (name, STRING)
        for name in (
            "text",
            "character varying(20)",
            "character(3)",
            '"char"',
            "uuid",
            "json",
            "jsonb",
            "time without time zone",
            "time(3) with time zone",
            "interval",
            "interval day to second(3)",
            "inet",
            "bit varying(3)",
            "money",
            "xid8",
            "point",
            "int4range",
            "public.hstore",
            "public.mood",
            "unknown",
            "",
        )
    ),
]


@pytest.mark.parametrize(("text", "arrow"), TYPES, ids=[text for text, _ in TYPES])
def test_each_type_of_the_source_has_its_arrow_type(text: str, arrow: pa.DataType) -> None:
    assert arrow_type(text) == arrow


def test_the_types_of_an_unknown_connector_are_refused() -> None:
    with pytest.raises(ConfigError, match="oracle"):
        arrows.arrow_type("integer", "oracle")


def test_the_text_of_a_row_schema_reads_back_as_its_columns() -> None:
    columns = (Column("id", "bigint", key=True), Column('é "q"', "numeric(12,2)"))
    table = Table("shop", "postgres", "o", "shop", "public", "users", columns)
    text = row_schema(table)
    assert json.loads(text)[0] == {"name": "id", "type": "bigint", "key": True}
    assert columns_of(text) == columns
    assert columns_of(text) is columns_of(text)
    assert references_of(text) == ()


def test_the_text_of_a_row_schema_carries_foreign_keys_and_its_columns_stay_the_same() -> None:
    columns = tuple(Column(name, "int") for name in ("id", "boss", "tenant", "doc"))
    references = (
        Reference(("boss",), "public", "users", ("id",)),
        Reference(("boss",), "crm", "people", ("id",)),
        Reference(("tenant", "doc"), "public", "docs", ("tenant", "number")),
    )
    plain = Table("shop", "postgres", "o", "shop", "public", "users", columns)
    table = msgspec.structs.replace(plain, references=references)
    text = row_schema(table)
    assert references_of(text) == references
    assert references_of(text) is references_of(text)
    assert columns_of(text) == columns_of(row_schema(plain)) == columns
    told = json.loads(text)
    assert ["references" in column for column in told] == [False, True, True, False]
    assert told[2]["references"] == [
        {
            "columns": ["tenant", "doc"],
            "schema": "public",
            "table": "docs",
            "parent_columns": ["tenant", "number"],
        }
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("smallint", "integer"),
        ("smallint", "real"),
        ("integer", "bigint"),
        ("integer", "double precision"),
        ("integer", "numeric(12,2)"),
        ("bigint", "numeric(19,0)"),
        ("real", "double precision"),
        ("numeric(12,2)", "numeric(13,2)"),
        ("numeric(12,2)", "numeric(14,4)"),
        ("character varying(3)", "text"),
        ("integer[]", "bigint[]"),
        ("date", "date"),
    ],
)
def test_a_wider_type_holds_every_value_and_arrow_casts_to_it(old: str, new: str) -> None:
    assert widened(arrow_type(old), arrow_type(new))
    extremes = {"smallint": -(2**15), "integer": -(2**31), "bigint": -(2**63)}
    if old in extremes:
        value = pa.array([extremes[old]], arrow_type(old))
        assert value.cast(arrow_type(new)).to_pylist() == [extremes[old]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bigint", "integer"),
        ("bigint", "double precision"),
        ("integer", "real"),
        ("integer", "numeric(11,2)"),
        ("integer", "text"),
        ("numeric(12,2)", "numeric(13,4)"),
        ("numeric(12,2)", "numeric(12,1)"),
        ("numeric(12,2)", "text"),
        ("numeric(12,2)", "double precision"),
        ("double precision", "real"),
        ("date", "timestamp without time zone"),
        ("timestamp without time zone", "timestamp with time zone"),
        ("integer[]", "integer"),
        ("bigint[]", "integer[]"),
    ],
)
def test_what_may_change_a_value_is_not_wider(old: str, new: str) -> None:
    assert not widened(arrow_type(old), arrow_type(new))


# --- values from JSON text -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_text", "text", "value"),
    [
        ("bigint", "9223372036854775807", 2**63 - 1),
        ("numeric(38,2)", '"123456789012345678901234567890123456.78"', None),
        ("numeric(12,2)", '"12.50"', Decimal("12.50")),
        ("numeric", '"1e-5"', "1e-5"),
        ("boolean", "true", True),
        ("bytea", '"AP8="', b"\x00\xff"),
        ("bytea", '""', b""),
        ("date", '"0001-01-01"', dt.date(1, 1, 1)),
        ("timestamp", '"2025-01-15T10:30:00.25Z"', dt.datetime(2025, 1, 15, 10, 30, 0, 250000)),  # noqa: DTZ001
        (
            "timestamptz",
            '"2025-01-15T10:30:00.000001+05:30"',
            dt.datetime(2025, 1, 15, 5, 0, 0, 1, tzinfo=UTC),
        ),
        ("text", r'"\"\\\u00e9\ud83d\ude00\n"', '"\\é😀\n'),
        ("text", '"null"', "null"),
        ("text", '""', ""),
        ("jsonb", '{"a": [1, 2.50, "\\u00e9"]}', '{"a": [1, 2.50, "\\u00e9"]}'),
        ("jsonb", '"text"', '"text"'),
        ("jsonb", "12345678901234567890.10", "12345678901234567890.10"),
        ("jsonb", '"null"', '"null"'),
        ("json", "false", "false"),
        ("public.mood", '"so \\"so\\""', 'so "so"'),
        ("public.positive", "11", "11"),
        ("public.pair", '{"left side":1,"right":"a\\\\b"}', '{"left side":1,"right":"a\\\\b"}'),
        ("public.tags", '["a","b"]', '["a","b"]'),
        ("point", '{"x":1.0,"y":"NaN"}', '{"x":1.0,"y":"NaN"}'),
        ("xid8", "18446744073709551615", "18446744073709551615"),
        ("integer[]", "[1,null,3]", [1, None, 3]),
        ("integer[]", "[]", []),
        ("text[]", '["a","",null,"NULL"]', ["a", "", None, "NULL"]),
        ("numeric(4,1)[]", '["1.0",null]', [Decimal("1.0"), None]),
        ("timestamp[]", '["2025-01-15T10:30:00Z"]', [dt.datetime(2025, 1, 15, 10, 30)]),  # noqa: DTZ001
        ("bytea[]", '["AP8=",null]', [b"\x00\xff", None]),
        ("jsonb[]", '[{"a":1},null,[2]]', ['{"a":1}', None, "[2]"]),
        ("public.mood[]", '["so \\"so\\"",null]', ['so "so"', None]),
        ("public.pair[]", '[{"left":1}]', ['{"left":1}']),
    ],
)
def test_json_becomes_the_value_it_stands_for(type_text: str, text: str, value: Any) -> None:
    expected = Decimal(json.loads(text)) if value is None else value
    assert read(type_text, text, "null", text) == [expected, None, expected]


def test_floats_keep_minus_zero_nan_and_infinity() -> None:
    texts = ("-0", '"NaN"', '"-Infinity"', '"Infinity"', "1e+300", "5e-324", "null")
    zero, nan, low, high, *rest = read("double precision", *texts)
    assert math.copysign(1, zero) == -1.0
    assert math.isnan(nan)
    assert [low, high, *rest] == [-math.inf, math.inf, 1e300, 5e-324, None]
    assert math.isnan(read("real[]", '["NaN",1]')[0][0])


def test_a_real_is_rounded_once() -> None:
    text = "7.038531e-26"
    assert struct.pack("<f", float(text)).hex() == "fe43ae15"  # by way of a double: its neighbour
    assert struct.pack("<f", read("real", text)[0]).hex() == "fd43ae15"


def test_no_image_is_a_row_of_nulls_and_names_are_matched() -> None:
    columns = [Column("id", "bigint", key=True), Column("name", "text"), Column("d", "jsonb")]
    images = [None, b'{"name":"a","extra":{"b":1}}', '{"d":1,"id":7}']
    assert decode(images, columns).to_pylist() == [
        {"id": None, "name": None, "d": None},
        {"id": None, "name": "a", "d": None},
        {"id": 7, "name": None, "d": "1"},
    ]


@pytest.mark.parametrize(
    "images", [[], [None], pa.array([], STRING), pa.chunked_array([[None]], STRING)]
)
def test_no_rows_and_no_images_still_have_their_columns(images: Any) -> None:
    columns = [Column("id", "bigint"), Column("tags", "text[]"), Column("m", "public.mood")]
    table = decode(images, columns)
    assert table.schema == arrow_schema(columns)
    assert table.num_rows == len(images)


def test_names_may_hold_anything() -> None:
    names = ['a"b', "c\\d", "tab\t", "é😀", "f0", ""]
    columns = [Column(name, "integer") for name in names]
    row = dict(zip(names, range(6), strict=True))
    assert decode([json.dumps(row), None], columns).to_pylist() == [row, dict.fromkeys(names)]


def test_images_may_come_as_arrow_columns_of_many_chunks() -> None:
    texts = [f'{{"n":{n}}}' if n % 7 else None for n in range(10_000)]
    images = pa.chunked_array([texts[:3], texts[3:]], STRING)
    values = decode(images, [Column("n", "integer")])["n"].to_pylist()
    assert values == [n if n % 7 else None for n in range(10_000)]


@pytest.mark.parametrize(
    ("type_text", "text"),
    [
        ("timestamp", '"infinity"'),
        ("timestamptz", '"-infinity"'),
        ("timestamp", '"10000-01-01 00:00:00"'),
        ("timestamptz", '"0044-03-15 12:00:00+00 BC"'),
        ("date", '"infinity"'),
        ("date", '"0044-03-15 BC"'),
        ("date", '"10000-01-01"'),
        ("numeric(12,2)", '"NaN"'),
        ("numeric(3,2)", '"12.34"'),
        ("integer", "2147483648"),
        ("bigint", "123456789012345678901"),
        ("integer", '"secret"'),
        ("boolean", "1"),
        ("integer[]", "[[1,2],[3,4]]"),
        ("real[]", "[[1,2],[3,4]]"),
        ("text[]", '[["a"]]'),
        ("public.mood[]", '[["sad"]]'),
        ("timestamp[]", '["infinity"]'),
        ("text", '{"a":1}'),
        ("bytea", '"not base64"'),
    ],
)
def test_what_a_type_cannot_hold_is_named_by_its_column_and_kept_as_text(
    type_text: str, text: str
) -> None:
    with pytest.raises(DecodeError) as raised:
        read(type_text, "null", text)
    error = raised.value
    assert "'v'" in str(error)
    assert type_text in str(error)
    assert "as_text" in error.hint
    # The value itself may be private, also in what a traceback shows.
    assert error.__cause__ is None
    assert error.__suppress_context__
    assert text.strip('"') not in error.explain()
    exact = json.loads(text) if text[0] == '"' else text
    assert read(type_text, text, "null", as_text=True) == [exact, None]
    images = [f'{{"v":{each}}}' for each in ("null", text)]
    found = decode(images, [Column("v", type_text)], rescue=True)
    assert found["v"].to_pylist() == [None, None]
    assert [json.loads(each or "{}") for each in found[RESCUED].to_pylist()] == [{}, {"v": exact}]
    with pytest.raises(DecodeError) as raised:
        decode(images, [Column("v", type_text, key=True)], rescue=True)
    assert text.strip('"') not in raised.value.explain()


def test_only_what_does_not_fit_is_null_however_many_rows_there_are() -> None:
    columns = [
        Column("id", "integer", key=True),
        Column('o"dd', "date"),
        Column("n", "numeric(4,1)"),
    ]
    fit, odd = {'o"dd': "2024-01-31", "n": "12.5"}, {'o"dd': "infinity", "n": "NaN"}
    cells = [
        {name: odd[name] if at % step == 3 else fit[name] for name, step in (('o"dd', 7), ("n", 5))}
        for at in range(6000)
    ]
    images = [json.dumps({"id": at, **each}) for at, each in enumerate(cells)]
    images += [json.dumps({"id": at, **fit}) for at in range(6000, 18000)]
    found = decode(images, columns, rescue=True)
    rescued = [json.loads(each or "{}") for each in found[RESCUED].to_pylist()]
    assert rescued[:6000] == [
        {name: text for name, text in each.items() if text == odd[name]} for each in cells
    ]
    assert not any(rescued[6000:])
    assert found["id"].to_pylist() == list(range(18000))
    for name in fit:
        nulls = [each is None for each in found[name].to_pylist()]
        assert nulls == [name in each for each in rescued]
    assert RESCUED not in decode(images[6000:], columns, rescue=True).column_names


@pytest.mark.parametrize("image", ["[1]", "{", '"text"', ""])
def test_an_image_that_is_no_object_is_refused(image: str) -> None:
    with pytest.raises(DecodeError, match="not a JSON object"):
        decode([image], [Column("v", "integer")])


@pytest.mark.parametrize("rescue", [True, False])
def test_an_image_that_is_nested_too_deeply_is_refused(rescue: bool) -> None:
    image = b'{"v":%b}' % (b"[" * 5000 + b"]" * 5000)
    with pytest.raises(DecodeError, match="nested"):
        decode([image], [Column("v", "jsonb")], rescue=rescue)


# --- values from a real server -------------------------------------------------------------------


class Server:
    """A session that prints values as a source reads them."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        for name, value in SESSION_SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        self._connection = connection
        self._types: dict[int, PgType] = pg_types(connection.execute(TYPES_SQL))

    def row(self, type_text: str, values: list[Any]) -> tuple[list[bytes], list[Any]]:
        """Values as the images that capture writes, and as the driver reads them."""
        literals = ", ".join([f"(%s::{type_text})"] * len(values))
        cursor = self._connection.execute(f"VALUES {literals}", values)
        result = cursor.pgresult
        assert result is not None
        encode = encoder(result.ftype(0), self._types)
        images = []
        for at in range(len(values)):
            text = result.get_value(at, 0)
            written = b"null" if text is None else text if encode is None else encode(text)
            images.append(b'{"v":%b}' % written)
        return images, [value for (value,) in cursor.fetchall()]


@pytest.fixture(scope="module")
def server(servers: Any) -> Iterator[Server]:
    with servers[16].database() as database, closing(database.connect()) as connection:
        yield Server(connection)


text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
moments = st.datetimes()
instants = st.datetimes(
    dt.datetime(1, 1, 3),  # noqa: DTZ001
    dt.datetime(9999, 12, 29),  # noqa: DTZ001
    timezones=st.timezones(),
)
decimals = st.decimals(
    allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=2
)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "double precision": st.floats(),
    "boolean": st.booleans(),
    "numeric(12,2)": decimals,
    "numeric(38,10)": st.decimals(
        allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20, places=10
    ),
    "date": st.dates(),
    "timestamp without time zone": moments,
    "timestamp with time zone": instants,
    "bytea": st.binary(max_size=20),
    "text": text,
    "character varying(40)": text,
    "uuid": st.uuids().map(str),
    "integer[]": st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=4),
    "double precision[]": st.lists(st.none() | st.floats(), max_size=4),
    "text[]": st.lists(st.none() | text, max_size=4),
    "numeric(12,2)[]": st.lists(st.none() | decimals, max_size=4),
    "timestamp with time zone[]": st.lists(st.none() | instants, max_size=4),
    "bytea[]": st.lists(st.none() | st.binary(max_size=9), max_size=4),
}


@pytest.mark.parametrize("type_text", VALUES)
@settings(max_examples=times(8, nightly=75))
@given(data=st.data())
def test_what_the_server_prints_is_the_value_the_driver_reads(
    server: Server, type_text: str, data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.none() | VALUES[type_text], min_size=1, max_size=8))
    images, expected = server.row(type_text, values)
    got = decode(images, [Column("v", type_text)])["v"].to_pylist()
    if type_text == "uuid":
        expected = [None if value is None else str(value) for value in expected]
    # NaN is not equal to itself, and 1.0 is to 1.00: what is written tells more.
    assert repr(_in_utc(got)) == repr(_in_utc(expected))


def _in_utc(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_utc(element) for element in value]
    if isinstance(value, dt.datetime) and value.tzinfo:
        return value.astimezone(UTC)
    return value


@given(st.lists(st.floats(width=32), min_size=1))
@settings(max_examples=times(8, nightly=75))
def test_a_real_is_the_same_number_as_a_double(server: Server, values: list[float]) -> None:
    images, _ = server.row("real", values)
    assert repr(decode(images, [Column("v", "real")])["v"].to_pylist()) == repr(values)


@pytest.mark.parametrize("type_text", ["json", "jsonb"])
@settings(max_examples=times(8, nightly=75))
@given(value=documents)
def test_documents_keep_their_text(server: Server, type_text: str, value: Any) -> None:
    images, [expected] = server.row(type_text, [json.dumps(value)])
    [got] = decode(images, [Column("v", type_text)])["v"].to_pylist()
    assert (None if got is None else json.loads(got)) == expected


@given(st.lists(st.decimals(min_value=-(10**40), max_value=10**40), max_size=8))
@settings(max_examples=times(8, nightly=75))
def test_an_unbounded_numeric_keeps_its_text(server: Server, values: list[Decimal]) -> None:
    images, expected = server.row("numeric", [None, *map(Decimal, ("NaN", "Infinity")), *values])
    got = decode(images, [Column("v", "numeric")])["v"].to_pylist()
    assert got[0] is None
    assert [str(Decimal(value)) for value in got[1:]] == [str(value) for value in expected[1:]]
