"""What was acknowledged survives: a kill, a full disk, a failed write."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.change.event import Batch
from headrace.errors import LogFailed
from headrace.log import Log
from tests.log.transactions import SOURCE, ids, known_table, piece, sequences, stored, transaction

WRITE_UNTIL_KILLED = """
import sys
from headrace.change.event import Batch
from headrace.log import Log
from tests.log.transactions import SOURCE, known_table, transaction

log = Log.open(sys.argv[1])
table = known_table(log)
number = int(log.resume(SOURCE) or 0)
while True:
    number += 1
    if number % 5 == 0:
        log.append(SOURCE, Batch(transaction(table, number, 50), None))
        rest = transaction(table, number, 50, start=51)
    else:
        rest = transaction(table, number, number % 4)
    log.append(SOURCE, Batch(rest, b"%d" % number))
    print(number, flush=True)
"""

LEAVE_A_PIECE = """
import os, signal, sys
from headrace.log import Log
from tests.log.transactions import piece, stored

log = Log.open(sys.argv[1])
stored(log, 1, 3)
piece(log, 2, 5000)
piece(log, 2, 5000, start=5001)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_transaction_cut_short_by_a_kill_is_gone_after_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVE_A_PIECE, tmp_path], check=False)
    with Log.open(tmp_path) as log:
        assert (log.latest_sequence, log.resume(SOURCE)) == (3, b"1")
        size = sum(len(record) for _, record in log.records(0, limit=100))
        assert log.stats().total_bytes == size
        assert stored(log, 3, 2) == 5
        assert ids(log.read(3)) == [("3", 1), ("3", 2)]


@pytest.mark.requirement("S0-34", "S1-50", "S4-22")
def test_after_a_kill_the_log_has_all_that_was_acknowledged_and_resumes_exactly_there(
    tmp_path: Path,
) -> None:
    for acknowledgements in (3, 19, 60):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITE_UNTIL_KILLED, tmp_path], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(acknowledgements)][-1]
        writer.kill()
        writer.wait()
        writer.stdout.close()
        with Log.open(tmp_path) as log:
            resume = int(log.resume(SOURCE) or 0)
            assert resume >= acknowledged
            assert ids(log.read(0, limit=100_000)) == [
                (str(number), ordinal)
                for number in range(1, resume + 1)
                for ordinal in range(1, (100 if number % 5 == 0 else number % 4) + 1)
            ]
            assert sequences(log) == list(range(1, log.latest_sequence + 1))


FILL_THE_DISK = """
import resource, signal, sys
from headrace.errors import LogFailed
from headrace.change.event import Batch
from headrace.log import Log
from tests.changes import make_table
from tests.log.transactions import SOURCE, known_table, transaction

log = Log.open(sys.argv[1])
table = known_table(log)
# Writing beyond the limit gives an error instead of a signal.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))

def fails(action):
    try:
        action()
    except LogFailed:
        return True
    return False

number = 0
while True:
    number += 1
    batch = Batch(transaction(table, number, 200), b"%d" % number)
    if fails(lambda: log.append(SOURCE, batch)):
        break
    print(number, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert fails(lambda: log.append(SOURCE, batch)), "the log took a change after a failed write"
assert fails(lambda: log.append("other", batch)), "the log took another source's change"
assert fails(lambda: log.move_cursor("reader", 1)), "the log took a cursor"
assert fails(lambda: log.drop_cursor("reader")), "the log dropped a cursor"
assert fails(lambda: log.trim(2)), "the log trimmed"
assert fails(lambda: log.register(make_table("new"))), "the log took a table"
log.abandon(SOURCE)
"""


@pytest.mark.requirement("S0-34", "S1-50")
def test_a_full_disk_stops_the_log_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, tmp_path], capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    acknowledged = [int(line) for line in done.stdout.split()]
    assert acknowledged == list(range(1, len(acknowledged) + 1)) != []
    with Log.open(tmp_path) as log:
        assert log.resume(SOURCE) == b"%d" % acknowledged[-1]
        assert ids(log.read(0, limit=100_000)) == [
            (str(number), ordinal) for number in acknowledged for ordinal in range(1, 201)
        ]
        after = acknowledged[-1] + 1
        assert stored(log, after) == 200 * len(acknowledged) + 1


def test_a_failed_write_frees_the_sources_that_wait_for_their_turn(log: Log) -> None:
    piece(log, 1, 1, source="failing")
    failures: list[Exception] = []

    def append() -> None:
        try:
            log.append("waiting", Batch(transaction(known_table(log), 2), b"2"))
        except LogFailed as error:
            failures.append(error)

    waiting = threading.Thread(target=append, daemon=True)
    waiting.start()
    with pytest.raises(LogFailed):
        log.append("failing", Batch([], 1))  # type: ignore[arg-type]  # RocksDB refuses it
    waiting.join(120)
    assert not waiting.is_alive()
    assert len(failures) == 1
