"""The WAL that a server keeps for a slot is watched, and given up before it fills the disk."""

import threading
from pathlib import Path

import pytest

from headrace.change.event import Batch
from headrace.errors import LogFailed
from headrace.sources import Phase
from headrace.sources.postgres.retained import KeptWal, warnings
from headrace.testing import PostgresDatabase, PostgresServer, wait_until
from tests.sources.captures import TIMEOUT
from tests.sources.capturing import Captured, captured
from tests.sources.writing import create

GB = 10**9
SEGMENT = 16 << 20  # bytes of WAL


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.sources.retained._LOOK_SECONDS", 0.05)


def write_wal(database: PostgresDatabase, segments: int) -> None:
    """Let the server's log grow, by segments that are nearly empty."""
    with database.connect() as connection:
        for _ in range(segments):
            connection.execute("SELECT pg_logical_emit_message(false, 'test.wal', '')")
            connection.execute("SELECT pg_switch_wal()")


def has_slot(feed: Captured) -> bool:
    query = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s"
    return bool(feed.database.execute(query, (feed.slot,)))


def said(kept: KeptWal, max_wal_gb: float | None = None) -> str:
    return " | ".join(warnings(kept, "shop", max_wal_gb))


def test_there_is_a_warning_at_half_of_each_limit() -> None:
    assert said(KeptWal(9 * GB, "extended", -1)) == ""
    assert "set max_wal_gb" in said(KeptWal(11 * GB, "extended", -1))
    assert said(KeptWal(4 * GB, "reserved", 10 * GB)) == ""
    assert "max_slot_wal_keep_size, 10.0 GB" in said(KeptWal(5 * GB, "extended", 10 * GB))
    assert "invalidates" in said(KeptWal(1 * GB, "unreserved", 10 * GB))
    assert said(KeptWal(4 * GB, "reserved", -1), 10) == ""
    assert "keeps 5.0 GB" in said(KeptWal(5 * GB, "reserved", -1), 10)
    assert "max_wal_gb, 10 GB" in said(KeptWal(5 * GB, "reserved", -1), 10)


def test_the_servers_own_limit_is_seen(own_server: PostgresServer, tmp_path: Path) -> None:
    with own_server.database() as database:
        create(database, "users", rows=1)
        database.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '64MB'")
        database.execute("SELECT pg_reload_conf()")
        with captured(database, tmp_path) as feed:
            blocked = _block(feed)
            database.execute("INSERT INTO users VALUES (2, 'x')")
            write_wal(database, 3)
            feed.until(lambda: feed.status.warnings, "it warns")
            assert "max_slot_wal_keep_size, 0.1 GB" in feed.status.warnings[0]
            assert feed.status.retained_bytes >= 2 * SEGMENT
            blocked.set()
            feed.assert_replays("users")


def test_a_slot_is_given_up_while_the_log_is_stuck_and_a_snapshot_follows(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    create(pg, "users", rows=10)
    with captured(pg, tmp_path, max_wal_gb=6 * SEGMENT / GB) as feed:
        blocked = _block(feed)
        pg.execute("INSERT INTO users VALUES (11, 'stuck')")
        write_wal(pg, 4)
        feed.until(lambda: feed.status.warnings, "it warns in time")
        assert "is given up for a new snapshot" in feed.status.warnings[0]
        assert has_slot(feed)
        write_wal(pg, 4)
        feed.until(lambda: not has_slot(feed), "the slot is gone")
        feed.until(lambda: "was given up" in str(feed.status.warnings), "the status says why")
        pg.execute("DELETE FROM users WHERE id = 1")
        blocked.set()
        feed.until(lambda: has_slot(feed) and not feed.status.warnings, "a snapshot was taken")
        pg.execute("INSERT INTO users VALUES (12, 'after')")
        feed.assert_replays("users", surprises=True)


def test_a_slot_is_given_up_after_the_log_has_failed(pg: PostgresDatabase, tmp_path: Path) -> None:
    create(pg, "users", rows=10)
    with captured(pg, tmp_path, max_wal_gb=2 * SEGMENT / GB) as feed:
        append = feed.log.append

        def failing(source: str, batch: Batch) -> int:
            raise LogFailed("no space left on device")

        feed.log.append = failing  # type: ignore[method-assign]
        pg.execute("INSERT INTO users VALUES (11, 'lost')")
        assert feed.until_halted().phase is Phase.HALTED
        write_wal(pg, 4)
        wait_until(lambda: not has_slot(feed), timeout=TIMEOUT, message="the slot is gone")
        feed.log.append = append  # type: ignore[method-assign]
        feed.restart()
        feed.until_streaming()
        feed.assert_replays("users", surprises=True)


def _block(feed: Captured) -> threading.Event:
    """Let the log take no change until the event is set."""
    append, release = feed.log.append, threading.Event()

    def blocking(source: str, batch: Batch) -> int:
        if batch.changes:
            assert release.wait(TIMEOUT)
        return append(source, batch)

    feed.log.append = blocking  # type: ignore[method-assign]
    return release
