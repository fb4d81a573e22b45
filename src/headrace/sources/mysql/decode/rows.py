"""Rows of MySQL and MariaDB -> JSON images.

The decoder is generated for each version of a table and each set of columns that an event has: it
walks the rows once, then turns them into JSON a column at a time.

An event may leave columns out (binlog_row_image): what the new image of an update does not have
and the old one has did not change, so it is taken from there; what neither has is `unchanged`.
What an INSERT or a REPLACE leaves out has its default.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import ne
from typing import Any, NamedTuple, Protocol

import msgspec

from ....change.event import BeforeKind, Table
from ....errors import DecodeError, ProtocolError
from .absent import ColumnDefaults, Manner, unnamed
from .columns import ColumnType
from .events import RowsEvent, RowsKind
from .layouts import PLAIN, QUOTED, ColumnLayout, Convert, layout
from .tablemap import bits

# A row: key, before, before_kind, after, changed, unchanged, in the order of Change's
# fields.
Row = tuple[
    bytes | None,
    bytes | None,
    BeforeKind,
    bytes | None,
    tuple[str, ...] | None,
    tuple[str, ...],
]

_NONE, _KEY, _FULL = BeforeKind.NONE, BeforeKind.KEY, BeforeKind.FULL
_UPDATE, _INSERT = RowsKind.UPDATE, RowsKind.INSERT
_quote = msgspec.json.Encoder().encode

_Texts = tuple[bytes, Sequence[bytes]]  # of one column: how an image holds each, and each
_Columns = dict[int, _Texts]
_Values = list[Any]  # of an image's columns, row by row


class BinlogRowDecoder:
    """Turns the rows of one version of a table into JSON."""

    def __init__(
        self,
        table: Table,
        columns: Sequence[ColumnType],
        defaults: Callable[[], ColumnDefaults] | None = None,
    ) -> None:
        """`columns` in the order of the binlog, of which `table.columns` may leave some out.

        `defaults`: what columns have that an event leaves out; None: they are listed as unchanged.
        """
        self.table = table
        self._defaults = defaults
        self._all = _all_bits(len(columns))
        self._columns = tuple(columns)
        self._layouts = [layout(column) for column in columns]
        self._described = _Described(table, columns)
        self._readers: dict[tuple[int, bytes, bytes, Manner], _Reader] = {}

    def read(self, event: RowsEvent) -> list[Row]:
        """The rows of an event, in their order; an UPDATE's pair is one.

        A value that cannot be read raises DecodeError, bytes that are no rows ProtocolError.
        """
        return self.read_all([event])[0]

    def has_all(self, event: RowsEvent) -> bool:
        """Whether the (new) rows of an event have all columns."""
        return (event.present_after or event.present) == self._all

    def read_all(
        self, events: Sequence[RowsEvent], manner: Manner = Manner.UNKNOWN
    ) -> list[list[Row]]:
        """The rows of each of some events of one kind that have the same columns.

        Columns are converted for all of them at once, so many small events cost little more than
        a large one.
        """
        event = events[0]
        reader = self._readers.get((event.header.kind, event.present, event.present_after, manner))
        if reader is None:
            reader = self._reader(event, manner)
        try:
            images: tuple[_Values, ...] = tuple([] for _ in range(reader.images))
            first, per_row = images[reader.counted], reader.per_row
            any_null = False
            ends = []  # of each event's rows, counted
            for each in events:
                end, nulls = reader._walk(each.data, each.at, each.end, *images)
                if end != each.end or len(first) % per_row:
                    raise ValueError("rows do not end where their event does")
                any_null = any_null or nulls
                ends.append(len(first) // per_row)
            found = reader.read(images, ends[-1], nulls=any_null)
            return [found[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        except (struct.error, IndexError, ValueError) as error:
            raise ProtocolError(f"rows of {self.table.name} are cut short") from error
        except DecodeError as error:
            path = self.table.path
            raise DecodeError(f"{path}: {error}", hint=error.hint) from error

    def _reader(self, event: RowsEvent, manner: Manner) -> _Reader:
        if event.width != len(self._columns):
            raise ProtocolError(f"rows of {self.table.name} have another number of columns")
        reader = self._build(event, manner)
        self._readers[event.header.kind, event.present, event.present_after, manner] = reader
        return reader

    def _build(self, event: RowsEvent, manner: Manner) -> _Reader:
        old, new = self._image(event.present), self._image(event.present_after or event.present)
        if not old.width and not new.width:
            # The number of rows would be unknown.
            raise DecodeError(
                f"{self.table.path}: a row without any column",
                hint="SET GLOBAL binlog_row_image = FULL; then run `headrace snapshot`.",
            )
        if event.kind is _INSERT:
            return _Inserts(self._described, old, self._given(old))
        self._expect_named(old)
        if event.kind is not _UPDATE:
            return _Deletes(self._described, old)
        if self._replaces(new, manner):
            return _PartialUpdates(self._described, old, new, self._given(new))
        if old.there == new.there:
            return _Updates(self._described, old)
        return _PartialUpdates(self._described, old, new, {})

    def _given(self, image: _Image) -> dict[int, bytes]:
        """What a new row has in the columns that its image leaves out."""
        missing = self._described.missing(image)
        if self._defaults is None or not missing:
            return {}
        values = self._defaults().given(missing)
        return {self._described.names.index(name): value for name, value in values.items()}

    def _replaces(self, new: _Image, manner: Manner) -> bool:
        """Whether what an UPDATE leaves out has its default, and not what it had."""
        missing = self._described.missing(new)
        if self._defaults is None or not missing:
            return False
        defaults, names = self._defaults(), self._described.names
        there = {names[at] for at in new.there}
        if defaults.manner(manner, self.table.key, there) is Manner.REPLACE:
            return True
        defaults.expect_kept(missing)
        return False

    def _expect_named(self, old: _Image) -> None:
        """DecodeError: it is not certain which row an event is about."""
        described = self._described
        if self._defaults is None or not described.missing(old) or described.key_writer(old):
            return
        raise unnamed()

    def _image(self, present: bytes) -> _Image:
        there = [at for at, is_there in enumerate(bits(present, len(self._columns))) if is_there]
        return _Image(there, self._layouts, [self._columns[at].nullable for at in there])


class _Reader(Protocol):
    """Reads events of one kind with one set of columns."""

    images: int  # that the walk reads of a row
    counted: int  # the one by which rows are counted
    per_row: int  # values of that one
    _walk: _Walk

    def read(self, images: tuple[_Values, ...], count: int, *, nulls: bool) -> list[Row]: ...


class _Image:
    """The columns that an image of an event has, and how they lie."""

    def __init__(
        self, there: list[int], layouts: Sequence[ColumnLayout], nullable: Sequence[bool]
    ) -> None:
        self.there = there
        self.width = len(there)
        self.converts = [layouts[at].convert for at in there]
        # 0.0 and -0.0 are the same number, but not the same text.
        self.comparable = [layouts[at].code not in ("f", "d") for at in there]
        self.fields = [
            _Field(layouts[at].code, layouts[at].prefix, null)
            for at, null in zip(there, nullable, strict=True)
        ]

    def texts(self, values: _Values, *, nulls: bool) -> _Columns:
        """The columns as JSON, of rows whose values lie one after the other."""
        read = _with_nulls if nulls else _without_nulls
        return {
            column: read(convert, values[at :: self.width])
            for at, (column, convert) in enumerate(zip(self.there, self.converts, strict=True))
        }


def _without_nulls(convert: Convert, values: Sequence[Any]) -> _Texts:
    return convert(values) if values else (PLAIN, ())


def _with_nulls(convert: Convert, values: Sequence[Any]) -> _Texts:
    if None not in values:
        return _without_nulls(convert, values)
    known = [value for value in values if value is not None]
    if not known:
        return PLAIN, [b"null"] * len(values)
    each = iter(_plain(convert(known)))
    return PLAIN, [b"null" if value is None else next(each) for value in values]


def _plain(column: _Texts) -> Sequence[bytes]:
    """A column's texts as JSON."""
    slot, texts = column
    return [b'"%b"' % text for text in texts] if slot == QUOTED else texts


class _Described:
    """The columns of a table that images show, and those of its key."""

    def __init__(self, table: Table, columns: Sequence[ColumnType]) -> None:
        wanted = {column.name: column.key for column in table.columns}
        self.names = [column.name for column in columns]
        self._wanted = [at for at, name in enumerate(self.names) if name in wanted]
        self.keys = [at for at in self._wanted if wanted[self.names[at]]]

    def of(self, *images: _Image, given: Iterable[int] = ()) -> list[int]:
        """The columns that one of the images has, of those that are shown; or that are given."""
        there = {at for image in images for at in image.there}.union(given)
        return [at for at in self._wanted if at in there]

    def missing(self, *images: _Image) -> tuple[str, ...]:
        """The names of those that none of the images has."""
        there = self.of(*images)
        return tuple(self.names[at] for at in self._wanted if at not in there)

    def writer(self, chosen: Sequence[int]) -> _Writer:
        return _Writer([self.names[at] for at in chosen], chosen)

    def key_writer(self, *images: _Image, given: Iterable[int] = ()) -> _Writer | None:
        """None: there is no key, or not all of it was sent."""
        there = self.of(*images, given=given)
        return self.writer(self.keys) if self.keys and set(self.keys) <= set(there) else None


class _Writer:
    """Writes objects of some columns: fills a template with the columns' texts."""

    def __init__(self, names: Sequence[str], chosen: Sequence[int]) -> None:
        self._labels = [_quote(name).replace(b"%", b"%%") + b":" for name in names]
        self._chosen = chosen
        self._templates: dict[tuple[bytes, ...], bytes] = {}

    def write(self, columns: _Columns, count: int) -> list[bytes]:
        """The object that the texts of each of `count` rows make."""
        if not self._chosen:
            return [b"{}"] * count
        chosen = [columns[at] for at in self._chosen]
        slots = tuple([slot for slot, _ in chosen])
        template = self._templates.get(slots)
        if template is None:
            parts = [label + slot for label, slot in zip(self._labels, slots, strict=True)]
            template = self._templates[slots] = b"{%b}" % b",".join(parts)
        return [template % row for row in zip(*[texts for _, texts in chosen], strict=True)]


def _constant(given: dict[int, bytes], count: int) -> _Columns:
    return {at: (PLAIN, [value] * count) for at, value in given.items()}


def _all_bits(count: int) -> bytes:
    return ((1 << count) - 1).to_bytes((count + 7) // 8, "little")


def _keys(writer: _Writer | None, columns: _Columns, count: int) -> Sequence[bytes | None]:
    return [None] * count if writer is None else writer.write(columns, count)


class _Inserts:
    images, counted = 1, 0

    def __init__(self, table: _Described, image: _Image, given: dict[int, bytes]) -> None:
        """`given`: values of columns that the image leaves out."""
        self._walk = _walk([image.fields])
        self.per_row = image.width
        self._image = image
        self._given = given
        self._writer = table.writer(table.of(image, given=given))
        self._key = table.key_writer(image, given=given)
        self._missing = () if given else table.missing(image)

    def read(self, images: tuple[_Values, ...], count: int, *, nulls: bool) -> list[Row]:
        columns = self._image.texts(images[0], nulls=nulls) | _constant(self._given, count)
        every = zip(
            _keys(self._key, columns, count), self._writer.write(columns, count), strict=True
        )
        missing = self._missing
        return [(key, None, _NONE, image, None, missing) for key, image in every]


class _Deletes:
    images, counted = 1, 0

    def __init__(self, table: _Described, image: _Image) -> None:
        self._walk = _walk([image.fields])
        self.per_row = image.width
        self._image = image
        self._writer = None if table.missing(image) else table.writer(table.of(image))
        self._key = table.key_writer(image)

    def read(self, images: tuple[_Values, ...], count: int, *, nulls: bool) -> list[Row]:
        columns = self._image.texts(images[0], nulls=nulls)
        keys = _keys(self._key, columns, count)
        if self._writer is None:
            return [(key, key, _KEY if key else _NONE, None, None, ()) for key in keys]
        every = zip(keys, self._writer.write(columns, count), strict=True)
        return [(key, image, _FULL, None, None, ()) for key, image in every]


class _Changes(dict[tuple[bool, ...], tuple[str, ...]]):
    """Which columns differ, by a flag for each; there are few such sets in a table's life."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __missing__(self, flags: tuple[bool, ...]) -> tuple[str, ...]:
        changed = tuple(name for name, flag in zip(self._names, flags, strict=True) if flag)
        if len(self) < 10_000:
            self[flags] = changed
        return changed


class _Updates:
    """Updates whose old and new images have the same columns: both are read as one row."""

    images, counted = 1, 0

    def __init__(self, table: _Described, image: _Image) -> None:
        self._walk = _walk([image.fields])
        self.per_row = 2 * image.width
        self._image = image
        self._chosen = table.of(image)
        self._writer = table.writer(self._chosen)
        self._key = table.key_writer(image)
        self._missing = table.missing(image)
        self._changes = _Changes([table.names[at] for at in self._chosen])

    def read(self, images: tuple[_Values, ...], count: int, *, nulls: bool) -> list[Row]:
        old, new = self._texts(images[0], count, nulls=nulls)
        before: Sequence[bytes | None]
        if self._missing:
            # Without all columns, the old row is shown as its key.
            before, kind = _keys(self._key, old, count), _KEY if self._key else _NONE
        else:
            before, kind = self._writer.write(old, count), _FULL
        keys, after = _keys(self._key, new, count), self._writer.write(new, count)
        missing = self._missing
        every = zip(keys, before, after, self._changed(old, new, count), strict=True)
        return [(key, was, kind, image, names, missing) for key, was, image, names in every]

    def _texts(self, values: _Values, count: int, *, nulls: bool) -> tuple[_Columns, _Columns]:
        """The columns of the old rows, and of the new; one that is the same in all is one."""
        image, size = self._image, self.per_row
        read = _with_nulls if nulls else _without_nulls
        old: _Columns = {}
        new: _Columns = {}
        for at, column in enumerate(image.there):
            was, now = values[at::size], values[at + image.width :: size]
            if image.comparable[at] and was == now:
                old[column] = new[column] = read(image.converts[at], was)
            else:
                slot, texts = read(image.converts[at], was + now)
                old[column], new[column] = (slot, texts[:count]), (slot, texts[count:])
        return old, new

    def _changed(self, old: _Columns, new: _Columns, count: int) -> list[tuple[str, ...]]:
        if not self._chosen:
            return [()] * count
        flags = [
            repeat(False, count) if old[at] is new[at] else map(ne, old[at][1], new[at][1])
            for at in self._chosen
        ]
        changes = self._changes
        return [changes[each] for each in zip(*flags, strict=True)]


class _PartialUpdates:
    """Updates whose new image has other columns than the old one."""

    images = 2

    def __init__(
        self, table: _Described, old: _Image, new: _Image, given: dict[int, bytes]
    ) -> None:
        """`given`: values that the new row has in columns which its image leaves out."""
        self._walk = _walk([old.fields, new.fields])
        self._given = given
        self.counted = 0 if old.width else 1
        self.per_row = old.width or new.width
        self._old, self._new = old, new
        self._writer = table.writer(table.of(old, new, given=given))
        self._key = table.key_writer(old, new, given=given)
        self._old_key = table.key_writer(old)
        self._old_writer = None if table.missing(old) else table.writer(table.of(old))
        self._missing = () if given else table.missing(old, new)
        # A column whose old value was not sent may have changed or not.
        sent = table.of(new)
        self._compared = sent if set(sent) <= set(table.of(old)) and not given else None
        self._changes = _Changes([table.names[at] for at in sent])

    def read(self, images: tuple[_Values, ...], count: int, *, nulls: bool) -> list[Row]:
        old = self._old.texts(images[0], nulls=nulls)
        new = self._new.texts(images[1], nulls=nulls)
        merged = {**old, **new, **_constant(self._given, count)}
        before: Sequence[bytes | None]
        if self._old_writer is not None:
            before, kind = self._old_writer.write(old, count), _FULL
        else:
            before, kind = _keys(self._old_key, old, count), _KEY if self._old_key else _NONE
        after = self._writer.write(merged, count)
        keys = _keys(self._key, merged, count)
        missing = self._missing
        every = zip(keys, before, after, self._changed(old, new, count), strict=True)
        return [(key, was, kind, image, names, missing) for key, was, image, names in every]

    def _changed(
        self, old: _Columns, new: _Columns, count: int
    ) -> Sequence[tuple[str, ...] | None]:
        if self._compared is None:
            return [None] * count
        if not self._compared:
            return [()] * count
        changes = self._changes
        flags = [map(ne, _plain(old[at]), _plain(new[at])) for at in self._compared]
        return [changes[flag] for flag in zip(*flags, strict=True)]


# --- the walk ------------------------------------------------------------------------------------

# A row begins with a bit for each of its columns that marks a NULL; the others follow,
# each with a fixed size or with its length in front. Neighbours of fixed size, and the length that
# follows them, are read in one step. A row without NULL takes the short way, for which this is
# known beforehand; any other row tests each of its columns that may be NULL.

_Walk = Callable[..., tuple[int, bool]]
"""The rows between two indexes, and a list for each image of a row (one, or the old and the
new one), which gets the columns' values one after the other -> where the rows end, and whether
there was a NULL."""

_PREFIXES = {1: "B", 2: "H", 4: "I"}


class _Field(NamedTuple):
    """A column of an image, as far as the walk must know."""

    code: str  # struct's; "": its length stands in front
    prefix: int
    nullable: bool


def _walk(images: Sequence[Sequence[_Field]]) -> _Walk:
    """The function for rows of these images, which come in turn."""
    source = _Source()
    lists = ", ".join(f"values{number}" for number in range(len(images)))
    source.add(f"def walk(data, at, end, {lists}):")
    source.add(" nulls = False")
    source.add(" while at < end:")
    for number, fields in enumerate(images):
        source.image(number, fields)
    source.add(" return at, nulls")
    return source.compiled()


class _Source:
    """Lines of the function, and the structs that they name."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: dict[str, Any] = {}

    def add(self, line: str) -> None:
        self._lines.append(line)

    def compiled(self) -> _Walk:
        exec("\n".join(self._lines), self._names)
        function: _Walk = self._names["walk"]
        return function

    def image(self, number: int, fields: Sequence[_Field]) -> None:
        """One image of a row: its bits, and both ways to read it."""
        size = (len(fields) + 7) // 8
        # Bits beyond the last column may be anything.
        rest = (1 << len(fields) - 8 * (size - 1)) - 1 if fields else 0
        bits = [f"data[at + {byte}]" for byte in range(size)]
        if bits:
            bits[-1] += f" & {rest}"
        if any(field.nullable for field in fields):
            self.add(f"  if {' or '.join(bits)}:")
            self._with_nulls(fields, size)
            self.add("  else:")
            self._without_nulls(fields, size)
        else:
            self.add("  if True:")
            self._without_nulls(fields, size)
        values = "".join(f"c{at}, " for at in range(len(fields)))
        self.add(f"  values{number} += ({values})")

    def _without_nulls(self, fields: Sequence[_Field], skip: int) -> None:
        """Without NULL: runs of fixed columns, each with the length of what follows."""
        names: list[str] = []
        codes = f"{skip}x"
        for at, field in enumerate(fields):
            if field.code:
                names.append(f"c{at}")
                codes += field.code
                continue
            self._unpack(names, codes, field.prefix)
            self._slice(at)
            names, codes = [], ""
        if codes:
            self._unpack(names, codes, 0)

    def _with_nulls(self, fields: Sequence[_Field], skip: int) -> None:
        self.add("   nulls = True")
        self.add("   bits = at")
        self.add(f"   at += {skip}")
        for at, field in enumerate(fields):
            indent = "   "
            if field.nullable:
                self.add(f"   if data[bits + {at >> 3}] & {1 << (at & 7)}:")
                self.add(f"    c{at} = None")
                self.add("   else:")
                indent = "    "
            names = [f"c{at}"] if field.code else []
            self._unpack(names, field.code, field.prefix, indent)
            if not field.code:
                self._slice(at, indent)

    def _unpack(self, names: list[str], codes: str, prefix: int, indent: str = "   ") -> None:
        """Columns of fixed size, then a length into `n`."""
        length = ""
        if prefix == 3:  # struct knows no number of three bytes
            names, codes, length = [*names, "n", "m"], codes + "HB", "n |= m << 16"
        elif prefix:
            names, codes = [*names, "n"], codes + _PREFIXES[prefix]
        name = f"unpack{len(self._names)}"
        reader = struct.Struct("<" + codes)
        self._names[name] = reader.unpack_from
        if names:
            self.add(f"{indent}{', '.join(names)}, = {name}(data, at)")
        else:
            self.add(f"{indent}{name}(data, at)")
        self.add(f"{indent}at += {reader.size}")
        if length:
            self.add(indent + length)

    def _slice(self, at: int, indent: str = "   ") -> None:
        self.add(f"{indent}to = at + n")
        self.add(f"{indent}c{at} = data[at:to]")
        self.add(f"{indent}at = to")
