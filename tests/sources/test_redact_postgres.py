"""Columns of PostgreSQL that never reach the log, by logical replication and by an event table."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.capture import Capture
from headrace.change.event import BeforeKind, Change, Op
from headrace.change.replay import TableName
from headrace.errors import ConfigError
from headrace.log import Log
from headrace.sources import Source, Status
from headrace.sources.postgres_events.outbox import Outbox
from headrace.testing import PostgresDatabase
from tests.sources.capturing import Captured, image, postgres
from tests.sources.redacting import MASK, Redacting, assert_nowhere
from tests.sources.test_postgres_events import events
from tests.sources.test_postgres_server import BAD, lawless  # noqa: F401 - a fixture
from tests.sources.test_postgres_types import SETUP, TYPES, supported

RULES: dict[str, Any] = {"exclude_columns": ("*ssn",), "mask": {"users.email": MASK}}


class RedactedFeed(Captured):
    """A running capture that hides columns."""

    def start(self) -> None:
        self.capture = Capture(Redacting(self.source), self.log)
        self.capture.start()


@contextmanager
def redacted(
    database: PostgresDatabase, folder: Path, source: Source | None = None, **settings: Any
) -> Iterator[RedactedFeed]:
    """Capture a database; the block begins after the first snapshot."""
    with Log.open(folder / "log") as log:
        feed = RedactedFeed(database, log, source or postgres(database, **RULES | settings))  # type: ignore[arg-type]
        with feed.running():
            yield feed


def users(database: PostgresDatabase) -> None:
    database.execute(
        "CREATE TABLE users (id int PRIMARY KEY, email text, ssn text, note text);"
        "INSERT INTO users VALUES (1, 'Oleander', 'Rhabarber', 'plain')"
    )


def halted(feed: RedactedFeed) -> Status:
    status = feed.until_halted()
    feed.capture.stop()
    return status


def with_rules(feed: RedactedFeed, database: PostgresDatabase, **settings: Any) -> None:
    """Go on with other settings, as after a restart."""
    feed.source = postgres(database, **RULES | settings)
    feed.start()
    feed.until_streaming()


def test_the_comment_of_a_column_goes_with_the_column(pg: PostgresDatabase, tmp_path: Path) -> None:
    users(pg)
    pg.execute(
        "COMMENT ON COLUMN users.ssn IS 'like Rhabarber';"
        "COMMENT ON COLUMN users.email IS 'where to write'"
    )
    with redacted(pg, tmp_path, ddl=True) as feed:
        before = feed.log.tables()[-1]
        assert {c.name: c.comment for c in before.columns} == {
            "id": "",
            "email": "where to write",
            "note": "",
        }
        pg.execute("COMMENT ON COLUMN users.ssn IS 'or Rhabarber too'")
        [change] = feed.streamed()
        assert change.table == before, "what is left out makes no new version"
        assert_nowhere(("Rhabarber",), feed.log, tmp_path)


# --- every kind of change ------------------------------------------------------------------------


def test_nothing_that_a_table_goes_through_shows_a_value(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    users(pg)
    pg.execute(
        "ALTER TABLE users ALTER COLUMN note SET STORAGE EXTERNAL;"
        "CREATE TABLE whole (email text, ssn text, users int);"
        "ALTER TABLE whole REPLICA IDENTITY FULL"
    )
    mask = {"*.email": MASK}
    with redacted(pg, tmp_path, ddl=True, mask=mask) as feed:
        pg.execute("UPDATE users SET note = repeat('x', 9000)")
        pg.execute("UPDATE users SET email = 'Oleander-2'")  # the note is not sent
        pg.execute("UPDATE users SET id = 2, ssn = 'Rhabarber-2'")
        pg.execute("INSERT INTO whole VALUES ('Oleander', 'Rhabarber', 1)")
        pg.execute("UPDATE whole SET email = 'Oleander-2'; DELETE FROM whole")
        # The statements go together into one text, which the trigger sees.
        pg.execute("UPDATE users SET ssn = 'Rhabarber'; ALTER TABLE whole ADD COLUMN a int")
        pg.execute("ALTER TABLE users ADD COLUMN old_ssn text DEFAULT 'Rhabarber'")
        pg.execute("SELECT pg_logical_emit_message(true, 'headrace.ddl', '{Rhabarber')")
        pg.execute("TRUNCATE users CASCADE")
        pg.execute(
            "INSERT INTO users SELECT g, 'Oleander', 'Rhabarber' FROM generate_series(1, 9000) g"
        )
        changes = feed.streamed()
        assert feed.status.errored == {}
        feed.capture.stop()
        assert_nowhere(("Oleander", "Rhabarber"), feed.log, tmp_path)
    code, other = MASK.code("Oleander"), MASK.code("Oleander-2")
    toast, email, moved, *_ = [c for c in changes if c.op is Op.UPDATE and c.table.name == "users"]
    assert set(image(toast.after) or {}) == {"id", "email", "note"}
    assert (image(email.after), email.unchanged) == ({"id": 1, "email": other}, ("note",))
    assert (image(moved.before), moved.key) == ({"id": 1}, b'{"id":2}')
    updated, deleted = [
        c for c in changes if c.table.name == "whole" and c.before_kind is BeforeKind.FULL
    ]
    assert image(updated.before) == {"email": code, "users": 1}
    assert image(deleted.before) == {"email": other, "users": 1}
    [emptied] = [c for c in changes if c.op is Op.TRUNCATE]
    assert (image(emptied.after) or {})["cascade"] is True
    assert len([c for c in changes if c.op is Op.INSERT and c.table.name == "users"]) == 9_000


def test_a_value_has_one_code_in_a_snapshot_and_in_the_stream(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    types = supported(pg, TYPES)
    pg.execute(SETUP)
    declared = ", ".join(f"c{at} {name}" for at, name in enumerate(types))
    pg.execute(f"CREATE TABLE kinds (id int PRIMARY KEY, {declared})")
    most = max(map(len, types.values()))
    rows = [[each[at] if at < len(each) else None for each in types.values()] for at in range(most)]
    places = ", ".join(f"%s::{name}" for name in types)

    def fill(first: int) -> None:
        for number, row in enumerate(rows, first):
            pg.execute(f"INSERT INTO kinds VALUES ({number}, {places})", tuple(row))

    fill(0)
    with redacted(pg, tmp_path, mask={"kinds.c*": MASK}) as feed:
        fill(100)
        streamed = feed.streamed(Op.INSERT, table="kinds")
        read = feed.stored(Op.READ, table="kinds")
    assert [without_key(each) for each in streamed] == [without_key(each) for each in read]
    assert {column.type for column in read[0].table.columns[1:]} == {"text"}
    first = without_key(read[0])
    assert first["c0"] == MASK.code("0")
    assert all(value is None or len(value) == len(MASK.code("x")) for value in first.values())


def without_key(change: Change) -> dict[str, Any]:
    row = image(change.after) or {}
    del row["id"]
    return row


def test_rows_that_cannot_be_read_are_reported_without_their_bytes(
    lawless: PostgresDatabase,  # noqa: F811
    tmp_path: Path,
) -> None:
    users(lawless)
    with redacted(lawless, tmp_path) as feed:
        lawless.execute(f"INSERT INTO users VALUES (2, 'Oleander', 'Rhabarber', {BAD})")
        lawless.execute("INSERT INTO users VALUES (3, 'Oleander', 'Rhabarber', 'fine')")
        kept = feed.streamed()
        assert [image(each.after) for each in kept] == [
            {"error": "the server sent text that is not UTF-8", "operation": "INSERT"}
        ] * 2
        feed.capture.stop()
        assert_nowhere(("Oleander", "Rhabarber"), feed.log, tmp_path, str(feed.status))


# --- names that change ---------------------------------------------------------------------------


def test_a_renamed_column_halts_the_source_until_the_rules_name_it(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    users(pg)
    with redacted(pg, tmp_path) as feed:
        feed.capture.stop()
        pg.execute("ALTER TABLE users RENAME COLUMN email TO mail")
        pg.execute("UPDATE users SET mail = 'Oleander-2'")
        feed.start()
        status = halted(feed)
        assert status.error == (
            "public.users.mail may be public.users.email renamed, whose values must not be stored"
        )
        assert "Add public.users.mail to exclude_columns or to mask of shop" in status.hint
        feed.start()  # nothing is forgotten by trying again
        assert halted(feed).error == status.error
        with_rules(feed, pg, mask={"users.email": MASK, "users.mail": MASK})
        pg.execute("ALTER TABLE users DROP COLUMN mail")
        pg.execute("UPDATE users SET note = 'x'")
        pg.execute(
            "ALTER TABLE users RENAME COLUMN ssn TO number; ALTER TABLE users ADD COLUMN n int"
        )
        pg.execute("UPDATE users SET n = 1")
        assert "public.users.number may be public.users.ssn renamed" in halted(feed).error
        with_rules(feed, pg, exclude_columns=("*ssn", "*number"), mask={"users.n": "keep"})
        changes = feed.streamed(Op.UPDATE)
        feed.capture.stop()
        assert_nowhere(("Oleander", "Rhabarber"), feed.log, tmp_path)
    assert [image(each.after) for each in changes] == [
        {"id": 1, "mail": MASK.code("Oleander-2"), "note": "plain"},
        {"id": 1, "note": "x"},
        {"id": 1, "note": "x", "n": 1},
    ]


def test_a_new_column_with_the_name_of_a_renamed_one_halts_the_source(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    users(pg)
    with redacted(pg, tmp_path) as feed:
        pg.execute(
            "ALTER TABLE users RENAME COLUMN ssn TO former; ALTER TABLE users ADD COLUMN ssn text"
        )
        pg.execute("UPDATE users SET note = 'x'")
        assert "public.users.former may be public.users.ssn renamed" in halted(feed).error
        assert_nowhere(("Rhabarber",), feed.log, tmp_path)


def test_a_renamed_table_halts_the_source(pg: PostgresDatabase, tmp_path: Path) -> None:
    users(pg)
    with redacted(pg, tmp_path, exclude_columns=("users.ssn",)) as feed:
        pg.execute("ALTER TABLE users RENAME TO people; UPDATE people SET note = 'x'")
        assert "people." in halted(feed).error
        with_rules(feed, pg, mask={"people.email": None})
        feed.until_caught_up()
        feed.capture.stop()
        assert_nowhere(("Oleander", "Rhabarber"), feed.log, tmp_path)


def test_a_dropped_column_is_no_reason_to_halt(pg: PostgresDatabase, tmp_path: Path) -> None:
    users(pg)
    with redacted(pg, tmp_path) as feed:
        pg.execute("ALTER TABLE users DROP COLUMN ssn; UPDATE users SET note = 'x'")
        [update] = feed.streamed(Op.UPDATE)
    assert image(update.after) == {"id": 1, "email": MASK.code("Oleander"), "note": "x"}


def test_rules_that_change_count_from_then_on(pg: PostgresDatabase, tmp_path: Path) -> None:
    users(pg)
    pg.execute('CREATE TABLE "Odd.Names" ("Id" int PRIMARY KEY, "E-Mail" text, "a.b" text)')
    with redacted(pg, tmp_path, exclude_columns=(), mask={"EMAIL": None}) as feed:
        feed.capture.stop()
        with_rules(feed, pg, mask={"*.odd.names.e-mail": None, "public.odd.names.a.b": MASK})
        pg.execute("UPDATE users SET note = 'x'")
        pg.execute("""INSERT INTO "Odd.Names" VALUES (1, 'Oleander', 'Oleander')""")
        stored = feed.changes(Op.READ, Op.UPDATE, Op.INSERT)
    assert [image(each.after) for each in stored] == [
        {"id": 1, "email": None, "ssn": "Rhabarber", "note": "plain"},
        {"id": 1, "email": "Oleander", "note": "x"},
        {"Id": 1, "E-Mail": None, "a.b": MASK.code("Oleander")},
    ]


def test_a_masked_key_stays_a_key_and_is_in_no_position(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        "CREATE TABLE users (email text PRIMARY KEY, n int);"
        "INSERT INTO users SELECT 'Oleander-' || g, g FROM generate_series(1, 3000) g"
    )
    settings = RULES | {"mask": {"*.email": MASK}, "snapshot_rows_per_second": 1500}
    with Log.open(tmp_path / "log") as log:
        feed = RedactedFeed(pg, log, postgres(pg, **settings))
        feed.start()
        feed.until(lambda: feed.stored(Op.READ), "the snapshot has begun")
        assert_nowhere(("Oleander",), log, tmp_path)
        feed.restart()
        feed.until_streaming()
        pg.execute("UPDATE users SET n = 0 WHERE n = 1; DELETE FROM users WHERE n = 2")
        pg.execute("UPDATE users SET email = 'Oleander-x' WHERE n = 3")
        rows = feed.replay().rows(TableName("shop", "public", "users"))
        feed.capture.stop()
        assert_nowhere(("Oleander",), feed.log, tmp_path)
    there = pg.execute("SELECT email, n FROM users")
    assert {(row["email"], row["n"]) for row in rows} == {(MASK.code(k), n) for k, n in there}


# --- by an event table ---------------------------------------------------------------------------


def test_an_event_table_hides_the_same(pg: PostgresDatabase, tmp_path: Path) -> None:
    users(pg)
    pg.execute(
        "CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, type text,"
        " payload json, email text)"
    )
    rules = RULES | {"mask": {"*.email": MASK, "outbox.aggregateid": None}}
    outbox = Outbox(table="public.outbox")
    with redacted(pg, tmp_path, events(pg, outbox=outbox, **rules)) as feed:
        pg.execute("UPDATE users SET email = 'Oleander-2'")
        pg.execute("INSERT INTO outbox VALUES (1, 'user', 'Oleander', 'made', '{}', 'Oleander')")
        pg.execute("DELETE FROM users")
        feed.until(lambda: feed.stored(Op.DELETE), "all of it is there")
        changes = feed.stored(Op.UPDATE, Op.INSERT, Op.DELETE)
        feed.capture.stop()
        pg.execute("INSERT INTO users VALUES (2, 'Oleander', 'Rhabarber')")
        pg.execute("UPDATE headrace.events SET columns = 'others'")  # nobody can read it now
        feed.start()
        feed.until(lambda: feed.stored(Op.MESSAGE), "it is kept")
        feed.capture.stop()
        assert_nowhere(("Oleander", "Rhabarber"), feed.log, tmp_path)
    code = MASK.code("Oleander")
    assert [image(each.after) for each in changes[:2]] == [
        {"id": 1, "email": MASK.code("Oleander-2"), "note": "plain"},
        {"id": 1, "aggregate_id": None, "type": "made", "payload": {}, "email": code},
    ]


def test_what_names_the_events_of_an_outbox_cannot_be_hidden(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        "CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, type text,"
        " payload json)"
    )
    source = events(pg, outbox=Outbox(table="public.outbox"), mask={"aggregatetype": MASK})
    with Log.open(tmp_path / "log") as log, pytest.raises(ConfigError, match="name of the events"):
        for _ in Redacting(source).open(None, log.register):
            pass


# --- errors --------------------------------------------------------------------------------------


def test_an_error_of_the_server_shows_no_value(pg: PostgresDatabase, tmp_path: Path) -> None:
    users(pg)
    pg.execute(
        "CREATE PUBLICATION headrace_shop FOR TABLE users WHERE (parse_ident(note) IS NOT NULL)"
    )
    with redacted(pg, tmp_path) as feed:
        pg.execute("INSERT INTO users VALUES (2, '', '', '1 Oleander')")
        streaming = halted(feed)
    with Log.open(tmp_path / "other") as log:
        feed = RedactedFeed(pg, log, postgres(pg, slot=f"other_{pg.name}", **RULES))
        feed.start()
        copying = halted(feed)
    for status in (streaming, copying):
        assert "error 22023 of the server" in status.error
        assert "Oleander" not in str(status)
