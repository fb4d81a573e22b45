"""The document's events, made by a real PostgreSQL from real changes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.change.event import Change, Op
from headrace.formats.facts import Facts, SourceServer
from headrace.formats.savegress import Savegress, SavegressTransactions
from headrace.testing import PostgresDatabase
from tests.formats.savegress_document import EVENT, KEYS, seed
from tests.sources.capturing import SOURCE, Captured, captured

FACTS = Facts("abc123", (SourceServer(SOURCE, host="db1.example.com"),), version="1.0.0")
TIME = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"

USERS = "CREATE TABLE users (id int PRIMARY KEY, name text, email text)"


@pytest.fixture
def users(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Captured]:
    """A captured table whose old rows come whole, and whose DDL is told."""
    pg.execute(f"{USERS}; ALTER TABLE users REPLICA IDENTITY FULL")
    with captured(pg, tmp_path, ddl=True) as feed:
        yield feed


def encode(change: Change) -> dict[str, Any]:
    line = Savegress(FACTS).encode(change)
    assert line is not None
    event: dict[str, Any] = json.loads(line)
    EVENT.validate(event)
    return event


def as_in_the_document(change: Change, database: PostgresDatabase) -> dict[str, Any]:
    """The event, once all that differs from server to server is as it must be, and removed."""
    event = encode(change)
    assert re.fullmatch(r"evt_[0-9a-f-]{36}", event.pop("id"))
    assert re.fullmatch(TIME, event.pop("timestamp"))
    assert re.fullmatch(r"\d+", event.pop("transaction_id"))
    position, metadata = event.pop("position"), event.pop("metadata")
    assert list(position) == ["lsn", "sequence"]
    assert re.fullmatch(r"[0-9A-F]+/[0-9A-F]+", position["lsn"])
    assert position["sequence"] == change.sequence
    identifier = database.execute("SELECT system_identifier FROM pg_control_system()")[0][0]
    assert re.fullmatch(TIME, metadata.pop("captured_at"))
    assert metadata == {
        "connector_version": "1.0.0",
        "database": database.name,
        "server": "db1.example.com",
        "server_id": identifier,
        "pipeline_id": "pipe-abc123",
    }
    return event


PLACE = {"source": "postgres", "schema": "public", "table": "users"}


@pytest.mark.requirement("S0-01", "S0-09", "S0-18")
def test_the_documents_insert(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute(f"{USERS}; ALTER TABLE users ADD COLUMN created_at timestamp")
    with captured(pg, tmp_path) as feed:
        pg.execute(
            "INSERT INTO users VALUES (1, 'New User', 'new@example.com', '2025-01-15 10:30:00')"
        )
        (change,) = feed.streamed()
    assert as_in_the_document(change, pg) == PLACE | seed("insert")


@pytest.mark.requirement("S0-01", "S0-10", "S0-35")
def test_the_documents_whole_event(users: Captured) -> None:
    users.database.execute("INSERT INTO users VALUES (1, 'John Doe', 'john@example.com')")
    users.database.execute("UPDATE users SET email = 'john.doe@example.com'")
    (change,) = users.streamed(Op.UPDATE)
    expected = seed("event")
    assert list(encode(change)) == list(expected) == KEYS
    told = as_in_the_document(change, users.database)
    assert told == {name: expected[name] for name in told}


@pytest.mark.requirement("S0-10")
def test_the_documents_update(users: Captured) -> None:
    users.database.execute("INSERT INTO users VALUES (1, 'Old Name', 'old@example.com')")
    users.database.execute("UPDATE users SET name = 'New Name', email = 'new@example.com'")
    (change,) = users.streamed(Op.UPDATE)
    assert as_in_the_document(change, users.database) == PLACE | seed("update")


@pytest.mark.requirement("S0-11")
def test_the_documents_delete(users: Captured) -> None:
    users.database.execute("INSERT INTO users VALUES (1, 'Deleted User', 'deleted@example.com')")
    users.database.execute("DELETE FROM users")
    (change,) = users.streamed(Op.DELETE)
    assert as_in_the_document(change, users.database) == PLACE | seed("delete")


@pytest.mark.requirement("S0-12")
def test_the_documents_ddl(users: Captured) -> None:
    expected = seed("ddl")
    users.database.execute(expected["ddl_command"])
    (change,) = users.streamed()
    assert as_in_the_document(change, users.database) == PLACE | expected


@pytest.mark.requirement("S0-07", "S0-13")
def test_the_documents_transaction(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    pg.execute("CREATE TABLE inventory (id int PRIMARY KEY, left_over int)")
    pg.execute("INSERT INTO inventory VALUES (1, 10)")
    with captured(pg, tmp_path) as feed:
        with pg.connect(autocommit=False) as connection:
            connection.execute("INSERT INTO orders VALUES (1)")
            connection.execute("UPDATE inventory SET left_over = 9")
        changes = feed.streamed()
    stream = SavegressTransactions(FACTS).open()
    events = [json.loads(line) for c in changes for line in stream.encode(c, wanted=True)]
    (transaction_id,) = {event["transaction_id"] for event in events}
    (committed,) = {event["timestamp"] for event in events}
    here = {"transaction_id": transaction_id}
    begin, insert, update, commit = (expected | here for expected in seed("transaction"))
    assert events[0] == begin | {"timestamp": committed}
    assert events[1].items() >= insert.items()
    assert events[2].items() >= update.items()
    assert events[3] == commit | {"timestamp": committed}


@pytest.mark.requirement("C-03")
def test_what_a_default_identity_does_not_send_is_said_and_not_made_up(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(USERS)
    pg.execute("INSERT INTO users VALUES (1, 'Ann', 'ann@example.com')")
    with captured(pg, tmp_path) as feed:
        pg.execute("UPDATE users SET name = 'Anne'")
        pg.execute("UPDATE users SET id = 2")
        pg.execute("DELETE FROM users")
        copied = encode(feed.changes(Op.READ)[0])
        events = [encode(change) for change in feed.streamed()]
    assert (copied["operation"], copied["metadata"]["snapshot"]) == ("INSERT", "true")
    assert [(event["before"], event["metadata"]["before_kind"]) for event in events] == [
        (None, "none"),
        ({"id": 1}, "key"),
        ({"id": 2}, "key"),
    ]


@pytest.mark.requirement("C-03")
def test_a_large_value_that_stayed_the_same_is_named_and_not_null(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text, photo text)")
    pg.execute("ALTER TABLE users ALTER COLUMN photo SET STORAGE EXTERNAL")
    pg.execute("INSERT INTO users VALUES (1, 'Ann', repeat('x', 10000))")
    with captured(pg, tmp_path) as feed:
        pg.execute("UPDATE users SET name = 'Anne'")
        (change,) = feed.streamed()
    event = encode(change)
    assert event["after"] == {"id": 1, "name": "Anne"}
    assert event["metadata"]["unchanged"] == ["photo"]


@pytest.mark.requirement("C-02")
def test_a_truncate_is_ddl_without_its_statement(users: Captured) -> None:
    users.database.execute("TRUNCATE users")
    (event,) = map(encode, users.streamed())
    assert (event["operation"], event["ddl_type"], event["ddl_command"]) == (
        "DDL",
        "TRUNCATE",
        None,
    )


VALUES = {
    "integer": "42",
    "bigint": "42",
    "numeric": "123.456",
    "decimal": "123.456",
    "boolean": "true",
    "text": "hello",
    "varchar": "hello",
    "timestamp": "2025-01-15 10:30:00",
    "timestamptz": "2025-01-15 10:30:00+00",
    "date": "2025-01-15",
    "time": "10:30:00",
    "uuid": "550e8400-e29b-41d4-a716-446655440000",
    "json": '{"key": "value"}',
    "jsonb": '{"key": "value"}',
    "bytea": r"\x48656c6c6f20576f726c64",
    "integer[]": "{1,2,3}",
    "inet": "192.168.1.1",
    "point": "(1.0,2.0)",
}


@pytest.mark.requirement("S0-14", "S0-15", "S0-16", "S0-17", "S0-18", "S0-19", "S0-20", "S0-21")
@pytest.mark.requirement("S0-22", "S0-23", "S0-24", "S0-25", "S0-26", "S0-27", "C-13", "C-14")
def test_every_type_looks_as_in_the_document(any_pg: PostgresDatabase, tmp_path: Path) -> None:
    expected = seed("types_postgres")
    assert list(VALUES) == list(expected)
    declared = ", ".join(f'"{name}" {name}' for name in VALUES)
    marks = ", ".join("%s" for _ in VALUES)
    any_pg.execute(f"CREATE TABLE everything (n serial PRIMARY KEY, {declared})")
    any_pg.execute("ALTER TABLE everything REPLICA IDENTITY FULL")
    names = ", ".join(f'"{name}"' for name in VALUES)
    insert = f"INSERT INTO everything ({names}) VALUES ({marks})"
    any_pg.execute(insert, tuple(VALUES.values()))
    with captured(any_pg, tmp_path) as feed:
        any_pg.execute(insert, tuple(VALUES.values()))
        any_pg.execute("DELETE FROM everything WHERE n = 2")
        read, inserted, deleted = map(encode, feed.changes(Op.READ, Op.INSERT, Op.DELETE))
    for number, image in [(1, read["after"]), (2, inserted["after"]), (2, deleted["before"])]:
        assert image == {"n": number} | expected
        # Python takes 1 for 1.0 and for true; the document does not.
        kinds = [type(value) for value in image.values()]
        assert kinds == [int, *map(type, expected.values())]
