"""How far the log is durable, in a file beside RocksDB's: so that a lost tail is noticed.

RocksDB drops what follows a write that it cannot read, because the last one may be torn after a
power failure. The mark says what was synced: nothing up to it may be missing.
"""

import logging
import os
import threading
import weakref
import zlib
from contextlib import suppress
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

FILE = "SYNCED"
MARK_SECONDS = 1.0  # between two marks
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SyncedMark(msgspec.Struct, frozen=True):
    """What was durable when it was written."""

    sequence: int = 0  # the last committed change
    writes: int = 0  # RocksDB's own number of the last write
    boot: str = ""  # of the machine: the same one means that no power failed since


def boot_id() -> str:
    """Another one after each start of the machine; "": not known."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


def read_mark(folder: Path) -> SyncedMark:
    """The mark of a log; zeros: there is none, or it was being written when the power failed."""
    try:
        check, _, content = (folder / FILE).read_bytes().rstrip().partition(b" ")
        if int(check, 16) != zlib.crc32(content):
            # No LogDamaged for a flipped byte: who follows the log may read the file while it is
            # overwritten, and a first write that the power cut may leave zeros of the full length.
            return SyncedMark()
        return msgspec.json.decode(content, type=SyncedMark)
    except (FileNotFoundError, ValueError, msgspec.DecodeError):
        return SyncedMark()


class MarkKeeper:
    """Writes the mark every second, in a thread: a sync may take long, and no change waits."""

    def __init__(self, folder: Path) -> None:
        self._file = file = _MarkFile(folder / FILE)
        # The thread has the file alone: it ends, too, when nobody has closed the log.
        self._thread = threading.Thread(target=file.work, name="log mark", daemon=True)
        weakref.finalize(self, file.closing.set)

    def take(self, sequence: int, writes: int) -> None:
        """Note what is durable now; not by two threads at once."""
        if not self._file.due[1]:
            self._thread.start()
        self._file.due = sequence, writes

    def close(self) -> None:
        """Write the last mark."""
        self._file.closing.set()
        if self._thread.ident is not None:
            self._thread.join()


class _MarkFile:
    def __init__(self, path: Path) -> None:
        self.due = self._written = (0, 0)
        self.closing = threading.Event()
        self._path = path
        self._boot = boot_id()
        self._warned = False

    def work(self) -> None:
        """Write what is due, until it is closed."""
        while not self.closing.wait(MARK_SECONDS):
            self._write()
        self._write()

    def _write(self) -> None:
        due = self.due
        if due == self._written:
            return
        content = msgspec.json.encode(SyncedMark(*due, self._boot))
        line = b"%08x %b" % (zlib.crc32(content), content)
        try:
            # Over the old one, padded: what is within one sector is written whole or not at all.
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, line.ljust(200), 0)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            # The log itself reports a disk that fails; without a mark, less is noticed.
            if not self._warned:
                logger.warning("the mark of the log was not written error=%s", error)
            self._warned = True
            return
        self._written = due
