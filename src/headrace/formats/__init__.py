"""A change written down: one file a format.

A format turns a change into bytes and says what kind of bytes they are. It does no input or
output and never decodes an image it can pass on, so every transport and sink may offer it.
To add one: write the file, then name it in `FORMATS`.
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

from ..event import Change
from .canonical import Canonical
from .changefeed import Changefeed

__all__ = ["FORMATS", "Canonical", "Changefeed", "Format"]


class Format(Protocol):
    """A way to write a change down. Two equal formats write the same bytes."""

    name: ClassVar[str]  # what requests and settings call it
    media_type: ClassVar[str]  # what one encoded change is

    def encode(self, change: Change) -> bytes | None:
        """The change on one line, without line ends; None: this format does not carry it."""

    def __hash__(self) -> int:
        """Equal formats share what they have encoded."""


FORMATS: Mapping[str, Format] = {format.name: format for format in (Canonical(), Changefeed())}
