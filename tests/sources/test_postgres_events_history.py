"""An event table through crashes, promotions, dumps, other readers and triggers of triggers."""

import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.change.event import Op
from headrace.errors import PositionLost, SourceReplaced, SourceUnavailable
from headrace.sources.postgres_events import install
from headrace.sources.postgres_events.catalog import EventCatalog
from headrace.testing import PostgresDatabase, PostgresServer, Setting, reading
from tests.conftest import install_of
from tests.sources.capturing import image
from tests.sources.test_postgres_events import events, place_of, position

REPLICA: dict[str, Setting] = {"wal_level": "replica"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for new tables, and steps of an idle position, every moment."""
    monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 0.05)
    monkeypatch.setattr("headrace.sources.postgres_events.stream._IDLE_SECONDS", 0.0)


def rows_of(database: PostgresDatabase, table: str) -> list[dict[str, Any]]:
    """What is in a table."""
    found = database.execute(f"SELECT to_json(t)::text FROM {table} t ORDER BY id")
    return [image(text.encode()) or {} for (text,) in found]


# --- the order of changes ------------------------------------------------------------------------


def test_what_triggers_write_comes_after_what_they_were_run_for(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        """CREATE TABLE touched (id int PRIMARY KEY, n int);
           CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               UPDATE touched SET n = n + 100 WHERE id = new.id; RETURN NULL; END $$;
           CREATE TRIGGER a_touch AFTER INSERT ON touched
               FOR EACH ROW EXECUTE FUNCTION touch();
           CREATE TABLE spread (id int PRIMARY KEY, n int);
           CREATE FUNCTION spread() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               IF new.n = 1 THEN UPDATE spread SET n = 100 + new.id WHERE id = new.id + 1; END IF;
               RETURN NULL; END $$;
           CREATE TRIGGER z_spread AFTER UPDATE ON spread
               FOR EACH ROW EXECUTE FUNCTION spread();
           INSERT INTO spread VALUES (1, 0), (2, 0), (3, 0);
           CREATE TABLE bosses (id int PRIMARY KEY);
           CREATE TABLE staff (id int PRIMARY KEY, boss int REFERENCES bosses ON DELETE CASCADE);
           INSERT INTO bosses VALUES (1); INSERT INTO staff VALUES (1, 1)"""
    )
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        after = feed.log.latest_sequence
        with pg.connect(autocommit=False) as writer:
            writer.execute("INSERT INTO touched VALUES (1, 1), (2, 2)")
            writer.execute("UPDATE spread SET n = 1")
            writer.execute("UPDATE spread SET n = 1 WHERE id = 3")
            writer.execute("DELETE FROM bosses")
        feed.catch_up()
        for table in ("touched", "spread"):
            assert feed.rows(table) == rows_of(pg, table)
        told = feed.log.read(after, limit=1000)
        assert [c.table.name for c in told if c.op is Op.DELETE] == ["bosses", "staff"]
        places = [(c.position.commit, c.position.own) for c in told]
        assert places == sorted(places)


def test_a_large_transaction_keeps_that_order_too(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres_events.stream._PAGE", 3)
    test_what_triggers_write_comes_after_what_they_were_run_for(pg, tmp_path)


def test_a_transaction_that_commits_late_has_the_later_position(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        with pg.connect(autocommit=False) as late:
            late.execute("INSERT INTO users VALUES (1)")
            pg.execute("INSERT INTO users VALUES (2)")
            pg.execute("INSERT INTO users VALUES (3)")
            feed.catch_up()
        feed.catch_up()
        feed.reopen()
        pg.execute("INSERT INTO users VALUES (4)")
        feed.catch_up()
        told = feed.changes(Op.INSERT, table="users")
        assert [c.key for c in told] == [b'{"id":%d}' % id_ for id_ in (2, 3, 1, 4)]
        commits = [c.position.commit for c in told]
        assert commits == sorted(set(commits))
        sequences = [position(c).lsn for c in told]
        assert sequences == commits


# --- servers that forget -------------------------------------------------------------------------


def test_numbers_that_a_crash_gives_out_again_are_not_taken_for_known_ones(tmp_path: Path) -> None:
    """Rolled back, or committed without waiting: no record of them has reached the disk."""
    # The server writes nothing to the disk by itself for a long time.
    settings = REPLICA | {"wal_writer_delay": "10s", "autovacuum": False}
    with PostgresServer(install_of(16), settings=settings) as server, server.database() as pg:
        pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with reading(place_of(pg, trim=False), tmp_path) as feed:
            feed.catch_up()
            pg.execute("CHECKPOINT")
            with pg.connect(autocommit=False) as writer:
                for _ in range(5):
                    writer.execute("INSERT INTO users VALUES (99)")
                    writer.rollback()
                writer.execute("SET synchronous_commit = off")
                writer.commit()
                for id_ in range(3):
                    writer.execute("INSERT INTO users VALUES (%s)", (id_,))
                    writer.commit()
            for _ in range(5):
                feed.step()
            feed.close()
            server.kill()
            server.start()
            for id_ in range(10, 20):
                pg.execute("INSERT INTO users VALUES (%s)", (id_,))
            feed.reopen()
            feed.catch_up()
            assert feed.rows("users") == rows_of(pg, "users")


def test_a_promoted_standby_is_noticed_before_its_first_checkpoint(tmp_path: Path) -> None:
    with PostgresServer(install_of(16), settings=REPLICA) as server, server.database() as pg:
        pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with reading(place_of(pg), tmp_path) as feed:
            feed.catch_up()
            feed.close()
            # Pages that the checkpoint of the promotion has to write, which takes its time.
            pg.execute("CREATE TABLE big AS SELECT repeat('x', 500) FROM generate_series(1, 50000)")
            server.kill()
            signal = server.data / "standby.signal"
            signal.touch()
            subprocess.run(["chown", "--reference", server.data, signal], check=True)
            server.start()
            pg.execute("SELECT pg_promote(true)")
            feed.reopen()
            with pytest.raises(SourceReplaced, match="a standby was promoted"):
                feed.step()


def test_a_dump_loaded_into_another_server_starts_afresh(tmp_path: Path) -> None:
    install_16 = install_of(16)
    with (
        PostgresServer(install_16, settings=REPLICA) as old_server,
        PostgresServer(install_16, settings=REPLICA) as new_server,
        old_server.database() as old,
        new_server.database() as new,
    ):
        old.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with old.connect(autocommit=True) as connection:
            connection.execute(
                """DO $$ BEGIN FOR i IN 1..3000 LOOP
                       PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"""
            )
        with reading(place_of(old), tmp_path / "old") as feed:
            feed.catch_up()
            old.execute("INSERT INTO users VALUES (1)")
            while old.execute("SELECT trimmed FROM headrace.state") == [("0",)]:
                feed.catch_up()
        old.execute("INSERT INTO users VALUES (2)")
        dump = subprocess.run(
            [install_16.bin / "pg_dump", old.url], capture_output=True, check=True
        ).stdout
        subprocess.run(
            [install_16.bin / "psql", "-q", "-v", "ON_ERROR_STOP=1", new.url],
            input=dump, capture_output=True, check=True,
        )  # fmt: skip
        new.execute("DROP TABLE marks")
        with reading(place_of(new), tmp_path / "new") as feed:
            for id_ in (3, 4):
                feed.catch_up()
                new.execute("INSERT INTO users VALUES (%s)", (id_,))
                feed.catch_up()
                feed.reopen()
            assert [row["id"] for row in feed.rows("users")] == [1, 2, 3, 4]
            assert len(feed.changes(Op.INSERT, table="users")) == 2


# --- others at the event table -------------------------------------------------------------------


@pytest.mark.parametrize("way", ["TRUNCATE", "DELETE FROM"])
def test_events_removed_by_hand_are_missed(pg: PostgresDatabase, tmp_path: Path, way: str) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with reading(place_of(pg, trim=False), tmp_path) as feed:
        feed.catch_up()
        pg.execute("INSERT INTO users VALUES (1)")
        pg.execute(f"{way} headrace.events")
        with pytest.raises(PositionLost, match="somebody else reads this event table"):
            feed.catch_up()


def test_what_a_table_told_before_it_was_dropped_is_told(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY); CREATE TABLE notes (id int PRIMARY KEY)")
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        feed.close()
        pg.execute("INSERT INTO users VALUES (1)")
        pg.execute("DELETE FROM users")
        pg.execute("DROP TABLE users")
        feed.reopen()
        feed.catch_up()
        told = [c.op for c in feed.changes(table="users") if c.op is not Op.SCHEMA]
        assert told == [Op.INSERT, Op.DELETE]


def test_removing_makes_nobody_wait_for_another_table(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres_events.install._WAIT", "100ms")
    pg.execute("CREATE TABLE first (id int PRIMARY KEY); CREATE TABLE second (id int PRIMARY KEY)")
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
    with closing(events(pg).catalog()) as catalog:
        with pg.connect(autocommit=False) as writer:
            writer.execute("INSERT INTO second VALUES (1)")
            with pytest.raises(SourceUnavailable, match=r"public\.second cannot be dropped"):
                install.uninstall(catalog, "headrace")
            writer.execute("INSERT INTO first VALUES (1)")
        assert install.uninstall(catalog, "headrace") == ["public.second"]
    assert pg.execute("SELECT to_regnamespace('headrace')") == [(None,)]


# --- memory --------------------------------------------------------------------------------------


def test_rows_are_read_by_their_size(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    read: list[int] = []
    with reading(place_of(pg), tmp_path) as feed:
        feed.catch_up()
        rows = EventCatalog._read

        def counted(self: EventCatalog, query: str, **parameters: object) -> Any:
            found = rows(self, query, **parameters)
            read.append(sum(len(e.old or b"") + len(e.new or b"") for e in found))
            return found

        monkeypatch.setattr(EventCatalog, "_read", counted)
        for id_ in range(30):
            pg.execute("INSERT INTO users VALUES (%s, repeat('x', 1000000))", (id_,))
        pg.execute("UPDATE users SET id = id + 100")
        feed.catch_up()
        assert len(feed.changes(Op.INSERT, table="users")) == 30
        assert len(feed.changes(Op.UPDATE, table="users")) == 30
    assert max(read) < 7_000_000
