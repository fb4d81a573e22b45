"""The kinds of parameters that requests have: how each is read, refused and described."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from litestar.openapi.spec import OpenAPIType, Schema

from ..change.event import Op
from ..change.glob import LONGEST_GLOB, MOST_GLOBS

MOST_PARAMETERS = 32  # in a query

NAME = "[A-Za-z0-9_.-]{1,128}"


class ParameterRule(Protocol):
    """What a parameter may say."""

    @property
    def about(self) -> str:
        """What it is for."""

    def read(self, text: str) -> Any:
        """The value; ValueError when the text is not one."""

    def expects(self) -> str:
        """What would have been right: "must be …"."""

    def schema(self) -> Schema:
        """The same for /openapi.json."""


@dataclass(frozen=True)
class Integer:
    """A whole number between two bounds."""

    low: int
    high: int
    about: str

    def read(self, text: str) -> int:
        # int() alone would take signs, blanks, underscores and the digits of every script.
        if not (text.isascii() and text.isdigit() and len(text) <= 20):
            raise ValueError(text)
        if not self.low <= (number := int(text)) <= self.high:
            raise ValueError(text)
        return number

    def expects(self) -> str:
        return f"must be a whole number from {self.low} to {self.high}"

    def schema(self) -> Schema:
        return Schema(type=OpenAPIType.INTEGER, minimum=self.low, maximum=self.high)


@dataclass(frozen=True)
class Flag:
    """Yes or no."""

    about: str

    def read(self, text: str) -> bool:
        if text.lower() not in ("true", "1", "false", "0"):
            raise ValueError(text)
        return text.lower() in ("true", "1")

    def expects(self) -> str:
        return "must be true or false"

    def schema(self) -> Schema:
        return Schema(type=OpenAPIType.BOOLEAN)


@dataclass(frozen=True)
class Text:
    """Any text."""

    about: str

    def read(self, text: str) -> str:
        return text

    def expects(self) -> str:
        return "must be text"

    def schema(self) -> Schema:
        return Schema(type=OpenAPIType.STRING)


@dataclass(frozen=True)
class NonEmptyText:
    """Text that is not empty."""

    about: str
    longest: int | None = None  # characters

    def read(self, text: str) -> str:
        if not text or (self.longest is not None and len(text) > self.longest):
            raise ValueError(text)
        return text

    def expects(self) -> str:
        if self.longest is None:
            return "must not be empty"
        return f"must have 1 to {self.longest} characters"

    def schema(self) -> Schema:
        return Schema(type=OpenAPIType.STRING, min_length=1, max_length=self.longest)


@dataclass(frozen=True)
class Name:
    """What something is called."""

    about: str

    def read(self, text: str) -> str:
        if not re.fullmatch(NAME, text):
            raise ValueError(text)
        return text

    def expects(self) -> str:
        return "must be 1 to 128 of the characters A-Z, a-z, 0-9, _, . and -"

    def schema(self) -> Schema:
        return Schema(type=OpenAPIType.STRING, pattern=f"^{NAME}$")


@dataclass(frozen=True)
class Names:
    """Names between commas."""

    about: str
    noun: ClassVar[str] = "names"

    def read(self, text: str) -> tuple[str, ...]:
        return self.checked(text.split(","))

    def checked(self, names: Sequence[str]) -> tuple[str, ...]:
        """The same names; ValueError when there are too many, or one is empty or too long."""
        right = len(names) <= MOST_GLOBS and all(0 < len(name) <= LONGEST_GLOB for name in names)
        if not right:
            raise ValueError(names)
        return tuple(names)

    def expects(self) -> str:
        return (
            f"must be 1 to {MOST_GLOBS} {self.noun} between commas, each of at most "
            f"{LONGEST_GLOB} characters"
        )

    def schema(self) -> Schema:
        return _several(
            Schema(type=OpenAPIType.STRING, pattern=f"^[^,]{{1,{LONGEST_GLOB}}}$"), MOST_GLOBS
        )


@dataclass(frozen=True)
class OneOf:
    """One of some words."""

    known: tuple[str, ...]
    about: str

    def read(self, text: str) -> str:
        if text not in self.known:
            raise ValueError(text)
        return text

    def expects(self) -> str:
        return f"must be one of {', '.join(self.known)}"

    def schema(self) -> Schema:
        return Schema(type=OpenAPIType.STRING, enum=self.known)


@dataclass(frozen=True)
class Globs(Names):
    """Patterns between commas."""

    noun: ClassVar[str] = "patterns such as public.* or orders"


@dataclass(frozen=True)
class OperationList:
    """Operations between commas, in any case."""

    known: frozenset[Op]
    about: str

    def read(self, text: str) -> frozenset[Op]:
        operations = frozenset(Op(word.upper()) for word in text.split(","))
        if not operations <= self.known:
            raise ValueError(text)
        return operations

    def expects(self) -> str:
        known = ", ".join(op.value.lower() for op in Op if op in self.known)
        return f"must be one or more of {known}, between commas"

    def schema(self) -> Schema:
        known = [op.value.lower() for op in Op if op in self.known]
        return _several(Schema(type=OpenAPIType.STRING, enum=known))


def _several(each: Schema, most: int | None = None) -> Schema:
    return Schema(type=OpenAPIType.ARRAY, items=each, min_items=1, max_items=most)
