"""A log with blocks of rows reads as one in which every change has a value of its own."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.change.block import BlockRows, RowBlock
from headrace.change.event import Batch
from headrace.errors import LogDamaged
from headrace.log import Log, LogReader, LogRetention, Piece, RetentionSettings, backup
from headrace.log import _layout as layout
from tests.effort import times
from tests.log.blocks import as_block, rows, stored_block
from tests.log.transactions import SOURCE, ids, known_table, stored, transaction

pytestmark = pytest.mark.requirement("C-28")

# Transactions and blocks by turns; 1,035 changes.
SIZES = [("transaction", 3), ("block", 10), ("block", 1), ("transaction", 2), ("block", 1015),
         ("block", 3), ("transaction", 1)]  # fmt: skip
LAST = 1035


def fill(log: Log, *, blocks: bool) -> None:
    for number, (kind, size) in enumerate(SIZES, 1):
        table = known_table(log)
        if kind == "transaction":
            changes = transaction(table, number, size)
        else:
            changes = rows(table, number, size)
        packed = as_block(changes, table, number) if blocks and kind == "block" else changes
        log.append(SOURCE, Batch(packed, b"%d" % number))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Log]:
    """The log as it would be without blocks; nobody changes it."""
    with Log.open(tmp_path_factory.mktemp("plain")) as log:
        fill(log, blocks=False)
        yield log


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Log]:
    """The same log with blocks; nobody changes it."""
    with Log.open(tmp_path_factory.mktemp("kept")) as log:
        fill(log, blocks=True)
        yield log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log.open(tmp_path / "log") as log:
        fill(log, blocks=True)
        yield log


def everything(log: LogReader) -> list[tuple[int, bytes]]:
    return list(log.records(0, limit=1 << 30))


@pytest.mark.requirement("S4-22")
def test_a_block_lies_under_its_first_sequence(log: Log) -> None:
    firsts = (1, 2, 3, 4, 14, 15, 16, 17, 1032, 1035)
    assert list(log._db.keys()) == [b"changefeed:%020d" % sequence for sequence in firsts]


@settings(max_examples=times(60, nightly=600), deadline=None)
@given(st.integers(0, LAST + 2), st.integers(0, 30) | st.integers(0, LAST), st.data())
def test_every_page_is_the_same(
    plain: Log, kept: Log, after: int, limit: int, data: st.DataObject
) -> None:
    upto = data.draw(st.none() | st.integers(0, LAST + 2))
    pages = [list(each.records(after, limit=limit, upto=upto)) for each in (plain, kept)]
    assert pages[0] == pages[1]
    assert plain.read(after, limit=limit, upto=upto) == kept.read(after, limit=limit, upto=upto)
    end = LAST if upto is None else upto
    assert plain.piece(after, upto=end, most=limit) == kept.piece(after, upto=end, most=limit)
    assert plain.place(after) == kept.place(after)
    found = kept.ranges(after, limit=limit or None, parts=3)
    assert found == msgspec.structs.replace(
        plain.ranges(after, limit=limit or None, parts=3), epoch=kept.epoch, lineage=kept.lineage
    )


def test_what_is_stored_together_is_given_together(plain: Log, kept: Log) -> None:
    after, records = 0, []
    kinds = []
    while part := kept.stored(after, upto=LAST):
        kinds.append((type(part), part.first, part.count))
        single = part.records() if isinstance(part, BlockRows) else [part.records]
        records.append(b"".join(single))
        after = part.last
    assert kinds == [
        (Piece, 1, 3),
        (BlockRows, 4, 10),
        (BlockRows, 14, 1),
        (Piece, 15, 2),
        (BlockRows, 17, 1015),
        (BlockRows, 1032, 3),
        (Piece, 1035, 1),
    ]
    assert b"".join(records) == b"".join(record for _, record in everything(plain))
    inside = kept.stored(5, upto=8)
    assert isinstance(inside, BlockRows)
    assert (inside.first, inside.count, inside.last) == (6, 3, 8)
    assert inside.records() == [record for _, record in plain.records(5, limit=3)]


def test_counts_are_of_changes(plain: Log, kept: Log) -> None:
    assert kept.appended.changes == plain.appended.changes
    first = plain.stats()
    assert kept.stats() == msgspec.structs.replace(first, total_bytes=kept.stats().total_bytes)
    assert kept.stats().total_bytes < first.total_bytes


def test_a_block_is_expanded_once_for_all_its_pages(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    create = RowBlock.__init__

    def counted(self: RowBlock, value: bytes) -> None:
        parsed.append(len(value))
        create(self, value)

    monkeypatch.setattr(RowBlock, "__init__", counted)
    for after in range(16, 1016, 100):
        log.read(after, limit=100)
    assert len(parsed) == 1


def test_a_piece_makes_no_more_records_than_it_takes(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.reader._PIECE_BYTES", 10_000)
    made: list[int] = []
    records = RowBlock.records

    def counted(self: RowBlock, begin: int, end: int) -> list[bytes]:
        made.append(end - begin)
        return records(self, begin, end)

    monkeypatch.setattr(RowBlock, "records", counted)
    after, pieces = 16, 0
    while after < 1031 and (piece := log.piece(after, upto=1031)):
        after, pieces = piece.last, pieces + 1
    assert pieces >= 10
    assert sum(made) < 2 * 1015


# --- trimming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [*range(1, 20), 500, 1031, 1032, 1033, 1034, 1035, 1036])
def test_a_trim_hides_the_rows_before_it(plain: Log, log: Log, before: int) -> None:
    assert log.trim(before).removed == before - 1
    left = [each for each in everything(plain) if each[0] >= before]
    assert everything(log) == left
    assert (log.first_sequence, log.stats().count) == (before, len(left))
    assert [log.place(sequence) is None for sequence in range(before)] == [True] * before
    with LogReader.open(log.path) as reader:
        assert everything(reader) == left
        hidden = reader.stored(0, upto=LAST)
        assert (hidden.first if hidden else LAST + 1) == before


def test_a_block_takes_its_room_until_its_last_row_is_trimmed(log: Log) -> None:
    log.trim(4)
    whole = log.stats().total_bytes
    for before in (5, 9, 13):
        log.trim(before)
        assert log.stats().total_bytes == whole
    log.trim(14)
    assert log.stats().total_bytes < whole
    log.trim(LAST + 1)
    assert log.stats().total_bytes == 0
    assert list(log._db.keys()) == []


def test_a_trim_while_a_block_is_read_hides_nothing_of_it(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = Log._runs

    def trimmed_meanwhile(self: Log, start: int, end: int) -> Iterator[Any]:
        for each in find(self, start, end):
            monkeypatch.undo()
            log.trim(20, force=True)
            yield each

    monkeypatch.setattr(Log, "_runs", trimmed_meanwhile)
    found = log.stored(5, upto=LAST)
    assert found
    assert (found.first, found.last) == (6, 13)


def test_a_cursor_in_a_block_keeps_the_rest_of_it(log: Log) -> None:
    log.move_cursor("reader", 7)
    assert log.trim(LAST).held_by == "reader"
    assert log.first_sequence == 8
    assert [change.sequence for change in log.read(7, limit=3)] == [8, 9, 10]


def test_retention_by_size_and_age_knows_blocks(tmp_path: Path) -> None:
    now = time.time_ns() // 1000
    day = 86_400_000_000
    with Log.open(tmp_path) as log:
        stored_block(log, 1, 2000, captured_at=now - 3 * day)
        stored_block(log, 2, 2000, captured_at=now)
        size = log.stats().total_bytes
        LogRetention(log, RetentionSettings(days=1)).apply()
        assert log.first_sequence == 2001
        stored_block(log, 3, 2000, captured_at=now)
        LogRetention(log, RetentionSettings(size=size // 2 + 100)).apply()
        assert log.first_sequence == 4001
        stopping = threading.Event()
        retention = LogRetention(log, RetentionSettings())
        retention._reclaimed = 0
        retention._reclaim(stopping)
        assert [change.sequence for change in log.read(0, limit=1)] == [4001]


# --- crashes and other processes -----------------------------------------------------------------


def test_a_block_that_was_not_committed_is_gone(tmp_path: Path, plain: Log) -> None:
    with Log.open(tmp_path) as log:
        table = known_table(log)
        stored(log, 1, 3)
        changes = rows(table, 2, 10)
        log.append(SOURCE, Batch(as_block(changes, table, 2), None))
        log.trim(4)  # which looks at what follows
        log.abandon(SOURCE)
        stored_block(log, 3, 2)
        assert ids(log.read(0)) == [("snapshot-3", 1), ("snapshot-3", 2)]
        log.append(SOURCE, Batch(as_block(changes, table, 2), None))
    with Log.open(tmp_path) as log:
        assert log.latest_sequence == 5
        stored_block(log, 4, 2)
        assert [number for number, _ in ids(log.read(0))] == ["snapshot-3"] * 2 + ["snapshot-4"] * 2


def test_a_follower_sees_blocks_as_they_are_committed(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log, LogReader.open(tmp_path) as reader:
        for number in range(1, 6):
            stored_block(log, number, 100)
            reader.refresh()
            assert everything(reader) == everything(log)
            assert reader.latest_sequence == number * 100
        log.trim(250)
        reader.refresh()
        assert everything(reader)[0][0] == 250


@pytest.mark.parametrize("size", [1, 3])
def test_a_log_without_blocks_can_be_read_by_versions_that_know_none(
    tmp_path: Path, size: int
) -> None:
    with Log.open(tmp_path) as log:
        stored(log, 1, 3)
        assert log._get(layout.LAYOUT) == b"1"
        stored_block(log, 2, size)
        assert log._get(layout.LAYOUT) == b"2"
        stored(log, 3)
    with Log.open(tmp_path) as log:
        assert log._get(layout.LAYOUT) == b"2"
        assert log.latest_sequence == 4 + size


def test_a_backup_has_the_blocks(log: Log, plain: Log, tmp_path: Path) -> None:
    folders = backup.BackupFolders(data=tmp_path, sinks=tmp_path / "sinks")
    log.trim(7)
    copied = backup.copy(backup.stage(log, folders), tmp_path / "copy", lambda *_: None)
    assert (copied.first_sequence, copied.latest_sequence) == (7, LAST)
    restored = backup.BackupFolders(data=tmp_path / "new", sinks=tmp_path / "new" / "sinks")
    backup.restore(tmp_path / "copy", restored, lambda *_: None)
    with Log.open(tmp_path / "new" / "log") as again:
        assert everything(again) == everything(plain)[6:]


def test_a_block_that_is_missing_is_damage(log: Log) -> None:
    log._db.delete(layout.change_key(17))
    with pytest.raises(LogDamaged, match="changes 17 to 1031"):
        log.read(10, limit=100)
    with pytest.raises(LogDamaged):
        log.read(500, limit=10)


@pytest.mark.parametrize("gone", [2, 3])  # the last stands right before a block
def test_a_change_that_is_missing_before_a_block_is_damage(log: Log, gone: int) -> None:
    log._db.delete(layout.change_key(gone))
    with pytest.raises(LogDamaged, match="lacks changes before"):
        log.stored(0, upto=LAST)
    with pytest.raises(LogDamaged, match="lacks changes before"):
        log.piece(0, upto=LAST)
    with pytest.raises(LogDamaged, match="lacks changes before"):
        log.read(0, limit=LAST)
