"""Files that only expired snapshots have."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from pyiceberg.io import FileIO
from pyiceberg.manifest import ManifestFile
from pyiceberg.table.snapshots import Snapshot

logger = logging.getLogger(__name__)


def delete_unreachable(io: FileIO, gone: Sequence[Snapshot], kept: Sequence[Snapshot]) -> None:
    """Delete what no snapshot has any more: manifest lists, manifests, data files.

    A file that cannot be deleted stays: nobody reads it.
    """
    dead = {each.manifest_path: each for each in _manifests(io, gone)}
    alive: dict[str, ManifestFile] = {}
    for snapshot in reversed(kept):
        alive |= {each.manifest_path: each for each in _manifests(io, [snapshot])}
        dead = {path: each for path, each in dead.items() if path not in alive}
        if not dead:
            break  # as is usual: an append keeps all manifests that were there
    # A manifest that was merged with others is dead, and its files are in the merged one.
    files = _files(io, dead.values())
    if files:
        files -= _files(io, alive.values())
    lists = {each.manifest_list for each in gone}
    # If this is interrupted, the rest stays too: the table does not name these snapshots any more.
    delete_files(io, (*sorted(files), *sorted(dead), *sorted(lists)))


def delete_files(io: FileIO, paths: Iterable[str]) -> None:
    """Delete files that no snapshot has; one that cannot be deleted stays."""
    for path in paths:
        try:
            io.delete(path)
        except OSError:
            logger.warning("a file that no snapshot has stays path=%s", path)


def _manifests(io: FileIO, snapshots: Iterable[Snapshot]) -> Iterator[ManifestFile]:
    for snapshot in snapshots:
        yield from snapshot.manifests(io)


def _files(io: FileIO, manifests: Iterable[ManifestFile]) -> set[str]:
    return {
        entry.data_file.file_path
        for manifest in manifests
        for entry in manifest.fetch_manifest_entry(io, discard_deleted=True)
    }
