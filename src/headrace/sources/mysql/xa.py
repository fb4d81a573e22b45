"""XA transactions in the statements of a binary log. No I/O."""

from __future__ import annotations

import re

import msgspec

from ...change.event import Change
from ...errors import SourceRefused

XA = re.compile(r"XA\s+(?P<verb>START|BEGIN|END|COMMIT|ROLLBACK)\s+(?P<xid>[^ ]+)", re.IGNORECASE)
_PART = re.compile(r"(?P<hex>x?)'(?P<text>[^']*)'", re.IGNORECASE)


_CHANGE = 500  # bytes that a change takes beside its images, about


class Prepared(msgspec.Struct, frozen=True):
    """An XA transaction whose rows are known and whose end is not."""

    changes: list[Change]
    file: str
    begin: int
    size: int = 0  # bytes that its changes take, about


class Held:
    """The room for rows that are known before it is decided whether they count."""

    def __init__(self, limit_mb: int) -> None:
        self._limit_mb = limit_mb
        self._prepared = 0  # bytes of transactions that wait for their end
        self._counted = 0  # changes of the one at hand
        self._size = 0  # bytes of these

    def look(self, changes: list[Change], where: str) -> None:
        """Count what has come to the transaction at hand; SourceRefused: it is too much."""
        for change in changes[self._counted :]:
            self._size += _CHANGE + len(change.before or b"") + len(change.after or b"")
        self._counted = len(changes)
        if self._prepared + self._size > self._limit_mb << 20:
            raise SourceRefused(
                f"{where}: the rows of XA transactions that are prepared and not decided take more "
                f"than xa_memory_mb, which is {self._limit_mb}",
                hint="Give the source a larger xa_memory_mb, and the machine the memory, or run "
                "`headrace snapshot SOURCE` for a full copy when they are decided.",
            )

    def prepare(self) -> int:
        """The transaction at hand waits now; gives its size."""
        size, self._size, self._counted = self._size, 0, 0
        self._prepared += size
        return size

    def decide(self, size: int) -> None:
        """One does not wait any more."""
        self._prepared -= size


def xid(text: str) -> str:
    """The name of an XA transaction, however it is written: X'6162',X'',1."""
    parts = [
        part["text"].lower() if part["hex"] else part["text"].encode().hex()
        for part in _PART.finditer(text)
    ]
    number = text.rpartition(",")[2]
    gtrid, bqual = [*parts, "", ""][:2]
    return f"{gtrid}.{bqual}.{number if number.isdecimal() else 1}"
