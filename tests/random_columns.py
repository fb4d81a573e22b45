"""Random steps from one version of a table's columns to the next."""

import random
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.change.event import Column

Step = Callable[[random.Random, list[Column], int], list[Column]]


def _rename(chance: random.Random, columns: list[Column], number: int) -> list[Column]:
    at = chance.randrange(1, len(columns))
    names = {column.name for column in columns}
    free = [name for name in "abcdefghijklmnopqrstuvwxyz" if name not in names]
    columns[at] = msgspec.structs.replace(columns[at], name=chance.choice(free))
    return columns


def _exchange(chance: random.Random, columns: list[Column], number: int) -> list[Column]:
    one, other = chance.sample(range(1, len(columns)), 2)
    first, second = columns[one], columns[other]
    columns[one] = msgspec.structs.replace(first, name=second.name)
    columns[other] = msgspec.structs.replace(second, name=first.name)
    return columns


def _drop(chance: random.Random, columns: list[Column], number: int) -> list[Column]:
    if len(columns) > 3:
        del columns[chance.randrange(1, len(columns))]
    return columns


def _add(chance: random.Random, columns: list[Column], number: int) -> list[Column]:
    names = {column.name for column in columns}
    name = chance.choice([name for name in "abcdefghijklmnopqrstuvwxyz" if name not in names])
    kind, value = chance.choice([("text", '"x"'), ("integer", "5"), ("boolean", "true")])
    default = chance.choice(["", value])
    return [*columns, Column(name, kind, number=number, initial_default=default)]


def _again(chance: random.Random, columns: list[Column], number: int) -> list[Column]:
    at = chance.randrange(1, len(columns))
    gone = columns.pop(at)
    return [*columns, msgspec.structs.replace(gone, number=number, initial_default="")]


STEPS: tuple[Step, ...] = (_rename, _exchange, _drop, _add, _again)
VALUES: dict[str, list[Any]] = {
    "text": ["a", "b", None],
    "integer": [1, 2, None],
    "boolean": [True, False, None],
}
