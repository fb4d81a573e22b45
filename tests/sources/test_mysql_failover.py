"""Another server takes over, and is followed by GTID."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pymysql
import pytest

from headrace.change.event import Op
from headrace.sources import Phase
from headrace.sources.mysql.decode.path import TablePath
from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.mysqls import mysql_of
from tests.sources.mycapturing import Captured, captured


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position moves at once, also by what is not captured; nobody waits long."""
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.sources.mysql.stream._WAIT_SECONDS", 0.05)


@contextmanager
def promoted(
    kind: str, folder: Path, *, ahead: bool = True
) -> Iterator[tuple[MysqlDatabase, MysqlDatabase]]:
    """A database whose rows 1 and 2 are in the log, and its replica, which was let go.

    `ahead`: it has the row 3 too.
    """
    settings = {"server_id": 2, "log_slave_updates": True}
    with mysql_of(kind) as first, mysql_of(kind, settings) as second, first.database() as database:
        replicate(first, second)
        database.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
        with captured(database, folder, follow="gtid") as feed:
            database.execute("INSERT INTO users VALUES (2)")
            feed.until_caught_up()
        if ahead:
            database.execute("INSERT INTO users VALUES (3)")
        other = MysqlDatabase(second, database.name)
        wait_until(lambda: rows(other) == 2 + ahead)
        second.execute("STOP SLAVE" if second.mariadb else "STOP REPLICA")
        yield database, other


def test_a_replica_that_was_promoted_is_followed_by_gtid(my_kind: str, tmp_path: Path) -> None:
    with promoted(my_kind, tmp_path) as (database, other):
        with captured(other, tmp_path, start=False) as feed:  # followed by position
            feed.start()
            known = "mariadb:1:0" if database.server.mariadb else f"mysql:{uuid(database.server)}"
            assert f"our position is of {known}" in feed.until_halted().error
        other.execute("INSERT INTO users VALUES (4)")
        with captured(other, tmp_path, follow="gtid") as feed:
            assert ids(feed) == [1, 2, 3, 4]
            other.execute("INSERT INTO users VALUES (5)")
            feed.restart()
            assert ids(feed) == [1, 2, 3, 4, 5]
            assert len({change.table.origin for change in feed.changes()}) == 1
            assert_told_once(feed)


def test_restarts_repeat_nothing_before_a_promoted_server_has_written(
    my_kind: str, tmp_path: Path
) -> None:
    with promoted(my_kind, tmp_path, ahead=False) as (_, other):
        for _ in range(3):
            with captured(other, tmp_path, follow="gtid") as feed:
                # The place in the other server's files is known as soon as it is quiet.
                assert ids(feed) == [1, 2]
                assert_told_once(feed)
        feed_again(other, tmp_path)


def feed_again(other: MysqlDatabase, folder: Path) -> None:
    """A table is copied on the server that took over, while nobody writes."""
    with captured(other, folder, follow="gtid") as feed:
        feed.capture.copy_again([f"{other.name}.users"])
        feed.until(
            lambda: (
                feed.resume.snapshots[TablePath(other.name, "users")].rows == 2
                and not feed.resume.to_snapshot
            ),
            "it is copied again",
        )
        assert ids(feed) == [1, 2]


def test_transactions_of_other_domains_behind_a_new_one_are_not_repeated(tmp_path: Path) -> None:
    """The order of two domains may be another one on each server."""
    settings = {"server_id": 2, "log_slave_updates": True}
    with (
        mysql_of("mariadb") as first,
        mysql_of("mariadb", settings) as second,
        first.database() as database,
    ):
        other = MysqlDatabase(second, database.name)
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path, follow="gtid") as feed:
            database.execute("INSERT INTO users VALUES (1)")
            assert ids(feed) == [1]
        gtid = database.execute("SELECT @@gtid_binlog_pos")[0][0]
        other.server.execute(f"CREATE DATABASE `{database.name}`; RESET MASTER")
        # The replica has something new of its own in another domain, and then the same rows.
        domain, server, last = map(int, str(gtid).split("-"))
        other.execute("SET sql_log_bin = 0; CREATE TABLE users (id int PRIMARY KEY)")
        other.execute("SET gtid_domain_id = 7; INSERT INTO users VALUES (70)")
        other.execute(
            f"SET server_id = {server}, gtid_domain_id = {domain}, gtid_seq_no = {last};"
            "INSERT INTO users VALUES (1)"
        )
        for _ in range(3):
            with captured(other, tmp_path, follow="gtid") as feed:
                assert ids(feed) == [1, 70]
                assert_told_once(feed)


def test_a_server_that_gets_another_domain_is_the_same(tmp_path: Path) -> None:
    with mysql_of("mariadb") as server, server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path) as feed:
            database.execute("INSERT INTO users VALUES (1)")
            assert ids(feed) == [1]
            server.execute("SET GLOBAL gtid_domain_id = 9")
            feed.restart()
            database.execute("INSERT INTO users VALUES (2)")
            assert ids(feed) == [1, 2]
            assert feed.resume.server == "mariadb:1:9"


def test_a_server_that_has_none_of_our_transactions_is_refused(
    my_kind: str, tmp_path: Path
) -> None:
    foreign = {"server_id": 7} | ({"gtid_domain_id": 5} if my_kind == "mariadb" else {})
    with (
        mysql_of(my_kind) as first,
        mysql_of(my_kind, foreign) as second,
        first.database() as database,
    ):
        database.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
        with captured(database, tmp_path, follow="gtid") as feed:
            feed.until_caught_up()
        second.execute(f"CREATE DATABASE `{database.name}`")
        other = MysqlDatabase(second, database.name)
        other.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (9)")
        with captured(other, tmp_path, start=False, follow="gtid") as feed:
            feed.start()
            error = feed.until_halted().error
            assert "has not written 0-1-" in error or "has not executed all" in error
            assert feed.status.phase is Phase.HALTED
            assert "headrace snapshot" in feed.status.hint


def ids(feed: Captured) -> list[int]:
    """The keys of the table `users`, as the log adds up."""
    return sorted(row["id"] for row in feed.rows("users"))


def assert_told_once(feed: Captured) -> None:
    """No row is in the log a second time."""
    images = [change.after for change in feed.changes(Op.READ, Op.INSERT)]
    assert len(images) == len(set(images))


def replicate(first: MysqlServer, second: MysqlServer) -> None:
    """Make one server the replica of another."""
    if first.mariadb:
        second.execute(
            "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_USER = 'root',"
            f" MASTER_PORT = {first.port}, MASTER_USE_GTID = slave_pos; START SLAVE"
        )
    else:
        second.execute(
            "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_USER = 'root',"
            f" SOURCE_PORT = {first.port}, SOURCE_AUTO_POSITION = 1, GET_SOURCE_PUBLIC_KEY = 1;"
            "START REPLICA"
        )


def uuid(server: MysqlServer) -> str:
    """How a MySQL is named."""
    return str(server.execute("SELECT @@server_uuid")[0][0])


def rows(database: MysqlDatabase) -> int:
    """How many users there are; -1: the table is not replicated yet."""
    try:
        return int(database.execute("SELECT count(*) FROM users")[0][0])
    except pymysql.err.ProgrammingError:
        return -1
