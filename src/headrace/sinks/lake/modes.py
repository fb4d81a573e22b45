"""Who may read a lake in a folder: its user alone, unless the sink's `mode` says otherwise."""

import logging
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import ConfigError

logger = logging.getLogger(__name__)

PRIVATE = "0700"
_OTHERS = 0o077


def expect_mode(mode: str) -> None:
    """Raise ConfigError when a sink's `mode` is none."""
    if not re.fullmatch("0?7[0-7][0-7]", mode):
        raise ConfigError(
            f'mode: {mode!r} is no mode of a folder; write "0700", or "0755" where all users of '
            "the machine may read it"
        )


def make_folder(path: str, mode: str) -> None:
    """Make the folder of a sink; one that is there stays as it is, with a warning."""
    if "://" in path:
        return
    folder = Path(path)
    if folder.exists():
        if warning := difference(path, mode):
            logger.warning("%s", warning)
        return
    folder.mkdir(mode=int(mode, 8), parents=True, exist_ok=True)
    folder.chmod(int(mode, 8))  # whatever the process takes away from new files


def difference(path: str, mode: str) -> str:
    """What to say of a folder that others may read although `mode` says no, or the reverse."""
    found, wanted = _found(path), int(mode, 8) & _OTHERS
    if found is None or found & _OTHERS == wanted:
        return ""
    if found & _OTHERS & ~wanted:
        return (
            f"{path} is open to other users (mode {found:04o}): run `chmod {mode} {path}`, or set "
            f'mode: "{found:04o}" in its sink if they are to read it'
        )
    return (
        f"{path} has the mode {found:04o}, and its sink the setting mode: {mode!r}, which is for "
        f"new folders: run `chmod -R u=rwX,go={_letters(wanted)} {path}`"
    )


def umask_of(sinks: Iterable[Any]) -> int:
    """What a pipeline takes away from the files that it makes.

    The folder of each sink has a mode of its own; what is within may be as open as the widest.
    """
    widest = 0
    for sink in sinks:
        path, mode = getattr(sink, "path", None), getattr(sink, "mode", None)
        if isinstance(path, str) and isinstance(mode, str):
            widest |= int(mode, 8) | (_found(path) or 0)
    return _OTHERS & ~widest


def _found(path: str) -> int | None:
    """The mode of a folder; None: there is none, or it is not of this machine."""
    try:
        return None if "://" in path else stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return None


def _letters(wanted: int) -> str:
    return "rX" if wanted & 0o044 else ""
