"""A publication that somebody else owns: what it lacks is said, and nothing is lost in silence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.change.event import Op
from headrace.change.replay import Replay
from headrace.log import Log
from headrace.secret import Secret
from headrace.sources import Phase
from headrace.testing import PostgresDatabase
from tests.sources.capturing import Captured, captured, postgres


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for new tables all the time."""
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.1)


@pytest.fixture
def guest(pg: PostgresDatabase) -> Iterator[str]:
    """A role that may replicate and read, but owns nothing."""
    name = f"guest_{pg.name}"
    pg.execute(f"CREATE ROLE {name} LOGIN REPLICATION")
    pg.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    pg.execute("CREATE PUBLICATION ours FOR TABLE orders WITH (publish_via_partition_root)")
    pg.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
    yield name
    pg.execute(f"DROP OWNED BY {name}")
    pg.execute(f"DROP ROLE {name}")


def as_guest(pg: PostgresDatabase, log: Log, guest: str) -> Captured:
    url = pg.url.replace("postgres@", f"{guest}@")
    source = postgres(pg, tables=("public.*",), publication="ours")
    return Captured(pg, log, replace(source, url=Secret(url)))


@pytest.mark.usefixtures("quick")
def test_a_table_that_may_not_be_published_is_errored_and_the_others_go_on(
    pg: PostgresDatabase, guest: str, tmp_path: Path
) -> None:
    with Log.open(tmp_path / "log") as log:
        feed = as_guest(pg, log, guest)
        feed.start()
        feed.until_streaming()
        pg.execute("CREATE TABLE secrets (id int PRIMARY KEY)")
        pg.execute(f"GRANT SELECT ON secrets TO {guest}")
        feed.until(lambda: feed.status.errored, "the new table is errored")
        (reason,) = feed.status.errored.values()
        assert 'ALTER PUBLICATION "ours" ADD TABLE ONLY "public"."secrets"' in reason
        pg.execute("INSERT INTO orders VALUES (1)")
        assert [change.key for change in feed.changes(Op.INSERT)] == [b'{"id":1}']
        pg.execute("INSERT INTO secrets VALUES (7)")
        pg.execute("ALTER PUBLICATION ours ADD TABLE secrets")
        feed.until(lambda: feed.stored(Op.READ, table="secrets"), "the table is copied")
        assert feed.status.errored == {}
        feed.capture.stop()


@pytest.mark.parametrize("published", ["insert", "insert, update, delete"])
def test_a_publication_that_leaves_out_an_operation_is_refused_with_the_fix(
    pg: PostgresDatabase, tmp_path: Path, published: str
) -> None:
    pg.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    pg.execute(f"CREATE PUBLICATION ours FOR TABLE orders WITH (publish = '{published}')")
    with captured(pg, tmp_path, start=False, publication="ours") as feed:
        findings = {finding.name: finding for finding in feed.source.check()}
        assert not findings["publication"].ok
        feed.start()
        halted = feed.until_halted()
    assert halted.phase is Phase.HALTED
    assert "does not publish every operation" in halted.error
    assert "SET (publish = 'insert, update, delete, truncate')" in halted.hint
    assert findings["publication"].fix in halted.hint


@pytest.mark.usefixtures("quick")
def test_a_renamed_table_without_a_key_has_each_row_once(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE notes (text text)")
    pg.execute("ALTER TABLE notes REPLICA IDENTITY FULL")
    pg.execute("INSERT INTO notes VALUES ('old')")
    with captured(pg, tmp_path) as feed:
        pg.execute("ALTER TABLE notes RENAME TO remarks")
        pg.execute("INSERT INTO remarks VALUES ('new')")
        feed.until(lambda: feed.stored(Op.READ, table="remarks"), "it is copied under its name")
        feed.until_caught_up()
        replay = Replay.of(feed.log.read(0, limit=1000))
        (name,) = [table for table in replay.tables if table.name == "remarks"]
        texts = sorted(row["text"] for row in replay.rows(name))
    assert texts == ["new", "old"]


def test_an_ordinary_role_may_alter_its_tables_while_ddl_is_told(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    role = f"app_{pg.name}"
    pg.execute(f"CREATE ROLE {role}")
    pg.execute(f"GRANT CREATE ON SCHEMA public TO {role}")
    try:
        with captured(pg, tmp_path, ddl=True) as feed:
            pg.execute(f"ALTER TABLE users OWNER TO {role}")
            with pg.connect() as connection:
                connection.execute(f"SET ROLE {role}")
                connection.execute("ALTER TABLE users ADD COLUMN name text")
            told = feed.streamed(Op.SCHEMA)
        assert any(b"ADD COLUMN name text" in (change.after or b"") for change in told)
    finally:
        pg.execute(f"DROP OWNED BY {role} CASCADE")
        pg.execute(f"DROP ROLE {role}")
