"""A byte that changed on the disk is an error: no gap, no short answer, no shorter log."""

import gc
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from headrace.errors import LogDamaged, LogError
from headrace.log import Log, LogReader, reader
from headrace.log import _layout as layout
from tests.log.transactions import SOURCE, sequences, stored

TRANSACTIONS, SIZE = 12, 100
LAST = TRANSACTIONS * SIZE
OPENERS = [Log.open, LogReader.open]

Opener = Callable[[Path], LogReader]


def cursor_name(number: int) -> str:
    """So long, and like no other, that each cursor has a block of its file to itself."""
    return f"cursor-{number}-{random.Random(number).randbytes(3000).hex()}"


@pytest.fixture(scope="module")
def flushed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of several files, for changes and for the state."""
    folder = tmp_path_factory.mktemp("flushed") / "log"
    with Log.open(folder) as log:
        for number in range(1, TRANSACTIONS + 1):
            stored(log, number, SIZE)
            log.move_cursor(cursor_name(number), number)
            if number % 4 == 0:
                log._db.flush()
                log._state.flush()
    return folder


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """What a killed writer leaves: everything is in the write-ahead log."""
    with Log.open(tmp_path / "log") as log:
        for number in range(1, TRANSACTIONS + 1):
            stored(log, number, SIZE)
        shutil.copytree(tmp_path / "log", tmp_path / "killed")
    mark = tmp_path / "killed" / "SYNCED"
    mark.unlink(missing_ok=True)
    return tmp_path / "killed"


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 0x20]))


def spots(file: Path) -> list[int]:
    """Data at the start, then index, filter, properties, and the footer at the very end."""
    size = file.stat().st_size
    within = [size // 16, size // 8, size // 4, size // 2, size * 3 // 4]
    return [*within, *(size - back for back in (1200, 800, 400, 30) if back < size)]


def read_through(log: LogReader, after: int) -> int:
    """How far all changes come without a gap."""
    while piece := log.piece(after, upto=LAST):
        assert piece.first == after + 1
        after = piece.last
    return after


def all_changes(log: LogReader, after: int) -> None:
    assert read_through(log, after) == LAST
    assert len(log.read(after, limit=LAST)) == LAST - after
    assert log.place(after + 1) is not None


def all_cursors(log: LogReader) -> None:
    assert len(log.cursors()) == TRANSACTIONS


def each_cursor(log: LogReader) -> None:
    assert all(log.cursor(cursor_name(number)) for number in range(1, TRANSACTIONS + 1))


def other_state(log: LogReader) -> None:
    assert len(list(log._marks())) > 0
    assert log.resume(SOURCE) == b"%d" % TRANSACTIONS
    assert len(log.tables()) == 1


def files_of_changes(flushed: Path, folder: Path) -> list[Path]:
    found = kinds(flushed, folder.with_name("looked"))
    return sorted(folder / name for name, kind in found.items() if kind == "changes")


CHECKS: tuple[Callable[[LogReader], None], ...] = (
    *(partial(all_changes, after=after) for after in (0, LAST // 2, LAST - SIZE)),
    all_cursors,
    each_cursor,
    other_state,
)


def refuses(log: LogReader, check: Callable[[LogReader], None]) -> bool:
    """Whether a look at the log is an error; else it must see everything."""
    try:
        check(log)
    except LogDamaged:
        return True
    return False


def kinds(flushed: Path, copy: Path) -> dict[str, str]:
    """The table files of a log, and what each has."""
    shutil.copytree(flushed, copy)
    with Log.open(copy) as log:
        files = {each["name"].strip("/"): each["start_key"] for each in log._db.live_files()}
    return {
        name: "changes" if first.startswith(b"changefeed:") else "state"
        for name, first in files.items()
        if (flushed / name).exists()
    }


@pytest.mark.requirement("P-09")
@pytest.mark.parametrize("opened", OPENERS)
def test_a_byte_flipped_in_any_block_is_an_error_and_leads_nobody_past_it(
    flushed: Path, tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_POLL_SECONDS", 0.001)
    folder = tmp_path / "log"
    refused = {"changes": 0, "state": 0}  # flips that somebody is told of, by what they are in
    for name, kind in kinds(flushed, tmp_path / "looked").items():
        for at in spots(flushed / name):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(flushed, folder)
            flip(folder / name, at)
            try:
                log = opened(folder)
            except LogDamaged:
                refused[kind] += 1
                continue
            with log:
                refused[kind] += sum(refuses(log, check) for check in CHECKS) > 0
    assert refused["changes"] > 10
    assert refused["state"] > 10


@pytest.mark.requirement("P-09")
def test_the_error_names_the_changes_that_cannot_be_read(flushed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    shutil.copytree(flushed, folder)
    file = files_of_changes(flushed, folder)[-1]
    flip(file, file.stat().st_size // 3)
    with Log.open(folder) as log:
        with pytest.raises(LogDamaged, match=r"changes \d+ to \d+ of the log") as caught:
            read_through(log, 0)
        _, first, _, last, *_ = str(caught.value).split()
        assert str(caught.value) == log.damage
        assert "snapshot" in caught.value.hint
        assert read_through(log, int(last)) == LAST
        with pytest.raises(LogDamaged):
            log.place(int(first))
        with pytest.raises(LogDamaged):
            log.place(int(last))
        assert log.place(int(last) + 1) is not None


@pytest.mark.requirement("P-09")
def test_damage_is_over_when_all_of_it_is_trimmed(flushed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    shutil.copytree(flushed, folder)
    for file in files_of_changes(flushed, folder)[-2:]:
        flip(file, file.stat().st_size // 3)
    with Log.open(folder) as log:
        ends, after = list[int](), 0
        while after < LAST:
            try:
                after = read_through(log, after)
            except LogDamaged as error:
                after = int(str(error).split()[3])
                ends.append(after)
        first, second = ends
        with pytest.raises(LogDamaged):
            log.place(first)  # what was found last is not what lasts longest
        for before, named in ((first, first), (first + 1, second), (second, second)):
            log.trim(before, force=True)
            assert f" to {named} of the log" in log.damage
        log.trim(second + 1, force=True)
        assert log.damage == ""
        assert stored(log, 99) == LAST + 1


@pytest.mark.requirement("P-09")
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_byte_flipped_in_the_write_ahead_log_is_an_error_and_leaves_it_as_it_is(
    live: Path, share: float
) -> None:
    wal = max(live.glob("*.log"), key=lambda file: file.stat().st_size)
    flip(wal, int(wal.stat().st_size * share))
    before = wal.read_bytes()
    for _ in range(2):
        with pytest.raises(LogDamaged, match="lost its tail"):
            Log.open(live)
    assert wal.read_bytes() == before


@pytest.mark.requirement("P-09")
@pytest.mark.parametrize("torn", ["cut", "zeros", "flipped"])
def test_a_torn_last_write_is_no_damage(live: Path, torn: str) -> None:
    wal = max(live.glob("*.log"), key=lambda file: file.stat().st_size)
    content = wal.read_bytes()
    if torn == "flipped":
        flip(wal, len(content) - 40)
    else:
        wal.write_bytes(content[:-40] + (bytes(40) if torn == "zeros" else b""))
    with Log.open(live) as log:
        assert log.latest_sequence == LAST - SIZE
        assert sequences(log)[-1] == LAST - SIZE
        assert stored(log, 99, 1) == LAST - SIZE + 1


@pytest.mark.requirement("P-09")
def test_a_writer_killed_as_it_begins_a_log_leaves_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Log._put

    def epoch_alone(log: Log, key: bytes, value: bytes) -> None:
        if key == layout.LAYOUT:
            raise KeyboardInterrupt
        put(log, key, value)

    for _ in range(2):  # the second one finds what the first has left in a file
        monkeypatch.setattr(Log, "_put", epoch_alone)
        with pytest.raises(KeyboardInterrupt):
            Log.open(tmp_path / "new")
        gc.collect()  # RocksDB lets go of the folder
    monkeypatch.undo()
    with Log.open(tmp_path / "new") as log:
        assert stored(log, 1, 1) == 1


@pytest.mark.requirement("P-09")
def test_a_log_that_ends_below_what_was_synced_is_damaged(live: Path, tmp_path: Path) -> None:
    # A closed log has written the mark of its last change.
    shutil.copy(tmp_path / "log" / "SYNCED", live / "SYNCED")
    wal = max(live.glob("*.log"), key=lambda file: file.stat().st_size)
    wal.write_bytes(wal.read_bytes()[:-40])
    for opened in OPENERS:
        with pytest.raises(LogDamaged):
            opened(live)
    (live / "CURRENT").unlink()
    with pytest.raises(LogError, match="are gone"):
        Log.open(live)


@pytest.mark.requirement("P-09")
@pytest.mark.parametrize("opened", OPENERS)
@pytest.mark.parametrize("torn", [b"", b"1234", bytes(200), b"00000000 {}".ljust(200)])
def test_a_mark_that_is_torn_is_no_damage(live: Path, opened: Opener, torn: bytes) -> None:
    (live / "SYNCED").write_bytes(torn)
    with opened(live) as log:
        assert read_through(log, 0) == LAST


@pytest.mark.requirement("P-09")
def test_a_list_of_files_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    with Log.open(tmp_path / "log") as log:
        for number in range(1, TRANSACTIONS + 1):
            stored(log, number, SIZE)
            if number % 4 == 0 and number < TRANSACTIONS:
                log._db.flush()
                log._state.flush()
        shutil.copytree(log.path, killed)
    [manifest] = killed.glob("MANIFEST-*")
    content = manifest.read_bytes()
    refused, noted = 0, 0
    for share in (0.2, 0.4, 0.6, 0.8):
        folder = tmp_path / f"cut-{share}"
        shutil.copytree(killed, folder)
        (folder / manifest.name).write_bytes(content[: int(len(content) * share)])
        try:
            log = Log.open(folder)
        except LogDamaged:
            refused += 1
            continue
        with log:
            with suppress(LogDamaged):
                assert read_through(log, 0) == LAST
            noted += bool(log.damage)
    assert refused > 0
    assert noted > 0
    assert refused + noted == 4


@pytest.mark.requirement("P-09")
@pytest.mark.parametrize("content", [bytes(16), b"MANIFEST\xad000005\n"])
def test_a_name_that_is_none_is_an_error_of_the_log(
    flushed: Path, tmp_path: Path, content: bytes
) -> None:
    folder = tmp_path / "log"
    shutil.copytree(flushed, folder)
    (folder / "CURRENT").write_bytes(content)
    for opened in OPENERS:
        with pytest.raises(LogError):
            opened(folder)
