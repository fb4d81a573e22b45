"""The log's folder is its user's alone, and what is wrong with it is one sentence."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import LogDamaged, LogError, LogInUse
from headrace.log import Log, LogReader
from headrace.log.folder import make_private
from tests.log.transactions import stored


def modes(folder: Path) -> set[str]:
    """The modes of a folder and of all that is in it."""
    found = [folder, *folder.rglob("*")]
    return {f"{path.stat().st_mode & 0o777:o}" for path in found}


@pytest.mark.requirement("P-17")
def test_what_is_open_to_others_is_closed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "log"
    with Log.open(folder) as log:
        stored(log, 1, 5)
    assert f"{folder.stat().st_mode & 0o777:o}" == "700"
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    make_private(folder)
    assert modes(folder) == {"700", "600"}
    assert f"folder={folder} was=755 now=700" in caplog.text


@pytest.mark.requirement("P-17")
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    Log.open(link / "log").close()  # one's own is fine
    make_private(link)
    if os.geteuid():
        pytest.skip("only root can make a link another user's")
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(LogError, match=r"link that user 12345 made") as raised:
        make_private(link)
    assert "Name the folder itself" in raised.value.hint


def test_a_folder_of_another_user_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid():
        pytest.skip("only root can make a folder another user's")
    os.chown(tmp_path, 12345, 12345)
    make_private(tmp_path)
    assert "owner=12345" in caplog.text


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    for folder in (tmp_path / "data", tmp_path / "data" / "log"):
        with pytest.raises(
            LogError, match=r"data(/log)?: (is a file, not a folder|Not a directory)"
        ):
            Log.open(folder)


@pytest.mark.skipif(not Path("/sys/kernel").exists(), reason="needs a folder nobody can write")
def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(LogError, match=r"/sys/headrace: .*[Pp]ermi") as raised:
        Log.open("/sys/headrace/log")
    assert "data_dir" in raised.value.hint


def test_the_process_that_has_the_log_is_named(tmp_path: Path) -> None:
    program = (
        "import sys; from headrace.log import Log; log = Log.open(sys.argv[1]);"
        "print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(LogInUse, match=rf"another process .*: process {other.pid}$"):
            Log.open(tmp_path)
        other.communicate()


@pytest.fixture
def damaged(tmp_path: Path) -> dict[str, Path]:
    """Copies of a log, one with damaged changes and one with a damaged state."""
    with Log.open(tmp_path / "log") as log:
        for number in range(1, 30):
            stored(log, number, 300)
        log.move_cursor("a", 3)
        log._db.flush()
        log._state.flush()
    changes, state = sorted((tmp_path / "log").glob("*.sst"), key=lambda file: -file.stat().st_size)
    copies = {}
    for name, file in (("changes", changes), ("state", state)):
        copies[name] = shutil.copytree(tmp_path / "log", tmp_path / name)
        content = bytearray((copies[name] / file.name).read_bytes())
        content[20:700] = bytes(byte ^ 0x5A for byte in content[20:700])
        (copies[name] / file.name).write_bytes(content)
    return copies


def test_a_damaged_state_is_one_sentence_for_writers_and_readers(damaged: dict[str, Path]) -> None:
    sentence = r"the log in .*state (is damaged|cannot be read; RocksDB says: Corruption)"
    for opened in (Log.open, LogReader.open):
        with pytest.raises(LogDamaged, match=sentence) as raised:
            opened(damaged["state"])
        assert "\n" not in str(raised.value)
        assert "headrace restore" in raised.value.hint


def test_damaged_changes_are_never_taken_for_trimmed_ones(damaged: dict[str, Path]) -> None:
    for opened in (Log.open, LogReader.open):
        with (
            opened(damaged["changes"]) as log,
            pytest.raises(LogDamaged, match=r"cannot be read.*(checksum|beyond sequence 0)"),
        ):
            log.read(0, limit=10_000)
