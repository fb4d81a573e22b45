"""A place in a log that lost its tail is not taken for one in the log that went on."""

import shutil
from pathlib import Path

import msgspec
import pytest

from headrace.log import Generation, Log, LogReader
from headrace.log import _layout as layout
from headrace.log.lineage import FIRST_GENERATION, GENERATIONS_KEPT, kept, likely_fork, shared_upto
from tests.log.transactions import stored


def place(log: LogReader) -> tuple[str, str, int]:
    return log.epoch, log.generation, log.latest_sequence


def holds(log: LogReader, where: tuple[str, str, int]) -> bool:
    epoch, generation, sequence = where
    upto = log.shared_upto(epoch, generation)
    return upto is not None and sequence <= upto


@pytest.mark.requirement("P-06")
@pytest.mark.parametrize("restarted", [False, True])
def test_a_place_beyond_a_copy_that_was_put_back_is_in_no_log_that_goes_on(
    tmp_path: Path, *, restarted: bool
) -> None:
    with Log.open(tmp_path / "log") as log:
        stored(log, 1, 10)
        early = place(log)
        shutil.copytree(tmp_path / "log", tmp_path / "copy")
        late = early[0], early[1], stored(log, 2, 5)
    if restarted:
        with Log.open(tmp_path / "log") as log:
            late = place(log)
            assert late[1] != early[1]
    with Log.open(tmp_path / "copy") as log:
        assert holds(log, early)
        assert not holds(log, late)
        stored(log, 3, 90)
        assert log.epoch == late[0]
        assert holds(log, early)
        assert not holds(log, late)
        with LogReader.open(tmp_path / "copy") as reader:
            assert not holds(reader, late)
            assert reader.ranges(0).likely_fork(late[0], late[1]) == 10
            assert reader.ranges(0).generation == log.generation


@pytest.mark.requirement("P-06")
def test_places_hold_over_starts_and_kills_of_the_writer(tmp_path: Path) -> None:
    places = []
    # At the fifth start RocksDB would join the files of the others, while they are copied.
    for number in range(1, 5):
        with Log.open(tmp_path / "log") as log:
            places.append(place(log))
            stored(log, number, 3)
            places.append(place(log))
            # What a kill leaves: the folder as it is at a moment, nothing closed.
            shutil.copytree(tmp_path / "log", tmp_path / f"killed-{number}")
        shutil.rmtree(tmp_path / "log")
        (tmp_path / f"killed-{number}").rename(tmp_path / "log")
    with Log.open(tmp_path / "log") as log:
        assert all(holds(log, each) for each in places)
        assert len({each.id for each in log.lineage}) == 5


@pytest.mark.requirement("P-35")
def test_the_log_of_an_earlier_version_goes_on_and_its_places_are_of_the_first_generation(
    tmp_path: Path,
) -> None:
    with Log.open(tmp_path / "log") as log:
        stored(log, 1, 10)
        epoch = log.epoch
        log._state.delete(layout.LINEAGE)
        older = [{"epoch": "before", "sequence": 4}]
        log._state.put(layout.ANCESTORS, msgspec.json.encode(older))
    (tmp_path / "log" / "SYNCED").unlink()
    with Log.open(tmp_path / "log") as log:
        stored(log, 2, 10)
        assert log.shared_upto(epoch, FIRST_GENERATION) == 10
        assert log.shared_upto("before", FIRST_GENERATION) == 4
        assert log.shared_upto(epoch) == log.shared_upto(epoch, log.generation) == 20


def test_starts_that_added_nothing_are_forgotten_first() -> None:
    lineage = [Generation("e", f"{number:x}", 1 + number // 2) for number in range(1200)]
    left = kept(lineage)
    assert len(left) == GENERATIONS_KEPT
    assert left[-1] == lineage[-1]
    assert {each.first for each in left} == {each.first for each in lineage}


def test_the_fork_from_an_unknown_generation_is_before_what_began_later() -> None:
    lineage = [Generation("e", "0", 1), Generation("e", f"{9 << 22:x}", 11)]
    unknown = f"{5 << 22:x}"
    assert shared_upto(lineage, "e", unknown, 99) is None
    assert likely_fork(lineage, "e", unknown, 99) == 10
    assert likely_fork(lineage, "another", unknown, 99) is None


@pytest.mark.requirement("P-06")
def test_a_reader_that_stays_open_sees_the_copy_that_was_put_back(tmp_path: Path) -> None:
    folder, copy = tmp_path / "log", tmp_path / "copy"
    with Log.open(folder) as log:
        stored(log, 1, 3)
    shutil.copytree(folder, copy)
    with Log.open(folder) as log:
        stored(log, 2, 3)
    with LogReader.open(folder) as reader:
        for number in range(3, 6):
            shutil.rmtree(folder)
            shutil.copytree(copy, folder)
            # The same files by name and size, and as many changes.
            with Log.open(folder) as log:
                stored(log, number, 3)
                reader.refresh(log.latest_sequence)
                assert reader.read(0) == log.read(0)
                assert reader.lineage == log.lineage
