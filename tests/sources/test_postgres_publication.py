"""A publication that somebody else owns: what it lacks is said, and nothing is lost in silence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.change.event import Op
from headrace.change.replay import Replay, TableName
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


@pytest.mark.requirement("P-15")
def test_what_check_prints_can_be_pasted_and_then_everything_is_captured(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    """By a role that owns nothing, before there is any publication."""
    role = f"reader_{any_pg.name}"
    any_pg.execute(f"CREATE ROLE {role} LOGIN")
    any_pg.execute(
        """CREATE TABLE "odd %name" (id int PRIMARY KEY);
           CREATE SCHEMA hidden;
           CREATE TABLE hidden.users (id int PRIMARY KEY, v int);
           CREATE TABLE hidden.notes (id int, v int);
           CREATE TABLE hidden.parts (id int, v int) PARTITION BY RANGE (id);
           CREATE TABLE hidden.parts_1 PARTITION OF hidden.parts DEFAULT"""
    )
    url = any_pg.url.replace("postgres@", f"{role}@")
    source = replace(postgres(any_pg), url=Secret(url))
    try:
        wrong = [finding for finding in source.check() if not finding.ok]
        assert {finding.name for finding in wrong} == {
            "replication privilege",
            "publication",
            "publication for inserts",
            "table public.odd %name",
            "table hidden.users",
            "table hidden.notes",
            "table hidden.parts",
        }
        for finding in wrong:
            any_pg.execute(finding.fix)
        findings = source.check()
        assert [finding for finding in findings if not finding.ok] == []
        fixes = {finding.name: finding.fix for finding in findings if finding.fix}
        assert fixes.keys() == {"table hidden.notes", "table hidden.parts"}
        with Log.open(tmp_path / "log") as log:
            feed = Captured(any_pg, log, source)
            with feed.running():
                assert feed.status.inserts_only.keys() == {"hidden.notes", "hidden.parts"}
                any_pg.execute("INSERT INTO hidden.notes VALUES (1, 1)")
                any_pg.execute("UPDATE hidden.notes SET v = 2")
                assert len(feed.changes(Op.INSERT)) == 1
            for fix in fixes.values():
                any_pg.execute(fix)
            # Nor may the role move them to the other publication.
            for fix in [finding.fix for finding in source.check() if finding.fix]:
                any_pg.execute(fix)
            assert [finding.fix for finding in source.check() if finding.fix] == []
            feed = Captured(any_pg, log, source)
            with feed.running():
                any_pg.execute("UPDATE hidden.notes SET v = 3")
                feed.until_caught_up()
                rows = Replay.of(log.read(0, limit=1000)).rows(TableName("shop", "hidden", "notes"))
                assert rows == [{"id": 1, "v": 3}]
    finally:
        any_pg.execute(f"DROP OWNED BY {role}")
        any_pg.execute(f"DROP ROLE {role}")
