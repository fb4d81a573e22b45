"""The log keeps every change, in order, through crashes; one process writes it."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocksdict import AccessType, Options, Rdict

from headrace.errors import LogError, LogFailed, LogInUse
from headrace.event import Batch, BeforeKind, Change, Op, PostgresPosition, Transaction
from headrace.log import Log
from tests.changes import make_table
from tests.log.transactions import SOURCE, ids, known_table, piece, stored, transaction


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log.open(tmp_path / "log") as log:
        yield log


def sequences(log: Log) -> list[int]:
    return [change.sequence for change in log.read(0, limit=100_000)]


# --- sequences -----------------------------------------------------------------------------------


@pytest.mark.requirement("S4-02", "S1-48")
def test_sequences_start_at_one_and_have_no_gaps(log: Log) -> None:
    assert log.latest_sequence == 0
    assert [stored(log, 1, 3), stored(log, 2, 1), stored(log, 3, 2)] == [3, 4, 6]
    assert sequences(log) == [1, 2, 3, 4, 5, 6]
    assert ids(log.read(0)) == [("1", 1), ("1", 2), ("1", 3), ("2", 1), ("3", 1), ("3", 2)]


@pytest.mark.requirement("S4-02", "S4-22")
def test_sequences_go_on_after_a_restart(tmp_path: Path) -> None:
    for number in range(1, 4):
        with Log.open(tmp_path) as log:
            stored(log, number, 2)
    with Log.open(tmp_path) as log:
        assert log.latest_sequence == 6
        assert sequences(log) == [1, 2, 3, 4, 5, 6]


@pytest.mark.requirement("S4-14")
def test_trimming_never_gives_a_sequence_again(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        stored(log, 1, 5)
        log.trim(6)
        assert (log.latest_sequence, log.stats().latest_sequence) == (5, 5)
        assert (log.stats().count, log.first_sequence) == (0, 6)
    with Log.open(tmp_path) as log:
        assert log.latest_sequence == 5
        assert stored(log, 2) == 6
        assert sequences(log) == [6]


@pytest.mark.requirement("S4-01", "S4-22")
def test_plain_rocksdb_finds_changes_and_counter_under_their_documented_keys(
    tmp_path: Path,
) -> None:
    with Log.open(tmp_path) as log:
        stored(log, 1, 3)
    raw = Options(raw_mode=True)
    db = Rdict(str(tmp_path), raw, {"state": raw}, AccessType.read_only())
    assert list(db.keys()) == [b"changefeed:%020d" % sequence for sequence in (1, 2, 3)]
    assert db.get_column_family("state")[b"changefeed_sequence"] == b"3"
    db.close()


# --- what is read --------------------------------------------------------------------------------

IMAGES = st.none() | st.dictionaries(st.text(), st.text() | st.none()).map(msgspec.json.encode)
NAMES = st.lists(st.text(), max_size=3).map(tuple)
NUMBERS = st.integers(0, 2**63 - 1)


CHANGES = st.builds(
    Change,
    op=st.sampled_from(Op),
    table=st.just(make_table()),
    key=IMAGES,
    before=IMAGES,
    before_kind=st.sampled_from(BeforeKind),
    after=IMAGES,
    changed=st.none() | NAMES,
    unchanged=NAMES,
    transaction=st.builds(Transaction, st.text(), NUMBERS, NUMBERS, IMAGES),
    ordinal=NUMBERS,
    position=st.builds(PostgresPosition, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    last=st.booleans(),
)


@given(change=CHANGES)
def test_a_change_is_read_as_it_was_appended(
    tmp_path_factory: pytest.TempPathFactory, change: Change
) -> None:
    log = _shared_log(tmp_path_factory)
    change = msgspec.structs.replace(change, table=known_table(log))
    sequence = log.append(SOURCE, Batch([change], b""))
    assert log.read(sequence - 1) == [msgspec.structs.replace(change, sequence=sequence)]


_opened: list[Log] = []


def _shared_log(factory: pytest.TempPathFactory) -> Log:
    """One log for all examples: opening one takes far longer than the example."""
    if not _opened:
        _opened.append(Log.open(factory.mktemp("shared")))
    return _opened[0]


def test_reading_is_exclusive_below_and_inclusive_above(log: Log) -> None:
    stored(log, 1, 10)

    def read(after: int, limit: int = 100, upto: int | None = None) -> list[int]:
        return [change.sequence for change in log.read(after, limit=limit, upto=upto)]

    assert read(7) == [8, 9, 10]
    assert read(0, limit=3) == [1, 2, 3]
    assert read(3, upto=5) == [4, 5]
    assert read(3, limit=1, upto=5) == [4]
    assert read(10) == read(99) == read(5, upto=5) == read(0, limit=0) == []


def test_a_read_before_the_oldest_change_begins_with_the_oldest(log: Log) -> None:
    stored(log, 1, 10)
    log.trim(6)
    assert sequences(log) == [6, 7, 8, 9, 10]
    assert [change.sequence for change in log.read(2, limit=2)] == [6, 7]


def test_a_change_keeps_the_columns_it_was_captured_with(log: Log) -> None:
    narrow = log.register(make_table())
    wide = log.register(make_table(key=("id", "tenant")))
    for number, table in enumerate((narrow, wide), 1):
        log.append(SOURCE, Batch(transaction(table, number), b""))
    assert [change.table for change in log.read(0)] == [narrow, wide]


def test_a_tables_version_changes_with_its_columns_and_only_then(log: Log) -> None:
    narrow, wide = make_table(), make_table(key=("id", "tenant"))
    assert [log.register(table).version for table in (narrow, narrow, wide, wide)] == [1, 1, 2, 2]
    assert log.register(make_table("orders")).version == 3
    assert log.register(wide).version == 2
    # Back to the columns of before is a change as well: versions follow the table's history.
    assert log.register(narrow).version == 4
    assert [table.version for table in log.tables()] == [1, 2, 3, 4]


def test_versions_of_tables_survive_a_restart(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        known = log.register(make_table())
    with Log.open(tmp_path) as log:
        assert log.register(make_table()) == known == log.table(known.version)


def test_an_unknown_version_of_a_table_is_an_error(log: Log) -> None:
    with pytest.raises(LogError, match="version 7"):
        log.table(7)


# --- transactions --------------------------------------------------------------------------------


@pytest.mark.requirement("S1-50")
def test_a_transaction_in_pieces_is_seen_only_when_it_is_complete(log: Log) -> None:
    stored(log, 1)
    piece(log, 2, 3)
    piece(log, 2, 3, start=4)
    assert (log.latest_sequence, sequences(log), log.resume(SOURCE)) == (1, [1], b"1")
    assert log.stats().count == 1
    end = transaction(known_table(log), 2, 1, start=7)
    assert log.append(SOURCE, Batch(end, b"2")) == 8
    assert ids(log.read(1)) == [("2", ordinal) for ordinal in range(1, 8)]
    assert log.resume(SOURCE) == b"2"


def test_a_transaction_may_end_with_no_change_of_its_last_piece(log: Log) -> None:
    piece(log, 1, 2)
    assert log.append(SOURCE, Batch([], b"1")) == 2
    assert ids(log.read(0)) == [("1", 1), ("1", 2)]


def test_an_abandoned_transaction_leaves_nothing(log: Log) -> None:
    stored(log, 1)
    before = log.stats()
    piece(log, 2, 3)
    log.abandon(SOURCE)
    assert (log.stats(), sequences(log)) == (before, [1])
    stored(log, 3, 2)
    assert ids(log.read(0)) == [("1", 1), ("3", 1), ("3", 2)]
    assert log.stats().total_bytes == sum(len(record) for _, record in log.records(0, limit=10))


def test_abandoning_without_an_open_transaction_changes_nothing(log: Log) -> None:
    stored(log, 1)
    piece(log, 2, 1, source="other")
    log.abandon(SOURCE)
    log.append("other", Batch([], b"2"))
    assert ids(log.read(0)) == [("1", 1), ("2", 1)]


def test_a_source_waits_while_another_has_an_open_transaction(log: Log) -> None:
    piece(log, 1, 2, source="slow")
    table = known_table(log)
    quick = threading.Thread(
        target=log.append, args=("quick", Batch(transaction(table, 2, 2), b"2"))
    )
    quick.start()
    piece(log, 1, 2, source="slow", start=3)
    assert quick.is_alive()
    log.append("slow", Batch(transaction(table, 1, 1, start=5), b"1"))
    quick.join(10)
    assert ids(log.read(0)) == [("1", n) for n in range(1, 6)] + [("2", 1), ("2", 2)]


def test_many_sources_append_at_once_and_no_transaction_is_torn(log: Log) -> None:
    table = known_table(log)

    def write(source: str, first: int) -> None:
        for number in range(first, first + 40):
            if number % 3 == 0:
                log.append(source, Batch(transaction(table, number, 4), None))
                if number % 2:
                    log.abandon(source)
                    continue
                end = transaction(table, number, 2, start=5)
                log.append(source, Batch(end, b"%d" % number))
            else:
                log.append(source, Batch(transaction(table, number, 3), b"%d" % number))

    writers = [threading.Thread(target=write, args=(f"s{n}", n * 100)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    found = log.read(0, limit=10_000)
    expected = {
        number: 6 if number % 3 == 0 else 3
        for first in (0, 100, 200, 300)
        for number in range(first, first + 40)
        if not (number % 3 == 0 and number % 2)
    }
    runs = [int(change.transaction.id) for change in found if change.ordinal == 1]
    assert ids(found) == [(str(n), at) for n in runs for at in range(1, expected[n] + 1)]
    assert sorted(runs) == sorted(expected)
    assert [change.sequence for change in found] == list(range(1, len(found) + 1))


def test_the_resume_of_each_source_is_its_own(log: Log) -> None:
    assert log.resume("a") is None
    stored(log, 1, source="a")
    stored(log, 2, source="b")
    log.append("a", Batch([], b"3"))
    assert (log.resume("a"), log.resume("b")) == (b"3", b"2")
    assert log.latest_sequence == 2


# --- crashes -------------------------------------------------------------------------------------

WRITE_UNTIL_KILLED = """
import sys
from headrace.event import Batch
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
from headrace.event import Batch
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
        log.append("failing", Batch([None], b"1"))  # type: ignore[list-item]
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(failures) == 1


# --- who may open it -----------------------------------------------------------------------------


def test_a_second_writer_is_told_that_the_log_is_in_use(log: Log) -> None:
    with pytest.raises(LogInUse, match="another process"):
        Log.open(log.path)


def test_a_second_writing_process_is_told_that_the_log_is_in_use(log: Log) -> None:
    script = "import sys; from headrace.log import Log; Log.open(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, log.path], capture_output=True, check=False, text=True
    )
    assert "headrace.errors.LogInUse" in done.stderr


def test_a_closed_log_may_be_opened_again(tmp_path: Path) -> None:
    Log.open(tmp_path).close()
    Log.open(tmp_path).close()


def test_a_folder_that_cannot_hold_a_log_is_an_error_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "clock"
    folder.mkdir()
    (folder / "CURRENT").write_text("nonsense")
    with pytest.raises(LogError, match="cannot be opened") as caught:
        Log.open(folder)
    assert not isinstance(caught.value, LogInUse)


def test_a_log_of_another_layout_is_refused_with_both_versions(tmp_path: Path) -> None:
    Log.open(tmp_path).close()
    raw = Options(raw_mode=True)
    db = Rdict(str(tmp_path), raw, {"state": raw})
    db.get_column_family("state")[b"layout"] = b"99"
    db.close()
    with pytest.raises(LogError, match=r"layout 99.*layout 1"):
        Log.open(tmp_path)


def test_every_log_has_an_epoch_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    with Log.open(tmp_path / "one") as one, Log.open(tmp_path / "two") as two:
        epoch = one.epoch
        assert epoch != two.epoch
        assert epoch
    with Log.open(tmp_path / "one") as again:
        assert again.epoch == epoch


# --- cursors and retention -----------------------------------------------------------------------


def test_trimming_removes_what_is_strictly_below(log: Log) -> None:
    stored(log, 1, 10)
    done = log.trim(4)
    assert (done.removed, done.first_sequence, done.held_by) == (3, 4, None)
    assert sequences(log) == [4, 5, 6, 7, 8, 9, 10]
    assert log.trim(4).removed == log.trim(0).removed == 0


def test_trimming_beyond_the_end_removes_everything_and_no_more(log: Log) -> None:
    stored(log, 1, 3)
    done = log.trim(2**64 - 1)
    assert (done.removed, done.first_sequence) == (3, 4)
    assert stored(log, 2) == 4
    assert sequences(log) == [4]


@pytest.mark.requirement("S4-20")
def test_trimming_stops_at_the_slowest_cursor_and_says_so(log: Log) -> None:
    stored(log, 1, 10)
    log.move_cursor("fast", 8)
    log.move_cursor("slow", 3)
    done = log.trim(9)
    assert (done.removed, done.first_sequence, done.held_by) == (3, 4, "slow")
    assert log.trim(9).held_by == "slow"
    log.drop_cursor("slow")
    assert log.trim(8).held_by is None
    assert log.first_sequence == 8


def test_trimming_by_force_passes_every_cursor(log: Log) -> None:
    stored(log, 1, 10)
    log.move_cursor("slow", 3)
    done = log.trim(9, force=True)
    assert (done.removed, done.first_sequence, done.held_by) == (8, 9, None)


def test_trimming_leaves_an_open_transaction_alone(log: Log) -> None:
    stored(log, 1, 2)
    piece(log, 2, 3)
    assert log.trim(100).first_sequence == 3
    assert log.append(SOURCE, Batch([], b"2")) == 5
    assert ids(log.read(0)) == [("2", 1), ("2", 2), ("2", 3)]


@pytest.mark.parametrize("steps", [(2, 3), (1500,), (900, 1024, 1025, 2600), (5000,)])
def test_count_and_bytes_are_exact_after_trimming(tmp_path: Path, steps: tuple[int, ...]) -> None:
    with Log.open(tmp_path) as log:
        for number in range(1, 41):
            stored(log, number, 70 + number)
        for step in steps:
            log.trim(step)
            _assert_stats_exact(log)
        stored(log, 99, 7)
        _assert_stats_exact(log)
    with Log.open(tmp_path) as log:
        _assert_stats_exact(log)


def _assert_stats_exact(log: Log) -> None:
    sizes = [len(record) for _, record in log.records(0, limit=1_000_000)]
    stats = log.stats()
    assert (stats.count, stats.total_bytes) == (len(sizes), sum(sizes))
    assert stats.first_sequence == stats.latest_sequence - len(sizes) + 1


def test_everything_below_a_moments_sequence_is_older_than_the_moment(log: Log) -> None:
    table = known_table(log)
    minute = 60_000_000
    for number in range(1, 21):
        changes = transaction(table, number, 300, captured_at=number * minute)
        log.append(SOURCE, Batch(changes, b""))
    for moment in (0, minute, 5 * minute, 5 * minute + 1, 20 * minute, 99 * minute):
        before = log.before_time(moment)
        assert all(c.transaction.captured_at < moment for c in log.read(0, upto=before - 1))
    # Retention works to the minute or to the thousand changes, whichever is finer.
    assert log.before_time(10 * minute) == 9 * 300 + 1
    assert log.before_time(99 * minute) == 20 * 300 + 1


def test_what_remains_beyond_a_size_is_at_most_that_size(log: Log) -> None:
    for number in range(1, 31):
        stored(log, number, 200)
    total = log.stats().total_bytes
    for wanted in (0, 1000, total // 2, total - 1, total, total + 1):
        before = log.beyond_size(wanted)
        rest = sum(len(record) for _, record in log.records(before - 1, limit=1_000_000))
        assert rest <= wanted
    assert log.beyond_size(total) == 1
    # Not more than is needed, to about a thousand changes.
    assert log.beyond_size(total // 2) < 3000 + 1300


def test_a_cursor_is_remembered(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        stored(log, 1, 5)
        assert log.cursor("reader") is None
        log.move_cursor("reader", 2)
        log.move_cursor("reader", 4)
    with Log.open(tmp_path) as log:
        cursor = log.cursor("reader")
        assert cursor is not None
        assert (cursor.name, cursor.sequence) == ("reader", 4)
        assert [found.name for found in log.cursors()] == ["reader"]
        log.drop_cursor("reader")
        assert log.cursors() == []


@pytest.mark.parametrize("sequence", [-1, 6])
def test_a_cursor_cannot_stand_where_no_change_is(log: Log, sequence: int) -> None:
    stored(log, 1, 5)
    with pytest.raises(LogError, match=rf"'reader': sequence {sequence} is not in 0\.\.5"):
        log.move_cursor("reader", sequence)


# --- news ----------------------------------------------------------------------------------------


def test_listeners_hear_of_each_commit_when_it_can_be_read(log: Log) -> None:
    heard: list[int] = []
    log.listen(lambda: heard.append(log.latest_sequence))
    stored(log, 1, 2)
    piece(log, 2, 3)
    assert heard == [2]
    log.append(SOURCE, Batch([], b"2"))
    assert heard == [2, 5]


def test_waiting_ends_with_the_next_change_or_when_the_time_is_over(log: Log) -> None:
    assert not log.wait(0, timeout=0.01)
    writer = threading.Timer(0.05, stored, (log, 1))
    writer.start()
    assert log.wait(0, timeout=10)
    assert log.latest_sequence == 1
    writer.join()
    assert log.wait(0, timeout=0)
    assert not log.wait(1, timeout=0.01)
