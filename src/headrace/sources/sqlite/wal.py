"""Where transactions end, as a write-ahead log shows it.

Triggers cannot see a commit. But each of them counts on in the one row of `headrace_state`, so
every transaction with entries writes that row's page, and its last version of the page says
which entry was the transaction's last. The frames of the log say which pages were written, and
which frame ends a transaction. Nothing here is needed to know which entries there are, and a log
that cannot be read only means that transactions are merged.

A reader of the database keeps its write-ahead log from beginning anew, so while there is one,
nothing is overwritten that was committed after the reader began.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

_HEADER = struct.Struct(">8I")  # magic, format, page size, checkpoint, salts, checksums
_FRAME = struct.Struct(">6I")  # page, pages after the commit or 0, salts, checksums
_MAGIC = (0x377F0682, 0x377F0683)
_LEAF = 0x0D
_TABLE_HEAD = 8  # bytes before the cell pointers of a leaf
_PAGE_ONE = 100  # bytes of the database's header, which page 1 begins with


@dataclass(slots=True)
class Wal:
    """The write-ahead log of one database, read onwards."""

    path: str  # of the database
    uuid: str
    _salts: tuple[int, int] = (0, 0)
    _frame: int = 0  # the first that was not read yet

    def size(self) -> int:
        """How long the file is."""
        try:
            return os.stat(f"{self.path}-wal").st_size
        except FileNotFoundError:
            return 0

    def ends(self, page: int, upto: int) -> list[int]:
        """The last entries of transactions, in order, up to the entry `upto`.

        `page` is where the row of the state lies. Nothing: the log does not reach that entry.
        """
        try:
            with open(f"{self.path}-wal", "rb") as file:
                return self._ends(file.fileno(), page, upto)
        except FileNotFoundError:
            return []

    def _ends(self, file: int, page: int, upto: int) -> list[int]:
        head = os.pread(file, _HEADER.size, 0)
        if len(head) < _HEADER.size:
            return []
        magic, _, size, _, *salts, _, _ = _HEADER.unpack(head)
        if magic not in _MAGIC:
            return []
        if (salts[0], salts[1]) != self._salts:
            self._salts, self._frame = (salts[0], salts[1]), 0
        return self._frames(file, size or 65536, page, upto)

    def _frames(self, file: int, size: int, page: int, upto: int) -> list[int]:
        found: list[int] = []
        frame, last = self._frame, None
        while True:
            at = _HEADER.size + frame * (_FRAME.size + size)
            head = os.pread(file, _FRAME.size, at)
            if len(head) < _FRAME.size:
                return []
            number, commit, *salts, _, _ = _FRAME.unpack(head)
            if (salts[0], salts[1]) != self._salts:
                return []
            frame += 1
            if number == page:
                content = os.pread(file, size, at + _FRAME.size)
                last = self._last(content[_PAGE_ONE:] if page == 1 else content, content)
            if commit and last is not None:
                found.append(last)
                self._frame = frame
                if last >= upto:
                    return found if last == upto else []
                last = None

    def _last(self, content: bytes, page: bytes) -> int | None:
        """What the row of the state says; None: the page holds something else by now."""
        try:
            if content[0] != _LEAF or content[3:5] != b"\0\1":
                return None
            at = int.from_bytes(content[_TABLE_HEAD : _TABLE_HEAD + 2], "big")
            values = _record(page, at)
        except (IndexError, ValueError):
            return None
        if len(values) != 3 or values[1] != self.uuid.encode():
            return None
        return values[2] if isinstance(values[2], int) else None


def _record(page: bytes, at: int) -> list[int | bytes | None]:
    """The values of a cell; only those that the state's row can have."""
    _, at = _varint(page, at)  # the length of the record
    _, at = _varint(page, at)  # the rowid
    length, types_at = _varint(page, at)
    body = at + length
    values: list[int | bytes | None] = []
    while types_at < at + length:
        kind, types_at = _varint(page, types_at)
        value, body = _value(page, kind, body)
        values.append(value)
    return values


_SIZES = (0, 1, 2, 3, 4, 6, 8)


def _value(page: bytes, kind: int, at: int) -> tuple[int | bytes | None, int]:
    if kind == 0:
        return None, at
    if kind < len(_SIZES):
        end = at + _SIZES[kind]
        return int.from_bytes(page[at:end], "big", signed=True), end
    if kind in (8, 9):
        return kind - 8, at
    if kind >= 13 and kind % 2:
        end = at + (kind - 13) // 2
        return page[at:end], end
    raise ValueError("not a row of the state")


def _varint(page: bytes, at: int) -> tuple[int, int]:
    value = 0
    for number in range(9):
        byte = page[at]
        at += 1
        if number == 8:
            return value << 8 | byte, at
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at
    return value, at
