"""A source in a process of its own behaves as if it were here."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.capture import Capture
from headrace.change.event import Op
from headrace.errors import PositionLost
from headrace.log import Log
from headrace.observe.lines import parts_of
from headrace.secret import Secret
from headrace.sources import Phase, Register
from headrace.sources.postgres import Postgres
from headrace.sources.postgres.stream import PostgresStream
from headrace.sources.worker import Apart
from headrace.testing import PostgresDatabase, wait_until


@pytest.fixture
def shop(pg: PostgresDatabase) -> PostgresDatabase:
    """A database with one table of 100 rows."""
    pg.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    pg.execute("INSERT INTO orders SELECT g, 'note ' || g FROM generate_series(1, 100) g")
    return pg


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """An empty log."""
    with Log.open(tmp_path / "log") as opened:
        yield opened


def source_of(database: PostgresDatabase) -> Postgres:
    return Postgres(name="shop", url=Secret(database.url), slot=f"apart_{database.name}")


@pytest.fixture
def capture(shop: PostgresDatabase, log: Log) -> Iterator[Capture]:
    """The database captured from another process, already streaming."""
    running = Capture(Apart(source_of(shop)), log)
    running.start()
    wait_until(lambda: running.status().phase is Phase.STREAMING, message="streaming")
    yield running
    running.stop()


def children() -> list[int]:
    """The processes that capture for this one."""
    listed = subprocess.run(
        ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "pid=,args="],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return [
        int(line.split()[0]) for line in listed.splitlines() if "headrace.sources.worker" in line
    ]


def keys(log: Log, *ops: Op) -> list[bytes | None]:
    return [change.key for change in log.read(0, limit=10_000) if change.op in ops]


def test_rows_that_were_there_and_changes_arrive_as_from_this_process(
    shop: PostgresDatabase, log: Log, capture: Capture
) -> None:
    shop.execute("UPDATE orders SET note = 'new' WHERE id = 7")
    wait_until(lambda: keys(log, Op.UPDATE) == [b'{"id":7}'], message="the update is in the log")
    assert len(keys(log, Op.READ)) == 100
    update = log.read(log.latest_sequence - 1)[0]
    assert update.after == b'{"id":7,"note":"new"}'
    assert update.table.name == "orders"
    assert update.last


def test_the_database_may_forget_what_the_log_has(
    shop: PostgresDatabase, log: Log, capture: Capture
) -> None:
    confirmed = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s"
    slot = f"apart_{shop.name}"
    before = shop.execute(confirmed, (slot,))
    shop.execute("DELETE FROM orders WHERE id = 1")
    wait_until(lambda: shop.execute(confirmed, (slot,)) != before, message="the slot has moved")
    assert keys(log, Op.DELETE) == [b'{"id":1}']


def test_a_killed_process_is_replaced_and_nothing_is_lost_or_repeated(
    shop: PostgresDatabase, log: Log, capture: Capture
) -> None:
    for first in range(200, 240, 10):
        for key in range(first, first + 10):
            shop.execute("INSERT INTO orders VALUES (%s, 'x')", (key,))
        for child in children():
            os.kill(child, signal.SIGKILL)
    wait_until(lambda: b'{"id":239}' in keys(log, Op.INSERT), timeout=120, message="caught up")
    assert keys(log, Op.INSERT) == [b'{"id":%d}' % key for key in range(200, 240)]


def test_what_halts_it_is_told_with_its_hint(
    shop: PostgresDatabase, log: Log, capture: Capture
) -> None:
    capture.stop()
    shop.execute("SELECT pg_drop_replication_slot(%s)", (f"apart_{shop.name}",))
    stream = Apart(source_of(shop)).open(log.resume("shop"), log.register)
    with pytest.raises(PositionLost, match="does not exist") as caught:
        next(iter(stream))
    assert "headrace snapshot" in caught.value.hint


def test_stopping_ends_the_process(capture: Capture) -> None:
    assert len(children()) == 1
    capture.stop()
    assert children() == []


def test_no_secret_is_in_its_arguments(capture: Capture) -> None:
    (child,) = children()
    arguments = Path(f"/proc/{child}/cmdline").read_bytes()
    assert b"postgresql" not in arguments


CRASHING = """
import os, sys
from headrace.sources.worker import Apart
from headrace.log import Log
from headrace.secret import Secret
from headrace.sources.postgres import Postgres

log = Log.open(sys.argv[1])
source = Postgres(name="shop", url=Secret(sys.argv[2]), slot=sys.argv[3])
stream = Apart(source).open(None, log.register)
next(iter(stream))
print(stream._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_it_ends_when_the_process_it_captures_for_is_killed(
    shop: PostgresDatabase, tmp_path: Path
) -> None:
    slot = f"apart_{shop.name}"
    killed = subprocess.run(
        [sys.executable, "-c", CRASHING, str(tmp_path / "crashed"), shop.url, slot],
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    orphan = Path(f"/proc/{int(killed.stdout)}")
    wait_until(lambda: not orphan.exists(), message="the capturing process has ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Talkative(Postgres):
    """A source that logs something when it is opened."""

    def open(self, resume: bytes | None, register: Register) -> PostgresStream:
        logging.getLogger("headrace.sources.test").warning("odd server error=%s", "a = b")
        return Postgres.open(self, resume, register)


def test_what_it_logs_is_logged_here_with_its_fields(
    shop: PostgresDatabase,
    log: Log,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # where this class is
    source = Talkative(name="shop", url=Secret(shop.url), slot=f"apart_{shop.name}")
    capture = Capture(Apart(source), log)
    capture.start()
    try:
        wait_until(lambda: "odd server" in caplog.text, message="the warning is here")
    finally:
        capture.stop()
    [record] = [each for each in caplog.records if each.name == "headrace.sources.test"]
    assert record.levelno == logging.WARNING
    assert parts_of(record) == ("odd server", {"source": "shop", "error": "a = b"})
