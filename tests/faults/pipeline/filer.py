"""A process that carries a log into files, and kills itself at a named point.

python -m tests.faults.pipeline.filer FOLDER
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path

from headrace.pipeline.query import Batches
from headrace.sinks.files.ledger import FilesLedger
from headrace.sinks.files.sink import Files, FilesWriter
from tests.faults.pipeline.dying import Killer, serve


class Point(StrEnum):
    """Where the process may die."""

    STAGED = "the tasks have written files, and nothing is committed"
    WRITTEN = "the entry is written, and has no name yet"
    COMMITTED = "the entry counts, and no file is at its place"
    ONE_MOVED = "one file is at its place, and others are not"
    MOVED = "all files are at their places, and Spark does not know"


def _of_a_day(_: Path, target: object) -> bool:
    return "day=" in str(target)  # Spark's own notes are moved as well


def main(folder: Path) -> int:
    """Run for each line of standard input."""
    killer = Killer()
    killer.around(FilesWriter, "_staged", after=Point.STAGED)
    killer.around(FilesLedger, "_name", before=Point.WRITTEN)
    killer.around(FilesLedger, "commit", after=Point.COMMITTED)
    killer.around(Path, "replace", after=Point.ONE_MOVED, counts=_of_a_day)
    killer.around(Batches, "__call__", after=Point.MOVED)
    return serve(folder, Files(name="drawer", path=str(folder / "files")), killer)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
