"""What a package installs under our entry points is found by its name, whatever else it holds."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace import plugins
from headrace.config import parse
from headrace.errors import ConfigError
from headrace.formats import catalogue
from headrace.formats.catalogue import Formats

SOURCE = {"type": "postgres", "url": "postgresql://db/shop"}


class Installed:
    """A folder of packages that Python finds, beside those that are installed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setattr(plugins, "_installed", plugins._installed.__wrapped__)

    def package(self, name: str, entries: Mapping[str, str], code: str = "") -> None:
        """Install a package: its entry points by group and name, and a module that it has."""
        metadata = self._folder / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[{group}]\n{entry}\n" for group, entry in entries.items()]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        (self._folder / f"{name}.py").write_text(code)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    return Installed(tmp_path, monkeypatch)


def config(folder: Path, **sections: object) -> None:
    parse({"sources": {"shop": SOURCE}, **sections}, folder=folder, environment={})


@pytest.mark.parametrize("code", ["import nowhere", "1 / 0", "def :", "other = 1", "exit(3)"])
def test_a_broken_package_stops_only_who_uses_it(
    installed: Installed, tmp_path: Path, code: str
) -> None:
    entries = dict.fromkeys((plugins.SOURCES, plugins.SINKS), "odd = broken:Odd")
    installed.package("broken", entries | {plugins.FORMATS: "odd = broken:Odd"}, code)
    config(tmp_path)
    assert Formats().named("canonical").name == "canonical"
    assert "odd" in catalogue.names()
    assert "odd" in catalogue.event_names()
    assert "odd.json" not in catalogue.schemas.__wrapped__()
    message = r"the source type odd \(broken:Odd, of broken\) cannot be imported: "
    with pytest.raises(ConfigError, match=message + r"(.|\n)*remove broken"):
        config(tmp_path, sources={"shop": {"type": "odd"}})
    with pytest.raises(ConfigError, match=r"sinks\.a\.type: the sink type odd"):
        config(tmp_path, pipeline={"sinks": {"a": {"type": "odd"}}})
    with pytest.raises(ConfigError, match="the format odd"):
        Formats().named("odd")


@pytest.mark.parametrize(
    "code",
    [
        "def Odd(name): pass",
        "class Odd: name = ''",
        "from dataclasses import dataclass\n@dataclass\nclass Odd:\n    path: str = ''",
    ],
)
def test_a_class_without_settings_is_named(installed: Installed, tmp_path: Path, code: str) -> None:
    installed.package("plain", {plugins.SOURCES: "odd = plain:Odd"}, code)
    with pytest.raises(ConfigError, match="installed as odd is no dataclass with a field"):
        config(tmp_path, sources={"shop": {"type": "odd"}})


def test_our_names_are_ours_and_others_belong_to_one_package(
    installed: Installed, tmp_path: Path
) -> None:
    for package in ("one", "two"):
        entry = f"canonical = {package}:Odd\nodd = {package}:Odd"
        installed.package(package, {plugins.FORMATS: entry})
    assert Formats().named("canonical").name == "canonical"
    with pytest.raises(ConfigError, match="the format odd is in several packages: one and two"):
        Formats().named("odd")


def test_metadata_of_another_version_is_named_as_the_cause(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    with pytest.raises(ConfigError, match=r"has no entry points headrace\.formats") as raised:
        catalogue.names()
    assert "Install it again" in raised.value.hint


def test_a_format_with_a_schema_and_options(installed: Installed) -> None:
    code = """
class Odd:
    name, media_type, schema = "odd", "text/plain", b'{"type": "string"}'

    def __init__(self, host):
        self.host = host

    @classmethod
    def of(cls, options):
        return cls(options.facts.server("shop").source)
"""
    installed.package("good", {plugins.FORMATS: "odd = good:Odd"}, code)
    made = Formats().named("odd")
    assert vars(made) == {"host": "shop"}
    assert catalogue.schemas.__wrapped__()["odd.json"] == b'{"type": "string"}'
