"""Headrace follows its server through trouble: it goes on exactly, or halts and says why."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.change.event import Batch, Op
from headrace.change.lsn import parse_lsn
from headrace.retry import Backoff
from headrace.sources import Phase, Status
from headrace.testing import PostgresDatabase, PostgresServer, wait_until
from tests.conftest import SETTINGS, Servers, install_of
from tests.sources.captures import TIMEOUT
from tests.sources.capturing import (
    Captured,
    assert_mended_by_a_full_copy,
    captured,
    postgres,
)


@pytest.fixture
def shop(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Captured]:
    """A captured database with one plain table and one that nobody captures."""
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    pg.execute("CREATE SCHEMA aside; CREATE TABLE aside.noise (id serial, body text)")
    pg.execute("INSERT INTO users VALUES (1, 'ann')")
    with captured(pg, tmp_path, tables=("public.*",), heartbeat_seconds=3600) as feed:
        yield feed


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that comes back is found within a second."""
    monkeypatch.setattr("headrace.capture.BACKOFF", Backoff(0.5, 1.0, 0.25))


def position(database: PostgresDatabase) -> int:
    """Where the server stands."""
    return parse_lsn(database.execute("SELECT pg_current_wal_lsn()::text")[0][0])


def slot_of(feed: Captured, column: str = "active_pid") -> Any:
    """One thing that the server knows of the slot."""
    query = f"SELECT {column} FROM pg_replication_slots WHERE slot_name = %s"
    found = feed.database.execute(query, (feed.slot,))
    return found[0][0] if found else None


def until_idle(feed: Captured) -> None:
    """Wait until nobody reads the slot."""
    wait_until(lambda: slot_of(feed) is None, timeout=TIMEOUT, message="the slot is idle")


def noise(database: PostgresDatabase) -> None:
    """Write what is not captured."""
    database.execute(
        "INSERT INTO aside.noise (body) SELECT repeat('x', 99) FROM generate_series(1, 99)"
    )


# --- the slot moves ------------------------------------------------------------------------------


def test_the_server_hears_what_is_stored(shop: Captured) -> None:
    shop.database.execute("INSERT INTO users VALUES (2, 'bob')")
    shop.until_caught_up()
    stored = parse_lsn(shop.status.position)
    shop.until(lambda: shop.confirmed() >= stored, "the slot follows the log")


def test_the_slot_moves_while_only_other_tables_are_written(
    shop: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.receive._IDLE_ADVANCE", 0.1)
    shop.restart()
    shop.until_streaming()
    before = shop.log.latest_sequence
    noise(shop.database)
    written = position(shop.database)

    def moved() -> bool:
        noise(shop.database)
        return shop.confirmed() >= written

    shop.until(moved, "the slot moves")
    assert shop.log.latest_sequence == before


def test_a_heartbeat_moves_the_slot_of_a_server_that_has_gone_quiet(
    shop: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.capture.stop()
    # The server tells how far it is once after the noise, which is too early to take a step, and
    # then not for half a minute.
    monkeypatch.setattr("headrace.sources.postgres.receive._IDLE_ADVANCE", 1.0)
    name = f"beating_{shop.database.name}"
    settings: dict[str, Any] = {"name": name, "tables": ("public.*",), "heartbeat_seconds": 0.2}
    with captured(shop.database, tmp_path / "other", **settings) as feed:
        before = feed.log.latest_sequence
        noise(feed.database)
        written = position(feed.database)
        feed.until(lambda: feed.confirmed() >= written, "the slot moves")
        assert feed.log.latest_sequence == before


def test_what_is_not_stored_is_not_confirmed(shop: Captured) -> None:
    append, blocked, release = shop.log.append, threading.Event(), threading.Event()

    def blocking(source: str, batch: Batch) -> int:
        if batch.changes:
            blocked.set()
            assert release.wait(TIMEOUT)
        return append(source, batch)

    before = position(shop.database)
    shop.log.append = blocking  # type: ignore[method-assign]
    shop.database.execute("INSERT INTO users VALUES (2, 'bob')")
    assert blocked.wait(TIMEOUT)
    for _ in range(3):
        noise(shop.database)
        assert shop.confirmed() <= before
    release.set()
    shop.assert_replays("users")


def test_a_log_that_blocks_does_not_cost_the_connection(shop: Captured) -> None:
    shop.capture.stop()
    name = shop.database.name
    shop.database.execute(f"ALTER DATABASE {name} SET wal_sender_timeout = '1s'")
    shop.start()
    shop.until_streaming()
    shop.until_caught_up()
    walsender = slot_of(shop)
    append, blocked, ending = shop.log.append, threading.Event(), threading.Event()

    def blocking(source: str, batch: Batch) -> int:
        if batch.changes and not blocked.is_set():
            blocked.set()
            ending.wait(2.5)  # more than twice what the server waits for a word
        return append(source, batch)

    shop.log.append = blocking  # type: ignore[method-assign]
    shop.database.execute("INSERT INTO users SELECT n, 'x' FROM generate_series(2, 40000) n")
    shop.until(lambda: len(shop.stored(Op.INSERT)) == 39_999, "everything is stored")
    assert slot_of(shop) == walsender


# --- trouble that passes -------------------------------------------------------------------------


def test_a_terminated_walsender_is_followed_by_another(shop: Captured) -> None:
    for number in range(2, 5):
        shop.database.execute("INSERT INTO users VALUES (%s, 'x')", (number,))
        shop.end_walsender()
        shop.database.execute("UPDATE users SET name = name || '!'")
    shop.assert_replays("users")


def test_terminated_sessions_of_any_kind_are_replaced(shop: Captured) -> None:
    ours = """
        SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE application_name LIKE 'headrace%' AND datname = current_database()"""
    assert shop.database.execute(ours)[0][0] >= 2
    shop.database.execute("INSERT INTO users VALUES (2, 'x')")
    shop.assert_replays("users")


def test_a_server_that_restarts_or_is_away_for_a_while_is_waited_for(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    with own_server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        with captured(database, tmp_path) as feed:
            database.execute("INSERT INTO users VALUES (1, 'x')")
            own_server.restart("immediate")
            database.execute("INSERT INTO users VALUES (2, 'x')")
            feed.assert_replays("users")
            own_server.stop()
            wait_until(lambda: "cannot connect" in feed.status.error, timeout=TIMEOUT)
            assert feed.status.phase is Phase.WAITING
            own_server.start()
            database.execute("INSERT INTO users VALUES (3, 'x')")
            feed.assert_replays("users")


def test_a_slot_that_another_reads_is_waited_for(shop: Captured, tmp_path: Path) -> None:
    with captured(shop.database, tmp_path / "second", start=False, snapshot=False) as second:
        second.start()
        wait_until(lambda: second.status.phase is Phase.WAITING, timeout=TIMEOUT)
        assert "is active for PID" in second.status.error
    shop.database.execute("INSERT INTO users VALUES (2, 'x')")
    shop.assert_replays("users")


def test_stopping_leaves_no_session_behind(shop: Captured) -> None:
    shop.capture.stop()
    ours = """
        SELECT application_name FROM pg_stat_activity
        WHERE application_name LIKE 'headrace%' AND datname = current_database()"""
    wait_until(lambda: not shop.database.execute(ours), message="all sessions are gone")
    assert shop.status.phase is Phase.STOPPED


# --- trouble that needs a person -----------------------------------------------------------------


def halted(feed: Captured, *words: str) -> Status:
    """The status of a capture that has halted, for a reason with these words."""
    status = feed.until_halted()
    for word in words:
        assert word in status.error
    return status


def test_a_dropped_slot_halts_and_a_full_copy_mends_it(shop: Captured) -> None:
    shop.capture.stop()
    shop.database.execute("INSERT INTO users VALUES (2, 'missed')")
    shop.database.drop_slots()
    shop.start()
    halted(shop, shop.slot, "does not exist any more")
    assert_mended_by_a_full_copy(shop)


def test_a_slot_dropped_and_created_again_is_not_trusted(shop: Captured) -> None:
    shop.capture.stop()
    shop.database.execute("INSERT INTO users VALUES (2, 'missed')")
    shop.database.drop_slots()
    shop.database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (shop.slot,))
    shop.start()
    halted(shop, shop.slot, "created anew")
    assert_mended_by_a_full_copy(shop)


def test_a_slot_that_somebody_else_has_moved_is_not_trusted(shop: Captured) -> None:
    shop.until_caught_up()
    shop.capture.stop()
    shop.database.execute("INSERT INTO users VALUES (2, 'missed')")
    advance = "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())"
    shop.database.execute(advance, (shop.slot,))
    shop.start()
    halted(shop, shop.slot, "read by someone else")
    assert_mended_by_a_full_copy(shop)


def test_a_slot_of_another_kind_is_not_trusted(servers: Servers, tmp_path: Path) -> None:
    with servers[15].database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        with captured(database, tmp_path) as feed:
            feed.capture.stop()
            database.drop_slots()
            create = "SELECT pg_create_logical_replication_slot(%s, 'test_decoding')"
            database.execute(create, (feed.slot,))
            feed.start()
            halted(feed, feed.slot, "test_decoding")
            assert_mended_by_a_full_copy(feed)


def test_a_slot_that_the_server_gave_up_halts_and_a_full_copy_mends_it(tmp_path: Path) -> None:
    settings = SETTINGS | {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB"}
    with (
        PostgresServer(install_of(16), settings=settings) as server,
        server.database() as database,
    ):
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        with captured(database, tmp_path) as feed:
            feed.until_caught_up()
            feed.capture.stop()
            for number in range(4):
                database.execute("INSERT INTO users VALUES (%s, 'missed')", (number,))
                database.execute("SELECT pg_switch_wal()")
            database.execute("CHECKPOINT")
            wait_until(lambda: slot_of(feed, "wal_status") == "lost", message="the slot is lost")
            feed.start()
            halted(feed, "invalidated", "max_slot_wal_keep_size")
            assert_mended_by_a_full_copy(feed)


def test_another_server_or_database_under_the_same_url_halts(
    shop: Captured, servers: Servers
) -> None:
    shop.capture.stop()
    with servers[15].database() as elsewhere, servers[16].database() as beside:
        for other in (elsewhere, beside):
            other.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
            replaced = Captured(other, shop.log, postgres(other, slot=shop.slot))
            replaced.start()
            status = halted(replaced, "the log follows", shop.database.name)
            assert "headrace snapshot shop" in status.hint
            replaced.capture.stop()


def test_a_server_restored_from_an_older_copy_halts(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    copy = own_server.directory / "older"
    with own_server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        with captured(database, tmp_path) as feed:
            feed.until_caught_up()
            feed.capture.stop()
            own_server.stop()
            shutil.copytree(own_server.data, copy, symlinks=True)
            own_server.start()
            feed.start()
            database.execute("INSERT INTO users SELECT n, 'lost' FROM generate_series(1, 500) n")
            feed.until_caught_up()
            feed.capture.stop()
            own_server.stop()
            _swap(own_server, copy)
            own_server.start()
            feed.start()
            halted(feed, "restored from an older copy")
            assert_mended_by_a_full_copy(feed)


def _swap(server: PostgresServer, copy: Path) -> None:
    shutil.rmtree(server.data)
    copy.rename(server.data)
    if server.account is not None:
        for path in (server.data, *server.data.rglob("*")):
            server.account.own(path)


def test_a_server_on_a_new_timeline_halts(own_server: PostgresServer, tmp_path: Path) -> None:
    with own_server.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
        with captured(database, tmp_path) as feed:
            feed.until_caught_up()
            feed.capture.stop()
            own_server.stop()
            signal = own_server.data / "recovery.signal"
            signal.touch()
            if own_server.account is not None:
                own_server.account.own(signal)
            own_server.settings["restore_command"] = "false"
            own_server.start()
            recovering = "SELECT pg_is_in_recovery()"
            wait_until(lambda: database.execute(recovering) == [(False,)], message="promoted")
            feed.start()
            halted(feed, "timeline 2", "timeline 1")
            assert_mended_by_a_full_copy(feed)


def test_a_source_whose_last_table_is_dropped_goes_on_with_the_next(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.05)
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    with captured(pg, tmp_path) as feed:
        pg.execute("DROP TABLE users")
        feed.until_caught_up()
        feed.restart()
        feed.until_caught_up()
        pg.execute("CREATE TABLE people (id int PRIMARY KEY); INSERT INTO people VALUES (1)")
        feed.until(lambda: feed.stored(Op.READ), "the new table is copied")
        feed.assert_replays("people")
