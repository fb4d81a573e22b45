"""How a MySQL or MariaDB server is reached: over TLS, with the privileges of the docs, by turns."""

import logging
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pymysql
import pytest

from headrace.change.event import Op
from headrace.change.replay import Replay, TableName
from headrace.retry import Backoff
from headrace.secret import Secret
from headrace.sources import Phase
from headrace.sources.mysql import address, aside, snapshot
from headrace.sources.mysql.catalog import FoundTable
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.mysqls import mysql_of
from tests.needs import missing
from tests.sources.mycapturing import Captured, captured, numbers
from tests.sources.myplaces import mysql

_DOCS = Path(__file__).parents[2] / "docs" / "mysql.md"
_ROWS = 5000


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position moves at once, and nobody waits long."""
    monkeypatch.setattr("headrace.sources.mysql.stream._IDLE_SECONDS", 0.02)
    monkeypatch.setattr("headrace.capture.BACKOFF", Backoff(0.5, 0.2, 0.25))


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate of this machine that vouches for itself, and its key."""
    if shutil.which("openssl") is None:
        missing("openssl makes the certificate, and is not installed")
    made, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-out", str(made)]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o644)  # for the user that runs the server
    return made, key


@pytest.fixture
def encrypting() -> Iterator[MysqlServer]:
    """A MariaDB with a certificate, which lets `reader` in over TLS only."""
    server = mysql_of("mariadb")
    made, key = certificate(server.directory, "server")
    server.settings |= {"ssl_cert": str(made), "ssl_key": str(key)}
    with server:
        server.execute("CREATE USER reader@'127.0.0.1' IDENTIFIED BY 'x' REQUIRE SSL")
        server.execute("GRANT ALL ON *.* TO reader@'127.0.0.1'")
        yield server


def test_a_server_is_copied_and_followed_over_tls(encrypting: MysqlServer, tmp_path: Path) -> None:
    with encrypting.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name varchar(200))")
        filled = f"INSERT INTO users SELECT {{}} + seq, repeat('x', 200) FROM {numbers(_ROWS)}"
        database.execute(filled.format(0))
        reader = database.url.replace("root@", "reader:x@")
        trusted = Secret(f"{reader}?ssl_ca={encrypting.directory / 'server.pem'}")
        with captured(database, tmp_path, url=trusted) as feed:
            database.execute(filled.format(_ROWS))
            assert len(feed.rows("users")) == 2 * _ROWS
        plain = mysql(database, url=Secret(f"{reader}?ssl=off"))
        (finding,) = plain.check()
        assert (finding.ok, "Access denied" in finding.detail) == (False, True)


def test_a_server_that_nobody_vouches_for_is_refused(
    encrypting: MysqlServer, tmp_path: Path
) -> None:
    with encrypting.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY)")
        other, _ = certificate(tmp_path, "other")
        reader = database.url.replace("root@", "reader:x@")
        for authority, hint in ((other, "authority that signed"), (tmp_path / "no", "PEM files")):
            url = Secret(f"{reader}?ssl_ca={authority}")
            with captured(database, tmp_path / hint, start=False, url=url) as feed:
                feed.start()
                assert hint in feed.until_halted().hint
                assert "ssl_ca" in feed.status.hint
        unverified = Secret(f"{reader}?ssl_ca={other}&ssl_verify=off")
        with captured(database, tmp_path / "unverified", url=unverified) as feed:
            assert feed.status.phase is Phase.STREAMING


def test_a_server_without_tls_is_refused_where_it_is_asked_for(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    with captured(maria, tmp_path, start=False, url=Secret(f"{maria.url}?ssl=on")) as feed:
        feed.start()
        feed.until_halted()
        assert "ssl=off" in feed.status.hint


def test_the_privileges_of_the_docs_are_enough(my: MysqlDatabase, tmp_path: Path) -> None:
    (statements,) = re.findall(r"```sql\n(CREATE USER.*?)```", _DOCS.read_text(), re.DOTALL)
    user = f"reader_{my.name}"
    for line in statements.strip().splitlines():
        statement, _, only = line.partition("--")
        if "MySQL only" in only and my.server.mariadb:
            continue
        statement = statement.replace("headrace@'%'", f"{user}@'127.0.0.1'").replace("…", "x")
        my.execute(statement.replace("shop.", f"{my.name}."))
    my.execute(
        "CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1);"
        "CREATE TABLE old (id int PRIMARY KEY) ENGINE=MyISAM; INSERT INTO old VALUES (1)"
    )
    url = Secret(my.url.replace("root@", f"{user}:x@"))
    if my.server.mariadb:
        my.execute(f"REVOKE LOCK TABLES ON {my.name}.* FROM {user}@'127.0.0.1'")
        (finding,) = [finding for finding in mysql(my, url=url).check() if not finding.ok]
        my.execute(finding.fix)
    assert [finding for finding in mysql(my, url=url).check() if not finding.ok] == []
    with captured(my, tmp_path, url=url) as feed:
        my.execute("INSERT INTO users VALUES (2); INSERT INTO old VALUES (2)")
        feed.until_caught_up()
        feed.restart()
        feed.until_streaming()
        my.execute("ALTER TABLE users ADD n int; INSERT INTO users VALUES (3, 3)")
        assert [row["id"] for row in feed.rows("users")] == [1, 2, 3]
        assert feed.rows("old") == [{"id": 1}, {"id": 2}]


def ids(feed: Captured, table: str) -> list[int]:
    """The rows of a table that are in the log by now."""
    replay = Replay.of(feed.stored())
    name = TableName(feed.source.name, feed.database.name, table)
    return sorted(row["id"] for row in replay.rows(name)) if name in replay.tables else []


@pytest.fixture
def retried_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that wait are tried again after a moment."""
    monkeypatch.setattr(aside, "_FIRST_SECONDS", 0.2)
    monkeypatch.setattr(aside, "_LONGEST_SECONDS", 0.4)


@pytest.mark.requirement("P-01")
@pytest.mark.usefixtures("retried_soon")
@pytest.mark.parametrize("engine", ["InnoDB", "MyISAM"])
def test_a_locked_table_waits_alone(maria: MysqlDatabase, tmp_path: Path, engine: str) -> None:
    maria.execute(
        f"CREATE TABLE users (id int PRIMARY KEY) ENGINE={engine};"
        "CREATE TABLE others (id int PRIMARY KEY)"
    )
    with captured(maria, tmp_path, start=False) as feed:
        with closing(maria.connect()) as locking, locking.cursor() as cursor:
            cursor.execute("LOCK TABLES users WRITE")
            feed.start()
            users = f"{maria.name}.users"
            feed.until(lambda: "locked" in feed.status.errored.get(users, ""), "it gives way")
            maria.execute("INSERT INTO others VALUES (1)")
            feed.until(lambda: ids(feed, "others") == [1], "the others go on")
            cursor.execute("INSERT INTO users VALUES (1)")
        feed.until_caught_up()
        maria.execute("INSERT INTO users VALUES (2)")
        feed.until_caught_up()
        assert [row["id"] for row in feed.rows("users")] == [1, 2]
        assert feed.status.errored == {}


@pytest.mark.requirement("P-01")
@pytest.mark.usefixtures("retried_soon")
def test_a_table_that_cannot_be_read_fails_alone(maria: MysqlDatabase, tmp_path: Path) -> None:
    maria.execute(
        "CREATE TABLE broken (id int PRIMARY KEY) ENGINE=InnoDB; INSERT INTO broken VALUES (1);"
        "CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1);"
        "ALTER TABLE broken DISCARD TABLESPACE"
    )
    with captured(maria, tmp_path) as feed:
        feed.until(lambda: f"{maria.name}.broken" in feed.status.errored, "it is shown as failed")
        assert "error 1814" in feed.status.errored[f"{maria.name}.broken"]
        maria.execute("INSERT INTO users VALUES (2)")
        feed.until(lambda: ids(feed, "users") == [1, 2], "the others go on")
        # The snapshot itself may have had the second row.
        feed.until(lambda: feed.status.phase is Phase.STREAMING, "the snapshot ends")
        feed.restart()
        maria.execute("INSERT INTO users VALUES (3)")
        feed.until(lambda: ids(feed, "users") == [1, 2, 3], "also from a start")
        maria.execute("DROP TABLE broken; CREATE TABLE broken (id int PRIMARY KEY)")
        maria.execute("INSERT INTO broken VALUES (7)")
        feed.until_caught_up()
        assert feed.rows("broken") == [{"id": 7}]
        # One that was captured, and whose snapshot is requested.
        maria.execute("ALTER TABLE broken DISCARD TABLESPACE; INSERT INTO users VALUES (4)")
        feed.until(lambda: len(ids(feed, "users")) == 4, "the others go on")


@pytest.mark.requirement("P-01")
@pytest.mark.usefixtures("retried_soon")
@pytest.mark.parametrize("engine", ["InnoDB", "MyISAM"])
def test_a_snapshot_gives_way_to_a_statement_that_waits(
    maria: MysqlDatabase, tmp_path: Path, engine: str
) -> None:
    maria.execute(f"CREATE TABLE users (id int PRIMARY KEY) ENGINE={engine}")
    maria.execute("INSERT INTO users SELECT seq FROM seq_1_to_3000")
    # Far slower than a test would wait for.
    with captured(maria, tmp_path, start=False, snapshot_rows_per_second=100) as feed:
        feed.start()
        feed.until(lambda: bool(feed.stored(Op.READ)), "the snapshot has begun")
        maria.execute("SET SESSION lock_wait_timeout = 60; ALTER TABLE users ADD n int")
        reading = [c for c in feed.status.copies if not c.done]
        assert reading, "it was not done before"
    with captured(maria, tmp_path) as feed:
        feed.until_caught_up()
        assert ids(feed, "users") == list(range(1, 3001))


def test_a_lock_of_some_tables_that_fails_is_logged_by_its_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statements: list[str] = []

    def run(connection: Any, statement: str) -> list[tuple[Any, ...]]:
        statements.append(statement)
        if statement.startswith("LOCK"):
            failed = pymysql.err.OperationalError(1205, "Lock wait timeout; near 'secret'")
            raise address.classify(failed, "refused") from failed
        return []

    monkeypatch.setattr(snapshot, "run", run)
    with caplog.at_level(logging.WARNING, logger="headrace"):
        snapshot._lock(MagicMock(), [FoundTable("shop", "orders", True, 1)])
    assert statements[1:] == ["LOCK TABLES `shop`.`orders` READ", "FLUSH TABLES WITH READ LOCK"]
    assert "error=1205" in caplog.text
    assert "secret" not in caplog.text
