"""`headrace postgres`: an event table is put into a database, and taken out without a trace."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.config import load
from headrace.sources.postgres import ddl
from headrace.testing import PostgresDatabase


class Site:
    """A config for a database whose tables belong to a user without any other rights."""

    def __init__(self, database: PostgresDatabase, folder: Path) -> None:
        self.database = database
        self.config = folder / "headrace.yaml"
        self.owner = database.name.replace("test_", "owner_")
        database.execute(f"CREATE ROLE {self.owner} LOGIN")
        database.execute(f"GRANT CREATE ON DATABASE {database.name} TO {self.owner}")
        database.execute(f"GRANT ALL ON SCHEMA public TO {self.owner}")
        self.url = database.url.replace("postgres@", f"{self.owner}@")
        self.run_sql("CREATE TABLE users (id int PRIMARY KEY, name text)")
        self.run_sql("CREATE TABLE orders (id int, line int, PRIMARY KEY (id, line))")
        self.write(self.url)

    def write(self, url: str, **settings: Any) -> None:
        source = {"type": "postgres", "url": url} | settings
        cdc = {"storage": "event_table"}
        self.config.write_text(json.dumps({"sources": {"shop": source}, "cdc": cdc}))

    def run_sql(self, statements: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statements.encode())
            return cursor.fetchall() if cursor.description else []

    def command(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["postgres", *arguments, "--config", str(self.config)])

    def objects(self) -> list[tuple[Any, ...]]:
        """Everything that is not the system's."""
        return self.run_sql(
            """SELECT tgname::text FROM pg_trigger
               UNION ALL SELECT proname FROM pg_proc WHERE oid >= 16384
               UNION ALL SELECT relname FROM pg_class WHERE oid >= 16384 AND relname !~ '^pg_toast'
               UNION ALL SELECT nspname FROM pg_namespace WHERE oid >= 16384 ORDER BY 1"""
        )


@pytest.fixture
def site(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Site]:
    made = Site(pg, tmp_path)
    yield made
    pg.execute(f"DROP OWNED BY {made.owner}; DROP ROLE {made.owner}")


@pytest.mark.requirement("S1-30", "S1-32")
def test_an_owner_installs_without_being_a_superuser_and_writers_need_no_rights(
    site: Site,
) -> None:
    result = site.command("install", "shop")
    assert result.exit_code == 0, result.output
    assert "public.users writes its changes to headrace.events" in result.output
    assert site.command("install", "shop").exit_code == 0  # nothing is missing now
    site.database.execute("CREATE ROLE writer_of_users")
    try:
        site.run_sql("GRANT ALL ON users, orders TO writer_of_users")
        site.database.execute(
            """SET ROLE writer_of_users;
               INSERT INTO users VALUES (7, 'ann');
               UPDATE users SET name = 'bob';
               INSERT INTO orders VALUES (1, 2);
               DELETE FROM users"""
        )
    finally:
        site.database.execute("DROP OWNED BY writer_of_users; DROP ROLE writer_of_users")
    entries = site.run_sql(
        "SELECT event_type, entity_type, entity_id, operation, key FROM headrace.events ORDER BY id"
    )
    ann, bob = {"id": 7, "name": "ann"}, {"id": 7, "name": "bob"}
    assert entries == [
        ("entity:created", "public.users", "7", ann, {"id": 7}),
        ("entity:updated", "public.users", "7", bob, {"id": 7}),
        ("entity:created", "public.orders", "1,2", {"id": 1, "line": 2}, {"id": 1, "line": 2}),
        ("entity:deleted", "public.users", "7", bob, {"id": 7}),
    ]
    assert [(f.name, f.detail) for f in load(site.config).sources[0].check() if not f.ok] == []


def test_removed_nothing_is_left(site: Site) -> None:
    before = site.objects()
    assert site.command("install", "shop").exit_code == 0
    assert site.objects() != before
    result = site.command("remove", "shop")
    assert result.exit_code == 0, result.output
    assert site.objects() == before


def test_a_schema_that_an_administrator_has_made_will_do_and_stays(site: Site) -> None:
    site.database.execute(f"REVOKE CREATE ON DATABASE {site.database.name} FROM {site.owner}")
    site.database.execute(f"CREATE SCHEMA audit; GRANT ALL ON SCHEMA audit TO {site.owner}")
    site.write(site.url, schema="audit")
    before = site.objects()
    result = site.command("install", "shop")
    assert result.exit_code == 0, result.output
    site.run_sql("INSERT INTO users VALUES (1, 'ann')")
    assert site.run_sql("SELECT count(*) FROM audit.events") == [(1,)]
    assert site.command("remove", "shop").exit_code == 0
    assert site.objects() == before
    site.write(site.url)
    refused = site.command("install", "shop")
    assert refused.exit_code == 1
    assert "the event table cannot be created" in refused.output
    assert "headrace postgres install --print" in refused.output


def test_both_ways_of_capturing_may_share_a_database(site: Site) -> None:
    """The event trigger of logical replication has functions in the same schema."""
    with psycopg.connect(site.database.url, autocommit=True) as connection:
        connection.execute(ddl.SETUP)
        connection.execute(f"GRANT ALL ON SCHEMA headrace TO {site.owner}")
    before = site.objects()
    assert site.command("install", "shop").exit_code == 0
    assert site.command("remove", "shop").exit_code == 0
    assert site.objects() == before


def test_what_is_printed_for_an_administrator_does_the_same(site: Site) -> None:
    before = site.objects()
    shown = site.command("install", "shop", "--print")
    assert shown.exit_code == 0, shown.output
    assert site.objects() == before
    site.run_sql(shown.stdout)
    printed = site.objects()
    site.run_sql(site.command("remove", "shop", "--print").stdout)
    assert site.objects() == before
    assert site.command("install", "shop").exit_code == 0
    assert site.objects() == printed


def test_a_table_of_somebody_else_is_named_with_the_statements_for_its_owner(site: Site) -> None:
    site.database.execute("CREATE TABLE foreign_ones (id int PRIMARY KEY)")
    result = site.command("install", "shop")
    assert result.exit_code == 1
    assert "table public.foreign_ones: it has no triggers, and is not ours" in result.output
    assert 'CREATE OR REPLACE TRIGGER "!headrace_insert_' in result.output
    source = load(site.config).sources[0]
    assert {f.name for f in source.check() if not f.ok} == {"table public.foreign_ones"}


def test_a_source_without_an_event_table_is_refused(site: Site) -> None:
    site.config.write_text(
        json.dumps({"sources": {"shop": {"type": "postgres", "url": "dbname=shop"}}})
    )
    result = site.command("install", "shop")
    assert result.exit_code == 1
    assert "source shop has no event table" in result.output
