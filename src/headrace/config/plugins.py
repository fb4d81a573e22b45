"""Sources, sinks and formats by their `type`, and the settings that a class takes.

Each is an entry point of an installed package, ours like everybody else's:

    [project.entry-points."headrace.sinks"]
    folder = "my_package:Folder"
"""

import dataclasses
import typing
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import msgspec

from ..errors import ConfigError
from ..sinks import Sink
from ..sources import Source

SOURCES = "headrace.sources"
SINKS = "headrace.sinks"
FORMATS = "headrace.formats"


def types(group: str) -> list[str]:
    """Every `type` that is installed in a group."""
    return sorted(_installed(group))


def load(group: str, type_name: str) -> Any:
    """What stands behind a `type`; a ConfigError when its package cannot be imported."""
    entry = _installed(group)[type_name]
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        owner = entry.dist.name if entry.dist else "an unknown package"
        raise ConfigError(
            f"type {type_name} ({entry.value}, of {owner}) cannot be imported: {error}",
            hint=f"Install what it needs, or remove {owner}.",
        ) from error


def source_types() -> list[str]:
    """Every `type` that a source may have."""
    return types(SOURCES)


def source_class(type_name: str) -> type[Source]:
    """The class behind a source's `type`."""
    plugin: type[Source] = load(SOURCES, type_name)
    return plugin


def sink_types() -> list[str]:
    """Every `type` that a sink may have."""
    return types(SINKS)


def sink_class(type_name: str) -> type[Sink]:
    """The class behind a sink's `type`."""
    plugin: type[Sink] = load(SINKS, type_name)
    return plugin


@cache
def _installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; of two packages that claim a name, ours has it."""
    found = sorted(entry_points(group=group), key=_is_ours)
    return {entry.name: entry for entry in found}


def _is_ours(entry: EntryPoint) -> bool:
    return entry.value.startswith("headrace.")


class Setting(NamedTuple):
    """One setting of a section."""

    name: str
    type: Any
    required: bool
    default: Any


def settings_of(section: type) -> dict[str, Setting]:
    """The settings of a section: the fields of its class."""
    hints = typing.get_type_hints(section, include_extras=True)
    if dataclasses.is_dataclass(section):
        # What a part of the program hands over, and nobody sets, says so of itself.
        fields = [f for f in dataclasses.fields(section) if f.metadata.get("setting", True)]
        defaults = {field.name: _default(field) for field in fields}
    else:
        unset = getattr(section, "NOT_SETTINGS", ())
        struct_fields = [f for f in msgspec.structs.fields(section) if f.name not in unset]
        defaults = {field.name: _default(field) for field in struct_fields}
    absent = (dataclasses.MISSING, msgspec.NODEFAULT)
    return {
        name: Setting(name, hints[name], default in absent, default)
        for name, default in defaults.items()
    }


def _default(field: Any) -> Any:
    made = field.default_factory
    return field.default if made in (dataclasses.MISSING, msgspec.NODEFAULT) else made()
