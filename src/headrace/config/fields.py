"""The classes that stand behind a `type`, and the settings that a class takes."""

import dataclasses
import typing
from typing import Any, NamedTuple

import msgspec

from ..plugins import SINKS, SOURCES, load, names
from ..sinks import Sink
from ..sources import Source


def source_types() -> list[str]:
    """Every `type` that a source may have."""
    return names(SOURCES)


def source_class(type_name: str) -> type[Source]:
    """The class behind a source's `type`."""
    plugin: type[Source] = load(SOURCES, type_name)
    return plugin


def sink_types() -> list[str]:
    """Every `type` that a sink may have."""
    return names(SINKS)


def sink_class(type_name: str) -> type[Sink]:
    """The class behind a sink's `type`."""
    plugin: type[Sink] = load(SINKS, type_name)
    return plugin


class Setting(NamedTuple):
    """One setting of a section."""

    name: str
    type: Any
    required: bool
    default: Any
    field: str  # of the class: another one where the setting is a keyword of Python


def settings_of(section: type) -> dict[str, Setting]:
    """The settings of a section: the fields of its class."""
    hints = typing.get_type_hints(section, include_extras=True)
    if dataclasses.is_dataclass(section):
        # What a part of the program hands over, and nobody sets, says so of itself.
        fields = [f for f in dataclasses.fields(section) if f.metadata.get("setting", True)]
        defaults = {field.name: _default(field) for field in fields}
        names = {field.name: field.metadata.get("name", field.name) for field in fields}
    else:
        unset = getattr(section, "NOT_SETTINGS", ())
        struct_fields = [f for f in msgspec.structs.fields(section) if f.name not in unset]
        defaults = {field.name: _default(field) for field in struct_fields}
        names = {name: name for name in defaults}
    absent = (dataclasses.MISSING, msgspec.NODEFAULT)
    return {
        names[field]: Setting(names[field], hints[field], default in absent, default, field)
        for field, default in defaults.items()
    }


def _default(field: Any) -> Any:
    made = field.default_factory
    return field.default if made in (dataclasses.MISSING, msgspec.NODEFAULT) else made()
