"""Lag is what of this source is not in the log, not what others write."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.change.event import Batch
from headrace.sources.postgres.lag import WalLag
from headrace.testing import PostgresDatabase, wait_until
from tests.conftest import Servers
from tests.sources.captures import TIMEOUT
from tests.sources.capturing import captured

NONE = (0, 0.0)


def test_what_the_server_has_read_and_not_sent_is_not_ours() -> None:
    lag = WalLag(100)
    lag.looked(500, now=10.0)
    assert lag.now(11.0) == (400, 1.0)  # nobody knows yet whose it is
    lag.sent(600)
    assert lag.now(99.0) == NONE
    assert lag.foreign


def test_a_transaction_is_behind_from_its_commit_until_it_is_stored() -> None:
    lag = WalLag(100)
    lag.received(200, commit_time=10.0)
    lag.received(300, commit_time=20.0)
    lag.sent(1000)
    assert lag.now(30.0) == (900, 20.0)
    lag.stored(200)
    assert lag.now(30.0) == (800, 10.0)
    lag.stored(300)
    assert lag.now(30.0) == NONE


def test_pieces_of_a_transaction_are_behind_until_its_end_is_stored() -> None:
    lag = WalLag(100)
    for _ in range(3):
        lag.received(None, commit_time=10.0)
    lag.stored(100)
    assert lag.now(30.0)[1] == 20.0
    lag.received(400, commit_time=10.0)
    lag.stored(400)
    assert lag.now(30.0) == NONE


def test_a_server_that_falls_behind_its_own_log_counts_from_the_first_look() -> None:
    lag = WalLag(100)
    for look in range(200):
        lag.looked(1000 + look, now=10.0 + look)
    assert lag.now(210.0)[1] == 200.0
    lag.sent(1199)
    assert lag.now(210.0) == NONE


@contextmanager
def busy(database: PostgresDatabase) -> Iterator[threading.Event]:
    """Write all the time; the event is set for as long as that goes on."""
    database.execute("CREATE TABLE noise (body text)")
    writing, ending = threading.Event(), threading.Event()

    def write() -> None:
        with database.connect() as connection:
            while not ending.wait(0.01):
                connection.execute("INSERT INTO noise SELECT 'x' FROM generate_series(1, 100)")
                writing.set()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield writing
    finally:
        ending.set()
        thread.join()


def test_an_idle_database_beside_a_busy_one_is_not_behind(
    pg: PostgresDatabase, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.05)
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with (
        servers[16].database() as other,
        captured(pg, tmp_path) as feed,
        busy(other) as writing,
    ):
        feed.until_caught_up()
        for _ in range(5):
            writing.clear()
            assert writing.wait(TIMEOUT)
            feed.until(lambda: feed.status.lag_bytes == 0, "nothing of ours is missing")
            assert feed.status.lag_seconds < 20  # of the 60 that are healthy


def test_a_change_that_is_not_stored_is_lag(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with captured(pg, tmp_path) as feed:
        append, release = feed.log.append, threading.Event()

        def blocking(source: str, batch: Batch) -> int:
            if batch.changes:
                assert release.wait(TIMEOUT)
            return append(source, batch)

        feed.log.append = blocking  # type: ignore[method-assign]
        pg.execute("INSERT INTO users VALUES (1)")
        feed.until(lambda: feed.status.lag_seconds > 0.5, "it is behind")
        assert feed.status.lag_bytes > 0
        release.set()
        wait_until(lambda: feed.status.lag_bytes == 0, timeout=TIMEOUT, message="it has caught up")
