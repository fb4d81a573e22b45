"""The log keeps every change, in order, through crashes; one process writes it."""

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rocksdict import AccessType, Options, Rdict

from headrace.change.event import Batch, BeforeKind, Change, Op, Transaction
from headrace.change.record import Records, encode
from headrace.errors import ConfigError, LogError, LogInUse
from headrace.log import Log, LogReader, keys
from headrace.sources.postgres.position import PostgresPosition
from tests.changes import make_table
from tests.log.transactions import SOURCE, ids, known_table, piece, sequences, stored, transaction

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
    quick.join(120)
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
        writer.join(120)
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


def test_changes_that_cannot_be_encoded_are_the_error_of_their_source_alone(log: Log) -> None:
    [good] = transaction(known_table(log), 1)
    odd = msgspec.structs.replace(good, position=object())
    with pytest.raises(TypeError):
        log.append("odd", Batch((odd,), b"resume"))
    unknown = encode([good])[0].replace(b"\xa8postgres", b"\xa6nobody")
    with pytest.raises(ConfigError, match="no connector called 'nobody'"):
        log.append("odd", Batch(Records([unknown], {}), b"resume"))
    assert log.append(SOURCE, Batch((good,), b"1")) == 1


def test_the_resume_of_each_source_is_its_own(log: Log) -> None:
    assert log.resume("a") is None
    stored(log, 1, source="a")
    stored(log, 2, source="b")
    log.append("a", Batch([], b"3"))
    assert (log.resume("a"), log.resume("b")) == (b"3", b"2")
    assert log.latest_sequence == 2


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
    with pytest.raises(LogError, match="is damaged") as caught:
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


def test_api_keys_survive_and_other_processes_see_them(tmp_path: Path) -> None:
    made = keys.make(keys.KeyRequest(name="billing", tenant="t1", seconds=60), now=1)
    with Log.open(tmp_path / "log") as log:
        log.put_key(made.key)
        revoked = msgspec.structs.replace(made.key, revoked_at=2)
        log.put_key(revoked)
    with Log.open(tmp_path / "log") as log, LogReader.open(tmp_path / "log") as reader:
        assert log.keys() == reader.keys() == [revoked]
