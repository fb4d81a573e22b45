"""Transactions are told whole, apart from one another, and only when they were committed."""

from itertools import groupby
from pathlib import Path

import apsw
import msgspec
import pytest

from headrace.change.event import Change, Op
from headrace.sources.sqlite import attach, install
from tests.sources.litedb import captured, run

# Transactions of 1 to 5 rows, which say whose they are; parts and wholes of them are undone.
WRITER = """
import random, sqlite3, sys
path, writer, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
dice = random.Random(writer)
db = sqlite3.connect(path, isolation_level=None, timeout=60)
for number in range(count):
    name = f"{writer}-{number}"
    add = lambda text: db.execute("INSERT INTO t (name) VALUES (?)", (text,))
    rows = dice.randint(1, 5)
    if dice.random() < 0.2:
        add(name + "/1")  # a statement of its own
        continue
    db.execute(dice.choice(["BEGIN", "BEGIN IMMEDIATE", "SAVEPOINT outer"]))
    opened = db.in_transaction
    try:
        for row in range(rows):
            add(f"{name}/{rows}")
            db.execute("SAVEPOINT s")
            add("undone")
            db.execute("UPDATE t SET name = 'undone' WHERE name = ?", (f"{name}/{rows}",))
            db.execute("ROLLBACK TO s")
            db.execute("RELEASE s")
        if dice.random() < 0.2:
            db.execute("UPDATE t SET name = 'undone'")
            db.execute("ROLLBACK")
        else:
            db.execute("COMMIT")
    except sqlite3.OperationalError:  # another one has written since this one began to read
        db.execute("ROLLBACK")
"""


def database(folder: Path) -> Path:
    path = folder / "shop.db"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT)")
    connection.close()
    install(str(path), ["*"])
    return path


def transactions(changes: list[Change]) -> list[list[str]]:
    """The names in the rows of each transaction."""
    groups = groupby(changes, key=lambda change: change.transaction.id)
    told = [list(group) for _, group in groups]
    for group in told:
        assert [change.last for change in group] == [False] * (len(group) - 1) + [True]
        assert [change.ordinal for change in group] == list(range(1, len(group) + 1))
    return [[msgspec.json.decode(c.after or b"{}").get("name") for c in g] for g in told]


@pytest.mark.requirement("S1-13")
def test_several_processes_write_at_once_and_each_transaction_is_told_by_itself(
    tmp_path: Path,
) -> None:
    path = database(tmp_path)
    with captured(path, tmp_path) as feed:
        writers = [run(path, WRITER, str(number), "150") for number in range(3)]
        for writer in writers:
            writer.communicate()
            assert writer.returncode == 0
        told = transactions(feed.changes(Op.INSERT))
        feed.assert_replays()
        ids = [change.transaction.id for change in feed.changes(Op.INSERT)]
    assert len(told) > 200
    for names in told:
        assert len(set(names)) == 1, "two transactions were told as one"
        assert len(names) == int(names[0].rpartition("/")[2]), "a transaction was parted"
    assert all(name.isdecimal() for name in ids)


def test_written_while_nobody_watched_they_come_together_and_in_order(tmp_path: Path) -> None:
    """Nothing in the database says where they ended; that they may be one keeps each whole."""
    path = database(tmp_path)
    with captured(path, tmp_path) as feed:
        feed.capture.stop()
        writer = run(path, WRITER, "0", "50")
        writer.communicate()
        feed.start()
        told = transactions(feed.changes(Op.INSERT))
        feed.assert_replays()
    assert len(told) == 1


def test_an_attached_program_is_told_apart_even_then(tmp_path: Path) -> None:
    path = database(tmp_path)
    with captured(path, tmp_path) as feed:
        feed.capture.stop()
        connection = apsw.Connection(str(path))
        connection.set_busy_timeout(20_000)
        with attach(connection) as attached:
            for number in range(20):
                with connection:
                    if number % 2:
                        attached.annotate({"user_id": f"u{number}"})
                    connection.execute("INSERT INTO t (name) VALUES ('a')")
                    connection.execute("SAVEPOINT s")
                    connection.execute("INSERT INTO t (name) VALUES ('undone')")
                    connection.execute("ROLLBACK TO s")
                    connection.execute(f"INSERT INTO t (name) VALUES ('{number}')")
                connection.execute(f"INSERT INTO t (name) VALUES ('alone {number}')")
            connection.execute("BEGIN; INSERT INTO t (name) VALUES ('undone'); ROLLBACK")
        connection.execute("INSERT INTO t (name) VALUES ('detached')")
        connection.close()
        feed.start()
        inserts = feed.changes(Op.INSERT)
        feed.assert_replays()
    expected: list[list[str]] = []
    for number in range(20):
        expected += [["a", str(number)], [f"alone {number}"]]
    assert transactions(inserts) == [*expected, ["detached"]]
    said = [c.transaction.metadata for c in inserts if c.ordinal == 2]
    assert said == [b'{"user_id":"u%d"}' % n if n % 2 else None for n in range(20)]


def test_annotations_belong_to_their_own_transaction(tmp_path: Path) -> None:
    path = database(tmp_path)
    with captured(path, tmp_path) as feed:
        connection = apsw.Connection(str(path))
        connection.set_busy_timeout(20_000)
        for number in range(4):
            with connection:
                connection.execute("INSERT INTO t (name) VALUES (?)", (str(number),))
                if number % 2:
                    said = f'{{"user_id": "u{number}"}}'
                    connection.execute("INSERT INTO headrace_annotations VALUES (?)", (said,))
        connection.execute("BEGIN; INSERT INTO headrace_annotations VALUES (7)")
        connection.execute("INSERT INTO t (name) VALUES ('4'); COMMIT")
        told = [change.transaction.metadata for change in feed.changes(Op.INSERT)]
        connection.close()
    assert told[:4] == [None, b'{"user_id":"u1"}', None, b'{"user_id":"u3"}']
    assert told[4] == b'{"annotation_error":"7"}'


def test_a_transaction_larger_than_a_page_stays_one(tmp_path: Path) -> None:
    path = database(tmp_path)
    script = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=60)
db.execute("PRAGMA cache_size = 10")  # pages go to the log before the commit
db.executemany("INSERT INTO t (name) VALUES (?)", (("x" * 100,) for _ in range(20000)))
db.execute("INSERT INTO headrace_annotations VALUES ('{\\"why\\": \\"import\\"}')")
db.commit()
db.execute("INSERT INTO t (name) VALUES ('next')")
db.commit()
"""
    with captured(path, tmp_path) as feed:
        writer = run(path, script)
        writer.communicate()
        inserts = feed.changes(Op.INSERT)
    assert [len(names) for names in transactions(inserts)] == [20_000, 1]
    assert {change.transaction.metadata for change in inserts} == {b'{"why":"import"}', None}
