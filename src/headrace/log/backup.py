"""A copy of everything that Headrace keeps, taken while it works, and a log made of such a copy.

    data_dir/backup-TIME     what a copy is made of: links and small files, all of one moment
    DIR/log, DIR/sinks, …    the copy; DIR/backup.json is written last

How far sinks are is noted before the log is: so no sink of a copy is ahead of its log.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ..errors import LogError
from .folder import locked, make_private, unusable
from .lineage import Ancestor
from .writer import Log

MANIFEST = "backup.json"
FORMAT = 1
_LOG, _SINKS, _DATA = "log", "sinks", "data"
STAGE = "backup-"
_NOTED = ("commits", "offsets")  # of Spark's checkpoints, in the order in which they are copied
_LEDGER = "sent.jsonl"  # before the dead letters that it counts
_LOCK = "backup.lock"  # in data_dir
# What belongs to a running process, or to a copy that was never finished.
_PASSING = {_LOCK, "operator.key", "status.json", "status.json.new", "lock", "pipeline.txt"}

Look = Callable[[int, int], None]  # bytes that were copied, and all


class BackupFolders(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to copy."""

    data: Path
    sinks: Path  # the folder that has one folder a sink
    left_out: tuple[Path, ...] = ()  # what sinks write for others, where it is in these folders


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy holds; the file that makes it complete."""

    format: int = FORMAT
    at: int  # microseconds since 1970
    epoch: str
    first_sequence: int
    latest_sequence: int
    sinks: list[str] = []


class RestoredLog(msgspec.Struct, frozen=True):
    """What a restore did."""

    ancestor: Ancestor  # the log that the copy was made of
    epoch: str  # the new one's
    sinks: list[str]  # whose places came with it
    kept: list[str]  # whose places were there already, and were kept


@contextlib.contextmanager
def alone(data: Path) -> Iterator[None]:
    """Keep other backups of a data_dir waiting: they would remove what this one has set aside."""
    with (data / _LOCK).open("w") as lock:
        if not locked(lock):
            raise LogError(
                f"another backup of {data} is being made", hint="Run it again when that is done."
            )
        yield


def stage(log: Log, folders: BackupFolders) -> Path:
    """Set aside everything as it is now; returns the folder, which whoever copies it removes."""
    for stale in folders.data.glob(f"{STAGE}*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = folders.data / f"{STAGE}{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    try:
        make_private(folder)
        sinks = _stage_sinks(folders, folder / _SINKS)
        _stage_files(folders, folder / _DATA)
        log.checkpoint(folder / _LOG)
        manifest = BackupManifest(
            at=time.time_ns() // 1000,
            epoch=log.epoch,
            first_sequence=log.first_sequence,
            latest_sequence=log.latest_sequence,
            sinks=sinks,
        )
        (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise unusable(folder, error) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def copy(staged: Path, target: Path, look: Look) -> BackupManifest:
    """Copy what was set aside into a new folder; its manifest last."""
    expect_empty(target)
    make_private(target)
    try:
        _copy_tree(staged, target, look)
        shutil.copyfile(staged / MANIFEST, target / MANIFEST)
        _sync(target / MANIFEST)
    except OSError as error:
        raise unusable(target, error) from error
    return read_manifest(target)


def expect_empty(folder: Path) -> None:
    """Refuse a folder that holds anything."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LogError(f"{folder} is not an empty folder", hint="Name a new one for the backup.")


def read_manifest(folder: Path) -> BackupManifest:
    """What a backup holds; LogError: it is none, or it was never finished."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=BackupManifest)
    except (OSError, msgspec.DecodeError) as error:
        raise LogError(
            f"there is no backup in {folder}, or it was not finished: {MANIFEST} cannot be read",
            hint="Name a folder that `headrace backup` has filled.",
        ) from error
    if manifest.format != FORMAT:
        raise LogError(
            f"the backup in {folder} has format {manifest.format}, this version of Headrace reads "
            f"format {FORMAT}",
            hint="Run the version of Headrace that wrote it, or a later one.",
        )
    return manifest


def restore(backup: Path, folders: BackupFolders, look: Look) -> RestoredLog:
    """Make a log of a backup, where there is none; what is there of sinks is kept.

    The log comes to its place last, so that a restore that was interrupted can be repeated.
    """
    manifest = read_manifest(backup)
    log = folders.data / _LOG
    if log.exists() and any(log.iterdir()):
        raise LogError(
            f"there is a log in {log}",
            hint="Move it away first, or name another data_dir; nothing was changed.",
        )
    try:
        make_private(folders.data)
        fresh = folders.data / "log.restoring"
        shutil.rmtree(fresh, ignore_errors=True)
        make_private(fresh)
        _copy_tree(backup / _LOG, fresh, look)
        with Log.open(fresh) as copied:
            ancestor, epoch = copied.become_copy(), copied.epoch
        kept = _put_sinks(backup / _SINKS, folders.sinks, manifest.sinks)
        _put_missing(backup / _DATA, folders.data)
        with contextlib.suppress(FileNotFoundError):
            log.rmdir()
        fresh.rename(log)
    except OSError as error:
        raise unusable(folders.data, error) from error
    restored = [name for name in manifest.sinks if name not in kept]
    return RestoredLog(ancestor, epoch, restored, kept)


def _stage_sinks(folders: BackupFolders, target: Path) -> list[str]:
    names = sorted(path.name for path in folders.sinks.glob("*") if path.is_dir())
    for name in names:
        for file in _in_order(folders.sinks / name, folders.left_out):
            _set_aside(file, target / file.relative_to(folders.sinks))
    return names


def _stage_files(folders: BackupFolders, target: Path) -> None:
    """What is in data_dir besides the log and the sinks, such as who is paused."""
    others = (folders.data / _LOG, folders.sinks, *folders.left_out)
    for file in _in_order(folders.data, others):
        if not file.relative_to(folders.data).parts[0].startswith((STAGE, "log.")):
            _set_aside(file, target / file.relative_to(folders.data))


def _in_order(folder: Path, left_out: tuple[Path, ...]) -> Iterator[Path]:
    """The files of a folder, those first that others may be ahead of."""
    found = (path for path in folder.rglob("*") if _is_kept(path, folder, left_out))
    return iter(sorted(found, key=_rank))


def _is_kept(path: Path, folder: Path, left_out: tuple[Path, ...]) -> bool:
    passing = path.name in _PASSING or path.name.startswith("spark.")
    unfinished = path.name.endswith((".tmp", ".new"))
    earlier = any("-until-" in part for part in path.relative_to(folder).parts)
    elsewhere = any(path.is_relative_to(each) for each in left_out)
    return path.is_file() and not (passing or unfinished or earlier or elsewhere)


def _rank(path: Path) -> tuple[int, str]:
    for rank, name in enumerate(_NOTED):
        if path.parent.name == name:
            return rank, path.name
    if path.name == _LEDGER:
        return len(_NOTED), path.name
    # A Delta table's log names its files: they are there as long as it does.
    return len(_NOTED) + 1 + (path.suffix == ".parquet"), str(path)


def _set_aside(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # Spark and Delta remove what is old
        if file.suffix == ".parquet":
            with contextlib.suppress(OSError):
                os.link(file, target)
                return
        shutil.copyfile(file, target)


def _put_sinks(source: Path, target: Path, names: list[str]) -> list[str]:
    """Put the places of sinks back that have none; returns those that have one."""
    kept = []
    for name in names:
        place = target / name
        if place.exists():
            kept.append(name)
            continue
        fresh = target / f".{name}.restoring"
        shutil.rmtree(fresh, ignore_errors=True)
        _copy_tree(source / name, fresh, lambda *_: None)
        fresh.rename(place)
    return kept


def _put_missing(source: Path, target: Path) -> None:
    for file in source.rglob("*"):
        place = target / file.relative_to(source)
        if file.is_file() and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)


def _copy_tree(source: Path, target: Path, look: Look) -> None:
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    sizes = {path: path.stat().st_size for path in files}
    total, done = sum(sizes.values()), 0
    look(done, total)
    target.mkdir(parents=True, exist_ok=True)
    for path in files:
        if path.name == MANIFEST and path.parent == source:
            continue
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
        _sync(place)
        done += sizes[path]
        look(done, total)
    look(total, total)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
