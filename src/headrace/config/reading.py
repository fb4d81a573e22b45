"""Reading a config: its YAML, the environment's variables, and a check of every setting."""

import dataclasses
import itertools
import logging
import os
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .. import plugins
from ..errors import ConfigError, nearest
from ..model import EntityType, Model
from ..secret import MASK, Secret
from ..sinks import Sink
from . import storage, yamlfile
from .fields import settings_of
from .settings import (
    CdcSection,
    Config,
    PipelineSection,
    ServerSection,
    TelemetrySection,
    WebSocketSection,
)

ROOT = "headrace"  # how messages name the file's top level

_PLAIN_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_REFERENCE = re.compile(r"\$?\$\{[^}]*\}?")  # whatever looks like one, `$${` being a plain `${`

# A sink's settings that name a file or a folder.
_PATHS = ("path", "dead_letters", "ca_file", "certificate_file", "key_file", "credentials_file")

T = TypeVar("T")
logger = logging.getLogger("headrace.config")


def load(path: Path | str) -> Config:
    """Read and check a config file; a ConfigError names every problem found in it."""
    file = Path(path)
    config = parse(yamlfile.read(file), folder=file.parent, environment=os.environ)
    for warning in config.warnings:
        logger.warning("%s", warning)
    return config


def parse(content: object, *, folder: Path, environment: Mapping[str, str]) -> Config:
    """Check the content of a config file; relative paths begin at `folder`."""
    reader = _ConfigReader(environment)
    config = reader.config(content)
    if config is None:
        raise ConfigError("\n".join(reader.problems))
    return msgspec.structs.replace(
        config,
        data_dir=(folder / config.data_dir).absolute(),
        server=_server_with_absolute_paths(config.server, folder),
        pipeline=_with_absolute_paths(config.pipeline, folder),
        warnings=tuple(reader.warnings),
    )


def _with_absolute_paths(pipeline: PipelineSection | None, folder: Path) -> PipelineSection | None:
    """The section with every relative path beginning at the config file's folder."""
    if pipeline is None:
        return None
    given, key_file = pipeline.checkpoint_dir, pipeline.api_key_file
    placed = msgspec.structs.replace(
        pipeline,
        checkpoint_dir=pipeline.checkpoint_address or (given and os.path.abspath(folder / given)),
        api_key_file=(folder / key_file).absolute() if key_file else None,
        sinks=tuple(_sink_with_absolute_paths(sink, folder) for sink in pipeline.sinks),
    )
    _expect_own_paths(placed.sinks)
    return placed


def _server_with_absolute_paths(server: ServerSection, folder: Path) -> ServerSection:
    if server.tls is None:
        return server
    given = msgspec.structs.asdict(server.tls)
    placed = {name: (folder / path).absolute() for name, path in given.items() if path}
    return msgspec.structs.replace(server, tls=msgspec.structs.replace(server.tls, **placed))


def _sink_with_absolute_paths(sink: Sink, folder: Path) -> Sink:
    given = {name: getattr(sink, name, None) for name in _PATHS}
    placed = {
        name: os.path.abspath(folder / path)
        for name, path in given.items()
        if isinstance(path, str) and path and "://" not in path
    }
    unplaced: Any = sink
    return dataclasses.replace(unplaced, **placed) if placed else sink


def _expect_own_paths(placed: Iterable[Sink]) -> None:
    """Two sinks that write to one folder would each undo the work of the other."""
    paths = {sink.name: str(path) for sink in placed if (path := getattr(sink, "path", None))}
    for (one, path), (other, inner) in itertools.permutations(paths.items(), 2):
        if f"{inner.rstrip('/')}/".startswith(f"{path.rstrip('/')}/"):
            raise ConfigError(
                f"{ROOT}.pipeline.sinks.{other}.path: the sink {one} already writes there; "
                "give each sink a folder of its own"
            )


class _ConfigReader:
    """Builds a config and collects every problem, so that one error names them all."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self._environment = environment
        self._captured_by: Mapping[str, str] = {}  # which type of source captures another

    def config(self, content: object) -> Config | None:
        given = self._mapping(ROOT, content)
        if self.problems:
            return None
        cdc_given = _ConfigReader(self._environment)._expand("", given.get("cdc"))
        self._captured_by = storage.captured_by(cdc_given)
        # A pipeline that reads from a server elsewhere needs no source here.
        needed = not _names_a_server(given.get("pipeline"))
        sections: dict[str, Any] = {
            "sources": self._named(
                plugins.SOURCES,
                "source",
                f"{ROOT}.sources",
                given.pop("sources", None),
                needed=needed,
            )
        }
        sections["server"] = self._server(f"{ROOT}.server", given.pop("server", None))
        sections["cdc"] = cdc = self._section(CdcSection, f"{ROOT}.cdc", given.pop("cdc", None))
        model = self._model(f"{ROOT}.model", given.pop("model", None), sections["sources"])
        sections["model"] = model.selected(cdc) if model and cdc else model
        if "pipeline" in given:
            sections["pipeline"] = self._pipeline(f"{ROOT}.pipeline", given.pop("pipeline"))
        if "telemetry" in given:
            inside = f"{ROOT}.telemetry"
            sections["telemetry"] = self._section(TelemetrySection, inside, given.pop("telemetry"))
        return self._section(Config, ROOT, given, built=sections)

    def _server(self, where: str, content: object) -> ServerSection | None:
        given = self._mapping(where, content)
        inside = f"{where}.websocket"
        websocket = self._section(WebSocketSection, inside, given.pop("websocket", None))
        return self._section(ServerSection, where, given, built={"websocket": websocket})

    def _model(self, where: str, content: object, named: Iterable[Any]) -> Model | None:
        given = self._mapping(where, content)
        inside = f"{where}.entities"
        entities = self._mapping(inside, given.pop("entities", None))
        built = tuple(
            self._section(EntityType, f"{inside}.{name}", entity, built={"name": name})
            for name, entity in entities.items()
        )
        model = self._section(Model, where, given, built={"entities": built})
        if model is not None:
            self.problems += model.unknown_sources([source.name for source in named if source])
        return model

    def _pipeline(self, where: str, content: object) -> PipelineSection | None:
        given = self._mapping(where, content)
        try:
            plugins.require_spark("a pipeline")
        except ConfigError as error:
            self.problems.append(f"{where}: {error}")
            return None
        built = {
            "spark": self._spark(f"{where}.spark", given.pop("spark", None)),
            "sinks": self._named(plugins.SINKS, "sink", f"{where}.sinks", given.pop("sinks", None)),
        }
        return self._section(PipelineSection, where, given, built=built)

    def _spark(self, where: str, content: object) -> dict[str, Secret]:
        given = self._mapping(where, content)
        for name in given:
            if not name.startswith("spark."):
                self.problems.append(
                    f"{where}: {name} is not a setting of Spark; those begin with spark."
                )
        return {name: self._spark_value(f"{where}.{name}", value) for name, value in given.items()}

    def _spark_value(self, where: str, given: object) -> Secret:
        if not isinstance(given, str | int | float):
            self.problems.append(f"{where}: expected text, a number, or true or false")
        text = str(self._expand(where, given))
        return Secret(text.lower() if isinstance(given, bool) else text)

    def _named(
        self, group: str, word: str, where: str, content: object, *, needed: bool = True
    ) -> tuple[Any, ...]:
        """The sources or the sinks, each under its name."""
        named = self._mapping(where, content)
        if content in (None, {}) and needed:
            self.problems.append(f"{where}: this setting is missing; name at least one {word}")
        for name in named:
            if not _PLAIN_NAME.fullmatch(name):
                self.problems.append(
                    f"{where}.{name}: this is not a valid name for a {word}; "
                    "use small letters, digits and _, a letter first, 41 at most"
                )
        return tuple(
            self._one(group, f"{where}.{name}", name, given) for name, given in named.items()
        )

    def _one(self, group: str, where: str, name: str, content: object) -> object:
        given = self._mapping(where, content)
        chosen = self._class(group, f"{where}.type", given.pop("type", None))
        return self._section(chosen, where, given, built={"name": name}) if chosen else None

    def _class(self, group: str, where: str, given: object) -> type | None:
        types = plugins.names(group)
        known = ", ".join(types)
        if given is None:
            self.problems.append(f"{where}: this setting is missing; there are: {known}")
            return None
        name = self._value(where, str, given)
        if name in types:
            chosen = self._captured_by.get(name, name) if group == plugins.SOURCES else name
            return self._loaded(group, where, chosen)
        if name is not None:
            self.problems.append(f"{where}: no type called {_shown(given)}; there are: {known}")
        return None

    def _loaded(self, group: str, where: str, name: str) -> type | None:
        try:
            plugin: type = plugins.load(group, name)
        except ConfigError as error:
            hint = f" {error.hint}" if error.hint else ""
            self.problems.append(f"{where}: {error}{hint}")
            return None
        if not _takes_settings(plugin):
            self.problems.append(
                f"{where}: what is installed as {name} is no dataclass with a field called name"
            )
            return None
        return plugin

    def _section(
        self, section: type[T], where: str, content: object, *, built: Mapping[str, object] = {}
    ) -> T | None:
        """The section, or None after a problem; `built` are fields that are no settings."""
        before = len(self.problems)
        given = self._renamed(section, where, self._mapping(where, content))
        known = settings_of(section)
        for name in given:
            if name not in known or name in built:
                self.problems.append(f"{where}: no setting called {name}{nearest(name, known)}")
        for name, setting in known.items():
            if setting.required and name not in given and name not in built:
                self.problems.append(f"{where}.{name}: this setting is missing")
        values = {
            setting.field: self._value(f"{where}.{name}", setting.type, given[name])
            for name, setting in known.items()
            if name in given and name not in built
        }
        if len(self.problems) > before or (section is Config and self.problems):
            return None
        try:
            return section(**values, **built)
        except (ConfigError, ValueError) as error:
            self.problems.append(f"{where}: {error}")
            return None

    def _renamed(self, section: type, where: str, given: dict[str, object]) -> dict[str, object]:
        """The settings under their present names; a class has its old ones in `RENAMED`."""
        names: Mapping[str, str] = getattr(section, "RENAMED", {})
        for old in (name for name in given if name in names):
            new = names[old]
            if new in given:
                self.problems.append(f"{where}: {old} is the old name of {new}; set {new} alone")
            else:
                self.warnings.append(f"{where}.{old}: this setting is now called {new}")
        return {names.get(name, name): value for name, value in given.items()}

    def _mapping(self, where: str, content: object) -> dict[str, object]:
        """The settings a section gives; a section left empty gives none."""
        if content is None:
            return {}
        if not isinstance(content, dict):
            self.problems.append(f"{where}: expected settings, got {_shown(content)}")
            return {}
        return {str(name): value for name, value in content.items()}

    def _value(self, where: str, wanted: Any, given: object) -> Any:
        """What a setting is set to; None after a problem."""
        before = len(self.problems)
        # A template's own names are filled in later, by others.
        expanded = self._expand(where, given, own=getattr(wanted, "NAMES", ()))
        if len(self.problems) > before:
            return None
        try:
            # A variable is text and may stand for a number; other text may not.
            return msgspec.convert(
                expanded, wanted, strict=expanded == given, dec_hook=_convert_own_type
            )
        except msgspec.ValidationError as error:
            # A mapping's values may be secrets, such as a storage's keys, also where a list or a
            # text was given for it.
            mapping = isinstance(given, dict) or typing.get_origin(wanted) is Mapping
            hidden = _holds_secret(wanted) or mapping
            shown = MASK if hidden else _shown(given)
            self.problems.append(f"{where}: {_expectation(error)}, got {shown}")
            return None

    def _expand(self, where: str, value: object, *, own: Collection[str] = ()) -> object:
        """The value with every ${NAME} replaced from the environment, but for those of `own`."""
        if isinstance(value, list):
            return [self._expand(f"{where}[{i}]", item) for i, item in enumerate(value)]
        if isinstance(value, dict):
            return {name: self._expand(f"{where}.{name}", item) for name, item in value.items()}
        if not isinstance(value, str):
            return value
        return _REFERENCE.sub(
            lambda found: found[0] if found[0][2:-1] in own else self._variable(where, found[0]),
            value,
        )

    def _variable(self, where: str, reference: str) -> str:
        if reference.startswith("$$"):
            return reference[1:]
        found = _VARIABLE.fullmatch(reference)
        if found is None:
            self.problems.append(
                f"{where}: cannot read {reference}; write ${{NAME}} or ${{NAME:-default}}, "
                "and $${ for a plain ${"
            )
            return ""
        name, default = found["name"], found["default"]
        value = self._environment.get(name) or default
        if value is None and name not in self._environment:
            self.problems.append(f"{where}: the environment variable {name} is not set")
        return value or ""


def _names_a_server(pipeline: object) -> bool:
    return isinstance(pipeline, dict) and bool(pipeline.get("url"))


def _takes_settings(plugin: object) -> bool:
    """Whether it is a class whose fields are settings, its name among them."""
    if not isinstance(plugin, type):
        return False
    if issubclass(plugin, msgspec.Struct):
        return "name" in plugin.__struct_fields__
    return dataclasses.is_dataclass(plugin) and "name" in plugin.__dataclass_fields__


def _holds_secret(wanted: Any) -> bool:
    """Whether what is given for such a setting must not show: also one secret among others."""
    return wanted is Secret or any(map(_holds_secret, typing.get_args(wanted)))


def _convert_own_type(wanted: type, value: object) -> object:
    """Conversion to the types that msgspec does not know."""
    if not isinstance(value, str):
        raise TypeError("Expected `str`")
    return wanted(value)


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "settings",
    "null": "nothing",
}


def _expectation(error: msgspec.ValidationError) -> str:
    """What the setting should have been, in words a person without Python knows."""
    expected = str(error).partition(", got")[0].partition(" - at")[0]
    types = re.sub(r"`([^`]*)`", lambda found: _in_words(found[1]), expected)
    return types.replace("Expected", "expected")


def _in_words(types: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | "))


def _shown(value: object) -> str:
    """A value as given in the file (variables unexpanded), without the password of a URL in it."""
    if value is None:
        return "nothing"
    if isinstance(value, str) and "://" in value:
        value = Secret(value).masked_url()
    text = str(msgspec.json.encode(value, enc_hook=str), "utf-8")
    return text if len(text) <= 60 else text[:59] + "…"
