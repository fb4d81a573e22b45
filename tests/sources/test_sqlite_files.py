"""Which file, of which time, and whose: copies, backups, attached databases, several readers."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from headrace.change.event import Op
from headrace.errors import SourceRefused
from headrace.log import Log
from headrace.sources import Phase
from headrace.sources.sqlite import alter, install, remove
from headrace.sources.sqlite.database import Database
from headrace.testing import reading, session, wait_until
from tests.sources.litedb import SOURCE, Captured, SqlitePlace, captured, sqlite

CREATE = "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)"


def opened(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(20_000)
    return connection


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(opened(tmp_path / "shop.db")) as connection:
        connection.execute(CREATE)
        connection.execute("INSERT INTO users VALUES (1, 'ann'), (2, 'bob')")
    install(str(tmp_path / "shop.db"), ["*"])
    return tmp_path / "shop.db"


@pytest.fixture
def writer(path: Path) -> Iterator[apsw.Connection]:
    with closing(opened(path)) as connection:
        yield connection


# -- copies and backups ---------------------------------------------------------------------------


def by_vacuum(path: Path, copy: Path) -> None:
    with closing(opened(path)) as connection:
        connection.execute("VACUUM INTO ?", (str(copy),))


def by_backup(path: Path, copy: Path) -> None:
    with (
        closing(opened(path)) as connection,
        closing(apsw.Connection(str(copy))) as target,
        target.backup("main", connection, "main") as backup,
    ):
        backup.step()


def by_file(path: Path, copy: Path) -> None:
    with closing(opened(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        shutil.copy(path, copy)


@pytest.mark.parametrize("back_up", [by_vacuum, by_backup, by_file])
@pytest.mark.parametrize("written", [0, 5, 50], ids=["at once", "as far", "further"])
def test_a_backup_of_the_same_run_put_back_halts(
    path: Path, tmp_path: Path, back_up: Callable[[Path, Path], None], written: int
) -> None:
    """Also when others have written to it until its entries reach beyond what the log has."""
    copy = tmp_path / "copy.db"
    with captured(path, tmp_path) as feed:
        with closing(opened(path)) as connection:
            connection.execute("INSERT INTO users VALUES (3, 'kept')")
            feed.catch_up()
            back_up(path, copy)
            for _ in range(5):
                connection.execute("INSERT INTO users (name) VALUES ('lost')")
            feed.catch_up()
            feed.capture.stop()
        for end in ("-wal", "-shm"):
            Path(f"{path}{end}").unlink(missing_ok=True)
        copy.rename(path)
        with closing(opened(path)) as connection:
            for _ in range(written):
                connection.execute("INSERT INTO users (name) VALUES ('new')")
        feed.start()
        status = feed.until_halted()
        assert "an older copy" in status.error
        assert f"headrace snapshot {SOURCE}" in status.hint
        feed.capture.copy_again([])
        feed.assert_replays()


@pytest.mark.parametrize(("unread", "written"), [(0, 0), (3, 0), (3, 2), (0, 50)])
def test_after_entries_were_deleted_a_snapshot_goes_on(
    path: Path, tmp_path: Path, unread: int, written: int
) -> None:
    with captured(path, tmp_path) as feed, closing(opened(path)) as connection:
        for _ in range(5):
            connection.execute("INSERT INTO users (name) VALUES ('stored')")
        feed.catch_up()
        feed.capture.stop()
        for _ in range(unread):
            connection.execute("INSERT INTO users (name) VALUES ('not stored')")
        connection.execute("DELETE FROM headrace_changes")
        for _ in range(written):
            connection.execute("INSERT INTO users (name) VALUES ('written')")
        feed.start()
        status = feed.until_halted()
        assert "somebody has deleted it" in status.error
        assert f"headrace snapshot {SOURCE}" in status.hint
        feed.capture.copy_again([])
        feed.assert_replays()
        connection.execute("INSERT INTO users (name) VALUES ('after')")
        feed.assert_replays()
        feed.capture.stop()
        connection.execute("DELETE FROM users WHERE name = 'after'")
        feed.start()
        feed.assert_replays()


def test_a_backup_restored_into_the_open_database_halts(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with captured(path, tmp_path) as feed, closing(opened(path)) as connection:
        connection.execute("INSERT INTO users VALUES (3, 'kept')")
        by_backup(path, copy)
        connection.execute("INSERT INTO users VALUES (4, 'lost')")
        feed.catch_up()
        with (
            closing(apsw.Connection(str(copy))) as source,
            connection.backup("main", source, "main") as backup,
        ):
            backup.step()
        # Before anybody has looked: so many entries that their numbers alone tell nothing.
        connection.execute("INSERT INTO users (name) VALUES ('new'), ('new'), ('new')")
        assert "an older copy" in feed.until_halted().error


def test_a_copy_that_is_the_same_goes_on(path: Path, tmp_path: Path) -> None:
    """Nothing was lost with the old file, so nobody has to act."""
    with captured(path, tmp_path) as feed:
        with closing(opened(path)) as connection:
            connection.execute("INSERT INTO users VALUES (3, 'kept')")
            feed.catch_up()
        feed.capture.stop()
        by_vacuum(path, tmp_path / "copy.db")
        (tmp_path / "copy.db").rename(path)
        with closing(opened(path)) as connection:
            connection.execute("INSERT INTO users VALUES (4, 'new')")
        feed.start()
        feed.assert_replays()
        assert len(feed.changes(Op.READ)) == 2


# -- several files --------------------------------------------------------------------------------


def test_a_program_that_has_attached_the_database_is_captured(path: Path, tmp_path: Path) -> None:
    """One transaction over two files; of the other one nothing is told."""
    with captured(path, tmp_path) as feed, closing(opened(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("CREATE TABLE headrace_changes (entry); CREATE TABLE headrace_state (x)")
        connection.execute("ATTACH ? AS shop", (str(path),))
        connection.execute("CREATE TEMP TABLE headrace_changes (entry)")
        with connection:
            connection.execute("INSERT INTO main.users VALUES (7, 'other')")
            connection.execute("REPLACE INTO shop.users VALUES (2, 'bo')")
            connection.execute('INSERT INTO shop.headrace_annotations VALUES (\'{"by": "me"}\')')
        told = feed.changes(Op.INSERT, Op.DELETE)
        feed.assert_replays()
        assert [(change.op, change.key) for change in told] == [
            (Op.DELETE, b'{"id":2}'),
            (Op.INSERT, b'{"id":2}'),
        ]
        assert {change.transaction.metadata for change in told} == {b'{"by":"me"}'}
        for table in ("main.headrace_changes", "temp.headrace_changes"):
            assert connection.execute(f"SELECT * FROM {table}").fetchall() == []


def test_vacuum_moves_everything_and_changes_nothing(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    writer.execute("CREATE TABLE notes (text)")  # whose rowids VACUUM may give anew
    with captured(path, tmp_path) as feed:
        for turn in range(3):
            writer.execute("INSERT INTO notes VALUES ('a'), ('b'), ('c')")
            writer.execute("DELETE FROM notes WHERE rowid % 2; DELETE FROM users WHERE id = 1")
            writer.execute("VACUUM")
            with writer:
                writer.execute(f"INSERT INTO users VALUES ({turn + 10}, 'x')")
                writer.execute("UPDATE notes SET text = text || 'z'")
            feed.assert_replays()
        assert len(feed.changes(Op.READ)) == 2
        assert feed.status.errored == {}


# -- readers --------------------------------------------------------------------------------------


def test_two_logs_cannot_both_read_under_one_name(
    path: Path, writer: apsw.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one goes on; the other one is told so, and takes nothing from it."""
    monkeypatch.setattr("headrace.sources.sqlite.stream._TRIM_LATEST", 0.1)
    (tmp_path / "second").mkdir()
    with captured(path, tmp_path) as first, Log.open(tmp_path / "second" / "log") as log:
        second = Captured(path, log)
        second.start()
        try:
            second.catch_up()
            writer.execute("INSERT INTO users VALUES (3, 'both')")
            assert "another log" in first.until_halted().error
            writer.execute("INSERT INTO users VALUES (4, 'second')")
            second.assert_replays()
            assert second.status.phase is Phase.STREAMING
        finally:
            second.capture.stop()


def test_without_a_write_ahead_log_a_look_does_not_wait_for_a_writer_that_waits_for_it(
    path: Path, writer: apsw.Connection
) -> None:
    assert writer.execute("PRAGMA journal_mode = DELETE").fetchall() == [("delete",)]
    database = Database(str(path))
    try:
        writer.execute("INSERT INTO users VALUES (3, 'cid')")
        snapshot = database.snapshot()
        writer.set_busy_timeout(0)
        writer.execute("BEGIN; INSERT INTO users VALUES (4, 'dan')")
        with pytest.raises(apsw.BusyError):  # it lets nobody else begin to read from now on
            writer.execute("COMMIT")
        assert database.ends(0) == []
        assert [row[0] for row in database.entries(0, snapshot.last)] == [1]
        assert database.layout(1) is not None
        database.release(snapshot)
        writer.execute("COMMIT")
        assert database.snapshot().last == 2
    finally:
        database.close()


def test_nobodys_checkpoint_waits_for_a_capture_that_has_read_everything(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    """One that truncates the write-ahead log keeps all writers waiting as long as it waits."""

    def truncated() -> bool:
        ((busy, _, _),) = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return not busy

    with captured(path, tmp_path) as feed:
        writer.set_busy_timeout(0)
        wait_until(truncated, message="an idle database is free")
        writer.set_busy_timeout(20_000)
        for number in range(3, 6):
            with writer:
                writer.execute(f"INSERT INTO users VALUES ({number}, 'a'), ({number + 10}, 'b')")
            assert truncated()  # which may begin before the capture has looked, or while it does
        feed.assert_replays()
        # Transactions whose ends are gone with the write-ahead log are told together, none parted.
        told = [change.transaction.id for change in feed.changes(Op.INSERT)]
        assert len(told) == 6
        assert told[0::2] == told[1::2]


def test_a_program_that_reads_and_then_writes_is_refused_only_for_a_trim(
    path: Path, writer: apsw.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite lets it write only if nobody has written since it began to read."""
    for name in ("_TRIM_SECONDS", "_TRIM_LATEST"):
        monkeypatch.setattr(f"headrace.sources.sqlite.stream.{name}", 1000)
    with captured(path, tmp_path) as feed:
        for number in range(100, 120):
            writer.execute("BEGIN")
            writer.execute("SELECT count(*) FROM users").fetchall()
            feed.catch_up()
            writer.execute(f"INSERT INTO users VALUES ({number}, 'x')")
            writer.execute("COMMIT")
        inserts = feed.changes(Op.INSERT)
        assert len({change.transaction.id for change in inserts}) == len(inserts) == 20
        feed.assert_replays()


@pytest.mark.requirement("P-01")
def test_nothing_is_deleted_while_others_write_unless_it_is_much(
    path: Path, writer: apsw.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program without a busy timeout fails while somebody else writes."""
    monkeypatch.setattr("headrace.sources.sqlite.stream._TRIM_SECONDS", 1000)
    monkeypatch.setattr("headrace.sources.sqlite.stream._TRIM_LATEST", 0)
    monkeypatch.setattr("headrace.sources.sqlite.stream._TRIM_MANY", 40)
    writer.set_busy_timeout(0)

    def entries() -> int:
        ((count,),) = writer.execute("SELECT count(*) FROM headrace_changes").fetchall()
        return int(str(count))

    with captured(path, tmp_path) as feed:
        before = entries()
        for number in range(100, 130):
            writer.execute(f"INSERT INTO users VALUES ({number}, 'x')")
            feed.catch_up()
        assert entries() == before + 30
        writer.set_busy_timeout(5000)
        writer.execute("INSERT INTO users (name) SELECT 'x' FROM users")
        wait_until(lambda: entries() < 40, message="what is too much is deleted")


@pytest.mark.requirement("P-01")
def test_without_a_write_ahead_log_waiting_for_changes_takes_no_lock(
    path: Path, writer: apsw.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.sqlite.database._REREAD_SECONDS", 1000)
    monkeypatch.setattr("headrace.sources.sqlite.database._UNSETTLED_SECONDS", 0)
    writer.execute("PRAGMA journal_mode = DELETE").fetchall()
    with closing(Database(str(path))) as database:
        database.begin_watch("")
        before = database.version()
        writer.execute("BEGIN EXCLUSIVE")
        assert database.version() == before
        writer.execute("INSERT INTO users VALUES (100, 'x')")
        writer.execute("COMMIT")
        wait_until(lambda: database.version() != before, message="a commit shows")


def test_large_rows_are_read_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.sources.sqlite.connections._PAGE_BYTES", 1000)
    monkeypatch.setattr("headrace.sources.sqlite.stream._PIECE_BYTES", 1000)
    place = SqlitePlace(tmp_path / "large.db")
    with session(place) as writer:
        writer.execute("CREATE TABLE photos (id INTEGER PRIMARY KEY, photo BLOB)")
        writer.execute(f"INSERT INTO photos (photo) VALUES {', '.join(['(zeroblob(400))'] * 30)}")
    with reading(place, tmp_path) as feed:
        batches = feed.until(feed.mark(), take=feed.step)
        with session(place) as writer:
            writer.execute("UPDATE photos SET photo = zeroblob(300)")
        batches += feed.until(feed.mark(), take=feed.step)
        assert len(feed.changes(Op.READ, table="photos")) == 30
        updates = feed.changes(Op.UPDATE, table="photos")
    assert [change.ordinal for change in updates] == list(range(1, 31))
    assert max(len(batch.changes) for batch in batches) <= 3


# -- removing -------------------------------------------------------------------------------------


def test_removed_while_the_application_has_names_like_ours_these_stay(
    path: Path, writer: apsw.Connection
) -> None:
    theirs = [
        ("table", "headrace_of_the_mill"),
        ("table", "users"),
        ("trigger", "headrace_opened"),
    ]
    writer.execute("CREATE TABLE headrace_of_the_mill (id INTEGER PRIMARY KEY, metres)")
    writer.execute("CREATE TRIGGER headrace_opened AFTER INSERT ON users BEGIN SELECT 1; END")
    writer.execute("INSERT INTO users VALUES (3, 'cid'); ANALYZE")
    install(str(path), ["*"])
    assert remove(str(path))
    there = "SELECT type, name FROM sqlite_schema WHERE name NOT LIKE 'sqlite%' ORDER BY 1, 2"
    assert writer.execute(there).fetchall() == theirs
    assert writer.execute("SELECT tbl FROM sqlite_stat1 WHERE tbl LIKE 'h%'").fetchall() == []
    writer.execute("INSERT INTO users VALUES (4, 'dan')")


def test_removed_and_installed_anew_it_is_another_database(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    with captured(path, tmp_path) as feed:
        feed.capture.stop()
        remove(str(path))
        writer.execute("INSERT INTO users VALUES (3, 'untold')")
        install(str(path), ["*"])
        feed.start()
        assert "the log follows database" in feed.until_halted().error
        feed.capture.copy_again([])
        feed.assert_replays()
        wait_until(lambda: feed.status.phase is Phase.STREAMING, message="it streams")


# -- what is refused ------------------------------------------------------------------------------


def test_without_apsw_the_command_that_installs_it_is_named(path: Path) -> None:
    blocked = "import sys; sys.modules['apsw'] = None; from headrace.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", blocked, "sqlite", "install", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install 'headrace[sqlite]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_table_without_any_name_for_its_rowid_stops_nobody_else(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    writer.execute("CREATE TABLE odd (rowid, _rowid_, oid)")
    writer.execute("CREATE TABLE even (rowid INTEGER PRIMARY KEY, _rowid_, oid UNIQUE)")
    report = install(str(path), ["*"])
    assert "nothing tells its rows apart" in report.refused["main.odd"]
    with captured(path, tmp_path, tables=("users", "even")) as feed:
        writer.execute(
            "INSERT INTO even VALUES (1, 2, 3), (4, 5, 6); INSERT INTO odd VALUES (1,2,3)"
        )
        writer.execute(
            "REPLACE INTO even VALUES (7, 8, 3); UPDATE even SET rowid = 9 WHERE oid = 6"
        )
        told = feed.changes(Op.INSERT, Op.UPDATE, Op.DELETE, table="even")
        assert feed.status.errored == {}
    assert [(change.op, change.key) for change in told] == [
        (Op.INSERT, b'{"rowid":1}'),
        (Op.INSERT, b'{"rowid":4}'),
        (Op.DELETE, b'{"rowid":1}'),
        (Op.INSERT, b'{"rowid":7}'),
        (Op.UPDATE, b'{"rowid":9}'),
    ]
    finding = {each.name: each for each in sqlite(path).check()}["table main.odd"]
    assert not finding.ok


def test_what_ends_its_transaction_is_not_run_and_the_triggers_stay(
    path: Path, writer: apsw.Connection, tmp_path: Path
) -> None:
    there = "SELECT count(*) FROM sqlite_schema WHERE type = 'trigger'"
    before = writer.execute(there).fetchall()
    for sql in ("ALTER TABLE users ADD COLUMN a; COMMIT", "ROLLBACK; DROP TABLE users"):
        with pytest.raises(SourceRefused, match="must not end its transaction"):
            alter(str(path), sql)
    assert writer.execute(there).fetchall() == before
    with captured(path, tmp_path) as feed:
        writer.execute("INSERT INTO users VALUES (3, 'cid')")
        feed.assert_replays()
