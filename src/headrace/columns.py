"""A table's columns in Arrow: the source's types as Arrow types, JSON images as Arrow columns.

    smallint, integer, bigint, oid    int16, int32, int64, int64
    real, double precision            float32, float64
    numeric(p,s), p up to 38          decimal128(p, s)
    boolean, bytea, date              bool, binary, date32
    timestamp, timestamptz            timestamp(us), timestamp(us, UTC)
    one of these, or of the rest []   list, of one dimension
    json, jsonb                       string: the document's own text
    the rest                          string: text, or the JSON of what is not text

This runs for every changed row: images are read by a decoder made for their columns, and what is
left to do is done by Arrow for whole columns. A document `null` and no document are both null,
since the image does not tell them apart.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from types import GenericAlias
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Raw

from .errors import ConfigError, DecodeError
from .event import Column, Table

Image = str | bytes | None

_ROWS = 8192  # decoded at a time: the rows' objects stay in the processor's cache
_CHARACTERS = 1 << 28  # of these rows at most, since an Arrow column of text ends at 2 GiB
_EMPTY = b"{}"
_TEXT = pa.string()
_INSTANT = pa.timestamp("us", tz="UTC")


# --- a table's columns, as text ------------------------------------------------------------------

_columns = msgspec.json.Decoder(tuple[Column, ...]).decode


@lru_cache(maxsize=4096)
def columns_of(row_schema: str) -> tuple[Column, ...]:
    """The columns behind the text that a change carries as its `row_schema`."""
    return _columns(row_schema)


def row_schema(table: Table) -> str:
    """A table's columns as the text that its changes carry."""
    columns = [{"name": c.name, "type": c.type, "key": c.key} for c in table.columns]
    return msgspec.json.encode(columns).decode()


# --- JSON values to an Arrow column --------------------------------------------------------------


def _plain(values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
    return pa.array(values, arrow)


def _parsed(values: Sequence[str | None], arrow: pa.DataType) -> pa.Array:
    return pa.array(values, _TEXT).cast(arrow)


def _wall_clock(values: Sequence[str | None], arrow: pa.DataType) -> pa.Array:
    # The image ends in Z, which Arrow takes for a time zone only.
    return _parsed(values, _INSTANT).cast(arrow)


def _documents(values: Sequence[Raw], _arrow: pa.DataType) -> pa.Array:
    """The JSON text of each value, byte for byte."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int32, len(values)), out=offsets[1:])
    joined = b"".join(cast("Sequence[bytes]", values))
    texts = pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(joined))
    if b"null" in joined:
        return pc.if_else(pc.equal(texts, "null"), pa.scalar(None, _TEXT), texts)
    return texts


def _floats(values: Sequence[Raw], arrow: pa.DataType) -> pa.Array:
    # From the digits, not from a Python float: that has no -0 in JSON, and rounds a real twice.
    return pc.utf8_trim(_documents(values, _TEXT), '"').cast(arrow)


_string = msgspec.json.Decoder(str).decode


def _anything(values: Sequence[Raw], _arrow: pa.DataType) -> pa.Array:
    """Strings as the text they stand for, all else as its JSON text."""
    texts = _documents(values, _TEXT)
    if any(b"\\" in value for value in cast("Sequence[bytes]", map(bytes, values))):
        unquoted = [_string(t) if t and t[0] == '"' else t for t in texts.to_pylist()]
        return pa.array(unquoted, _TEXT)
    return pc.if_else(pc.starts_with(texts, '"'), pc.utf8_slice_codeunits(texts, 1, -1), texts)


def _anything_flat(values: Sequence[Raw], arrow: pa.DataType) -> pa.Array:
    if any(value[:1] == b"[" for value in map(bytes, values)):
        raise pa.ArrowInvalid("more than one dimension")
    return _anything(values, arrow)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one type travels: in Arrow, in the decoded image, and from there to Arrow."""

    arrow: pa.DataType
    image: Any  # the type that msgspec reads
    column: Callable[[Sequence[Any], pa.DataType], pa.Array]

    @property
    def image_field(self) -> tuple[Any, Any]:
        """The type and default of a field; a Raw holds null as its text."""
        return (Raw, Raw(b"null")) if self.image is Raw else (self.image | None, None)


_ANYTHING = _Kind(_TEXT, Raw, _anything)
_STRING = _Kind(_TEXT, str, _plain)
_DOCUMENT = _Kind(_TEXT, Raw, _documents)


def _list_of(element: _Kind) -> _Kind:
    """A list of one dimension: its elements are converted as one column, then cut up again."""
    if element is _ANYTHING:
        element = _Kind(_TEXT, Raw, _anything_flat)

    def column(values: Sequence[list[Any] | None], arrow: pa.DataType) -> pa.Array:
        lengths = [0 if value is None else len(value) for value in values]
        offsets = np.zeros(len(values) + 1, np.int32)
        np.cumsum(np.array(lengths, np.int32), out=offsets[1:])
        flat = list(chain.from_iterable(value for value in values if value is not None))
        absent = pa.array([value is None for value in values], pa.bool_())
        elements = element.column(flat, element.arrow)
        return pa.ListArray.from_arrays(pa.array(offsets), elements, type=arrow, mask=absent)

    image = GenericAlias(list, (element.image_field[0],))
    return _Kind(pa.list_(element.arrow), image, column)


# --- types by name -------------------------------------------------------------------------------

_POSTGRES: dict[str, _Kind] = {
    **dict.fromkeys(("smallint", "int2"), _Kind(pa.int16(), int, _plain)),
    **dict.fromkeys(("integer", "int", "int4"), _Kind(pa.int32(), int, _plain)),
    **dict.fromkeys(("bigint", "int8", "oid"), _Kind(pa.int64(), int, _plain)),
    **dict.fromkeys(("real", "float4"), _Kind(pa.float32(), Raw, _floats)),
    **dict.fromkeys(("double precision", "float8"), _Kind(pa.float64(), Raw, _floats)),
    **dict.fromkeys(("boolean", "bool"), _Kind(pa.bool_(), bool, _plain)),
    "date": _Kind(pa.date32(), str, _parsed),
    "bytea": _Kind(pa.binary(), bytes, _plain),  # base64 in JSON, which msgspec reads as bytes
    **dict.fromkeys(
        ("timestamp without time zone", "timestamp"),
        _Kind(pa.timestamp("us"), str, _wall_clock),
    ),
    **dict.fromkeys(("timestamp with time zone", "timestamptz"), _Kind(_INSTANT, str, _parsed)),
    **dict.fromkeys(("json", "jsonb"), _DOCUMENT),
    # Types of text are read as such; the names that are not here may hold anything.
    **dict.fromkeys(
        ("text", "character varying", "varchar", "character", "bpchar", "uuid", "name", "numeric"),
        _STRING,
    ),
}

_CONNECTORS = {"postgres": _POSTGRES}

# A name, a modifier in brackets anywhere before "with time zone", and the brackets of an array.
_type_parts = re.compile(
    r'([^()"\[\]]+?)(?:\(([\d,-]+)\))?( with(?:out)? time zone)?(\[\])?'
).fullmatch


@lru_cache(maxsize=4096)
def _kind(type_text: str, connector: str) -> _Kind:
    names = _CONNECTORS.get(connector)
    if names is None:
        raise ConfigError(f"the types of {connector!r} are not known here")
    parts = _type_parts(type_text)
    if parts is None:
        return _list_of(_ANYTHING) if type_text.endswith("[]") else _ANYTHING
    name, modifier, zone, array = parts.groups()
    kind = _decimal(modifier) if name == "numeric" else names.get(name + (zone or ""), _ANYTHING)
    return _list_of(kind) if array else kind


def _decimal(modifier: str | None) -> _Kind:
    """Room for every value of numeric(p,s), or text where Arrow has none."""
    precision, scale = (int(n) for n in f"{modifier or 0},0".split(",")[:2])
    if 1 <= precision <= 38 and 0 <= scale <= precision:
        return _Kind(pa.decimal128(precision, scale), str, _parsed)
    return _STRING


def arrow_type(type_text: str, connector: str = "postgres") -> pa.DataType:
    """The Arrow type of a column that the source declares as `type_text`."""
    return _kind(type_text, connector).arrow


def arrow_schema(
    columns: Sequence[Column],
    *,
    as_text: frozenset[str] = frozenset(),
    connector: str = "postgres",
) -> pa.Schema:
    """The schema of what `decode` returns for these columns."""
    return pa.schema([(c.name, _kind_of(c, as_text, connector).arrow) for c in columns])


def _kind_of(column: Column, as_text: frozenset[str], connector: str) -> _Kind:
    kind = _kind(column.type, connector)
    if column.name not in as_text or kind.arrow == _TEXT:
        return kind
    return _ANYTHING


# --- images to tables ----------------------------------------------------------------------------

_raws = msgspec.json.Decoder(dict[str, Raw]).decode

# What msgspec does not take as the name of a field.
_odd_name = re.compile(r'[\\"\x00-\x1f]').search


class _Images:
    """The images of one set of columns: a decoder compiled for it, and what follows by column."""

    def __init__(self, columns: tuple[Column, ...], as_text: frozenset[str], connector: str):
        self.columns = columns
        self._kinds = [_kind_of(column, as_text, connector) for column in columns]
        self._odd = any(_odd_name(column.name) for column in columns)
        fields = [f"f{number}" for number in range(len(columns))]
        self._positions = {column.name: at for at, column in enumerate(columns)}
        names = {} if self._odd else dict(zip(fields, self._positions, strict=True))
        row = msgspec.defstruct(
            "Row",
            [(f, *kind.image_field) for f, kind in zip(fields, self._kinds, strict=True)],
            rename=names,
            gc=False,
        )
        self._decode = msgspec.json.Decoder(row).decode
        self._values = [attrgetter(field) for field in fields]
        self.schema = pa.schema(
            [(c.name, k.arrow) for c, k in zip(columns, self._kinds, strict=True)]
        )

    def batch(self, images: Sequence[Image]) -> pa.RecordBatch:
        """The columns of some images, few enough for one Arrow array a column."""
        decode = self._decode
        if self._odd:
            images = [self._renamed(image) for image in images]
        rows = [decode(_EMPTY if image is None else image) for image in images]
        arrays = [
            self._column(at, list(map(values, rows))) for at, values in enumerate(self._values)
        ]
        return pa.record_batch(arrays, schema=self.schema)

    def _column(self, at: int, values: list[Any]) -> pa.Array:
        kind = self._kinds[at]
        try:
            return kind.column(values, kind.arrow)
        except (pa.ArrowException, OverflowError):
            raise self.misfit(at) from None  # Arrow's own message would show the value

    def misfit(self, at: int) -> DecodeError:
        column, arrow = self.columns[at], self._kinds[at].arrow
        return DecodeError(
            f"column {column.name!r} of type {column.type} has a value that {arrow} cannot hold",
            hint=f"Name {column.name!r} in the sink's `as_text`, to keep its text.",
        )

    def _renamed(self, image: Image) -> bytes:
        values = _raws(_EMPTY if image is None else image)
        known = ((self._positions.get(name), value) for name, value in values.items())
        parts = [b'"f%d":%b' % (at, bytes(value)) for at, value in known if at is not None]
        return b"{%b}" % b",".join(parts)


_images = lru_cache(maxsize=1024)(_Images)


def decode(
    images: Sequence[Image] | pa.Array | pa.ChunkedArray,
    columns: Sequence[Column],
    *,
    as_text: frozenset[str] = frozenset(),
    connector: str = "postgres",
) -> pa.Table:
    """The rows behind JSON images, an Arrow column for each of `columns`.

    No image is a row of nulls; a name that is missing in an image is null, and a name that is not
    in `columns` is left out. The columns in `as_text` keep the exact text of what the source sent.
    Raises DecodeError, which names the column and never the value, for what a type cannot hold:
    infinity and years outside 1 to 9999, NaN in a decimal, arrays of several dimensions.
    """
    reader = _images(tuple(columns), as_text, connector)
    if isinstance(images, pa.Array | pa.ChunkedArray):
        images = cast("list[Image]", images.cast(pa.binary()).to_pylist())
    try:
        return pa.Table.from_batches(map(reader.batch, _pieces(images)), reader.schema)
    except msgspec.ValidationError:
        raise _culprit(reader, images, as_text, connector) from None
    except msgspec.DecodeError:
        raise DecodeError("the image of a row is not a JSON object") from None


def _pieces(images: Sequence[Image]) -> Iterator[Sequence[Image]]:
    for start in range(0, len(images), _ROWS):
        yield from _halved(images[start : start + _ROWS])


def _halved(images: Sequence[Image]) -> Iterator[Sequence[Image]]:
    if len(images) > 1 and sum(len(image) for image in images if image) > _CHARACTERS:
        middle = len(images) // 2
        yield from _halved(images[:middle])
        yield from _halved(images[middle:])
    else:
        yield images


def _culprit(
    reader: _Images, images: Sequence[Image], as_text: frozenset[str], connector: str
) -> DecodeError:
    """What to say of images that are not what their columns promise."""
    for at, column in enumerate(reader.columns):
        alone = _Images((column,), as_text, connector)
        try:
            for piece in _pieces(images):
                alone.batch(piece)
        except msgspec.ValidationError:
            return reader.misfit(at)
    return DecodeError("the image of a row is not a JSON object")


# --- from one type to a wider one ----------------------------------------------------------------

_DIGITS = {pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_WIDER: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.int16(): (pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    pa.int32(): (pa.int64(), pa.float64()),
    pa.float32(): (pa.float64(),),
}


def widened(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether each value of `old` is the same value in `new`, and Arrow casts it without loss."""
    if old == new or new in _WIDER.get(old, ()):
        return True
    if pa.types.is_list(old) and pa.types.is_list(new):
        return widened(old.value_type, new.value_type)
    if not pa.types.is_decimal(new):
        return False
    whole = new.precision - new.scale
    if pa.types.is_decimal(old):
        return bool(new.scale >= old.scale and whole >= old.precision - old.scale)
    return old in _DIGITS and bool(whole >= _DIGITS[old])
