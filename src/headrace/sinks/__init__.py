"""Stage 4: a batch of changes → elsewhere. This is the contract; a sink is a module or a package.

A sink is a frozen dataclass whose fields are its settings. It opens nothing until a streaming query
opens it, and then gets every batch of that query in turn. It declares what a batch is to it
(`Takes`); everything else has a default.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from ..change.event import Column
from ..errors import ConfigError, LogReplaced
from ..plugins import Finding
from ..transforms.rules import TableTransform, Transforms
from .batch import LogBatch, LogBlock, LogRange, ReadableLog, Takes
from .erasing import ErasedPlace, ErasedRow
from .status import (
    DeliveryStatus,
    FailedTable,
    Progress,
    SentEvents,
    SettledRange,
    SinkPhase,
    SinkStatus,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .push.events import EventRendering
    from .push.redrive import RedriveResult

__all__ = [
    "BatchT",
    "DeliveryStatus",
    "ErasedPlace",
    "ErasedRow",
    "FailedTable",
    "LogBatch",
    "LogBlock",
    "LogLineage",
    "LogRange",
    "Progress",
    "ReadableLog",
    "SentEvents",
    "SettledRange",
    "Sink",
    "SinkPhase",
    "SinkStatus",
    "SinkWriter",
    "Takes",
    "informed",
    "lost_tail",
]

BatchT = TypeVar("BatchT")  # a DataFrame or a LogBatch, see Takes


class LogLineage(Protocol):
    """Which places are in a log; see `headrace.log.lineage`."""

    def shared_upto(self, epoch: str, generation: str) -> int | None:
        """Up to which sequence a place in that generation holds in this log; None: nowhere."""
        ...

    def likely_fork(self, epoch: str, generation: str) -> int | None:
        """Up to where this log and that history of it are likely the same; None: nowhere."""
        ...


def lost_tail(holder: str, sequence: int, upto: int) -> str:
    """Why changes that are stored are not in the log of the same epoch."""
    return (
        f"{holder} has changes up to {sequence}, but this log has other changes after {upto}: it "
        "was put back from an older copy, or lost its tail"
    )


class SinkWriter(ABC, Generic[BatchT]):
    """A sink in use by one streaming query: one call at a time, batches in order.

    Only `status`, `catalog_failure`, `close` and `serve_requests` are called by another thread.
    """

    # Set before each call. The generation is stored with a place, and comes back in `progress`: it
    # tells the log's changes from those of a copy that was put back. The lineage judges places.
    generation: str = ""  # "": nobody knows it
    lineage: "LogLineage | None" = None  # None: nobody knows it

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

    def go_back(self, upto: int) -> None:
        """Count nothing beyond `upto` as stored: the log has other changes there, and sends them.

        Called where an operator accepts it (`--adopt`). LogReplaced: the sink cannot do it.
        """
        raise LogReplaced(
            "the log lost what came after a sequence, and this sink cannot go back to it"
        )

    def expect_place(self, place: Progress, holder: str, hint: str) -> None:
        """Refuse what is stored by a place that is not in the log's lineage, where it is known."""
        if self.lineage is None or not place.sequence:
            return
        upto = self.lineage.shared_upto(place.epoch, place.generation)
        if upto is None or place.sequence > upto:
            fork = self.lineage.likely_fork(place.epoch, place.generation) or 0
            raise LogReplaced(lost_tail(holder, place.sequence, fork), hint=hint)

    def maintain(self) -> None:
        """Compact and clean what is stored: called between batches, never during one."""
        return

    def finish(self) -> None:
        """Wait for what goes on beside the batches: called after the last one of `--once`."""
        return

    def failed_tables(self) -> list[FailedTable]:
        """The tables that are not followed any more."""
        return []

    def rescued_values(self) -> Mapping[str, int]:
        """How many values did not fit their column, by table; their text is kept beside it."""
        return {}

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
    def unfit(self) -> Literal["null", "rescue", "stop"]:
        """What becomes of a value that its column cannot hold, where it stores columns.

        Null; with "rescue" its text is kept beside the row. Or it stops the table.
        """
        return "null"

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
