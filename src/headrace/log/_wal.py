"""Making RocksDB's write-ahead log durable without holding up other threads.

rocksdict keeps Python's lock through a synced write, and a disk may take anything from 0.3 ms to
half a second for it: long enough to delay every reader and to stop reading from the database. So
batches are written unsynced, which hands them to the operating system, and the files are synced
here, where the lock is let go.
"""

import os
from pathlib import Path

# Not everywhere; the difference is only that times of the file are written as well.
_sync_file = getattr(os, "fdatasync", os.fsync)


class WriteAheadLog:
    """The files `<number>.log` of a RocksDB; the highest number is being written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._newest = 0

    def sync(self) -> None:
        """When this returns, everything written before it survives a power failure."""
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
