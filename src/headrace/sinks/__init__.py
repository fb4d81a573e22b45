"""Stage 4: a batch of changes → elsewhere. This is the contract; a sink is a module or a package.

A sink is a frozen dataclass whose fields are its settings. It opens nothing until a streaming query
opens it, and then gets every batch of that query in turn. It declares what a batch is to it
(`Takes`); everything else has a default.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from ..change import record
from ..change.block import BlockRows
from ..change.event import Change, Column, Table, Transaction, piece_begin
from ..change.span import LogSpan
from ..errors import ConfigError, LogReplaced
from ..plugins import Finding
from ..transforms.rules import TableTransform, Transforms
from .erasing import ErasedPlace, ErasedRow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from .push.events import EventRendering
    from .push.redrive import RedriveResult


# --- how a sink is doing -------------------------------------------------------------------------


class Progress(NamedTuple):
    """How far a sink has come, by what it has stored itself."""

    epoch: str  # of the log that the sequence belongs to
    sequence: int  # everything up to it has arrived


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


class SentEvents(NamedTuple):
    """Everything that a sink has sent, by its own ledger."""

    settled: list[SettledRange]  # in the order of the log
    dead_letters: int = 0  # kept now
    waiting_rows: int = 0
    redriven: int = 0  # of those that were kept, sent since


# --- what a batch is -----------------------------------------------------------------------------


class Takes(Enum):
    """What a batch is to a sink."""

    ROWS = "rows"  # a DataFrame of changes, with the columns that `fields` names
    LOG_RANGE = "log_range"  # a LogBatch: its tasks read the log, so no change passes through Java


class ReadableLog(Protocol):
    """A log that tasks can read wherever they run; it can be pickled."""

    def pieces(self, epoch: str, after: int, upto: int) -> Iterator[tuple[int, int, bytes]]:
        """Neighbouring changes: the first one's sequence, how many, and their records."""
        ...

    def blocks(
        self, epoch: str, after: int, upto: int
    ) -> Iterator[tuple[int, int, bytes] | BlockRows]:
        """The same, with blocks of rows as they are, where the log can give them."""
        ...

    def spans(self, epoch: str, after: int, upto: int) -> list[LogSpan]:
        """What is known of a range without reading it, in order; of the rest, nothing."""
        ...

    def tables(self, epoch: str) -> Mapping[int, Table]:
        """The tables, by version."""
        ...


@dataclass(frozen=True, slots=True)
class LogBlock:
    """Rows that a snapshot has read together: a transaction, or what is left of it in a range."""

    rows: BlockRows
    described: Table

    @property
    def first(self) -> int:
        """The sequence of the first row; those of the others follow it."""
        return self.rows.first

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.rows.count

    @property
    def last(self) -> int:
        """The sequence of the last row."""
        return self.rows.last

    @property
    def table(self) -> int:
        """The version of the table that all rows belong to."""
        return self.described.version

    @property
    def transaction(self) -> Transaction:
        """The transaction that all rows belong to."""
        return self.rows.block.transaction

    @property
    def ordinal(self) -> int:
        """The place of the first row in its transaction."""
        return self.rows.begin + 1

    def records(self) -> bytes:
        """The rows as `LogRange.pieces` gives them."""
        return b"".join(self.rows.records())

    def columns(
        self, names: Sequence[str] | None = None, *, as_text: frozenset[str] = frozenset()
    ) -> "pa.Table":
        """Columns of the rows (without names: all), as `change.arrow.decode` gives them.

        DecodeError: a value does not fit its column's type.
        """
        # Only here: push sinks run where there is no pyarrow.
        from ..change.arrow import block_table  # noqa: PLC0415

        table = self.described
        wanted = {column.name: column for column in table.columns}
        chosen = [wanted[name] for name in (wanted if names is None else names)]
        return block_table(self.rows, chosen, connector=table.connector, as_text=as_text)


@dataclass(frozen=True, slots=True)
class LogRange:
    """Changes that a task reads from the log: those after `after`, up to and with `upto`.

    Several tasks read the same changes, and each takes the rows of its own part.
    """

    log: ReadableLog
    epoch: str
    after: int
    upto: int
    part: int = 0
    parts: int = 1

    def beyond(self, sequence: int) -> "LogRange":
        """What follows a change of it."""
        return replace(self, after=max(sequence, self.after))

    def own_part(self) -> "LogRange":
        """The changes that are this part's, where parts are divided by the sequence."""
        size = self.upto - self.after
        ends = (self.after + size * at // self.parts for at in (self.part, self.part + 1))
        return LogRange(self.log, self.epoch, *ends)

    def pieces(self) -> Iterator[tuple[int, int, bytes]]:
        """Neighbouring changes: the first one's sequence, how many, and their records."""
        return self.log.pieces(self.epoch, self.after, self.upto)

    def blocks(self) -> Iterator[tuple[int, int, bytes] | LogBlock]:
        """The same changes, but what a snapshot has read together as a block of columns.

        A log behind an older server gives all of them as records.
        """
        tables = self.tables()
        for part in self.log.blocks(self.epoch, self.after, self.upto):
            if isinstance(part, BlockRows):
                yield LogBlock(part, tables[part.block.head.table])
            else:
                yield part

    def spans(self) -> list[LogSpan]:
        """What is known of it without reading it, in order; of the rest, nothing."""
        return self.log.spans(self.epoch, self.after, self.upto)

    def tables(self) -> Mapping[int, Table]:
        """The tables, by version."""
        return self.log.tables(self.epoch)

    def transactions(self) -> Iterator[list[list[Change]]]:
        """All changes in order, some whole transactions at a time.

        Of a very large transaction each piece counts as one; see `change.event.PIECE`.
        """
        tables = self.tables()
        current: list[Change] = []  # the last transaction, whose end may be still to come
        begun = 0
        for first, count, records in self.pieces():
            ended: list[list[Change]] = []
            for sequence, each in enumerate(record.several(records, count), first):
                if (begin := piece_begin(sequence, each.ordinal)) != begun:
                    begun, before, current = begin, current, []
                    ended += [before] if before else []
                current.append(record.change(sequence, each, tables[each.table]))
            if ended:
                yield ended
        if current:
            yield [current]


class LogBatch(Protocol):
    """A batch for a sink that takes log ranges: which changes it has, and tasks to read them."""

    @property
    def spark(self) -> "SparkSession":
        """Where its tasks run."""
        ...

    @property
    def whole(self) -> LogRange | None:
        """All of it, for the driver to look at; None: the batch is empty."""
        ...

    @property
    def upto(self) -> int:
        """The last change's sequence; 0: the batch is empty."""
        ...

    def run(self, task: Callable[[LogRange], msgspec.Struct | None]) -> Sequence[str]:
        """Run `task` in Spark, once for each part; returns the JSON of what they returned."""
        ...

    def changes_of(self, table: Table) -> "DataFrame":
        """Its changes of one table, with all columns of `change.arrow.frame`."""
        ...


# --- the sink ------------------------------------------------------------------------------------

BatchT = TypeVar("BatchT")  # a DataFrame or a LogBatch, see Takes


class SinkWriter(ABC, Generic[BatchT]):
    """A sink in use by one streaming query: one call at a time, batches in order.

    Only `status`, `catalog_failure`, `close` and `serve_requests` are called by another thread.
    """

    @abstractmethod
    def write(self, batch: BatchT, batch_id: int) -> int:
        """Store a batch; returns how many changes it had.

        The same `batch_id` may come twice with the same changes; the second call changes nothing.
        When it returns, the batch is stored; when it raises, it will come again.
        """

    @abstractmethod
    def progress(self) -> Progress | None:
        """Where a query that lost its checkpoint may go on; None: it starts at the beginning."""

    def continue_in(self, epoch: str, upto: int) -> None:
        """Go on with the log `epoch`: a restored copy of the one so far, up to a sequence.

        What is stored counts as of that log from here on. LogReplaced: more than the copy has is
        stored, or the sink cannot do it. Done twice, it is done once.
        """
        raise LogReplaced("the log was restored, and this sink cannot go on with another one")

    def maintain(self) -> None:
        """Compact and clean what is stored: called between batches, never during one."""
        return

    def finish(self) -> None:
        """Wait for what goes on beside the batches: called after the last one of `--once`."""
        return

    def failed_tables(self) -> list[FailedTable]:
        """The tables that are not followed any more."""
        return []

    def catalog_failure(self) -> str:
        """Which tables are not in the sink's catalog as they are, and why; "": all are."""
        return ""

    def status(self) -> DeliveryStatus | None:
        """What was sent to another system, and what waits; None: the sink sends nothing."""
        return None

    def serve_requests(self, spark: "SparkSession") -> None:
        """Do what was requested of a sink that sends, such as a redrive; called now and then."""
        return

    def redrive(self, spark: "SparkSession", keys: Sequence[str]) -> "RedriveResult":
        """Send dead letters again, of these rows or of all; what is not accepted stays."""
        raise ConfigError("the sink sends nothing, so it has no dead letters")

    def close(self) -> None:
        """End what waits, soon: `write` then raises SinkUnavailable."""
        return


class Sink(ABC):
    """A place to put changes: derive a frozen dataclass whose fields are the settings.

    Every sink has the settings `name` (its name in the config) and `tables` (globs of the tables
    that it gets; none: all). What has a default here may be a setting as well.
    """

    __slots__ = ()

    takes: ClassVar[Takes] = Takes.ROWS
    sends: ClassVar[bool] = False  # to another system, for which its tasks wait
    changes_of_batch: ClassVar[int] = 100_000  # at most, unless a setting says otherwise
    tasks_aside: ClassVar[int] = 0  # that run beside those of a batch, and give way to them
    keeps_dead_letters: ClassVar[bool] = False  # so that a redrive can be requested
    needs_every_row: ClassVar[bool] = False  # it equals its sources, so it cannot begin just now
    # The distributions that its tasks import beside those of every pipeline, each with its module.
    task_packages: ClassVar[Mapping[str, str]] = MappingProxyType({})

    if TYPE_CHECKING:  # frozen fields of derived classes

        @property
        def name(self) -> str: ...

        @property
        def tables(self) -> tuple[str, ...]: ...

    @abstractmethod
    def open(self, writer: str, *, adopt: bool = False) -> SinkWriter[Any]:
        """Begin to write.

        `writer` names the query and stays the same when it restarts. What another writer has
        written is refused with SinkFenced, unless `adopt` is set.
        """

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a change that it looks at, see `change.arrow.frame`; none: all."""
        return ()

    @property
    def transforms(self) -> Mapping[str, TableTransform]:
        """What happens to rows on their way to it, by schema.table or a pattern."""
        return {}

    @property
    def shaping(self) -> Transforms:
        """The same, to be asked for a table."""
        return Transforms(self.transforms, self.name)

    @property
    def renders(self) -> bool:
        """Whether changes become events in a format there, which name the source's connector."""
        return False

    def keyed(self, table: str, columns: tuple[Column, ...]) -> tuple[Column, ...]:
        """The columns of a table (`schema.table`), with the key that the sink's settings choose."""
        return columns

    def text_columns(self, table: str) -> frozenset[str]:
        """The columns of a table (`schema.table`) whose values it gets as their exact text."""
        return frozenset()

    @property
    def local_folders(self) -> Mapping[str, str]:
        """The folders on a machine's own disk that its tasks write to, by their settings."""
        return {}

    @property
    def whole_transactions(self) -> bool:
        """Whether it gets every change of a transaction, and looks for its tables by itself."""
        return False

    @property
    def batch_seconds(self) -> float | None:
        """Seconds between two looks for new changes; None: as the pipeline does."""
        return None

    @property
    def max_changes_per_batch(self) -> int | None:
        """How many changes a batch has at most; None: as many as the pipeline says."""
        return None

    @property
    def parallelism(self) -> int | None:
        """Into how many parts a log range is divided; None: as many as there are cores."""
        return None

    @property
    def rendering(self) -> "EventRendering | None":
        """How changes become events, of a sink whose events can be counted; None: they cannot."""
        return None

    def sent(self) -> SentEvents:
        """What was sent, to be compared with the log."""
        raise ConfigError(f"the sink {self.name} sends no events")

    def ahead_hint(self, upto: int) -> str:
        """What to do when it has changes that a restored log, which ends at `upto`, has not."""
        return (
            f"What it has stored beyond {upto} is not in this log, and stays. Run `headrace "
            f"pipeline --adopt {self.name}`: it goes on with what this log has after {upto}."
        )

    def lost_changes_hint(self) -> str:
        """What to do when the log no longer has changes that it has not read."""
        return (
            f"What it has stored stays. Run `headrace pipeline --adopt {self.name}`: it goes on "
            "with the oldest change in the log, and those between are not stored."
        )

    def check(self) -> list[Finding]:
        """Look whether what it writes to can be reached and written; nothing is stored or sent.

        Called by `headrace check` on this machine. A HeadraceError counts as a finding.
        """
        return []

    def reset_effect(self) -> str:
        """What `reset` does to what is stored, for the operator: `empties the table …`."""
        raise ConfigError(f"the sink {self.name} is of a type that cannot begin again by itself")

    def reset(self, writer: str) -> None:
        """Empty what is stored, so that the query `writer` fills it again from where it begins.

        No query runs. A call that was interrupted comes again, with the same writer or another.
        """
        raise ConfigError(f"the sink {self.name} is of a type that cannot begin again by itself")

    def erase(self, row: ErasedRow) -> list[ErasedPlace]:
        """Take one row's values out of what is stored, and search for them afterwards.

        No query runs. A call that was interrupted comes again.
        """
        left = "its type has no method `erase`: what it has stored of the row is as it was"
        return [ErasedPlace(place=f"sink {self.name}", left=(left,))]

    def redrive_requested(self) -> bool:
        """Whether a halted sink is to go on, because its dead letters are to be sent again."""
        return False

    def decline_redrive(self, reason: str) -> None:
        """Report to whoever requested a redrive that the sink has halted."""
        return


def informed(sink: Sink, **known: object) -> Sink:
    """A sink with the values that only its pipeline knows, as far as it has fields for them."""
    unaware: Any = sink
    fields: Any = getattr(sink, "__dataclass_fields__", {})
    places = {name for name, field in fields.items() if not field.metadata.get("setting", True)}
    values = {name: value for name, value in known.items() if name in places}
    aware: Sink = replace(unaware, **values) if values else sink
    return aware
