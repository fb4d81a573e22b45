"""Sources and sinks by their `type`, and the settings that a class takes."""

import dataclasses
import importlib
import pkgutil
import typing
from types import ModuleType
from typing import Any, NamedTuple

import msgspec


def types(package: ModuleType) -> list[str]:
    """Every `type` that a package offers: its public modules."""
    modules = pkgutil.iter_modules(package.__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def class_of(package: ModuleType, type_name: str) -> Any:
    """The class behind a `type`: what its module calls `plugin`."""
    return importlib.import_module(f"{package.__name__}.{type_name}").plugin


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
