"""XA transactions in the statements of a binary log. No I/O."""

from __future__ import annotations

import re

import msgspec

from ...event import Change

XA = re.compile(r"XA\s+(?P<verb>START|BEGIN|END|COMMIT|ROLLBACK)\s+(?P<xid>[^ ]+)", re.IGNORECASE)
_PART = re.compile(r"(?P<hex>x?)'(?P<text>[^']*)'", re.IGNORECASE)


class Prepared(msgspec.Struct, frozen=True):
    """An XA transaction whose rows are known and whose end is not."""

    changes: list[Change]
    file: str
    begin: int


def xid(text: str) -> str:
    """The name of an XA transaction, however it is written: X'6162',X'',1."""
    parts = [
        part["text"].lower() if part["hex"] else part["text"].encode().hex()
        for part in _PART.finditer(text)
    ]
    number = text.rpartition(",")[2]
    gtrid, bqual = [*parts, "", ""][:2]
    return f"{gtrid}.{bqual}.{number if number.isdecimal() else 1}"
