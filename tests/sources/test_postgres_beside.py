"""A table is copied anew while the others, and the table itself, go on changing."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from headrace.change.event import Batch, Op
from headrace.change.replay import Replay, TableName
from headrace.errors import SourceError
from headrace.log import Log
from headrace.sources.postgres import slot
from headrace.sources.postgres.beside import PendingPoint
from headrace.sources.postgres.replication import Replication
from headrace.testing import PostgresDatabase, PostgresServer
from tests.conftest import install_of
from tests.everywhere import differences_everywhere
from tests.sources.capturing import (
    SOURCE,
    Captured,
    captured,
    driven,
    ordered,
    postgres,
    rows_of,
)
from tests.sources.writing import create, writers


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for new tables all the time."""
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.1)


def copying(feed: Captured, table: str) -> bool:
    """Whether the status shows that a table is being read."""
    return any(c.table == f"public.{table}" and not c.done for c in feed.status.copies)


def assert_positions_never_run_backwards(feed: Captured) -> None:
    commits = [change.position.commit for change in feed.stored()]
    assert commits == sorted(commits)


@pytest.mark.requirement("P-03")
def test_other_tables_arrive_while_one_is_read_again(pg: PostgresDatabase, tmp_path: Path) -> None:
    create(pg, "large", "others", rows=3000)
    with captured(pg, tmp_path) as feed:
        feed.source = replace(feed.source, snapshot_rows_per_second=1500)
        feed.restart()
        feed.until_streaming()
        with writers(pg, "large", "others", "large"):
            feed.capture.copy_again(["public.large"])
            feed.until(lambda: copying(feed, "large"), "the table is being read")
            feed.until_streaming()
        feed.assert_replays("large", "others")
        assert_positions_never_run_backwards(feed)
        began = max(change.sequence for change in feed.stored(Op.TRUNCATE, table="large"))
        ended = max(change.sequence for change in feed.stored(Op.READ, table="large"))
        others = [change.sequence for change in feed.stored(table="others")]
        assert any(began < sequence < ended for sequence in others)


@pytest.mark.usefixtures("quick")
def test_an_open_transaction_holds_up_a_snapshot_but_not_the_stream(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", rows=1)
    with captured(pg, tmp_path) as feed, pg.connect(autocommit=False) as writer:
        writer.execute("INSERT INTO users VALUES (2, 'not yet')")
        create(pg, "late", rows=5)
        feed.until(lambda: copying(feed, "late"), "the new table is waited for")
        pg.execute("INSERT INTO users VALUES (3, 'meanwhile')")
        feed.until_caught_up()
        assert [change.key for change in feed.streamed(table="users")] == [b'{"id":3}']
        assert copying(feed, "late")
        writer.commit()
        feed.until(lambda: not copying(feed, "late"), "the new table is read")
        pg.execute("INSERT INTO late VALUES (6, 'after')")
        feed.assert_replays("users", "late")


@pytest.mark.usefixtures("quick")
def test_without_a_free_slot_snapshots_wait_with_a_warning_and_the_stream_goes_on(
    tmp_path: Path,
) -> None:
    settings = {"max_replication_slots": 1}
    with (
        PostgresServer(install_of(16), settings=settings) as server,
        server.database() as database,
    ):
        create(database, "users", rows=1)
        with captured(database, tmp_path) as feed:
            create(database, "late", rows=5)
            feed.until(lambda: feed.status.warnings, "a warning")
            assert "all replication slots are in use" in feed.status.warnings[0]
            database.execute("INSERT INTO users VALUES (2, 'meanwhile')")
            feed.assert_replays("users")


@pytest.mark.usefixtures("quick")
@pytest.mark.requirement("P-01")
def test_a_table_that_is_altered_while_it_is_read_does_not_wait_and_is_right(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "large", rows=2000)
    create(pg, "others", rows=1)
    with captured(pg, tmp_path) as feed:
        feed.source = replace(feed.source, snapshot_rows_per_second=5)  # for several minutes
        feed.restart()
        feed.until_streaming()
        feed.capture.copy_again(["public.large"])
        feed.until(lambda: feed.stored(Op.TRUNCATE), "it has begun")
        with pg.connect() as connection:
            connection.execute("SET lock_timeout = '60s'")
            connection.execute("ALTER TABLE large ADD COLUMN more int DEFAULT 5")
        feed.source = replace(feed.source, snapshot_rows_per_second=None)
        feed.restart()
        pg.execute("UPDATE large SET name = 'new' WHERE id % 10 = 3")
        feed.until_streaming()
        feed.assert_replays("large")


@pytest.mark.usefixtures("quick")
def test_a_table_that_is_altered_between_its_rows_and_the_stream_is_read_once_more(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", "others", rows=5)
    with Log.open(tmp_path / "log") as log:
        source = postgres(pg)
        with driven(source, log) as reading:
            reading.until(lambda _: all(copy.done for copy in reading.stream.status().copies))
        again = source.copy_again(log.resume(SOURCE), ["public.users"])
        log.append(SOURCE, Batch([], again))
        with driven(source, log) as reading:
            reading.until(lambda batch: any(change.op is Op.READ for change in batch.changes))
            pg.execute("ALTER TABLE users ALTER id TYPE bigint, ADD made int DEFAULT 5")
            reading.until(lambda _: all(copy.done for copy in reading.stream.status().copies))
        changes = log.read(0, limit=1000)
        rows = Replay.of(changes).rows(TableName(SOURCE, "public", "users"))
        assert ordered(rows) == ordered(rows_of(pg, "users"))
        assert [change.op for change in changes].count(Op.TRUNCATE) == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.requirement("P-04")
def test_a_table_that_loses_its_name_before_it_is_read_leaves_nothing_of_the_one_before(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that know tables by their oids have the rows of the one that was dropped."""
    create(pg, "users", "others", rows=5)
    with captured(pg, tmp_path) as feed:
        name = slot.temporary_name

        def renamed_meanwhile(*given: str) -> str:
            monkeypatch.setattr(slot, "temporary_name", name)
            pg.execute("ALTER TABLE users RENAME TO parked; INSERT INTO parked VALUES (7, 'x')")
            return name(*given)

        monkeypatch.setattr(slot, "temporary_name", renamed_meanwhile)
        with pg.connect(autocommit=False) as connection:
            connection.execute("DROP TABLE users")
            connection.execute("CREATE TABLE users (id int PRIMARY KEY, email text)")
        feed.until(lambda: feed.stored(Op.READ, table="parked"), "the table of the new name")
        feed.until_streaming()
        feed.assert_replays("parked", "others")
        assert feed.replay().rows(TableName(SOURCE, "public", "users")) == []
    assert differences_everywhere(tmp_path / "log", tmp_path / "lakes", 0) == []


def test_what_kept_a_point_from_being_made_is_the_cause_and_not_in_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("hush")

    monkeypatch.setattr(slot, "create_point", fail)
    pending = PendingPoint(cast("Replication", None), "slot", threading.Event())
    with pytest.raises(SourceError, match=r"no point could be made$") as raised:
        pending.point()
    assert isinstance(raised.value.__cause__, ValueError)
