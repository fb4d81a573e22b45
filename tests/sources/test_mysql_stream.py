"""Every change of the binary log comes once, in whole transactions."""

import dataclasses
from pathlib import Path

import pymysql
import pytest

from headrace.change.event import BeforeKind, Op
from headrace.sources import Phase
from headrace.sources.mysql.position import MysqlPosition
from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.mysqls import mysql_of
from tests.sources.mycapturing import captured, image, numbers, ordered


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position moves at once, also by what is not captured."""
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.sources.mysql.stream._WAIT_SECONDS", 0.05)


def decide(my: MysqlDatabase, statement: str) -> None:
    """Commit or roll back a prepared transaction, once the server has ended its connection."""

    def decided() -> bool:
        try:
            my.execute(statement)
        except pymysql.err.OperationalError as error:
            if error.args[0] == 1397:  # XAER_NOTA
                return False
            raise
        return True

    wait_until(decided, timeout=60)


@pytest.mark.requirement("S0-32", "S1-13")
def test_a_transaction_is_named_by_its_gtid_and_stands_at_its_place(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    with captured(my, tmp_path) as feed:
        file, begin = my.server.end
        my.execute(
            "BEGIN; INSERT INTO users VALUES (1, 'a'); INSERT INTO users VALUES (2, 'b'); COMMIT"
        )
        gtid = _last_gtid(my)
        first, second = feed.streamed()
        assert {first.transaction.id, second.transaction.id} == {gtid}
        assert (first.ordinal, first.last, second.ordinal, second.last) == (1, False, 2, True)
        assert isinstance(first.position, MysqlPosition)
        found = first.position.to_json()
        assert (found["file"], found["gtid"], found["begin"]) == (file, gtid, begin)
        assert isinstance(second.position, MysqlPosition)
        assert begin < first.position.position < second.position.position
        assert first.transaction.commit_time > 1_700_000_000_000_000
        assert first.table.origin.startswith("mysql:")
        assert (first.table.connector, first.table.schema) == ("mysql", my.name)


def test_tables_without_transactions_commit_with_each_statement(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    my.execute(
        "CREATE TABLE plain (id int PRIMARY KEY) ENGINE=MyISAM; INSERT INTO plain VALUES (1)"
    )
    with captured(my, tmp_path) as feed:
        my.execute("BEGIN; INSERT INTO plain VALUES (2); INSERT INTO plain VALUES (3); ROLLBACK")
        inserts = feed.streamed(Op.INSERT)
        assert [(image(each.after)["id"], each.last) for each in inserts] == [(2, True), (3, True)]
        assert [row["id"] for row in feed.rows("plain")] == [1, 2, 3]


def test_a_savepoint_beside_a_table_without_transactions_is_rolled_back(
    my_kind: str, tmp_path: Path
) -> None:
    # MySQL with GTIDs refuses to mix the two.
    loose = {} if my_kind == "mariadb" else {"gtid_mode": False, "enforce_gtid_consistency": False}
    with mysql_of(my_kind, loose) as server, server.database() as database:
        database.execute(
            "CREATE TABLE plain (id int) ENGINE=MyISAM; CREATE TABLE users (id int PRIMARY KEY)"
        )
        with captured(database, tmp_path) as feed:
            database.execute(
                "BEGIN; INSERT INTO users VALUES (1); INSERT INTO plain VALUES (1); SAVEPOINT a;"
                "INSERT INTO users VALUES (2); INSERT INTO plain VALUES (2); ROLLBACK TO a;"
                "INSERT INTO users VALUES (3); COMMIT"
            )
            inserts = feed.streamed(Op.INSERT, table="users")
            assert [image(each.after)["id"] for each in inserts] == [1, 3]
            assert [each.ordinal for each in inserts] == [1, 2]
            assert [row["id"] for row in feed.rows("plain")] == [1, 2]


def test_xa_transactions_are_told_when_they_commit(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with captured(my, tmp_path) as feed:
        for name, number in (("kept", 1), ("undone", 2), ("later", 3)):
            my.execute(
                f"XA START '{name}', 'b'; INSERT INTO users VALUES ({number});"
                f"XA END '{name}', 'b'; XA PREPARE '{name}', 'b'"
            )
        my.execute("INSERT INTO users VALUES (10)")
        assert [image(each.after)["id"] for each in feed.streamed(Op.INSERT)] == [10]
        assert len(feed.resume.prepared) == 3
        my.execute("FLUSH LOGS")
        decide(my, "XA ROLLBACK 'undone', 'b'")
        decide(my, "XA COMMIT 'kept', 'b'")
        my.execute(
            "XA START 'a'; INSERT INTO users VALUES (5); XA END 'a'; XA COMMIT 'a' ONE PHASE"
        )
        feed.until_caught_up()
        feed.restart()  # what is prepared has to be read again
        feed.until_streaming()
        decide(my, "XA COMMIT 'later', 'b'")
        inserts = feed.streamed(Op.INSERT)
        assert [image(each.after)["id"] for each in inserts] == [10, 1, 5, 3]
        assert all(each.last for each in inserts)
        assert feed.resume.prepared == {}
        my.execute(
            "XA START 'one'; INSERT INTO users VALUES (4); XA END 'one'; XA COMMIT 'one' ONE PHASE"
        )
        assert sorted(row["id"] for row in feed.rows("users")) == [1, 3, 4, 5, 10]


@pytest.mark.parametrize("parts", [1, 4], ids=["one", "several"])
def test_rows_of_xa_transactions_may_wait_as_long_as_there_is_room(
    my: MysqlDatabase, tmp_path: Path, parts: int
) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    with captured(my, tmp_path, xa_memory_mb=1) as feed:
        for part in range(parts):
            my.execute(
                f"XA START 'x{part}';"
                f"INSERT INTO users SELECT {part} * 10000 + seq, repeat('x', 200)"
                f" FROM {numbers(3000 // parts)}; XA END 'x{part}'; XA PREPARE 'x{part}'"
            )
        assert "xa_memory_mb, which is 1" in feed.until_halted().error
        assert "larger xa_memory_mb" in feed.status.hint
        for part in range(parts):
            decide(my, f"XA COMMIT 'x{part}'")
        feed.source = dataclasses.replace(feed.source, xa_memory_mb=10)
        feed.restart()
        rows = 3000 // parts * parts
        assert len(feed.rows("users")) == rows


def test_a_copy_waits_for_xa_transactions_that_are_prepared(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    my.execute(
        "CREATE TABLE users (id int PRIMARY KEY); XA START 'x'; INSERT INTO users VALUES (1);"
        "XA END 'x'; XA PREPARE 'x'"
    )
    with captured(my, tmp_path, start=False) as feed:
        feed.start()
        feed.until(lambda: feed.status.phase is Phase.WAITING, "it waits")
        assert "XA transactions are prepared" in feed.status.error
        decide(my, "XA COMMIT 'x'")
        feed.until_streaming()
        assert [row["id"] for row in feed.rows("users")] == [1]


@pytest.mark.requirement("S1-14")
def test_annotations_are_metadata_of_their_transaction_and_no_changes(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    my.execute(
        "CREATE TABLE headrace_annotations (id bigint AUTO_INCREMENT PRIMARY KEY, metadata json);"
        "CREATE TABLE users (id int PRIMARY KEY); INSERT INTO headrace_annotations (metadata)"
        """ VALUES ('{"user": "nobody"}')"""
    )
    with captured(my, tmp_path) as feed:
        my.execute(
            "BEGIN; INSERT INTO users VALUES (1);"
            """INSERT INTO headrace_annotations (metadata) VALUES ('{"session_id": "sess_1"}');"""
            "DELETE FROM headrace_annotations; INSERT INTO users VALUES (2); COMMIT;"
            "INSERT INTO users VALUES (3)"
        )
        found = [
            (image(each.after)["id"], image(each.transaction.metadata)) for each in feed.streamed()
        ]
        assert found == [(1, {"session_id": "sess_1"}), (2, {"session_id": "sess_1"}), (3, None)]
        assert feed.changes(table="headrace_annotations") == []
        my.execute(
            "BEGIN; INSERT INTO headrace_annotations (metadata) VALUES ('[1]');"
            "INSERT INTO users VALUES (4); COMMIT"
        )
        assert image(feed.streamed()[-1].transaction.metadata) == {"annotation_error": "[1]"}


def test_old_rows_are_as_much_as_the_server_sends(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text, age int);"
        "INSERT INTO users VALUES (1, 'a', 1)"
    )
    with captured(my, tmp_path) as feed:
        my.execute("UPDATE users SET age = 2")
        my.execute("SET SESSION binlog_row_image = MINIMAL; UPDATE users SET age = 3")
        my.execute("SET SESSION binlog_row_image = MINIMAL; DELETE FROM users")
        full, partial, delete = feed.streamed()
        assert (full.before_kind, image(full.before)) == (
            BeforeKind.FULL,
            {"id": 1, "name": "a", "age": 1},
        )
        assert full.changed == ("age",)
        assert (partial.before_kind, image(partial.before)) == (BeforeKind.KEY, {"id": 1})
        assert image(partial.after) == {"id": 1, "age": 3}
        assert partial.unchanged == ("name",)
        assert (delete.before_kind, image(delete.before)) == (BeforeKind.KEY, {"id": 1})
        assert feed.rows("users") == []


def test_a_large_transaction_comes_in_pieces_and_a_large_value_in_packets(
    own_my: MysqlServer, tmp_path: Path
) -> None:
    own_my.execute("SET GLOBAL max_allowed_packet = 67108864")
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name longtext)")
        with captured(database, tmp_path) as feed:
            database.execute(f"INSERT INTO users SELECT seq, 'x' FROM {numbers(50_000)}")
            database.execute("INSERT INTO users VALUES (0, repeat('y', 20000000))")
            inserts = feed.streamed(Op.INSERT)
            assert [each.ordinal for each in inserts[:-1]] == list(range(1, 50_001))
            assert [each.last for each in inserts].count(True) == 2
            assert len(image(inserts[-1].after)["name"]) == 20_000_000


def test_files_of_the_binary_log_follow_one_another(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with captured(my, tmp_path) as feed:
        for number in range(1, 6):
            my.execute(f"INSERT INTO users VALUES ({number}); FLUSH LOGS")
        inserts = feed.streamed(Op.INSERT)
        assert [image(each.after)["id"] for each in inserts] == [1, 2, 3, 4, 5]
        assert len({each.position.to_json()["file"] for each in inserts}) == 5
        feed.restart()
        my.execute("INSERT INTO users VALUES (6)")
        assert [row["id"] for row in feed.rows("users")] == [1, 2, 3, 4, 5, 6]


def test_compressed_events_are_read(own_my: MysqlServer, tmp_path: Path) -> None:
    own_my.execute(
        "SET GLOBAL log_bin_compress = ON, GLOBAL log_bin_compress_min_len = 10"
        if own_my.mariadb
        else "SET GLOBAL binlog_transaction_compression = ON"
    )
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        with captured(database, tmp_path) as feed:
            rows = numbers(100)
            database.execute(f"INSERT INTO users SELECT seq, repeat('x', 200) FROM {rows}")
            database.execute("UPDATE users SET name = repeat('y', 200) WHERE id < 50")
            database.execute("DELETE FROM users WHERE id > 90")
            assert len(feed.rows("users")) == 90


def test_what_was_there_comes_once_without_a_snapshot(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
    with captured(my, tmp_path, snapshot=False) as feed:
        my.execute("INSERT INTO users VALUES (2)")
        assert [each.op for each in feed.changes()] == [Op.SCHEMA, Op.INSERT]
        my.execute("CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later VALUES (3)")
        assert [row["id"] for row in feed.rows("later")] == [3]


def test_small_updates_of_many_transactions_stay_apart(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY, n int)")
    my.execute(f"INSERT INTO users SELECT seq, 0 FROM {numbers(40)}")
    with captured(my, tmp_path) as feed:
        feed.capture.stop()  # so that all are read at once
        for number in range(1, 40):
            my.execute(f"UPDATE users SET n = {number} WHERE id IN ({number}, {number + 1})")
            my.execute(f"DELETE FROM users WHERE id = {number}")
        feed.start()
        streamed = feed.streamed()
        assert [(each.op, each.ordinal, each.last) for each in streamed] == [
            (Op.UPDATE, 1, False),
            (Op.UPDATE, 2, True),
            (Op.DELETE, 1, True),
        ] * 39
        assert [image(each.after)["n"] for each in streamed[::3]] == list(range(1, 40))


def _last_gtid(database: MysqlDatabase) -> str:
    """The GTID of the newest transaction."""
    if database.server.mariadb:
        return str(database.execute("SELECT @@gtid_binlog_pos")[0][0])
    server, _, executed = str(database.execute("SELECT @@gtid_executed")[0][0]).partition(":")
    return f"{server}:{executed.rpartition('-')[2]}"


def test_a_snapshot_of_what_came_later_passes_over_nothing(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    """Also where no table was there when the source began."""
    with captured(my, tmp_path) as feed:
        my.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
        feed.until_caught_up()
        writes = "; ".join(f"INSERT INTO t VALUES ({number})" for number in range(50))
        my.execute(f"RENAME TABLE u TO v; {writes}")
        feed.until_caught_up()
        assert feed.rows("t") == ordered([{"id": number} for number in range(50)])
