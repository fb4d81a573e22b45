"""What a table's users do arrives in the log: every change, once, in commit order."""

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import LiteralString

import pytest

from headrace.change.event import Batch, BeforeKind, Change, Op
from headrace.log import Log
from headrace.sources.resume import position_in
from headrace.testing import PostgresDatabase
from tests.changes import wal_position
from tests.sources.capturing import SOURCE, Captured, captured, driven, image, postgres

# Large enough, and hard enough to compress, that updates do not send it again.
BIG: LiteralString = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 300) n)"


@pytest.fixture
def shop(pg: PostgresDatabase, tmp_path: Path) -> Iterator[Captured]:
    """A captured database with one plain table."""
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text, big text)")
    pg.execute("INSERT INTO users VALUES (1, 'ann')")
    with captured(pg, tmp_path) as feed:
        yield feed


def summary(changes: list[Change]) -> list[tuple[str, object]]:
    """Operation, and the new image or else the old one."""
    return [(str(c.op), image(c.after if c.after is not None else c.before)) for c in changes]


# --- operations and replica identity -------------------------------------------------------------


@pytest.mark.requirement("S1-31")
def test_insert_update_and_delete_arrive_with_their_images(shop: Captured) -> None:
    shop.database.execute("INSERT INTO users VALUES (2, 'bob', NULL)")
    shop.database.execute("UPDATE users SET name = 'bobby' WHERE id = 2")
    shop.database.execute("DELETE FROM users WHERE id = 2")
    insert, update, delete = shop.streamed()
    assert [c.op for c in (insert, update, delete)] == [Op.INSERT, Op.UPDATE, Op.DELETE]
    assert image(insert.after) == {"id": 2, "name": "bob", "big": None}
    assert (insert.before, insert.before_kind) == (None, BeforeKind.NONE)
    assert image(update.after) == {"id": 2, "name": "bobby", "big": None}
    assert (delete.after, image(delete.before)) == (None, {"id": 2})
    for change in (insert, update, delete):
        assert image(change.key) == {"id": 2}
        assert change.last
        assert (change.table.schema, change.table.name) == ("public", "users")


def test_default_identity_sends_no_old_row_unless_the_key_changes(shop: Captured) -> None:
    shop.database.execute("UPDATE users SET name = 'anna'")
    shop.database.execute("UPDATE users SET id = 7")
    plain, moved = shop.streamed()
    assert (plain.before, plain.before_kind, plain.changed) == (None, BeforeKind.NONE, None)
    assert (image(moved.before), moved.before_kind) == ({"id": 1}, BeforeKind.KEY)
    assert (image(moved.key), image(moved.after)) == (
        {"id": 7},
        {"id": 7, "name": "anna", "big": None},
    )


@pytest.mark.requirement("S2-05", "S2-07")
def test_default_identity_sends_the_key_of_a_deleted_row(shop: Captured) -> None:
    shop.database.execute("DELETE FROM users")
    [delete] = shop.streamed()
    assert (image(delete.before), delete.before_kind) == ({"id": 1}, BeforeKind.KEY)


@pytest.mark.requirement("S2-06")
def test_full_identity_sends_whole_old_rows_and_what_changed(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text, note text);"
        "ALTER TABLE users REPLICA IDENTITY FULL;"
        "INSERT INTO users VALUES (1, 'ann', NULL)"
    )
    with captured(pg, tmp_path) as feed:
        pg.execute("UPDATE users SET name = 'anna', note = note")
        pg.execute("UPDATE users SET name = name")
        pg.execute("DELETE FROM users")
        update, nothing, delete = feed.streamed()
    assert update.before_kind is delete.before_kind is BeforeKind.FULL
    assert image(update.before) == {"id": 1, "name": "ann", "note": None}
    assert image(update.after) == {"id": 1, "name": "anna", "note": None}
    assert (update.changed, nothing.changed) == (("name",), ())
    assert image(delete.before) == {"id": 1, "name": "anna", "note": None}
    assert [image(c.key) for c in (update, delete)] == [{"id": 1}, {"id": 1}]


def test_index_identity_makes_the_indexs_columns_the_key(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        "CREATE TABLE users (id int PRIMARY KEY, tenant int NOT NULL, email text NOT NULL);"
        "CREATE UNIQUE INDEX by_email ON users (email, tenant);"
        "ALTER TABLE users REPLICA IDENTITY USING INDEX by_email;"
        "INSERT INTO users VALUES (1, 9, 'a@b')"
    )
    with captured(pg, tmp_path) as feed:
        pg.execute("UPDATE users SET id = 2")
        pg.execute("UPDATE users SET email = 'c@d'")
        pg.execute("DELETE FROM users")
        read, update, moved, delete = feed.changes(Op.READ, Op.UPDATE, Op.DELETE)
        feed.assert_replays("users")
    assert image(read.key) == image(update.key) == {"tenant": 9, "email": "a@b"}
    assert (update.before_kind, moved.before_kind) == (BeforeKind.NONE, BeforeKind.KEY)
    assert image(moved.before) == {"tenant": 9, "email": "a@b"}
    assert image(delete.key) == {"tenant": 9, "email": "c@d"}


@pytest.mark.requirement("S2-07")
def test_identity_nothing_captures_inserts_and_the_rest_is_free(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    pg.execute("ALTER TABLE users REPLICA IDENTITY NOTHING")
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO users VALUES (1)")
        pg.execute("DELETE FROM users")
        [insert] = feed.streamed()
    assert (insert.op, image(insert.key)) == (Op.INSERT, {"id": 1})


def test_a_composite_key_has_all_its_columns(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE lines (note text, line int, doc text, PRIMARY KEY (doc, line))")
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO lines VALUES ('x', 1, 'a'), ('y', 2, 'a')")
        pg.execute("UPDATE lines SET doc = 'b' WHERE line = 2")
        pg.execute("DELETE FROM lines WHERE line = 1")
        changes = feed.streamed()
        feed.assert_replays("lines")
    assert [image(change.key) for change in changes] == [
        {"line": 1, "doc": "a"},
        {"line": 2, "doc": "a"},
        {"line": 2, "doc": "b"},
        {"line": 1, "doc": "a"},
    ]


def test_a_table_without_a_key_is_captured_row_by_row(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute(
        "CREATE TABLE notes (body text, n int);"
        "ALTER TABLE notes REPLICA IDENTITY FULL;"
        "INSERT INTO notes VALUES ('a', 1), ('a', 1)"
    )
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO notes VALUES ('a', 1), ('b', 2)")
        pg.execute("UPDATE notes SET n = 3 WHERE body = 'b'")
        pg.execute("DELETE FROM notes WHERE ctid IN (SELECT min(ctid) FROM notes WHERE n = 1)")
        changes = feed.changes()
        feed.assert_replays("notes")
    assert {change.key for change in changes} == {None}


# --- large values --------------------------------------------------------------------------------


def test_a_large_value_that_did_not_change_is_listed_and_absent(shop: Captured) -> None:
    shop.database.execute(f"UPDATE users SET big = {BIG}")
    shop.database.execute("UPDATE users SET name = 'anna'")
    shop.database.execute("UPDATE users SET big = NULL")
    filled, kept, emptied = shop.streamed()
    assert (filled.unchanged, kept.unchanged, emptied.unchanged) == ((), ("big",), ())
    assert image(kept.after) == {"id": 1, "name": "anna"}
    assert image(emptied.after) == {"id": 1, "name": "anna", "big": None}
    shop.assert_replays("users")


def test_under_full_identity_a_large_value_comes_from_the_old_row(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text, big text)")
    pg.execute("ALTER TABLE users REPLICA IDENTITY FULL")
    pg.execute(f"INSERT INTO users SELECT 1, 'ann', {BIG}")
    with captured(pg, tmp_path) as feed:
        pg.execute("UPDATE users SET name = 'anna'")
        [update] = feed.streamed()
        feed.assert_replays("users")
    after = image(update.after)
    assert after is not None
    assert len(after["big"]) == 9600
    assert (update.changed, update.unchanged) == (("name",), ())


def test_a_key_change_beside_an_unchanged_large_value_loses_neither(shop: Captured) -> None:
    shop.database.execute(f"UPDATE users SET big = {BIG}")
    shop.database.execute("UPDATE users SET id = 2")
    moved = shop.streamed()[-1]
    assert (image(moved.before), moved.unchanged) == ({"id": 1}, ("big",))
    shop.assert_replays("users")


# --- truncate ------------------------------------------------------------------------------------


def test_a_truncate_is_one_change_for_each_table_at_one_position(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(
        "CREATE TABLE parents (id int PRIMARY KEY);"
        "CREATE TABLE children (id serial PRIMARY KEY, parent int REFERENCES parents);"
        "CREATE TABLE others (id int PRIMARY KEY);"
        "INSERT INTO parents VALUES (1); INSERT INTO children (parent) VALUES (1);"
        "INSERT INTO others VALUES (1)"
    )
    with captured(pg, tmp_path) as feed:
        pg.execute("TRUNCATE parents RESTART IDENTITY CASCADE")
        pg.execute("TRUNCATE others")
        first, second, third = feed.streamed()
        feed.assert_replays("parents", "children", "others")
    assert {first.table.name, second.table.name} == {"parents", "children"}
    assert first.position.own == second.position.own
    assert (first.ordinal, second.ordinal, first.last, second.last) == (1, 2, False, True)
    together = [first.table.relation, second.table.relation]
    assert image(first.after) == image(second.after) == {
        "cascade": True, "restart_identity": True, "relations": together,
    }  # fmt: skip
    assert image(third.after) == {
        "cascade": False, "restart_identity": False, "relations": [third.table.relation],
    }  # fmt: skip


# --- transactions --------------------------------------------------------------------------------


@pytest.mark.requirement("S2-17")
def test_the_changes_of_a_transaction_share_it_and_count_up(shop: Captured) -> None:
    with shop.database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO users VALUES (2), (3)")
        connection.execute("UPDATE users SET name = 'x' WHERE id = 1")
        row = connection.execute("SELECT pg_current_xact_id()::text").fetchone()
    changes = shop.streamed()
    assert row is not None
    assert {change.transaction.id for change in changes} == {row[0]}
    assert [change.ordinal for change in changes] == [1, 2, 3]
    assert [change.last for change in changes] == [False, False, True]
    assert len({change.position.commit for change in changes}) == 1
    assert [c.position.own for c in changes] == sorted(c.position.own for c in changes)


def test_the_commit_time_is_the_servers(shop: Captured) -> None:
    with shop.database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO users VALUES (2)")
        micros = "SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::bigint"
        before = connection.execute(micros).fetchone()
    after = shop.database.execute(micros)[0]
    [change] = shop.streamed()
    assert before is not None
    assert before[0] <= change.transaction.commit_time <= after[0]


def test_the_end_of_a_commit_is_where_the_next_run_goes_on(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with Log.open(tmp_path / "log") as log, driven(postgres(pg, snapshot=False), log) as reading:
        reading.step()
        pg.execute("INSERT INTO users VALUES (1), (2)")
        batch = reading.until(lambda batch: bool(batch.changes))
    *others, last = map(wal_position, batch.changes)
    assert batch.resume is not None
    assert last.end_lsn == position_in(batch.resume) > last.commit_lsn > last.lsn
    assert {position.end_lsn for position in others} == {0}


def test_what_was_rolled_back_leaves_nothing(shop: Captured) -> None:
    with shop.database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO users VALUES (2)")
        connection.rollback()
        connection.execute("INSERT INTO users VALUES (3)")
        connection.execute("SAVEPOINT a")
        connection.execute("INSERT INTO users VALUES (4)")
        connection.execute("SAVEPOINT b")
        connection.execute("INSERT INTO users VALUES (5)")
        connection.execute("ROLLBACK TO a")
        connection.execute("INSERT INTO users VALUES (6)")
    changes = shop.streamed()
    assert [image(change.key) for change in changes] == [{"id": 3}, {"id": 6}]
    assert [change.ordinal for change in changes] == [1, 2]


def test_a_prepared_transaction_arrives_when_it_is_committed(shop: Captured) -> None:
    with shop.database.connect() as connection:
        connection.execute("BEGIN; INSERT INTO users VALUES (2); PREPARE TRANSACTION 'headrace'")
    shop.database.execute("INSERT INTO users VALUES (3)")
    assert [image(change.key) for change in shop.streamed()] == [{"id": 3}]
    shop.database.execute("COMMIT PREPARED 'headrace'")
    assert [image(change.key) for change in shop.streamed()] == [{"id": 3}, {"id": 2}]


@pytest.mark.requirement("S2-19", "S2-23")
def test_transactions_come_in_the_order_of_their_commits(shop: Captured) -> None:
    with (
        shop.database.connect(autocommit=False) as first,
        shop.database.connect(autocommit=False) as second,
    ):
        first.execute("INSERT INTO users VALUES (10)")
        second.execute("INSERT INTO users VALUES (20)")
        first.execute("INSERT INTO users VALUES (11)")
        second.execute("INSERT INTO users VALUES (21)")
        second.commit()
        first.commit()
    changes = shop.streamed()
    assert [image(change.key) for change in changes] == [{"id": n} for n in (20, 21, 10, 11)]


@pytest.mark.requirement("S2-19")
def test_many_writers_at_once_are_followed_exactly(shop: Captured) -> None:
    def write(writer: int) -> None:
        with shop.database.connect(autocommit=False) as connection:
            for number in range(40):
                key = writer * 1000 + number
                connection.execute("INSERT INTO users VALUES (%s, %s)", (key, "new"))
                connection.execute("UPDATE users SET name = name || '+' WHERE id = %s", (key,))
                if number % 3 == 0:
                    connection.execute("DELETE FROM users WHERE id = %s", (key,))
                (connection.rollback if number % 7 == 0 else connection.commit)()

    writers = [threading.Thread(target=write, args=(n,)) for n in range(1, 5)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    shop.assert_replays("users")
    changes = shop.streamed()
    commits = [change.position.commit for change in changes]
    assert commits == sorted(commits)
    assert len({change.id for change in changes}) == len(changes)


def test_a_large_transaction_appears_at_once(shop: Captured) -> None:
    counts: set[int] = set()
    shop.log.listen(lambda: counts.add(shop.log.stats().count))
    before = shop.log.stats().count
    shop.database.execute("INSERT INTO users SELECT n, 'n' FROM generate_series(2, 30001) n")
    changes = shop.streamed()
    assert [change.ordinal for change in changes] == list(range(1, 30_001))
    assert [change.last for change in changes] == [False] * 29_999 + [True]
    assert not counts & set(range(before + 1, before + 30_000))


# --- messages ------------------------------------------------------------------------------------


def test_annotations_mark_every_change_of_their_transaction(shop: Captured) -> None:
    with shop.database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO users VALUES (2)")
        connection.execute(
            """SELECT pg_logical_emit_message(true, 'headrace', '{"user_id": "u1"}')"""
        )
        connection.execute("INSERT INTO users VALUES (3)")
    shop.database.execute("INSERT INTO users VALUES (4)")
    changes = shop.streamed()
    assert [change.op for change in changes] == [Op.INSERT] * 3
    told = [image(change.transaction.metadata) for change in changes]
    assert told == [{"user_id": "u1"}, {"user_id": "u1"}, None]


def test_an_annotation_at_the_start_marks_every_piece_of_a_large_transaction(
    shop: Captured,
) -> None:
    with shop.database.connect(autocommit=False) as connection:
        connection.execute("SELECT pg_logical_emit_message(true, 'headrace', '{\"n\": 1}')")
        connection.execute("INSERT INTO users SELECT n FROM generate_series(2, 20001) n")
    changes = shop.streamed()
    assert len(changes) == 20_000
    assert {change.transaction.metadata for change in changes} == {b'{"n":1}'}


def test_a_wrong_annotation_is_shown_and_the_transaction_arrives(shop: Captured) -> None:
    annotate: LiteralString = "SELECT pg_logical_emit_message(true, 'headrace', %s)"
    with shop.database.connect(autocommit=False) as connection:
        connection.execute(annotate, ('{"user_id": "u1"}',))
        connection.execute("INSERT INTO users VALUES (2)")
        connection.execute(annotate, ("user: ann\n",))
        connection.execute(annotate, ('{"request_id": "r1"}',))
    with shop.database.connect(autocommit=False) as connection:
        connection.execute(annotate, (b"\xffann",))
        connection.execute("INSERT INTO users VALUES (3)")
    shop.database.execute("INSERT INTO users VALUES (4)")
    text, binary, bytes_, after = shop.streamed()
    assert [c.op for c in (text, binary, bytes_, after)] == [
        Op.INSERT, Op.MESSAGE, Op.INSERT, Op.INSERT,
    ]  # fmt: skip
    assert image(text.transaction.metadata) == {
        "user_id": "u1", "annotation_error": "user: ann\n", "request_id": "r1",
    }  # fmt: skip
    assert image(bytes_.transaction.metadata) == {"annotation_error": "\ufffdann"}
    assert (image(binary.after) or {})["content_base64"] == "/2Fubg=="
    assert after.transaction.metadata is None


def test_an_annotation_that_is_too_large_is_shown_in_part_and_kept_whole(shop: Captured) -> None:
    large = f'{{"note": "{"ä" * 40_000}"}}'
    with shop.database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO users VALUES (2)")
        connection.execute("SELECT pg_logical_emit_message(true, 'headrace', %s)", (large,))
        connection.execute("""SELECT pg_logical_emit_message(true, 'headrace', '{"n": 1}')""")
    insert, kept = shop.streamed()
    assert insert.transaction.metadata == kept.transaction.metadata
    assert image(insert.transaction.metadata) == {
        "n": 1, "annotation_error": f"{large[:1000]}… (80012 bytes)",
    }  # fmt: skip
    assert image(kept.after) == {"prefix": "headrace", "transactional": True, "content": large}


def test_messages_are_changes_without_a_table(shop: Captured) -> None:
    emit: LiteralString = "SELECT pg_logical_emit_message(%s, 'audit', %s)"
    with shop.database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO users VALUES (2)")
        connection.execute(emit, (True, "inside"))
        connection.execute(emit, (True, "gone"))
        connection.execute("ROLLBACK")
        connection.execute("INSERT INTO users VALUES (3)")
        connection.execute(emit, (True, "inside"))
        connection.execute(emit, (True, b"\xff\x00"))
    shop.database.execute(emit, (False, "outside"))
    insert, text, binary, outside = shop.streamed()
    assert (insert.op, image(insert.key)) == (Op.INSERT, {"id": 3})
    assert image(text.after) == {"prefix": "audit", "transactional": True, "content": "inside"}
    assert (image(binary.after) or {})["content_base64"] == "/wA="
    assert image(outside.after) == {"prefix": "audit", "transactional": False, "content": "outside"}
    assert (text.table.name, text.key) == ("", None)
    assert (outside.ordinal, outside.last) == (1, True)


def test_a_message_outside_transactions_comes_once_even_after_a_restart(shop: Captured) -> None:
    shop.database.execute("SELECT pg_logical_emit_message(false, 'audit', 'once')")
    shop.until(lambda: shop.stored(Op.MESSAGE), "the message is there")
    shop.restart()
    shop.database.execute("SELECT pg_logical_emit_message(false, 'audit', 'again')")
    told = [image(change.after) for change in shop.changes(Op.MESSAGE)]
    assert [message["content"] for message in told if message] == ["once", "again"]


def test_a_commit_right_after_a_message_outside_transactions_is_not_lost(shop: Captured) -> None:
    with shop.database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO users VALUES (2)")
        connection.execute("SELECT pg_logical_emit_message(false, 'audit', 'before the commit')")
    shop.until(lambda: shop.stored(Op.MESSAGE), "the message is there")
    shop.restart()
    assert [change.op for change in shop.streamed()] == [Op.MESSAGE, Op.INSERT]


# --- the same again ------------------------------------------------------------------------------


@pytest.mark.requirement("S0-34")
def test_changes_read_twice_have_the_same_ids_and_bytes(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    source = postgres(pg, snapshot=False)
    with Log.open(tmp_path / "one") as one, Log.open(tmp_path / "two") as two:
        with driven(source, one) as reading:
            start = reading.step().resume
            pg.execute("INSERT INTO users SELECT n, 'x' FROM generate_series(1, 5) n")
            pg.execute("UPDATE users SET id = id + 10")
            pg.execute("TRUNCATE users")
            seen: list[Change] = []
            while len(seen) < 12:
                # Handed over but neither stored nor acknowledged: the server sends it again.
                seen += reading.peek().changes
        two.append(SOURCE, Batch([], start))
        with driven(source, two) as reading:
            again = reading.until(lambda batch: bool(batch.changes)).changes
    assert [(c.id, c.op, c.key, c.before, c.after, c.position) for c in again] == [
        (c.id, c.op, c.key, c.before, c.after, c.position) for c in seen
    ]


def test_a_process_with_more_than_a_thousand_open_files_captures(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item VALUES (1)")
    with descriptors_beyond(1024), captured(pg, tmp_path) as feed:  # a server has many clients
        pg.execute("INSERT INTO item VALUES (2)")
        assert [c.op for c in feed.changes(Op.READ, Op.INSERT)] == [Op.READ, Op.INSERT]


@contextmanager
def descriptors_beyond(number: int) -> Iterator[None]:
    """Whatever is opened in the block has a descriptor above a number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, number * 2), hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] <= number:
            held.append(os.dup(held[0]))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
