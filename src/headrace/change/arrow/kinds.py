"""JSON values to an Arrow column: a function for each way that images write them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import GenericAlias
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Raw

TEXT = pa.string()
INSTANT = pa.timestamp("us", tz="UTC")


def plain(values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
    return pa.array(values, arrow)


Texts = Sequence[str | None] | Any
"""Text, as an Arrow column already or not."""


def texts(values: Texts) -> pa.StringArray:
    """Text as an Arrow column."""
    return values if isinstance(values, pa.StringArray) else pa.array(values, TEXT)


def parsed(values: Texts, arrow: pa.DataType) -> pa.Array:
    return texts(values).cast(arrow)


def wall_clock(values: Sequence[str | None], arrow: pa.DataType) -> pa.Array:
    # The image ends in Z, which Arrow takes for a time zone only.
    return parsed(values, INSTANT).cast(arrow)


def _offsets(lengths: Iterable[int], count: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.fromiter(lengths, np.int32, count), out=offsets[1:])
    return offsets


def documents(values: Sequence[Raw], _arrow: pa.DataType) -> pa.Array:
    """The JSON text of each value, byte for byte."""
    joined = b"".join(cast("Sequence[bytes]", values))
    offsets = _offsets(map(len, values), len(values))
    texts = pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(joined))
    if b"null" in joined:
        return pc.if_else(pc.equal(texts, "null"), pa.scalar(None, TEXT), texts)
    return texts


def floats(values: Sequence[Raw], arrow: pa.DataType) -> pa.Array:
    # From the digits: msgspec reads -0 as 0, and a real would be rounded twice by way of a double.
    return pc.utf8_trim(documents(values, TEXT), '"').cast(arrow)


_string = msgspec.json.Decoder(str).decode


def anything(values: Sequence[Raw], arrow: pa.DataType) -> pa.Array:
    """Strings as the text they stand for, all else as its JSON text."""
    texts = documents(values, arrow)
    if pc.any(pc.match_substring(texts, "\\")).as_py():
        plain = [_string(text) if text and text[0] == '"' else text for text in texts.to_pylist()]
        return pa.array(plain, arrow)
    return pc.if_else(pc.starts_with(texts, '"'), pc.utf8_slice_codeunits(texts, 1, -1), texts)


def elements(values: Sequence[Raw], arrow: pa.DataType) -> pa.Array:
    """The same within an array, where another array is a further dimension."""
    if pc.any(pc.starts_with(documents(values, arrow), "[")).as_py():
        raise pa.ArrowInvalid("more than one dimension")
    return anything(values, arrow)


@dataclass(frozen=True, slots=True)
class Kind:
    """How one type travels: in Arrow, in the decoded image, and from there to Arrow."""

    arrow: pa.DataType
    image: Any  # the type that msgspec reads
    column: Callable[[Sequence[Any], pa.DataType], pa.Array]

    @property
    def image_field(self) -> tuple[Any, Any]:
        """The type and default of a field; a Raw holds null as its text."""
        return (Raw, Raw(b"null")) if self.image is Raw else (self.image | None, None)


ANYTHING = Kind(TEXT, Raw, anything)
STRING = Kind(TEXT, str, plain)
DOCUMENT = Kind(TEXT, Raw, documents)


def list_of(element: Kind) -> Kind:
    """A list of one dimension: its elements are converted as one column, then cut up again."""
    if element is ANYTHING:
        element = Kind(TEXT, Raw, elements)

    def column(values: Sequence[list[Any] | None], arrow: pa.DataType) -> pa.Array:
        lengths = (0 if value is None else len(value) for value in values)
        offsets = pa.array(_offsets(lengths, len(values)))
        flat = list(chain.from_iterable(filter(None, values)))
        absent = pa.array([value is None for value in values], pa.bool_())
        elements = element.column(flat, element.arrow)
        return pa.ListArray.from_arrays(offsets, elements, type=arrow, mask=absent)

    image = GenericAlias(list, (element.image_field[0],))
    return Kind(pa.list_(element.arrow), image, column)
