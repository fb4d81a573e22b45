"""What MySQL does and MariaDB does not, or in another way."""

import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pymysql
import pytest

from headrace.change.event import BeforeKind, Op
from headrace.retry import Backoff
from headrace.secret import Secret
from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.mysqls import MYSQLS, mysql_of
from tests.sources.mycapturing import Captured, captured, image, numbers, snapshot_rows


@pytest.fixture(params=MYSQLS)
def my_kind(request: pytest.FixtureRequest) -> str:
    """Each MySQL in turn."""
    return str(request.param)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position moves at once, also by what is not captured; nobody waits long."""
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.sources.mysql.stream._WAIT_SECONDS", 0.05)
    monkeypatch.setattr("headrace.capture.BACKOFF", Backoff(0.5, 0.5, 0.25))


def expect_equal(feed: Captured, folder: Path, *tables: str) -> None:
    """The log adds up to what a copy made now shows, types included."""
    found = {table: feed.rows(table) for table in tables}
    shown = snapshot_rows(feed.database, folder / "other")
    assert found == {table: shown.get(table, []) for table in tables}


# --- rows ----------------------------------------------------------------------------------------

WIDE = (
    "CREATE TABLE wide (id int unsigned PRIMARY KEY, n bigint unsigned, name varchar(20)"
    " CHARACTER SET latin1, body blob, note text, doc json, size enum('s', 'm'),"
    " flags set('a', 'b'), ok tinyint(1))"
)
WRITES = (
    "INSERT INTO wide VALUES (1, 18446744073709551615, 'é', x'00ff', 'n', '{\"a\": 1}', 'm',"
    " 'a,b', 1), (2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)",
    "UPDATE wide SET n = 7 WHERE id = 1",
    "UPDATE wide SET note = 'other', doc = '[1.5, null]' WHERE id = 2",
    "UPDATE wide SET id = 4000000000 WHERE id = 2",
    "INSERT INTO wide (id, size) VALUES (3, 's')",
    "DELETE FROM wide WHERE id = 3",
)


@pytest.mark.parametrize("metadata", ["MINIMAL", "FULL"])
@pytest.mark.parametrize("image_kind", ["MINIMAL", "NOBLOB", "FULL"])
def test_images_of_every_kind_add_up(
    own_my: MysqlServer, tmp_path: Path, image_kind: str, metadata: str
) -> None:
    own_my.execute(
        f"SET GLOBAL binlog_row_image = {image_kind}, GLOBAL binlog_row_metadata = {metadata}"
    )
    with own_my.database() as database:
        database.execute(WIDE)
        with captured(database, tmp_path) as feed:
            for statement in WRITES:
                database.execute(statement)
            feed.until_caught_up()
            database.execute("ALTER TABLE wide ADD COLUMN more int unsigned FIRST")
            feed.until_caught_up()
            database.execute("UPDATE wide SET more = 4000000001")
            expect_equal(feed, tmp_path, "wide")
            first = feed.streamed(Op.UPDATE)[0]
            assert first.before_kind is (
                BeforeKind.FULL if image_kind == "FULL" else first.before_kind
            )
            assert ("body" in first.unchanged) is (image_kind != "FULL")


def test_columns_that_are_hidden_or_computed_are_told(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute(
        "CREATE TABLE users (id int PRIMARY KEY, secret int INVISIBLE DEFAULT 5, a int,"
        " twice int AS (a * 2) VIRTUAL, thrice int AS (a * 3) STORED, INDEX ((a + 1)));"
        "INSERT INTO users (id, a) VALUES (1, 10)"
    )
    with captured(my, tmp_path) as feed:
        my.execute("INSERT INTO users (id, secret, a) VALUES (2, 6, 20)")
        my.execute("UPDATE users SET a = 11 WHERE id = 1")
        expected = {"id": 2, "secret": 6, "a": 20, "twice": 40, "thrice": 60}
        assert image(feed.streamed(Op.INSERT)[0].after) == expected
        expect_equal(feed, tmp_path, "users")


@pytest.mark.parametrize("shown", ["ON", "OFF"])
def test_a_primary_key_that_the_server_made_is_the_key(
    own_my: MysqlServer, tmp_path: Path, shown: str
) -> None:
    own_my.execute(
        "SET GLOBAL sql_generate_invisible_primary_key = ON,"
        f" GLOBAL show_gipk_in_create_table_and_information_schema = {shown}"
    )
    with own_my.database() as database:
        database.execute("CREATE TABLE users (name text); INSERT INTO users VALUES ('a')")
        with captured(database, tmp_path) as feed:
            database.execute("INSERT INTO users VALUES ('b'); UPDATE users SET name = 'c'")
            keys = [image(change.key) for change in feed.streamed(Op.UPDATE)]
            assert keys == [{"my_row_id": 1}, {"my_row_id": 2}]
            assert [row["my_row_id"] for row in feed.rows("users")] == [1, 2]
            expect_equal(feed, tmp_path, "users")


def test_parts_of_documents_halt_with_the_setting(my: MysqlDatabase, tmp_path: Path) -> None:
    my.execute("CREATE TABLE docs (id int PRIMARY KEY, doc json)")
    my.execute("""INSERT INTO docs VALUES (1, '{"a": 1, "b": "some more text"}')""")
    with captured(my, tmp_path) as feed:
        my.execute(
            "SET SESSION binlog_row_value_options = PARTIAL_JSON;"
            "UPDATE docs SET doc = JSON_SET(doc, '$.a', 2)"
        )
        assert "partial JSON" in feed.until_halted().error
        assert "binlog_row_value_options = ''" in feed.status.hint
        feed.capture.copy_again([])
        feed.until_streaming()
        my.execute("UPDATE docs SET doc = JSON_SET(doc, '$.a', 3)")
        assert feed.rows("docs")[0]["doc"] == {"a": 3, "b": "some more text"}


# --- transactions --------------------------------------------------------------------------------


def test_compressed_transactions_are_read_and_gone_on_after(
    own_my: MysqlServer, tmp_path: Path
) -> None:
    own_my.execute("SET GLOBAL binlog_transaction_compression = ON")
    with own_my.database() as database:
        database.execute(f"{WIDE}; CREATE TABLE users (id int PRIMARY KEY, name text)")
        with captured(database, tmp_path) as feed:
            for statement in WRITES:
                database.execute(statement)
            database.execute(
                f"BEGIN; INSERT INTO users SELECT seq, repeat('x', 50) FROM {numbers(30_000)};"
                "UPDATE wide SET name = 'ü'; COMMIT"
            )
            feed.until_caught_up()
            feed.restart()
            database.execute("UPDATE users SET name = 'y' WHERE id <= 3")
            assert len(feed.streamed(Op.INSERT, table="users")) == 30_000
            expect_equal(feed, tmp_path, "wide", "users")


def test_a_server_without_gtids_is_followed_and_may_get_them(my_kind: str, tmp_path: Path) -> None:
    loose = {"gtid_mode": False, "enforce_gtid_consistency": False}
    with mysql_of(my_kind, loose) as server, server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path) as feed:
            database.execute("INSERT INTO users VALUES (1)")
            (insert,) = feed.streamed()
            place = insert.position.to_json()
            assert insert.transaction.id == f"{place['file']}:{place['begin']}"
            assert place["gtid"] == ""
            server.execute("SET GLOBAL enforce_gtid_consistency = ON")
            for mode in ("OFF_PERMISSIVE", "ON_PERMISSIVE", "ON"):
                server.execute(f"SET GLOBAL gtid_mode = {mode}")
            database.execute("INSERT INTO users VALUES (2)")
            feed.until_caught_up()
            feed.restart()
            database.execute("INSERT INTO users VALUES (3)")
            assert [row["id"] for row in feed.rows("users")] == [1, 2, 3]
            assert feed.streamed()[-1].transaction.id == f"{_uuid(server)}:2"


def test_a_tag_is_part_of_a_transactions_name(my: MysqlDatabase, tmp_path: Path) -> None:
    if my.server.install.numbers < (8, 4):
        pytest.skip("tags came with MySQL 8.4")
    my.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with captured(my, tmp_path, follow="gtid") as feed:
        my.execute("SET gtid_next = 'AUTOMATIC:blue'; INSERT INTO users VALUES (1)")
        my.execute("INSERT INTO users VALUES (2)")
        blue, plain = feed.streamed()
        assert blue.transaction.id == f"{_uuid(my.server)}:blue:1"
        assert ":blue" not in plain.transaction.id
        assert "blue:1" in feed.resume.gtids
        feed.restart()
        my.execute("SET gtid_next = 'AUTOMATIC:blue'; INSERT INTO users VALUES (3)")
        assert [row["id"] for row in feed.rows("users")] == [1, 2, 3]


def test_statements_beside_their_rows_change_nothing(own_my: MysqlServer, tmp_path: Path) -> None:
    own_my.execute("SET GLOBAL binlog_rows_query_log_events = ON")
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        with captured(database, tmp_path) as feed:
            database.execute("INSERT INTO users VALUES (1, 'INSERT INTO users VALUES (2)')")
            database.execute("UPDATE users SET name = 'x' /* DELETE FROM users */")
            assert [change.op for change in feed.streamed()] == [Op.INSERT, Op.UPDATE]


def test_a_column_that_is_added_at_once_is_there_for_new_rows(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
    with captured(my, tmp_path) as feed:
        my.execute("ALTER TABLE users ADD COLUMN n int DEFAULT 5 FIRST, ALGORITHM = INSTANT")
        my.execute("INSERT INTO users (id) VALUES (2); UPDATE users SET n = 6 WHERE id = 1")
        my.execute("ALTER TABLE users DROP COLUMN n, ALGORITHM = INSTANT")
        my.execute("INSERT INTO users VALUES (3)")
        schema, insert, update, dropped, last = feed.streamed()
        assert [each["name"] for each in image(schema.after)["columns"]] == ["n", "id"]
        assert image(insert.after) == {"n": 5, "id": 2}
        assert image(update.before) == {"n": 5, "id": 1}
        assert [each["name"] for each in image(dropped.after)["columns"]] == ["id"]
        assert image(last.after) == {"id": 3}


# --- the server ----------------------------------------------------------------------------------


def test_another_name_of_the_server_halts(own_my: MysqlServer, tmp_path: Path) -> None:
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(database, tmp_path) as feed:
            feed.capture.stop()
            known = _uuid(own_my)
            own_my.stop()
            (own_my.data / "auto.cnf").unlink()
            own_my.start()
            feed.start()
            error = feed.until_halted().error
            assert f"mysql:{_uuid(own_my)}" in error
            assert f"mysql:{known}" in error
            assert "headrace snapshot shop" in feed.status.hint
            feed.capture.copy_again([])
            feed.until_streaming()
            database.execute("INSERT INTO users VALUES (1)")
            assert [row["id"] for row in feed.rows("users")] == [1]


def test_transactions_that_were_purged_halt_where_gtids_are_followed(
    my_kind: str, tmp_path: Path
) -> None:
    with mysql_of(my_kind) as first, mysql_of(my_kind, {"server_id": 2}) as second:
        with first.database() as database:
            database.execute("CREATE TABLE users (id int PRIMARY KEY)")
            with captured(database, tmp_path, follow="gtid") as feed:
                database.execute("INSERT INTO users VALUES (1)")
                feed.until_caught_up()
            database.execute("INSERT INTO users VALUES (2)")
            executed = first.execute("SELECT @@gtid_executed")[0][0]
        # A server that was restored from a backup has them, and not the files that tell of them.
        second.execute(f"SET GLOBAL gtid_purged = '{executed}'")
        second.execute(f"CREATE DATABASE {database.name}")
        restored = MysqlDatabase(second, database.name)
        restored.execute("CREATE TABLE users (id int PRIMARY KEY)")
        with captured(restored, tmp_path, start=False, follow="gtid") as feed:
            feed.start()
            assert "purged transactions that follow" in feed.until_halted().error
            assert "headrace snapshot shop" in feed.status.hint


def _uuid(server: MysqlServer) -> str:
    return str(server.execute("SELECT @@server_uuid")[0][0])


# --- passwords -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", "?ssl=off", "?ssl_ca={ca}&ssl_verify=off", "?ssl=on"])
def test_a_password_is_believed_with_and_without_encryption(
    my: MysqlDatabase, tmp_path: Path, options: str
) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
    # A new user each time: a password that was believed once needs no key to be sent again.
    name = f"reader_{my.name[-8:]}"
    my.execute(
        f"CREATE USER {name}@'%' IDENTIFIED WITH caching_sha2_password BY 's3cret/é';"
        f"GRANT REPLICATION SLAVE, REPLICATION CLIENT, SELECT, RELOAD ON *.* TO {name}@'%'"
    )
    expected = options.format(ca=my.server.data / "ca.pem")
    url = my.url.replace("root@", f"{name}:s3cret%2F%C3%A9@") + expected
    with captured(my, tmp_path, url=Secret(url)) as feed:
        my.execute("INSERT INTO users VALUES (2)")
        assert [row["id"] for row in feed.rows("users")] == [1, 2]
        with closing(feed.source.address.connect()) as connection:
            cipher = connection.cursor()
            cipher.execute("SHOW STATUS LIKE 'Ssl_cipher'")
            assert bool(cipher.fetchall()[0][1]) is (options != "?ssl=off")


# --- the copy ------------------------------------------------------------------------------------


def test_a_copy_begins_beside_a_query_that_goes_on(own_my: MysqlServer, tmp_path: Path) -> None:
    with own_my.database() as database, closing(database.connect()) as busy:
        database.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
        ((number,),) = _run(busy, "SELECT CONNECTION_ID()")
        asking = threading.Thread(target=_run, args=(busy, "SELECT sleep(600) FROM users"))
        asking.start()
        try:
            query = f"SELECT 1 FROM information_schema.processlist WHERE id = {number} AND state"
            wait_until(lambda: database.execute(f"{query} = 'User sleep'"))
            with captured(database, tmp_path) as feed:
                database.execute("INSERT INTO users VALUES (2)")
                assert [row["id"] for row in feed.rows("users")] == [1, 2]
        finally:
            database.execute(f"KILL {number}")
            asking.join()


def test_a_copy_begins_beside_a_transaction_that_goes_on(
    own_my: MysqlServer, tmp_path: Path
) -> None:
    with own_my.database() as database, closing(database.connect(autocommit=False)) as busy:
        database.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
        _run(busy, "INSERT INTO users VALUES (2)")
        with captured(database, tmp_path) as feed:
            assert [row["id"] for row in feed.rows("users")] == [1]
            busy.commit()
            assert [row["id"] for row in feed.rows("users")] == [1, 2]


def _run(connection: Any, statement: str) -> list[tuple[Any, ...]]:
    with suppress(pymysql.MySQLError), connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())
    return []  # it was killed


def test_a_key_that_the_server_made_is_shown_to_whoever_may_read(
    own_my: MysqlServer, tmp_path: Path
) -> None:
    own_my.execute(
        "SET GLOBAL sql_generate_invisible_primary_key = ON,"
        " GLOBAL show_gipk_in_create_table_and_information_schema = OFF"
    )
    with own_my.database() as database:
        database.execute("CREATE TABLE users (name text); INSERT INTO users VALUES ('a')")
        database.execute(
            "CREATE USER reader IDENTIFIED BY 'x';"
            "GRANT REPLICATION SLAVE, REPLICATION CLIENT, SELECT, RELOAD ON *.* TO reader"
        )
        url = Secret(database.url.replace("root@", "reader:x@"))
        with captured(database, tmp_path, url=url) as feed:
            database.execute("UPDATE users SET name = 'b'")
            assert feed.rows("users") == [{"my_row_id": 1, "name": "b"}]
