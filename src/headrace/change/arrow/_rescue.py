"""Values that their columns cannot hold, taken out one by one: null, and their text beside.

This is for the few images that the decoder of a set of columns refuses: it looks at each column by
itself, and halves what does not fit until single values are left.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import Raw

from ...errors import DecodeError
from ..event import Column
from ._types import kind_of
from .kinds import TEXT, Kind

RESCUED = "_rescued"
"""The column that has such texts, as a JSON object by the names of their columns, or null."""

Image = str | bytes | None

_EMPTY = b"{}"
_USUAL, _USUAL_BYTES = 64, 64  # values that are known by heart, and how long each may be
_NULL = Raw(b"null")
_raws = msgspec.json.Decoder(dict[str, Raw]).decode
_string = msgspec.json.Decoder(str).decode
_texts = msgspec.json.Decoder(dict[str, str]).decode
_encode = msgspec.json.Encoder(order="sorted").encode


def misfit(column: Column, arrow: pa.DataType) -> DecodeError:
    """What to say of a value that a column cannot hold; it may be private."""
    return DecodeError(
        f"column {column.name!r} of type {column.type} has a value that {arrow} cannot hold",
        hint=f"Name {column.name!r} in the sink's `as_text`, to keep its text.",
    )


class RescuingImages:
    """The images of one set of columns, some of whose values do not fit."""

    def __init__(self, columns: tuple[Column, ...], as_text: frozenset[str], connector: str):
        self._columns = [
            _RescuingColumn(column, kind_of(column, as_text, connector)) for column in columns
        ]
        fields = [(each.column.name, each.kind.arrow) for each in self._columns]
        self.schema = pa.schema([*fields, (RESCUED, TEXT)])

    def batch(self, images: Sequence[Image]) -> pa.RecordBatch:
        """The columns of some images, and RESCUED; a key is found by its value, so it must fit."""
        rows = [_raws(_EMPTY if image is None else image) for image in images]
        arrays: list[pa.Array] = []
        found: dict[int, dict[str, str]] = defaultdict(dict)
        for each in self._columns:
            name = each.column.name
            values = [row.get(name, _NULL) for row in rows]
            for at in each.unfit(values):
                found[at][name] = _text(values[at])
                values[at] = _NULL
            arrays.append(each.array(values))
        texts = pa.array([rescued_text(found.get(at, {})) for at in range(len(rows))], TEXT)
        return pa.record_batch([*arrays, texts], schema=self.schema)


class _RescuingColumn:
    def __init__(self, column: Column, kind: Kind) -> None:
        self.column = column
        self.kind = kind
        self._decode: Callable[[Raw], Any] | None = None  # None: it is read as it is
        if kind.image is not Raw:
            self._decode = msgspec.json.Decoder(kind.image_field[0]).decode
        self._usual: set[bytes] = set()  # values that did not fit: NaN comes again and again

    def array(self, values: Sequence[Raw]) -> pa.Array:
        """Values that fit."""
        read = values if self._decode is None else list(map(self._decode, values))
        return self.kind.column(read, self.kind.arrow)

    def unfit(self, values: Sequence[Raw]) -> list[int]:
        """Which of the values do not fit."""
        found = self._among_usual(values)
        left = list(values)
        for at in found:
            left[at] = _NULL
        found += self._unfit(left, 0)
        if found and self.column.key:
            raise misfit(self.column, self.kind.arrow)
        few = (bytes(values[at]) for at in found[:_USUAL])
        self._usual.update(each for each in few if len(each) <= _USUAL_BYTES)
        return found

    def _among_usual(self, values: Sequence[Raw]) -> list[int]:
        usual = self._usual
        if len(usual) > _USUAL:
            usual.clear()
        return [at for at, value in enumerate(values) if bytes(value) in usual] if usual else []

    def _unfit(self, values: Sequence[Raw], first: int) -> Iterator[int]:
        if self._fits(values):
            return
        if len(values) == 1:
            yield first
            return
        middle = len(values) // 2
        yield from self._unfit(values[:middle], first)
        yield from self._unfit(values[middle:], first + middle)

    def _fits(self, values: Sequence[Raw]) -> bool:
        try:
            self.array(values)
        except (msgspec.ValidationError, pa.ArrowException, OverflowError):
            return False
        return True


def _text(value: Raw) -> str:
    """The text that a string stands for, of all else its JSON; as `kinds.anything` has it."""
    written = bytes(value)
    return _string(written) if written[:1] == b'"' else written.decode()


@lru_cache(maxsize=1024)
def keyless(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Columns whose rows are not found by a key, so that every value may be rescued."""
    return tuple(Column(each.name, each.type) for each in columns)


def rescued_under(texts: pa.ChunkedArray, names: Mapping[str, str]) -> pa.Array:
    """RESCUED with what it holds of these columns, under the names that they have now."""
    found = [rescued_of(text) for text in texts.to_pylist()]
    kept = [{names[each]: text for each, text in row.items() if each in names} for row in found]
    return pa.array(map(rescued_text, kept), TEXT)


def rescued_of(texts: str | None) -> dict[str, str]:
    """What a row's RESCUED holds, by column."""
    return {} if texts is None else _texts(texts)


def rescued_text(found: Mapping[str, str]) -> str | None:
    """The same as it is stored: equal texts for equal values, in whatever order they have come."""
    return _encode(found).decode() if found else None
