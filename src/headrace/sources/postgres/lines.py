"""Lines of COPY -> a block of rows, or JSON images; a column of many rows at a time. No I/O.

The same values, encoders and templates as `rows`; only that what can be decided for a whole
column (has it a null, an escape, a character that JSON quotes?) is not tested again for each row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from ...change.block import ColumnText, column_text, json_text
from ...change.event import Table
from ...change.printed import Encode, as_quoted
from ...errors import DecodeError, ProtocolError
from .large import unescaped
from .values import PRINTED, as_text

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

    def columns(self, lines: list[bytes]) -> list[ColumnText] | None:
        """The columns of the same rows, for a block; None: they must be stored one by one.

        Values that a block cannot keep as they were printed are written as JSON here, so that
        what cannot be read is found now, and not by whoever reads the log.
        """
        fields = self._fields(list(lines))
        columns: list[ColumnText] = []
        for encode in self._encoders:
            values, printed = fields.pop(), PRINTED.get(encode)
            found = None if printed is None else column_text(values, printed)
            if found is None:
                slot, written = _column(values, encode)
                found = json_text(written) if slot == b"%b" else None
            if found is None:
                return None
            columns.append(found)
        return columns

    def images(self, lines: list[bytes]) -> tuple[Sequence[bytes | None], list[bytes]]:
        """The key of each line, and the image of each; lines keep their newlines.

        The list is emptied: a line may have many megabytes, which are not held twice.
        """
        count = len(lines)
        fields = self._fields(lines)
        slots, columns = [], []
        for label, encode in zip(self._labels, self._encoders, strict=True):
            slot, column = _column(fields.pop(), encode)
            slots.append(label + slot)
            columns.append(column)
        template = b"{%b}" % b",".join(slots)
        images = [template % row for row in zip(*columns, strict=True)]
        return self._key_images(slots, columns, count), images

    def _fields(self, lines: list[bytes]) -> list[list[bytes]]:
        """The values of each column, the last column first."""
        # COPY escapes tabs and newlines inside values, so all that are left are separators.
        width, count = len(self._encoders) + 1, len(lines)
        whole = b"".join(lines)
        lines.clear()
        fields = whole.replace(b"\n", b"\t").split(b"\t")
        if len(fields) != width * count + 1:
            raise ProtocolError(f"COPY sent another number of columns of {self._name}")
        return [fields[at::width] for at in range(width - 1, 0, -1)]

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
        del whole
        for at in range(len(values)):
            values[at] = _escaped(values, at, encode)
        return b"%b", values
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


def _escaped(values: list[bytes], at: int, encode: Encode | None) -> bytes:
    """A value as JSON; it is taken out of the list, so that a large one is not held twice."""
    value, values[at] = values[at], b""
    if value == _NULL:
        return b"null"
    value = unescape(value)
    return value if encode is None else encode(value)


def unescape(field: bytes) -> bytes:
    """A field of COPY's text format as it was before COPY escaped it."""
    if b"\\" not in field:
        return field
    try:
        return unescaped(field)
    except ValueError:
        raise DecodeError("COPY sent an escape that it does not define") from None
