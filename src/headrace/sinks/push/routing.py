"""Where an event goes: templates such as `cdc.${schema}.${table}`, and names of tables in them.

What a schema or a table has in its name beside letters, digits, `_` and `-` becomes `-` and two
hexadecimal digits for each byte (`order items` is `order-20items`); so does a `-` that could be
taken for one of these. Two different names therefore stay different.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import blake2b
from typing import ClassVar, Generic, TypeVar

from ...errors import ConfigError, nearest
from ...formats.savegress import OPERATIONS
from .contract import Event

T = TypeVar("T")

_NAME = re.compile(r"\$\{(?P<name>[^}]*)\}")
_NOT_PLAIN = re.compile(r"-(?=[0-9A-F]{2})|[^A-Za-z0-9_-]")
_DIGEST = 16  # hexadecimal digits


class Template:
    """A text in which `${source}`, `${schema}` and `${table}` stand for those of an event.

    No dataclass: a config file gives it as one text.
    """

    __slots__ = ("text",)

    # A config file's `${…}` with one of these names is no variable of the environment.
    NAMES: ClassVar[tuple[str, ...]] = ("source", "schema", "table")

    def __init__(self, text: str) -> None:
        for found in _NAME.finditer(text):
            if found["name"] not in self.NAMES:
                known = nearest(found["name"], self.NAMES)
                raise ConfigError(f"{text}: nothing is called {found['name']}{known}")
        self.text = text

    def __repr__(self) -> str:
        return f"Template({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and other.text == self.text

    def __hash__(self) -> int:
        return hash((Template, self.text))

    def __str__(self) -> str:
        return self.text

    @property
    def plain(self) -> str:
        """The text without its names: what is the same for every event."""
        return _NAME.sub("", self.text)

    def fill(
        self, *, source: str, schema: str, table: str, escape: Callable[[str], str] = str
    ) -> str:
        """The text for an event; `escape` makes a name fit for where it goes."""
        names = {"source": source, "schema": schema, "table": table}
        return _NAME.sub(lambda found: escape(names[found["name"]]), self.text)


def escaped(name: str) -> str:
    """A name with only letters, digits, `_` and `-`."""
    return _NOT_PLAIN.sub(lambda found: "".join(f"-{b:02X}" for b in found[0].encode()), name)


def token(name: str) -> str:
    """The same where there must be a character, as between two dots; a schema may have no name."""
    return escaped(name) or "-"


def within(name: str, longest: int) -> str:
    """A name of ASCII, cut to so many characters; then it ends in a digest of the whole."""
    if len(name) <= longest:
        return name
    digest = blake2b(name.encode(), digest_size=_DIGEST // 2).hexdigest()
    return f"{name[: longest - _DIGEST - 1]}-{digest}"


class Routes(Generic[T]):
    """What the events of a table share on their way to a broker, made once for each table."""

    def __init__(self, make: Callable[[Event], T]) -> None:
        self._make = make
        self._routes: dict[tuple[str, str, str], T] = {}

    def __call__(self, event: Event) -> T:
        table = (event.source, event.schema, event.table)
        route = self._routes.get(table)
        if route is None:
            route = self._routes[table] = self._make(event)
        return route


class OperationNames(dict[str, T]):
    """The name of each operation, encoded once as a broker wants it."""

    def __init__(self, encode: Callable[[str], T]) -> None:
        super().__init__({op.value: encode(name) for op, name in OPERATIONS.items()})
        self._encode = encode

    def __missing__(self, op: str) -> T:
        return self._encode(op)
