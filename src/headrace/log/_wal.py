"""Making RocksDB's write-ahead log durable without holding up other threads.

rocksdict keeps Python's lock through a synced write, and a disk may take anything from 0.3 ms to
half a second for it: long enough to delay every reader and to stop reading from the database. So
batches are written unsynced, which hands them to the operating system, and the files are synced
here, where the lock is let go.
"""

import logging
import os
import time
from pathlib import Path

from .files import HINT, is_exhausted

logger = logging.getLogger(__name__)

RETRY_SECONDS = 60.0  # for a file to become free
_PAUSE_SECONDS = 0.1

# Not everywhere; the difference is only that times of the file are written as well.
_sync_file = getattr(os, "fdatasync", os.fsync)


class WriteAheadLog:
    """The files `<number>.log` of a RocksDB; the highest number is being written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._newest = 0
        # Given up for a moment where no other file can be opened.
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        """Let go of what is kept open."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def sync(self) -> None:
        """When this returns, everything written before it survives a power failure."""
        until = time.monotonic() + RETRY_SECONDS
        warned = False
        while True:
            try:
                self._sync_all()
            except OSError as error:
                if not is_exhausted(error) or time.monotonic() >= until:
                    raise
                if self._spare is None:
                    if not warned:
                        logger.warning("log waits for a file error=%s hint=%s", error, HINT)
                    warned = True
                    time.sleep(_PAUSE_SECONDS)
                self.close()
            else:
                break
        if self._spare is None:
            self._take_spare()

    def _take_spare(self) -> None:
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError as error:
            if not is_exhausted(error):
                raise

    def _sync_all(self) -> None:
        # RocksDB begins a new file now and then; an older one may still hold unsynced writes.
        numbers = sorted(number for number in self._numbers() if number >= self._newest)
        for number in numbers:
            self._sync(self._folder / f"{number:06d}.log")
        if numbers and numbers[-1] > self._newest:
            self._sync(self._folder)
            self._newest = numbers[-1]

    def _numbers(self) -> list[int]:
        names = os.listdir(self._folder)
        return [int(name[:-4]) for name in names if name.endswith(".log") and name[:-4].isdigit()]

    def _sync(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return  # RocksDB has moved all of it into its tables, which are synced, and removed it
        try:
            _sync_file(file)
        finally:
            os.close(file)
