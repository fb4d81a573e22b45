"""SQLite's values -> JSON images. No I/O.

A column holds what was put there, whatever its type says. Integers and reals are JSON numbers with
every digit, text is a string, and a blob is base64. So that nobody takes one for the other, a
string of a column of blobs is a blob, and elsewhere a blob is `{"base64": …}`; text in a column of
blobs is `{"text": …}`.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from ...change.event import Column
from ...errors import DecodeError

_encode = msgspec.json.Encoder().encode


def holds_blobs(declared: str) -> bool:
    """Whether a column of this type is for blobs."""
    return "BLOB" in declared.upper() and not any(
        word in declared.upper() for word in ("INT", "CHAR", "CLOB", "TEXT")
    )


class Broken(bytes):
    """Text that is not valid in the database's encoding."""


class Images:
    """Turns the rows of one layout of a table into JSON."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._names = [column.name for column in columns]
        self._blobs = [holds_blobs(column.type) for column in columns]
        self._keys = [at for at, column in enumerate(columns) if column.key]

    def image(self, values: Sequence[Any]) -> bytes:
        """All columns."""
        converted = map(_json_value, values, self._blobs)
        try:
            return _encode(dict(zip(self._names, converted, strict=True)))
        except _NotText as error:
            broken = [n for n, v in zip(self._names, values, strict=True) if type(v) is Broken]
            raise DecodeError(f"column {broken[0]!r} has text that is not UTF-8") from error

    @staticmethod
    def value(value: Any, column: Column) -> bytes:
        """One value of a column."""
        return _encode(_json_value(value, holds_blobs(column.type)))

    def key(self, values: Sequence[Any]) -> bytes | None:
        """The columns of the key; None: the table has none."""
        if not self._keys:
            return None
        key = {self._names[at]: _json_value(values[at], self._blobs[at]) for at in self._keys}
        if None in key.values():
            names = ", ".join(name for name, value in key.items() if value is None)
            raise DecodeError(
                f"a row has NULL in its primary key ({names}), so nothing tells it from others"
            )
        return _encode(key)

    def changed(self, old: Sequence[Any], new: Sequence[Any]) -> tuple[str, ...]:
        """The columns whose value differs, or the type of it."""
        return tuple(
            name
            for name, was, now in zip(self._names, old, new, strict=True)
            if type(was) is not type(now) or was != now
        )


class _NotText(ValueError):
    """A value that is neither text nor a blob."""


def _json_value(value: Any, blobs: bool) -> Any:
    kind = type(value)
    if kind is Broken:
        raise _NotText
    if kind is bytes and not blobs:
        return {"base64": b64encode(value).decode()}
    if kind is str and blobs:
        return {"text": value}
    if kind is float and not math.isfinite(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def undecoded(values: Sequence[Any]) -> list[Any]:
    """Values that are kept although they could not be read, each with its type."""
    return [
        {"base64": b64encode(value).decode()}
        if isinstance(value, bytes)
        else _json_value(value, False)
        for value in values
    ]
