"""The log lets go of the oldest changes when asked, and of none that a consumer still needs."""

from pathlib import Path

import pytest

from headrace.change.event import Batch
from headrace.errors import LogError
from headrace.log import Log
from tests.log.transactions import SOURCE, ids, known_table, piece, sequences, stored, transaction


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
