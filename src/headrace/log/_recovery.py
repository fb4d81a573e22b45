"""Opening RocksDB for writing, without a write-ahead log that has silently become shorter.

    RocksDB reads all of it            nothing is missing
    it stops, and nothing follows      a torn last write after a power failure, or a kill: normal
    it stops, and writes follow        a flipped byte: LogDamaged, and no file is touched
    it ends below what was synced      the same

RocksDB itself would drop what follows, and delete the files. So its strictest mode comes first, and
only where that refuses, and nothing acknowledged is missing, the tail is dropped.
"""

import functools
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rocksdict import AccessType, DBRecoveryMode, Options, Rdict

from ..errors import LogDamaged
from . import _layout as layout
from ._synced import SyncedMark, boot_id, read_mark
from .folder import is_corruption, unopened

logger = logging.getLogger(__name__)

_BLOCK = 32_768  # in which RocksDB writes its log
_HEAD = struct.Struct("<IHB")  # masked checksum, length, type
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_WRITE = struct.Struct("<Q")  # at the start of a write: its number

_POLYNOMIAL = 0x82F63B78  # of CRC-32C


class _Fragment(NamedTuple):
    """A piece of a write."""

    write: int | None  # the number of the write that begins with it; None: it goes on
    checksum: int
    covered: memoryview  # what the checksum is of: the type, and the piece itself

    @property
    def whole(self) -> bool:
        """Whether it is as it was written."""
        found = _crc32c(self.covered)
        return self.checksum == ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF


def open_database(folder: Path, options: Callable[[], Options]) -> Rdict:
    """The database of a log, for its one writer; LogDamaged: changes were lost."""
    mark = read_mark(folder)
    if mark.sequence and not (folder / "CURRENT").exists():
        raise LogDamaged(f"the files of the log in {folder} are gone, but for its mark")
    try:
        db = _opened(folder, options, DBRecoveryMode.absolute_consistency())
    except Exception as error:
        if not is_corruption(error):
            raise unopened(folder, error) from error
        _expect_torn(folder, options, mark)
        try:
            db = _opened(folder, options, DBRecoveryMode.point_in_time())
        except Exception as error:
            raise unopened(folder, error) from error
        logger.warning("the last write was cut short, and nothing of it was acknowledged")
    if db.latest_sequence_number() < mark.writes:
        damage = _lost(folder, db, mark)
        db.close()
        raise damage
    return db


def _opened(
    folder: Path,
    options: Callable[[], Options],
    mode: DBRecoveryMode,
    access: AccessType | None = None,
) -> Rdict:
    opts = options()
    opts.set_wal_recovery_mode(mode)
    if access is not None:
        return Rdict(str(folder), opts, {layout.STATE: opts}, access)
    return Rdict(str(folder), opts, {layout.STATE: opts})


def _expect_torn(folder: Path, options: Callable[[], Options], mark: SyncedMark) -> None:
    """Raise LogDamaged unless RocksDB would drop nothing but what was never acknowledged."""
    try:
        mode, access = DBRecoveryMode.point_in_time(), AccessType.read_only()
        db = _opened(folder, options, mode, access)
    except Exception as error:
        raise unopened(folder, error) from error
    try:
        last = db.latest_sequence_number()
        if last < mark.writes or _is_followed(folder, last, since_boot=mark.boot == boot_id()):
            raise _lost(folder, db, mark)
    finally:
        db.close()


def _lost(folder: Path, db: Rdict, mark: SyncedMark) -> LogDamaged:
    has = int(db.get_column_family(layout.STATE).get(layout.SEQUENCE) or 0)
    had = f"to {mark.sequence} and maybe beyond" if mark.sequence > has else "on"
    return LogDamaged(
        f"the log in {folder} lost its tail: its write-ahead log cannot be read after change "
        f"{has}, and changes from {has + 1} {had} were acknowledged"
    )


def _is_followed(folder: Path, last: int, *, since_boot: bool) -> bool:
    """Whether acknowledged writes follow the one that RocksDB could not read, after `last`.

    Pieces of one transaction are synced together, at its end. If the power failed before that,
    the disk may have a later piece and not an earlier one: then only a write after the end of a
    transaction shows that all before it was synced.
    """
    committed = since_boot
    for fragment in _fragments(folder, last + 1):
        # The write right after `last` is the one that is torn; its beginning may be whole.
        if fragment.write is not None and fragment.write > last + 1 and committed:
            return True
        committed = committed or layout.SEQUENCE in bytes(fragment.covered)
    return False


def _fragments(folder: Path, write: int) -> Iterator[_Fragment]:
    """What is whole of the write of that number and of those after it, in all files."""
    files = [path for path in folder.glob("*.log") if path.stem.isdigit()]
    reached = False
    for path in sorted(files, key=lambda path: int(path.stem)):
        for fragment in _read(memoryview(path.read_bytes())):
            reached = reached or (fragment.write is not None and fragment.write >= write)
            if reached and fragment.whole:
                yield fragment


def _read(data: memoryview) -> Iterator[_Fragment]:
    at = 0
    while at + _HEAD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:
            at += left
            continue
        check, length, kind = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or _HEAD.size + length > left:
            at += left  # zeros, or a damaged head: the next block has one that is known
            continue
        if end > len(data):
            return
        begins = kind in (_FULL, _FIRST) and length >= _WRITE.size
        number = _WRITE.unpack_from(data, at + _HEAD.size)[0] if begins else None
        yield _Fragment(number, check, data[at + _HEAD.size - 1 : end])
        at = end


@functools.cache
def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)  # noqa: PLW2901 - it is shifted out
        table.append(value)
    return table


def _crc32c(data: memoryview) -> int:
    """The checksum that RocksDB uses; only what follows a torn write is looked at so slowly."""
    table, value = _table(), 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF
