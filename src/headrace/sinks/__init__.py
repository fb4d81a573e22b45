"""Stage 4: a batch of changes → elsewhere. One file a sink; this one is the contract.

A sink is a frozen dataclass whose fields are its settings; its module's `plugin` names the class.
It opens nothing until a streaming query opens it, and then gets every batch of that query in turn.
"""

from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Progress(NamedTuple):
    """How far a sink has come, by its own account."""

    epoch: str  # of the log that the sequence belongs to
    sequence: int  # everything up to it has arrived


class Troubled(NamedTuple):
    """A table that a sink does not follow any more, while the others go on."""

    table: str  # schema.table
    sequence: int  # of the first change that was not applied
    reason: str
    hint: str


@runtime_checkable
class Writer(Protocol):
    """A sink in use by one streaming query: one call at a time, batches in order."""

    def write(self, changes: "DataFrame", batch_id: int) -> int:
        """Store `changes`; returns how many there were.

        The same `batch_id` may come twice with the same rows; the second call changes nothing.
        When it returns, the batch is stored; when it raises, it will come again.
        """
        ...

    def tend(self) -> None:
        """Look after what is stored: called between batches, never during one."""
        ...

    def progress(self) -> Progress | None:
        """Where a query that lost its checkpoint may go on; None: it starts at the beginning."""
        ...

    def troubled(self) -> list[Troubled]:
        """The tables that are not followed any more."""
        ...


@runtime_checkable
class Sink(Protocol):
    """A place to put changes."""

    fields: ClassVar[tuple[str, ...]]  # of a change that it looks at; see headrace.frame

    @property
    def name(self) -> str:
        """Its name in the config."""
        ...

    @property
    def tables(self) -> tuple[str, ...]:
        """Globs of the tables it gets; none: all."""
        ...

    def open(self, writer: str, *, adopt: bool = False) -> Writer:
        """Begin to write.

        `writer` names the query and stays the same when it restarts. What another writer has
        written is refused with SinkFenced, unless `adopt` is set.
        """
        ...
