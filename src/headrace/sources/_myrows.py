"""Rows of MySQL and MariaDB -> JSON images. No I/O.

The decoder is generated for each version of a table and each set of columns that an event has: it
walks the rows once, then turns them into JSON a column at a time.

An event may leave columns out (binlog_row_image): what the new image of an update does not have
and the old one has did not change, so it is taken from there; what neither has is `unchanged`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from operator import ne
from typing import Any

import msgspec

from ..errors import DecodeError, ProtocolError
from ..event import BeforeKind, Table
from ._binlogevents import RowsEvent, RowsKind
from ._mycolumns import ColumnType
from ._mylayouts import PLAIN, QUOTED, Layout, layout
from ._mytablemap import bits
from ._mywalk import Field, walk

# What a row says: key, before, before_kind, after, changed, unchanged, in the order of Change's
# fields; the same as `_pgrows.Row`.
Row = tuple[
    bytes | None,
    bytes | None,
    BeforeKind,
    bytes | None,
    tuple[str, ...] | None,
    tuple[str, ...],
]

_NONE, _KEY, _FULL = BeforeKind.NONE, BeforeKind.KEY, BeforeKind.FULL
_quote = msgspec.json.Encoder().encode

_Texts = tuple[bytes, Sequence[bytes]]  # of one column: how an image holds each, and each
_Columns = dict[int, _Texts]
_Rows = list[tuple[Any, ...]]


class Rows:
    """Turns the rows of one version of a table into JSON."""

    def __init__(self, table: Table, columns: Sequence[ColumnType]) -> None:
        """`columns` in the order of the binlog, of which `table.columns` may leave some out."""
        self.table = table
        self._columns = tuple(columns)
        self._layouts = [layout(column) for column in columns]
        self._images = _Images(table, columns)
        self._readers: dict[tuple[RowsKind, bytes, bytes], _Inserts | _Deletes | _Updates] = {}

    def read(self, event: RowsEvent) -> list[Row]:
        """The rows of an event, in their order; an UPDATE's pair is one.

        A value that cannot be read raises DecodeError, bytes that are no rows ProtocolError.
        """
        reader = self._readers.get((event.kind, event.present, event.present_after))
        if reader is None:
            reader = self._reader(event)
        try:
            return reader.read(event)
        except (struct.error, IndexError, ValueError) as error:
            raise ProtocolError(f"rows of {self.table.name} are cut short") from error
        except DecodeError as error:
            path = f"{self.table.schema}.{self.table.name}"
            raise DecodeError(f"{path}: {error}", hint=error.hint) from error

    def _reader(self, event: RowsEvent) -> _Inserts | _Deletes | _Updates:
        if event.width != len(self._columns):
            raise ProtocolError(f"rows of {self.table.name} have another number of columns")
        image = self._image(event.present)
        reader: _Inserts | _Deletes | _Updates
        if event.kind is RowsKind.UPDATE:
            reader = _Updates(self._images, image, self._image(event.present_after))
        elif event.kind is RowsKind.INSERT:
            reader = _Inserts(self._images, image)
        else:
            reader = _Deletes(self._images, image)
        self._readers[event.kind, event.present, event.present_after] = reader
        return reader

    def _image(self, present: bytes) -> _Image:
        there = [at for at, is_there in enumerate(bits(present, len(self._columns))) if is_there]
        return _Image(there, self._layouts, [self._columns[at].nullable for at in there])


class _Image:
    """The columns that an image of an event has, and how they lie."""

    def __init__(
        self, there: list[int], layouts: Sequence[Layout], nullable: Sequence[bool]
    ) -> None:
        self.there = there
        self._converts = [layouts[at].convert for at in there]
        self.fields = [
            Field(layouts[at].code, layouts[at].prefix, null)
            for at, null in zip(there, nullable, strict=True)
        ]

    def texts(self, rows: _Rows, *, nulls: bool) -> _Columns:
        """The rows' columns as JSON."""
        columns = list(zip(*rows, strict=True))
        if nulls:
            every = zip(self.there, self._converts, columns, strict=True)
            return {
                at: _with_nulls(convert, values) if None in values else convert(values)
                for at, convert, values in every
            }
        return {
            at: convert(values)
            for at, convert, values in zip(self.there, self._converts, columns, strict=True)
        }


def _with_nulls(convert: Any, values: Sequence[Any]) -> _Texts:
    known = [value for value in values if value is not None]
    if not known:
        return PLAIN, [b"null"] * len(values)
    each = iter(_plain(convert(known)))
    return PLAIN, [b"null" if value is None else next(each) for value in values]


class _Images:
    """Writes images and keys of a table: fills templates with the columns' texts."""

    def __init__(self, table: Table, columns: Sequence[ColumnType]) -> None:
        wanted = {column.name: column.key for column in table.columns}
        self.names = [column.name for column in columns]
        self.wanted = [at for at, name in enumerate(self.names) if name in wanted]
        self.keys = [at for at in self.wanted if wanted[self.names[at]]]
        self._labels = [_quote(name).replace(b"%", b"%%") + b":" for name in self.names]
        self._templates: dict[tuple[tuple[int, bytes], ...], bytes] = {}

    def images(self, columns: _Columns, chosen: Sequence[int], count: int) -> list[bytes]:
        """An image of each row, with the chosen columns."""
        if not chosen:
            return [b"{}"] * count
        template = self._template(tuple([(at, columns[at][0]) for at in chosen]))
        if len(chosen) == 1:
            return [template % text for text in columns[chosen[0]][1]]
        rows = zip(*[columns[at][1] for at in chosen], strict=True)
        return [template % row for row in rows]

    def key_images(self, columns: _Columns, count: int) -> Sequence[bytes | None]:
        """The key of each row; None: there is no key, or it was not sent."""
        if not self.keys or not all(at in columns for at in self.keys):
            return [None] * count
        return self.images(columns, self.keys, count)

    def chosen(self, *images: _Image) -> list[int]:
        """The columns that one of the images has, of those that are wanted."""
        there = {at for image in images for at in image.there}
        return [at for at in self.wanted if at in there]

    def missing(self, chosen: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.names[at] for at in self.wanted if at not in chosen)

    def _template(self, slots: tuple[tuple[int, bytes], ...]) -> bytes:
        template = self._templates.get(slots)
        if template is None:
            parts = [self._labels[at] + slot for at, slot in slots]
            template = self._templates[slots] = b"{%b}" % b",".join(parts)
        return template


def _walked(function: Any, event: RowsEvent) -> tuple[bool, tuple[_Rows, ...]]:
    end, nulls, rows = function(event.data, event.at, event.end)
    if end != event.end:
        raise ValueError("rows do not end where their event does")
    return nulls, rows


class _Inserts:
    def __init__(self, images: _Images, image: _Image) -> None:
        self._images, self._image = images, image
        self._walk = walk([image.fields])
        self._chosen = images.chosen(image)
        self._missing = images.missing(self._chosen)

    def read(self, event: RowsEvent) -> list[Row]:
        nulls, (rows,) = _walked(self._walk, event)
        columns = self._image.texts(rows, nulls=nulls)
        images = self._images.images(columns, self._chosen, len(rows))
        keys = self._images.key_images(columns, len(rows))
        missing = self._missing
        return [
            (key, None, _NONE, image, None, missing)
            for key, image in zip(keys, images, strict=True)
        ]


class _Deletes:
    def __init__(self, images: _Images, image: _Image) -> None:
        self._images, self._image = images, image
        self._walk = walk([image.fields])
        self._chosen = images.chosen(image)
        self._whole = self._chosen == images.wanted

    def read(self, event: RowsEvent) -> list[Row]:
        nulls, (rows,) = _walked(self._walk, event)
        columns = self._image.texts(rows, nulls=nulls)
        keys = self._images.key_images(columns, len(rows))
        if not self._whole:
            return [(key, key, _KEY if key else _NONE, None, None, ()) for key in keys]
        images = self._images.images(columns, self._chosen, len(rows))
        return [
            (key, image, _FULL, None, None, ()) for key, image in zip(keys, images, strict=True)
        ]


class _Updates:
    """Pairs of images; where both have the same columns, all are read as one list."""

    def __init__(self, images: _Images, old: _Image, new: _Image) -> None:
        self._images, self._old, self._new = images, old, new
        self._alike = old.there == new.there
        self._walk = walk([old.fields] if self._alike else [old.fields, new.fields])
        self._chosen = images.chosen(old, new)
        self._missing = images.missing(self._chosen)
        self._before = images.chosen(old)
        self._whole = self._before == images.wanted
        sent = images.chosen(new)
        # A column whose old value was not sent may have changed or not.
        self._compared = sent if set(sent) <= set(self._before) else None
        self._changes: dict[tuple[bool, ...], tuple[str, ...]] = {}

    def read(self, event: RowsEvent) -> list[Row]:
        nulls, lists = _walked(self._walk, event)
        if self._alike:
            (rows,) = lists
            if len(rows) % 2:
                raise ValueError("an update without a new row")
            every = self._old.texts(rows, nulls=nulls)
            old = {at: (slot, texts[::2]) for at, (slot, texts) in every.items()}
            new = {at: (slot, texts[1::2]) for at, (slot, texts) in every.items()}
        else:
            old = self._old.texts(lists[0], nulls=nulls)
            new = self._new.texts(lists[1], nulls=nulls)
        return self._paired(old, new, len(lists[0]) // (2 if self._alike else 1))

    def _paired(self, old: _Columns, new: _Columns, count: int) -> list[Row]:
        merged = {**old, **new}
        keys = self._images.key_images(merged, count)
        images = self._images.images(merged, self._chosen, count)
        before: Sequence[bytes | None]
        if self._whole:
            before, kind = self._images.images(old, self._before, count), _FULL
        else:
            before = self._images.key_images(old, count)
            kind = _KEY if before and before[0] is not None else _NONE
        missing = self._missing
        every = zip(keys, before, images, self._changed(old, new, count), strict=True)
        return [(key, was, kind, image, changed, missing) for key, was, image, changed in every]

    def _changed(
        self, old: _Columns, new: _Columns, count: int
    ) -> Sequence[tuple[str, ...] | None]:
        if self._compared is None:
            return [None] * count
        if not self._compared:
            return [()] * count
        flags = zip(*[_differ(old[at], new[at]) for at in self._compared], strict=True)
        known, names = self._changes, [self._images.names[at] for at in self._compared]
        found: list[tuple[str, ...]] = []
        for flag in flags:
            changed = known.get(flag)
            if changed is None:
                changed = tuple(name for name, is_new in zip(names, flag, strict=True) if is_new)
                if len(known) < 10_000:
                    known[flag] = changed
            found.append(changed)
        return found


def _plain(column: _Texts) -> Sequence[bytes]:
    """A column's texts as JSON."""
    slot, texts = column
    return [b'"%b"' % text for text in texts] if slot == QUOTED else texts


def _differ(old: _Texts, new: _Texts) -> Iterable[bool]:
    if old[0] == new[0]:
        return map(ne, old[1], new[1])
    return map(ne, _plain(old), _plain(new))
