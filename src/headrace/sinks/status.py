"""How a sink is doing, by what it reports and what it has stored itself."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from .verification import Verification

if TYPE_CHECKING:
    from .push.events import EventRendering


class Progress(NamedTuple):
    """How far a sink has come, by what it has stored itself."""

    epoch: str  # of the log that the sequence belongs to
    sequence: int  # everything up to it has arrived
    generation: str = ""  # of the log's writer then (`SinkWriter.generation`); "": not noted


class FailedTable(NamedTuple):
    """A table that a sink does not follow any more, while the others go on."""

    table: str  # schema.table
    sequence: int  # of the first change that was not applied
    reason: str
    hint: str


class SinkPhase(StrEnum):
    """What a sink's query is doing."""

    STARTING = "starting"
    STREAMING = "streaming"
    WAITING = "waiting"  # it failed and is tried again
    HALTED = "halted"  # a person must act
    PAUSED = "paused"  # an operator has paused it
    STOPPED = "stopped"


class SinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a sink is doing."""

    sink: str
    phase: SinkPhase
    batch: int = -1  # the last one stored since the process began; -1: none yet
    changes: int = 0  # stored since the process began
    changes_per_second: float = 0.0  # of the last batch that had any
    batch_seconds: float = 0.0  # that it took
    sequence: int = 0  # everything up to it is stored; 0: nothing, or (no lag) not known
    lag: int | None = None  # how many changes the log has beyond it; None: not known
    failed_tables: tuple[FailedTable, ...] = msgspec.field(default=(), name="troubled")
    sent: int = 0  # events that another system has accepted since the process began
    requests: int = 0  # in which they were handed over
    retries: int = 0  # events that were sent again, since the process began
    dead_letters: int = 0  # events that it has not taken, and that are kept
    waiting_rows: int = 0  # rows whose later events wait behind these
    error: str = ""  # why it waits or has halted
    hint: str = ""  # what to do about it
    catalog: str = ""  # which tables its catalog does not have as they are, and why
    # By table: values that their columns could not hold, and whose text is beside them.
    rescued: dict[str, int] = {}
    # The last comparison with its sources; None: there was none. It is noted by who compares, and
    # not by the pipeline.
    verified: Verification | None = None


@dataclass(frozen=True, slots=True)
class DeliveryStatus:
    """What a sink that sends to another system has done since it was opened, and what waits."""

    sent: int = 0
    requests: int = 0
    retries: int = 0
    dead_letters: int = 0
    waiting_rows: int = 0
    reason: str = ""  # why nothing is accepted now; "": all goes well
    since: float = 0.0  # seconds since 1970, when that began
    rounds: int = 0  # how often it was tried again since


class SettledRange(NamedTuple):
    """Changes of which nothing is left to be sent, by the sink's own ledger."""

    epoch: str
    first: int  # sequences of the first and the last that it was to send something of
    last: int
    events: int  # that the other system has accepted
    aside: int = 0  # that it has not, and that were kept
    again: int = 0  # that may have come twice, because nobody knew that they had been sent
    retried: int = 0  # that were handed over again after no answer, or a failure
    rendering: "EventRendering | None" = None  # how changes became events then; None: as now
    comparable: bool = True  # False: transforms that are gone chose the rows
    generation: str = ""  # of the log when the last one was sent; "": not known


class SentEvents(NamedTuple):
    """Everything that a sink has sent, by its own ledger."""

    settled: list[SettledRange]  # in the order of the log
    dead_letters: int = 0  # kept now
    waiting_rows: int = 0
    redriven: int = 0  # of those that were kept, sent since
