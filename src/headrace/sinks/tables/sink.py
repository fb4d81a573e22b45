"""Delta tables that equal the source's tables after every batch.

    scan (which tables) ─▶ plan ─▶ tasks, each with its share of keys ─▶ one commit a table

All rows stay in Spark's tasks; the driver sees file names, and which of their rows are dead. A
batch takes one job for all tables together, and costs what it changes: files that are there stay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...change.event import Column, Table
from ...errors import ConfigError, LogReplaced, PipelineError, TableFailed
from ...plugins import Finding
from ...transforms.rules import TableTransform
from .. import FailedTable, LogRange, Progress, Sink, SinkWriter, Takes
from ..erasing import ErasedPlace, ErasedRow
from ..lake.catalog import AnyCatalog, Registrar, check_catalog
from ..lake.delta import EPOCH, Delta, Marks
from ..lake.modes import PRIVATE, expect_mode, make_folder
from ..lake.plan import (
    CascadedPlace,
    ShareResult,
    TableFailure,
    TablePlan,
    TableRef,
    VersionSummary,
    failure_of,
)
from ..lake.storage import Folder, is_local
from .cascade_files import forget_cascaded
from .cascades import CascadeFailed, Child, Family, Search, cascaded_rows, read_steps, ref_of
from .erasure import erase_in_table
from .evolution import Evolution
from .fold import RowChange, rekeyed
from .foreign_keys import BatchPart, ForeignKeys, family_of, idle_summary
from .input import BatchInput, LogInput, RowsInput
from .ledger import TablesLedger
from .maintenance import Maintenance, MaintenanceWork, run_rewrites
from .row_search import Wanted, run_searches, searches
from .scan import Summaries
from .staged import StagedInput
from .target import Opening, TargetTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from .. import LogBatch

logger = logging.getLogger(__name__)

_MOST_ROUNDS = 500  # a batch may bring many versions of columns, each with a job of its own
_COMMITS_AT_ONCE = 8
_VACUUM_SECONDS = 3600.0

# What a batch has of each table that is not done with it yet.
Waiting = dict[TableRef, list[VersionSummary]]
Settled = tuple[TargetTable, TablePlan, list[ShareResult]]

FIELDS = (
    "sequence",
    "op",
    "source",
    "connector",
    "schema",
    "table",
    "key",
    "before",
    "after",
    "unchanged",
    "schema_version",
    "row_schema",
    "epoch",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables(Sink):
    """A Delta table per source table under `path`/schema/table."""

    takes: ClassVar[Takes] = Takes.LOG_RANGE
    needs_every_row: ClassVar[bool] = True
    changes_of_batch: ClassVar[int] = 250_000  # look-up and commit cost the same for fewer
    tasks_aside: ClassVar[int] = 1

    name: str
    path: str
    tables: tuple[str, ...] = ()  # globs; none: all
    keep: Literal["rows", "history"] = "rows"
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by schema.table
    as_text: tuple[str, ...] = ()  # schema.table.column: kept as the source's exact text
    # What a value does that its column cannot hold, outside the key: it becomes null, with its text
    # in RESCUED, or it stops the table.
    unfit: Literal["rescue", "stop"] = "rescue"
    # How replaced rows go: marked in a vector beside their file, or by writing the file anew, for
    # readers that know no vectors.
    deletes: Literal["vectors", "rewrite"] = "vectors"
    # By schema.table: the columns by which rows are sorted instead of their key, and those whose
    # values have a folder each.
    cluster_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partition_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    file_mb: float = 128.0  # about the largest size of a file
    vacuum_hours: float = 24.0  # files that are replaced stay so long, for those who read them
    mode: str = PRIVATE  # of the folder, when it is made; "0755": all users may read it
    # By schema.table or a pattern: what happens to rows before they are stored.
    transforms: Mapping[str, TableTransform] = field(default_factory=dict)
    catalog: AnyCatalog | None = None  # in which the tables are registered
    # Options for s3://, az://, gs://; they may be secret, so they do not print.
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        expect_mode(self.mode)
        if self.file_mb <= 0 or self.vacuum_hours < 0:
            raise ConfigError("file_mb must be above 0, and vacuum_hours not below")
        for name in ("keys", "cluster_by", "partition_by"):
            empty = [table for table, columns in getattr(self, name).items() if not columns]
            if empty:
                raise ConfigError(f"{name} names no column for {empty[0]}")

    @property
    def fields(self) -> tuple[str, ...]:
        """What it looks at; only versions need to know when they begin."""
        return (*FIELDS, "transaction") if self.keep == "history" else FIELDS

    def keyed(self, table: str, columns: tuple[Column, ...]) -> tuple[Column, ...]:
        """The columns of a table, with the key that `keys` chooses."""
        chosen = self.keys.get(table)
        return rekeyed(columns, chosen) if chosen else columns

    def text_columns(self, table: str) -> frozenset[str]:
        """The columns of a table that `as_text` names."""
        prefix = f"{table}."
        paths = (path for path in self.as_text if path.startswith(prefix))
        return frozenset(path.removeprefix(prefix) for path in paths)

    @property
    def local_folders(self) -> Mapping[str, str]:
        """Its folder, unless that is an object storage."""
        return {"path": self.path} if is_local(self.path) else {}

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
        """Whether its folder or bucket can be written, and its catalog answers."""
        return [self.folder.check("path"), *check_catalog(self.catalog, self.storage)]

    def reset_effect(self) -> str:
        """What `reset` will do."""
        return (
            f"empties every Delta table in {self.folder.uri}; until all is written again, readers "
            f"see part of the rows; earlier versions of the tables stay for "
            f"{self.vacuum_hours:g} hours"
        )

    def reset(self, writer: str) -> None:
        """Empty every table; the ledger last, because it names them."""
        self.empty(TablesLedger.open(self.folder, writer, adopt=True), writer)

    def empty(self, ledger: TablesLedger, writer: str) -> None:
        """Empty every table of a ledger, and then the ledger."""
        forget_cascaded(self.folder)
        for ref in ledger.refs:
            # A damaged table stays as it is: it fails again, with its reason, at its next change.
            with suppress(TableFailed):
                folder = self.folder.within(ref.schema, ref.table)
                if delta := Delta.open(folder, writer, adopt=True, restart=True):
                    delta.empty(delta.properties.get(EPOCH, ""))
        ledger.begin_again()

    def erase(self, row: ErasedRow) -> list[ErasedPlace]:
        """Take the row out of its Delta table and the table's earlier versions."""
        return erase_in_table(self, row)


class TablesWriter(SinkWriter["LogBatch | DataFrame | StagedInput"]):
    """The tables of a sink while a query writes them."""

    def __init__(
        self, sink: Tables, writer: str, *, adopt: bool, takes: Takes = Takes.LOG_RANGE
    ) -> None:
        """`takes` is how changes come: as ranges of the log, or as rows."""
        self._takes = takes
        self._sink = sink
        self._writer = writer
        self._adopt = adopt
        self._ledger = TablesLedger.open(sink.folder, writer, adopt=adopt)
        if adopt:
            self._take_over()
        self._targets: dict[TableRef, TargetTable] = {}
        self._spark: SparkSession | None = None  # None: the work is done in this process
        self._vacuum_due = time.monotonic()
        self._between_batches = threading.Lock()  # who commits
        self._maintenance = Maintenance(self._between_batches)
        self._changed: set[TableRef] = set()  # since compaction last looked
        self._foreign_keys = ForeignKeys(sink, self._ledger)
        self._cascaded: Mapping[TableRef, CascadedPlace] = {}  # in the batch that is being written
        self._registrar = Registrar(sink.catalog, sink.name) if sink.catalog else None
        if self._registrar:
            for ref in self._ledger.refs:
                folder = sink.folder.within(ref.schema, ref.table)
                self._registrar.offer_stored(ref.schema, ref.table, folder)

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
                    delta.continue_in(before, epoch, upto, self.generation)
        self._foreign_keys.continue_in(before, epoch, upto, self.generation)
        self._ledger.continue_in(epoch, self.generation)

    def go_back(self, upto: int) -> None:
        """Empty every table: what it had before a change is known no more."""
        self._sink.empty(self._ledger, self._writer)

    def progress(self) -> Progress | None:
        """How far every table has come."""
        return self._ledger.progress()

    def failed_tables(self) -> list[FailedTable]:
        """The tables that are not followed any more."""
        return self._ledger.failed_tables()

    def rescued_values(self) -> dict[str, int]:
        """How many values were put into RESCUED, by table."""
        return self._ledger.rescued_values()

    def catalog_failure(self) -> str:
        """Which tables the catalog does not have, and why."""
        return self._registrar.failure() if self._registrar else ""

    def write(self, batch: LogBatch | DataFrame | StagedInput, batch_id: int) -> int:
        """Make every table equal its source as of the batch's end."""
        with self._between_batches:
            return self._write(batch, batch_id)

    def _write(self, batch: LogBatch | DataFrame | StagedInput, batch_id: int) -> int:
        self._expect_tables(batch_id)
        count, rest = 0, batch
        while True:
            changes, seen = self._scanned(rest)
            cut = self._cut(changes, seen)
            if not cut or changes.whole is None:
                return count + self._write_part(changes, seen, batch_id)
            whole: Any = batch
            part = self._scanned(BatchPart(whole, changes.whole.after, cut))
            count += self._write_part(*part, batch_id)
            rest = BatchPart(whole, cut, changes.whole.upto)

    def _scanned(self, batch: Any) -> tuple[BatchInput, Summaries]:
        self._foreign_keys.begin()
        changes = self._input(batch)
        self._spark = changes.spark
        return changes, changes.scan()

    def _write_part(self, changes: BatchInput, seen: Summaries, batch_id: int) -> int:
        for ref, failure in changes.failures.items():
            self._give_up(ref, failure)
        marks = self._marks(changes, seen, batch_id)
        after, upto = (changes.whole.after, changes.whole.upto) if changes.whole else (0, 0)
        self._expect_no_gap(marks.epoch, after)
        waiting = self._followed(seen, marks.epoch)
        self._cascaded = self._cascade(changes, seen, waiting, marks.epoch)
        last = [marks.sequence, *(each.last_sequence for some in waiting.values() for each in some)]
        marks = replace(marks, sequence=max(last))
        for _ in range(_MOST_ROUNDS):
            if not waiting:
                break
            waiting = self._round(changes, waiting, marks)
        if waiting:
            raise PipelineError(
                f"batch {batch_id} reads differently each time: {next(iter(waiting))}"
            )
        if changes.whole:
            self._foreign_keys.note(changes.whole, seen.values())
        self._ledger.reach(Progress(marks.epoch, marks.sequence, self.generation), upto)
        self._ledger.save()
        return sum(each.changes for each in seen.values())

    def _round(self, changes: BatchInput, waiting: Waiting, marks: Marks) -> Waiting:
        """One job for all tables; returns those that need another one."""
        planned: list[tuple[TargetTable, TablePlan]] = []
        for ref, seen in waiting.items():
            target = self._targets[ref]
            try:
                plan = target.plan(seen, partial(self._rewrite, changes.spark))
            except TableFailed as error:
                self._give_up(ref, failure_of(error, _first(seen)))
                continue
            if plan is not None:
                planned.append((target, replace(plan, cascaded=self._cascaded.get(ref))))
        results = changes.run(tuple(plan for _, plan in planned)) if planned else {}
        again: Waiting = {}
        settled: list[Settled] = []
        for at, (target, plan) in enumerate(planned):
            done, seen = results[at], waiting[target.ref]
            failure = min(
                (each.failure for each in done if each.failure),
                key=lambda failure: failure.sequence,
                default=None,
            )
            try:
                if any(each.moves for each in done) and not plan.together:
                    target.apply_together()
                    again[target.ref] = seen
                elif any(each.unfit for each in done):
                    target.rescue()
                    again[target.ref] = seen
                elif failure:
                    target.recover(failure, seen)
                    again[target.ref] = seen
                else:
                    settled.append((target, plan, done))
                    if plan.upto < max(each.last_sequence for each in seen):
                        again[target.ref] = seen
            except TableFailed as error:
                self._give_up(target.ref, failure_of(error, _first(seen)))
        self._commit(changes.spark, settled, marks)
        return {ref: seen for ref, seen in again.items() if ref in self._targets}

    def _commit(self, spark: SparkSession | None, settled: Sequence[Settled], marks: Marks) -> None:
        rewrite = partial(run_rewrites, spark)
        with ThreadPoolExecutor(_COMMITS_AT_ONCE) as threads:
            # Every one is tried, and the first error raised.
            waiting = [
                threads.submit(
                    target.commit, plan, done, replace(marks, sequence=plan.upto), rewrite
                )
                for target, plan, done in settled
            ]
        self._changed |= {target.ref for target, _, _ in settled}
        for (target, _, done), each in zip(settled, waiting, strict=True):
            try:
                each.result()
                self._ledger.note_applied(target.ref, target.delta.applied(marks.epoch))
                self._ledger.note_rescued(target.ref, sum(part.rescued for part in done))
            except TableFailed as error:
                self._give_up(target.ref, failure_of(error, marks.sequence))

    def _input(self, batch: Any) -> BatchInput:
        if isinstance(batch, StagedInput):
            return batch
        if self._takes is not Takes.LOG_RANGE:
            return RowsInput(batch.select(*self._sink.fields))
        if any(each.computes for each in self._sink.transforms.values()):
            # Only here: it brings pyspark, which who reads the config can do without.
            from .computed import ComputedInput  # noqa: PLC0415

            return ComputedInput(batch, self._sink, self._wants, self._follows)
        return LogInput(batch, self._wants)

    def _follows(self, ref: TableRef, seen: Sequence[VersionSummary]) -> bool:
        """Whether a table is followed, or a full snapshot makes up for why it is not."""
        failure = self._ledger.failure(ref)
        return failure is None or _emptied(seen) > failure.sequence

    def _wants(self, table: Table) -> bool:
        self._foreign_keys.meet(table)
        return self._chosen(table)

    def _chosen(self, table: Table) -> bool:
        globs = self._sink.tables
        return not globs or any(map(table.matches, globs))

    def _expect_tables(self, batch_id: int) -> None:
        # The first batch writes the ledger, even if it is empty. Without it, tables would be made
        # anew out of this batch, and miss all that came before.
        if self._ledger.absent and batch_id > 0:
            raise PipelineError(
                f"the tables in {self._sink.folder.uri} are gone, and {batch_id} batches with them",
                hint="Bring them back from a copy, or run `headrace pipeline --adopt "
                f"{self._sink.name}` to make them anew of all that is still in the log.",
            )

    def _expect_no_gap(self, epoch: str, after: int) -> None:
        """Refuse a batch that does not follow the last one that the tables are known to have."""
        upto = self._ledger.upto
        if upto and epoch == self._ledger.epoch and after > upto and not self._adopt:
            self._ledger.expect_ours()  # else it is another that has brought them there
            raise PipelineError(
                f"{self._sink.folder.uri} has changes up to {upto}, but the query has brought them "
                f"up to {after}: the folder was put back from an older copy",
                hint=self._sink.lost_changes_hint(),
            )

    def _marks(self, changes: BatchInput, seen: Summaries, batch_id: int) -> Marks:
        if len(changes.epochs) > 1:
            raise PipelineError(
                "the batch holds changes of several logs, and their sequences have no common order",
                hint="Give each log a folder of its own.",
            )
        epoch = next(iter(changes.epochs), self._ledger.epoch)
        if self._ledger.epoch not in ("", epoch):
            if not self._adopt:
                raise LogReplaced(f"the tables in {self._sink.path} were filled from another log")
            self._ledger.forget_failures()
        last = max((each.last_sequence for each in seen.values()), default=0)
        return Marks(batch_id=batch_id, epoch=epoch, sequence=last, generation=self.generation)

    def _followed(self, seen: Summaries, epoch: str) -> Waiting:
        """What the batch has of tables that are followed, those included that are new."""
        found: Waiting = defaultdict(list)
        for each in seen.values():
            found[each.ref].append(each)
        for ref in [ref for ref in found if ref not in self._targets]:
            try:
                if not self._opened(ref, found[ref], epoch):
                    del found[ref]
            except TableFailed as error:
                self._give_up(ref, failure_of(error, _first(found.pop(ref))))
        return found

    def _opened(self, ref: TableRef, seen: Sequence[VersionSummary], epoch: str) -> bool:
        """Whether a table that changes for the first time is followed from now on."""
        if not self._follows(ref, seen):
            return False
        failure, emptied = self._ledger.failure(ref), _emptied(seen)
        target = TargetTable.open(
            self._sink,
            ref,
            min(seen, key=lambda each: each.first_sequence),
            Opening(
                epoch,
                self._writer,
                self._adopt,
                known=self._ledger.knows(ref) and not emptied,
                restart=failure is not None,
            ),
        )
        if self._ledger.generation and not emptied:
            # It may be ahead of the ledger, after a crash between their commits.
            hint = self._sink.ahead_hint(0)
            self.expect_place(target.delta.place(epoch), target.delta.folder.uri, hint)
        had = self._ledger.applied(ref) if epoch == self._ledger.epoch else 0
        if target.applied < had and not (failure or emptied):
            raise TableFailed(
                f"{target.delta.folder.uri} has changes up to {target.applied}, but had them up to "
                f"{had}: the Delta table was put back from an older copy"
            )
        if failure:
            logger.info("a full snapshot has come, so the table goes on table=%s", ref)
            target.start_at(emptied)
        self._ledger.note(ref, None)
        target.cascaded = self._ledger.cascaded(ref)
        self._targets[ref] = target
        return True

    def _give_up(self, ref: TableRef, failure: TableFailure) -> None:
        logger.error("a table is not followed any more table=%s reason=%s", ref, failure.reason)
        self._targets.pop(ref, None)
        self._ledger.note(ref, failure)

    # --- foreign keys that act -------------------------------------------------------------------

    def _cut(self, changes: BatchInput, seen: Summaries) -> int:
        """Where a part of the batch ends that is written by itself; 0: all of it is."""
        whole = changes.whole
        if whole is None:
            return 0
        stored = self._foreign_keys.stored(whole.epoch, self._reached(whole), self.lineage)
        ends = [self._foreign_keys.cut(whole, seen), stored.upto if stored else 0]
        return min((end for end in ends if 0 < end < whole.upto), default=0)

    def _reached(self, whole: LogRange) -> int:
        """After which change of the batch the tables lack some."""
        return max(whole.after, self._ledger.upto if whole.epoch == self._ledger.epoch else 0)

    def _cascade(
        self, changes: BatchInput, seen: Summaries, waiting: Waiting, epoch: str
    ) -> Mapping[TableRef, CascadedPlace]:
        """Let tables wait for what foreign keys do to their rows; returns where that is stored."""
        whole = changes.whole
        if whole is None:
            self._refuse_cascades(seen, waiting)
            return {}
        whole = whole.beyond(self._reached(whole))
        if whole.after >= whole.upto:
            return {}
        tables = self._foreign_keys.in_force(whole)
        found = self._foreign_keys.stored(epoch, whole.after, self.lineage)
        if found is None and self._foreign_keys.concerns(tables):
            rows = self._cascaded_rows(whole, tables, waiting)
            found = None if rows is None else self._foreign_keys.store(whole, self.generation, rows)
        if found is None:
            return {}
        for ref, every in found.by_table.items():
            some = [each for each in every if each.sequence <= whole.upto]
            if some and self._opens(tables[ref], epoch, whole.after + 1):
                self._await_cascaded(tables[ref], some, waiting)
        place = CascadedPlace(self._sink.folder, found.token)
        return {ref: place for ref in found.by_table if ref in waiting}

    def _cascaded_rows(
        self, whole: LogRange, tables: Mapping[TableRef, Table], waiting: Waiting
    ) -> Mapping[TableRef, Sequence[RowChange]] | None:
        """What foreign keys do to rows in a range; None: it has no change that they act upon."""
        while True:
            family = self._family(whole, tables)
            try:
                steps = read_steps(whole, family)
                return cascaded_rows(family, steps, self._found_rows(family)) if steps else None
            except CascadeFailed as error:
                waiting.pop(error.ref, None)
                self._give_up(error.ref, failure_of(error.reason, error.sequence))

    def _found_rows(self, family: Family) -> Search:
        def search(child: Child, wanted: Wanted) -> list[dict[str, Any]]:
            names = [column.name for column in family.columns(child.table)]
            delta = self._targets[child.ref].delta
            return run_searches(self._spark, searches(delta, names, wanted))

        return search

    def _family(self, whole: LogRange, tables: Mapping[TableRef, Table]) -> Family:
        opened = {
            ref for ref, table in tables.items() if self._opens(table, whole.epoch, whole.after + 1)
        }
        return family_of(self._sink, tables, {ref: self._targets[ref].applied for ref in opened})

    def _opens(self, table: Table, epoch: str, first: int) -> bool:
        """Whether a table is followed, also if the batch has no change of it."""
        ref = ref_of(table)
        if ref in self._targets:
            return True
        if not self._chosen(table) or not self._ledger.knows(ref) or self._ledger.failure(ref):
            return False
        try:
            return self._opened(ref, [idle_summary(table, first, first)], epoch)
        except TableFailed as error:
            self._give_up(ref, failure_of(error, first))
            return False

    def _await_cascaded(self, table: Table, some: Sequence[RowChange], waiting: Waiting) -> None:
        ref, last = ref_of(table), some[-1].sequence
        self._targets[ref].cascaded = True
        self._ledger.note_cascaded(ref)
        if ref not in waiting:
            waiting[ref] = [idle_summary(table, some[0].sequence, last)]
            return
        newest = max(waiting[ref], key=lambda each: each.last_sequence)
        newest.last_sequence = max(newest.last_sequence, last)
        newest.last_record = max(newest.last_record, last)

    def _refuse_cascades(self, seen: Summaries, waiting: Waiting) -> None:
        """Changes that come as rows may lack those by which rows of other tables follow."""
        for each in seen.values():
            if each.cascades and waiting.pop(each.ref, []):
                reason = (
                    "its foreign keys change rows, which only a sink that reads the log follows"
                )
                hint = f"Write it with `headrace pipeline {self._sink.name}`."
                self._give_up(each.ref, TableFailure(each.first_sequence, reason, hint))

    # --- files written anew ----------------------------------------------------------------------

    def _rewrite(
        self,
        spark: SparkSession | None,
        target: TargetTable,
        evolution: Evolution,
        notes: Mapping[str, str],
    ) -> None:
        """All files of a table with other columns."""
        rows = target.current_rows
        done = run_rewrites(spark, target.rewrites(evolution))
        target.take_over(done, evolution.schema, notes)
        self._ledger.note_rescued(target.ref, rows * len(evolution.carry.rescued))

    def maintain(self, *, vacuum: bool | None = None) -> None:
        """Let files be compacted beside the stream, and now and then unused ones be deleted.

        `vacuum` says whether the latter is to be; None: when an hour has passed.
        """
        if self._registrar:
            for ref in self._changed & self._targets.keys():
                delta = self._targets[ref].delta
                self._registrar.offer(ref.schema, ref.table, delta.folder, delta.metadata)
        due = time.monotonic() >= self._vacuum_due if vacuum is None else vacuum
        vacuums = list(self._targets.values()) if due else []
        compacts = [self._targets[ref] for ref in self._changed if ref in self._targets]
        work = MaintenanceWork(compacts, vacuums, self._sink.vacuum_hours)
        if self._maintenance.begin(self._spark, work):
            self._changed.clear()
            if vacuums:
                pause = min(_VACUUM_SECONDS, self._sink.vacuum_hours * 3600)
                self._vacuum_due = time.monotonic() + pause

    def finish(self) -> None:
        """Let maintenance and registration come to their end."""
        self._maintenance.wait()
        if self._registrar:
            self._registrar.finish()

    def close(self) -> None:
        """Commit nothing from now on beside the stream, and register nothing."""
        self._maintenance.close()
        if self._registrar:
            self._registrar.close()


def _emptied(seen: Sequence[VersionSummary]) -> int:
    return max((at for each in seen for at in each.emptied), default=0)


def _first(seen: Sequence[VersionSummary]) -> int:
    return min(each.first_sequence for each in seen)
