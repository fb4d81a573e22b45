"""A YAML file, read whole; a mistake in it is placed, and none of its lines is shown."""

from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError

_MOST_NODES = 100_000  # of a file, with its aliases written out


def read(file: Path) -> object:
    """What a file says; a ConfigError names what keeps it from being read."""
    try:
        return yaml.load(file.read_text("utf-8"), Loader=_Loader)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no config file {file}", hint="Name another one with --config."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read") from error
    except yaml.MarkedYAMLError as error:
        # Its own text shows the lines around the mistake, and they may hold a password.
        raise ConfigError(f"{file} is not YAML: {_where_in_file(error)}") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply, or in itself by an alias") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        # The loader lets errors of Python through, at a day such as 2026-13-01.
        raise ConfigError(f"{file} is not YAML") from error


def _where_in_file(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}{error.problem or error.context}"


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many nodes a node is with all that is in it, aliases written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        mapping = isinstance(node, yaml.MappingNode)
        inner = [part for pair in node.value for part in pair] if mapping else node.value
        known[id(node)] = 1 + sum(_size(each, known) for each in inner)
    return known[id(node)]


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Loader(yaml.SafeLoader):
    """Plain YAML in which a name given twice is a mistake, not an overwriting."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _size(node, {}) > _MOST_NODES:
            problem = "its aliases make it too large"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if "\0" in value or not _encodable(value):
            problem = "a text has a character that no file's name may have"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                problem = "a name of a setting is text"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"{key.value} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
