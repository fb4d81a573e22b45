"""Whoever may write to a captured table, or log in, gets no further by what Headrace installs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from headrace.change.event import Op
from headrace.errors import SourceRefused
from headrace.sources.postgres import ddl
from headrace.sources.postgres_events import PostgresEvents
from headrace.testing import PostgresDatabase, reading
from tests.sources.capturing import captured, image
from tests.sources.test_postgres_events import place_of

EVIL = """
    CREATE FUNCTION pg_temp.evil() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
        IF current_user <> session_user THEN
            EXECUTE format('ALTER ROLE %I SUPERUSER', session_user);
        END IF;
        RETURN true;
    END $$"""


@contextmanager
def weak(database: PostgresDatabase, *grants: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of a role that may do little."""
    name = f"weak_{database.name}"
    database.execute(f"CREATE ROLE {name} LOGIN")
    for grant in grants:
        database.execute(f"GRANT {grant} TO {name}")
    try:
        url = make_conninfo(database.url, user=name)
        with psycopg.connect(url, autocommit=True) as connection:
            yield connection
        assert database.execute("SELECT rolsuper FROM pg_roles WHERE rolname = %s", (name,)) == [
            (False,)
        ]
    finally:
        database.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


def disguise(writer: psycopg.Connection[Any]) -> None:
    """Temporary views with the names of catalogs, which call a function of the writer's."""
    writer.execute(EVIL)
    for catalog in ("pg_class", "pg_namespace", "pg_attribute", "pg_index", "pg_constraint",
                    "pg_type", "pg_roles"):  # fmt: skip
        columns = writer.execute(
            """SELECT string_agg(quote_ident(attname), ', ') FROM pg_catalog.pg_attribute
               WHERE attrelid = %s::regclass AND attnum > 0
                 AND atttypid <> 'anyarray'::regtype""",
            (f"pg_catalog.{catalog}",),
        ).fetchone()
        assert columns is not None
        writer.execute(
            f"CREATE TEMP VIEW {catalog} AS SELECT {columns[0]} FROM pg_catalog.{catalog}"
            " WHERE pg_temp.evil()"
        )


def test_a_temporary_view_is_not_taken_for_a_catalog(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE notes (id int PRIMARY KEY)")
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        with weak(pg, "INSERT ON notes") as writer:
            disguise(writer)
            writer.execute("INSERT INTO public.notes VALUES (1)")
        feed.catch_up()
        assert len(feed.changes(Op.INSERT, table="notes")) == 1


def test_nor_by_the_event_trigger_also_where_an_older_one_was_installed(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE notes (id int PRIMARY KEY)")
    with pg.connect(autocommit=True) as connection:
        connection.execute(ddl.SETUP.replace(", pg_temp", "").encode())
        connection.execute(ddl.TRIGGERS)
    with captured(pg, tmp_path, ddl=True), weak(pg) as writer:
        writer.execute("CREATE TEMP TABLE own (id int)")
        disguise(writer)
        writer.execute("ALTER TABLE own ADD COLUMN more int")
    found = pg.execute("SELECT obj_description('headrace.tell_ddl'::regproc, 'pg_proc')")
    assert found == [(ddl.EDITION,)]


def test_a_schema_of_somebody_else_gets_no_event_trigger(pg: PostgresDatabase) -> None:
    with weak(pg, f"CREATE ON DATABASE {pg.name}") as writer:
        writer.execute("CREATE SCHEMA headrace")
        source = place_of(pg).source()
        assert isinstance(source, PostgresEvents)
        catalog = source.catalog()
        with pytest.raises(SourceRefused, match="belongs to weak_"):
            ddl.install(catalog)
        catalog.close()


def test_a_cast_of_a_writers_type_is_not_used(pg: PostgresDatabase, tmp_path: Path) -> None:
    """row_to_json would call it, as whoever has installed the event table."""
    with weak(pg, "CREATE ON SCHEMA public") as owner:
        owner.execute("CREATE TYPE mood AS ENUM ('glad')")
        owner.execute("CREATE TABLE moods (id int PRIMARY KEY, mood mood, moods mood[])")
        owner.execute(
            """CREATE FUNCTION told(mood) RETURNS json LANGUAGE plpgsql AS $$ BEGIN
                   IF current_user <> session_user THEN
                       EXECUTE format('ALTER ROLE %I SUPERUSER', session_user);
                   END IF;
                   RETURN '1';
               END $$"""
        )
        owner.execute("CREATE CAST (mood AS json) WITH FUNCTION told(mood)")
        with reading(place_of(pg, trim=False), tmp_path) as feed:
            feed.catch_up()
            owner.execute("INSERT INTO moods VALUES (1, 'glad', '{glad}'), (2, NULL, NULL)")
            feed.catch_up()
            assert [image(c.after) for c in feed.changes(Op.INSERT, table="moods")] == [
                {"id": 1, "mood": "glad", "moods": ["glad"]},
                {"id": 2, "mood": None, "moods": None},
            ]
        query = """SELECT operation, key, entity_id FROM headrace.events
                   WHERE entity_type = 'public.moods' ORDER BY id"""
        assert pg.execute(query) == [
            ({"id": 1, "mood": "glad", "moods": "{glad}"}, {"id": 1}, "1"),
            ({"id": 2, "mood": None, "moods": None}, {"id": 2}, "2"),
        ]


@pytest.mark.parametrize("columns", ["accounts", "bogus"])
def test_a_writer_cannot_say_that_its_rows_are_those_of_another_table(
    pg: PostgresDatabase, tmp_path: Path, columns: str
) -> None:
    pg.execute("CREATE TABLE accounts (id int PRIMARY KEY, balance text)")
    pg.execute("CREATE TABLE notes (id int PRIMARY KEY, words text)")
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        pg.execute("INSERT INTO accounts VALUES (1, '10')")
        feed.catch_up()
        query = "SELECT columns FROM headrace.relations WHERE described ->> 'name' = %s"
        known = [row[0] for row in pg.execute(query, (columns,))] or ["bogus"]
        [(number,)] = pg.execute("SELECT 'notes'::regclass::oid::bigint")
        forged = [f"{known[0]},public.accounts,id", f"x,{known[0]},public.accounts,false,id"]
        with weak(pg, "INSERT ON notes") as writer:
            for id_, note in enumerate(forged, 1):
                writer.execute(
                    """INSERT INTO notes SELECT %s, CASE
                           WHEN set_config(%s, %s, true) IS NOT NULL THEN '1000000' END""",
                    (id_, f"headrace.told_{number}", f"{{{note}}}"),
                )
        feed.catch_up()
        assert [image(c.after) for c in feed.changes(Op.INSERT)] == [
            {"id": 1, "balance": "10"},
            {"id": 1, "words": "1000000"},
            {"id": 2, "words": "1000000"},
        ]
        assert feed.stream.status().errored == {}


def test_an_event_whose_columns_are_unknown_stops_only_its_table(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE accounts (id int PRIMARY KEY)")
    pg.execute("CREATE TABLE notes (id int PRIMARY KEY)")
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        with pg.connect(autocommit=False) as writer:
            writer.execute("INSERT INTO accounts VALUES (1); INSERT INTO notes VALUES (1)")
            writer.execute(
                """UPDATE headrace.events e SET columns = (
                       SELECT columns FROM headrace.events WHERE entity_type = 'public.accounts')
                   WHERE entity_type = 'public.notes'"""
            )
        feed.catch_up()
        assert list(feed.stream.status().errored) == ["public.notes"]
        assert len(feed.changes(Op.INSERT)) == 1
        pg.execute("UPDATE headrace.relations SET columns = columns || '!'")
        pg.execute("INSERT INTO accounts VALUES (2)")
        feed.catch_up()
        assert len(feed.changes(Op.INSERT, table="accounts")) == 2


def test_a_schema_that_somebody_else_has_made_is_not_used(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE notes (id int PRIMARY KEY)")
    with weak(pg, f"CREATE ON DATABASE {pg.name}") as writer:
        writer.execute("CREATE SCHEMA headrace")
        stream = place_of(pg).source().open(None, lambda table: table)
        with pytest.raises(SourceRefused, match="belongs to weak_"):
            next(iter(stream))


def test_a_message_that_looks_like_ours_fails_one_table_at_worst(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 1)")
    pg.execute("CREATE TABLE other (id int PRIMARY KEY)")
    [(oid,)] = pg.execute("SELECT 't'::regclass::oid::bigint")
    column = {"name": "id", "type_id": 23, "modifier": -1, "key": True, "number": 1}
    look = {"oid": oid, "schema": "public", "name": "t", "identity": "default", "attributes": 2}
    with captured(pg, tmp_path) as feed:
        with weak(pg) as writer:
            content = msgspec.json.encode({"tables": [look | {"columns": [column]}]})
            writer.execute(
                "SELECT pg_logical_emit_message(true, 'headrace.look', %s::bytea)", (content,)
            )
        pg.execute("INSERT INTO t VALUES (2, 2)")
        pg.execute("INSERT INTO other VALUES (1)")
        assert len(feed.changes(Op.INSERT, table="other")) == 1
        feed.capture.copy_again(["public.t"])
        feed.until(lambda: not feed.status.errored, "it is whole again")
        feed.until_streaming()
        feed.assert_replays("t", "other")
