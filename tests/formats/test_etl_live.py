"""ETL events of changes that a real PostgreSQL made."""

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from headrace.change.event import Change
from headrace.formats.etl import (
    Begin,
    Commit,
    Delete,
    Event,
    Insert,
    Lsn,
    OldRow,
    Relation,
    TableColumn,
    TableRow,
    Truncate,
    Unsupported,
    Update,
    events,
)
from headrace.testing import PostgresDatabase
from tests.formats.test_etl import lines, seed, validate
from tests.sources.capturing import Captured, captured

E = TypeVar("E", bound=Event)

LSN = re.compile(r"[0-9A-F]+/[0-9A-F]+")
USERS = "CREATE TABLE users (id int PRIMARY KEY, email text NOT NULL UNIQUE, name text)"
ANN = {"id": 1, "email": "a@b", "name": "ann"}


def told(feed: Captured, *, copied: bool = False) -> list[Event]:
    """The events of what was captured, each of which follows the schema."""
    changes = feed.changes() if copied else feed.streamed()
    for line in lines(changes):
        validate(json.loads(line))
    return list(events(changes))


def of(kind: type[E], found: Iterable[Event]) -> list[E]:
    """The events of a kind."""
    return [event for event in found if isinstance(event, kind)]


def kinds(found: Iterable[Event]) -> list[str]:
    return [type(event).__name__ for event in found]


def number_of(database: PostgresDatabase, table: str) -> int:
    """What PostgreSQL calls a table."""
    return int(database.execute("SELECT %s::regclass::oid::bigint", (table,))[0][0])


# --- transactions --------------------------------------------------------------------------------


@pytest.mark.requirement("S2-03", "S2-16", "S2-17", "S2-18", "S2-19")
def test_the_two_inserts_of_the_document(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute(USERS)
    with captured(pg, tmp_path) as feed:
        with pg.connect() as connection, connection.transaction():
            connection.execute("INSERT INTO users VALUES (1, 'a@b', 'ann')")
            connection.execute("INSERT INTO users VALUES (2, 'b@c', 'bob')")
        changes = feed.streamed()
    document = [json.loads(line) for line in lines(changes)]
    inserts = [event for event in document if event["type"] == "Insert"]
    expected = seed("s2_two_inserts.json")
    assert len(inserts) == len(expected)
    for found, wanted in zip(inserts, expected, strict=True):
        assert found["type"] == wanted["type"]
        assert all(LSN.fullmatch(found[name]) for name in ("start_lsn", "commit_lsn"))
        assert found["table_id"] == number_of(pg, "users")
    first, second = of(Insert, events(changes))
    assert first.start_lsn < second.start_lsn < first.commit_lsn == second.commit_lsn
    assert first.table_row == ANN


@pytest.mark.requirement("S2-10", "S2-11")
def test_markers_name_the_transaction_as_the_server_does(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    any_pg.execute(USERS)
    with captured(any_pg, tmp_path) as feed:
        began = time.time_ns() // 1000
        with any_pg.connect() as connection, connection.transaction():
            connection.execute("INSERT INTO users VALUES (1, 'a@b', 'ann')")
            row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        reached = any_pg.execute("SELECT (pg_current_wal_lsn() - '0/0')::bigint")[0][0]
        found = told(feed)
    assert kinds(found) == ["Begin", "Relation", "Insert", "Commit"]
    [begin], [insert], [commit] = of(Begin, found), of(Insert, found), of(Commit, found)
    assert row is not None
    assert begin.xid == row[0] & 0xFFFFFFFF
    assert began <= begin.timestamp == commit.timestamp <= time.time_ns() // 1000
    assert begin.start_lsn == insert.start_lsn < commit.start_lsn == commit.commit_lsn
    assert commit.commit_lsn < commit.end_lsn <= reached
    assert {event.commit_lsn for event in found} == {commit.commit_lsn}


@pytest.mark.requirement("S2-19", "S2-20")
def test_events_come_in_the_order_of_their_lsns_and_their_keys(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(USERS)
    with captured(pg, tmp_path) as feed:
        with pg.connect() as one, pg.connect() as other:
            one.execute("BEGIN; INSERT INTO users VALUES (1, 'a@b', 'ann')")
            other.execute("INSERT INTO users VALUES (2, 'b@c', 'bob')")
            one.execute("INSERT INTO users VALUES (3, 'c@d', 'cyn')")
            one.execute("SELECT pg_logical_emit_message(false, 'outside', 'x')")
            one.execute("COMMIT")
            with other.cursor() as cursor, cursor.copy("COPY users FROM STDIN") as copy:
                for number in range(10, 30):
                    copy.write_row((number, f"{number}@x", None))
        found = told(feed)
    assert [event.table_row["id"] for event in of(Insert, found)] == [2, 1, 3, *range(10, 30)]
    keys = [event.key for event in found]
    assert keys == sorted(set(keys))
    starts: list[Lsn] = []
    for event in found:
        starts = [event.start_lsn] if isinstance(event, Begin) else [*starts, event.start_lsn]
        assert starts == sorted(starts)
    # COPY writes many rows at once, and PostgreSQL has one LSN for them.
    copied = of(Insert, found)[3:]
    assert len({event.start_lsn for event in copied}) < len({event.key for event in copied}) == 20


@pytest.mark.requirement("S2-13")
def test_while_tables_are_copied_markers_repeat_and_rows_do_not(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(USERS)
    pg.execute("INSERT INTO users SELECT n, n || '@x', 'name' FROM generate_series(1, 5000) n")
    pg.execute("CREATE TABLE notes (id int PRIMARY KEY); INSERT INTO notes VALUES (1), (2)")
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO notes VALUES (3)")
        found = told(feed, copied=True)
    users, notes = number_of(pg, "users"), number_of(pg, "notes")
    rows = [(event.table_id, event.table_row["id"]) for event in of(Insert, found)]
    assert len(rows) == len(set(rows)) == 5003
    assert set(rows) == {(users, n) for n in range(1, 5001)} | {(notes, n) for n in (1, 2, 3)}
    copies = [begin for begin in of(Begin, found) if begin.xid == 0]
    assert len(copies) > len({begin.commit_lsn for begin in copies}) == 1
    assert len(of(Commit, found)) == len(of(Begin, found))
    keys = [event.key for event in found]
    assert keys == sorted(set(keys))


# --- replica identities --------------------------------------------------------------------------

IDENTITIES: dict[str, tuple[str, TableRow]] = {
    "DEFAULT": ("DEFAULT", {"id": 1}),
    "FULL": ("FULL", ANN),
    "INDEX": ("USING INDEX users_email_key", {"email": "a@b"}),
}


@pytest.mark.requirement("S2-04", "S2-05", "S2-06", "S2-08")
@pytest.mark.parametrize("name", IDENTITIES)
def test_the_old_row_is_what_the_replica_identity_says(
    any_pg: PostgresDatabase, tmp_path: Path, name: str
) -> None:
    identity, sent = IDENTITIES[name]
    any_pg.execute(USERS)
    any_pg.execute(f"ALTER TABLE users REPLICA IDENTITY {identity}")
    with captured(any_pg, tmp_path) as feed:
        any_pg.execute("INSERT INTO users VALUES (1, 'a@b', 'ann')")
        any_pg.execute("UPDATE users SET name = 'anna'")
        any_pg.execute("UPDATE users SET id = 2, email = 'c@d'")
        any_pg.execute("DELETE FROM users")
        found = told(feed)
    # The document has no word for an index; what holds for the primary key holds for its columns.
    key_only = seed("s2_replica_identity.json")[name.replace("INDEX", "DEFAULT")]["key_only"]
    plain, moved = of(Update, found)
    [delete] = of(Delete, found)
    anna = sent | {"name": "anna"} if name == "FULL" else sent
    assert plain.old_table_row == OldRow(key_only, sent)
    assert plain.table_row == ANN | {"name": "anna"}
    assert moved.old_table_row == OldRow(key_only, anna)
    now = {"id": 2, "email": "c@d", "name": "anna"}
    assert moved.table_row == now
    assert delete.old_table_row == OldRow(key_only, {column: now[column] for column in sent})
    assert not hasattr(delete, "table_row")


@pytest.mark.requirement("S2-07")
def test_without_a_replica_identity_only_inserts_are_sent(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    # The server would refuse to change such a table if its updates were published.
    assert seed("s2_replica_identity.json")["NOTHING"] is None
    any_pg.execute(USERS)
    any_pg.execute("ALTER TABLE users REPLICA IDENTITY NOTHING")
    # A partition goes by an identity of its own, but its rows are sent as those of the whole.
    any_pg.execute(
        "CREATE TABLE parts (id int PRIMARY KEY, name text) PARTITION BY RANGE (id);"
        "CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (100);"
        "ALTER TABLE parts REPLICA IDENTITY NOTHING"
    )
    with captured(any_pg, tmp_path) as feed:
        for table, row in (("users", "(1, 'a@b', 'ann')"), ("parts", "(1, 'ann')")):
            any_pg.execute(f"INSERT INTO {table} VALUES {row}")
            any_pg.execute(f"UPDATE {table} SET name = 'anna'")
            any_pg.execute(f"DELETE FROM {table}")
        found = told(feed)
    assert [event.table_row["name"] for event in of(Insert, found)] == ["ann", "ann"]
    assert of(Update, found) == []
    assert of(Delete, found) == []


def test_a_large_value_that_did_not_change_is_named_and_not_sent(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE docs (id int PRIMARY KEY, state text, body text)")
    pg.execute("ALTER TABLE docs ALTER body SET STORAGE EXTERNAL")
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO docs VALUES (1, 'new', repeat('x', 9000))")
        pg.execute("UPDATE docs SET state = 'old'")
        [update] = of(Update, told(feed))
    assert update.table_row == {"id": 1, "state": "old"}
    assert update.unchanged == ("body",)
    assert update.old_table_row == OldRow(True, {"id": 1})


# --- tables --------------------------------------------------------------------------------------


@pytest.mark.requirement("S2-09")
def test_a_truncate_of_two_tables_is_one_event(any_pg: PostgresDatabase, tmp_path: Path) -> None:
    any_pg.execute(USERS)
    any_pg.execute("CREATE TABLE orders (id serial PRIMARY KEY, buyer int REFERENCES users)")
    any_pg.execute("CREATE TABLE notes (id int PRIMARY KEY)")
    with captured(any_pg, tmp_path) as feed:
        any_pg.execute("TRUNCATE users RESTART IDENTITY CASCADE")
        any_pg.execute("TRUNCATE notes")
        any_pg.execute("TRUNCATE notes, users, orders")
        found = of(Truncate, told(feed))
    users, orders, notes = (number_of(any_pg, name) for name in ("users", "orders", "notes"))
    cascaded, alone, listed = found
    assert (cascaded.options, set(cascaded.rel_ids)) == (3, {users, orders})
    assert (alone.options, alone.rel_ids) == (0, (notes,))
    assert (listed.options, set(listed.rel_ids)) == (0, {users, orders, notes})


@pytest.mark.requirement("S2-12")
def test_a_table_is_described_before_its_rows_and_again_when_it_changes(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE prices (id bigint PRIMARY KEY, amount numeric(12,2))")
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO prices VALUES (1, 9.90), (2, 1)")
        pg.execute("ALTER TABLE prices ADD note varchar(9)")
        pg.execute("INSERT INTO prices VALUES (3, 0.10, 'x')")
        found = told(feed)
    assert kinds(found) == [
        "Begin", "Relation", "Insert", "Insert", "Commit", "Begin", "Relation", "Insert", "Commit"
    ]  # fmt: skip
    first, second = (event.table_schema for event in of(Relation, found))
    assert (first.id, first.schema, first.name) == (number_of(pg, "prices"), "public", "prices")
    assert first.columns == (
        TableColumn("id", "bigint", 20, -1, True, 1),
        TableColumn("amount", "numeric(12,2)", 1700, (12 << 16 | 2) + 4, False, 2),
    )
    assert second.columns == (
        *first.columns,
        TableColumn("note", "character varying(9)", 1043, 9 + 4, False, 3),
    )
    assert [event.table_row["amount"] for event in of(Insert, found)] == ["9.90", "1.00", "0.10"]


@pytest.mark.requirement("S2-12")
def test_a_stream_opened_in_the_middle_describes_its_tables_too(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(USERS)
    with captured(pg, tmp_path) as feed:
        for number in range(3):
            pg.execute("INSERT INTO users VALUES (%s, %s)", (number, f"{number}@x"))
        changes = feed.streamed()
    rows: list[Change] = [change for change in changes if change.table.name == "users"]
    for at in range(len(rows)):
        found = list(events(rows[at:]))
        assert kinds(found[:3]) == ["Begin", "Relation", "Insert"]
        assert len(of(Relation, found)) == 1


def test_ddl_with_its_trigger_and_messages(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute(USERS)
    with captured(pg, tmp_path, ddl=True) as feed:
        pg.execute("ALTER TABLE users ADD age int")
        pg.execute("SELECT pg_logical_emit_message(true, 'prices', 'changed')")
        pg.execute("SELECT pg_logical_emit_message(false, 'prices', 'changed')")
        pg.execute("DROP TABLE users")
        found = told(feed)
    assert kinds(found) == [
        kind for event in ("Relation", "Unsupported", "Unsupported", "Truncate")
        for kind in ("Begin", event, "Commit")
    ]  # fmt: skip
    [relation] = of(Relation, found)
    assert [column.name for column in relation.table_schema.columns][-1] == "age"
    said: list[Any] = of(Unsupported, found)
    assert said[0].start_lsn < said[1].start_lsn
