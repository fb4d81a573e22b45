"""What is committed has been synced, without RocksDB's help."""

from pathlib import Path

import pytest

from headrace.change.event import Batch
from headrace.log import Log, _wal
from tests.changes import make_change


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are synced from here on, in order."""
    files: list[str] = []
    sync = _wal._sync_file

    def note(file: int) -> None:
        files.append(Path(f"/proc/self/fd/{file}").readlink().name)
        sync(file)

    monkeypatch.setattr(_wal, "_sync_file", note)
    return files


def newest(folder: Path) -> str:
    return max(path.name for path in folder.glob("*.log"))


@pytest.mark.requirement("S1-50")
def test_a_commit_syncs_the_file_that_holds_it(tmp_path: Path, synced: list[str]) -> None:
    with Log.open(tmp_path) as log:
        table = log.register(make_change().table)
        synced.clear()
        log.append("shop", Batch([make_change(table=table)], b"{}"))
        assert synced == [newest(tmp_path)]


def test_a_piece_of_a_transaction_waits_for_its_commit(tmp_path: Path, synced: list[str]) -> None:
    with Log.open(tmp_path) as log:
        table = log.register(make_change().table)
        synced.clear()
        log.append("shop", Batch([make_change(table=table)], None))
        assert synced == []
        log.append("shop", Batch([make_change(table=table)], b"{}"))
        assert synced == [newest(tmp_path)]


def test_a_file_begun_meanwhile_and_its_folder_are_synced_too(
    tmp_path: Path, synced: list[str]
) -> None:
    with Log.open(tmp_path) as log:
        table = log.register(make_change().table)
        before = newest(tmp_path)
        log._db.flush()  # RocksDB begins a new file after this
        synced.clear()
        log.append("shop", Batch([make_change(table=table)], b"{}"))
        after = newest(tmp_path)
        assert after > before
        assert after in synced
        assert synced[-1] == tmp_path.name
