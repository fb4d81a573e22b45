"""No statement of an application fails because its database is captured."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from headrace.change.event import Batch, Change, Op
from headrace.change.replay import TableName
from headrace.log import Log
from headrace.sources import Phase
from headrace.testing import PostgresDatabase, wait_until
from tests.sources.capturing import Captured, captured, driven, image, postgres

WHOLE = {
    "keyed": "CREATE TABLE keyed (id int PRIMARY KEY, v int)",
    "filled": "CREATE TABLE filled (id int, v int); ALTER TABLE filled REPLICA IDENTITY FULL",
    "by_index": """CREATE TABLE by_index (id int NOT NULL, v int);
        CREATE UNIQUE INDEX by_index_id ON by_index (id);
        ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_id""",
    "parted": """CREATE TABLE parted (id int, v int, PRIMARY KEY (id)) PARTITION BY RANGE (id);
        CREATE TABLE parted_1 PARTITION OF parted DEFAULT""",
    "parent": "CREATE TABLE parent (id int PRIMARY KEY, v int)",
    "computed": """CREATE TABLE computed (id int PRIMARY KEY, v int,
        w int GENERATED ALWAYS AS (v + 1) STORED)""",
}
INSERTS_ONLY = {
    "bare": "CREATE TABLE bare (id int, v int)",
    "nullable": "CREATE TABLE nullable (id int UNIQUE, v int)",
    "deferred": "CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE, v int)",
    "silent": "CREATE TABLE silent (id int PRIMARY KEY, v int); "
    "ALTER TABLE silent REPLICA IDENTITY NOTHING",
    "index_gone": """CREATE TABLE index_gone (id int NOT NULL, v int);
        CREATE UNIQUE INDEX index_gone_id ON index_gone (id);
        ALTER TABLE index_gone REPLICA IDENTITY USING INDEX index_gone_id;
        DROP INDEX index_gone_id""",
    "split": """CREATE TABLE split (id int, v int) PARTITION BY RANGE (id);
        CREATE TABLE split_low PARTITION OF split FOR VALUES FROM (MINVALUE) TO (50);
        CREATE TABLE split_high PARTITION OF split DEFAULT;
        ALTER TABLE split_low ADD PRIMARY KEY (id)""",
    "half": """CREATE TABLE half (id int PRIMARY KEY, v int) PARTITION BY RANGE (id);
        CREATE TABLE half_1 PARTITION OF half DEFAULT;
        ALTER TABLE half_1 REPLICA IDENTITY NOTHING""",
    "child": "CREATE TABLE child () INHERITS (parent)",
}


class Application:
    """Writes to tables all the time, each statement in a transaction of its own."""

    def __init__(self, database: PostgresDatabase, *tables: str) -> None:
        self.failures: list[str] = []
        self.written = 0  # rows 1 to here have been inserted into each table
        self._database = database
        self._tables = tables

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write while the block runs."""
        stopping = threading.Event()

        def run() -> None:
            # By the server's clock: 2 s are promised, and a busy machine gets some more.
            with self._database.connect(options="-c lock_timeout=5s") as connection:
                while not stopping.wait(0.01):
                    self.write(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    def write(self, connection: psycopg.Connection[Any]) -> None:
        """One round over all tables."""
        number = self.written + 1
        for table in self._tables:
            for statement in (
                f"INSERT INTO {table} (id, v) VALUES ({number}, 0)",
                f"UPDATE {table} SET v = v + 1 WHERE id % 7 = {number % 7}",
                f"DELETE FROM {table} WHERE id % 11 = 3 AND id < {number - 20}",
            ):
                try:
                    connection.execute(statement.encode())
                except psycopg.Error as error:
                    self.failures.append(f"{statement}: {error}")
        self.written = number

    def progress(self, rounds: int = 3) -> None:
        """Wait until every table was written to some more times."""
        goal = self.written + rounds
        wait_until(lambda: self.written >= goal, timeout=60, message="the application writes")


def create(database: PostgresDatabase, *tables: dict[str, str]) -> None:
    for each in tables:
        for statements in each.values():
            database.execute(statements)


def number(change: Change) -> int:
    """The id in a row."""
    row = image(change.after)
    assert row is not None
    return int(row["id"])


def expect_all_inserts(feed: Captured, tables: Iterable[str], first: int, last: int) -> None:
    """The log has each row that was inserted into a table of the schema public, once."""
    for table in tables:
        inserted = [number(change) for change in feed.stored(Op.INSERT, table=table)]
        read = {number(change) for change in feed.stored(Op.READ, table=table)}
        assert len(inserted) == len(set(inserted)), table
        assert set(range(first, last + 1)) <= read | set(inserted), table


def expect_replays(feed: Captured, tables: Iterable[str]) -> None:
    """The log adds up to the rows of these tables."""
    replay = feed.replay()
    for table in tables:
        rows = replay.rows(TableName(feed.source.name, "public", table))
        only = "ONLY " if table == "parent" else ""
        found = feed.database.execute(f"SELECT id, v FROM {only}{table} ORDER BY 1, 2")
        assert sorted((row["id"], row["v"]) for row in rows) == found, table


def is_whole(feed: Captured) -> bool:
    """Whether all is captured of every table, and what was missed has been read again."""
    status = feed.status
    return not status.inserts_only and all(copy.done for copy in status.copies)


def published(database: PostgresDatabase) -> dict[str, list[str]]:
    """The tables of each publication."""
    found: dict[str, list[str]] = {}
    query = "SELECT pubname, tablename FROM pg_publication_tables ORDER BY 1, 2"
    for name, table in database.execute(query):
        found.setdefault(name, []).append(table)
    return found


@pytest.mark.requirement("P-01")
def test_no_statement_fails_on_any_kind_of_table(any_pg: PostgresDatabase, tmp_path: Path) -> None:
    create(any_pg, WHOLE, INSERTS_ONLY)
    application = Application(any_pg, *WHOLE, *INSERTS_ONLY)
    with application.writing():
        application.progress(20)
        with captured(any_pg, tmp_path) as feed:
            first = application.written + 1
            application.progress()
        for _ in range(2):
            with captured(any_pg, tmp_path) as feed:
                application.progress()
        assert set(feed.status.inserts_only) == {f"public.{name}" for name in INSERTS_ONLY}
    assert application.failures == []
    with captured(any_pg, tmp_path) as feed:
        expect_replays(feed, WHOLE)
        expect_all_inserts(feed, INSERTS_ONLY, first, application.written)
        with application.writing():
            # What the status says makes them whole does, and what was missed is read again.
            for statements in feed.status.inserts_only.values():
                any_pg.execute(statements)
            feed.until(lambda: is_whole(feed), "every table is captured as a whole")
            application.progress()
        expect_replays(feed, [*WHOLE, *INSERTS_ONLY])
    with application.writing():
        assert all(not each.error for each in feed.source.remove(None))
        application.progress()
    assert application.failures == []


LOST = {
    "dropped key": "ALTER TABLE {} DROP CONSTRAINT keyed_pkey",
    "no identity": "ALTER TABLE {} REPLICA IDENTITY NOTHING",
}


@pytest.mark.requirement("P-01")
@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
def test_a_table_that_loses_its_key_can_be_written_to_after_a_second(
    pg: PostgresDatabase, tmp_path: Path, lost: str
) -> None:
    create(pg, {"keyed": WHOLE["keyed"]})
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO keyed VALUES (1, 0), (2, 0)")
        pg.execute(lost.format("keyed"))
        feed.until(lambda: feed.status.inserts_only, "it is moved to the other publication")
        pg.execute("UPDATE keyed SET v = 5 WHERE id = 1")
        pg.execute("INSERT INTO keyed VALUES (3, 0)")
        pg.execute("DELETE FROM keyed WHERE id = 2")
        feed.until_caught_up()
        assert [number(change) for change in feed.stored(Op.INSERT)] == [1, 2, 3]
        assert feed.stored(Op.UPDATE, Op.DELETE) == []
        assert published(pg) == {"headrace_shop_inserts": ["keyed"]}
        pg.execute(next(iter(feed.status.inserts_only.values())))
        feed.until(lambda: is_whole(feed), "it is captured as a whole")
        pg.execute("DELETE FROM keyed WHERE id = 3")
        expect_replays(feed, ["keyed"])
        assert published(pg) == {"headrace_shop": ["keyed"]}


@pytest.mark.requirement("P-01")
def test_a_table_that_loses_its_key_is_moved_also_during_a_snapshot(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, {"keyed": WHOLE["keyed"], "filled": WHOLE["filled"]})
    pg.execute("INSERT INTO filled SELECT n, 0 FROM generate_series(1, 2000) n")
    with captured(pg, tmp_path, start=False, snapshot_rows_per_second=100) as feed:
        feed.start()
        feed.until(lambda: feed.stored(Op.READ), "the snapshot has begun")
        pg.execute("ALTER TABLE keyed DROP CONSTRAINT keyed_pkey")
        feed.until(lambda: "headrace_shop_inserts" in published(pg), "it is moved")
        assert feed.status.phase is Phase.SNAPSHOT
        pg.execute("UPDATE keyed SET v = 1")


@pytest.mark.requirement("P-01")
def test_a_table_that_loses_its_key_is_moved_also_during_a_large_transaction(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.receive._PIECE", 100)
    monkeypatch.setattr("headrace.sources.postgres.guard._LOOK_SECONDS", 0.05)
    create(pg, {"keyed": WHOLE["keyed"], "filled": WHOLE["filled"]})
    with Log.open(tmp_path / "log") as log, driven(postgres(pg), log) as reading:
        reading.until(lambda batch: reading.stream.status().phase is Phase.STREAMING)
        pg.execute("INSERT INTO filled SELECT n, 0 FROM generate_series(1, 20000) n")
        reading.until(lambda batch: batch.resume is None)
        pg.execute("ALTER TABLE keyed DROP CONSTRAINT keyed_pkey")

        def moved(batch: Batch) -> bool:
            assert batch.resume is None, "the transaction has ended"
            return "headrace_shop_inserts" in published(pg)

        reading.until(moved)
        pg.execute("UPDATE keyed SET v = 1")


@pytest.mark.requirement("P-01")
def test_a_table_that_loses_its_key_is_moved_also_while_a_slot_is_waited_for(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, {"keyed": WHOLE["keyed"], "filled": WHOLE["filled"]})
    pg.execute("INSERT INTO keyed VALUES (1, 0)")
    with pg.connect(autocommit=False) as open_transaction:
        open_transaction.execute("INSERT INTO filled VALUES (1, 0)")
        with captured(pg, tmp_path, start=False) as feed:
            feed.start()
            feed.until(lambda: "headrace_shop" in published(pg), "it is published")
            pg.execute("ALTER TABLE keyed DROP CONSTRAINT keyed_pkey")
            feed.until(lambda: "headrace_shop_inserts" in published(pg), "it is moved")
            pg.execute("UPDATE keyed SET v = 1")
            open_transaction.commit()
            feed.until(lambda: feed.status.inserts_only, "it is captured for inserts only")


@pytest.mark.requirement("P-01")
def test_with_the_event_trigger_not_even_that_second_is_lost(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(any_pg, {name: WHOLE[name] for name in ("keyed", "parted", "by_index")})
    with captured(any_pg, tmp_path, ddl=True) as feed:
        with any_pg.connect(autocommit=False) as connection:
            for table in ("keyed", "parted", "by_index"):
                connection.execute(f"INSERT INTO {table} VALUES (1, 0), (2, 0)".encode())
            connection.execute("ALTER TABLE keyed DROP CONSTRAINT keyed_pkey")
            connection.execute("ALTER TABLE parted_1 REPLICA IDENTITY NOTHING")
            connection.execute("DROP INDEX by_index_id")
            for table in ("keyed", "parted", "by_index"):
                connection.execute(f"UPDATE {table} SET v = 5 WHERE id = 1".encode())
                connection.execute(f"INSERT INTO {table} VALUES (3, 0)".encode())
                connection.execute(f"DELETE FROM {table} WHERE id = 2".encode())
        feed.until(lambda: len(feed.status.inserts_only) == 3, "all are captured for inserts only")
        feed.until_caught_up()
        for table in ("keyed", "parted", "by_index"):
            assert [number(change) for change in feed.stored(Op.INSERT, table=table)] == [1, 2, 3]
        assert feed.stored(Op.UPDATE, Op.DELETE) == []
        # It is moved back when it has a key again, with what was missed.
        any_pg.execute("ALTER TABLE keyed ADD PRIMARY KEY (id)")
        feed.until(lambda: "public.keyed" not in feed.status.inserts_only, "it has its key again")
        feed.until(lambda: all(copy.done for copy in feed.status.copies), "it is read again")
        expect_replays(feed, ["keyed"])


@pytest.mark.requirement("P-01")
def test_the_event_trigger_keeps_columns_and_rows_of_the_publication(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, secret text, name text)")
    pg.execute("CREATE TABLE other (id int PRIMARY KEY)")
    with captured(pg, tmp_path, ddl=True) as feed:
        pg.execute("ALTER PUBLICATION headrace_shop DROP TABLE users")
        pg.execute("ALTER PUBLICATION headrace_shop ADD TABLE users (id, name) WHERE (id > 0)")
        pg.execute("ALTER TABLE users DROP CONSTRAINT users_pkey")
        pg.execute("UPDATE users SET name = 'x'")
        query = """SELECT pubname, attnames, rowfilter FROM pg_publication_tables
                   WHERE tablename = 'users'"""
        assert pg.execute(query) == [("headrace_shop_inserts", ["id", "name"], "(id > 0)")]
        feed.until(lambda: feed.status.inserts_only, "it is captured for inserts only")
        pg.execute("INSERT INTO users VALUES (1, 's', 'a'), (-1, 's', 'b')")
        feed.until_caught_up()
        [insert] = feed.stored(Op.INSERT, table="users")
    assert image(insert.after) == {"id": 1, "name": "a"}


@pytest.mark.requirement("P-01")
def test_full_identities_are_set_kept_and_restored(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(any_pg, WHOLE, INSERTS_ONLY)
    query = "SELECT relname, relreplident FROM pg_class WHERE relkind IN ('r', 'p') AND oid > 16384"
    before = dict(any_pg.execute(query))
    application = Application(any_pg, *WHOLE, *INSERTS_ONLY)
    with application.writing(), captured(any_pg, tmp_path, identity="full", ddl=True) as feed:
        application.progress()
        assert feed.status.inserts_only == {}
        assert {identity for _, identity in any_pg.execute(query)} == {"f"}
        any_pg.execute("ALTER TABLE keyed DROP CONSTRAINT keyed_pkey")
        any_pg.execute("CREATE TABLE more (id int, v int) PARTITION BY RANGE (id)")
        any_pg.execute("CREATE TABLE more_1 PARTITION OF more DEFAULT")
        feed.until(lambda: published(any_pg)["headrace_shop"].count("more"), "it is published")
        any_pg.execute("CREATE TABLE more_2 PARTITION OF more FOR VALUES FROM (5) TO (6)")
        any_pg.execute("INSERT INTO more VALUES (5, 1); UPDATE more SET v = 2; DELETE FROM more")
        application.progress()
    assert application.failures == []
    with captured(any_pg, tmp_path, identity="full", ddl=True) as feed:
        expect_replays(feed, [*WHOLE, *INSERTS_ONLY])
    with application.writing():
        removed = feed.source.remove(None)
        application.progress()
    assert [each for each in removed if each.error] == []
    after = dict(any_pg.execute(query))
    before["index_gone"] = "n"  # the same, for an index that is gone cannot be chosen
    assert {name: after[name] for name in before} == before
    assert application.failures == []


@pytest.mark.requirement("P-01")
def test_an_installation_that_does_harm_is_put_right_at_its_start(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    tables = {"keyed": WHOLE["keyed"], "bare": INSERTS_ONLY["bare"]}
    create(any_pg, tables)
    any_pg.execute("INSERT INTO bare VALUES (1, 0)")
    with captured(any_pg, tmp_path) as feed:
        source = feed.source
    # As an earlier version left it: one publication, and a resume that knows of no other.
    any_pg.execute("DROP PUBLICATION headrace_shop_inserts")
    any_pg.execute("ALTER PUBLICATION headrace_shop ADD TABLE bare")
    with Log.open(tmp_path / "log") as log:
        resume = msgspec.json.decode(log.resume(source.name) or b"")
        del resume["inserts"], resume["inserts_only"]
        log.append(source.name, Batch((), msgspec.json.encode(resume)))
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        any_pg.execute("UPDATE bare SET v = 1")
    any_pg.execute("INSERT INTO bare VALUES (2, 0)")
    # A transaction that is older than the second publication, and ends after it was made.
    with any_pg.connect(autocommit=False) as late, Log.open(tmp_path / "log") as log:
        late.execute("INSERT INTO keyed VALUES (1, 0)")
        late.execute("INSERT INTO bare VALUES (3, 0)")
        feed = Captured(any_pg, log, source)
        with feed.running(start=False):
            feed.start()
            wait_until(
                lambda: published(any_pg).get("headrace_shop_inserts") == ["bare"],
                message="the table is moved before all else",
            )
            any_pg.execute("UPDATE bare SET v = 7 WHERE id = 2")
            any_pg.execute("INSERT INTO bare VALUES (4, 0)")
            late.execute("INSERT INTO bare VALUES (5, 0)")
            late.execute("INSERT INTO keyed VALUES (2, 0)")
            late.commit()
            feed.until_streaming()
            any_pg.execute("INSERT INTO bare VALUES (6, 0)")
            expect_replays(feed, tables)
    for row in (7, 8):
        with captured(any_pg, tmp_path) as feed:
            any_pg.execute(f"INSERT INTO bare VALUES ({row}, 0)")
            expect_replays(feed, tables)


@pytest.mark.requirement("P-01")
@pytest.mark.parametrize("what", ["ALL TABLES", "TABLES IN SCHEMA public", "TABLE keyed, bare"])
def test_the_publication_of_somebody_else_is_left_alone_with_a_warning(
    pg: PostgresDatabase, tmp_path: Path, what: str
) -> None:
    create(pg, {"keyed": WHOLE["keyed"], "bare": INSERTS_ONLY["bare"]})
    pg.execute(f"CREATE PUBLICATION theirs FOR {what}")
    with captured(pg, tmp_path, publication="theirs") as feed:
        [warning] = feed.status.warnings
        assert 'ALTER TABLE "public"."bare" REPLICA IDENTITY FULL;' in warning
        assert published(pg) == {"theirs": ["bare", "keyed"]}
        findings = {finding.name: finding for finding in feed.source.check()}
        assert not findings["table public.bare"].ok
        pg.execute("INSERT INTO bare VALUES (1, 0)")
        pg.execute(findings["table public.bare"].fix)
        pg.execute("UPDATE bare SET v = 1")
        expect_replays(feed, ["keyed", "bare"])
        feed.until(lambda: not feed.status.warnings, "nothing is wrong any more")
    feed.source.remove(None)
    assert published(pg) == {"theirs": ["bare", "keyed"]}


@pytest.mark.requirement("P-01")
def test_a_lock_is_waited_for_in_small_pieces_and_the_other_tables_go_on(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.5)
    create(pg, {"keyed": WHOLE["keyed"], "bare": INSERTS_ONLY["bare"]})
    with pg.connect(autocommit=False) as holder:
        holder.execute("LOCK TABLE bare IN SHARE UPDATE EXCLUSIVE MODE")
        with captured(pg, tmp_path, identity="full") as feed:
            [warning] = feed.status.warnings
            assert "public.bare: it is not published yet" in warning
            pg.execute("INSERT INTO keyed VALUES (1, 0)")
            pg.execute("INSERT INTO bare VALUES (1, 0)")
            expect_replays(feed, ["keyed"])
            holder.rollback()
            feed.until(lambda: not feed.status.warnings, "it is published")
            feed.until(lambda: is_whole(feed), "it is copied")
            pg.execute("UPDATE bare SET v = 1")
            expect_replays(feed, ["keyed", "bare"])


@pytest.mark.requirement("P-01")
def test_publications_that_somebody_alters_are_put_right(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.5)
    create(pg, {"keyed": WHOLE["keyed"], "parent": WHOLE["parent"], "bare": INSERTS_ONLY["bare"]})
    right = {"headrace_shop": ["keyed", "parent"], "headrace_shop_inserts": ["bare"]}
    with captured(pg, tmp_path) as feed:
        pg.execute("ALTER PUBLICATION headrace_shop DROP TABLE keyed")
        pg.execute("INSERT INTO keyed VALUES (1, 0)")  # in no publication
        feed.until(lambda: published(pg) == right, "it is published again")
        pg.execute("ALTER PUBLICATION headrace_shop_inserts ADD TABLE parent")
        feed.until(lambda: published(pg) == right, "it is in one of them")
        pg.execute("DROP PUBLICATION headrace_shop_inserts")
        pg.execute("INSERT INTO bare VALUES (1, 0)")
        pg.execute("INSERT INTO parent VALUES (1, 0)")
        feed.until(lambda: published(pg) == right, "the second one is there again")
        feed.until(lambda: feed.stored(Op.READ, Op.INSERT, table="bare"), "its row was read")
        feed.until_streaming()
        feed.assert_replays("keyed", "parent", "bare", surprises=True)


def test_without_a_snapshot_nothing_is_read_of_a_table_that_is_published(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, {"keyed": WHOLE["keyed"], "bare": INSERTS_ONLY["bare"]})
    pg.execute("INSERT INTO keyed VALUES (1, 0); INSERT INTO bare VALUES (1, 0)")
    with captured(pg, tmp_path, snapshot=False) as feed:
        feed.until_caught_up()
        assert not feed.stored(Op.READ)


def test_a_publication_of_somebody_else_is_left_as_it_is(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, {"keyed": WHOLE["keyed"]})
    pg.execute("CREATE PUBLICATION mine FOR TABLE keyed")
    pg.execute("CREATE PUBLICATION mine_inserts FOR TABLE keyed")
    with captured(pg, tmp_path, start=False, publication="mine") as feed:
        feed.start()
        wait_until(lambda: feed.status.phase is Phase.HALTED, timeout=120, message="refused")
        assert "mine_inserts must publish inserts and truncates only" in feed.status.error
    query = "SELECT pubupdate FROM pg_publication WHERE pubname = 'mine_inserts'"
    assert pg.execute(query) == [(True,)]
