"""What events share on their way to a broker, made once: their address, and their operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ...formats.savegress import OPERATIONS
from . import Event

T = TypeVar("T")


class Routes(Generic[T]):
    """What the events of a table share."""

    def __init__(self, make: Callable[[Event], T]) -> None:
        self._make = make
        self._made: dict[tuple[str, str, str], T] = {}

    def __call__(self, event: Event) -> T:
        about = (event.source, event.schema, event.table)
        route = self._made.get(about)
        if route is None:
            route = self._made[about] = self._make(event)
        return route


class Operations(dict[str, T]):
    """What each operation is called, as a broker wants it written."""

    def __init__(self, written: Callable[[str], T]) -> None:
        super().__init__({op.value: written(name) for op, name in OPERATIONS.items()})
        self._written = written

    def __missing__(self, op: str) -> T:
        return self._written(op)
