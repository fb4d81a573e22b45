"""Every format that is installed, by its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

from .. import plugins
from ..change.event import Op
from ..errors import ConfigError
from ..model import Model
from . import AnyFormat, StreamFormat
from .facts import Facts, FormatOptions


def names() -> tuple[str, ...]:
    """What `format` may say."""
    return tuple(plugins.names(plugins.FORMATS))


def event_names() -> tuple[str, ...]:
    """Those of `names` whose events each stand for a change or an entity, and not for a stream."""
    return tuple(name for name in names() if not _of_streams(name))


def _of_streams(name: str) -> bool:
    try:
        return isinstance(plugins.load(plugins.FORMATS, name), StreamFormat)
    except ConfigError:
        return False  # loading it by name raises the reason


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
        made = self._made.get((name, include, markers))
        if made is None:
            made = _made(name, FormatOptions(self.facts, self.model, include, markers))
            self._made[name, include, markers] = made
        return made

    def of_log(self, epoch: str) -> "Formats":
        """The same formats, for the changes of one log."""
        return replace(self, facts=replace(self.facts, pipeline=epoch[:12]))


def _made(name: str, options: FormatOptions) -> AnyFormat:
    if name not in names():
        raise ConfigError(f"no format called {name!r}; there are: {', '.join(names())}")
    plugin = plugins.load(plugins.FORMATS, name)
    made: AnyFormat = plugin.of(options) if hasattr(plugin, "of") else plugin()
    return made


@cache
def schemas() -> Mapping[str, bytes]:
    """The JSON Schemas of events, by the names of their files: ours, and those of other packages.

    A format of another package brings its own as `schema`; one that cannot be imported has none.
    """
    folder = files(__package__).joinpath("schemas")
    found = {
        file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith(".json")
    }
    for name in names():
        if (schema := _schema(name)) is not None:
            found.setdefault(f"{name}.json", schema)
    return dict(sorted(found.items()))


def _schema(name: str) -> bytes | None:
    try:
        schema: bytes | None = getattr(plugins.load(plugins.FORMATS, name), "schema", None)
    except ConfigError:
        return None
    return schema
