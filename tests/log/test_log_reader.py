"""A reader sees the live log of another process: everything committed, nothing half."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from rocksdict import Options, Rdict

from headrace.change.event import Batch
from headrace.errors import LogDamaged, LogError
from headrace.log import Log, LogReader
from headrace.log import _layout as layout
from headrace.log import reader as log_reader
from tests.changes import make_table
from tests.log.transactions import SOURCE, ids, piece, stored


@pytest.fixture
def reader(log: Log) -> Iterator[LogReader]:
    with LogReader.open(log.path) as reader:
        yield reader


FOLLOW = """
import sys
from headrace.log import LogReader
from tests.log.transactions import ids

reader = LogReader.open(sys.argv[1])
print(reader.epoch, flush=True)
for _ in sys.stdin:
    reader.refresh()
    changes = reader.read(0)
    print(reader.latest_sequence, reader.first_sequence, ids(changes), flush=True)
"""


def test_another_process_follows_the_log_while_it_is_written(log: Log) -> None:
    stored(log, 1, 2)
    with subprocess.Popen(
        [sys.executable, "-c", FOLLOW, log.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as follower:
        assert follower.stdin is not None
        assert follower.stdout is not None

        def seen() -> str:
            assert follower.stdin is not None
            assert follower.stdout is not None
            follower.stdin.write("look\n")
            follower.stdin.flush()
            return follower.stdout.readline().strip()

        assert follower.stdout.readline().strip() == log.epoch
        assert seen() == "2 1 [('1', 1), ('1', 2)]"
        piece(log, 2, 2)
        assert seen() == "2 1 [('1', 1), ('1', 2)]"
        log.append(SOURCE, Batch([], b"2"))
        assert seen() == "4 1 [('1', 1), ('1', 2), ('2', 1), ('2', 2)]"
        log.trim(4)
        assert seen() == "4 4 [('2', 2)]"
        follower.stdin.close()


def test_a_reader_sees_what_is_committed_when_it_refreshes(log: Log, reader: LogReader) -> None:
    stored(log, 1)
    assert reader.latest_sequence == 0
    reader.refresh()
    assert ids(reader.read(0)) == [("1", 1)]
    assert (reader.epoch, reader.stats()) == (log.epoch, log.stats())


def test_a_reader_never_sees_half_a_transaction(log: Log, reader: LogReader) -> None:
    piece(log, 1, 3)
    reader.refresh()
    assert (reader.latest_sequence, reader.read(0), reader.stats().count) == (0, [], 0)
    log.append(SOURCE, Batch([], b"1"))
    reader.refresh()
    assert len(reader.read(0)) == 3


def test_a_reader_knows_tables_cursors_and_positions(log: Log, reader: LogReader) -> None:
    stored(log, 1)
    log.move_cursor("lake", 1)
    later = log.register(make_table("orders"))
    reader.refresh()
    assert reader.tables() == log.tables()
    assert reader.table(later.version) == later
    assert reader.cursors() == log.cursors()
    assert reader.resume(SOURCE) == b"1"


def test_a_reader_may_outlive_the_writer(tmp_path: Path) -> None:
    with Log.open(tmp_path) as log:
        stored(log, 1, 3)
        reader = LogReader.open(tmp_path)
    with reader:
        reader.refresh()
        assert len(reader.read(0)) == 3


def test_a_reader_leaves_nothing_behind(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    LogReader.open(log.path).close()
    assert list(scratch.iterdir()) == []


def test_a_folder_without_a_log_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="there is no log in") as caught:
        LogReader.open(tmp_path)
    assert "data_dir" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_reader_refuses_a_log_of_another_layout(tmp_path: Path) -> None:
    Log.open(tmp_path).close()
    raw = Options(raw_mode=True)
    db = Rdict(str(tmp_path), raw, {"state": raw})
    db.get_column_family("state")[b"layout"] = b"99"
    db.close()
    with pytest.raises(LogError, match=r"layout 99.*layout 1"):
        LogReader.open(tmp_path)


@pytest.mark.parametrize("flush", [False, True])
def test_a_reader_misses_nothing_when_the_writer_begins_anew(tmp_path: Path, flush: bool) -> None:
    log = Log.open(tmp_path)
    stored(log, 1, 5)
    with LogReader.open(tmp_path) as reader:
        for number in (2, 4):
            stored(log, number, 5)  # not seen before the writer ends
            if flush:
                log.reclaim(log.latest_sequence)
            log.close()
            log = Log.open(tmp_path)
            stored(log, number + 1, 5)
            reader.refresh()
            found = [change.sequence for change in reader.read(0)]
            assert found == list(range(1, log.latest_sequence + 1))
    log.close()


def test_a_reader_sees_what_the_writer_has_flushed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "_OPEN_SECONDS", 0)
    log = Log.open(tmp_path / "log")
    stored(log, 1, 5)
    with LogReader.open(log.path) as reader:
        stored(log, 2, 5)
        log.reclaim(10)
        reader.refresh()
        assert [change.sequence for change in reader.read(0)] == list(range(1, 11))
        assert reader.place(10) == log.place(10)
        stored(log, 3, 5)
        log.checkpoint(tmp_path / "copy")
        reader.refresh()
        assert len(reader.read(0)) == 15
        stored(log, 4, 5)
        log.close()
        reader.refresh()
        assert len(reader.read(0)) == 20


def test_a_reader_opens_seldom_while_a_large_transaction_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Mock(side_effect=log_reader._follower)
    monkeypatch.setattr(log_reader, "_follower", follower)
    with Log.open(tmp_path) as log, LogReader.open(tmp_path) as reader:
        for number in range(1, 6):
            piece(log, number, 10)
            log.reclaim(10 * number)
            reader.refresh()
            assert reader.read(0) == []
        assert follower.call_count == 2
        log.append(SOURCE, Batch([], b"1"))
        reader.refresh()
        assert len(reader.read(0)) == 50
        stored(log, 6, 10)
        log.checkpoint(tmp_path / "copy")
        reader.refresh(60)  # as somebody knows who has seen it
        assert len(reader.read(0)) == 60


def test_what_is_being_read_is_read_to_its_end(tmp_path: Path) -> None:
    log = Log.open(tmp_path)
    stored(log, 1, 50)
    with LogReader.open(tmp_path) as reader:
        found = reader.records(0, limit=50)
        first = next(found)
        log.close()
        log = Log.open(tmp_path)
        stored(log, 2, 50)
        reader.refresh()
        assert [sequence for sequence, _ in [first, *found]] == list(range(1, 51))
        assert len(reader.read(0)) == 100
    log.close()


@pytest.mark.requirement("P-09")
@pytest.mark.parametrize(
    "read",
    [
        lambda log: log.read(0),
        lambda log: log.piece(0, upto=5),
        lambda log: log.stored(0, upto=5),
    ],
    ids=["read", "piece", "stored"],
)
def test_a_change_that_is_missing_among_others_is_an_error(
    log: Log, read: Callable[[LogReader], object]
) -> None:
    stored(log, 1, 5)
    log._db.delete(layout.change_key(3))
    with pytest.raises(LogDamaged, match="lacks changes before sequence"):
        read(log)
