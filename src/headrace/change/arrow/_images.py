"""Images to Arrow tables: a decoder for each set of columns, then Arrow for whole columns."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, cast

import msgspec
import pyarrow as pa
from msgspec import Raw

from ...errors import DecodeError
from ..event import Column
from ._rescue import RESCUED, Image, RescuingImages, misfit
from ._types import kind_of

_ROWS = 4096  # decoded at a time: the rows' objects stay in the processor's cache
_CHARACTERS = 1 << 28  # of these rows at most, since an Arrow column of text ends at 2 GiB
_EMPTY = b"{}"

_raws = msgspec.json.Decoder(dict[str, Raw]).decode

# What msgspec does not take as the name of a field.
_odd_name = re.compile(r'[\\"\x00-\x1f]').search


class _Images:
    """The images of one set of columns: a decoder compiled for it, and what follows by column."""

    def __init__(self, columns: tuple[Column, ...], as_text: frozenset[str], connector: str):
        self.columns = columns
        self._kinds = [kind_of(column, as_text, connector) for column in columns]
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
        return misfit(self.columns[at], self._kinds[at].arrow)

    def _renamed(self, image: Image) -> bytes:
        values = _raws(_EMPTY if image is None else image)
        known = ((self._positions.get(name), value) for name, value in values.items())
        parts = [b'"f%d":%b' % (at, bytes(value)) for at, value in known if at is not None]
        return b"{%b}" % b",".join(parts)


_images = lru_cache(maxsize=1024)(_Images)
_rescuing_images = lru_cache(maxsize=1024)(RescuingImages)


def decode(
    images: Sequence[Image] | pa.Array | pa.ChunkedArray,
    columns: Sequence[Column],
    *,
    connector: str,
    as_text: frozenset[str] = frozenset(),
    rescue: bool = False,
) -> pa.Table:
    """The rows behind JSON images, an Arrow column for each of `columns`.

    No image is a row of nulls; a name that is missing in an image is null, and a name that is not
    in `columns` is left out. The columns in `as_text` keep the exact text of what the source sent.
    Raises DecodeError, which names the column and never the value, for what a type cannot hold:
    infinity and years outside 1 to 9999, NaN in a decimal, arrays of several dimensions.
    With `rescue` only in a column of the key: elsewhere such a value is null, and a last column
    RESCUED has its text. Without any such value there is no such column, and where the source has
    one of this name nothing is rescued.
    """
    reader = _images(tuple(columns), as_text, connector)
    if isinstance(images, pa.Array | pa.ChunkedArray):
        images = cast("list[Image]", images.cast(pa.binary()).to_pylist())
    try:
        if rescue and RESCUED not in reader.schema.names:
            others = partial(_rescuing_images, reader.columns, as_text, connector)
            return _joined([_rescued(reader, each, others) for each in _pieces(images)], reader)
        return pa.Table.from_batches(map(reader.batch, _pieces(images)), reader.schema)
    except msgspec.ValidationError:
        raise _culprit(reader, images, as_text, connector) from None
    except msgspec.DecodeError:
        raise _not_an_object() from None
    except RecursionError:
        raise DecodeError("a document is nested more deeply than can be read") from None


def _rescued(
    reader: _Images, images: Sequence[Image], others: Callable[[], RescuingImages]
) -> pa.RecordBatch:
    with suppress(msgspec.ValidationError, DecodeError):
        return reader.batch(images)
    return others().batch(images)


def _joined(batches: Sequence[pa.RecordBatch], reader: _Images) -> pa.Table:
    rescued = next((each.schema for each in batches if RESCUED in each.schema.names), None)
    if rescued is None:
        return pa.Table.from_batches(batches, reader.schema)
    wider = [
        each
        if each.schema.equals(rescued)
        else each.append_column(RESCUED, pa.nulls(each.num_rows, pa.string()))
        for each in batches
    ]
    return pa.Table.from_batches(wider, rescued)


def _pieces(images: Sequence[Image]) -> Iterator[Sequence[Image]]:
    for start in range(0, len(images), _ROWS):
        yield from _halved(images[start : start + _ROWS])


def _halved(images: Sequence[Image]) -> Iterator[Sequence[Image]]:
    if len(images) > 1 and sum(map(len, filter(None, images))) > _CHARACTERS:
        middle = len(images) // 2
        yield from _halved(images[:middle])
        yield from _halved(images[middle:])
    else:
        yield images


def _culprit(
    reader: _Images, images: Sequence[Image], as_text: frozenset[str], connector: str
) -> DecodeError:
    """What to say of images that are not what their columns promise."""
    if _reads(_Images((), as_text, connector), images):
        for at, column in enumerate(reader.columns):
            if not _reads(_Images((column,), as_text, connector), images):
                return reader.misfit(at)
    return _not_an_object()


def _reads(reader: _Images, images: Sequence[Image]) -> bool:
    try:
        for piece in _pieces(images):
            reader.batch(piece)
    except msgspec.ValidationError:
        return False
    return True


def _not_an_object() -> DecodeError:
    return DecodeError("the image of a row is not a JSON object")
