"""Where an event goes, as a text with names in it: `cdc.${schema}.${table}`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from ...errors import ConfigError, nearest

_NAME = re.compile(r"\$\{(?P<name>[^}]*)\}")


class Template:
    """A text in which `${source}`, `${schema}` and `${table}` stand for what an event is about.

    No dataclass: a config file gives it as one text.
    """

    __slots__ = ("text",)

    # A config file's `${…}` with one of these names is no variable of the environment.
    NAMES: ClassVar[tuple[str, ...]] = ("source", "schema", "table")

    def __init__(self, text: str) -> None:
        for found in _NAME.finditer(text):
            if found["name"] not in self.NAMES:
                known = nearest(found["name"], self.NAMES)
                raise ConfigError(f"{text}: nothing is called {found['name']}{known}")
        self.text = text

    def __repr__(self) -> str:
        return f"Template({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and other.text == self.text

    def __hash__(self) -> int:
        return hash((Template, self.text))

    def __str__(self) -> str:
        return self.text

    @property
    def plain(self) -> str:
        """What of it is the same for every event."""
        return _NAME.sub("", self.text)

    def fill(
        self, *, source: str, schema: str, table: str, escape: Callable[[str], str] = str
    ) -> str:
        """The text for an event; `escape` makes a name fit for where it goes."""
        names = {"source": source, "schema": schema, "table": table}
        return _NAME.sub(lambda found: escape(names[found["name"]]), self.text)
