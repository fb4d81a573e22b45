"""A snapshot lets statements pass that wait for its locks, and goes on afterwards."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import pytest

from headrace.capture import Capture
from headrace.change.event import Op
from headrace.log import Log
from headrace.secret import Secret
from headrace.sources import Phase, Status
from headrace.sources.postgres.waiters import WaiterWatch
from headrace.sources.postgres_events import PostgresEvents
from headrace.testing import PostgresDatabase, wait_until
from tests.sources.captures import TIMEOUT
from tests.sources.capturing import Captured, captured, driven, postgres
from tests.sources.writing import create, writers

ROWS = 20_000
# By the server's clock; an idle machine needs 1.2 s, a busy one gets more. The snapshot takes 20 s.
PATIENCE: LiteralString = "SET lock_timeout = '15s'; "


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.sources.postgres.snapshot.RANGE_BLOCKS", 16)
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.5)
    monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 0.5)


@contextmanager
def slow_copy(pg: PostgresDatabase, folder: Path, **settings: Any) -> Iterator[Captured]:
    """A snapshot of users that has begun and takes longer than anybody may wait."""
    create(pg, "users", rows=ROWS)
    with captured(pg, folder, start=False, snapshot_rows_per_second=1000, **settings) as feed:
        feed.start()
        feed.until(lambda: feed.stored(Op.READ), "the snapshot has begun")
        yield feed


@pytest.mark.requirement("P-01")
def test_an_alter_does_not_wait_for_the_end_of_a_snapshot(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    with slow_copy(pg, tmp_path) as feed, writers(pg, "users"):
        pg.execute(PATIENCE + "ALTER TABLE users ALTER name SET DEFAULT 'x'")
        feed.until(lambda: feed.status.warnings, "the status says that it has yielded")
        assert "lock on users" in feed.status.warnings[0]
        assert feed.status.phase is Phase.SNAPSHOT
    with captured(pg, tmp_path) as feed:
        feed.assert_replays("users", surprises=True)
        assert not feed.status.warnings


@pytest.mark.requirement("P-01")
def test_readers_behind_an_alter_pass_and_a_rewritten_table_is_exact(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    with slow_copy(pg, tmp_path) as feed:
        rewrite: LiteralString = PATIENCE + "ALTER TABLE users ALTER name TYPE varchar(500)"
        altering = threading.Thread(target=pg.execute, args=(rewrite,))
        altering.start()
        wait_until(lambda: _waiting(pg), timeout=60, message="the ALTER waits")
        pg.execute(PATIENCE + "SELECT count(*) FROM users")
        altering.join()
    with captured(pg, tmp_path) as feed:
        feed.assert_replays("users")


@pytest.mark.requirement("P-01")
def test_a_snapshot_yields_also_while_the_log_takes_nothing(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.snapshot._BATCH_ROWS", 64)
    create(pg, "users", rows=ROWS)
    with Log.open(tmp_path / "log") as log, driven(postgres(pg), log) as reading:
        reading.until(lambda batch: any(change.op is Op.READ for change in batch.changes))
        pg.execute(PATIENCE + "ALTER TABLE users ALTER name SET DEFAULT 'x'")
    with captured(pg, tmp_path) as feed:
        feed.assert_replays("users")


@pytest.mark.requirement("P-01")
def test_an_index_is_created_concurrently_while_a_snapshot_runs(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    """It waits for every older snapshot of the database, whatever its tables are."""
    pg.execute("CREATE TABLE other (id int)")
    with (
        slow_copy(pg, tmp_path, tables=("public.users",)),
        pg.connect(options="-c lock_timeout=15s") as connection,
    ):
        connection.execute("CREATE INDEX CONCURRENTLY ON other (id)")


@pytest.mark.requirement("P-01")
def test_a_snapshot_for_an_event_table_yields_too(pg: PostgresDatabase, tmp_path: Path) -> None:
    create(pg, "users", rows=ROWS)
    source = PostgresEvents(name="shop", url=Secret(pg.url), snapshot_rows_per_second=8000)
    with Log.open(tmp_path / "log") as log:
        capture = Capture(source, log)
        capture.start()
        try:
            wait_until(lambda: log.latest_sequence > 1000, timeout=TIMEOUT, message="begun")
            # Another column would make the table be read anew.
            pg.execute(PATIENCE + "ALTER TABLE users ADD CHECK (id > 0) NOT VALID")
            wait_until(lambda: capture.status().warnings, timeout=TIMEOUT, message="it has yielded")
            wait_until(lambda: _done(capture.status()), timeout=TIMEOUT, message="it is complete")
        finally:
            capture.stop()
        read = [change.key for change in log.read(0, limit=1 << 20) if change.op is Op.READ]
    assert len(read) == len(set(read)) == ROWS


def test_a_session_that_has_ended_is_left_alone() -> None:
    """Its number may be that of an application by then."""
    ended: list[list[int]] = []

    class Server:
        def execute(self, query: str, given: tuple[Any, ...]) -> Any:
            if "pg_terminate_backend" in query:
                ended.append(*given)
            return self

        def fetchone(self) -> tuple[str]:
            return ("users",)

    server: Any = Server()
    watch = WaiterWatch(lambda: server, exporter=1)
    watch.add(7)
    watch.add(8)
    watch.remove(7)
    watch._look(server)
    assert ended == [[8]]


def _done(status: Status) -> bool:
    copies = [copy.done for copy in status.copies]
    return bool(copies) and all(copies)


def _waiting(pg: PostgresDatabase) -> bool:
    query: LiteralString = (
        "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'users'::regclass"
    )
    return bool(pg.execute(query))
