"""What happens to the server, and what the capture makes of it."""

import os
import signal
from contextlib import closing
from pathlib import Path

import pymysql
import pytest

from headrace.errors import SourceRefused
from headrace.retry import Backoff
from headrace.secret import Secret
from headrace.sources import Phase
from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.mysqls import mysql_of
from tests.sources.mycapturing import Captured, captured
from tests.sources.myplaces import mysql


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position moves at once, also by what is not captured; nobody waits long."""
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.sources.mysql.stream._WAIT_SECONDS", 0.05)
    monkeypatch.setattr("headrace.sources.mysql.dump._SILENCE_MARGIN", 0.5)
    monkeypatch.setattr("headrace.capture.BACKOFF", Backoff(0.5, 0.5, 0.25))


def ids(feed: Captured) -> list[int]:
    """The keys of the table `users`, as the log adds up."""
    return sorted(row["id"] for row in feed.rows("users"))


def assert_mended_by_a_full_copy(feed: Captured) -> None:
    """The advice of the hint helps."""
    assert "headrace snapshot shop" in feed.status.hint
    feed.capture.copy_again([])
    feed.until_streaming()
    feed.execute("INSERT INTO users VALUES (1000)")
    found = sorted(row[0] for row in feed.execute("SELECT id FROM users"))
    assert ids(feed) == found


def test_a_server_that_crashes_and_comes_back_is_followed_on(
    own_my: MysqlServer, tmp_path: Path
) -> None:
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path) as feed:
            for number in range(3):
                database.execute(f"INSERT INTO users VALUES ({number})")
                own_my.kill()
                feed.until(lambda: feed.status.phase is Phase.WAITING, "it waits")
                own_my.start()
                database.execute(f"INSERT INTO users VALUES ({number + 10})")
                feed.until_streaming()
            assert ids(feed) == [0, 1, 2, 10, 11, 12]


def test_a_connection_that_is_killed_is_replaced(own_my: MysqlServer, tmp_path: Path) -> None:
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path, heartbeat_seconds=0.1) as feed:
            dump = "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog%'"
            (thread,) = wait_until(lambda: database.execute(dump))[0]
            database.execute(f"KILL {thread}; INSERT INTO users VALUES (1)")
            assert ids(feed) == [1]


@pytest.mark.parametrize("look", [0.0, 60.0], ids=["asking", "following"])
def test_a_server_that_falls_silent_is_noticed_and_keeps_nobody(
    own_my: MysqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: float
) -> None:
    monkeypatch.setattr("headrace.sources.mysql.stream._LOOK_SECONDS", look)
    monkeypatch.setattr("headrace.sources.mysql.address._CONNECT_SECONDS", 2)
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path, heartbeat_seconds=0.1) as feed:
            process = own_my.process_id
            os.kill(process, signal.SIGSTOP)
            try:
                feed.until(lambda: feed.status.phase is Phase.WAITING, "it waits")
            finally:
                os.kill(process, signal.SIGCONT)
            feed.until_streaming()
            monkeypatch.setattr("headrace.sources.mysql.dump._SILENCE_MARGIN", 600.0)
            feed.restart()  # now nothing is noticed
            feed.until_streaming()
            os.kill(process, signal.SIGSTOP)
            try:
                feed.capture.close()
                feed.capture.join(timeout=100)
                assert feed.status.phase is Phase.STOPPED
            finally:
                os.kill(process, signal.SIGCONT)


def test_files_that_were_purged_halt(own_my: MysqlServer, tmp_path: Path) -> None:
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path) as feed:
            feed.capture.stop()
            database.execute("INSERT INTO users VALUES (1); FLUSH LOGS")
            last = own_my.end[0]
            wait_until(
                lambda: _purged(database, last)
            )  # who was reading it is noticed to have gone
            feed.start()
            assert "has purged mysql-bin.000001" in feed.until_halted().error
            assert "binlog_expire_logs_seconds" in feed.status.hint
            assert_mended_by_a_full_copy(feed)


@pytest.mark.parametrize("rows", [0, 200], ids=["shorter", "longer"])
def test_a_binary_log_that_was_begun_anew_halts(
    own_my: MysqlServer, tmp_path: Path, rows: int
) -> None:
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
        with captured(database, tmp_path) as feed:
            database.execute("INSERT INTO users VALUES (2)")
            feed.until_caught_up()
            born = feed.resume.born
            feed.capture.stop()
            wait_until(lambda: database.execute("SELECT unix_timestamp()")[0][0] > born)
            database.execute(_reset(own_my))
            for number in range(rows):
                database.execute(f"INSERT INTO users VALUES ({number + 10})")
            feed.start()
            assert feed.until_halted().error
            assert_mended_by_a_full_copy(feed)


def test_a_statement_without_its_rows_halts(own_my: MysqlServer, tmp_path: Path) -> None:
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path) as feed:
            database.execute("SET binlog_format = STATEMENT; INSERT INTO users VALUES (1)")
            assert "INSERT was logged as a statement" in feed.until_halted().error
            assert "binlog_format = ROW" in feed.status.hint
            assert_mended_by_a_full_copy(feed)


def test_events_that_the_server_lost_halt(own_my: MysqlServer, tmp_path: Path) -> None:
    # Rows of a table without transactions stay, also when the binary log has no room for them.
    own_my.execute(
        "SET GLOBAL binlog_stmt_cache_size = 4096, GLOBAL max_binlog_stmt_cache_size = 4096"
    )
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text) ENGINE=MyISAM")
        with captured(database, tmp_path) as feed:
            values = ", ".join(f"({number}, repeat('x', 1000))" for number in range(50))
            with pytest.raises(pymysql.MySQLError):
                database.execute(f"INSERT INTO users VALUES {values}")
            assert "the server lost events at mysql-bin.0" in feed.until_halted().error
            own_my.execute("SET GLOBAL max_binlog_stmt_cache_size = 16777216")
            feed.capture.copy_again([])
            feed.until_streaming()
            assert len(feed.rows("users")) == database.execute("SELECT count(*) FROM users")[0][0]


def test_a_server_without_the_right_settings_is_refused(my_kind: str, tmp_path: Path) -> None:
    with (
        mysql_of(my_kind, {"binlog_format": "MIXED"}) as server,
        server.database() as database,
        captured(database, tmp_path, start=False) as feed,
    ):
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        feed.start()
        assert "binlog_format is MIXED" in feed.until_halted().error
        server.execute("SET GLOBAL binlog_format = ROW")
        feed.restart()
        feed.until_streaming()


def test_a_refused_password_is_told_without_it(my: MysqlDatabase) -> None:
    url = my.url.replace("root@", "nobody:s3cret@")
    stream = mysql(my, url=Secret(url)).open(None, lambda table: table)
    with closing(stream), pytest.raises(SourceRefused) as refused:
        next(iter(stream))
    assert "Access denied" in str(refused.value)
    assert "s3cret" not in repr(refused.value)


def _reset(server: MysqlServer) -> str:
    newer = not server.mariadb and server.install.numbers >= (8, 4)
    return "RESET BINARY LOGS AND GTIDS" if newer else "RESET MASTER"


def _purged(database: MysqlDatabase, first: str) -> bool:
    database.execute(f"PURGE BINARY LOGS TO '{first}'")
    return bool(database.execute("SHOW BINARY LOGS")[0][0] == first)
