"""What is known of a kind of database beyond its changes: positions, types, names in formats.

A source's class names its connector, and is an entry point of `headrace.sources`:

    class Mine:
        connector = Connector(name="mine", positions=(MinePosition,))

That is enough. A connector may be an entry point of `headrace.connectors` as well, under the tag
of each of its positions, so that whoever reads a log of it needs no driver of the database.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, Generic, TypeVar

import msgspec

from .. import plugins
from ..errors import ConfigError
from .event import Change, Position

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DebeziumBlock:
    """What the `debezium` format writes into the `source` block of a change."""

    connector: str = ""  # what Debezium calls it; "": as we do
    schema: bool = True  # whether a table is of a schema, and not of a database alone
    sequence: bool = True  # whether the numbers of `commit` and `own` are shown
    # Further members, as a dict or a struct; None: there are none.
    members: Callable[[Change], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """A kind of database, as readers of the log know it; it opens nothing and needs no driver."""

    name: str  # `connector` of its tables
    positions: tuple[type[Position], ...]
    # "module:function", from a column's type as text to a `change.arrow.kinds.Kind`. It is
    # imported when Arrow is used; "": each value is text.
    arrow: str = ""
    debezium: DebeziumBlock = field(default_factory=DebeziumBlock)
    # The position as the `savegress` format shows it; None: as `to_json` does.
    savegress_position: Callable[[Change], Mapping[str, Any]] | None = None

    def position_from_json(self, shown: Mapping[str, Any]) -> Position:
        """The position that `to_json` of one of its classes shows so."""
        for position in self.positions:
            try:
                return position.from_json(shown)
            except ValueError:
                continue
        raise ValueError(f"not a position of {self.name}: {shown!r}")


_known: dict[str, Connector] = {}  # by name, and by the tag of each position


def register(connector: Connector) -> None:
    """Make a connector known to this process without an entry point."""
    _known.update(dict.fromkeys(_names(connector), connector))


def connector(name: str) -> Connector:
    """The connector of a table, or of a position's tag; a ConfigError when none is installed."""
    found = _known.get(name)
    if found is None:
        found = _installed(name)
        register(found)
    return found


def position_from_json(connector_name: str, shown: Mapping[str, Any]) -> Position:
    """The position behind the JSON that a change of this connector shows."""
    return connector(connector_name).position_from_json(shown)


def _tag(position: type[Position]) -> str:
    return str(position.__struct_config__.tag)


def _installed(name: str) -> Connector:
    if name in plugins.names(plugins.CONNECTORS):
        registered: Connector = plugins.load(plugins.CONNECTORS, name)
        return registered
    sources = plugins.names(plugins.SOURCES)
    if name in sources and (found := _of_source(name)) and name in _names(found):
        return found
    # A source's type, its connector and its positions may all have names of their own.
    for found in filter(None, map(_importable, sources)):
        if name in _names(found):
            return found
    raise ConfigError(
        f"no connector called {name!r} is installed",
        hint="Install the package whose source captured these changes.",
    )


def _of_source(type_name: str) -> Connector | None:
    return getattr(plugins.load(plugins.SOURCES, type_name), "connector", None)


def _importable(type_name: str) -> Connector | None:
    try:
        return _of_source(type_name)
    except ConfigError:  # such as a driver that is not installed
        return None


def _names(found: Connector) -> tuple[str, ...]:
    return (found.name, *map(_tag, found.positions))


class PositionsDecoder(Generic[_T]):
    """Decodes MessagePack that has positions in it, and loads their connectors as they come.

    `type_of` gives the type to decode from the union of all positions that are known, and `tags`
    finds the tags in a value whose positions are tuples. Once a connector is known, decoding it
    costs what a decoder of msgspec costs.
    """

    def __init__(self, type_of: Callable[[Any], Any], tags: Callable[[Any], Iterable[str]]) -> None:
        self._type_of = type_of
        self._tags = tags
        self.decode: Callable[[Any], _T] = self.learn  # fails for tags that are not known yet

    def __call__(self, encoded: bytes | msgspec.Raw) -> _T:
        try:
            return self.decode(encoded)
        except msgspec.ValidationError:
            return self.learn(encoded)

    def learn(self, encoded: bytes | msgspec.Raw) -> _T:
        """Decode with the connectors of all tags in it."""
        plain = msgspec.msgpack.decode(encoded, type=self._type_of(tuple[Any, ...]))
        for tag in set(self._tags(plain)):
            connector(tag)
        union = reduce(or_, {type_ for each in _known.values() for type_ in each.positions})
        decode = msgspec.msgpack.Decoder(self._type_of(union)).decode
        decoded: _T = decode(encoded)
        self.decode = decode
        return decoded
