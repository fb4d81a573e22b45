"""A PostgreSQL put back from a copy of its files is noticed; one that crashed goes on."""

import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.testing import PostgresDatabase, PostgresServer
from tests.effort import times
from tests.sources.capturing import Captured, assert_mended_by_a_full_copy, captured
from tests.sources.writing import writers


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle position moves at once."""
    monkeypatch.setattr("headrace.sources.postgres.receive._IDLE_ADVANCE", 0.0)


@contextmanager
def put_back(server: PostgresServer, folder: Path) -> Iterator[None]:
    """The server's files are copied now, and put back after the block, which has it running."""
    server.stop()
    subprocess.run(["cp", "-a", server.data, folder], check=True)
    server.start()
    yield
    server.stop()
    shutil.rmtree(server.data)
    subprocess.run(["cp", "-a", folder, server.data], check=True)
    server.start()


def write_beside(database: PostgresDatabase, rows: int) -> None:
    """Write into a table that is not captured, and use up transaction ids."""
    with database.connect() as connection:
        for _ in range(rows):
            connection.execute("INSERT INTO beside VALUES (repeat('x', 3000))")


def confirm(feed: Captured) -> None:
    """Wait until the server knows that everything that is written now is in the log."""
    (end,) = feed.database.execute("SELECT pg_current_wal_lsn() - '0/0'")[0]
    feed.until(lambda: feed.confirmed() >= end, "the slot has moved")


@pytest.mark.requirement("P-08")
@pytest.mark.parametrize("lost", ["commits", "commits, and none since", "idle", "idle, unsaid"])
def test_a_server_put_back_from_a_file_copy_is_noticed(
    own_server: PostgresServer, tmp_path: Path, lost: str
) -> None:
    with own_server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        database.execute("CREATE TABLE beside (v text)")
        with captured(database, tmp_path, tables=("public.users",)) as feed:
            database.execute("INSERT INTO users VALUES (1, 'a')")
            feed.until_caught_up()
            if lost == "idle":
                confirm(feed)
            feed.capture.stop()
            with put_back(own_server, tmp_path / "copy"):
                feed.start()
                if lost.startswith("commits"):
                    database.execute("INSERT INTO users VALUES (2, 'lost')")
                    feed.until_caught_up()
                write_beside(database, 20)
                confirm(feed)
                feed.capture.stop()
            if lost != "commits, and none since":
                database.execute("INSERT INTO users VALUES (3, 'other')")
            write_beside(database, 100)
            for _ in range(2):
                feed.start()
                status = feed.until_halted()
                assert "another history" in status.error
                feed.capture.stop()
            feed.start()
            feed.until_halted()
            assert_mended_by_a_full_copy(feed)


@pytest.mark.requirement("P-08")
def test_a_server_put_back_to_where_the_log_stands_goes_on(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    """Nothing of what was lost is in the log."""
    with own_server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        with captured(database, tmp_path) as feed:
            database.execute("INSERT INTO users VALUES (1, 'a')")
            feed.until_caught_up()
            feed.capture.stop()
            with put_back(own_server, tmp_path / "copy"):
                database.execute("INSERT INTO users VALUES (2, 'lost')")
            database.execute("INSERT INTO users VALUES (3, 'other')")
            feed.start()
            feed.until_streaming()
            feed.assert_replays("users")


@pytest.mark.requirement("P-08")
def test_a_server_that_crashes_again_and_again_is_not_mistaken_for_another(
    own_server: PostgresServer, tmp_path: Path, seed: int
) -> None:
    chosen = random.Random(seed)
    with own_server.database() as database:
        database.execute(
            "CREATE TABLE users (id int PRIMARY KEY, name text, big text);"
            "CREATE TABLE beside (v text); CREATE TABLE late (id int PRIMARY KEY)"
        )
        with captured(database, tmp_path, tables=("public.users", "public.late")) as feed:
            for number in range(times(8, nightly=30)):
                what = chosen.choice(["load", "idle", "beside", "snapshot"])
                if what == "load":
                    with writers(database, "users"):
                        feed.until_caught_up()
                elif what == "beside":
                    write_beside(database, chosen.randrange(1, 30))
                elif what == "snapshot":
                    feed.capture.copy_again(["public.late"])
                if chosen.random() < 0.5:
                    confirm(feed)
                if chosen.random() < 0.3:
                    database.execute("CHECKPOINT")
                if chosen.random() < 0.5:
                    feed.capture.stop()
                own_server.stop("immediate")
                own_server.start()
                if chosen.random() < 0.5:
                    database.execute(f"INSERT INTO late VALUES ({number})")
                feed.restart()
                feed.until_streaming()
            feed.assert_replays("users", "late", surprises=True)
