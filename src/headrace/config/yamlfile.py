"""A YAML file, read whole; a mistake in it is placed, and none of its lines is shown."""

from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError


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
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML") from error


def _where_in_file(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}{error.problem or error.context}"


class _Loader(yaml.SafeLoader):
    """Plain YAML in which a name given twice is a mistake, not an overwriting."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                problem = f"{key.value} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
