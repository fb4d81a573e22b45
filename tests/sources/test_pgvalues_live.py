"""What real PostgreSQL servers print becomes the JSON it stands for, and means the same value."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any, LiteralString

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import sql

from headrace.change.block import RowBlock, pack
from headrace.change.event import Column, Table, Transaction
from headrace.errors import DecodeError
from headrace.sources.postgres.position import PostgresPosition
from headrace.sources.postgres.replication import copy_lines
from headrace.sources.postgres.values import SESSION_SETTINGS, TYPES_SQL, encoder, pg_types
from headrace.testing import PostgresDatabase
from tests.sources.recorded import decoder

Connection = psycopg.Connection[tuple[Any, ...]]

SETUP = """
    CREATE TYPE mood AS ENUM ('sad', 'so "so"');
    CREATE DOMAIN positive AS int CHECK (VALUE > 0);
    CREATE DOMAIN very_positive AS positive CHECK (VALUE > 10);
    CREATE DOMAIN tags AS text[];
    CREATE TYPE pair AS ("left side" int, dropped date, "right" text, flags bool[]);
    ALTER TYPE pair DROP ATTRIBUTE dropped;
    CREATE TYPE family AS (first pair, others pair[], born timestamp, mood mood);
    CREATE TABLE parent (id int, note text);
"""

# Everything the pinned settings decide, set the other way for all sessions of the database.
CONTRARY = {
    "DateStyle": "German",
    "IntervalStyle": "postgres_verbose",
    "TimeZone": "Asia/Kolkata",
    "extra_float_digits": "-10",
    "bytea_output": "escape",
    "client_encoding": "LATIN1",
}


class Server:
    """A session that reads values as a source does."""

    def __init__(self, connection: Connection) -> None:
        for name, value in SESSION_SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        self.connection = connection
        self.types = pg_types(connection.execute(TYPES_SQL))

    def printed(self, query: sql.Composed) -> bytes:
        """The text of the only value that a query returns, untouched by the driver."""
        result = self.connection.execute(query).pgresult
        assert result is not None
        text = result.get_value(0, 0)
        assert text is not None
        return text

    def written(self, query: sql.Composed) -> str:
        """The same value as JSON."""
        # A query's result hides domains, but replication names them.
        kind = sql.SQL("SELECT pg_typeof(v)::oid::int8 FROM ({}) AS q(v)").format(query)
        encode = encoder(int(self.printed(kind)), self.types)
        text = self.printed(query)
        line = text if encode is None else encode(text)
        assert b"\n" not in line
        return line.decode()

    def one(self, query: LiteralString, *parameters: object) -> Any:
        """The only value that a query returns, as the driver reads it."""
        row = self.connection.execute(query, parameters or None).fetchone()
        assert row is not None
        return row[0]


def value(type_name: LiteralString, literal: str) -> sql.Composed:
    return sql.SQL("SELECT {}::{}").format(sql.Literal(literal), sql.SQL(type_name))


@pytest.fixture(scope="module", params=[15, 16, 18], ids=lambda version: f"postgres{version}")
def database(request: pytest.FixtureRequest, servers: Any) -> Iterator[PostgresDatabase]:
    with servers[request.param].database() as database:
        database.execute(SETUP)
        for name, setting in CONTRARY.items():
            statement = sql.SQL("ALTER DATABASE {} SET {} = {}")
            database.execute(
                statement.format(sql.Identifier(database.name), sql.Identifier(name), setting)
            )
        yield database


@pytest.fixture(scope="module")
def server(database: PostgresDatabase) -> Iterator[Server]:
    with closing(database.connect()) as connection:
        yield Server(connection)


def requirement(name: str, *cases: tuple[str, str, Any]) -> Iterator[Any]:
    for case in cases:
        yield pytest.param(*case, marks=pytest.mark.requirement(name), id=" ".join(case[:2])[:50])


SCALARS = [
    *requirement(
        "S0-14",
        ("smallint", "-32768", -32768),
        ("integer", "2147483647", 2147483647),
        ("bigint", "9223372036854775807", 9223372036854775807),
        ("oid", "4294967295", 4294967295),
        ("xid", "7", 7),
        ("xid8", "18446744073709551615", 18446744073709551615),
        ("very_positive", "11", 11),
    ),
    *requirement(
        "S0-15",
        ("numeric", "123.456", "123.456"),
        ("decimal(10,3)", "1", "1.000"),
        ("numeric", "1" * 131072 + "." + "2" * 16383, "1" * 131072 + "." + "2" * 16383),
        ("numeric", "NaN", "NaN"),
        ("numeric", "-Infinity", "-Infinity"),
    ),
    *requirement("S0-16", ("boolean", "yes", True), ("boolean", "0", False)),
    *requirement(
        "S0-17",
        ("text", 'é 水 🌊 "quoted"\n\t\\ \x01\x7f', 'é 水 🌊 "quoted"\n\t\\ \x01\x7f'),
        ("text", "", ""),
        ("varchar(5)", "abc", "abc"),
        ("char(5)", "abc", "abc  "),
        ('"char"', "a", "a"),
        ("name", "abc", "abc"),
    ),
    *requirement(
        "S0-18",
        ("timestamp", "2025-01-15 10:30:00", "2025-01-15T10:30:00Z"),
        ("timestamp", "2025-01-15 10:30:00.123456", "2025-01-15T10:30:00.123456Z"),
        ("timestamp", "0001-01-01", "0001-01-01T00:00:00Z"),
        ("timestamp", "-infinity", "-infinity"),
        ("timestamp", "0044-03-15 12:00:00 BC", "0044-03-15 12:00:00 BC"),
        ("timestamp", "294276-12-31 23:59:59.999999", "294276-12-31 23:59:59.999999"),
    ),
    *requirement(
        "S0-19",
        ("timestamptz", "2025-01-15 10:30:00+00", "2025-01-15T10:30:00+00:00"),
        ("timestamptz", "2025-01-15 10:30:00.5+02", "2025-01-15T08:30:00.5+00:00"),
        ("timestamptz", "infinity", "infinity"),
        ("timestamptz", "0044-03-15 12:00:00+00 BC", "0044-03-15 12:00:00+00 BC"),
        ("timestamptz", "10000-01-01 00:00:00+00", "10000-01-01 00:00:00+00"),
    ),
    *requirement(
        "S0-20",
        ("date", "2025-01-15", "2025-01-15"),
        ("date", "infinity", "infinity"),
        ("date", "4713-01-01 BC", "4713-01-01 BC"),
        ("date", "5874897-12-31", "5874897-12-31"),
    ),
    *requirement(
        "S0-21",
        ("time", "10:30:00", "10:30:00"),
        ("time", "24:00:00", "24:00:00"),
        ("timetz", "10:30:00.5+05:30", "10:30:00.5+05:30"),
    ),
    *requirement(
        "S0-22",
        ("uuid", "A0EEBC999C0B4EF8BB6D6BB9BD380A11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ),
    *requirement("S0-26", ("inet", "192.168.0.1/24", "192.168.0.1/24"), ("inet", "::1", "::1")),
    ("real", "0.1", 0.1),
    ("real", "3.4028235e38", 3.4028235e38),
    ("double precision", "5e-324", 5e-324),
    ("double precision", "0.30000000000000004", 0.30000000000000004),
    ("double precision", "100000000000000000000", 1e20),
    ("double precision", "NaN", "NaN"),
    ("double precision", "-Infinity", "-Infinity"),
    ("interval", "1 year 2 months 3 days 04:05:06.7", "P1Y2M3DT4H5M6.7S"),
    ("interval", "0", "PT0S"),
    ("cidr", "10.0.0.0/8", "10.0.0.0/8"),
    ("macaddr", "08-00-2b-01-02-03", "08:00:2b:01:02:03"),
    ("macaddr8", "08002b0102030405", "08:00:2b:01:02:03:04:05"),
    ("bit(4)", "0101", "0101"),
    ("bit varying", "", ""),
    ("money", "-1234.5", "-$1,234.50"),
    ("tsvector", "'it''s' a:1", "'a':1 'it''s'"),
    ("tsquery", "a & !b", "'a' & !'b'"),
    ("int4range", "[1,5]", "[1,6)"),
    (
        "tsrange",
        '[2025-01-15, "2025-01-16 10:00")',
        '["2025-01-15 00:00:00","2025-01-16 10:00:00")',
    ),
    ("int4multirange", "{[1,3),[5,6)}", "{[1,3),[5,6)}"),
    ("box", "(1,1),(0,0)", "(1,1),(0,0)"),
    ("circle", "<(1,2),3>", "<(1,2),3>"),
    ("pg_lsn", "16/B374D848", "16/B374D848"),
    ("tid", "(1,2)", "(1,2)"),
    ("regclass", "pg_class", "pg_class"),
    ("jsonpath", "$.a", '$."a"'),
    ("mood", 'so "so"', 'so "so"'),
]


@pytest.mark.parametrize(("type_name", "literal", "expected"), SCALARS)
def test_a_value_is_written_as_expected_and_casts_back_to_itself(
    server: Server, type_name: LiteralString, literal: str, expected: Any
) -> None:
    query = value(type_name, literal)
    line = server.written(query)
    assert json.loads(line) == expected
    back = expected if isinstance(expected, str) else line
    assert server.printed(value(type_name, back)) == server.printed(query)


@pytest.mark.requirement("S0-23")
@pytest.mark.parametrize("type_name", ["json", "jsonb"])
@pytest.mark.parametrize(
    "document",
    [
        '{"a":\n\t[1, 2.50, -1e2],\r\n "é": "x\\ny\\u00e9\\\\", "n": null}',
        "[]",
        "null",
        '"text"',
        "12345678901234567890.123456789",
    ],
)
def test_a_document_is_itself(server: Server, type_name: LiteralString, document: str) -> None:
    line = server.written(value(type_name, document))
    assert json.loads(line) == json.loads(document)
    same = "SELECT {}::jsonb = {}::jsonb"
    assert server.one(sql.SQL(same).format(line, document).as_string())


@pytest.mark.requirement("S0-24")
@pytest.mark.parametrize("content", [b"", b"\x00\xff", bytes(range(256))])
def test_bytes_come_back_from_base64(server: Server, content: bytes) -> None:
    line = server.written(sql.SQL("SELECT {}::bytea").format(sql.Literal(content)))
    assert server.one("SELECT decode(%s, 'base64')", json.loads(line)) == content


@pytest.mark.requirement("S0-27")
@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("(1,2)", '{"x":1.0,"y":2.0}'),
        ("(-0.5,1e300)", '{"x":-0.5,"y":1e+300}'),
        ("(NaN,-Infinity)", '{"x":"NaN","y":"-Infinity"}'),
    ],
)
def test_a_point_casts_back_to_itself(server: Server, literal: str, expected: str) -> None:
    query = value("point", literal)
    assert server.written(query) == expected
    back = "SELECT point((d->>'x')::float8, (d->>'y')::float8)::text FROM (SELECT {}::jsonb) q(d)"
    assert server.printed(sql.SQL(back).format(sql.Literal(expected))) == server.printed(query)


ARRAYS = [
    ("int[]", "{1,2,3}", [1, 2, 3]),
    ("int[]", "{}", []),
    ("int[]", "[0:1][5:6]={{1,NULL},{3,4}}", [[1, None], [3, 4]]),
    ("very_positive[]", "{11,NULL}", [11, None]),
    ("tags", '{a,"b c"}', ["a", "b c"]),
    ("float8[]", "{0.1,NULL,NaN}", [0.1, None, "NaN"]),
    ("real[]", "{{0.1},{2}}", [[0.1], [2]]),
    ("numeric[]", "{1.50,NaN}", ["1.50", "NaN"]),
    ("bool[]", "{t,NULL,f}", [True, None, False]),
    ("varchar[]", "[2:3]={a,NULL}", ["a", None]),
    ("timestamptz[]", "{2025-01-15 10:30:00+00}", ["2025-01-15T10:30:00+00:00"]),
    ("date[]", "{2025-01-15,infinity}", ["2025-01-15", "infinity"]),
    ("bytea[]", r'{"\\x00ff"}', ["AP8="]),
    ("json[]", r'{"{\"a\":[1,\"x\"]}","null",NULL}', [{"a": [1, "x"]}, None, None]),
    ("jsonb[]", r'{"{\"a\":[1,\"x\"]}",2}', [{"a": [1, "x"]}, 2]),
    ("box[]", "{(1,1),(0,0);(2,2),(1,1)}", ["(1,1),(0,0)", "(2,2),(1,1)"]),
    ("point[]", '{"(1,2)"}', [{"x": 1.0, "y": 2.0}]),
    ("inet[]", "{::1}", ["::1"]),
    ("mood[]", r'{sad,"so \"so\"",NULL}', ["sad", 'so "so"', None]),
    ("int4range[]", '{"[1,5)"}', ["[1,5)"]),
    ("int2vector", "1 2", [1, 2]),
    ("oidvector", "", []),
]


@pytest.mark.requirement("S0-25")
@pytest.mark.parametrize(("type_name", "literal", "expected"), ARRAYS)
def test_an_array_is_written_as_expected(
    server: Server, type_name: LiteralString, literal: str, expected: list[Any]
) -> None:
    assert json.loads(server.written(value(type_name, literal))) == expected


OTHERS = [
    ("bytea", r"\x00ff"),
    ("bytea", r"\x"),
    ("point", "(-0.5,NaN)"),
    ("json", '{"a":\n\t[1, "\\u00e9 \\" \\\\"]}'),
    ("jsonb", '{"a": "tab\\t \\" \\\\ é"}'),
    ("jsonb", "null"),
    ("pair", '(1,"a ""b"" \\\\ c","{t,NULL}")'),
    ("pair[]", '{"(1,,)",NULL}'),
    ("family", '("(1,a,)",,2025-01-15,sad)'),
]


@pytest.mark.requirement("C-28")
@pytest.mark.parametrize(
    ("type_name", "literal"),
    [getattr(case, "values", case)[:2] for case in [*SCALARS, *ARRAYS]] + OTHERS,
    ids=lambda text: text[:30],
)
def test_a_block_of_copied_values_has_the_bytes_of_their_rows(
    server: Server, type_name: LiteralString, literal: str
) -> None:
    one = value(type_name, literal)
    many = sql.SQL("{0} UNION ALL SELECT NULL UNION ALL {0}").format(one)
    copy = sql.SQL("COPY (SELECT '(0,1)'::tid, v, 1 FROM ({}) q(v)) TO STDOUT").format(many)
    arriving = copy_lines(server.connection.pgconn, copy.as_bytes(server.connection))
    lines = [line for some in arriving for line in some]
    kind = sql.SQL("SELECT pg_typeof(v)::oid::int8 FROM ({}) AS q(v)").format(one)
    columns = Column("v", type_name, True, int(server.printed(kind))), Column("n", "int", True, 23)
    rows = decoder(Table("s", "postgres", "o", "d", "public", "t", columns), server.types)
    texts = rows.lines().columns(lines)
    assert texts is not None
    at = PostgresPosition(1, 1)
    block = RowBlock(pack(rows.table, Transaction("t", 1, 1), (at, at), texts, len(lines)))
    keys, images = rows.lines().images(lines)
    assert block.images(["v", "n"], 0, 3) == images == list(keys)
    assert images[1] == b'{"v":null,"n":1}'


# PostgreSQL's own to_json is the judge of arrays and composites of any text.
TEXT = st.text(
    st.sampled_from('NULnul"\\{}(),=>; \n\té水') | st.characters(codec="utf-8"), max_size=8
)
ANY_TEXT = TEXT.map(lambda text: text.replace("\0", "")) | st.none() | st.just("NULL")


@pytest.mark.requirement("S0-25")
@given(values=st.lists(ANY_TEXT, max_size=5))
def test_an_array_of_any_text_is_what_the_server_says_it_is(
    server: Server, values: list[str | None]
) -> None:
    array = sql.SQL("SELECT {}::text[]").format(sql.Literal(values))
    assert json.loads(server.written(array)) == values
    square = sql.SQL("SELECT ARRAY[{0}::text[], {0}::text[]]").format(sql.Literal(values))
    assert json.loads(server.written(square)) == ([values, values] if values else [])


@given(
    number=st.none() | st.integers(-5, 5), text=ANY_TEXT, flags=st.lists(st.none() | st.booleans())
)
def test_a_composite_of_any_text_is_what_the_server_says_it_is(
    server: Server, number: int | None, text: str | None, flags: list[bool | None]
) -> None:
    pair = sql.SQL("ROW({}, {}, {}::bool[])::pair").format(number, text, sql.Literal(flags))
    family = sql.SQL("ROW({0}, ARRAY[{0}, NULL], '2025-01-15', 'sad')::family").format(pair)
    expected = json.loads(server.one(sql.SQL("SELECT to_json({})::text").format(pair).as_string()))
    assert json.loads(server.written(sql.SQL("SELECT {}").format(pair))) == expected
    assert json.loads(server.written(sql.SQL("SELECT {}").format(family))) == {
        "first": expected,
        "others": [expected, None],
        "born": "2025-01-15T00:00:00Z",
        "mood": "sad",
    }


def test_the_row_type_of_a_table_is_a_composite(server: Server) -> None:
    line = server.written(sql.SQL("SELECT ROW({}, {})::parent").format(1, "a"))
    assert json.loads(line) == {"id": 1, "note": "a"}


def test_xml_is_a_string(server: Server) -> None:
    document = '<a b="c">\n</a>'
    try:
        line = server.written(value("xml", document))
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this server was built without libxml")
    assert json.loads(line) == document


@pytest.fixture(scope="module")
def contrib(database: PostgresDatabase) -> Iterator[Server]:
    """A server with types that extensions bring."""
    with closing(database.connect()) as connection:
        for name in ("hstore", "citext"):
            try:
                connection.execute(sql.SQL("CREATE EXTENSION {}").format(sql.Identifier(name)))
            except psycopg.errors.FeatureNotSupported:
                pytest.skip(f"this server has no {name} (Debian: postgresql-contrib)")
        yield Server(connection)


@given(pairs=st.dictionaries(ANY_TEXT.filter(lambda key: key is not None), ANY_TEXT, max_size=4))
def test_an_hstore_of_any_text_is_an_object(contrib: Server, pairs: dict[str, str | None]) -> None:
    query = sql.SQL("SELECT hstore({}::text[], {}::text[])").format(
        sql.Literal(list(pairs)), sql.Literal(list(pairs.values()))
    )
    assert json.loads(contrib.written(query)) == pairs


def test_citext_is_a_string(contrib: Server) -> None:
    assert json.loads(contrib.written(value("citext", 'A"b'))) == 'A"b'


@pytest.mark.requirement("S0-19")
@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/New_York", "Africa/Monrovia", "UTC"])
@pytest.mark.parametrize("moment", ["2025-07-15 10:30:00+00", "1930-01-15 10:30:00.25+00"])
def test_a_server_that_keeps_its_own_zone_still_tells_the_moment(
    server: Server, zone: str, moment: str
) -> None:
    server.one("SELECT set_config('TimeZone', %s, false)", zone)
    try:
        line = server.written(value("timestamptz", moment))
    finally:
        server.one("SELECT set_config('TimeZone', 'UTC', false)")
    assert server.one("SELECT %s::timestamptz = %s::timestamptz", json.loads(line), moment)


def test_a_database_without_an_encoding_cannot_pass_off_bytes_as_text(
    database: PostgresDatabase,
) -> None:
    name = f"{database.name}_ascii"
    create = "CREATE DATABASE {} ENCODING 'SQL_ASCII' TEMPLATE template0"
    with closing(database.connect()) as admin:
        admin.execute(sql.SQL(create).format(sql.Identifier(name)))
        try:
            with closing(database.connect(dbname=name)) as connection:
                server = Server(connection)
                # With the pinned encoding the server would refuse to send the value at all.
                connection.execute("SET client_encoding = SQL_ASCII")
                with pytest.raises(DecodeError, match="not UTF-8"):
                    server.written(sql.SQL(r"SELECT E{}").format(sql.SQL(r"'\xff'")))
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
