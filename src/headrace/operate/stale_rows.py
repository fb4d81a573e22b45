"""Rows of sources that a comparison has left behind because it was killed."""

import shutil
from contextlib import suppress
from pathlib import Path

from ..log.folder import locked
from ..sinks.verification import ROWS_LOCK, ROWS_PREFIX


def remove_stale_rows(folder: Path) -> None:
    """Remove them for every sink, below the folder of comparisons; one that runs keeps its own."""
    for file in folder.glob(f"*/{ROWS_LOCK}"):
        with suppress(OSError), file.open("a+") as lock:
            if locked(lock):
                for stale in file.parent.glob(f"{ROWS_PREFIX}*"):
                    shutil.rmtree(stale, ignore_errors=True)
