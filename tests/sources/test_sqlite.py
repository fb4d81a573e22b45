"""A SQLite source through DDL, locks, other files and other readers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import apsw
import msgspec
import pytest
from typer.testing import CliRunner

from headrace.change.event import Op
from headrace.cli import app
from headrace.log import Log
from headrace.sources import Phase
from headrace.sources.sqlite import alter, install, remove
from headrace.testing import wait_until
from tests.sources.litedb import SOURCE, Captured, captured, sqlite

CREATE = "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


@pytest.fixture
def writer(path: Path) -> Iterator[apsw.Connection]:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(20_000)
    connection.execute(CREATE)
    connection.execute("INSERT INTO users VALUES (1, 'ann'), (2, 'bob')")
    install(str(path), ["*"])
    yield connection
    connection.close()


def objects(connection: apsw.Connection) -> list[tuple[object, ...]]:
    return connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY 1, 2").fetchall()


# -- installing -----------------------------------------------------------------------------------


def test_installed_twice_nothing_changes_and_removed_nothing_is_left(path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(CREATE)
    before = objects(connection)
    assert install(str(path), ["*"]).changed == ("main.users",)
    installed = objects(connection)
    assert install(str(path), ["*"]).changed == ()
    assert objects(connection) == installed
    assert remove(str(path))
    assert objects(connection) == before
    assert not remove(str(path))
    connection.close()


@pytest.mark.requirement("P-02")
def test_a_source_removes_what_it_would_show(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    ours = "SELECT count(*) FROM sqlite_schema WHERE name LIKE 'headrace_%'"
    with captured(path, tmp_path) as feed:
        feed.catch_up()
    source = sqlite(path)
    shown = source.remove(None, dry_run=True)
    assert writer.execute(ours).fetchall() != [(0,)]
    assert source.remove(None) == shown
    assert writer.execute(ours).fetchall() == [(0,)]
    assert source.remove(None) == []


def test_the_commands_install_alter_and_remove(path: Path, writer: apsw.Connection) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["sqlite", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert run("install", str(path)) == "main.users is as it should be\n"
    told = run("alter", str(path), "ALTER TABLE users DROP COLUMN name")
    assert told == "main.users has new triggers\n"
    assert run("remove", str(path)) == "removed\n"
    assert run("remove", str(path)) == "there was nothing to remove\n"
    writer.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    assert run("install", str(path), "--tables", "ord*,x") == "main.orders has new triggers\n"
    absent = CliRunner().invoke(app, ["sqlite", "install", f"{path}.absent"])
    assert (absent.exit_code, "there is no file" in absent.stderr) == (1, True)


def test_a_database_without_triggers_is_refused_with_the_command(
    path: Path, tmp_path: Path
) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(CREATE)
    connection.close()
    findings = {finding.name: finding for finding in sqlite(path).check()}
    assert findings["triggers"].fix == f"headrace sqlite install {path}"
    with Log.open(tmp_path / "log") as log:
        feed = Captured(path, log)
        feed.start()
        status = feed.until_halted()
        feed.capture.stop()
    assert f"headrace sqlite install {path}" in status.hint


# -- DDL ------------------------------------------------------------------------------------------


def test_tables_that_come_change_and_go_are_followed(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    with captured(path, tmp_path) as feed:
        for statements in (
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, n); INSERT INTO orders VALUES (1, 2)",
            "ALTER TABLE users ADD COLUMN at DEFAULT 'now'; INSERT INTO users VALUES (3, 'c', 'd')",
            "ALTER TABLE users RENAME COLUMN name TO label; UPDATE users SET label = 'x'",
            "CREATE UNIQUE INDEX u ON orders (n); REPLACE INTO orders VALUES (5, 2)",
            "ALTER TABLE orders RENAME TO purchases; INSERT INTO purchases VALUES (6, 7)",
            "CREATE TRIGGER x AFTER INSERT ON users BEGIN UPDATE users SET at = 1; END",
            "INSERT INTO users VALUES (9, 'i', 'j')",
            "DROP TABLE users; CREATE TABLE users (id TEXT PRIMARY KEY, other)",
            "INSERT INTO users VALUES ('a', 'b')",
            "DROP TABLE purchases",
            "VACUUM; INSERT INTO users VALUES ('c', 'd')",
        ):
            writer.execute(statements)
            feed.assert_replays(surprises=True)
        schemas = [
            [column["name"] for column in msgspec.json.decode(change.after or b"")["columns"]]
            for change in feed.changes(Op.SCHEMA, table="users")
            if b'"columns"' in (change.after or b"")
        ]
        assert schemas == [
            ["id", "name"],
            ["id", "name", "at"],
            ["id", "label", "at"],
            ["id", "other"],
        ]
        assert set(msgspec.json.decode(feed.log.resume(SOURCE) or b"")["copies"]) == {"main.users"}


def test_altered_by_the_command_a_table_needs_no_copy(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    with captured(path, tmp_path) as feed:
        writer.execute("INSERT INTO users VALUES (3, 'cid')")
        alter(str(path), "ALTER TABLE users ADD COLUMN note TEXT")
        writer.execute("INSERT INTO users (id, name, note) VALUES (4, 'dan', 'n')")
        alter(str(path), "ALTER TABLE users DROP COLUMN name")
        writer.execute("UPDATE users SET note = 'm' WHERE id = 4")
        feed.assert_replays()
        assert len(feed.changes(Op.READ)) == 2
        last = feed.changes(Op.SCHEMA)[-1]
    said = msgspec.json.decode(last.after or b"")
    assert said["ddl_command"] == "ALTER TABLE users DROP COLUMN name"
    assert said["ddl_type"] == "ALTER_TABLE"


# -- trimming and readers -------------------------------------------------------------------------


def test_entries_are_deleted_when_every_reader_has_stored_them_and_not_before(
    path: Path, writer: apsw.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.sqlite.stream._TRIM_LATEST", 0.1)

    def entries() -> int:
        ((count,),) = writer.execute("SELECT count(*) FROM headrace_changes").fetchall()
        return int(str(count))

    with captured(path, tmp_path) as feed:
        writer.execute("INSERT INTO users (name) SELECT 'x' FROM users, users, users")
        wait_until(lambda: entries() == 1, message="all but the newest are deleted")
        feed.assert_replays()
        (tmp_path / "second").mkdir()
        with captured(path, tmp_path / "second", name="second") as second:
            second.capture.stop()
            writer.execute("UPDATE users SET name = 'y'")
            feed.catch_up()
            assert entries() >= 10  # the second reader has none of them
            second.start()
            wait_until(lambda: entries() == 1, message="both have them")


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_lock_is_waited_for(path: Path, writer: apsw.Connection, tmp_path: Path) -> None:
    writer.execute("SELECT * FROM users").fetchall()  # else it takes the mode for what it was
    assert writer.execute("PRAGMA journal_mode = DELETE").fetchall() == [("delete",)]
    with captured(path, tmp_path) as feed:
        writer.execute("BEGIN EXCLUSIVE; INSERT INTO users VALUES (7, 'locked')")
        wait_until(
            lambda: feed.status.phase is Phase.WAITING, timeout=120, message="it waits for the lock"
        )
        assert "locked" in feed.status.error
        writer.execute("COMMIT")
        feed.assert_replays()


def test_another_file_in_its_place_halts_with_the_way_out(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    writer.close()
    with captured(path, tmp_path) as feed:
        other = tmp_path / "other.db"
        connection = apsw.Connection(str(other))
        connection.execute(CREATE)
        connection.execute("INSERT INTO users VALUES (10, 'other')")
        connection.close()
        install(str(other), ["*"])
        other.rename(path)
        status = feed.until_halted()
        assert "the log follows database" in status.error
        assert f"headrace snapshot {SOURCE}" in status.hint
        feed.capture.copy_again([])
        feed.assert_replays()


@pytest.mark.parametrize("written", [0, 50], ids=["at once", "after it was written to"])
def test_an_older_copy_in_its_place_halts(
    path: Path, writer: apsw.Connection, tmp_path: Path, written: int
) -> None:
    writer.close()
    shutil.copy(path, tmp_path / "backup.db")
    with captured(path, tmp_path) as feed:
        connection = apsw.Connection(str(path))
        connection.set_busy_timeout(20_000)
        connection.execute("INSERT INTO users VALUES (3, 'since')")
        feed.catch_up()
        feed.capture.stop()
        connection.close()
        (tmp_path / "backup.db").rename(path)
        connection = apsw.Connection(str(path))
        for _ in range(written):
            connection.execute("INSERT INTO users (name) VALUES ('x')")
        connection.close()
        feed.start()
        assert feed.until_halted().hint


def test_removed_while_it_runs_it_halts(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    with captured(path, tmp_path) as feed:
        remove(str(path))
        assert "headrace sqlite install" in feed.until_halted().hint


def test_a_value_that_cannot_be_told_stops_its_table_alone(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    writer.execute("CREATE TABLE other (id TEXT PRIMARY KEY, a)")
    with captured(path, tmp_path) as feed:
        writer.execute("INSERT INTO users VALUES (3, CAST(x'ff61' AS TEXT))")
        writer.execute("INSERT INTO other VALUES (NULL, 1)")
        writer.execute("CREATE TABLE fine (id INTEGER PRIMARY KEY); INSERT INTO fine VALUES (1)")
        kept = [msgspec.json.decode(c.after or b"") for c in feed.changes(Op.MESSAGE)]
        assert [said["operation"] for said in kept] == ["INSERT", "INSERT"]
        assert kept[0]["values"] == [3, {"base64": "/2E="}]
        reasons = feed.status.errored
        assert "'name' has text that is not UTF-8" in reasons["main.users"]
        assert "NULL in its primary key" in reasons["main.other"]
        writer.execute("DELETE FROM users WHERE id = 3; DELETE FROM other")
        feed.capture.copy_again(["users", "other"])
        feed.until(lambda: not feed.status.errored, "they are healed")
        feed.assert_replays(surprises=True)
