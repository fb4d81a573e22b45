"""PostgreSQL's text of a value becomes JSON, from byte strings alone."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DecodeError
from headrace.sources.postgres.values import PgType, encoder, pg_types

BOOL, BYTEA, INT8, INT4, TEXT, OID, JSON, POINT, BOX = 16, 17, 20, 23, 25, 26, 114, 600, 603
FLOAT4, FLOAT8, DATE, TIME, TIMESTAMP, TIMESTAMPTZ = 700, 701, 1082, 1083, 1114, 1184
INTERVAL, TIMETZ, NUMERIC, UUID, JSONB, XID8 = 1186, 1266, 1700, 2950, 3802, 5069
INT2VECTOR, OIDVECTOR, INET, CIDR, MACADDR, BIT, MONEY = 22, 30, 869, 650, 829, 1560, 790

# Oids as a server gives them to types that users create.
MOOD, POSITIVE, BASKET, HSTORE, PAIR, NESTED, MOODS, PAIRS, SPAN, UNKNOWN = range(90_000, 90_010)
VERY_POSITIVE, VERY_POSITIVES = 90_010, 90_011
INT4S, TEXTS, FLOAT8S, BOOLS, BOXES, POINTS = 1007, 1009, 1022, 1000, 1020, 1017
NUMERICS, TIMESTAMPS, JSONS, JSONBS, BYTEAS, UUIDS = 1231, 1115, 199, 3807, 1001, 2951

TYPES: Mapping[int, PgType] = {
    described.oid: described
    for described in (
        PgType(MOOD, "mood", "e"),
        PgType(POSITIVE, "positive", "d", base=INT4),
        PgType(VERY_POSITIVE, "very_positive", "d", base=POSITIVE),
        PgType(VERY_POSITIVES, "very_positive[]", "b", VERY_POSITIVE),
        PgType(BASKET, "basket", "d", base=TEXTS),
        PgType(HSTORE, "public.hstore", "b"),
        PgType(PAIR, "pair", "c", fields=(("left side", INT4), ('"right"', TEXT))),
        PgType(NESTED, "nested", "c", fields=(("pair", PAIR), ("pairs", PAIRS), ("at", TIMESTAMP))),
        PgType(SPAN, "int4range", "r"),
        PgType(MOODS, "mood[]", "b", MOOD),
        PgType(PAIRS, "pair[]", "b", PAIR),
        PgType(INT4S, "integer[]", "b", INT4),
        PgType(TEXTS, "text[]", "b", TEXT),
        PgType(FLOAT8S, "double precision[]", "b", FLOAT8),
        PgType(BOOLS, "boolean[]", "b", BOOL),
        PgType(BOXES, "box[]", "b", BOX, delimiter=";"),
        PgType(POINTS, "point[]", "b", POINT),
        PgType(NUMERICS, "numeric[]", "b", NUMERIC),
        PgType(TIMESTAMPS, "timestamp without time zone[]", "b", TIMESTAMP),
        PgType(JSONS, "json[]", "b", JSON),
        PgType(JSONBS, "jsonb[]", "b", JSONB),
        PgType(BYTEAS, "bytea[]", "b", BYTEA),
        PgType(UUIDS, "uuid[]", "b", UUID),
    )
}

# Those that parse what they are given; the others trust the alphabet of their type.
PARSED = (
    *(BYTEA, TEXT, POINT, MOOD, BASKET, HSTORE, PAIR, MOODS, SPAN, UNKNOWN),
    *(TEXTS, BOXES, POINTS, BYTEAS, BOOL, BOOLS, MONEY),
)
ALL = sorted({*TYPES, *PARSED, JSON, FLOAT8, DATE, TIMESTAMP, TIMESTAMPTZ, NUMERIC, INT2VECTOR})


def written(oid: int, text: str | bytes) -> bytes:
    value = text.encode() if isinstance(text, str) else text
    encode = encoder(oid, TYPES)
    return value if encode is None else encode(value)


# --- scalars -------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-14")
@pytest.mark.parametrize("oid", [INT4, INT8, OID, XID8, POSITIVE])
def test_integers_need_no_work_at_all(oid: int) -> None:
    assert encoder(oid, TYPES) is None


@pytest.mark.requirement("S0-15")
@pytest.mark.parametrize(
    "text", ["123.456", "1.00", "-0.5", "9" * 131072, "NaN", "Infinity", "-Infinity"]
)
def test_a_numeric_is_a_string_with_every_digit(text: str) -> None:
    assert written(NUMERIC, text) == f'"{text}"'.encode()


@pytest.mark.requirement("S0-16")
def test_a_boolean_is_true_or_false() -> None:
    assert (written(BOOL, "t"), written(BOOL, "f")) == (b"true", b"false")


@pytest.mark.requirement("S0-17")
@given(st.text())
def test_text_reads_back_as_it_was(text: str) -> None:
    line = written(TEXT, text)
    assert json.loads(line) == text
    assert b"\n" not in line


@pytest.mark.requirement("S0-17")
def test_text_keeps_its_letters_unescaped() -> None:
    assert written(TEXT, 'é 水 🌊 / "a"\n\\') == '"é 水 🌊 / \\"a\\"\\n\\\\"'.encode()


@pytest.mark.parametrize("oid", [TEXT, JSON, HSTORE, TEXTS, PAIR, UNKNOWN, MOOD])
def test_text_that_is_not_utf8_is_refused(oid: int) -> None:
    value = {JSON: b'"\xff"', HSTORE: b'"a"=>"\xff"', TEXTS: b"{\xff}", PAIR: b"(1,\xff)"}
    with pytest.raises(DecodeError, match="not UTF-8"):
        written(oid, value.get(oid, b"\xff"))


@pytest.mark.parametrize("text", ["1", "-1.5", "1e+20", "1.5e-07", "-0", "0.1"])
@pytest.mark.parametrize("oid", [FLOAT4, FLOAT8])
def test_a_float_is_the_number_that_the_server_printed(oid: int, text: str) -> None:
    assert written(oid, text) == text.encode()
    assert json.loads(written(oid, text)) == float(text)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_a_float_that_json_lacks_is_a_string(text: str) -> None:
    assert written(FLOAT8, text) == f'"{text}"'.encode()


@pytest.mark.requirement("S0-18")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2025-01-15 10:30:00", "2025-01-15T10:30:00Z"),
        ("2025-01-15 10:30:00.123456", "2025-01-15T10:30:00.123456Z"),
        ("0001-01-01 00:00:00", "0001-01-01T00:00:00Z"),
        ("infinity", "infinity"),
        ("-infinity", "-infinity"),
        ("0044-03-15 12:00:00 BC", "0044-03-15 12:00:00 BC"),
        ("10000-01-01 00:00:00", "10000-01-01 00:00:00"),
        ("294276-12-31 23:59:59.999999", "294276-12-31 23:59:59.999999"),
    ],
)
def test_a_timestamp_is_written_as_utc(text: str, expected: str) -> None:
    assert json.loads(written(TIMESTAMP, text)) == expected


@pytest.mark.requirement("S0-19")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2025-01-15 10:30:00+00", "2025-01-15T10:30:00+00:00"),
        ("2025-01-15 10:30:00.5+00", "2025-01-15T10:30:00.5+00:00"),
        ("2025-01-15 10:30:00-03", "2025-01-15T10:30:00-03:00"),
        ("2025-01-15 10:30:00+05:30", "2025-01-15T10:30:00+05:30"),
        ("1890-01-15 10:30:00+00:19:32", "1890-01-15T10:30:00+00:19:32"),
        ("infinity", "infinity"),
        ("-infinity", "-infinity"),
        ("0044-03-15 12:00:00+00 BC", "0044-03-15 12:00:00+00 BC"),
        ("10000-01-01 00:00:00+00", "10000-01-01 00:00:00+00"),
    ],
)
def test_a_timestamp_with_a_zone_keeps_its_offset(text: str, expected: str) -> None:
    assert json.loads(written(TIMESTAMPTZ, text)) == expected


@pytest.mark.parametrize(
    ("oid", "text"),
    [
        pytest.param(DATE, "2025-01-15", marks=pytest.mark.requirement("S0-20")),
        pytest.param(DATE, "infinity", marks=pytest.mark.requirement("S0-20")),
        pytest.param(DATE, "0044-03-15 BC", marks=pytest.mark.requirement("S0-20")),
        pytest.param(TIME, "10:30:00", marks=pytest.mark.requirement("S0-21")),
        pytest.param(TIME, "24:00:00", marks=pytest.mark.requirement("S0-21")),
        (TIMETZ, "10:30:00+00"),
        (INTERVAL, "P1Y2M3DT4H5M6S"),
        pytest.param(
            UUID, "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", marks=pytest.mark.requirement("S0-22")
        ),
        pytest.param(INET, "192.168.0.1/24", marks=pytest.mark.requirement("S0-26")),
        pytest.param(INET, "::1", marks=pytest.mark.requirement("S0-26")),
        (CIDR, "10.0.0.0/8"),
        (MACADDR, "08:00:2b:01:02:03"),
        (BIT, "0101"),
        (MONEY, "$1,000.00"),
        (SPAN, "[1,10)"),
        (MOOD, 'so "so"'),
        (UNKNOWN, "a type nobody described"),
    ],
)
def test_these_types_are_strings_of_the_server_s_own_text(oid: int, text: str) -> None:
    assert json.loads(written(oid, text)) == text


@pytest.mark.requirement("S0-23")
def test_json_is_the_document_itself_on_one_line() -> None:
    line = written(JSON, '{\n\t"a": [1,\r\n 12345678901234567890.10],  "é\\n": null}')
    assert line == '{  "a": [1,   12345678901234567890.10],  "é\\n": null}'.encode()


@pytest.mark.requirement("S0-23")
def test_jsonb_needs_no_work_at_all() -> None:
    assert encoder(JSONB, TYPES) is None


@pytest.mark.requirement("S0-24")
@pytest.mark.parametrize(
    ("text", "expected"), [(r"\x", ""), (r"\x00ff", "AP8="), (r"\xDEADBEEF", "3q2+7w==")]
)
def test_bytes_are_base64(text: str, expected: str) -> None:
    assert json.loads(written(BYTEA, text)) == expected


@pytest.mark.requirement("S0-27")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(1,2)", b'{"x":1.0,"y":2.0}'),
        ("(-1.5,-0)", b'{"x":-1.5,"y":-0.0}'),
        ("(1e+20,1.5e-07)", b'{"x":1e+20,"y":1.5e-07}'),
        ("(NaN,-Infinity)", b'{"x":"NaN","y":"-Infinity"}'),
    ],
)
def test_a_point_is_an_object_of_two_numbers(text: str, expected: bytes) -> None:
    assert written(POINT, text) == expected
    json.loads(expected)


# --- arrays --------------------------------------------------------------------------------------


@pytest.mark.requirement("S0-25")
@pytest.mark.parametrize(
    ("oid", "text", "expected"),
    [
        (INT4S, "{1,2,3}", [1, 2, 3]),
        (INT4S, "{}", []),
        (INT4S, "{{1,NULL},{3,4}}", [[1, None], [3, 4]]),
        (INT4S, "[0:1]={1,2}", [1, 2]),
        (VERY_POSITIVES, "[-1:0][2:2]={{1},{NULL}}", [[1], [None]]),
        (FLOAT8S, "{1.5,-2}", [1.5, -2]),
        (FLOAT8S, "{NaN,1.5,NULL,-Infinity}", ["NaN", 1.5, None, "-Infinity"]),
        (FLOAT8S, "{Infinity}", ["Infinity"]),
        (BOOLS, "{t,NULL,f}", [True, None, False]),
        (NUMERICS, "{1.50,NaN}", ["1.50", "NaN"]),
        (TEXTS, "{a,NULL,b}", ["a", None, "b"]),
        (TEXTS, '{"NULL","null",""}', ["NULL", "null", ""]),
        (
            TEXTS,
            r'{"a,b","{c}","d \"e\"","f\\g","\\\"",é}',
            ["a,b", "{c}", 'd "e"', "f\\g", '\\"', "é"],
        ),
        (TEXTS, "{{a,b},{c,d}}", [["a", "b"], ["c", "d"]]),
        (TEXTS, '[0:0][1:2]={{"{=}",NULL}}', [["{=}", None]]),
        (TEXTS, "{}", []),
        (TEXTS, '{{{{{{"x"}}}}}}', [[[[[["x"]]]]]]),
        (BASKET, "{a,b}", ["a", "b"]),
        (MOODS, '{sad,"so so"}', ["sad", "so so"]),
        (TIMESTAMPS, '{"2025-01-15 10:30:00",infinity}', ["2025-01-15T10:30:00Z", "infinity"]),
        (JSONS, r'{"{\"a\":\n[1]}"}'.replace(r"\n", "\n"), [{"a": [1]}]),
        (JSONBS, r'{"{\"a\": \"b\"}",1,NULL,"null"}', [{"a": "b"}, 1, None, None]),
        (BYTEAS, r'{"\\x00ff"}', ["AP8="]),
        (BOXES, "{(1,1),(0,0);(2,2),(1,1)}", ["(1,1),(0,0)", "(2,2),(1,1)"]),
        (POINTS, '{"(1,2)","(3,4)"}', [{"x": 1.0, "y": 2.0}, {"x": 3.0, "y": 4.0}]),
        (INT2VECTOR, "1 2 3", [1, 2, 3]),
        (OIDVECTOR, "", []),
    ],
)
def test_an_array_is_an_array(oid: int, text: str, expected: list[Any]) -> None:
    line = written(oid, text)
    assert json.loads(line) == expected
    assert b"\n" not in line


NO_ARRAYS = """
    a { } {a a} }{ {a}} {{a} {a}b} {a},{b} {a,} {,a} {a,,b} {"a} {"a"b} {a"b"} {a\\} {"\\a"} {a}x
    [0:1] [0:1]= a,b {{},{}} {{{{{{{a}}}}}}} "a} }}
"""


@pytest.mark.parametrize("text", ["", *NO_ARRAYS.split()])
def test_an_array_that_the_server_never_prints_is_refused(text: str) -> None:
    with pytest.raises(DecodeError, match="an array"):
        written(TEXTS, text)


def array_out(value: str | list[Any] | None) -> str:
    """The way PostgreSQL prints an array: what is empty, NULL or special is quoted."""
    if isinstance(value, list):
        return "{" + ",".join(map(array_out, value)) + "}"
    if value is None:
        return "NULL"
    if value and value.upper() != "NULL" and not set(value) & set('{},"\\ \t\n\r\v\f'):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


# Short alphabets of awkward characters find more than all of Unicode does.
AWKWARD = st.text(st.sampled_from('NUL"\\{}(),=>; \n\té'), max_size=8) | st.just("NULL")
VALUES = st.lists(AWKWARD | st.none(), min_size=1, max_size=4)


@pytest.mark.requirement("S0-25")
@given(VALUES | st.lists(VALUES, min_size=1, max_size=3))
def test_any_array_of_text_reads_back_as_it_was(value: list[Any]) -> None:
    assert json.loads(written(TEXTS, array_out(value))) == value


# --- composites and hstore -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("oid", "text", "expected"),
    [
        (PAIR, "(1,a)", {"left side": 1, '"right"': "a"}),
        (PAIR, "(,)", {"left side": None, '"right"': None}),
        (PAIR, '(1,"")', {"left side": 1, '"right"': ""}),
        (PAIR, r'(1,"a ""b"" \\c, (d)")', {"left side": 1, '"right"': r'a "b" \c, (d)'}),
        (PAIR, "(1,NULL)", {"left side": 1, '"right"': "NULL"}),
        (PAIRS, r'{"(1,\"a b\")",NULL}', [{"left side": 1, '"right"': "a b"}, None]),
        (
            NESTED,
            r'("(1,""a b"")","{""(2,\\""\\"")""}","2025-01-15 10:30:00")',
            {
                "pair": {"left side": 1, '"right"': "a b"},
                "pairs": [{"left side": 2, '"right"': ""}],
                "at": "2025-01-15T10:30:00Z",
            },
        ),
    ],
)
def test_a_composite_is_an_object_of_its_fields(oid: int, text: str, expected: Any) -> None:
    assert json.loads(written(oid, text)) == expected


NO_PAIRS = """
    ( ) () (1) (1,a 1,a) (1,a,b) (1,a)b (1,a)) (1,"a) (1,"a"b) (1),a) (1,a"b") (1,(a)) (1,a\\)
    (1,"\\a") x1,a)
"""


@pytest.mark.parametrize("text", ["", *NO_PAIRS.split()])
def test_a_composite_with_other_fields_is_refused(text: str) -> None:
    with pytest.raises(DecodeError, match="a row of 2 fields"):
        written(PAIR, text)


@given(AWKWARD | st.none())
def test_any_text_in_a_composite_reads_back_as_it_was(value: str | None) -> None:
    field = "" if value is None else '"' + value.replace("\\", "\\\\").replace('"', '""') + '"'
    assert json.loads(written(PAIR, f"(7,{field})")) == {"left side": 7, '"right"': value}


def hstore_out(pairs: Mapping[str, str | None]) -> str:
    """The way hstore prints its pairs."""

    def quoted(text: str | None) -> str:
        if text is None:
            return "NULL"
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return ", ".join(f"{quoted(key)}=>{quoted(value)}" for key, value in pairs.items())


@given(st.dictionaries(AWKWARD, AWKWARD | st.none(), max_size=3))
def test_any_hstore_is_an_object_of_strings_and_nulls(pairs: dict[str, str | None]) -> None:
    assert json.loads(written(HSTORE, hstore_out(pairs))) == pairs


@pytest.mark.parametrize(
    "text", ['"a"', '"a"=>', '"a"=>"b', '"a"=>"b", ', '"a"=>"b"x', '"a"=>"b", x', 'x"a"=>NULL', "x"]
)
def test_an_hstore_that_the_server_never_prints_is_refused(text: str) -> None:
    with pytest.raises(DecodeError, match="an hstore"):
        written(HSTORE, text)


@pytest.mark.parametrize(
    ("name", "kind", "is_one"),
    [
        ("hstore", "b", True),
        ('"My schema".hstore', "b", True),
        ("hstore", "e", False),
        ('"a.hstore"', "b", False),
        ("hstores", "b", False),
    ],
)
def test_hstore_is_known_by_its_name_in_any_schema(name: str, kind: str, is_one: bool) -> None:
    encode = encoder(1, {1: PgType(1, name, kind)})
    assert encode is not None
    assert (json.loads(encode(b'"a"=>"b"')) == {"a": "b"}) is is_one


# --- arbitrary bytes -----------------------------------------------------------------------------

JUNK = st.binary(max_size=40) | st.text(
    st.sampled_from('NUL"\\{}(),=>; ab1-:+\n'), max_size=40
).map(str.encode)


@pytest.mark.parametrize("oid", ALL)
@given(data=st.data())
def test_arbitrary_bytes_become_one_line_of_json_or_a_refusal(
    oid: int, data: st.DataObject
) -> None:
    value = data.draw(JUNK)
    if oid == PAIR:
        value = b"(1," + value
    try:
        line = written(oid, value)
    except DecodeError:
        return
    if oid in PARSED:
        json.loads(line)
        assert b"\n" not in line


@pytest.mark.parametrize(
    ("oid", "value"),
    [
        (BOOL, b"yes"),
        (FLOAT8, b""),
        (BYTEA, b"abcd"),
        (BYTEA, rb"\x0"),
        (BYTEA, rb"\xzz"),
        (POINT, b"(1,2"),
        (POINT, b"(1,b)"),
        (POINT, b"(1_0,1)"),
    ],
)
def test_a_refusal_names_the_type_but_not_the_value(oid: int, value: bytes) -> None:
    with pytest.raises(DecodeError, match="the server sent a ") as refusal:
        written(oid, value)
    assert not value or value.decode() not in str(refusal.value)


# --- types ---------------------------------------------------------------------------------------


def test_types_in_a_circle_are_written_as_text() -> None:
    types = {
        1: PgType(1, "a", "c", fields=(("b", 2),)),
        2: PgType(2, "a[]", "b", 1),
        3: PgType(3, "d", "d", base=4),
        4: PgType(4, "e", "d", base=3),
        5: PgType(5, "d[]", "b", 3),
    }
    expected: dict[int, Any] = {1: {"b": ["(x)"]}, 2: [{"b": "{(x)}"}], 3: "x", 5: ["x"]}
    texts = {1: b'("{(x)}")', 2: b'{"(\\"{(x)}\\")"}', 3: b"x", 5: b"{x}"}
    for oid, value in expected.items():
        encode = encoder(oid, types)
        assert encode is not None
        assert json.loads(encode(texts[oid])) == value


@pytest.mark.parametrize(
    "lost",
    [
        PgType(1, "gone", "d", base=2),
        PgType(1, "gone", "d"),
        PgType(1, "gone", "c"),
        PgType(1, "gone[]", "b", element=2, delimiter=""),
        PgType(1, "gone", "?"),
    ],
)
def test_a_type_that_is_not_fully_known_is_written_as_text(lost: PgType) -> None:
    encode = encoder(1, {1: lost})
    assert encode is not None
    assert encode(b'{a "b"}') == rb'"{a \"b\"}"'


def _composite_of(oid: int) -> PgType:
    return PgType(oid, "deep", "c", fields=(("a", oid + 1), ("b", oid + 1)))


@pytest.mark.parametrize(
    "make",
    [
        lambda oid: PgType(oid, "deep[]", "b", element=oid + 1),
        lambda oid: PgType(oid, "deep", "d", base=oid + 1),
        _composite_of,
    ],
)
def test_a_value_of_types_nested_without_end_is_refused(make: Callable[[int], PgType]) -> None:
    types = {oid: make(oid) for oid in range(100_000, 110_000)}
    encode = encoder(100_000, types)
    assert encode is not None
    with pytest.raises(DecodeError):
        encode(b"x")


def test_a_type_used_many_times_is_built_once() -> None:
    # Doubling at each of sixty levels could otherwise never end.
    types = {oid: _composite_of(oid) for oid in range(1000, 1060)}
    assert encoder(1000, types) is not None


def test_the_rows_of_the_catalog_become_types_whether_text_or_bytes() -> None:
    row = '{"oid":9,"name":"pair","kind":"c","element":0,"base":0,"fields":[["a",23]]}'
    expected = {9: PgType(9, "pair", "c", fields=(("a", 23),))}
    assert pg_types([(row,)]) == expected
    assert pg_types([[row.encode()]]) == expected


@pytest.mark.parametrize("row", ["", "{}", "[]", b"\xff", '{"oid":"x","name":"a","kind":"b"}'])
def test_rows_that_describe_no_type_are_refused(row: str | bytes) -> None:
    with pytest.raises(DecodeError, match="catalog"):
        pg_types([(row,)])
