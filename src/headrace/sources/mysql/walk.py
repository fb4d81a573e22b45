"""The walk over rows of a binlog event, generated for how their columns lie. No I/O.

A row begins with a bit for each of its columns that says whether it is NULL; the others follow,
each with a fixed size or with its length in front. Neighbours of fixed size, and the length that
follows them, are read in one step. A row without NULL takes the short way, for which this is known
beforehand; any other row asks for each of its columns that may be NULL.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Walk = Callable[..., tuple[int, bool]]
"""The rows from one place to another, and a list for each image of a row (one, or the old and the
new one), which gets the columns' values one after the other -> where the rows end, and whether
there was a NULL."""

_PREFIXES = {1: "B", 2: "H", 4: "I"}


class Field(NamedTuple):
    """A column of an image, as far as the walk must know."""

    code: str  # struct's; "": its length stands in front
    prefix: int
    nullable: bool


def walk(images: Sequence[Sequence[Field]]) -> Walk:
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

    def compiled(self) -> Walk:
        exec("\n".join(self._lines), self._names)
        function: Walk = self._names["walk"]
        return function

    def image(self, number: int, fields: Sequence[Field]) -> None:
        """One image of a row: its bits, and both ways to read it."""
        size = (len(fields) + 7) // 8
        # Bits beyond the last column may be anything.
        rest = (1 << len(fields) - 8 * (size - 1)) - 1 if fields else 0
        bits = [f"data[at + {byte}]" for byte in range(size)]
        if bits:
            bits[-1] += f" & {rest}"
        if any(field.nullable for field in fields):
            self.add(f"  if {' or '.join(bits)}:")
            self._asking(fields, size)
            self.add("  else:")
            self._straight(fields, size)
        else:
            self.add("  if True:")
            self._straight(fields, size)
        values = "".join(f"c{at}, " for at in range(len(fields)))
        self.add(f"  values{number} += ({values})")

    def _straight(self, fields: Sequence[Field], skip: int) -> None:
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

    def _asking(self, fields: Sequence[Field], skip: int) -> None:
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
