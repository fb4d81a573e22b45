"""Some columns of a row, without taking the others apart."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

_KEPT = 1000  # sets of columns; a reader of one takes a hundred times as long to make as to use

_Read = Callable[[bytes], Any]

_encode = msgspec.json.Encoder().encode
_columns = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_readers: dict[tuple[str, ...], _Read] = {}


def picked(row: bytes, names: tuple[str, ...]) -> bytes:
    """Those of the named columns that a row has, as an object; their values as they were."""
    read = _readers.get(names)
    if read is None:
        if len(_readers) >= _KEPT:
            _readers.clear()
        read = _readers[names] = _reader(names)
    return _encode(read(row))


def _reader(names: Sequence[str]) -> _Read:
    """What reads a row into a value that is written as nothing but these columns."""
    fields = [
        (
            f"column{at}",
            msgspec.Raw | msgspec.UnsetType,
            msgspec.field(name=name, default=msgspec.UNSET),
        )
        for at, name in enumerate(names)
    ]
    try:
        return msgspec.json.Decoder(msgspec.defstruct("Columns", fields, gc=False)).decode
    except ValueError:  # no field may be called so
        return _slow(names)


def _slow(names: Sequence[str]) -> _Read:
    def read(row: bytes) -> dict[str, msgspec.Raw]:
        columns = _columns(row)
        return {name: columns[name] for name in names if name in columns}

    return read
