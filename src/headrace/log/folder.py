"""The folder of a log and what is beside it: for its user alone, and errors that say what to do."""

import errno
import fcntl
import logging
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..errors import LogDamaged, LogError, LogFailed, LogInUse
from .files import HINT, is_exhausted

logger = logging.getLogger(__name__)

_FOLDER = 0o700
_OTHERS = 0o077
_FLOCK = "hhqqi4x"  # struct flock of Linux on 64 bits: type, whence, start, length, pid

_HINTS = {
    errno.ENOTDIR: "Name a folder in data_dir.",
    errno.EEXIST: "Name a folder in data_dir.",
    errno.ENOSPC: LogFailed.hint,
    errno.EROFS: "Mount it for writing, or set another data_dir.",
}
_FIX = "Check the owner and the mode of data_dir in the config, and of the folders above it."


def make_private(folder: Path) -> None:
    """Make a folder, or what there is of it, readable by its user alone.

    LogError: it is not a folder, or cannot be made.
    """
    try:
        folder.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
        _expect_own_link(folder)
        _close_to_others(folder, loudly=True)
        for entry in os.scandir(folder):
            if entry.is_file(follow_symlinks=False):
                _close_to_others(Path(entry.path))
    except OSError as error:
        raise unusable(folder, error) from error


def unusable(folder: Path, error: OSError) -> LogError:
    """What to report when the system refuses a folder or a file in it."""
    where = error.filename or folder
    reason = "is a file, not a folder" if error.errno == errno.EEXIST else error.strerror
    return LogError(f"{where}: {reason}", hint=_HINTS.get(error.errno or 0, _FIX))


def unopened(folder: Path, error: Exception) -> LogError:
    """What to report when RocksDB cannot open the log."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "/LOCK:" in text and "Permission denied" not in text and "Read-only" not in text:
        return LogInUse(f"another process is writing the log in {folder}{_holder(folder)}")
    if is_corruption(error):
        return LogDamaged(f"the log in {folder} is damaged; RocksDB says: {text}")
    if is_exhausted(error):
        return LogError(f"the log in {folder} cannot be opened: {text}", hint=HINT)
    for number, hint in _HINTS.items():
        if os.strerror(number) in text:
            return LogError(f"the log in {folder} cannot be opened: {text}", hint=hint)
    return LogError(f"the log in {folder} cannot be opened: {text}", hint=_FIX)


def is_corruption(error: BaseException) -> bool:
    """Whether RocksDB says that what it read is not what was written."""
    return str(error).startswith("Corruption")


def locked(file: IO[Any]) -> bool:
    """Lock a file for this process alone; False: another one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Report what RocksDB cannot read of the log as an error of ours."""
    try:
        yield
    except Exception as error:
        # RocksDB's errors have no class of their own.
        if type(error) is not Exception:
            raise
        text = str(error).splitlines()[0]
        if is_exhausted(error):
            raise LogError(f"the log in {folder} cannot be read: {text}", hint=HINT) from error
        raise LogDamaged(f"the log in {folder} cannot be read; RocksDB says: {text}") from error


def _holder(folder: Path) -> str:
    """Which process has the lock, as far as the system says."""
    try:
        with (folder / "LOCK").open("rb") as file:
            wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, wanted))
    except (OSError, struct.error):
        return ""
    kind, pid = found[0], found[-1]
    return f": process {pid}" if kind != fcntl.F_UNLCK and pid > 0 else ""


def _close_to_others(path: Path, *, loudly: bool = False) -> None:
    found = path.stat()
    if found.st_uid != os.geteuid():
        if loudly:
            logger.warning(
                "another user owns the folder; run Headrace as one user folder=%s owner=%d user=%d",
                path,
                found.st_uid,
                os.geteuid(),
            )
        return
    if found.st_mode & _OTHERS:
        path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
        if loudly:
            logger.warning(
                "folder was open to other users and is closed folder=%s was=%o now=%o",
                path,
                stat.S_IMODE(found.st_mode),
                stat.S_IMODE(found.st_mode) & ~_OTHERS,
            )


def _expect_own_link(folder: Path) -> None:
    """A link that another user made could lead anywhere, tomorrow elsewhere."""
    link = folder.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise LogError(
            f"{folder} is a link that user {link.st_uid} made, and leads to {folder.resolve()}",
            hint="Name the folder itself in data_dir, or make the link as the user that runs "
            "Headrace.",
        )
