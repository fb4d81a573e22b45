"""Files of a table that nobody refers to any more, deleted after a while.

A file is noted when it is found to be unused, and deleted by a later vacuum, once it has been noted
for as long as versions are kept: a task may be about to commit it, a reader may be reading it. The
log could not say this: it keeps removed files for a shorter time.
"""

import re
import time
from collections.abc import Collection, Iterator
from datetime import timedelta

import msgspec

from .deltalog import TableState
from .objects import LEFTOVER
from .storage import OWN_FOLDER, Folder
from .vectors import file_of

_NOTES = f"{OWN_FOLDER}/unused.json"
# With a number behind it, or without a name: what a writer that was killed left of a file.
_ours = re.compile(
    r".*\.parquet(#[0-9]+)?"
    r"|(.*/)?deletion_vector_[0-9a-f-]{36}\.bin"
    rf"|(.*/)?{re.escape(LEFTOVER)}[0-9a-f]{{32}}"
).fullmatch


class UnusedFiles(msgspec.Struct):
    """What a vacuum has noted, by the time when it did."""

    since: dict[int, list[str]] = {}  # milliseconds since 1970


def vacuum(folder: Folder, state: TableState, keep: timedelta) -> int:
    """Delete what earlier calls have found unused for so long; returns how many files."""
    now = time.time_ns() // 1_000_000
    with folder.reached(OWN_FOLDER):
        unused = set(_unused(folder, state))
        known = _noted(folder)
        notes: dict[int, list[str]] = {}
        for moment, paths in known.since.items():
            if still := [path for path in paths if path in unused]:
                notes[moment] = still
                unused.difference_update(still)
        oldest = now - keep // timedelta(milliseconds=1)
        gone = [path for moment, paths in notes.items() if moment <= oldest for path in paths]
        folder.objects.delete(gone)
        notes = {moment: paths for moment, paths in notes.items() if moment > oldest}
        left = UnusedFiles(notes | ({now: sorted(unused)} if unused else {}))
        if left != known:
            folder.objects.write(_NOTES, msgspec.json.encode(left))
    return len(gone)


def _noted(folder: Folder) -> UnusedFiles:
    content = folder.objects.read(_NOTES)
    try:
        return msgspec.json.decode(content, type=UnusedFiles) if content else UnusedFiles()
    except msgspec.DecodeError:
        return UnusedFiles()  # they are noted again


def _unused(folder: Folder, state: TableState) -> Iterator[str]:
    vectors = [file.vector for file in state.files.values() if file.vector]
    used = {file_of(folder, vector) for vector in vectors} | state.files.keys()
    for entry in folder.objects.entries(""):
        free = _ours(entry.path) and entry.path not in used
        if free and not _hidden(entry.path, state.metadata.partition_columns):
            yield entry.path


def _hidden(path: str, partition_columns: Collection[str]) -> bool:
    """Whether a file lies in a folder of the log, of ours or of another tool."""
    folders = path.split("/")[:-1]
    values = tuple(f"{name}=" for name in partition_columns)
    return any(name[:1] in ("_", ".") and not name.startswith(values) for name in folders)
