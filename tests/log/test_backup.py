"""A backup holds one moment of everything, and a log made of it never passes for the first one."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.errors import LogError
from headrace.log import Ancestor, Log, LogReader
from headrace.log.backup import (
    MANIFEST,
    BackupFolders,
    RestoredLog,
    alone,
    copy,
    read_manifest,
    restore,
    stage,
)
from headrace.log.keys import KeyRequest, make
from tests.log.transactions import sequences, stored


def folders(data: Path, **given: Any) -> BackupFolders:
    return BackupFolders(**{"data": data, "sinks": data / "pipeline", **given})


def nobody(done: int, total: int) -> None:
    """Looks at no progress."""


def backed_up(log: Log, data: Path, target: Path) -> None:
    copy(stage(log, folders(data)), target, nobody)


def restored(backup: Path, data: Path) -> RestoredLog:
    return restore(backup, folders(data), nobody)


@pytest.mark.requirement("P-36")
def test_a_backup_of_a_log_at_work_has_whole_transactions_and_all_that_belongs_to_it(
    tmp_path: Path,
) -> None:
    with Log.open(tmp_path / "data" / "log") as log:
        made = make(KeyRequest(name="reports"), now=1).key
        log.put_key(made)
        log.move_cursor("reader", stored(log, 1, 5))
        stopping = threading.Event()

        def work() -> None:
            number = 2
            while not stopping.is_set():
                number += 1
                stored(log, number, 7)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for round in range(5):
                backed_up(log, tmp_path / "data", tmp_path / f"backup-{round}")
        finally:
            stopping.set()
            thread.join()
        epoch = log.epoch
    for round in range(5):
        done = restored(tmp_path / f"backup-{round}", tmp_path / f"again-{round}")
        assert done.ancestor.epoch == epoch
        with Log.open(tmp_path / f"again-{round}" / "log") as log:
            assert (log.latest_sequence - 5) % 7 == 0
            assert sequences(log) == list(range(1, log.latest_sequence + 1))
            assert made in log.keys()  # noqa: SIM118 - a log is no dict
            assert [cursor.name for cursor in log.cursors()] == ["reader"]
            assert log.resume("shop") is not None
            assert log.epoch == done.epoch != epoch
            assert log.ancestors == [Ancestor(epoch, log.latest_sequence)]


@pytest.mark.requirement("P-36")
def test_positions_of_the_first_log_hold_as_far_as_the_copy_goes(tmp_path: Path) -> None:
    with Log.open(tmp_path / "data" / "log") as log:
        stored(log, 1, 10)
        backed_up(log, tmp_path / "data", tmp_path / "one")
        stored(log, 2, 10)
        first = log.epoch
    second = restored(tmp_path / "one", tmp_path / "second").epoch
    with Log.open(tmp_path / "second" / "log") as log:
        assert stored(log, 3, 30) == 40
        assert log.shared_upto(first) == 10
        assert log.shared_upto(second) == 40
        assert log.shared_upto("another") is None
        backed_up(log, tmp_path / "second", tmp_path / "two")
    restored(tmp_path / "two", tmp_path / "third")
    with LogReader.open(tmp_path / "third" / "log") as reader:
        assert reader.ancestors == [Ancestor(first, 10), Ancestor(second, 40)]
        assert reader.ranges(0).shared_upto(first, "0") == 10


def test_what_belongs_to_a_process_or_to_others_is_left_out(tmp_path: Path) -> None:
    data = tmp_path / "kept-until-spring" / "data"  # the names above it say nothing of the files
    kept = ["pipeline/lake/checkpoint/commits/0", "pipeline/lake/sent.jsonl", "sources/shop/paused"]
    left = [
        "operator.key", "pipeline/status.json", "pipeline/spark.log", "pipeline/lock",
        "pipeline/lake/checkpoint-until-1/commits/0", "lake/orders/1.parquet",
        "pipeline/lake/checkpoint/commits/.1.tmp",
    ]  # fmt: skip
    for name in (*kept, *left):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(name)
    with Log.open(data / "log") as log:
        stored(log, 1, 5)
        folder = stage(log, folders(data, left_out=(data / "lake",)))
    copy(folder, tmp_path / "backup", nobody)
    here = tmp_path / "here"
    (here / "pipeline" / "other").mkdir(parents=True)
    done = restored(tmp_path / "backup", here)
    assert (done.sinks, done.kept) == (["lake"], [])
    files = [path for path in here.rglob("*") if path.is_file() and "log" not in path.parts]
    assert {str(path.relative_to(here)) for path in files} == set(kept)


@pytest.mark.requirement("P-36")
def test_what_sinks_have_noted_since_is_kept(tmp_path: Path) -> None:
    data = tmp_path / "data"
    ledger = data / "pipeline" / "post" / "sent.jsonl"
    ledger.parent.mkdir(parents=True)
    ledger.write_text("then")
    with Log.open(data / "log") as log:
        stored(log, 1, 5)
        backed_up(log, data, tmp_path / "backup")
    ledger.write_text("since")
    (data / "log").rename(data / "log.broken")
    done = restored(tmp_path / "backup", data)
    assert (done.sinks, done.kept) == ([], ["post"])
    assert ledger.read_text() == "since"


@pytest.mark.requirement("P-17")
def test_a_backup_is_its_users_alone(tmp_path: Path) -> None:
    with Log.open(tmp_path / "data" / "log") as log:
        stored(log, 1, 5)
        backed_up(log, tmp_path / "data", tmp_path / "backup")
    assert f"{(tmp_path / 'backup').stat().st_mode & 0o777:o}" == "700"
    assert not list((tmp_path / "data").glob("backup-*/MANIFEST*"))


def test_neither_a_full_folder_nor_a_log_is_overwritten(tmp_path: Path) -> None:
    with Log.open(tmp_path / "data" / "log") as log:
        stored(log, 1, 5)
        backed_up(log, tmp_path / "data", tmp_path / "backup")
        staged = stage(log, folders(tmp_path / "data"))
    with pytest.raises(LogError, match="backup is not an empty folder"):
        copy(staged, tmp_path / "backup", nobody)
    with pytest.raises(LogError, match=r"there is a log in .*data/log"):
        restored(tmp_path / "backup", tmp_path / "data")


@pytest.mark.requirement("P-36")
def test_one_backup_at_a_time(tmp_path: Path) -> None:
    with (
        alone(tmp_path),
        pytest.raises(LogError, match="another backup of"),
        alone(tmp_path),
    ):
        raise AssertionError("a second one has begun")
    with alone(tmp_path):
        pass


def test_a_backup_that_was_never_finished_is_refused(tmp_path: Path) -> None:
    with Log.open(tmp_path / "data" / "log") as log:
        stored(log, 1, 5)
        backed_up(log, tmp_path / "data", tmp_path / "backup")
    manifest = read_manifest(tmp_path / "backup")
    newer = msgspec.structs.replace(manifest, format=2)
    (tmp_path / "backup" / MANIFEST).write_bytes(msgspec.json.encode(newer))
    with pytest.raises(LogError, match="has format 2, this version of Headrace reads format 1"):
        restored(tmp_path / "backup", tmp_path / "again")
    (tmp_path / "backup" / MANIFEST).unlink()
    with pytest.raises(LogError, match=r"no backup in .*, or it was not finished"):
        restored(tmp_path / "backup", tmp_path / "again")
    assert not (tmp_path / "again").exists()
