"""A column's type as the source writes it, as an Arrow type."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pkgutil import resolve_name

import pyarrow as pa

from ..connector import connector as connector_of
from ..event import Column
from .kinds import ANYTHING, DOCUMENT, Kind


@lru_cache(maxsize=4096)
def _kind(type_text: str, connector: str) -> Kind:
    return _kinds(connector)(type_text)


@cache
def _kinds(connector: str) -> Callable[[str], Kind]:
    """The function of a connector that gives the kind of a type."""
    name = connector_of(connector).arrow
    found: Callable[[str], Kind] = resolve_name(name) if name else _anything
    return found


def _anything(_type_text: str) -> Kind:
    return ANYTHING


def arrow_type(type_text: str, connector: str) -> pa.DataType:
    """The Arrow type of a column that the source declares as `type_text`."""
    return _kind(type_text, connector).arrow


def arrow_schema(
    columns: Sequence[Column],
    *,
    connector: str,
    as_text: frozenset[str] = frozenset(),
) -> pa.Schema:
    """The schema of what `decode` returns for these columns."""
    return pa.schema([(c.name, kind_of(c, as_text, connector).arrow) for c in columns])


def kind_of(column: Column, as_text: frozenset[str], connector: str) -> Kind:
    kind = _kind(column.type, connector)
    # A document is text already, and its quotes belong to it.
    return ANYTHING if column.name in as_text and kind is not DOCUMENT else kind


_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_WIDER: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
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
