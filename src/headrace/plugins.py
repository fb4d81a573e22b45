"""Sources, sinks and formats by name: entry points of the packages that are installed.

Ours are found like everybody else's:

    [project.entry-points."headrace.sinks"]
    folder = "my_package:Folder"

A package is imported when something of it is used, so one that is broken stops nobody else.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

import msgspec

from .errors import ConfigError

SOURCES = "headrace.sources"
SINKS = "headrace.sinks"
FORMATS = "headrace.formats"
CONNECTORS = "headrace.connectors"

_WORDS = {
    SOURCES: "source type",
    SINKS: "sink type",
    FORMATS: "format",
    CONNECTORS: "connector",
}
_SPARK = ("pyspark", "deltalake", "pyarrow", "pandas", "numpy")  # what the extra `spark` installs


class Finding(msgspec.Struct, frozen=True):
    """One thing that `headrace check` looked at, at a source or a sink."""

    name: str
    ok: bool
    detail: str
    fix: str = ""  # the statement or setting that fixes it


def names(group: str) -> list[str]:
    """Every name in a group: what `type` or `format` may say."""
    return sorted(_installed(group))


def load(group: str, name: str) -> Any:
    """What a package offers under a name; a ConfigError when it cannot be imported."""
    entry = _only(group, name, _installed(group)[name])
    try:
        return entry.load()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a script without a guard may end itself
        if group == SINKS:
            require_spark(f"the sink type {name}")
        raise ConfigError(
            f"the {_WORDS[group]} {name} ({entry.value}, of {_owner(entry)}) cannot be imported: "
            f"{str(error) or type(error).__name__}",
            hint=f"Install what it needs, or remove {_owner(entry)}.",
        ) from error


def require_spark(what: str) -> None:
    """Raise a ConfigError unless the packages of the extra `spark` are installed."""
    if missing := [name for name in _SPARK if find_spec(name) is None]:
        raise ConfigError(f"{what} needs {', '.join(missing)}: pip install 'headrace[spark]'")


@cache
def _installed(group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name; where we have the name, only ours."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    if not any(_is_ours(entry) for entries in found.values() for entry in entries):
        raise ConfigError(
            f"the installed package headrace has no entry points {group}",
            hint="Install it again: its metadata is of another version than its code.",
        )
    return {name: list(filter(_is_ours, entries)) or entries for name, entries in found.items()}


def _only(group: str, name: str, entries: list[EntryPoint]) -> EntryPoint:
    if len(entries) > 1:
        owners = " and ".join(sorted(map(_owner, entries)))
        raise ConfigError(
            f"the {_WORDS[group]} {name} is in several packages: {owners}", hint="Remove one."
        )
    return entries[0]


def _is_ours(entry: EntryPoint) -> bool:
    return entry.value.startswith("headrace.")


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown package"
