"""DDL on tables with event triggers: the log still adds up to the database."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.change.event import Op
from headrace.change.replay import Replay
from headrace.errors import PositionLost
from headrace.testing import PostgresDatabase, Reading, reading
from tests.everywhere import differences_everywhere
from tests.sources.ddlrows import differences
from tests.sources.test_postgres_events import events, place_of

CREATE = """
CREATE TYPE mood AS ENUM ('sad', 'glad');
CREATE TABLE users (id int PRIMARY KEY, name text, n int, m mood DEFAULT 'sad');
CREATE TABLE sales (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
CREATE TABLE sales_0 PARTITION OF sales FOR VALUES FROM (0) TO (10);
CREATE TABLE sales_1 PARTITION OF sales FOR VALUES FROM (10) TO (20);
CREATE TABLE notes (id int PRIMARY KEY);
INSERT INTO users VALUES (1, 'ann', 1), (2, 'bob', 2);
INSERT INTO sales VALUES (1, 1), (11, 11);
INSERT INTO notes VALUES (1);
"""

DDL = {
    "a default": "ALTER TABLE users ADD COLUMN level int DEFAULT 7",
    "a volatile default": "ALTER TABLE users ADD COLUMN chance float8 DEFAULT random()",
    "another column of the same name":
        "ALTER TABLE users DROP COLUMN name; ALTER TABLE users ADD COLUMN name text",
    "a renamed column": "ALTER TABLE users RENAME COLUMN name TO called",
    "a rewrite": "ALTER TABLE users ALTER COLUMN n TYPE text USING 'n' || n",
    "a renamed label": "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
    "a dropped table": "DROP TABLE notes",
    "a renamed table": "ALTER TABLE notes RENAME TO remarks",
    "another schema": "CREATE SCHEMA elsewhere; ALTER TABLE notes SET SCHEMA elsewhere",
    "a table of the same name":
        "DROP TABLE notes; CREATE TABLE notes (id int PRIMARY KEY); INSERT INTO notes VALUES (5)",
    "an attached partition":
        "CREATE TABLE sales_2 (id int PRIMARY KEY, n int); INSERT INTO sales_2 VALUES (21, 21); "
        "ALTER TABLE sales ATTACH PARTITION sales_2 FOR VALUES FROM (20) TO (30)",
    "a detached partition": "ALTER TABLE sales DETACH PARTITION sales_1; DROP TABLE sales_1",
    "a dropped partition": "DROP TABLE sales_0",
    "a partition that came and went":
        "CREATE TABLE sales_5 PARTITION OF sales FOR VALUES FROM (50) TO (60); "
        "INSERT INTO sales VALUES (51, 1); DROP TABLE sales_5",
    "a subpartition that came and went":
        "CREATE TABLE sales_6 PARTITION OF sales FOR VALUES FROM (60) TO (80) "
        "PARTITION BY RANGE (id); "
        "CREATE TABLE sales_60 PARTITION OF sales_6 FOR VALUES FROM (60) TO (70); "
        "INSERT INTO sales VALUES (61, 1); ALTER TABLE sales_6 DETACH PARTITION sales_60",
}  # fmt: skip


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the catalogs every moment."""
    monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 0.05)


@pytest.fixture
def feed(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Reading]:
    pg.execute(CREATE)
    with reading(place_of(pg), tmp_path) as opened:
        opened.catch_up()
        yield opened


def equal(feed: Reading, database: PostgresDatabase) -> bool:
    found = differences(Replay.of(feed.changes()), database, ("public.*",))
    return not found.keys() - {"public.marks"}


@pytest.mark.requirement("P-03")
@pytest.mark.requirement("P-04")
@pytest.mark.parametrize("ddl", DDL.values(), ids=DDL)
def test_after_ddl_while_it_was_down_the_log_equals_the_database(
    feed: Reading, pg: PostgresDatabase, ddl: str
) -> None:
    feed.close()
    with pg.connect(autocommit=False) as connection:
        connection.execute(ddl.encode())
        connection.commit()
    feed.reopen()
    feed.until(lambda _: equal(feed, pg), take=feed.step)
    pg.execute("UPDATE users SET n = n")
    feed.catch_up()
    assert equal(feed, pg)


@pytest.mark.requirement("P-03")
def test_ddl_while_it_runs_is_noticed_by_the_next_look(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    any_pg.execute(CREATE)
    with reading(place_of(any_pg), tmp_path) as feed:
        feed.catch_up()
        for ddl in [ddl for ddl in DDL.values() if "notes" not in ddl] + [DDL["a renamed table"]]:
            any_pg.execute(ddl)
            feed.until(lambda _: equal(feed, any_pg), take=feed.step)
    assert differences_everywhere(tmp_path / "log", tmp_path / "lakes", 0) == []


AGAIN = {
    "replica identity": (
        "ALTER TABLE users REPLICA IDENTITY USING INDEX by_number",
        "ALTER TABLE users REPLICA IDENTITY DEFAULT",
    ),
    "a column's name": (
        "ALTER TABLE users RENAME COLUMN name TO called",
        "ALTER TABLE users RENAME COLUMN called TO name",
    ),
}


@pytest.mark.requirement("P-03")
@pytest.mark.parametrize("ddl", AGAIN.values(), ids=AGAIN)
@pytest.mark.parametrize("together", [True, False])
def test_columns_that_a_table_has_again_get_a_new_version(
    feed: Reading,
    pg: PostgresDatabase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ddl: tuple[str, str],
    together: bool,
) -> None:
    """Within one transaction, or in several that are read at once."""
    pg.execute("ALTER TABLE users ALTER n SET NOT NULL; CREATE UNIQUE INDEX by_number ON users (n)")
    feed.until(lambda _: bool(feed.changes(Op.TRUNCATE, table="users")), take=feed.step)
    feed.catch_up()
    monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 3600.0)
    feed.close()
    feed.reopen()
    feed.catch_up()
    feed.catch_up()  # past the look of the start
    there, back = ddl
    with pg.connect(autocommit=not together) as writer:
        for statement in ("", there, back, there, back):
            writer.execute(statement.encode())
            writer.execute("UPDATE users SET m = 'glad'")
    feed.catch_up()
    updates = feed.changes(Op.UPDATE, table="users")
    assert len(updates) == 10
    versions = [change.table.version for change in feed.changes(table="users")]
    assert versions == sorted(versions)
    assert len({change.table.version for change in updates}) == 5
    assert equal(feed, pg)
    if "RENAME" in there:  # rows that nobody writes have another name then: it is read anew
        monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 0.05)
        feed.until(lambda _: len(feed.changes(Op.TRUNCATE, table="users")) == 2, take=feed.step)
        feed.catch_up()
    feed.close()
    assert differences_everywhere(tmp_path / "log", tmp_path / "lakes", 0) == []


def test_a_new_partition_costs_no_snapshot(feed: Reading, pg: PostgresDatabase) -> None:
    pg.execute("CREATE TABLE sales_3 PARTITION OF sales FOR VALUES FROM (30) TO (40)")
    pg.execute("INSERT INTO sales VALUES (31, 1)")
    feed.until(lambda _: equal(feed, pg), take=feed.step)
    pg.execute("CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later VALUES (1)")
    feed.until_change("later")
    assert feed.changes(Op.TRUNCATE, table="sales") == []


CAME = "CREATE TABLE sales_5 PARTITION OF sales FOR VALUES FROM (50) TO (60)"


def test_a_partition_that_goes_between_its_events_and_the_next_look_is_noticed(
    feed: Reading, pg: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as rarely:
        rarely.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 3600.0)
        pg.execute(CAME)
        pg.execute("INSERT INTO sales VALUES (51, 1)")
        feed.catch_up()
        assert feed.changes(Op.INSERT, table="sales")
        pg.execute("DROP TABLE sales_5")
    feed.until(lambda _: equal(feed, pg), take=feed.step)


def test_a_table_stops_where_a_partition_came_and_went_if_the_config_says_so(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(CREATE)
    with reading(place_of(pg, on_rewrite="stop"), tmp_path) as feed:
        feed.catch_up()
        pg.execute(f"{CAME}; INSERT INTO sales VALUES (51, 1); DROP TABLE sales_5")
        feed.until(lambda _: "public.sales" in feed.stream.status().errored, take=feed.step)
        assert feed.changes(Op.TRUNCATE, table="sales") == []


@pytest.mark.parametrize("table", ["users", "sales_1"])
def test_triggers_that_a_restore_has_left_at_origin_are_repaired(
    any_pg: PostgresDatabase, tmp_path: Path, table: str
) -> None:
    any_pg.execute(CREATE)
    with reading(place_of(any_pg), tmp_path) as feed:
        feed.catch_up()
        feed.close()
        any_pg.execute(f"ALTER TABLE {table} DISABLE TRIGGER ALL")
        any_pg.execute(f"DELETE FROM {table}")
        any_pg.execute(f"ALTER TABLE {table} ENABLE TRIGGER ALL")
        owner = "users" if table == "users" else "sales"
        (found,) = [f for f in events(any_pg).check() if f.name == f"table public.{owner}"]
        assert not found.ok
        assert "do not fire" in found.detail
        feed.reopen()
        feed.until(lambda _: equal(feed, any_pg), take=feed.step)
        assert all(finding.ok for finding in events(any_pg).check())
        with any_pg.connect() as replica:
            replica.execute("SET session_replication_role = replica")
            replica.execute(f"INSERT INTO {table} (id, n) VALUES (12, 5)".encode())
        feed.catch_up()
        assert equal(feed, any_pg)


def test_events_deleted_behind_the_tables_own_triggers_are_missed(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(CREATE)
    with reading(place_of(pg, trim=False), tmp_path) as feed:
        feed.catch_up()
        feed.close()
        pg.execute("INSERT INTO notes VALUES (9)")
        pg.execute("ALTER TABLE headrace.events DISABLE TRIGGER ALL")
        pg.execute("DELETE FROM headrace.events")
        pg.execute("ALTER TABLE headrace.events ENABLE ALWAYS TRIGGER note_deleted")
        pg.execute("ALTER TABLE headrace.events ENABLE ALWAYS TRIGGER note_truncated")
        feed.reopen()
        with pytest.raises(PositionLost, match="own triggers were disabled"):
            feed.catch_up()


def test_a_table_stops_where_ddl_rewrites_rows_if_the_config_says_so(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(CREATE)
    with reading(place_of(pg, on_rewrite="stop"), tmp_path) as feed:
        feed.catch_up()
        pg.execute("ALTER TABLE users ADD COLUMN level int DEFAULT 7")
        feed.until(lambda _: "public.users" in feed.stream.status().errored, take=feed.step)
        assert feed.changes(Op.TRUNCATE, table="users") == []
