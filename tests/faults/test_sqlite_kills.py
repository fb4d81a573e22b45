"""Writers and the capture are killed at any moment; the log still adds up to the database."""

import random
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import apsw
import psutil
import pytest

from headrace.change.event import Op
from headrace.log import Log, LogReader
from headrace.sources.sqlite import install
from headrace.testing import wait_until
from tests.sources.litedb import SOURCE, caught_up, compare, run

ROOT = Path(__file__).parents[2]

CREATE = """
CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT UNIQUE COLLATE NOCASE, n REAL, b BLOB);
CREATE TABLE orders (shop TEXT, number INT, user REFERENCES users ON DELETE CASCADE, any,
  PRIMARY KEY (shop, number)) WITHOUT ROWID;
CREATE TABLE notes (text, at);
"""

FILL = """
WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 3000)
  INSERT INTO notes SELECT printf('note %d', n), n * 0.5 FROM n;
INSERT INTO orders SELECT 'old', rowid, NULL, x'00ff' FROM notes WHERE rowid > 1000;
"""

# Values of every type in every column, statements of every kind, and now and then DDL.
WORK = r"""
import random, sqlite3, sys, time
path, seed = sys.argv[1], int(sys.argv[2])
dice = random.Random(seed)
db = sqlite3.connect(path, isolation_level=None, timeout=60)
db.execute("PRAGMA foreign_keys = ON")
db.execute(f"PRAGMA recursive_triggers = {seed % 2}")
def value():
    real = dice.random() * 10**dice.randint(-300, 300)
    text = "text \0 é \u2028 \""
    whole = dice.randint(-2**63, 2**63 - 1)
    return dice.choice([None, whole, real, 1.0, float("inf"), text, dice.randbytes(9), "7", ""])
def email():
    return dice.choice("abcdefghijABCDEFGHIJ") + "@x"
def key():
    return dice.randint(1, 40)
ALL = "INSERT {}INTO users (id, email, n, b) VALUES (?, ?, ?, ?)"
def statement():
    return dice.choice([
        (ALL.format("OR REPLACE "), (key(), email(), value(), value())),
        (ALL.format("OR IGNORE "), (key(), email(), value(), value())),
        (ALL.format("") + " ON CONFLICT DO UPDATE SET n = 1", (key(), email(), value(), value())),
        ("UPDATE OR REPLACE users SET email = ?, id = ? WHERE id = ?", (email(), key(), key())),
        ("UPDATE users SET n = ?, b = ? WHERE id > ?", (value(), value(), key())),
        ("DELETE FROM users WHERE id = ?", (key(),)),
        ("REPLACE INTO orders (shop, number, any) VALUES (?, ?, ?)", (email(), key(), value())),
        ("UPDATE OR IGNORE orders SET user = (SELECT id FROM users LIMIT 1), number = ?", (key(),)),
        ("DELETE FROM orders WHERE number = ?", (key(),)),
        ("INSERT INTO notes (text, at) VALUES (?, ?)", (value(), value())),
        ("DELETE FROM notes WHERE rowid % 3 = 0", ()),
    ])
DDL = [
    "ALTER TABLE notes ADD COLUMN c{}", "CREATE TABLE t{} (id INTEGER PRIMARY KEY, a)",
    "DROP TABLE IF EXISTS t{}", "INSERT INTO t{} (a) VALUES (1)", "CREATE INDEX i{} ON notes (at)",
    "ALTER TABLE t{} RENAME TO t{}x", "CREATE UNIQUE INDEX u{} ON t{} (a)",
]
while True:
    try:
        db.execute(dice.choice(["BEGIN IMMEDIATE", "BEGIN"]))
        for _ in range(dice.randint(1, 6)):
            if dice.random() < 0.2:
                db.execute("SAVEPOINT s")
                db.execute(*statement())
                db.execute("ROLLBACK TO s")
            db.execute(*statement())
        if dice.random() < 0.05:
            db.execute(dice.choice(DDL).replace("{}", str(dice.randint(1, 3))))
        db.execute("ROLLBACK" if dice.random() < 0.1 else "COMMIT")
    except (sqlite3.OperationalError, sqlite3.IntegrityError):
        if db.in_transaction:
            db.execute("ROLLBACK")
    time.sleep(0.002)
"""


def capture(path: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.sources.litecaptor", str(path), str(log)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)


def stored(log: Path) -> int:
    """How far a log has come that another process writes."""
    try:
        with closing(LogReader.open(log)) as reader:
            return reader.latest_sequence
    except Exception:  # noqa: BLE001 - it is not there yet, whatever that looks like
        return 0


def has(log: Path, changes: int) -> bool:
    return stored(log) >= changes


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_killed_at_any_moment_nothing_is_lost_or_told_twice(
    mode: str, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    path, log = tmp_path / "shop.db", tmp_path / "log"
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute(CREATE)
        connection.execute(FILL)  # so many that a kill may come while they are copied
    install(str(path), ["*"], wal=mode == "WAL")
    writers = [run(path, WORK, str(seed + number)) for number in range(3)]
    captor = capture(path, log)
    try:
        for turn in range(6):
            kill_at = stored(log) + dice.randint(1, 300)
            wait_until(partial(has, log, kill_at), timeout=120, message="it stores more")
            if turn % 2:
                writers[turn % 3].kill()
                writers[turn % 3].communicate()
                writers[turn % 3] = run(path, WORK, str(seed + turn + 10))
            if dice.random() < 0.3:
                for source in psutil.Process(captor.pid).children():
                    source.kill()  # alone: it is started again
                continue
            captor.kill()
            captor.communicate()
            captor = capture(path, log)
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    try:

        def arrived() -> bool:
            with closing(LogReader.open(log)) as reader:
                return caught_up(path, reader.resume(SOURCE))

        wait_until(arrived, timeout=120, message="it has caught up")
    finally:
        captor.communicate(b"", timeout=30)
    with Log.open(log) as read:
        changes = read.read(0, limit=1 << 30)
    compare(path, changes, surprises=True)
    assert len({change.id for change in changes}) == len(changes)
    assert {Op.INSERT, Op.UPDATE, Op.DELETE, Op.READ, Op.SCHEMA} <= {
        change.op for change in changes
    }
