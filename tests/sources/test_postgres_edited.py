"""A publication that was edited by hand: what was not sent meanwhile is read again."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest

from headrace.change.event import Batch, Op
from headrace.log import Log
from headrace.sources import Phase
from headrace.sources.postgres.resume import PostgresResume
from headrace.testing import PostgresDatabase, wait_until
from tests.everywhere import differences_everywhere
from tests.sources.capturing import SOURCE, Captured, captured, postgres
from tests.sources.ddlrows import differences

WHOLE = "'insert, update, delete, truncate'"
CHANGED = "UPDATE {0} SET v = v + 10 WHERE id = 1; DELETE FROM {0} WHERE id = 2"

# An edit that loses changes, and what undoes it; None: Headrace puts the table back.
OF_TABLES: dict[str, tuple[str, str | None]] = {
    "dropped": ("DROP TABLE dropped", None),
    "back": ("DROP TABLE back", "ADD TABLE back"),
    "filtered": ("SET TABLE filtered WHERE (id > 2)", "SET TABLE filtered"),
    "narrowed": ("SET TABLE narrowed (id)", "SET TABLE narrowed"),
}


def create(database: PostgresDatabase, *tables: str) -> None:
    for table in tables:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)")
        database.execute(f"INSERT INTO {table} SELECT n, n FROM generate_series(1, 4) n")


def reads(feed: Captured, table: str) -> int:
    return len(feed.stored(Op.READ, table=table))


@pytest.mark.requirement("P-07")
def test_tables_that_a_publication_did_not_send_for_a_while_are_read_again(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    """Edited while Headrace runs, and once more while it does not."""
    create(any_pg, "untouched", *OF_TABLES)
    with Log.open(tmp_path / "log") as log, ExitStack() as stack:
        # SET TABLE names all that are left, so each table is in a publication of its own.
        untouched, *feeds = (
            Captured(any_pg, log, postgres(any_pg, name=table, tables=(f"public.{table}",)))
            for table in ("untouched", *OF_TABLES)
        )
        for feed in (untouched, *feeds):
            stack.enter_context(feed.running())
        edit(any_pg, deleted=2)
        expect_read_again(feeds, rows=3)
        for feed in feeds:
            feed.capture.stop()
        edit(any_pg, deleted=3)
        for feed in feeds:
            feed.start()
        expect_read_again(feeds, rows=2)
        assert reads(untouched, "untouched") == 4
    assert differences_everywhere(tmp_path / "log", tmp_path / "lakes", 0) == []


def edit(database: PostgresDatabase, *, deleted: int) -> None:
    for table, (lose, restore) in OF_TABLES.items():
        database.execute(f"ALTER PUBLICATION headrace_{table} {lose}")
        database.execute(f"UPDATE {table} SET v = v + 10 WHERE id = 1")
        database.execute(f"DELETE FROM {table} WHERE id = {deleted}")
        if restore:
            database.execute(f"ALTER PUBLICATION headrace_{table} {restore}")


def expect_read_again(feeds: list[Captured], *, rows: int) -> None:
    """The last snapshot of each has so many rows, and the log adds up to the table."""
    for feed in feeds:
        table = feed.source.name
        feed.until(partial(has_read, feed, rows), "it is read again")
        feed.until_streaming()
        feed.assert_replays(table)


def has_read(feed: Captured, rows: int) -> bool:
    table = feed.source.name
    emptied = max((c.sequence for c in feed.stored(Op.TRUNCATE, table=table)), default=0)
    return len(feed.stored(Op.READ, table=table, after=emptied)) == rows


@pytest.mark.parametrize(
    "made", ["FOR TABLE users", "FOR ALL TABLES", "FOR TABLES IN SCHEMA public"]
)
@pytest.mark.requirement("P-07")
def test_operations_that_a_publication_left_out_for_a_moment_are_made_up_for(
    pg: PostgresDatabase, tmp_path: Path, made: str
) -> None:
    create(pg, "users")
    pg.execute(f"CREATE PUBLICATION ours {made} WITH (publish_via_partition_root)")
    with captured(pg, tmp_path, publication="ours") as feed:
        with pg.connect() as connection:
            connection.execute("ALTER PUBLICATION ours SET (publish = 'insert')")
            connection.execute(CHANGED.format("users"))
            connection.execute(f"ALTER PUBLICATION ours SET (publish = {WHOLE})")
        feed.until(lambda: reads(feed, "users") == 7, "it is read again")
        feed.until_streaming()
        feed.assert_replays("users")
        feed.capture.stop()
        pg.execute("ALTER PUBLICATION ours SET (publish = 'insert')")
        pg.execute("UPDATE users SET v = 0")
        pg.execute(f"ALTER PUBLICATION ours SET (publish = {WHOLE})")
        feed.start()
        feed.until(lambda: reads(feed, "users") == 10, "it is read again")
        feed.until_streaming()
        feed.assert_replays("users")


@pytest.mark.requirement("P-07")
def test_a_publication_that_was_made_anew_loses_nothing_unnoticed(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    """A server before 18 ends the stream at a change that it finds no publication for."""
    create(any_pg, "users")
    with captured(any_pg, tmp_path) as feed:
        feed.capture.stop()
        any_pg.execute("DROP PUBLICATION headrace_shop")
        any_pg.execute(CHANGED.format("users"))
        any_pg.execute("CREATE PUBLICATION headrace_shop WITH (publish_via_partition_root)")
        any_pg.execute("ALTER PUBLICATION headrace_shop ADD TABLE users")
        feed.start()
        wait_until(
            lambda: feed.status.phase is Phase.HALTED or reads(feed, "users") == 7, timeout=60
        )
        if feed.status.phase is Phase.HALTED:
            assert 'publication "headrace_shop" does not exist' in feed.status.error
            feed.capture.copy_again([])
        feed.until_streaming()
        feed.assert_replays("users")


@pytest.mark.requirement("P-07")
def test_an_edit_is_noticed_of_a_table_whose_name_has_a_dot(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute('CREATE SCHEMA "x.y"; CREATE SCHEMA x')
    names = ('"x.y".z', 'x."y.z"')
    create(pg, *names)
    with captured(pg, tmp_path) as feed:
        with pg.connect() as connection:
            for name in names:
                connection.execute(f"ALTER PUBLICATION headrace_shop DROP TABLE {name}")
                connection.execute(f"DELETE FROM {name} WHERE id > 1")
                connection.execute(f"ALTER PUBLICATION headrace_shop ADD TABLE {name}")
        feed.until(lambda: not differences(feed.replay(), pg), "both are read again")


@pytest.mark.requirement("P-07")
def test_a_table_that_left_a_published_schema_for_a_moment_is_read_again(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(any_pg, "users", "stays")
    any_pg.execute("CREATE SCHEMA away")
    any_pg.execute("CREATE PUBLICATION ours FOR TABLES IN SCHEMA public")
    with captured(any_pg, tmp_path, publication="ours", tables=("public.*",)) as feed:
        with any_pg.connect() as connection:
            connection.execute("ALTER TABLE users SET SCHEMA away")
            connection.execute(CHANGED.format("away.users"))
            connection.execute("ALTER TABLE away.users SET SCHEMA public")
        feed.until(lambda: reads(feed, "users") == 7, "it is read again")
        feed.until_streaming()
        feed.assert_replays("users", "stays")
        assert reads(feed, "stays") == 4


def test_a_resume_of_an_earlier_version_adopts_what_is_published(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users")
    with captured(pg, tmp_path) as feed:
        feed.capture.stop()
        stored = feed.log.resume(SOURCE)
        assert stored is not None
        resume = msgspec.json.decode(stored, type=PostgresResume)
        known = resume.snapshots["public.users"]
        assert known.published
        old = resume.with_snapshot("public.users", msgspec.structs.replace(known, published=""))
        feed.log.append(SOURCE, Batch([], old.encode()))
        feed.start()
        feed.until_streaming()
        pg.execute("UPDATE users SET v = 0")
        feed.assert_replays("users")
        assert reads(feed, "users") == 4


@pytest.mark.requirement("P-07")
def test_a_table_that_was_unpublished_before_it_lost_its_key_is_read_again(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    """To move it to the other publication hides the edit before."""
    create(pg, "users")
    with captured(pg, tmp_path) as feed:
        feed.capture.stop()
        pg.execute("ALTER PUBLICATION headrace_shop DROP TABLE users")
        pg.execute("INSERT INTO users VALUES (9, 9)")
        pg.execute("ALTER PUBLICATION headrace_shop ADD TABLE users")
        pg.execute("ALTER TABLE users DROP CONSTRAINT users_pkey")
        feed.start()
        feed.until(lambda: reads(feed, "users") == 9, "it is read again")
        feed.until_streaming()
        feed.assert_replays("users")
        assert feed.status.inserts_only


def test_a_table_that_loses_its_key_is_moved_without_a_new_snapshot(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users")
    with captured(pg, tmp_path) as feed:
        pg.execute("ALTER TABLE users DROP CONSTRAINT users_pkey")
        feed.until(lambda: feed.status.inserts_only, "it is moved")
        pg.execute("INSERT INTO users VALUES (9, 9)")
        feed.assert_replays("users")
        feed.restart()
        feed.until_streaming()
        feed.assert_replays("users")
        assert reads(feed, "users") == 4
