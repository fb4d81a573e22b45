"""Lines of COPY -> JSON images, a column of many rows at a time. No I/O.

The same values, encoders and templates as `rows`; only that what can be decided for a whole
column (has it a null, an escape, a character that JSON quotes?) is not tested again for each row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from ...change.event import Table
from ...errors import DecodeError, ProtocolError
from .values import Encode, as_quoted, as_text

_NULL = b"\\N"
# What may stand in a JSON string only escaped; tab is COPY's separator, a backslash its escape.
_special = re.compile(rb'["\x00-\x08\x0a-\x1f]').search
_quote = msgspec.json.Encoder().encode


class Lines:
    """Turns lines of one version of a table, each with its ctid in front, into JSON."""

    def __init__(self, table: Table, encoders: Sequence[Encode | None]) -> None:
        self._name = table.name
        self._labels = [_quote(column.name).replace(b"%", b"%%") + b":" for column in table.columns]
        self._encoders = tuple(encoders)
        self._keys = [at for at, column in enumerate(table.columns) if column.key]

    def images(self, lines: Sequence[bytes]) -> tuple[Sequence[bytes | None], list[bytes]]:
        """The key of each line, and the image of each; lines keep their newlines."""
        # COPY escapes tabs and newlines inside values, so all that are left are separators.
        width = len(self._encoders) + 1
        fields = b"".join(lines).replace(b"\n", b"\t").split(b"\t")
        if len(fields) != width * len(lines) + 1:
            raise ProtocolError(f"COPY sent another number of columns of {self._name}")
        slots, columns = [], []
        for at, encode in enumerate(self._encoders, 1):
            slot, column = _column(fields[at::width], encode)
            slots.append(self._labels[at - 1] + slot)
            columns.append(column)
        template = b"{%b}" % b",".join(slots)
        images = [template % row for row in zip(*columns, strict=True)]
        return self._key_images(slots, columns, len(lines)), images

    def _key_images(
        self, slots: Sequence[bytes], columns: Sequence[Sequence[bytes]], count: int
    ) -> Sequence[bytes | None]:
        if not self._keys:
            return [None] * count
        template = b"{%b}" % b",".join(slots[at] for at in self._keys)
        return [template % row for row in zip(*[columns[at] for at in self._keys], strict=True)]


def _column(values: list[bytes], encode: Encode | None) -> tuple[bytes, list[bytes]]:
    """How the template holds a column's values, and what it is filled with."""
    whole = b"\t".join(values)
    if b"\\" in whole:
        return b"%b", [_escaped(value, encode) for value in values]
    if encode is None:
        return b"%b", values
    if encode is as_quoted or (encode is as_text and _is_plain(whole)):
        return b'"%b"', values
    return b"%b", list(map(encode, values))


def _is_plain(whole: bytes) -> bool:
    if _special(whole):
        return False
    if whole.isascii():
        return True
    try:
        whole.decode()
    except UnicodeDecodeError:
        return False  # and encoding it value by value says which
    return True


def _escaped(value: bytes, encode: Encode | None) -> bytes:
    if value == _NULL:
        return b"null"
    value = unescape(value)
    return value if encode is None else encode(value)


_ESCAPES = {
    b"b": b"\b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
    b"\\": b"\\",
}
_escape = re.compile(rb"\\(.?)", re.DOTALL).sub


def unescape(field: bytes) -> bytes:
    """A field of COPY's text format as it was before COPY escaped it."""
    if b"\\" not in field:
        return field
    try:
        return _escape(lambda found: _ESCAPES[found[1]], field)
    except KeyError:
        raise DecodeError("COPY sent an escape that it does not define") from None
