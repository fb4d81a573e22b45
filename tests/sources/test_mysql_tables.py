"""Tables that differ from their columns in the catalogue, and readers in each other's way."""

import struct
from pathlib import Path

import msgspec
import pytest

from headrace.change.event import Op
from headrace.errors import DecodeError
from headrace.retry import Backoff
from headrace.sources import Phase
from headrace.sources.mysql.decode import typecodes
from headrace.sources.mysql.decode.binlog import parse
from headrace.sources.mysql.decode.columns import DeclaredColumn, columns_of
from headrace.sources.mysql.decode.events import UNKNOWN, TableMap
from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.sources.mycapturing import captured, image, snapshot_rows


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position moves at once, also by what is not captured."""
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.sources.mysql.stream._WAIT_SECONDS", 0.05)
    monkeypatch.setattr("headrace.capture.BACKOFF", Backoff(0.5, 0.5, 0.25))


def test_columns_that_an_index_needs_are_not_told(own_my: MysqlServer, tmp_path: Path) -> None:
    unique = "UNIQUE (name)" if own_my.mariadb else "UNIQUE ((upper(substr(name, 1, 50))))"
    for metadata in ("FULL", "MINIMAL"):
        own_my.execute(f"SET GLOBAL binlog_row_metadata = {metadata}")
        with own_my.database() as database:
            database.execute(f"CREATE TABLE users (id int PRIMARY KEY, name text, {unique})")
            database.execute("INSERT INTO users VALUES (1, 'a')")
            with captured(database, tmp_path / metadata) as feed:
                database.execute("INSERT INTO users VALUES (2, 'b')")
                feed.until_caught_up()
                assert [each.op for each in feed.streamed()] == [Op.INSERT]
                database.execute("ALTER TABLE users ADD COLUMN n int DEFAULT 5")
                feed.until_caught_up()
                database.execute("UPDATE users SET name = 'c' WHERE id = 1")
                assert feed.rows("users") == [
                    {"id": 1, "name": "c", "n": 5},
                    {"id": 2, "name": "b", "n": 5},
                ]
                assert feed.status.errored == {}


@pytest.mark.parametrize("server", ["8.0.15", "8.0.46", "10.11.19-MariaDB"])
def test_a_year_shifts_no_signs(server: str) -> None:
    """The server of 8.0.15 has no bit for it, later ones have; both have one byte for all here."""
    newer = server != "8.0.15"
    signs = 0b1111_0000 if newer else 0b1110_0000
    kinds = bytes((typecodes.LONG, typecodes.YEAR, typecodes.TINY, typecodes.TINY))
    data = b"\1d\0\1t\0" + b"\4" + kinds + b"\0" + b"\0" + bytes((1, 1, signs))
    form = msgspec.structs.replace(UNKNOWN, server=server, checksum=False)
    size = 19 + 8 + len(data)
    event = parse(struct.pack("<IBIIIH", 0, 19, 1, size, 0, 0) + bytes(8) + data, form)
    assert isinstance(event, TableMap)
    declared = tuple(
        DeclaredColumn(name, kind)
        for name, kind in (
            ("id", "int unsigned"),
            ("y", "year"),
            ("u", "tinyint unsigned"),
            ("v", "tinyint unsigned"),
        )
    )
    found = columns_of(event.columns, declared)
    assert [found[at].unsigned for at in (0, 2, 3)] == [True, True, True]
    if not newer:  # only the catalogue knows
        named = msgspec.structs.replace(event.columns[2], name="u")
        with pytest.raises(DecodeError, match="whether u has a sign"):
            columns_of((named,), None)


def test_numbers_behind_a_year_are_read_as_they_are_copied(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    numbers = [f"n{number} tinyint unsigned" for number in range(6)]
    my.execute(f"CREATE TABLE users (id int PRIMARY KEY, y year, {', '.join(numbers)})")
    with captured(my, tmp_path) as feed:
        my.execute(f"INSERT INTO users VALUES (1, 2024{', 255' * 6})")
        assert feed.rows("users") == snapshot_rows(my, tmp_path / "other")["users"]


def test_a_table_that_keeps_its_history_is_not_captured_and_says_so(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    maria.execute("CREATE TABLE users (id int PRIMARY KEY) WITH SYSTEM VERSIONING")
    maria.execute("CREATE TABLE later (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
    with captured(maria, tmp_path) as feed:
        users, later = f"{maria.name}.users", f"{maria.name}.later"
        assert "keeps its history" in feed.status.errored[users]
        maria.execute("DELETE FROM users; INSERT INTO later VALUES (1)")
        maria.execute("ALTER TABLE later ADD SYSTEM VERSIONING")
        feed.until_caught_up()
        maria.execute("DELETE FROM later")
        feed.until(lambda: later in feed.status.errored, "it is noticed")
        assert feed.changes(Op.DELETE, Op.UPDATE) == []
        maria.execute("ALTER TABLE users DROP SYSTEM VERSIONING; INSERT INTO users VALUES (2)")
        feed.until_caught_up()
        feed.capture.copy_again([users])
        feed.until(
            lambda: (
                list(feed.resume.errored) == [(maria.name, "later")] and not feed.resume.to_snapshot
            ),
            "copied",
        )
        maria.execute("INSERT INTO users VALUES (3)")
        assert [row["id"] for row in feed.rows("users", surprises=True)] == [2, 3]


def test_a_table_that_gets_another_key_is_copied_again(my: MysqlDatabase, tmp_path: Path) -> None:
    """As `headrace check` proposes for a table that has none."""
    my.execute("CREATE TABLE users (name varchar(20)); INSERT INTO users VALUES ('a'), ('b')")
    with captured(my, tmp_path) as feed:
        my.execute("ALTER TABLE users ADD COLUMN row_id bigint AUTO_INCREMENT PRIMARY KEY")
        my.execute("UPDATE users SET name = 'c' WHERE name = 'a'; DELETE FROM users LIMIT 1")
        rows = feed.rows("users")
        assert rows == snapshot_rows(my, tmp_path / "other")["users"]
        assert len(rows) == 1


def test_a_value_that_cannot_be_read_keeps_no_other_table_from_being_copied(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    maria.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text CHARACTER SET ucs2);"
        "CREATE TABLE b (id int PRIMARY KEY, n int)"
    )
    maria.execute("INSERT INTO a SELECT seq, repeat(x'0041', 200) FROM seq_1_to_20000")
    maria.execute("UPDATE a SET t = x'd800' WHERE id = 1; INSERT INTO b VALUES (1, 2), (3, 4)")
    with captured(maria, tmp_path) as feed:
        assert list(feed.status.errored) == [f"{maria.name}.a"]
        assert [image(each.after) for each in feed.changes(Op.READ, table="b")] == [
            {"id": 1, "n": 2},
            {"id": 3, "n": 4},
        ]


def test_two_readers_under_one_number_are_told_of_each_other(
    my: MysqlDatabase, tmp_path: Path
) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with (
        captured(my, tmp_path / "a", server_id=4711) as first,
        captured(my, tmp_path / "b", server_id=4711, start=False) as second,
    ):
        second.start()
        wait_until(lambda: Phase.HALTED in (first.status.phase, second.status.phase), timeout=120)
        halted = first if first.status.phase is Phase.HALTED else second
        assert "same server_id" in halted.status.hint


def test_documents_are_told_alike_whatever_their_column_is(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    """MariaDB's JSON is a constraint, which a column of any type may have."""
    kinds = {
        "a": "text CHARACTER SET latin1",
        "b": "varchar(50) CHARACTER SET ucs2",
        "c": "char(50)",
        "d": "varbinary(50)",
        "e": "enum('1', '2')",
        "f": "int",
        "g": "json",
    }
    columns = ", ".join(f"{name} {kind} CHECK (json_valid({name}))" for name, kind in kinds.items())
    maria.execute(
        f"CREATE TABLE users (id int PRIMARY KEY, {columns})".replace(
            "g json CHECK (json_valid(g))", "g json"
        )
    )
    document = """'{"é": [1, "ü"]}'"""
    values = f"{document}, {document}, {document}, {document}, '1', 7, {document}"
    maria.execute(f"INSERT INTO users VALUES (1, {values})")
    with captured(maria, tmp_path) as feed:
        maria.execute(f"INSERT INTO users VALUES (2, {values})")
        copied, streamed = feed.rows("users")
        assert {**copied, "id": 2} == streamed
        for name in ("a", "b", "c", "g"):
            assert streamed[name] == {"é": [1, "ü"]}
        assert (streamed["e"], streamed["f"]) == ("1", 7)
        (change,) = feed.streamed()
        types = {column.name: column.type for column in change.table.columns}
        assert [name for name, kind in types.items() if kind == "json"] == ["a", "b", "c", "g"]


def test_a_temporary_table_that_is_renamed_takes_no_captured_one_along(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    maria.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
    with captured(maria, tmp_path) as feed:
        maria.execute(
            "CREATE TEMPORARY TABLE users (id int); RENAME TABLE users TO others;"
            "INSERT INTO users VALUES (2)"
        )
        feed.until_caught_up()
        maria.execute("INSERT INTO users VALUES (3)")
        assert [row["id"] for row in feed.rows("users")] == [1, 2, 3]
