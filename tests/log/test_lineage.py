"""A place in a log that lost its tail is not taken for one in the log that went on."""

import shutil
from pathlib import Path

import msgspec
import pytest

from headrace.change.event import Batch
from headrace.log import Generation, Log, LogReader
from headrace.log import _layout as layout
from headrace.log.lineage import FIRST_GENERATION, likely_fork, shared_upto
from tests.log.transactions import piece, stored


def place(log: LogReader) -> tuple[str, str, int]:
    return log.epoch, log.generation, log.latest_sequence


def planned(log: LogReader) -> tuple[str, str, int]:
    """Where a batch that is planned now ends."""
    ranges = log.ranges(0)
    return ranges.epoch, ranges.generation, ranges.latest_sequence


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
        assert len({each.id for each in log.lineage}) == 4  # the fifth start has added nothing


@pytest.mark.requirement("P-06")
def test_no_number_of_starts_without_a_change_refuses_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.log.writer.GENERATIONS_KEPT", 3)
    with Log.open(tmp_path / "log") as log:
        stored(log, 1, 10)
        places = [place(log), planned(log)]
    for _ in range(6):
        with Log.open(tmp_path / "log") as log:
            places += [place(log), planned(log)]
    for number in (2, 3):
        with Log.open(tmp_path / "log") as log:
            assert all(holds(log, each) for each in places)
            stored(log, number, 5)
            places += [place(log), planned(log)]
            assert all(holds(log, each) for each in places)
            assert len(log.lineage) == number


@pytest.mark.requirement("P-06")
def test_a_place_noted_before_the_first_change_of_a_start_holds_in_that_history_alone(
    tmp_path: Path,
) -> None:
    # What a stream says when it is opened is all that its reader knows of what comes later.
    with Log.open(tmp_path / "log") as log:
        stored(log, 1, 10)
        shutil.copytree(tmp_path / "log", tmp_path / "live")
        stored(log, 2, 10)  # the generation of both goes on in this one
    shutil.copytree(tmp_path / "live", tmp_path / "copy")
    with Log.open(tmp_path / "live") as log:
        epoch, generation, latest = place(log)
        assert latest == 10
        stored(log, 3, 5)
        assert all(holds(log, (epoch, generation, upto)) for upto in (10, 15))
        assert log.generation != generation
    with Log.open(tmp_path / "live") as log:
        assert all(holds(log, (epoch, generation, upto)) for upto in (10, 15))
    for other in ("log", "copy"):
        with Log.open(tmp_path / other) as log:
            for number in (4, 5):
                assert holds(log, (epoch, generation, 10))
                assert not holds(log, (epoch, generation, 11))
                assert not holds(log, (epoch, generation, 15))
                stored(log, number, 20)


@pytest.mark.parametrize("generation", ["-", "f-", "f--0", "f-x-0", "f-²-0", "f-3", "f-3-f-3-0"])
def test_a_generation_that_nobody_gave_out_is_in_no_log(generation: str) -> None:
    lineage = [Generation("e", "0", 1)]
    assert shared_upto(lineage, "e", generation, 9) is None
    assert shared_upto(lineage, "e", "f-3-0", 9) == 3


@pytest.mark.requirement("P-06")
def test_who_follows_a_log_learns_of_a_generation_with_its_first_change(tmp_path: Path) -> None:
    with Log.open(tmp_path / "log") as log:
        stored(log, 1, 10)
    with Log.open(tmp_path / "log") as log, LogReader.open(tmp_path / "log") as reader:
        before = planned(reader)
        piece(log, 2, 5)
        reader.refresh()
        assert planned(reader) == before == (log.epoch, FIRST_GENERATION, 10)
        log.abandon("shop")
        stored(log, 3, 5)
        reader.refresh(15)
        assert planned(reader) == place(log)
        assert reader.lineage == log.lineage
        assert (log.lineage[-1].first, len(log.lineage)) == (11, 2)
        assert holds(reader, before)


def test_a_position_without_changes_begins_no_generation(tmp_path: Path) -> None:
    with Log.open(tmp_path / "log") as log:
        stored(log, 1, 10)
    with Log.open(tmp_path / "log") as log:
        log.append("shop", Batch([], b"2"))
        assert len(log.lineage) == 1


@pytest.mark.requirement("P-35")
def test_a_log_with_generations_that_have_no_change_goes_on(tmp_path: Path) -> None:
    with Log.open(tmp_path / "log") as log:
        stored(log, 1, 10)
        epoch = log.epoch
        older = [("0", 1), ("a", 6), ("b", 11), ("c", 11)]
        lineage = [Generation(epoch, id, first) for id, first in older]
        log._state.put(layout.LINEAGE, msgspec.json.encode(lineage))
    (tmp_path / "log" / "SYNCED").unlink()
    for number in (2, 3):
        with Log.open(tmp_path / "log") as log:
            shared = {id: log.shared_upto(epoch, id) for id, _ in older}
            assert shared == {"0": 5, "a": 10, "b": 10, "c": 10}
            stored(log, number, 10)


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
