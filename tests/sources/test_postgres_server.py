"""What a source needs of its server: privileges, settings, publications, slots and encodings."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headrace.change.event import Op
from headrace.secret import Secret
from headrace.sources import Phase, Status
from headrace.testing import PostgresDatabase, PostgresServer, wait_until
from tests.conftest import SETTINGS, Servers, install_of
from tests.sources.captures import TIMEOUT
from tests.sources.capturing import assert_mended_by_a_full_copy, captured, image

# --- what the server refuses ---------------------------------------------------------------------


@contextmanager
def role(database: PostgresDatabase, attributes: str) -> Iterator[str]:
    """A role of the server that may do everything in one database."""
    name = f"role_{database.name}"
    database.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'open sesame' {attributes}")
    database.execute(f"GRANT ALL ON DATABASE {database.name} TO {name}")
    database.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}")
    try:
        yield name
    finally:
        database.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def url_of(database: PostgresDatabase, user: str, password: str = "open sesame") -> Secret:
    return Secret(database.url.replace("postgres@", f"{user}:{password.replace(' ', '%20')}@"))


def refused(database: PostgresDatabase, folder: Path, **settings: Any) -> Status:
    """The status of a capture that the server refuses."""
    with captured(database, folder, start=False, **settings) as feed:
        feed.start()
        return feed.until_halted()


def test_a_user_who_may_not_replicate_is_named(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with role(pg, "NOREPLICATION") as name:
        status = refused(pg, tmp_path, url=url_of(pg, name))
    assert "WAL sender" in status.error
    assert "headrace check" in status.hint


def test_a_user_who_may_not_publish_is_told_what_is_missing(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with role(pg, "REPLICATION") as name:
        status = refused(pg, tmp_path, url=url_of(pg, name))
    assert "must be owner of table users" in status.error


def test_a_wrong_password_halts_and_is_not_shown(
    own_server: PostgresServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with role(database, "REPLICATION SUPERUSER") as name:
            hba = own_server.data / "pg_hba.conf"
            lines = f"host all {name} 127.0.0.1/32 scram-sha-256\n"
            hba.write_text(lines + hba.read_text())
            database.execute("SELECT pg_reload_conf()")
            secret = "pen sesame, definitely"

            def wrong() -> bool:
                with pytest.raises(psycopg.OperationalError) as caught:
                    psycopg.connect(url_of(database, name, secret).reveal()).close()
                return "password authentication failed" in str(caught.value)

            wait_until(wrong, message="the server asks for passwords")
            status = refused(database, tmp_path, url=url_of(database, name, secret))
            assert f'password authentication failed for user "{name}"' in status.error
            assert secret not in f"{status}{caplog.text}"
            assert "definitely" not in f"{status}{caplog.text}"
            with captured(database, tmp_path, url=url_of(database, name)) as feed:
                feed.until_caught_up()


def test_a_server_without_logical_wal_is_named(tmp_path: Path) -> None:
    settings = SETTINGS | {"wal_level": "replica"}
    with (
        PostgresServer(install_of(16), settings=settings) as server,
        server.database() as database,
    ):
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        status = refused(database, tmp_path)
    assert "wal_level" in status.error
    assert "headrace check" in status.hint


def test_an_event_trigger_needs_a_superuser(pg: PostgresDatabase, tmp_path: Path) -> None:
    with role(pg, "REPLICATION") as name:
        pg.execute(f"GRANT ALL ON SCHEMA public TO {name}")
        with psycopg.connect(url_of(pg, name).reveal(), autocommit=True) as connection:
            connection.execute("CREATE TABLE users (id int PRIMARY KEY)")
        status = refused(pg, tmp_path, url=url_of(pg, name), ddl=True)
    assert "permission denied to create event trigger" in status.error


# --- made by somebody else -----------------------------------------------------------------------


def test_a_publication_made_before_is_used_with_its_columns_and_filter(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    any_pg.execute(
        "CREATE TABLE users (id int PRIMARY KEY, secret text, name text);"
        "CREATE TABLE others (id int PRIMARY KEY);"
        "INSERT INTO users VALUES (1, 's', 'a'), (-1, 's', 'b');"
        "CREATE PUBLICATION mine FOR TABLE users (id, name) WHERE (id > 0)"
    )
    with captured(any_pg, tmp_path, publication="mine", tables=("public.users",)) as feed:
        any_pg.execute("INSERT INTO users VALUES (2, 's', 'c'), (-2, 's', 'd')")
        any_pg.execute("INSERT INTO others VALUES (1)")
        schema, *rows = feed.changes()
        names = any_pg.execute("SELECT pubname FROM pg_publication ORDER BY 1")
        assert names == [("mine",), ("mine_inserts",)]
    assert [column.name for column in schema.table.columns] == ["id", "name"]
    assert [(row.op, image(row.after)) for row in rows] == [
        (Op.READ, {"id": 1, "name": "a"}),
        (Op.INSERT, {"id": 2, "name": "c"}),
    ]


def test_a_publication_of_all_tables_is_used(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY); CREATE TABLE others (id int PRIMARY KEY)")
    pg.execute("CREATE PUBLICATION mine FOR ALL TABLES")
    with captured(pg, tmp_path, publication="mine", tables=("public.users",)) as feed:
        pg.execute("INSERT INTO users VALUES (1); INSERT INTO others VALUES (1)")
        assert [change.table.name for change in feed.streamed()] == ["users"]


def test_a_partitioned_table_published_by_its_leaves_is_refused_with_the_fix(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        "CREATE TABLE events (id int PRIMARY KEY) PARTITION BY HASH (id);"
        "CREATE TABLE events_0 PARTITION OF events FOR VALUES WITH (MODULUS 1, REMAINDER 0);"
        "CREATE PUBLICATION mine FOR TABLE events"
    )
    status = refused(pg, tmp_path, publication="mine")
    fix = 'ALTER PUBLICATION "mine" SET (publish_via_partition_root = true)'
    assert fix in f"{status.error} {status.hint}"


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_slot_made_before_is_read_from_where_it_stands(
    pg: PostgresDatabase, tmp_path: Path, snapshot: bool
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    pg.execute("INSERT INTO users VALUES (1, 'before the slot')")
    pg.execute("CREATE PUBLICATION headrace_shop FOR TABLE users")
    slot = f"made_{pg.name}"
    pg.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    pg.execute("INSERT INTO users VALUES (2, 'after the slot')")
    pg.execute("UPDATE users SET name = name || '!'")
    with captured(pg, tmp_path, slot=slot, snapshot=snapshot) as feed:
        pg.execute("INSERT INTO users VALUES (3, 'later')")
        ops = [change.op for change in feed.changes() if change.op is not Op.SCHEMA]
        if snapshot:
            assert ops == [Op.READ, Op.READ, Op.INSERT]
            feed.assert_replays("users")
        else:
            assert ops == [Op.INSERT, Op.UPDATE, Op.UPDATE, Op.INSERT]


def test_a_slot_older_than_its_publication_is_explained_or_used(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    any_pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    slot = f"made_{any_pg.name}"
    any_pg.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    any_pg.execute("INSERT INTO users VALUES (1, 'before the publication')")
    with captured(any_pg, tmp_path, slot=slot, start=False) as feed:
        feed.start()
        over = (Phase.STREAMING, Phase.HALTED)
        wait_until(lambda: feed.status.phase in over, timeout=TIMEOUT, message="it is settled")
        if feed.status.phase is Phase.HALTED:
            assert "publication" in feed.status.error
            assert_mended_by_a_full_copy(feed)
        else:
            feed.assert_replays("users")


# --- values that cannot be read ------------------------------------------------------------------


class Lawless(PostgresDatabase):
    """A database that does not know its encoding and takes any bytes for text."""

    @property
    def url(self) -> str:
        """For a client that writes UTF-8."""
        return self.server.url(self.name, client_encoding="utf8")


@pytest.fixture
def lawless(servers: Servers) -> Iterator[PostgresDatabase]:
    with psycopg.connect(servers[16].url(), autocommit=True) as connection:
        database = Lawless(servers[16], "lawless")
        connection.execute(
            "CREATE DATABASE lawless ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'"
        )
        yield database
        database.drop_slots()
        connection.execute("DROP DATABASE lawless WITH (FORCE)")


BAD = "convert_from('\\x62ff64', 'SQL_ASCII')"


def test_a_streamed_value_that_cannot_be_read_stops_only_its_table(
    lawless: PostgresDatabase, tmp_path: Path
) -> None:
    lawless.execute(
        "CREATE TABLE good (id int PRIMARY KEY, name text);"
        "CREATE TABLE users (id int PRIMARY KEY, name text); INSERT INTO users VALUES (1, 'ok')"
    )
    with captured(lawless, tmp_path) as feed:
        lawless.execute(f"INSERT INTO users VALUES (2, {BAD})")
        lawless.execute("INSERT INTO good VALUES (1, 'grün')")
        lawless.execute("INSERT INTO users VALUES (3, 'fine')")
        bad, good, fine = feed.streamed()
        assert list(feed.status.errored) == ["public.users"]
        assert "UTF-8" in feed.status.errored["public.users"]
        assert (good.op, image(good.after)) == (Op.INSERT, {"id": 1, "name": "grün"})
        for change in (bad, fine):
            assert (change.op, change.table.name) == (Op.MESSAGE, "users")
            assert (image(change.after) or {})["pgoutput"]
        feed.restart()
        lawless.execute("INSERT INTO users VALUES (4, 'fine')")
        assert feed.streamed()[-1].op is Op.MESSAGE
        assert list(feed.status.errored) == ["public.users"]
        # Mended, and copied again.
        lawless.execute("UPDATE users SET name = 'mended' WHERE id = 2")
        feed.until_caught_up()
        feed.capture.copy_again(["public.users"])
        feed.until(lambda: not feed.status.errored, "the table is healthy")
        feed.until_streaming()
        lawless.execute("INSERT INTO users VALUES (5, 'again')")
        feed.assert_replays("users", "good")


def test_a_type_nested_too_deep_stops_only_its_table(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE good (id int PRIMARY KEY); CREATE DOMAIN d0 AS int")
    for level in range(70):
        pg.execute(f"CREATE DOMAIN d{level + 1} AS d{level}")
    pg.execute("CREATE TABLE streamed (id int PRIMARY KEY, v d70)")
    pg.execute("CREATE TABLE copied (id int PRIMARY KEY, v d70)")
    pg.execute("INSERT INTO copied VALUES (1, 1); INSERT INTO streamed VALUES (1, NULL)")
    with captured(pg, tmp_path) as feed:
        assert list(feed.status.errored) == ["public.copied"]
        pg.execute("INSERT INTO streamed VALUES (2, 2); INSERT INTO good VALUES (1)")
        feed.assert_replays("good")
        assert feed.status.errored.keys() == {"public.copied", "public.streamed"}
        assert "nested" in feed.status.errored["public.streamed"]
        pg.execute("ALTER TABLE copied DROP COLUMN v; ALTER TABLE streamed DROP COLUMN v")
        feed.until_caught_up()
        feed.capture.copy_again(["copied", "streamed"])
        feed.until(lambda: not feed.status.errored, "the tables are healthy")
        feed.until_streaming()
        feed.assert_replays("copied", "streamed", "good")


def test_a_copied_value_that_cannot_be_read_stops_only_its_table(
    lawless: PostgresDatabase, tmp_path: Path
) -> None:
    lawless.execute(
        "CREATE TABLE good (id int PRIMARY KEY, name text); INSERT INTO good VALUES (1, 'fine');"
        f"CREATE TABLE users (id int PRIMARY KEY, name text); INSERT INTO users VALUES (1, {BAD})"
    )
    with captured(lawless, tmp_path) as feed:
        assert list(feed.status.errored) == ["public.users"]
        lawless.execute("INSERT INTO good VALUES (2, 'fine')")
        feed.assert_replays("good")
        lawless.execute("UPDATE users SET name = 'mended'")
        feed.until_caught_up()
        feed.capture.copy_again(["users"])
        feed.until(lambda: not feed.status.errored, "the table is healthy")
        feed.until_streaming()
        feed.assert_replays("users", "good")


def test_a_database_in_another_encoding_is_captured_in_utf8(
    servers: Servers, tmp_path: Path
) -> None:
    server = servers[16]
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'")
        database = PostgresDatabase(server, "latin")
        try:
            database.execute('CREATE TABLE "größe" (id int PRIMARY KEY, "naïve" text)')
            database.execute("""INSERT INTO "größe" VALUES (1, 'Ünïcode')""")
            with captured(database, tmp_path) as feed:
                database.execute("""INSERT INTO "größe" VALUES (2, 'déjà')""")
                read, insert = feed.changes(Op.READ, Op.INSERT)
                assert image(read.after) == {"id": 1, "naïve": "Ünïcode"}
                assert image(insert.after) == {"id": 2, "naïve": "déjà"}
                assert insert.table.name == "größe"
        finally:
            database.drop_slots()
            connection.execute("DROP DATABASE latin WITH (FORCE)")
