"""The same row gives the same bytes whether it is copied, streamed or sent as an old row."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headrace.change.event import Change, Op
from headrace.secret import Secret
from headrace.testing import PostgresDatabase
from tests.conftest import Servers
from tests.sources.capturing import captured

SETUP = """
    CREATE TYPE mood AS ENUM ('sad', 'so "so"');
    CREATE DOMAIN positive AS int CHECK (VALUE > 0);
    CREATE DOMAIN tags AS text[];
    CREATE TYPE pair AS ("left side" int, "right" text);
    CREATE TYPE family AS (first pair, others pair[], born timestamp, mood mood);
"""

# Column type, and values of it; each value is a row of its own, and so is null.
TYPES: dict[str, list[str]] = {
    "smallint": ["0", "-32768"],
    "bigint": ["9223372036854775807", "-9223372036854775808"],
    "numeric": ["1.50", "NaN", "Infinity", "-Infinity", "1e-30", "9" * 400, "-0"],
    "numeric(12,2)": ["123.456"],
    "real": ["1.5", "NaN", "Infinity", "1e-40"],
    "float8": ["0.1", "-0", "1e308", "-Infinity"],
    "boolean": ["true", "false"],
    "text": [
        "",
        "plain",
        'quo"te',
        "back\\slash",
        "tab\tnew\nline\rreturn",
        "\x01\x7f",
        "héé 表 😀",
        "\\N",
        "%s",
        "null",
    ],
    "varchar(20)": ["x", "trailing  "],
    "char(5)": ["ab"],
    '"char"': ["a"],
    "name": ["n"],
    "bytea": ["\\x", "\\x00ff10", "\\xdeadbeef"],
    "date": ["2025-01-15", "infinity", "-infinity", "0044-03-15 BC", "5874897-12-31"],
    "time": ["10:30:00", "24:00:00", "23:59:59.999999"],
    "timetz": ["10:30:00+05:30", "24:00:00-08"],
    "timestamp": [
        "2025-01-15 10:30:00",
        "2025-01-15 10:30:00.123456",
        "infinity",
        "0001-01-01 00:00:00 BC",
        "294276-12-31 23:59:59",
    ],
    "timestamptz": [
        "2025-01-15 10:30:00+00",
        "2025-06-15 10:30:00.5+05:30",
        "-infinity",
        "0001-01-01 00:00:00+00 BC",
    ],
    "interval": ["1 year 2 mons 3 days 04:05:06.7", "-1 day", "0"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "json": [
        '{"b": 1, "a": [1.10, null, "x"]}',
        '"text"',
        "123456789012345678901234567890",
        '{"a":\n 1}',
        "null",
    ],
    "jsonb": ['{"b": 1, "a": [1.10, null, "x"]}', "[]", "1e1000", '"\\u00e9\\n"'],
    "inet": ["192.168.1.5/24", "::1"],
    "cidr": ["10.0.0.0/8"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "bit(4)": ["1010"],
    "varbit": ["", "101"],
    "money": ["12.50", "-1234567.89"],
    "point": ["(1,2)", "(1.5,-2.25)", "(NaN,Infinity)"],
    "box": ["(2,2),(0,0)"],
    "box[]": ["{(2,2),(0,0);(1,1),(0,0)}"],
    "path": ["[(0,0),(1,1)]"],
    "polygon": ["((0,0),(1,1),(1,0))"],
    "circle": ["<(0,0),2>"],
    "line": ["{1,2,3}"],
    "lseg": ["[(0,0),(1,1)]"],
    "tsvector": ["'a':1A 'b''c':2"],
    "tsquery": ["'a' & 'b'"],
    "int4range": ["[1,5)", "empty", "(,)"],
    "tstzrange": ["[2025-01-01 00:00:00+00,infinity)"],
    "int4multirange": ["{[1,3),[5,7)}", "{}"],
    "datemultirange": ["{[2025-01-01,2025-02-01)}"],
    "int[]": ["{1,2,NULL}", "{}", "{{1,2},{3,4}}", "[0:1]={7,8}"],
    "text[]": ['{a,"b,c","d\\"e","NULL",NULL,""}', "{{a},{b}}"],
    "numeric[]": ["{1.50,NaN}"],
    "bool[]": ["{t,f}"],
    "timestamptz[]": ['{"2025-01-15 10:30:00+00",infinity}'],
    "jsonb[]": ['{"{\\"a\\": 1}"}'],
    "bytea[]": ['{"\\\\x00ff"}'],
    "uuid[]": ["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"],
    "mood": ["sad", 'so "so"'],
    "mood[]": ['{sad,"so \\"so\\""}'],
    "positive": ["7"],
    "positive[]": ["{7,8}"],
    "tags": ["{a,b}"],
    "pair": ['(1,"a ""quoted"" word")', "(,)", '(,"")'],
    "pair[]": ['{"(1,a)","(2,\\"b c\\")"}'],
    "family": ['("(1,a)","{""(2,b)""}","2025-01-15 10:30:00",sad)'],
    "oid": ["4294967295"],
    "regclass": ["pg_class"],
    "pg_lsn": ["16/B374D848"],
    "xid8": ["18446744073709551615"],
    "tid": ["(1,2)"],
    "jsonpath": ['$."a"[*]'],
    "int2vector": ["1 2 3"],
}


def supported(database: PostgresDatabase, types: dict[str, list[str]]) -> dict[str, list[str]]:
    """Without xml on servers that were built without it."""
    flags = str(database.execute("SELECT setting FROM pg_config WHERE name = 'CONFIGURE'"))
    xml = ["<a b='c'>d&amp;</a>", "<?xml version='1.0'?><x/>"]
    return types | ({"xml": xml} if "--with-libxml" in flags else {})


def fill(database: PostgresDatabase, types: dict[str, list[str]], *, copy: int) -> None:
    """Insert every value of every type, a row each."""
    columns = list(types)
    with database.connect() as connection:
        for at, name in enumerate(columns):
            for number, value in enumerate([*types[name], None]):
                connection.execute(
                    f"INSERT INTO everything (copy, number, c{at}) VALUES (%s, %s, %s::{name})",
                    (copy, at * 100 + number, value),
                )


def by_number(changes: list[Change], key: str = "after") -> dict[int, dict[str, str]]:
    """The text of each value in the images, by the row's number; `copy` is left out."""
    found: dict[int, dict[str, str]] = {}
    for change in changes:
        raw = getattr(change, key)
        # As text, so that 1.10 and 1.1 are two different things.
        row: dict[str, Any] = json.loads(raw, parse_float=str, parse_int=str)
        row.pop("copy")
        found[int(row["number"])] = row
        rest = raw.partition(b'"number":')[2]
        found[int(row["number"])]["bytes"] = rest
    return found


def test_every_type_is_written_alike_by_copy_and_stream(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    types = supported(any_pg, TYPES)
    any_pg.execute(SETUP)
    declared = ", ".join(f"c{at} {name}" for at, name in enumerate(types))
    any_pg.execute(
        f"CREATE TABLE everything (copy int, number int, {declared}, PRIMARY KEY (copy, number));"
        "ALTER TABLE everything REPLICA IDENTITY FULL"
    )
    fill(any_pg, types, copy=1)
    with captured(any_pg, tmp_path) as feed:
        fill(any_pg, types, copy=2)
        any_pg.execute("UPDATE everything SET copy = 3 WHERE copy = 2")
        any_pg.execute("DELETE FROM everything WHERE copy = 3")
        changes = feed.changes()
        assert feed.status.errored == {}
    read, inserted, updated, deleted = (
        [change for change in changes if change.op is op]
        for op in (Op.READ, Op.INSERT, Op.UPDATE, Op.DELETE)
    )
    expected = by_number(read)
    assert len(expected) == sum(len(values) + 1 for values in types.values())
    assert by_number(inserted) == expected
    assert by_number(updated) == expected
    assert by_number(updated, "before") == expected
    assert by_number(deleted, "before") == expected
    assert all(change.changed == ("copy",) for change in updated)


@pytest.mark.requirement("S0-14", "S0-15", "S0-16", "S0-17", "S0-18", "S0-19", "S0-20", "S0-21")
@pytest.mark.requirement("S0-22", "S0-23", "S0-24", "S0-25", "S0-26", "S0-27")
def test_the_types_of_the_table_in_the_document_look_as_it_says(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    any_pg.execute(
        "CREATE TABLE t (id int PRIMARY KEY, i bigint, n numeric, b boolean, s text, ts timestamp,"
        " tz timestamptz, d date, ti time, u uuid, j jsonb, raw bytea, a int[], ip inet, p point)"
    )
    row = (
        "INSERT INTO t VALUES (%s, 42, 123.456, true, 'x', '2025-01-15 10:30:00',"
        " '2025-01-15 10:30:00+00', '2025-01-15', '10:30:00',"
        " 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{\"a\": [1]}', '\\x00ff', '{1,2,3}',"
        " '192.168.1.5', '(1.0,2.0)')"
    )
    any_pg.execute(row, (1,))
    with captured(any_pg, tmp_path) as feed:
        any_pg.execute(row, (2,))
        images = [json.loads(c.after or b"") for c in feed.changes(Op.READ, Op.INSERT)]
    for number, image in enumerate(images, 1):
        assert image == {
            "id": number, "i": 42, "n": "123.456", "b": True, "s": "x",
            "ts": "2025-01-15T10:30:00Z", "tz": "2025-01-15T10:30:00+00:00",
            "d": "2025-01-15", "ti": "10:30:00", "u": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
            "j": {"a": [1]}, "raw": "AP8=", "a": [1, 2, 3], "ip": "192.168.1.5",
            "p": {"x": 1.0, "y": 2.0},
        }  # fmt: skip


def test_hstore_is_an_object_in_copy_and_stream(servers: Servers, tmp_path: Path) -> None:
    with servers[15].database() as database:
        database.execute("CREATE EXTENSION hstore")
        database.execute("CREATE TABLE t (id int PRIMARY KEY, h hstore, a hstore[])")
        row = (
            """INSERT INTO t VALUES (%s, 'a=>1, "b c"=>NULL, d=>"q\\"q"', ARRAY['x=>y'::hstore])"""
        )
        database.execute(row, (1,))
        with captured(database, tmp_path) as feed:
            database.execute(row, (2,))
            images = [json.loads(c.after or b"") for c in feed.changes(Op.READ, Op.INSERT)]
    for number, image in enumerate(images, 1):
        h = {"a": "1", "b c": None, "d": 'q"q'}
        assert image == {"id": number, "h": h, "a": [{"x": "y"}]}


CONTRARY = (
    "DateStyle = German",
    "IntervalStyle = postgres_verbose",
    "TimeZone = 'Asia/Kolkata'",
    "bytea_output = escape",
    "extra_float_digits = -10",
    "client_encoding = LATIN1",
    "statement_timeout = 1",
    "idle_session_timeout = 1",
)


@pytest.fixture
def contrary(pg: PostgresDatabase) -> Iterator[PostgresDatabase]:
    """A database whose settings print values otherwise and end sessions early."""
    with psycopg.connect(pg.server.url(), autocommit=True) as outside:
        for setting in CONTRARY:
            outside.execute(f"ALTER DATABASE {pg.name} SET {setting}")
        yield pg
        outside.execute(f"ALTER DATABASE {pg.name} RESET ALL")


def test_settings_of_the_database_do_not_change_what_is_captured(
    contrary: PostgresDatabase, tmp_path: Path
) -> None:
    row = "INSERT INTO t VALUES (%s, '2025-01-15', '2025-01-15 10:30:00+00', '1 day', '\\x00', 0.1)"
    unlimited = "-c statement_timeout=0 -c idle_session_timeout=0"
    with contrary.connect(options=unlimited) as connection:
        connection.execute(
            "CREATE TABLE t"
            " (id int PRIMARY KEY, d date, tz timestamptz, i interval, raw bytea, f float8)"
        )
        connection.execute(row, (1,))
        url = Secret(f"{contrary.url}?options=-c%20DateStyle%3DSQL")
        with captured(contrary, tmp_path, url=url) as feed:
            connection.execute(row, (2,))
            feed.until(lambda: feed.stored(Op.INSERT), "the row is there")
            images = [json.loads(c.after or b"") for c in feed.stored(Op.READ, Op.INSERT)]
    for number, image in enumerate(images, 1):
        assert image == {
            "id": number, "d": "2025-01-15", "tz": "2025-01-15T10:30:00+00:00", "i": "P1D",
            "raw": "AA==", "f": 0.1,
        }  # fmt: skip


def test_a_document_that_is_nested_too_deeply_fails_its_table_alone(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    any_pg.execute("CREATE TYPE holder AS (document jsonb)")
    any_pg.execute("CREATE TABLE deep (id int PRIMARY KEY, held holder)")
    any_pg.execute("CREATE TABLE plain (id int PRIMARY KEY)")
    with captured(any_pg, tmp_path) as feed:
        nested = "(repeat('[', 1500) || repeat(']', 1500))::jsonb"
        any_pg.execute(f"INSERT INTO deep VALUES (1, ROW({nested}))")
        any_pg.execute("INSERT INTO plain VALUES (1)")
        assert len(feed.changes(Op.INSERT, table="plain")) == 1
        assert list(feed.status.errored) == ["public.deep"]
