"""The triggers of an event table: partitions, inheritance, and every kind of statement."""

import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headrace.change.event import Op
from headrace.sources.postgres_events import install
from headrace.sources.postgres_events.triggers import TriggerTarget
from headrace.testing import PostgresDatabase, Reading, reading
from headrace.testing.processes import wait_until
from tests.conftest import Servers
from tests.effort import times
from tests.sources.capturing import image
from tests.sources.test_postgres_events import events, place_of
from tests.sources.test_postgres_events_history import rows_of
from tests.sources.test_postgres_server import BAD, Lawless


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look for new tables every moment."""
    monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 0.05)


def oid_of(database: PostgresDatabase, table: str) -> int:
    """The number of a table."""
    return int(database.execute(f"SELECT '{table}'::regclass::oid")[0][0])


def names_of(database: PostgresDatabase, table: str) -> set[str]:
    """Our triggers of a table, without those that the server has cloned."""
    query = f"""SELECT tgname FROM pg_trigger WHERE tgrelid = '{table}'::regclass
                AND tgparentid = 0 AND tgname LIKE '!%'"""
    return {name for (name,) in database.execute(query)}


def written(feed: Reading, table: str) -> list[tuple[Op, dict[str, Any] | None]]:
    """What was captured of a table's rows since it was copied."""
    feed.catch_up()
    found = feed.changes(Op.INSERT, Op.UPDATE, Op.DELETE, table=table)
    return [(c.op, image(c.after) if c.op is not Op.DELETE else image(c.before)) for c in found]


# --- partitions ----------------------------------------------------------------------------------


@pytest.mark.requirement("P-01")
def test_a_captured_table_can_become_a_partition_and_a_table_again(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    any_pg.execute(
        """CREATE TABLE sales (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
           CREATE TABLE old_sales PARTITION OF sales FOR VALUES FROM (0) TO (10);
           CREATE TABLE new_sales (id int PRIMARY KEY, n int);
           CREATE TABLE more_sales (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
           CREATE TABLE leaf_sales PARTITION OF more_sales FOR VALUES FROM (20) TO (30)"""
    )
    with reading(place_of(any_pg), tmp_path) as feed:
        feed.catch_up()
        any_pg.execute(
            "INSERT INTO new_sales VALUES (10, 0); INSERT INTO more_sales VALUES (20, 0)"
        )
        feed.catch_up()
        any_pg.execute(
            """ALTER TABLE sales ATTACH PARTITION new_sales FOR VALUES FROM (10) TO (20);
               ALTER TABLE sales ATTACH PARTITION more_sales FOR VALUES FROM (20) TO (30)"""
        )
        any_pg.execute("INSERT INTO sales VALUES (1, 1), (11, 1), (21, 1)")
        any_pg.execute("INSERT INTO new_sales VALUES (12, 2)")
        any_pg.execute("INSERT INTO leaf_sales VALUES (22, 2)")
        any_pg.execute("UPDATE new_sales SET n = 3 WHERE id = 12")
        with any_pg.connect() as applied:  # as a replica applies rows
            applied.execute("SET session_replication_role = replica")
            applied.execute("INSERT INTO new_sales VALUES (13, 4)")
        any_pg.execute("UPDATE sales SET id = 14 WHERE id = 1")
        any_pg.execute("DELETE FROM sales WHERE id = 21")
        any_pg.execute("TRUNCATE leaf_sales")
        feed.until(
            lambda _: feed.rows("sales", surprises=True) == rows_of(any_pg, "sales"), take=feed.step
        )
        any_pg.execute("ALTER TABLE sales DETACH PARTITION new_sales")
        any_pg.execute("INSERT INTO new_sales VALUES (15, 5)")
        any_pg.execute("INSERT INTO leaf_sales VALUES (25, 5)")
        feed.until(
            lambda _: feed.rows("sales", surprises=True) == rows_of(any_pg, "sales"), take=feed.step
        )
        feed.until(
            lambda _: feed.rows("new_sales", surprises=True) == rows_of(any_pg, "new_sales"),
            take=feed.step,
        )


def test_a_new_partition_is_captured_from_its_first_row(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of writes to itself, and though nobody looks for new tables."""
    pg.execute("CREATE TABLE sales (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)")
    monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 3600.0)
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        pg.execute("CREATE TABLE sold PARTITION OF sales FOR VALUES FROM (0) TO (10)")
        pg.execute("INSERT INTO sold VALUES (1, 1); INSERT INTO sales VALUES (2, 2)")
        assert [row for _, row in written(feed, "sales")] == [{"id": 1, "n": 1}, {"id": 2, "n": 2}]


# --- inheritance ---------------------------------------------------------------------------------


def test_rows_of_children_are_theirs_also_by_way_of_their_parent(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        """CREATE TABLE parents (id int PRIMARY KEY, n int);
           CREATE TABLE plain (id int PRIMARY KEY, n int);
           CREATE TABLE children (id int PRIMARY KEY, extra text) INHERITS (parents)"""
    )
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        pg.execute("INSERT INTO parents VALUES (1, 1); INSERT INTO children VALUES (2, 2, 'x')")
        pg.execute("INSERT INTO plain VALUES (1, 1)")
        pg.execute("UPDATE parents SET n = n + 1")
        assert written(feed, "parents")[1:] == [(Op.UPDATE, {"id": 1, "n": 2})]
        assert written(feed, "children")[1:] == [(Op.UPDATE, {"id": 2, "n": 3, "extra": "x"})]
        # A table that becomes a parent: rows of its child are never taken for its own.
        pg.execute("CREATE TABLE later (id int PRIMARY KEY, extra text) INHERITS (plain)")
        pg.execute("INSERT INTO later VALUES (5, 5, 'y'); UPDATE plain SET n = n + 1")
        feed.until(lambda _: feed.rows("plain") == [{"id": 1, "n": 2}], take=feed.step)
        pg.execute("UPDATE plain SET n = n + 1")
        feed.until(lambda _: feed.rows("later") == rows_of(pg, "later"), take=feed.step)
        assert feed.rows("plain") == [{"id": 1, "n": 3}]
        assert not [c for c in feed.changes(table="plain") if b'"id":5' in (c.after or b"")]


# --- statements ----------------------------------------------------------------------------------

KINDS = """
    CREATE TABLE things (id int PRIMARY KEY, dropped int, n int, new_rows text DEFAULT 'a (b)');
    ALTER TABLE things DROP COLUMN dropped;
    CREATE TABLE parts (id int PRIMARY KEY, n int,
        thing int REFERENCES things ON DELETE CASCADE ON UPDATE CASCADE);
    CREATE TABLE counts (id int PRIMARY KEY, n int);
    INSERT INTO counts VALUES (1, 0);
    CREATE VIEW few AS SELECT id, n FROM things WHERE id < 50;
    CREATE FUNCTION replace() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        DELETE FROM things WHERE id = new.id; RETURN new; END $$;
    CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF new.n % 7 = 0 THEN RETURN NULL; END IF; new.n := new.n + 1; RETURN new; END $$;
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        UPDATE counts SET n = n + 1; UPDATE things SET n = -1 WHERE id = old.id + 1 AND n % 5 = 0;
        RETURN NULL; END $$;
    CREATE TRIGGER note AFTER UPDATE ON things FOR EACH ROW
        WHEN (pg_trigger_depth() < 2) EXECUTE FUNCTION note();
    CREATE TRIGGER note AFTER DELETE ON parts FOR EACH ROW EXECUTE FUNCTION note()"""

WRITES = (
    "INSERT INTO things SELECT i, i FROM generate_series({a}, {a} + 20) i ON CONFLICT DO NOTHING",
    "INSERT INTO things SELECT i, {b} FROM generate_series({a}, {a} + 9) i"
    " ON CONFLICT (id) DO UPDATE SET n = things.n + excluded.n, id = things.id + 1000 * {b}",
    "INSERT INTO parts SELECT 100 * {b} + id, n, id FROM things WHERE id < 90"
    " ON CONFLICT DO NOTHING",
    "UPDATE things SET n = n + 1 WHERE id % 3 = {a} % 3",
    "UPDATE things SET id = id - 1000 WHERE id > 1000 AND id % 1000 = {a}"
    " AND NOT EXISTS (SELECT FROM things t WHERE t.id = things.id - 1000)",
    "DELETE FROM things WHERE id BETWEEN {a} AND {a} + {b}",
    "UPDATE few SET n = {b}",
    "MERGE INTO things t USING generate_series({a}, {a} + 9) s(id) ON t.id = s.id"
    " WHEN MATCHED AND t.n % 2 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET n = {b}"
    " WHEN NOT MATCHED THEN INSERT (id, n) VALUES (s.id, {b})",
    "WITH gone AS (DELETE FROM things WHERE id = {a} RETURNING id, n)"
    " UPDATE counts SET n = n + (SELECT count(*) FROM gone)",
    "WITH more AS (INSERT INTO things VALUES ({a} + 2000, 1) ON CONFLICT DO NOTHING RETURNING id)"
    " UPDATE things SET n = n + {b} WHERE id < {a}",
    "ALTER TABLE things ADD COLUMN IF NOT EXISTS c{b} int",
)


@pytest.mark.parametrize("seed", range(times(6, nightly=30)))
def test_after_any_statements_the_log_equals_the_tables(
    pg: PostgresDatabase, tmp_path: Path, seed: int
) -> None:
    pg.execute(KINDS)
    chance = random.Random(seed)
    if seed % 3 == 1:
        pg.execute(
            "CREATE TRIGGER replace BEFORE INSERT ON things FOR EACH ROW EXECUTE FUNCTION replace()"
        )
    if seed % 3 == 2:
        pg.execute(
            "CREATE TRIGGER skip BEFORE INSERT OR UPDATE ON things FOR EACH ROW"
            " EXECUTE FUNCTION skip()"
        )
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        with pg.connect(autocommit=True) as writer:
            for _ in range(6):
                with writer.transaction():
                    for write in chance.choices(WRITES, k=8):
                        _tried(
                            writer, write.format(a=chance.randint(1, 60), b=chance.randint(1, 9))
                        )
        feed.catch_up()
        for table in ("things", "parts", "counts"):
            # A new column comes with the next row of its table.
            assert _filled(feed.rows(table)) == _filled(rows_of(pg, table)), table


def _filled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _tried(writer: psycopg.Connection[Any], write: str) -> None:
    try:
        with writer.transaction():
            writer.execute(write.encode())
    except psycopg.Error:
        pass  # such as a row that was changed already: nothing of it remains


def test_the_rows_of_an_update_are_paired_as_they_were_changed(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE things (id int PRIMARY KEY DEFERRABLE, n int)")
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        pg.execute("INSERT INTO things SELECT i, i FROM generate_series(1, 2000) i")
        pg.execute("UPDATE things SET id = 2001 - id, n = n + 1")
        feed.catch_up()
        paired = [(image(c.before), image(c.after)) for c in feed.changes(Op.UPDATE)]
        assert len(paired) == 2000
        for before, after in paired:
            assert before
            assert after
            assert (after["id"], after["n"]) == (2001 - before["id"], before["n"] + 1)


def test_a_key_that_a_merge_deletes_and_inserts_again_is_there(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        """CREATE TABLE things (id int PRIMARY KEY, n int);
           INSERT INTO things VALUES (1, 1), (2, 2), (3, 3)"""
    )
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        pg.execute(
            """MERGE INTO things t
               USING (VALUES (1, 1, 10), (2, 2, 20), (3, 9, 1), (4, 8, 2)) s(place, id, n)
               ON t.id = s.id
               WHEN MATCHED AND t.id = 1 THEN DELETE
               WHEN MATCHED THEN UPDATE SET id = 22
               WHEN NOT MATCHED THEN INSERT VALUES (s.n, s.n)"""
        )
        feed.catch_up()
        assert feed.rows("things") == rows_of(pg, "things")
        assert len(feed.rows("things")) == 4


@pytest.mark.requirement("P-01")
def test_a_statement_costs_two_calls_whatever_its_rows(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE things (id int PRIMARY KEY, n int)")
    with closing(events(pg).catalog()) as catalog:
        install.install(catalog, events(pg))
    calls = (
        "SELECT sum(pg_stat_get_function_calls(oid)) FROM pg_proc WHERE proname LIKE 'emit_cdc%'"
    )
    with pg.connect(autocommit=True, options="-c track_functions=all") as writer:
        writer.execute("INSERT INTO things SELECT i, i FROM generate_series(1, 5000) i")
        writer.execute("UPDATE things SET n = 0")
        writer.execute("DELETE FROM things")
    wait_until(lambda: pg.execute(calls) == [(6,)])
    assert pg.execute("SELECT count(*) FROM headrace.events") == [(15000,)]


def test_rows_that_logical_replication_applies_are_captured(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    """It fires triggers of rows, and none of statements."""
    table = "CREATE TABLE things (id int PRIMARY KEY, n int)"
    with pg.server.database() as upstream:
        upstream.execute(f"{table}; CREATE PUBLICATION all_of_it FOR ALL TABLES")
        pg.execute(table)
        slot = f"to_{pg.name}"
        upstream.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        with reading(place_of(pg), tmp_path) as feed:
            feed.catch_up()
            pg.execute(
                f"""CREATE SUBSCRIPTION sub_{pg.name} CONNECTION '{upstream.url}'
                    PUBLICATION all_of_it
                    WITH (create_slot = false, slot_name = '{slot}', copy_data = false)"""
            )
            try:
                upstream.execute("INSERT INTO things SELECT i, i FROM generate_series(1, 3) i")
                upstream.execute("UPDATE things SET n = 0 WHERE id = 2")
                upstream.execute("DELETE FROM things WHERE id = 3")
                wait_until(lambda: pg.execute("SELECT count(*), min(n) FROM things") == [(2, 0)])
            finally:
                pg.execute(f"DROP SUBSCRIPTION sub_{pg.name}")
            assert [op for op, _ in written(feed, "things")] == [Op.INSERT] * 3 + [
                Op.UPDATE,
                Op.DELETE,
            ]
            assert feed.rows("things") == rows_of(pg, "things")


# --- values --------------------------------------------------------------------------------------

NESTED = "repeat('[', {0}) || repeat(']', {0})"

# What PostgreSQL stores, and might not read again.
VALUES = {
    "a NUL in json": ("j", r"""'"a\u0000b"'"""),
    "half a character in json": ("j", r"""'"\ud800"'"""),
    "half a character in a name": ("j", r"""'{"\udc00": 1}'"""),
    "json nested 3000 deep": ("j", f"({NESTED.format(3000)})::json"),
    "json nested 5000 deep": ("j", f"({NESTED.format(5000)})::json"),
    "jsonb nested 5000 deep": ("b", f"({NESTED.format(5000)})::jsonb"),
    "names that come twice": ("j", """' {"a" : 1, "a" : 2} '"""),
    "a large number": ("j", "'1e999999'"),
    "an array of json": ("ja", r"""ARRAY['"\u0000"', '{"\ud800": 0}']::json[]"""),
    "a composite with json": ("c", r"""ROW(1, '"\u0000"')::pair"""),
    "an array of composites": ("ca", r"""ARRAY[ROW(1, '"\udc00"')::pair]"""),
    "a domain over json": ("d", r"""'"\ud800\u0000"'"""),
    "a domain over a composite": ("dc", r"""ROW(1, '"\ud800"')::pair"""),
    "a value that is cast to json": ("w", "ROW(1)::weight"),
    "an array of those": ("wa", "ARRAY[ROW(1)::weight]"),
    "a domain over those": ("dw", "ROW(1)::weight"),
    "a composite with those": ("wc", "ROW(ROW(1)::weight)::parcel"),
    "no number": ("f", "'NaN'"),
    "no number, exactly": ("n", "'-Infinity'"),
    "no moment": ("t", "'infinity'"),
    "before our time": ("t", "'4714-11-24 00:00:00+00 BC'"),
    "xml": ("x", """'<?xml version="1.0"?><a>&lt;</a>'::xml"""),
    "an array with bounds": ("a", "'[0:1]={x,NULL}'"),
    "control characters": ("s", r"E'\x01\x1f\u2028\\u0000'"),
    "bytes": ("y", r"'\x00ff'"),
}  # fmt: skip
COLUMNS = """j json, b jsonb, ja json[], c pair, ca pair[], d document, dc paired, w weight,
    wa weight[], dw weighed, wc parcel, f float8, n numeric, t timestamptz, x xml, a text[],
    s text, y bytea, r int, "!row" int, "!key" int, "%s" int"""
VALUED = f"""
    CREATE TYPE pair AS (k int, j json);
    CREATE TYPE weight AS (g int);
    CREATE TYPE parcel AS (w weight);
    CREATE DOMAIN document AS json;
    CREATE DOMAIN paired AS pair;
    CREATE DOMAIN weighed AS weight;
    CREATE FUNCTION grams(int) RETURNS int LANGUAGE sql AS 'SELECT $1';
    CREATE FUNCTION as_document(weight) RETURNS json LANGUAGE plpgsql
        AS $$ BEGIN RETURN to_json(grams($1.g)); END $$;
    CREATE CAST (weight AS json) WITH FUNCTION as_document(weight);
    CREATE TABLE things (id int PRIMARY KEY, gone int, {COLUMNS});
    ALTER TABLE things DROP COLUMN gone;
    CREATE TABLE parted (part int, id int, {COLUMNS}, PRIMARY KEY (part, id))
        PARTITION BY LIST (part);
    CREATE TABLE a_part (id int NOT NULL, gone int, part int NOT NULL, {COLUMNS});
    ALTER TABLE a_part DROP COLUMN gone;
    ALTER TABLE parted ATTACH PARTITION a_part FOR VALUES IN (1)"""


@pytest.mark.requirement("P-01", "S1-30", "S1-32")
def test_no_statement_fails_whatever_values_it_writes(any_pg: PostgresDatabase) -> None:
    any_pg.execute(VALUED)
    values = [each for each in VALUES.values() if each[0] != "x" or _knows_xml(any_pg)]
    with closing(events(any_pg).catalog()) as catalog:
        install.install(catalog, events(any_pg))
    with any_pg.connect(autocommit=True) as writer:
        for number, (column, value) in enumerate(values):
            for table in ("things (id, ", "parted (part, id, "):
                first = number if "part" not in table else f"1, {number}"
                writer.execute(f"INSERT INTO {table}{column}) SELECT {first}, {value}".encode())
        for table in ("things", "parted"):
            writer.execute(f"UPDATE {table} SET r = 1".encode())
            writer.execute(f"DELETE FROM {table}".encode())
    query = """SELECT op::text, entity_id, key::text, count(old), count(new), count(operation)
               FROM headrace.events WHERE entity_type = %s GROUP BY 1, 2, 3"""
    for table, identity, key in (
        ("things", "{}", '{{"id":{}}}'),
        ("parted", "1,{}", '{{"part":1,"id":{}}}'),
    ):
        found = any_pg.execute(query, (f"public.{table}",))
        assert sorted(found) == sorted(
            (op, identity.format(at), key.format(at), op != "I", op != "D", 1)
            for op in "IUD"
            for at in range(len(values))
        )


def _knows_xml(database: PostgresDatabase) -> bool:
    try:
        return bool(database.execute("SELECT '<a/>'::xml"))
    except psycopg.errors.FeatureNotSupported:
        return False


@pytest.mark.parametrize("kind", ["json", "jsonb"])
def test_no_statement_fails_however_deep_its_values_are_nested(
    any_pg: PostgresDatabase, kind: str
) -> None:
    any_pg.execute(
        f"""CREATE TABLE plain (id int PRIMARY KEY, j {kind});
            CREATE TABLE things (id int PRIMARY KEY, j {kind});
            CREATE TABLE parted (id int PRIMARY KEY, j {kind}) PARTITION BY RANGE (id);
            CREATE TABLE a_part PARTITION OF parted DEFAULT"""
    )
    with closing(events(any_pg, tables=("things", "parted")).catalog()) as catalog:
        install.install(catalog, events(any_pg, tables=("things", "parted")))
    with any_pg.connect(autocommit=True) as writer:

        def insert(table: str, depth: int) -> bool:
            value = f"({NESTED.format(depth)})::{kind}"
            try:
                writer.execute(f"INSERT INTO {table} SELECT {depth}, {value}".encode())
            except psycopg.errors.StatementTooComplex:
                return False
            return True

        least, most = 1, 100_000
        while most - least > 1:
            depth = (least + most) // 2
            least, most = (depth, most) if insert("plain", depth) else (least, depth)
        # Which is the deepest that the server takes without us.
        for depth in range(least - 20, least):
            assert insert("things", depth)
            assert insert("parted", depth)
        for table in ("things", "parted"):
            writer.execute(f"UPDATE {table} SET id = -id".encode())
            writer.execute(f"DELETE FROM {table}".encode())
    assert any_pg.execute("SELECT count(key), count(entity_id) FROM headrace.events") == [
        (120, 120)
    ]


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_no_statement_fails_by_characters_that_the_encoding_lacks(
    servers: Servers, encoding: str
) -> None:
    server, name = servers[16], f"events_in_{encoding.lower()}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LOCALE 'C'".encode()
        )
        try:
            database = Lawless(server, name)
            database.execute(
                """CREATE TABLE things (id int PRIMARY KEY, j json, t text);
                   CREATE TABLE keys (t text PRIMARY KEY, j json)"""
            )
            with closing(events(database).catalog()) as catalog:
                install.install(catalog, events(database))
            database.execute(
                rf"""INSERT INTO things VALUES (1, '"\u20ac"'), (2, '"\u0000"');
                    INSERT INTO things VALUES (3, NULL, {BAD});
                    INSERT INTO keys VALUES ({BAD}, '"\u20ac"');
                    UPDATE things SET t = {BAD}; DELETE FROM things; DELETE FROM keys"""
            )
            assert database.execute("SELECT count(key) FROM headrace.events") == [(11,)]
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_values_that_cannot_be_parsed_again_are_in_the_event_as_they_were_written(
    any_pg: PostgresDatabase,
) -> None:
    any_pg.execute(
        """CREATE TYPE pair AS (k int, j json);
           CREATE TABLE things (id int PRIMARY KEY, j json, c pair)"""
    )
    with closing(events(any_pg).catalog()) as catalog:
        install.install(catalog, events(any_pg))
    any_pg.execute(r"""INSERT INTO things VALUES (1, '[ "\u0000"]', ROW(2, '"\ud800" '))""")
    query = "SELECT operation::text, new FROM headrace.events"
    assert any_pg.execute(query) == [
        (
            r"""{"id":1,"j":[ "\u0000"],"c":{"k":2,"j":"\ud800" }}""",
            r'''(1,"[ ""\\u0000""]","(2,""""""\\\\ud800"""" "")")''',
        )
    ]


@pytest.mark.parametrize("rows", [3, 1500])
@pytest.mark.parametrize("extra", ["n int", "n json", "n pair"])
def test_the_key_is_the_same_however_a_row_is_written(
    pg: PostgresDatabase, rows: int, extra: str
) -> None:
    """By the JSON of the row, or by its columns."""
    pg.execute(
        f"""CREATE TYPE pair AS (k int, j json);
            CREATE TYPE mood AS ENUM ('so "so"', 'glad');
            CREATE TABLE things (r int, "%s" text, t timestamp, b boolean, j jsonb, a int[], m mood,
                                 {extra}, PRIMARY KEY (r, "%s", t, b, j, a, m));
            CREATE TABLE single (r text PRIMARY KEY, {extra})"""
    )
    with closing(events(pg).catalog()) as catalog:
        install.install(catalog, events(pg))
    pg.execute(
        rf"""INSERT INTO things SELECT i, E'a\t"\\b', '2020-01-01', true, '{{"k": ["x"]}}',
                                      '{{1,2}}', 'so "so"' FROM generate_series(1, {rows}) i;
             INSERT INTO single SELECT E'\n' || i FROM generate_series(1, {rows}) i"""
    )
    query = "SELECT entity_id, key FROM headrace.events WHERE entity_type = %s ORDER BY id LIMIT 1"
    assert pg.execute(query, ("public.things",)) == [
        (
            '1,a\t"\\b,2020-01-01T00:00:00,true,{"k": ["x"]},[1,2],so "so"',
            {
                "r": 1,
                "%s": 'a\t"\\b',
                "t": "2020-01-01T00:00:00",
                "b": True,
                "j": {"k": ["x"]},
                "a": [1, 2],
                "m": 'so "so"',
            },
        )
    ]
    assert pg.execute(query, ("public.single",)) == [("\n1", {"r": "\n1"})]


# --- installations of earlier editions -----------------------------------------------------------

EARLIER = """
    CREATE TRIGGER "!headrace_rows" AFTER INSERT OR UPDATE OR DELETE ON {table}
        FOR EACH ROW EXECUTE FUNCTION headrace.emit_cdc_event();
    CREATE TRIGGER "!headrace_truncate" AFTER TRUNCATE ON {table}
        FOR EACH STATEMENT EXECUTE FUNCTION headrace.emit_cdc_event();
    CREATE TRIGGER "!headrace_columns" BEFORE INSERT OR UPDATE OR DELETE ON {table}
        FOR EACH STATEMENT EXECUTE FUNCTION headrace.note_columns();
    ALTER TABLE {table} ENABLE ALWAYS TRIGGER "!headrace_rows",
        ENABLE ALWAYS TRIGGER "!headrace_truncate", ENABLE ALWAYS TRIGGER "!headrace_columns";"""


def test_triggers_of_an_earlier_edition_are_replaced_without_a_new_snapshot(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        """CREATE TABLE users (id int PRIMARY KEY, n int);
           CREATE TABLE sales (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
           CREATE TABLE old_sales PARTITION OF sales FOR VALUES FROM (0) TO (10)"""
    )
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr(TriggerTarget, "is_current", TriggerTarget.is_complete)
        earlier.setattr(
            "headrace.sources.postgres_events.triggers.create",
            lambda _, table: EARLIER.format(table=table.path),
        )
        with reading(place_of(pg), tmp_path) as feed:
            feed.catch_up()
            pg.execute("INSERT INTO users VALUES (1, 1); INSERT INTO sales VALUES (1, 1)")
            feed.catch_up()
    assert names_of(pg, "users") == {f"!headrace_{n}" for n in ("rows", "truncate", "columns")}
    with reading(place_of(pg), tmp_path) as feed:
        pg.execute("INSERT INTO users VALUES (2, 2); INSERT INTO sales VALUES (2, 2)")
        feed.catch_up()
        for table in ("users", "sales"):
            assert feed.rows(table) == [{"id": 1, "n": 1}, {"id": 2, "n": 2}]
            assert feed.changes(Op.READ, Op.TRUNCATE, table=table) == []
            assert all(str(oid_of(pg, table)) in name for name in names_of(pg, table))
    with closing(events(pg).catalog()) as catalog:
        install.uninstall(catalog, "headrace")
    assert names_of(pg, "users") | names_of(pg, "sales") | names_of(pg, "old_sales") == set()


# --- taking everything out -----------------------------------------------------------------------


@pytest.mark.requirement("P-02")
@pytest.mark.parametrize("printed", [False, True])
def test_removed_nothing_is_left_of_partitions_either(
    pg: PostgresDatabase, tmp_path: Path, printed: bool
) -> None:
    ours = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE '!%'"
    schema = "SELECT count(*) FROM pg_namespace WHERE nspname = 'headrace'"
    pg.execute(
        """CREATE TABLE sales (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
           CREATE TABLE old_sales PARTITION OF sales FOR VALUES FROM (0) TO (10);
           CREATE TABLE new_sales (id int PRIMARY KEY, n int);
           CREATE TABLE parents (id int PRIMARY KEY);
           CREATE TABLE children (id int PRIMARY KEY) INHERITS (parents)"""
    )
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        pg.execute("ALTER TABLE sales ATTACH PARTITION new_sales FOR VALUES FROM (10) TO (20)")
        pg.execute("INSERT INTO sales VALUES (11, 1)")
        feed.catch_up()
    (shown,) = events(pg).remove(None, dry_run=True)
    assert pg.execute(schema) == [(1,)]
    if printed:
        pg.execute(shown.statement)
    else:
        assert events(pg).remove(None) == [shown]
    assert pg.execute(ours) == pg.execute(schema) == [(0,)]
    assert events(pg).remove(None) == []
    pg.execute("INSERT INTO sales VALUES (12, 1); INSERT INTO new_sales VALUES (13, 1)")
