"""What a newcomer meets first stays so: few rooms, one name for one thing, the field's words."""

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
MODULES = [module for module in sorted(SRC.rglob("*.py")) if "_pb2" not in module.stem]
MOST_ROOT_MODULES = 8

# Words of a private dialect, each with the word that readers search for.
DIALECT = {
    "told": "reported, sent, or what the value is",
    "said": "message, payload, reply",
    "asked": "request, requested",
    "wish": "request",
    "parcel": "spill",
    "outage": "circuit breaker",
    "troubled": "failed",
    "stranger": "unknown",
    "tend": "maintain",
    "arrange": "compact",
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "goodbye": "close",
}

# Modules that keep a word because it is on disk or public: SQL that is installed in databases, the
# JSON of reports, metrics that keep their old names beside the new ones.
KEPT = {
    "headrace.metrics",
    "headrace.sinks.status",
    "headrace.sources.postgres.ddl",
    "headrace.sources.postgres_events.catalog",
    "headrace.sources.postgres_events.ddl",
    "headrace.sources.sqlite.installation",
}

# Class names that two packages share, each with the reason.
SHARED_NAMES: dict[str, str] = {}


def dotted(module: Path) -> str:
    """The name by which a module is imported."""
    parts = module.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def names(module: Path) -> Iterator[str]:
    """Every name that a module defines or uses."""
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.AsyncFunctionDef(name=name) | ast.Name(id=name) | ast.arg(arg=name):
                yield name
            case ast.Attribute(attr=name):
                yield name


def words(name: str) -> list[str]:
    """The words of a name, however they are joined."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")


def test_the_root_holds_few_modules() -> None:
    root = [path.stem for path in (SRC / "headrace").glob("*.py") if path.stem != "__init__"]
    assert len(root) <= MOST_ROOT_MODULES, sorted(root)


def test_a_class_name_is_used_once() -> None:
    places = collections.defaultdict(list)
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(dotted(module))
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in repeated.items() if name not in SHARED_NAMES} == {}
    assert SHARED_NAMES.keys() - repeated.keys() == set(), "these no longer need their reason"


@pytest.mark.parametrize("module", MODULES, ids=dotted)
def test_names_are_the_fields_words(module: Path) -> None:
    found = {
        name: DIALECT[word] for name in names(module) for word in words(name) if word in DIALECT
    }
    assert found == {}, "use these words instead"


@pytest.mark.parametrize("module", MODULES, ids=dotted)
def test_comments_and_messages_are_the_fields_words(module: Path) -> None:
    text = module.read_text().lower()
    rare = ("mend", "mends", "mended", "told", "troubled", "parcel", "stranger")
    found = {word: DIALECT[word] for word in rare if re.search(rf"\b{word}\b", text)}
    assert bool(found) == (dotted(module) in KEPT), found
