"""A table's schema and name as one text that no other table has."""

import re
from collections.abc import Iterator
from functools import lru_cache

from . import glob as globs

_PART = re.compile(r'"((?:[^"]|"")+)"(?=\.|$)')
_PATHS_KEPT = 1024


def table_path(schema: str, name: str) -> str:
    """schema.table, as config, status and commands write it.

    A part that has a dot or begins with a quote stands in quotes, as in SQL.

    >>> table_path("public", "orders"), table_path("x.y", "z"), table_path("x", "y.z")
    ('public.orders', '"x.y".z', 'x."y.z"')
    """
    return f"{path_part(schema)}.{path_part(name)}"


def path_part(name: str) -> str:
    """A schema or a table as a path has it."""
    if "." in name or name.startswith('"'):
        return '"{}"'.format(name.replace('"', '""'))
    return name


def split_path(path: str) -> tuple[str, str]:
    """Schema and table; what is not in quotes ends at the first dot. "": no schema is named.

    >>> split_path('"x.y".z'), split_path("x.y.z"), split_path('"x.y"')
    (('x.y', 'z'), ('x', 'y.z'), ('', 'x.y'))
    """
    parts = [*path_parts(path)]
    if len(parts) == 1:
        return "", _plain(parts[0])
    rest = path[len(parts[0]) + 1 :]
    return _plain(parts[0]), _plain(rest)


def qualified(path: str, schema: str) -> str:
    """The path of a table that may be named without its schema, or with more quotes than needed.

    >>> qualified("orders", "public"), qualified('"x.y"', "main"), qualified('"a"."B"', "")
    ('public.orders', 'main."x.y"', 'a.B')
    """
    named, name = split_path(path)
    return table_path(named or schema, name)


def without_schema(path: str) -> str:
    """What follows the schema in a path."""
    return path[len(next(path_parts(path))) + 1 :]


def is_qualified(pattern: str) -> bool:
    """Whether a path or a pattern of one names a schema: a dot outside of quotes."""
    return len([*path_parts(pattern)]) > 1


def path_matches(schema: str, name: str, pattern: str, *, default: str | None = None) -> bool:
    """Whether a pattern means a table: schema.table, or the bare table.

    A bare table is one in any schema, or in `default`. Quotes say which dots belong to a name;
    without any, each dot of a pattern may be the one between schema and table.
    """
    pattern = unquoted(pattern)
    quotes = '"' in pattern
    if not is_qualified(pattern):
        there = default is None or schema == default
        return there and globs.matches(path_part(name) if quotes else name, pattern)
    if quotes:
        return globs.matches(table_path(schema, name), pattern)
    return any(
        globs.matches(schema, pattern[:at]) and globs.matches(name, pattern[at + 1 :])
        for at, letter in enumerate(pattern)
        if letter == "."
    )


@lru_cache(maxsize=_PATHS_KEPT)
def unquoted(pattern: str) -> str:
    """A path or a pattern without the quotes that it does not need."""
    return ".".join(_unless_needed(part) for part in path_parts(pattern))


def _unless_needed(part: str) -> str:
    found = _PART.fullmatch(part)
    return part if found is None or path_part(_plain(part)) == part else _plain(part)


def _plain(part: str) -> str:
    found = _PART.fullmatch(part)
    return part if found is None else found[1].replace('""', '"')


def path_parts(path: str) -> Iterator[str]:
    """What stands between dots that are in no quotes."""
    begin = 0
    while begin <= len(path):
        quoted = _PART.match(path, begin)
        end = quoted.end() if quoted else path.find(".", begin)
        end = len(path) if end < 0 else end
        yield path[begin:end]
        begin = end + 1
