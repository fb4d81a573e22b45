"""`headrace run` over databases that are captured by triggers: from the config to HTTP."""

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from headrace.client import Client
from headrace.sources.sqlite import attach
from headrace.testing import PostgresDatabase, PostgresServer, Setting, wait_until
from tests.cli.test_cli import HEADRACE, Site, rows, streaming
from tests.conftest import install_of


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def command(site: Site, *arguments: str) -> str:
    """What a command prints, in a process of its own, in the folder of the config."""
    done = subprocess.run(
        [*HEADRACE, *arguments], cwd=site.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def served(client: Client, *expected: tuple[str, int]) -> None:
    """Wait until these changes are served, no more and no fewer."""
    wait_until(
        lambda: len(rows(client)) >= len(expected), timeout=120, message=f"{expected} are served"
    )
    assert rows(client) == list(expected)


def entities(client: Client) -> list[tuple[str, str, str]]:
    """What entity events say: what happened, to what, by which kind of database."""
    events = client.get("/v1/changes", format="entity", limit=1000)["events"]
    return [
        (each["event_type"], each["entity"]["entity_type"], each["source"]["database"])
        for each in events
    ]


# --- PostgreSQL, by an event table ---------------------------------------------------------------


@pytest.fixture
def plain() -> Iterator[PostgresDatabase]:
    """A database of a server that offers no logical replication, with two users in it."""
    settings: dict[str, Setting] = {"wal_level": "replica", "max_replication_slots": 0}
    with (
        PostgresServer(install_of(16), settings=settings) as server,
        server.database() as database,
    ):
        database.execute("CREATE TABLE users (id int PRIMARY KEY, name text, paid numeric)")
        database.execute("INSERT INTO users VALUES (1, 'Ada', 1.50), (2, 'Bob', NULL)")
        yield database


@pytest.mark.live
@pytest.mark.requirement("S1-30", "S1-32", "S1-51")
def test_an_event_table_is_installed_captured_and_served(
    site: Site, plain: PostgresDatabase
) -> None:
    owner = {"type": "postgres", "url": plain.url}
    site.write_config("", sources={"shop": owner}, cdc={"storage": "event_table"})
    assert command(site, "postgres", "install", "shop") == (
        "public.users writes its changes to headrace.events\n"
    )
    # Told before anybody captures: it is in the copy, and must not come twice.
    plain.execute("UPDATE users SET name = 'Eve' WHERE id = 2")
    site.write_config(
        "", sources={"shop": owner | {"install": False}}, cdc={"storage": "event_table"}
    )
    assert "✗" not in command(site, "check")
    seen = [("READ", 1), ("READ", 2), ("INSERT", 3)]
    with site.running(stop=signal.SIGKILL, exits=-signal.SIGKILL) as client:
        streaming(client)
        plain.execute("INSERT INTO users VALUES (3, 'Cy', 12345678901234567890.10)")
        served(client, *seen)
    with plain.connect(autocommit=False) as late:
        late.execute("INSERT INTO users VALUES (4, 'late', 0)")  # begins while nobody looks
        plain.execute("DELETE FROM users WHERE id = 1")
        with site.running() as client:
            served(client, *seen, ("DELETE", 1))
            late.commit()
            served(client, *seen, ("DELETE", 1), ("INSERT", 4))
    with site.running() as client:
        streaming(client)
        plain.execute("UPDATE users SET paid = 2 WHERE id = 2")
        served(client, *seen, ("DELETE", 1), ("INSERT", 4), ("UPDATE", 2))
        found = client.get("/v1/changes", limit=100)["changes"]
        by_row = {(each["op"], each["key"]["id"]): each for each in found if each["key"]}
        assert by_row["READ", 2]["after"] == {"id": 2, "name": "Eve", "paid": None}
        assert by_row["INSERT", 3]["after"]["paid"] == "12345678901234567890.10"
        assert by_row["DELETE", 1]["before"] == {"id": 1, "name": "Ada", "paid": "1.50"}
        assert by_row["UPDATE", 2]["changed"] == ["paid"]
        assert entities(client)[-3:] == [
            ("entity:deleted", "User", "postgresql"),
            ("entity:created", "User", "postgresql"),
            ("entity:updated", "User", "postgresql"),
        ]
        left = "SELECT count(*) FROM headrace.events"
        wait_until(lambda: plain.execute(left) == [(0,)], timeout=120, message="they are trimmed")
    assert (
        command(site, "postgres", "remove", "shop") == "public.users no longer writes its changes\n"
    )
    assert plain.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'headrace'") == [(0,)]
    assert "Traceback" not in site.output()


# --- SQLite --------------------------------------------------------------------------------------

CREATE = "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, photo BLOB)"

ELSEWHERE = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=30)
for statement in sys.argv[2:]:
    db.execute(statement)
db.commit()
"""


def elsewhere(path: Path, *statements: str) -> None:
    """Another process writes a transaction, over Python's own SQLite."""
    subprocess.run([sys.executable, "-c", ELSEWHERE, str(path), *statements], check=True)


@contextmanager
def program(path: Path) -> Iterator[apsw.Connection]:
    """A program in Python that writes by apsw, in this process."""
    with closing(apsw.Connection(str(path))) as connection:
        connection.set_busy_timeout(30_000)
        yield connection


def transactions(client: Client) -> list[list[Any]]:
    """The ids of rows, by the transaction that wrote them."""
    by_transaction: dict[str, list[Any]] = {}
    for each in client.get("/v1/changes", limit=1000)["changes"]:
        if each["op"] in ("INSERT", "UPDATE", "DELETE"):
            by_transaction.setdefault(each["transaction"]["id"], []).append(each["key"]["id"])
    return list(by_transaction.values())


@pytest.mark.requirement("S1-33")
def test_a_sqlite_database_is_installed_captured_and_served(site: Site) -> None:
    path = site.folder / "shop.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute(CREATE)
        db.execute("INSERT INTO users VALUES (1, 'Ada', x'00ff')")
        db.commit()
    site.write_config("", sources={"shop": {"type": "sqlite", "path": "shop.db"}})
    assert command(site, "sqlite", "install", "shop.db") == "main.users has new triggers\n"
    assert "✗" not in command(site, "check")
    seen = [("READ", 1), ("INSERT", 2), ("UPDATE", 1)]
    with (
        site.running(stop=signal.SIGKILL, exits=-signal.SIGKILL) as client,
        program(path) as connection,
    ):
        streaming(client)
        elsewhere(
            path,
            "INSERT INTO users VALUES (2, 'Bob', NULL)",
            "UPDATE users SET name = 'Eve' WHERE id = 1",
        )
        served(client, *seen)
        with attach(connection) as attached, connection:
            attached.annotate({"user_id": "u1"})
            connection.execute("INSERT INTO users VALUES (3, 'Cy', NULL)")
            connection.execute("SAVEPOINT s; DELETE FROM users; ROLLBACK TO s")
        served(client, *seen, ("INSERT", 3))
    with program(path) as connection, attach(connection):  # nobody looks
        connection.execute("DELETE FROM users WHERE id = 1")
        connection.execute("REPLACE INTO users VALUES (2, 'Bo', NULL)")
    with site.running() as client:
        missed = [("INSERT", 3), ("DELETE", 1), ("DELETE", 2), ("INSERT", 2)]
        served(client, *seen, *missed)
        assert transactions(client) == [[2, 1], [3], [1], [2, 2]]
        found = client.get("/v1/changes", limit=100)["changes"]
        by_row = {(each["op"], each["key"]["id"]): each for each in found if each["key"]}
        assert by_row["READ", 1]["after"] == {"id": 1, "name": "Ada", "photo": "AP8="}
        assert by_row["UPDATE", 1]["changed"] == ["name"]
        assert by_row["INSERT", 3]["metadata"] == {"user_id": "u1"}
        assert entities(client)[-3:] == [
            ("entity:deleted", "User", "sqlite"),
            ("entity:deleted", "User", "sqlite"),
            ("entity:created", "User", "sqlite"),
        ]
    assert command(site, "sqlite", "remove", "shop.db") == "removed\n"
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT sql FROM sqlite_schema").fetchall() == [(CREATE,)]
    assert "Traceback" not in site.output()
