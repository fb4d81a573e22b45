"""Keys that a transaction passes on: a deferrable primary key with REPLICA IDENTITY FULL."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from headrace.change.event import Op
from headrace.change.replay import Replay, Row, TableName
from headrace.sinks.tables import target
from headrace.sinks.tables.apply import TableShare
from headrace.sinks.tables.fold import SequencedRecord
from headrace.testing import PostgresDatabase
from tests.effort import times
from tests.sinks.plain import PlainLake
from tests.sources.capturing import SOURCE, captured, ordered, rows_of

TABLE = TableName(SOURCE, "public", "d")

# Each is one transaction; `was` is the row that was there, `new` the one that comes.
WRITTEN = (
    "UPDATE d SET id = id + 1",
    "UPDATE d SET id = id - 1",
    "UPDATE d SET id = 7 - id",
    "INSERT INTO d VALUES (2, 'new'); UPDATE d SET id = 20 WHERE id = 2 AND note <> 'new'",
    "INSERT INTO d VALUES (3, 'new'); DELETE FROM d WHERE id = 3 AND note <> 'new'",
    "INSERT INTO d VALUES (4, 'gone'); DELETE FROM d WHERE id = 4 AND note = 'gone'",
    "INSERT INTO d VALUES (4, 'b'), (4, 'c'); UPDATE d SET note = note || '!' WHERE id = 4;"
    "DELETE FROM d WHERE note = 'b!'; UPDATE d SET id = 21 WHERE id = 4 AND note <> 'c!'",
    "UPDATE d SET id = 1; UPDATE d SET id = n.at FROM (SELECT ctid, row_number() OVER () AS at"
    " FROM d) n WHERE n.ctid = d.ctid",
    "INSERT INTO d VALUES (1, 'same'), (1, 'same'); UPDATE d SET id = 30 WHERE ctid ="
    " (SELECT max(ctid) FROM d WHERE note = 'same'); DELETE FROM d WHERE id = 1 AND note <> 'same'",
    "DELETE FROM d WHERE id = 5; INSERT INTO d VALUES (5, 'x'); DELETE FROM d WHERE id = 5",
    "TRUNCATE d; INSERT INTO d SELECT n, 'n' || n FROM generate_series(1, 6) n;"
    "UPDATE d SET id = id + 1",
)

_ONE = "WHERE ctid = (SELECT ctid FROM d ORDER BY random() LIMIT 1)"
_STATEMENTS = (
    "INSERT INTO d VALUES (1 + floor(random() * 6), 'i' || floor(random() * 3))",
    f"UPDATE d SET id = 1 + floor(random() * 6) {_ONE}",
    f"UPDATE d SET note = 'u' || floor(random() * 3) {_ONE}",
    f"UPDATE d SET id = 1 + floor(random() * 6), note = 'b' || floor(random() * 3) {_ONE}",
    f"DELETE FROM d {_ONE}",
    "UPDATE d SET id = id + 1",
)
# Gives one row of a key that several have a key of its own.
_PART = """UPDATE d SET id = (SELECT max(id) + 1 FROM d) WHERE ctid = (
    SELECT max(ctid) FROM d GROUP BY id HAVING count(*) > 1 ORDER BY random() LIMIT 1)"""


def transactions(chance: random.Random) -> Iterator[str]:
    """What an application commits, the random part ending with a statement that may be repeated."""
    yield from WRITTEN
    for _ in range(times(12, nightly=150)):
        yield "; ".join(chance.choices(_STATEMENTS, k=chance.randrange(1, 9)))


def commit(connection: psycopg.Connection, statements: str) -> None:
    """Run a transaction whose end leaves each key one row."""
    with connection.transaction():
        connection.execute(statements)
        while connection.execute(_PART).rowcount:
            pass


def one_by_one(extend: Callable[..., None]) -> Callable[..., None]:
    """The same for each change alone, so that a window may end after any of them."""

    def extended(share: TableShare, changes: Sequence[SequencedRecord]) -> None:
        for each in changes:
            extend(share, [each])

    return extended


@pytest.mark.requirement("P-10")
def test_every_row_keeps_the_key_that_its_transaction_gave_it(
    pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(18)
    pg.execute(
        "CREATE TABLE d (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, note text);"
        "ALTER TABLE d REPLICA IDENTITY FULL;"
        "INSERT INTO d SELECT n, 'n' || n FROM generate_series(1, 5) n"
    )
    states: list[list[Row]] = []
    with captured(pg, tmp_path) as feed:
        copied = feed.log.latest_sequence
        with closing(psycopg.connect(pg.url, autocommit=True)) as connection:
            connection.execute("SELECT setseed(0.18)")
            for statements in transactions(chance):
                before = rows_of(pg, "d")
                commit(connection, statements)
                states.append(ordered(rows_of(pg, "d")))
                if states[-1] == ordered(before) and "u" not in statements:
                    states.pop()  # it may have changed nothing
        feed.until_caught_up()
        changes = feed.stored()
    replay, seen, ends = Replay(), [], [copied]
    for change in changes:
        replay.apply(change)
        if change.last and change.sequence > copied and change.op is not Op.MESSAGE:
            seen.append(ordered(replay.rows(TABLE)))
            ends.append(change.sequence)
    assert replay.surprises == []
    assert [state for state in states if state in seen] == states
    assert seen[-1] == states[-1]
    extend = TableShare.extend
    for keep in ("rows", "history"):
        for window in (1, 3, 1000):
            if window < 1000:  # else a window ends only between thousands of changes
                monkeypatch.setattr(TableShare, "extend", one_by_one(extend))
            monkeypatch.setattr(target, "WINDOW_KEYS", window)
            folder = tmp_path / f"{keep}-{window}"
            folder.mkdir()
            (folder / "log").symlink_to(tmp_path / "log")
            lake = PlainLake(monkeypatch, folder, keep=keep)
            for end in sorted({*chance.sample(ends, 6), ends[0], ends[-1]}):
                lake.write(end, chance.randrange(1, 4))
                if end > copied:
                    found = [
                        each for each in lake.rows("d", own=True) if each.get("_current", True)
                    ]
                    rows = [{"id": each["id"], "note": each["note"]} for each in found]
                    assert ordered(rows) == seen[ends.index(end) - 1], (keep, window, end)
            lake.log.close()
        monkeypatch.setattr(TableShare, "extend", extend)
