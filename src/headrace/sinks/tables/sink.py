"""Delta tables that equal the source's tables after every batch.

    a batch ─▶ route (each change to its key's bucket) ─▶ merge (a bucket's files) ─▶ commit

All rows stay in Spark's tasks; the driver sees file names. A batch usually takes one job, for all
tables together. What the plan did not know (a new table, new columns) takes a second one for the
tables concerned, planned with what the first has seen.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from ...errors import ConfigError, LogReplaced, PipelineError, TableFailed
from ...plugins import Finding
from .. import FailedTable, Progress, Sink, SinkWriter, Takes
from ..lake.delta import EPOCH, Delta, Marks
from ..lake.modes import PRIVATE, expect_mode, make_folder
from ..lake.plan import BucketResult, TableFailure, TablePlan, TableRef, VersionSummary
from ..lake.storage import Folder
from .compaction import compact
from .ledger import TablesLedger
from .merge import RESULT_DDL, Merge
from .route import FIELDS, SENT_DDL, TASK, ChangeRouter
from .target import TargetTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

_MOST_PASSES = 500  # a batch may bring many versions of columns, each with a job of its own
_COMMITS_AT_ONCE = 8
_VACUUM_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables(Sink):
    """A Delta table per source table under `path`/schema/table."""

    takes: ClassVar[Takes] = Takes.PACKED
    needs_every_row: ClassVar[bool] = True

    name: str
    path: str
    tables: tuple[str, ...] = ()  # globs; none: all
    keep: Literal["rows", "history"] = "rows"
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by schema.table
    as_text: tuple[str, ...] = ()  # schema.table.column: kept as the source's exact text
    file_mb: float = 8.0  # about the size of a file; smaller ones make small batches cheaper
    vacuum_hours: float = 168.0  # files that are replaced stay so long, for those who read them
    mode: str = PRIVATE  # of the folder, when it is made; "0755": all users may read it
    # Options for s3://, az://, gs://; they may be secret, so they do not print.
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        expect_mode(self.mode)
        if self.file_mb <= 0 or self.vacuum_hours < 0:
            raise ConfigError("file_mb must be above 0, and vacuum_hours not below")
        empty = [table for table, columns in self.keys.items() if not columns]
        if empty:
            raise ConfigError(f"keys names no column for {empty[0]}")

    @property
    def fields(self) -> tuple[str, ...]:
        """What it looks at; only versions need to know when they begin."""
        return (*FIELDS, "transaction") if self.keep == "history" else FIELDS

    @property
    def file_bytes(self) -> float:
        """About the size of a file."""
        return self.file_mb * 1_000_000

    @property
    def folder(self) -> Folder:
        """Where the tables lie."""
        return Folder.of(self.path, self.storage)

    def failed_tables(self) -> list[FailedTable]:
        """The tables that are not followed any more; another query may be writing."""
        return TablesLedger.open(self.folder, "", adopt=True).failed_tables()

    def ahead_hint(self, upto: int) -> str:
        """Rows that the log does not know of can only be made anew."""
        return self.lost_changes_hint()

    def lost_changes_hint(self) -> str:
        """Rows that differ from their source can only be made anew."""
        return (
            f"Run `headrace reset {self.name}`: it empties the tables, and takes a new snapshot of "
            "the sources, from which they are filled again."
        )

    def open(self, writer: str, *, adopt: bool = False) -> TablesWriter:
        """Begin to write."""
        make_folder(self.path, self.mode)
        return TablesWriter(self, writer, adopt=adopt)

    def check(self) -> list[Finding]:
        """Whether its folder or bucket can be written."""
        return [self.folder.check("path")]

    def reset_effect(self) -> str:
        """What `reset` will do."""
        return (
            f"empties every Delta table in {self.folder.uri}; until all is written again, readers "
            f"see part of the rows; earlier versions of the tables stay for "
            f"{self.vacuum_hours:g} hours"
        )

    def reset(self, writer: str) -> None:
        """Empty every table; the ledger last, because it names them."""
        ledger = TablesLedger.open(self.folder, writer, adopt=True)
        for ref in ledger.refs:
            # A damaged table stays as it is: it fails again, with its reason, at its next change.
            with suppress(TableFailed):
                folder = self.folder.within(ref.schema, ref.table)
                if delta := Delta.open(folder, writer, adopt=True, restart=True):
                    delta.empty(delta.properties.get(EPOCH, ""))
        ledger.begin_again()


class TablesWriter(SinkWriter["DataFrame"]):
    """The tables of a sink while a query writes them."""

    def __init__(
        self, sink: Tables, writer: str, *, adopt: bool, takes: Takes = Takes.PACKED
    ) -> None:
        """`takes` is how changes come: packed from our own source, or as rows."""
        self._sink = sink
        self._writer = writer
        self._adopt = adopt
        self._packed = takes is Takes.PACKED
        self._ledger = TablesLedger.open(sink.folder, writer, adopt=adopt)
        if adopt:
            self._take_over()
        self._targets: dict[TableRef, TargetTable] = {}
        self._spark: SparkSession | None = None
        self._vacuum_due = time.monotonic()

    def _take_over(self) -> None:
        """Be the writer of every table, also of those that do not change for long."""
        for ref in self._ledger.refs:
            # What is wrong with one shows when its next change comes.
            with suppress(TableFailed):
                folder = self._sink.folder.within(ref.schema, ref.table)
                Delta.open(folder, self._writer, adopt=True)

    def continue_in(self, epoch: str, upto: int) -> None:
        """Mark every table; the ledger last, because it says which log they are of."""
        before = self._ledger.epoch
        for ref in self._ledger.refs:
            with suppress(TableFailed):
                folder = self._sink.folder.within(ref.schema, ref.table)
                if delta := Delta.open(folder, self._writer, adopt=False):
                    delta.continue_in(before, epoch, upto)
        self._ledger.continue_in(epoch)

    def progress(self) -> Progress | None:
        """How far every table has come."""
        return self._ledger.progress()

    def failed_tables(self) -> list[FailedTable]:
        """The tables that are not followed any more."""
        return self._ledger.failed_tables()

    def write(self, batch: DataFrame, batch_id: int) -> int:
        """Make every table equal its source as of the batch's end."""
        changes = batch if self._packed else batch.select(*self._sink.fields)
        self._expect_tables(batch_id)
        self._spark = changes.sparkSession
        outcome = self._run(changes, [target.plan() for target in self._targets.values()])
        marks = self._marks(outcome, batch_id)
        again = self._settle(list(self._targets.values()), outcome, marks)
        for _ in range(_MOST_PASSES):
            if not again:
                break
            targets = [self._targets[ref] for ref in again]
            self._compact([target for target in targets if not target.ready])
            plans = [target.plan() for target in targets]
            again = self._settle(targets, self._run(changes, plans, only_planned=True), marks)
        if again:
            raise PipelineError(f"batch {batch_id} reads differently each time: {again[0]}")
        self._ledger.reach(marks.epoch, marks.sequence)
        self._ledger.save()
        return outcome.changes

    def _run(
        self, changes: DataFrame, plans: list[TablePlan], *, only_planned: bool = False
    ) -> Outcome:
        """One job over the batch, for all of these tables."""
        tasks = self._tasks(changes.sparkSession, plans)
        routing = ChangeRouter(
            plans,
            keys=self._sink.keys,
            only_planned=only_planned,
            tasks=tasks,
            packed=self._packed,
        )
        routed = changes.mapInArrow(routing, SENT_DDL)
        merged = routed.repartitionById(tasks, TASK).mapInArrow(Merge(plans), RESULT_DDL)
        results = merged.collect()
        return Outcome(plans, [(row["at"], row["kind"], row["result"]) for row in results])

    @staticmethod
    def _tasks(spark: SparkSession, plans: list[TablePlan]) -> int:
        """How many tasks share the buckets."""
        buckets = sum(len(plan.buckets) for plan in plans)
        return max(min(buckets, int(spark.conf.get("spark.sql.shuffle.partitions") or 1)), 1)

    def _expect_tables(self, batch_id: int) -> None:
        # The first batch writes the ledger, even if it is empty. Without it, tables would be made
        # anew out of this batch, and miss all that came before.
        if self._ledger.absent and batch_id > 0:
            raise PipelineError(
                f"the tables in {self._sink.folder.uri} are gone, and {batch_id} batches with them",
                hint="Bring them back from a copy, or run `headrace pipeline --adopt "
                f"{self._sink.name}` to make them anew of all that is still in the log.",
            )

    def _marks(self, outcome: Outcome, batch_id: int) -> Marks:
        epochs = {seen.epoch for seen in outcome.seen}
        if len(epochs) > 1:
            raise PipelineError(
                "the batch holds changes of several logs, and their sequences have no common order",
                hint="Give each log a folder of its own.",
            )
        epoch = epochs.pop() if epochs else self._ledger.epoch
        if self._ledger.epoch not in ("", epoch):
            if not self._adopt:
                raise LogReplaced(f"the tables in {self._sink.path} were filled from another log")
            self._ledger.forget_failures()
        last = max((seen.last_sequence for seen in outcome.seen), default=0)
        return Marks(batch_id=batch_id, epoch=epoch, sequence=last)

    def _settle(self, targets: list[TargetTable], outcome: Outcome, marks: Marks) -> list[TableRef]:
        """Commit what is done; returns the tables that another job must do."""
        known = {target.ref: at for at, target in enumerate(targets)}
        again: list[TableRef] = []
        for ref, seen in outcome.by_table.items():
            at = known.get(ref)
            try:
                if at is None:
                    if self._opened(ref, seen):
                        again.append(ref)
                elif targets[at].adapt(seen):
                    again.append(ref)  # planned anew, it may well get through
                elif at in outcome.failures:
                    targets[at].recover(outcome.failures[at], seen)
                    again.append(ref)
            except TableFailed as error:
                self._give_up(ref, seen, error)
        self._commit(
            [
                (target, outcome.plans[at], outcome.done[at])
                for at, target in enumerate(targets)
                if target.ref not in again and target.ref in self._targets
            ],
            marks,
        )
        unfinished = [plan.ref for plan in outcome.plans if plan.upto]
        return again + [ref for ref in unfinished if ref in self._targets and ref not in again]

    def _opened(self, ref: TableRef, seen: Sequence[VersionSummary]) -> bool:
        """Whether a table that changes for the first time is followed from now on."""
        failure = self._ledger.failure(ref)
        emptied = max(each.emptied_at for each in seen)
        if failure and emptied <= failure.sequence:
            return False
        target = TargetTable.open(
            self._sink,
            ref,
            seen,
            writer=self._writer,
            adopt=self._adopt,
            known=self._ledger.knows(ref) and not emptied,
        )
        if failure:
            logger.info("a full snapshot has come, so the table goes on table=%s", ref)
            target.start_at(emptied)
        self._ledger.note(ref, None)
        self._targets[ref] = target
        return True

    def _commit(
        self, settled: list[tuple[TargetTable, TablePlan, list[BucketResult]]], marks: Marks
    ) -> None:
        with ThreadPoolExecutor(_COMMITS_AT_ONCE) as threads:
            # Every one is tried, and the first error raised.
            waiting = [
                threads.submit(target.commit, plan, done, marks.upto(plan.upto))
                for target, plan, done in settled
            ]
        for each in waiting:
            each.result()

    def _give_up(self, ref: TableRef, seen: Sequence[VersionSummary], error: TableFailed) -> None:
        logger.error("a table is not followed any more table=%s reason=%s", ref, error)
        first = min(each.first_sequence for each in seen)
        self._targets.pop(ref, None)
        self._ledger.note(ref, TableFailure(first, str(error), error.hint))

    def maintain(self) -> None:
        """Join small files, split large buckets, and now and then delete old files."""
        targets = list(self._targets.values())
        self._compact(targets)
        if time.monotonic() >= self._vacuum_due:
            pause = min(_VACUUM_SECONDS, self._sink.vacuum_hours * 3600)
            self._vacuum_due = time.monotonic() + pause
            for target in targets:
                target.delta.vacuum(self._sink.vacuum_hours)

    def _compact(self, targets: Sequence[TargetTable]) -> None:
        if self._spark is not None:
            compact(self._spark, targets, self._sink.file_bytes)


class Outcome:
    """What the tasks of a job returned."""

    def __init__(self, plans: list[TablePlan], results: list[tuple[int, str, str]]) -> None:
        self.plans = plans
        self.seen: list[VersionSummary] = []
        self.done: dict[int, list[BucketResult]] = defaultdict(list)
        self.failures: dict[int, TableFailure] = {}
        for at, kind, text in results:
            if kind == "seen":
                self.seen.append(msgspec.json.decode(text, type=VersionSummary))
            elif kind == "done":
                self.done[at].append(msgspec.json.decode(text, type=BucketResult))
            else:
                self.failures[at] = msgspec.json.decode(text, type=TableFailure)

    @property
    def changes(self) -> int:
        """How many changes of tables the batch held."""
        return sum(seen.changes for seen in self.seen)

    @property
    def by_table(self) -> dict[TableRef, list[VersionSummary]]:
        """What was seen, table by table."""
        found: dict[TableRef, list[VersionSummary]] = defaultdict(list)
        for seen in self.seen:
            found[seen.ref].append(seen)
        return found
