"""DECIMAL of MySQL and MariaDB as text, from how it is packed.

Nine digits take four bytes, fewer take fewer; of a negative number all bits are turned over. The
function that reads a precision and a scale is generated, since every group has its own width.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

_SIZES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)  # bytes by digits
_CODES = {1: "B", 2: "H", 3: "BH", 4: "I"}
_PRECISION, _SCALE = 81, 38  # no server allows more

Decimals = Callable[[Sequence[bytes]], list[bytes]]


def decimal_size(precision: int, scale: int) -> int:
    """How many bytes a value takes; ValueError: there is no such type."""
    return sum(_SIZES[digits] for digits in [*_whole(precision, scale), *_fraction(scale)])


@lru_cache
def decimals(precision: int, scale: int) -> Decimals:
    """The function that turns packed values into text, exactly as the server shows them."""
    whole, fraction = _whole(precision, scale), _fraction(scale)
    fields = [_SIZES[digits] for digits in [*whole, *fraction]]
    unpack = struct.Struct(">" + "".join(_CODES[size] for size in fields)).iter_unpack
    names, expressions = _named(fields)
    half = 1 << 8 * struct.calcsize(">" + _CODES[fields[0]][0]) - 1
    positive = _text(_values(expressions, fields, negative=False), whole, fraction)
    negative = _text(_values(expressions, fields, negative=True), whole, fraction, sign="-")
    code = f"lambda rows: [{positive} if a0 >= {half} else {negative} for {names} in rows]"
    read: Callable[[Iterator[tuple[Any, ...]]], list[bytes]] = eval(code)
    return lambda values: read(unpack(b"".join(values)))


def _whole(precision: int, scale: int) -> list[int]:
    if not (0 < precision <= _PRECISION and 0 <= scale <= min(_SCALE, precision)):
        raise ValueError(f"DECIMAL({precision},{scale})")
    full, rest = divmod(precision - scale, 9)
    return [rest] * bool(rest) + [9] * full


def _fraction(scale: int) -> list[int]:
    full, rest = divmod(scale, 9)
    return [9] * full + [rest] * bool(rest)


def _named(fields: Sequence[int]) -> tuple[str, list[str]]:
    """Names for what struct gives, and of each group how to put it together."""
    names: list[str] = []
    expressions: list[str] = []
    for size in fields:
        first = f"a{len(names)}"
        names.append(first)
        if size == 3:
            names.append(f"a{len(names)}")
            expressions.append(f"({first} << 16 | {names[-1]})")
        else:
            expressions.append(first)
    return ", ".join(names) + ",", expressions


def _values(expressions: Sequence[str], fields: Sequence[int], *, negative: bool) -> list[str]:
    values: list[str] = []
    for at, (expression, size) in enumerate(zip(expressions, fields, strict=True)):
        sign = 1 << 8 * size - 1 if at == 0 else 0
        if negative:
            values.append(f"({(1 << 8 * size) - 1 - sign} - {expression})")
        else:
            values.append(f"({expression} - {sign})" if sign else expression)
    return values


def _text(values: list[str], whole: list[int], fraction: list[int], sign: str = "") -> str:
    number = "0"
    for value in values[: len(whole)]:
        number = value if number == "0" else f"({number} * 1000000000 + {value})"
    shown = f"{sign}%d" + ("." if fraction else "") + "".join(f"%0{d}d" for d in fraction)
    return f"b'{shown}' % ({', '.join([number, *values[len(whole) :]])},)"
