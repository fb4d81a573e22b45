"""A database without a matching table is waited for, and captured from its first row on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from headrace.capture import Capture
from headrace.change.event import Change, Op
from headrace.log import Log
from headrace.secret import Secret
from headrace.sources import Phase, Source
from headrace.sources.mysql import Mysql
from headrace.sources.postgres_events import PostgresEvents
from headrace.sources.sqlite import install
from headrace.testing import PostgresDatabase, wait_until
from headrace.testing.mysql import MysqlDatabase
from tests.sources.captures import TIMEOUT
from tests.sources.capturing import postgres
from tests.sources.litedb import sqlite
from tests.sources.test_postgres_server import role, url_of

Execute = Callable[[str], Any]
TABLE = "CREATE TABLE users (id int PRIMARY KEY, name varchar(20))"


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.1)
    monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 0.1)


@contextmanager
def capturing(source: Source, log: Log) -> Iterator[Capture]:
    """A capture that runs while the block does."""
    capture = Capture(source, log)
    capture.start()
    try:
        yield capture
    finally:
        capture.stop()


def rows(log: Log) -> list[Change]:
    """The rows that the log has."""
    return [each for each in log.read(0, limit=1 << 20) if each.op in (Op.READ, Op.INSERT)]


def assert_waits_for_the_first_table(source: Source, folder: Path, execute: Execute) -> None:
    with Log.open(folder / "log") as log, capturing(source, log) as capture:
        wait_until(lambda: capture.status().warnings, timeout=TIMEOUT, message="it warns")
        status = capture.status()
        assert "no table matches" in status.warnings[0]
        assert status.phase in (Phase.STREAMING, Phase.STARTING)
        assert not status.error
        execute(TABLE)
        for number in range(3):
            execute(f"INSERT INTO users VALUES ({number}, 'n')")
        wait_until(lambda: len(rows(log)) >= 3, timeout=TIMEOUT, message="the rows are captured")
        execute("INSERT INTO users VALUES (3, 'n')")
        wait_until(lambda: len(rows(log)) >= 4, timeout=TIMEOUT, message="and those that follow")
        assert sorted(str(each.key) for each in rows(log)) == [
            str(b'{"id":%d}' % number) for number in range(4)
        ]
        assert capture.status().warnings == ()


@pytest.mark.parametrize("snapshot", [True, False])
def test_of_postgres(pg: PostgresDatabase, tmp_path: Path, snapshot: bool) -> None:
    source = postgres(pg, tables=("public.*",), snapshot=snapshot)
    assert_waits_for_the_first_table(source, tmp_path, pg.execute)


def test_of_an_event_table(pg: PostgresDatabase, tmp_path: Path) -> None:
    source = PostgresEvents(name="shop", url=Secret(pg.url), snapshot=False)
    assert_waits_for_the_first_table(source, tmp_path, pg.execute)


def test_of_mariadb(maria: MysqlDatabase, tmp_path: Path) -> None:
    source = Mysql(name="shop", url=Secret(maria.url), snapshot=False)
    assert_waits_for_the_first_table(source, tmp_path, maria.execute)


def test_of_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(20_000)
    install(str(path), ["*"])
    source = sqlite(path, snapshot=False)
    assert_waits_for_the_first_table(source, tmp_path, connection.execute)
    connection.close()


# --- tables that cannot be read ------------------------------------------------------------------


def test_a_table_of_which_a_policy_may_hide_rows_fails_alone_until_none_can(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE secrets (id int PRIMARY KEY); INSERT INTO secrets VALUES (1), (2)")
    pg.execute("ALTER TABLE secrets ENABLE ROW LEVEL SECURITY")
    pg.execute("CREATE POLICY one ON secrets USING (id = 1)")
    with role(pg, "REPLICATION") as name:
        pg.execute(f"GRANT SELECT ON secrets TO {name}")
        pg.execute("CREATE PUBLICATION theirs FOR ALL TABLES WITH (publish_via_partition_root)")
        source = postgres(pg, url=url_of(pg, name), publication="theirs", tables=("public.*",))
        findings = {finding.name: finding for finding in source.check()}
        assert findings["table public.secrets"].fix == f'ALTER ROLE "{name}" BYPASSRLS;'
        with Log.open(tmp_path / "log") as log, capturing(source, log) as capture:
            wait_until(lambda: capture.status().errored, timeout=TIMEOUT, message="it has failed")
            fix = capture.status().errored["public.secrets"].partition("run: ")[2]
            assert fix == f"ALTER ROLE {name} BYPASSRLS;"
            assert rows(log) == []
            pg.execute(fix)
            wait_until(lambda: len(rows(log)) == 2, timeout=TIMEOUT, message="it is captured")
            assert capture.status().errored == {}


@pytest.mark.parametrize("existing", [True, False], ids=["at the first start", "created later"])
def test_a_table_that_cannot_be_read_fails_alone_until_it_is_granted(
    pg: PostgresDatabase,
    tmp_path: Path,
    existing: bool,
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    secrets = "CREATE TABLE secrets (id int PRIMARY KEY); INSERT INTO secrets VALUES (1)"
    with role(pg, "REPLICATION") as name:
        pg.execute("CREATE PUBLICATION theirs FOR ALL TABLES WITH (publish_via_partition_root)")
        if existing:
            pg.execute(secrets)
        source = postgres(pg, url=url_of(pg, name), publication="theirs", tables=("public.*",))
        with Log.open(tmp_path / "log") as log, capturing(source, log) as capture:
            wait_until(
                lambda: capture.status().phase is Phase.STREAMING, timeout=TIMEOUT, message="begun"
            )
            if not existing:
                pg.execute(secrets)
            wait_until(lambda: capture.status().errored, timeout=TIMEOUT, message="it has failed")
            fix = capture.status().errored["public.secrets"].partition("run: ")[2]
            assert fix == f"GRANT SELECT ON public.secrets TO {name};"
            pg.execute("INSERT INTO users VALUES (1)")
            pg.execute("INSERT INTO secrets VALUES (2)")
            wait_until(lambda: len(rows(log)) == 1, timeout=TIMEOUT, message="the other goes on")
            pg.execute(fix)
            wait_until(lambda: len(rows(log)) == 3, timeout=TIMEOUT, message="it is captured")
            assert capture.status().errored == {}
            pg.execute("INSERT INTO secrets VALUES (3)")
            wait_until(lambda: len(rows(log)) == 4, timeout=TIMEOUT, message="and goes on")
