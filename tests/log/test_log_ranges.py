"""Ranges hold everything once and tear no transaction apart, however it was written."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.change.event import Batch
from headrace.change.record import RecordHead
from headrace.log import Log, LogReader, Piece
from headrace.log import ranges as log_ranges
from tests.effort import times
from tests.log.transactions import SOURCE, known_table, piece, stored, transaction

Sizes = list[int]


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ranges, "SMALLEST", 1)


def boundaries(sizes: Sizes) -> list[int]:
    return [sum(sizes[:n]) for n in range(len(sizes) + 1)]


class Query(NamedTuple):
    after: int
    limit: int | None
    parts: int


queries = st.builds(Query, st.integers(0, 120), st.none() | st.integers(1, 40), st.integers(1, 6))


@pytest.mark.usefixtures("small_ranges")
def test_ranges_end_with_transactions_and_hold_no_more_than_asked() -> None:
    # Opening a log is slow, so each is asked many questions.
    @settings(max_examples=times(6, nightly=60))
    @given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.lists(queries, min_size=30))
    def check(sizes: Sizes, asked: list[Query]) -> None:
        with TemporaryDirectory() as folder, Log.open(folder) as log:
            for number, size in enumerate(sizes, 1):
                stored(log, number, size)
            for query in asked:
                check_ranges(log, boundaries(sizes), query)

    check()


def check_ranges(log: Log, ends: list[int], query: Query) -> None:
    after, limit, parts = query
    found = log.ranges(after, limit=limit, parts=parts).ends
    assert len(found) <= parts
    assert sorted(set(found)) == found
    assert set(found) <= {end for end in ends if end > after}
    assert bool(found) == (after < ends[-1])
    if limit is None:
        assert found[-1:] == ([ends[-1]] if after < ends[-1] else [])
    elif found:
        within = [end for end in ends if after < end <= after + limit]
        beyond = [end for end in ends if end > after + limit]
        assert found[-1] == (within or beyond[:1])[-1]


@settings(max_examples=times(6, nightly=60))
@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.data())
def test_ranges_of_a_trimmed_log_begin_with_what_is_left(sizes: Sizes, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, sum(sizes) + 1), "first")
    with TemporaryDirectory() as folder, Log.open(folder) as log:
        for number, size in enumerate(sizes, 1):
            stored(log, number, size)
        log.trim(first)
        found = log.ranges(0, limit=3)
        assert (found.first_sequence, found.latest_sequence) == (first, sum(sizes))
        assert set(found.ends) <= {end for end in boundaries(sizes) if end >= first}
        assert bool(found.ends) == (first <= sum(sizes))


def test_an_end_that_was_asked_for_is_kept_although_a_transaction_goes_on(log: Log) -> None:
    stored(log, 1, 10)
    assert log.ranges(2, upto=7).ends == [7]
    assert log.ranges(2, upto=70).ends == [10]
    assert log.ranges(7, upto=7).ends == []


def test_a_small_batch_is_not_cut(log: Log) -> None:
    for number in range(1, 100):
        stored(log, number)
    assert log.ranges(0, parts=8).ends == [99]


def test_a_transaction_written_in_pieces_is_one(log: Log) -> None:
    stored(log, 1)
    piece(log, 2, 3000)
    piece(log, 2, 3000, start=3001)
    log.append(SOURCE, Batch(transaction(known_table(log), 2, 1, start=6001), b"2"))
    stored(log, 3)
    assert log.ranges(0, limit=1000).ends == [1]
    assert log.ranges(1, limit=1000).ends == [6002]
    assert log.ranges(6002, limit=1000).ends == [6003]


def test_the_end_of_a_large_transaction_is_found_in_a_few_looks(log: Log) -> None:
    stored(log, 1, 50_000)
    stored(log, 2)
    looks: list[int] = []

    class Counting(LogReader):
        def __init__(self) -> None:
            self.__dict__ = log.__dict__

        def place(self, sequence: int) -> RecordHead | None:
            looks.append(sequence)
            return log.place(sequence)

    assert log_ranges.plan(Counting(), 0, limit=100).ends == [50_000]
    assert len(looks) < 50


def test_a_hole_in_the_ordinals_does_not_tear_a_transaction(log: Log) -> None:
    table = known_table(log)
    torn = [*transaction(table, 1, 2), *transaction(table, 1, 2, start=9)]
    log.append(SOURCE, Batch([*torn[:1], *torn[2:]], b"1"))
    assert log.ranges(0, limit=1).ends == [3]


@pytest.fixture
def pieces(tmp_path: Path) -> Iterator[Log]:
    with Log.open(tmp_path / "pieces") as log:
        stored(log, 1, 25)
        yield log


def test_pieces_hold_the_records_one_after_the_other(pieces: Log) -> None:
    first = pieces.piece(0, upto=25, most=10)
    assert first is not None
    assert (first.first, first.count, first.last) == (1, 10, 10)
    stored_bytes = b"".join(record for _, record in pieces.records(0, limit=10))
    assert first.records == stored_bytes
    rest = pieces.piece(20, upto=22, most=10)
    assert rest == Piece(21, 2, b"".join(r for _, r in pieces.records(20, limit=2)))
    assert pieces.piece(25, upto=99) is None


def test_a_piece_says_where_it_begins_when_changes_were_trimmed(pieces: Log) -> None:
    pieces.trim(7)
    found = pieces.piece(0, upto=25)
    assert found is not None
    assert (found.first, found.last) == (7, 25)


def test_a_piece_ends_once_it_is_large(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.log.reader._PIECE_BYTES", 1)
    stored(log, 1, 3)
    found = log.piece(0, upto=3)
    assert found is not None
    assert found.count == 1
