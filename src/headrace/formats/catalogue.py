"""Every format by its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from ..change.event import Op
from ..errors import ConfigError
from ..model import Model
from . import AnyFormat
from .canonical import Canonical
from .changefeed import Changefeed
from .cloudevents import CloudEvents
from .debezium import Debezium
from .entity import Entity
from .etl import Etl
from .facts import Facts
from .notification import Notification
from .savegress import Savegress, SavegressTransactions


class FormatOptions(NamedTuple):
    """What a format may depend on: the installation, and what a request asks for."""

    facts: Facts
    model: Model
    include: frozenset[Op]
    markers: bool


_MAKE: Mapping[str, Callable[[FormatOptions], AnyFormat]] = {
    "canonical": lambda options: Canonical(),
    "changefeed": lambda options: Changefeed(options.include),
    "savegress": lambda options: (
        SavegressTransactions(options.facts) if options.markers else Savegress(options.facts)
    ),
    "notification": lambda options: Notification(options.include),
    "debezium": lambda options: Debezium(options.facts),
    "cloudevents": lambda options: CloudEvents(options.facts),
    "etl": lambda options: Etl(),
    "entity": lambda options: Entity(options.model, options.facts),
}

NAMES = tuple(_MAKE)


@dataclass(frozen=True)
class Formats:
    """The formats of an installation: what they say beyond a change is the same for all."""

    facts: Facts = field(default_factory=Facts)
    model: Model = field(default_factory=Model)
    # Formats keep what the changes of a table share, so each is made once.
    _made: dict[tuple[str, frozenset[Op], bool], AnyFormat] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def named(
        self, name: str, *, include: frozenset[Op] = frozenset(), markers: bool = False
    ) -> AnyFormat:
        """The format of that name.

        `include` names operations that some formats carry only on request, `markers` asks for
        events that say where transactions begin and end; what does not apply is ignored.
        """
        if name not in _MAKE:
            raise ConfigError(f"no format called {name!r}; there are: {', '.join(NAMES)}")
        made = self._made.get((name, include, markers))
        if made is None:
            made = _MAKE[name](FormatOptions(self.facts, self.model, include, markers))
            self._made[name, include, markers] = made
        return made

    def of_log(self, epoch: str) -> "Formats":
        """The same formats, for the changes of one log."""
        return replace(self, facts=replace(self.facts, pipeline=epoch[:12]))


@cache
def schemas() -> Mapping[str, bytes]:
    """The JSON Schemas of events, by the names of their files."""
    folder = files(__package__).joinpath("schemas")
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".json")
    }
