"""Values for Spark's tasks that spill to a file when they are large.

Spark keeps a function of more than a megabyte in a file of its own for as long as it runs, one
for each batch, and the sink's secrets are in the function.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import pyarrow as pa

from ..lake.storage import Folder

logger = logging.getLogger(__name__)

MOST_BYTES = 100_000  # within a function
_NAME = "spill"
_COLUMN = "content"

# What this process has read last, by folder and file: several batches read the same.
_read: dict[tuple[str, str], bytes] = {}
_MOST_READ = 4


class Spill(NamedTuple):
    """Bytes for tasks."""

    content: bytes = b""
    file: str = ""  # in the folder of the dead letters; "": the content is here

    @classmethod
    def of(cls, content: bytes, folder: Folder) -> Spill:
        """The bytes themselves, or a file that is written with them."""
        if len(content) <= MOST_BYTES:
            return cls(content)
        table = pa.table({_COLUMN: pa.array([content], pa.large_binary())})
        return cls(file=folder.write(table, _NAME, {}).path)

    def open(self, folder: Folder) -> bytes:
        """The bytes, in a task; SinkUnavailable: they cannot be read."""
        if not self.file:
            return self.content
        place = folder.uri, self.file
        if place not in _read:
            content = folder.read(self.file)[_COLUMN][0].as_py()
            for old in list(_read)[: len(_read) + 1 - _MOST_READ]:
                del _read[old]
            _read[place] = content
        return _read[place]

    def remove(self, folder: Folder) -> None:
        """Delete the file: no task needs it any more."""
        if self.file:
            discard(folder, self.file)


EMPTY = Spill()


def discard(folder: Folder, file: str) -> None:
    """Delete a file that is not needed any more, if the storage lets us."""
    try:
        folder.files.delete_file(file)
    except OSError as error:
        # Vacuuming the table of the dead letters deletes it.
        logger.debug("file=%s was not deleted, error=%s", file, type(error).__name__)
