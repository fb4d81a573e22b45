"""A change written down: one file a format.

A format turns changes into bytes and says what kind of bytes they are. It does no input or
output and never decodes an image it can pass on, so every transport and sink may offer it.
Most see one change at a time. A few need what came before in their stream, or all changes of a
transaction. To add one: write the file, then name its class as an entry point `headrace.formats`.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from ..change.event import Change
from .canonical import Canonical
from .changefeed import Changefeed

__all__ = [
    "AnyFormat",
    "Canonical",
    "Changefeed",
    "Format",
    "FormatStream",
    "Rendered",
    "StreamFormat",
    "TransactionFormat",
]


class Format(Protocol):
    """A way to write a change down. Two equal formats write the same bytes.

    A class that has a class method `of` is made by it, from the FormatOptions of a reader; any
    other class is called without arguments. A JSON Schema of its events, as bytes in the class
    attribute `schema`, is served as /schemas/NAME.json.
    """

    name: ClassVar[str]  # what requests and settings call it
    media_type: ClassVar[str]  # what one encoded change is

    def encode(self, change: Change) -> bytes | None:
        """The change on one line, without line ends; None: this format does not carry it."""

    def __hash__(self) -> int:
        """Equal formats share what they have encoded."""


class FormatStream(Protocol):
    """A format within one stream: it remembers what it has written there."""

    def see(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        """What the first change needs of one that the stream should have begun with."""

    def encode(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        """What the next change adds to the stream, each on one line.

        It is given every change, in order. Of a change that is not wanted it writes only where
        transactions begin and end.
        """


@runtime_checkable
class StreamFormat(Protocol):
    """A way to write down a stream, in which a change may need more than its own event."""

    name: ClassVar[str]
    media_type: ClassVar[str]

    def open(self) -> FormatStream:
        """Begin a stream, wherever in the log that is."""

    def begin(self, change: Change) -> int:
        """The sequence of the first change that a stream must have seen to go on with this one.

        Where it is an earlier one, the stream is to `see` those from there on.
        """

    def __hash__(self) -> int:
        """Formats are values: two equal ones write the same."""


class Rendered(NamedTuple):
    """An event, and the sequence of the change that it stands for."""

    sequence: int
    payload: bytes


@runtime_checkable
class TransactionFormat(Protocol):
    """A way to write down what the changes of a transaction mean together."""

    media_type: ClassVar[str]

    @property
    def name(self) -> str:
        """What requests and settings call it."""

    def render(self, transaction: Sequence[Change]) -> Sequence[Rendered]:
        """The events of a whole transaction, in the order of their sequences.

        Each stands at the sequence of one of its changes. A transaction whose head is no longer in
        the log comes without it, and a very large one comes in pieces.
        """

    def __hash__(self) -> int:
        """Equal formats share what they have rendered."""


AnyFormat = Format | StreamFormat | TransactionFormat
