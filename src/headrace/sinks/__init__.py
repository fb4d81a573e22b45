"""Stage 4: a batch of changes → elsewhere. One file a sink; this one is the contract.

A sink is a frozen dataclass whose fields are its settings; its module's `plugin` names the class.
It opens nothing until a streaming query opens it, and then gets every batch of that query in turn.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from .push.events import Rendering


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


class Phase(StrEnum):
    """What a sink's query is doing."""

    STARTING = "starting"
    STREAMING = "streaming"
    WAITING = "waiting"  # it failed and is tried again
    HALTED = "halted"  # a person must act
    STOPPED = "stopped"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How a sink is doing."""

    sink: str
    phase: Phase
    batch: int = -1  # the last one stored since the process began; -1: none yet
    changes: int = 0  # stored since the process began
    changes_per_second: float = 0.0  # of the last batch that had any
    batch_seconds: float = 0.0  # that it took
    sequence: int = 0  # everything up to it is stored; 0: not known yet
    lag: int = 0  # how many changes the log had beyond it
    troubled: tuple[Troubled, ...] = ()
    sent: int = 0  # events that another system has accepted since the process began
    requests: int = 0  # in which they were handed over
    retries: int = 0  # events that were sent again, since the process began
    dead_letters: int = 0  # events that it has not taken, and that are kept
    waiting_rows: int = 0  # rows whose later events wait behind these
    error: str = ""  # why it waits or has halted
    hint: str = ""  # what to do about it


REPORT = "status.json"  # the file in which a running pipeline says how it is doing


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a running pipeline last said of itself."""

    pid: int
    at: int  # microseconds since 1970
    sinks: list[Status]


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


@dataclass(frozen=True, slots=True)
class Account:
    """What a sink that sends to another system has done since it was opened, and what waits."""

    sent: int = 0
    requests: int = 0
    retries: int = 0
    dead_letters: int = 0
    waiting_rows: int = 0
    reason: str = ""  # why nothing is taken now; "": all goes well
    since: float = 0.0  # seconds since 1970, when that began
    rounds: int = 0  # how often it was tried again since


@runtime_checkable
class Sender(Writer, Protocol):
    """A writer that sends to another system, which may not be there."""

    def account(self) -> Account:
        """What was sent, and what waits; may be asked by another thread."""
        ...

    def idle(self, spark: "SparkSession") -> None:
        """Do what somebody asked for; called now and then by another thread."""
        ...

    def close(self) -> None:
        """End what waits, soon: `write` then raises SinkUnavailable; called by another thread."""
        ...


@runtime_checkable
class Recallable(Protocol):
    """A sink that a person may ask to go on after it has halted."""

    def recalled(self) -> bool:
        """Whether somebody has."""
        ...

    def decline(self, reason: str) -> None:
        """Tell them that it halts, again."""
        ...


class Settled(NamedTuple):
    """Changes of which nothing is left to be sent, by the sink's own account."""

    epoch: str
    first: int  # sequences of the first and the last that it was to send something of
    last: int
    events: int  # that the other system has accepted
    aside: int = 0  # that it has not, and that were kept
    again: int = 0  # that may have come twice, because nobody knew that they had been sent
    retried: int = 0  # that were handed over again after no answer, or a failure
    rendering: "Rendering | None" = None  # how changes became events then; None: as now


class Sent(NamedTuple):
    """Everything that a sink has sent, by its own account."""

    settled: list[Settled]  # in the order of the log
    dead_letters: int = 0  # kept now
    waiting_rows: int = 0
    redriven: int = 0  # of those that were kept, sent since


@runtime_checkable
class Accountable(Protocol):
    """A sink whose account can be compared with the log."""

    @property
    def name(self) -> str:
        """Its name in the config."""
        ...

    @property
    def rendering(self) -> "Rendering":
        """How changes become events now."""
        ...

    def sent(self) -> Sent:
        """The account."""
        ...


@runtime_checkable
class Paced(Protocol):
    """A sink that says how often to look for new changes."""

    @property
    def batch_seconds(self) -> float:
        """Seconds between two looks."""
        ...


@runtime_checkable
class Sharing(Protocol):
    """A sink whose tasks read the log themselves, each for some rows (`headrace.frame.SHARED`)."""

    @property
    def parallelism(self) -> int | None:
        """How many tasks; None: as many as there are cores."""
        ...

    @property
    def max_changes_per_batch(self) -> int | None:
        """How many changes a batch has at most; None: as many as the pipeline says."""
        ...


@runtime_checkable
class Sink(Protocol):
    """A place to put changes."""

    # Whether it takes the changes packed (`headrace.frame.PACKED`): what they share is then told
    # only with the first change of each version of a table in a partition.
    packed: ClassVar[bool]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a change that it looks at; see headrace.frame."""
        ...

    @property
    def name(self) -> str:
        """Its name in the config."""
        ...

    @property
    def tables(self) -> tuple[str, ...]:
        """Globs of the tables it gets; none: all."""
        ...

    @property
    def whole(self) -> bool:
        """Whether it gets every change of a transaction, and looks for its tables by itself."""
        ...

    def open(self, writer: str, *, adopt: bool = False) -> Writer:
        """Begin to write.

        `writer` names the query and stays the same when it restarts. What another writer has
        written is refused with SinkFenced, unless `adopt` is set.
        """
        ...
