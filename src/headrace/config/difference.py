"""What differs between two configs, and which of it a running process can take up."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..secret import Secret
from .fields import settings_of
from .settings import Config, PipelineSection

# Whatever reads these, reads them each time. All other settings of a section need a restart.
LIVE: Mapping[str, frozenset[str]] = {
    "server": frozenset({"max_lag_seconds", "stall_seconds", "max_sink_lag_seconds"}),
    "cdc": frozenset(
        {"retention_days", "retention_bytes", "max_log_gb", "max_cursor_hours", "batch_size"}
    ),
}
_LONGEST = 120  # characters of a value that are shown
_HIDDEN = "changed"  # of a value that may be secret


class SettingChange(msgspec.Struct, frozen=True):
    """A setting with another value; values that may be secret do not show."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        if self.after == _HIDDEN:
            return f"{self.name} changed"
        return f"{self.name}: {self.before} → {self.after}"


class NamedDifference(msgspec.Struct, frozen=True):
    """Sources or sinks that came, went, or have other settings."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: dict[str, tuple[SettingChange, ...]] = {}

    def lines(self, word: str) -> Iterator[str]:
        """One line each."""
        for name in self.added:
            yield f"+ {word} {name}"
        for name in self.removed:
            yield f"- {word} {name}"
        for name, settings in self.changed.items():
            yield f"~ {word} {name}: {', '.join(map(str, settings))}"


class ConfigDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that another config changes."""

    sources: NamedDifference = NamedDifference()
    sinks: NamedDifference = NamedDifference()
    pipeline: tuple[SettingChange, ...] = ()  # taken up by starting the pipeline again
    live: tuple[SettingChange, ...] = ()  # taken up at once
    restart: tuple[SettingChange, ...] = ()  # not taken up before a restart

    def lines(self) -> list[str]:
        """What an operator reads; none: nothing differs."""
        return [
            *self.sources.lines("source"),
            *self.sinks.lines("sink"),
            *(f"~ {each}" for each in self.live),
            *(f"~ {each}; the pipeline is started again" for each in self.pipeline),
            *(f"! {each}; needs a restart and stays as it was" for each in self.restart),
        ]

    @property
    def pipeline_concerned(self) -> bool:
        """Whether the pipeline must read its config again."""
        return self.sinks != NamedDifference() or bool(self.pipeline)


def compare(before: Config, after: Config) -> ConfigDifference:
    """What the second config changes."""
    live: list[SettingChange] = []
    restart = list(_changes("", before, after, leave=_SECTIONS))
    for section in ("server", "cdc", "model"):
        for each in _changes(section, getattr(before, section), getattr(after, section)):
            _, _, name = each.name.partition(".")
            (live if name in LIVE.get(section, ()) else restart).append(each)
    ran, runs = before.pipeline or PipelineSection(), after.pipeline or PipelineSection()
    return ConfigDifference(
        sources=_named(before.sources, after.sources),
        sinks=_named(ran.sinks, runs.sinks),
        pipeline=tuple(_changes("pipeline", ran, runs, leave=("sinks",))),
        live=tuple(live),
        restart=tuple(restart),
    )


def taken_up(before: Config, after: Config) -> Config:
    """The config that a process has which takes up what it can."""
    sections = {
        name: msgspec.structs.replace(
            getattr(before, name), **{field: getattr(getattr(after, name), field) for field in live}
        )
        for name, live in LIVE.items()
    }
    return msgspec.structs.replace(
        before, sources=after.sources, pipeline=after.pipeline, **sections
    )


_SECTIONS = ("sources", "server", "cdc", "model", "pipeline")


def _named(before: Sequence[Any], after: Sequence[Any]) -> NamedDifference:
    had, has = ({each.name: each for each in parts} for parts in (before, after))
    return NamedDifference(
        added=tuple(name for name in has if name not in had),
        removed=tuple(name for name in had if name not in has),
        changed={
            name: tuple(_part_changes(had[name], part))
            for name, part in has.items()
            if name in had and had[name] != part
        },
    )


def _part_changes(before: object, after: object) -> Iterator[SettingChange]:
    if type(before) is not type(after):
        yield SettingChange("type", type(before).__name__, type(after).__name__)
        return
    yield from _changes("", before, after)


def _changes(
    section: str, before: object, after: object, *, leave: Sequence[str] = ()
) -> Iterator[SettingChange]:
    prefix = f"{section}." if section else ""
    for name, setting in settings_of(type(after)).items():
        old, new = getattr(before, setting.field), getattr(after, setting.field)
        if name in leave or old == new:
            continue
        if isinstance(new, msgspec.Struct) and type(old) is type(new):
            yield from _changes(f"{prefix}{name}", old, new)
        elif _may_be_secret(type(after), setting.field, old, new):
            yield SettingChange(f"{prefix}{name}", _HIDDEN, _HIDDEN)
        else:
            yield SettingChange(f"{prefix}{name}", _shown(old), _shown(new))


def _may_be_secret(owner: type, field: str, *values: object) -> bool:
    """Whether a value must not show: it is a secret, may hold some, or does not print itself."""
    if dataclasses.is_dataclass(owner):
        printed = {each.name: each.repr for each in dataclasses.fields(owner)}
        if not printed[field]:
            return True
    return any(isinstance(value, Secret | Mapping) for value in values)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and "://" in value:
        value = Secret(value).masked_url()
    text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
