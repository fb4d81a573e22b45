"""PostgreSQL rows -> JSON images. No I/O.

Values are sent as text, and most text is its own JSON, so a row becomes its image by filling a
template of bytes; no Python value is made of any column.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import msgspec

from ...change.event import BeforeKind, Table
from ...change.printed import Encode, as_quoted
from ...errors import DecodeError, ProtocolError
from .large import LARGE
from .lines import Lines
from .values import encode_large

_HEAD = struct.Struct(">BI")
_COUNT = struct.Struct(">H")
# A column's head is read as kind and length at once, although null has no length.
_PADDING = b"\0\0\0\0"

_NONE = BeforeKind.NONE
_SHORTEST = 8  # type, relation, kind of tuple, number of columns

_TEXT, _NULL, _UNCHANGED = b"tnu"
_WITHOUT_LENGTH = b"nu"
_NEW, _KEY, _OLD = b"NKO"

_split = re.compile(rb"t\0\0\0.", re.DOTALL).split
_quote = msgspec.json.Encoder().encode


# What a row message says: key, before, before_kind, after, changed, unchanged, in the order of
# Change's fields. A plain tuple, because one is made for every row.
Row = tuple[
    bytes | None,
    bytes | None,
    BeforeKind,
    bytes | None,
    tuple[str, ...] | None,
    tuple[str, ...],
]


class Rows:
    """Turns the rows of one version of a table into JSON."""

    def __init__(self, table: Table, encoders: Sequence[Encode | None]) -> None:
        self.table = table
        self._encoders = tuple(encoders)
        self._names = [column.name for column in table.columns]
        self._labels = [_quote(name) + b":" for name in self._names]
        self._keys = [at for at, column in enumerate(table.columns) if column.key]
        self._template = self._template_of(range(len(self._labels)))
        self._key_template = self._template_of(self._keys)
        self._only_key = self._keys[0] if len(self._keys) == 1 else None
        self._plain = _Plain(self._labels, self._encoders, self._keys)

    @property
    def encoders(self) -> tuple[Encode | None, ...]:
        """How each column's text becomes JSON."""
        return self._encoders

    @property
    def path(self) -> str:
        """schema.table, as the config and the status write it."""
        return self.table.path

    def of(self, table: Table) -> Rows:
        """The same decoder for the same columns under another version."""
        return Rows(table, self._encoders)

    def lines(self) -> Lines:
        """The decoder for the same rows as COPY sends them."""
        return Lines(self.table, self._encoders)

    def insert(self, data: bytes) -> Row:
        """An Insert message, its type byte and relation included."""
        plain = self._plain.read(data)
        if plain is not None:
            return plain
        padded = self._padded(data)
        self._expect(data[5] == _NEW, "an Insert has no new row")
        values, at = self._tuple(padded, 6)
        self._finish(data, at)
        if None in values:
            return self._partial(values, None, BeforeKind.NONE)
        return self.key_of(values), None, BeforeKind.NONE, self._template % tuple(values), None, ()

    def update(self, data: bytes) -> Row:
        """An Update message."""
        plain = self._plain.read(data)
        if plain is not None:
            return plain
        padded = self._padded(data)
        kind, at = data[5], 5
        old = None
        if kind in (_KEY, _OLD):
            old, at = self._tuple(padded, 6)
        self._expect(padded[at : at + 1] == b"N", "an Update has no new row")
        values, at = self._tuple(padded, at + 1)
        self._finish(data, at)
        if old is None:
            if None in values:
                return self._partial(values, None, BeforeKind.NONE)
            return (
                self.key_of(values),
                None,
                BeforeKind.NONE,
                self._template % tuple(values),
                None,
                (),
            )
        if kind == _KEY:
            return self._partial(values, self.key_of(old), BeforeKind.KEY)
        return self.changed_row(old, values)

    def delete(self, data: bytes) -> Row:
        """A Delete message."""
        padded = self._padded(data)
        kind = data[5]
        self._expect(kind in (_KEY, _OLD), "a Delete has no old row")
        old, at = self._tuple(padded, 6)
        self._finish(data, at)
        key = self.key_of(old)
        if kind == _KEY:
            return key, key, BeforeKind.KEY, None, None, ()
        return key, self.image_of(old), BeforeKind.FULL, None, None, ()

    def _tuple(self, data: bytes, at: int) -> tuple[list[bytes | None], int]:
        """The columns as JSON and where they end; None for one that was not sent."""
        encoders = self._encoders
        unpack = _HEAD.unpack_from
        try:
            if _COUNT.unpack_from(data, at)[0] != len(encoders):
                # A message that looks like a look of ours may have said so; anybody can write one.
                raise DecodeError("a row has another number of columns than its table")
            at += 2
            values: list[bytes | None] = []
            append = values.append
            for encode in encoders:
                kind, size = unpack(data, at)
                if kind == _TEXT:
                    at += 5
                    end = at + size
                    if size < LARGE:
                        value = data[at:end]
                        append(value if encode is None else encode(value))
                    else:
                        append(encode_large(encode, memoryview(data)[at:end]))
                    at = end
                elif kind == _NULL:
                    append(b"null")
                    at += 1
                elif kind == _UNCHANGED:
                    append(None)
                    at += 1
                else:
                    raise ProtocolError(f"a row of {self.table.name} has a column kind {kind}")
        except struct.error as error:
            raise ProtocolError(f"a row of {self.table.name} is cut short") from error
        return values, at

    def changed_row(self, old: list[bytes | None], values: list[bytes | None]) -> Row:
        """An update of which both rows are known."""
        # A large value that did not change is sent only once, in the old row.
        new = [was if now is None else now for was, now in zip(old, values, strict=True)]
        changed = tuple(
            name for name, was, now in zip(self._names, old, new, strict=True) if was != now
        )
        return (
            self.key_of(new),
            self.image_of(old),
            BeforeKind.FULL,
            self.image_of(new),
            changed,
            (),
        )

    def _partial(
        self, values: list[bytes | None], before: bytes | None, before_kind: BeforeKind
    ) -> Row:
        unchanged = tuple(
            name for name, value in zip(self._names, values, strict=True) if value is None
        )
        return self.key_of(values), before, before_kind, self.image_of(values), None, unchanged

    def image_of(self, values: list[bytes | None]) -> bytes:
        """Values as one object; None: not sent."""
        pairs = zip(self._labels, values, strict=True)
        return b"{%b}" % b",".join([label + value for label, value in pairs if value is not None])

    def key_of(self, values: Sequence[bytes | None]) -> bytes | None:
        """The key among a row's values."""
        if self._only_key is not None:
            only = values[self._only_key]
            return None if only is None else self._key_template % only
        if not self._keys:
            return None
        parts = tuple(values[at] for at in self._keys)
        # A key column that was not sent has not changed, but its value is not known.
        return None if None in parts else self._key_template % parts

    def _template_of(self, columns: Sequence[int]) -> bytes:
        labels = [self._labels[at].replace(b"%", b"%%") + b"%b" for at in columns]
        return b"{%b}" % b",".join(labels)

    def _padded(self, data: bytes) -> bytes:
        self._expect(len(data) >= _SHORTEST, "a row message is cut short")
        # Only a column without a length can stand in the last four bytes, and then in the last.
        return data + _PADDING if data[-1] in _WITHOUT_LENGTH else data

    def _expect(self, true: bool, problem: str) -> None:
        if not true:
            raise ProtocolError(f"{problem} ({self.table.name})")

    def _finish(self, data: bytes, at: int) -> None:
        if at != len(data):
            raise ProtocolError(f"a row of {self.table.name} does not end where its message does")


class _Plain:
    """The short cut for the usual row: a new tuple, no null, every value under 256 bytes.

    Text never holds a zero byte, so the head of a short value (t, three zeros, its length) stands
    nowhere else, and such a row can be split at its columns in one step of C. When there are as
    many pieces as columns, every column was a short value. Any other row takes the long way.
    """

    def __init__(
        self, labels: Sequence[bytes], encoders: Sequence[Encode | None], keys: Sequence[int]
    ) -> None:
        self._longest = _SHORTEST + len(labels) * (_HEAD.size + 255)
        self._pieces = len(labels) + 1  # what stands before the first column is one too
        self._head = b"N" + _COUNT.pack(len(labels))
        # Without null, types that only need quotes have them in the template.
        slots = [
            label.replace(b"%", b"%%") + (b'"%b"' if encode is as_quoted else b"%b")
            for label, encode in zip(labels, encoders, strict=True)
        ]
        self._template = b"%%.0b{%b}" % b",".join(slots)  # .0: nothing of the first piece
        self._key_template = b"{%b}" % b",".join([slots[at] for at in keys])
        self._keys = tuple(at + 1 for at in keys)
        self._only_key = self._keys[0] if len(keys) == 1 else 0
        self._encoded = [
            (at, encode)
            for at, encode in enumerate(encoders, 1)
            if encode is not None and encode is not as_quoted
        ]

    def read(self, data: bytes) -> Row | None:
        """The row; None when it is not a usual one."""
        if len(data) > self._longest:
            return None
        pieces = _split(data)
        if len(pieces) != self._pieces or pieces[0][5:] != self._head:
            return None
        for at, encode in self._encoded:
            pieces[at] = encode(pieces[at])
        image = self._template % tuple(pieces)
        if self._only_key:
            return self._key_template % pieces[self._only_key], None, _NONE, image, None, ()
        key = self._key_template % tuple([pieces[at] for at in self._keys])
        return key if self._keys else None, None, _NONE, image, None, ()
