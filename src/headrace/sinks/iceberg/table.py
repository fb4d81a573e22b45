"""One Iceberg table of a history: what it has, its columns, and how a batch is appended.

    files ─▶ one commit: a snapshot with them, marks in its summary and in the table's properties

So a batch that comes again finds what it has done. Another writer that commits in between makes a
commit fail; then it is read what it has done, and the commit is tried again.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import msgspec
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.table import FileScanTask, Table, TableProperties, Transaction
from pyiceberg.table.snapshots import Snapshot

from ...errors import PipelineError, SinkFenced, SinkRefused, SinkUnavailable, TableFailed
from ...retry import Backoff
from .. import Progress
from ..lake.storage import is_local
from .append import AppendPlan, WrittenFile
from .catalog import CatalogLink, storage_only
from .columns import TableVersion, evolve, fits, fixed_columns
from .expiry import delete_files, delete_unreachable
from .partitions import PartitionBy, repartition

logger = logging.getLogger(__name__)

TABLE = "headrace.table"  # the source's table that it is the history of
WRITER = "headrace.writer"
BATCH = "headrace.batch"
EPOCH = "headrace.epoch"
SEQUENCE = "headrace.sequence"
APPLIED = "headrace.applied"  # by epoch, as JSON
LOG_GENERATION = "headrace.generation"

_TRIES = 10
_BACKOFF = Backoff(0.1, 5.0, jitter=0.25)
_EVERY_AGE = timedelta(days=-1)  # also what a clock that is a little ahead has written
_FRESH_SECONDS = 600.0  # credentials for the storage may come with a table, and end with an hour
_PROPERTIES = {
    TableProperties.FORMAT_VERSION: "2",
    TableProperties.PARQUET_COMPRESSION: "zstd",
    TableProperties.MANIFEST_MERGE_ENABLED: "true",  # else each batch adds one for good
    TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true",
    TableProperties.METADATA_PREVIOUS_VERSIONS_MAX: "100",
}

Identifier = tuple[str, ...]
Rewrite = Callable[[FileScanTask, AppendPlan], "list[WrittenFile] | None"]

_applied = msgspec.json.Decoder(dict[str, int]).decode


@dataclass(frozen=True, slots=True)
class HistoryMarks:
    """What a table says of itself: who writes it, and up to where it has each log."""

    writer: str
    batch: int
    epoch: str  # the log of the last batch
    applied: Mapping[str, int]  # by epoch
    generation: str = "0"  # of the log of the last batch; "": not known

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> HistoryMarks:
        """Those of a table's properties."""
        return cls(
            properties.get(WRITER, ""),
            int(properties.get(BATCH, "-1")),
            properties.get(EPOCH, ""),
            _applied(properties.get(APPLIED, "{}")),
            properties.get(LOG_GENERATION, "0"),
        )

    @property
    def place(self) -> Progress:
        """Up to where it has the log of the last batch."""
        return Progress(self.epoch, self.applied.get(self.epoch, 0), self.generation)

    def reached(self, progress: Progress, batch: int) -> HistoryMarks:
        """The same after a batch."""
        applied = {**self.applied, progress.epoch: progress.sequence}
        noted = replace(self, epoch=progress.epoch, batch=batch, applied=applied)
        return replace(noted, generation=progress.generation)

    def summary(self) -> dict[str, str]:
        """What a snapshot says."""
        return {
            WRITER: self.writer,
            BATCH: str(self.batch),
            EPOCH: self.epoch,
            SEQUENCE: str(self.applied.get(self.epoch, 0)),
        }

    def properties(self) -> dict[str, str]:
        """What the table says."""
        applied = msgspec.json.encode(self.applied).decode()
        return {**self.summary(), APPLIED: applied, LOG_GENERATION: self.generation}


class IcebergTable:
    """A table of the catalog that is a history, opened by the driver."""

    def __init__(self, link: CatalogLink, table: Table, writer: str) -> None:
        self._link = link
        self._table = table
        self._writer = writer
        self._planned = self.marks
        self._loaded = time.monotonic()

    @classmethod
    def open(
        cls, link: CatalogLink, catalog: RestCatalog, name: Identifier, source: str, writer: str
    ) -> IcebergTable | None:
        """The history of a source's table; None: there is none. TableFailed: it is something else.

        It may be that of another writer; see `take_over`.
        """
        with link.reached(".".join(name)):
            try:
                table = catalog.load_table(name)
            except NoSuchTableError:
                return None
        if (found := table.properties.get(TABLE)) != source:
            what = f"the history of {found}" if found else "a table that is no history"
            raise TableFailed(
                f"{'.'.join(name)} in the catalog is {what}",
                hint="Set another namespace or table for the sink, or rename that table.",
            )
        opened = cls(link, table, writer)
        opened._expect_whole()
        return opened

    @classmethod
    def create(
        cls, link: CatalogLink, catalog: RestCatalog, name: Identifier, source: str, writer: str
    ) -> IcebergTable:
        """An empty one, without the columns of the source's table."""
        marks = HistoryMarks(writer, -1, "", {})
        properties = {**_PROPERTIES, TABLE: source, **marks.properties()}
        with link.reached(".".join(name)):
            try:
                catalog.create_table(name, fixed_columns(), properties=properties)
            except TableAlreadyExistsError:
                logger.warning("another writer has just made a table table=%s", ".".join(name))
        opened = cls.open(link, catalog, name, source, writer)
        if opened is None:
            raise SinkUnavailable(f"{link.uri}: {'.'.join(name)} is gone right after it was made")
        return opened

    @property
    def name(self) -> str:
        """As SQL would call it."""
        return ".".join(self._table.name())

    @property
    def table(self) -> Table:
        """As pyiceberg has it."""
        return self._table

    @property
    def marks(self) -> HistoryMarks:
        """What it has."""
        return HistoryMarks.of(self._table.properties)

    def plan(self, before: int | None) -> AppendPlan:
        """What tasks need to know to write its files."""
        if time.monotonic() - self._loaded > _FRESH_SECONDS:
            self._refresh()
        self._expect_writer()
        self._planned = self.marks
        # Tasks look at columns and partitions alone; a thousand snapshots would go to each of them.
        metadata = self._table.metadata.model_copy(
            update={
                "snapshots": [],
                "snapshot_log": [],
                "metadata_log": [],
                "refs": {},
                "current_snapshot_id": None,
            }
        )
        return AppendPlan(metadata, storage_only(self._table), self._planned.applied, before)

    # --- changes of the table itself -------------------------------------------------------------

    def complete(self) -> None:
        """Add columns that changes have now, and had not when the table was made."""

        def change(transaction: Transaction) -> bool:
            names = {each.name for each in self._table.schema().fields}
            if names.issuperset(fixed_columns().names):
                return False
            with transaction.update_schema() as update:
                update.union_by_name(fixed_columns())
            return True

        self._alter(change)

    def partition(self, wanted: Sequence[PartitionBy]) -> None:
        """Partition what comes from now on so."""

        def change(transaction: Transaction) -> bool:
            update, table = transaction.update_spec(), self._table
            changed = repartition(update, table.spec(), table.schema(), wanted)
            if changed:
                update.commit()
            return changed

        self._alter(change)

    def follow(self, version: TableVersion) -> None:
        """Have the columns of the source's table; TableFailed: that is not possible."""

        def change(transaction: Transaction) -> bool:
            if fits(schema := self._table.schema(), version):
                return False
            with transaction.update_schema() as update:
                evolve(update, schema, version)
            return True

        self._alter(change)

    def _alter(self, change: Callable[[Transaction], bool]) -> None:
        for _ in self._tries():
            self._expect_writer()
            transaction = self._table.transaction()
            with self._link.reached(self.name):
                try:
                    if change(transaction):
                        transaction.commit_transaction()
                except CommitFailedException:
                    continue
            return

    # --- batches ---------------------------------------------------------------------------------

    def append(self, files: Iterable[WrittenFile], reached: Progress, batch: int) -> None:
        """Add files of the last plan in one snapshot.

        SinkUnavailable: the table has got more since then, so they may have what it has.
        """
        added = list(files)
        self._expect_seen(added)
        self._commit(self._planned, self._planned.reached(reached, batch), added)

    def discard(self, files: Iterable[WrittenFile]) -> None:
        """Delete files that are in no commit; one that cannot be deleted stays."""
        delete_files(self._table.io, [each.path for each in files])

    def mark(self, reached: Progress) -> None:
        """Note up to where it has a log."""
        self._expect_writer()
        self._commit(self.marks, self.marks.reached(reached, self.marks.batch))

    def take_over(self) -> None:
        """Be its writer: a commit that another has begun then fails."""
        if self.marks.writer != self._writer:
            self._commit(self.marks, replace(self.marks, writer=self._writer))

    def _commit(
        self, before: HistoryMarks, after: HistoryMarks, files: Sequence[WrittenFile] = ()
    ) -> None:
        """Lead the table from marks to others; nobody else may have changed them."""
        for _ in self._tries():
            if self.marks == after:
                return
            try:
                self._expect_whole()
                self._expect_marks(before)
                self._expect_spec(files)
            except PipelineError:
                self.discard(files)  # here no try before has landed
                raise
            transaction = self._one_try()
            try:
                with self._link.reached(self.name):
                    self._add(transaction, after, files)
                return
            except _Conflict:
                continue
            except SinkUnavailable:
                # The catalog may have done it, and only its answer is missing.
                self._refresh()
                if self.marks == after:
                    return
                raise

    def _add(
        self, transaction: Transaction, marks: HistoryMarks, files: Sequence[WrittenFile]
    ) -> None:
        transaction.set_properties(marks.properties())
        with transaction.update_snapshot(snapshot_properties=marks.summary()).merge_append() as new:
            for file in files:
                new.append_data_file(file.data_file())
        try:
            transaction.commit_transaction()
        except CommitFailedException as error:
            raise _Conflict from error

    def _one_try(self) -> Transaction:
        """A transaction that fails when another writer was first.

        Pyiceberg's own retries would append again without looking at what the other has done.
        """
        single = {**self._table.properties, TableProperties.COMMIT_NUM_RETRIES: "0"}
        self._table.metadata = self._table.metadata.model_copy(update={"properties": single})
        return self._table.transaction()

    def empty(self) -> None:
        """Remove all rows; earlier snapshots have them until they are expired."""
        nothing = HistoryMarks(self._writer, -1, "", {})
        for _ in self._tries():
            transaction = self._one_try()
            transaction.set_properties(nothing.properties())
            with self._link.reached(self.name), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there are no rows
                transaction.delete(AlwaysTrue(), nothing.summary())
                before = self._table.metadata.current_snapshot_id
                if before is not None and transaction.table_metadata.current_snapshot_id == before:
                    # Without rows there is no snapshot of it, but one must say what it has.
                    transaction.update_snapshot(nothing.summary()).fast_append().commit()
                try:
                    transaction.commit_transaction()
                except CommitFailedException:
                    continue
            return

    def replace(self, rewrite: Rewrite) -> None:
        """Put other files in the place of some, with the same marks; None of a file: it stays.

        A commit of another writer in between makes it begin again with what is there then.
        """
        for _ in self._tries():
            self._expect_writer()
            plan, replaced, added = self.plan(None), list[FileScanTask](), list[WrittenFile]()
            for task in self.tasks():
                if (written := rewrite(task, plan)) is not None:
                    replaced.append(task)
                    added += written
            if not replaced:
                return
            try:
                with self._link.reached(self.name):
                    self._swap(replaced, added)
                return
            except _Conflict:
                self.discard(added)

    def tasks(self) -> list[FileScanTask]:
        """The files of its newest snapshot; TableFailed: pyiceberg cannot read them."""
        with self._link.reached(self.name):
            try:
                return list(self._table.scan().plan_files())
            except ValueError as error:
                raise TableFailed(
                    f"{self.name} has equality deletes, which pyiceberg does not read",
                    hint="Have an engine that wrote them compact the table.",
                ) from error

    def _swap(self, replaced: Sequence[FileScanTask], added: Sequence[WrittenFile]) -> None:
        marks, transaction = self.marks, self._one_try()
        transaction.set_properties(marks.properties())
        with transaction.update_snapshot(snapshot_properties=marks.summary()).overwrite() as new:
            for task in replaced:
                new.delete_data_file(task.file)
            for file in added:
                new.append_data_file(file.data_file())
        try:
            transaction.commit_transaction()
        except CommitFailedException as error:
            raise _Conflict from error

    def forget(self) -> None:
        """Leave the newest snapshot alone, with those that tags and branches keep.

        A snapshot that replaces files has a manifest with the bounds of the old ones, so another
        one comes before the rest goes.
        """
        for _ in self._tries():
            self._expect_writer()
            try:
                with self._link.reached(self.name):
                    self._add(self._one_try(), self.marks, ())
                break
            except _Conflict:
                continue
        self.expire(_EVERY_AGE)

    def expire(self, keep: timedelta) -> int:
        """Remove snapshots that are older, and the files that only these have."""
        self._refresh()
        before = list(self._table.metadata.snapshots)
        oldest = datetime.now(UTC) - keep
        with self._link.reached(self.name):
            self._table.maintenance.expire_snapshots().older_than(oldest).commit()
            self._refresh()
            kept = list(self._table.metadata.snapshots)
            ids = {each.snapshot_id for each in kept}
            gone = [each for each in before if each.snapshot_id not in ids]
            if gone:
                delete_unreachable(self._table.io, gone, kept)
        return len(gone)

    def _tries(self) -> Iterator[None]:
        for failures in range(_TRIES):
            if failures:
                time.sleep(_BACKOFF.wait(failures))
                self._refresh()
            yield
        raise SinkUnavailable(
            f"{self._link.uri}: {self.name}: other writers were first {_TRIES} times"
        )

    def _refresh(self) -> None:
        with self._link.reached(self.name):
            try:
                self._table.refresh()
            except NoSuchTableError:
                raise SinkUnavailable(f"{self._link.uri}: {self.name} is gone") from None
        self._loaded = time.monotonic()

    def _expect_writer(self, writer: str | None = None) -> None:
        if self.marks.writer != (self._writer if writer is None else writer):
            raise SinkFenced(f"another pipeline writes to {self.name}; nothing was committed")

    def _expect_marks(self, marks: HistoryMarks) -> None:
        self._expect_writer(marks.writer)
        if self.marks != marks:
            # A copy of this pipeline, with the same checkpoint; the batch comes again.
            raise SinkUnavailable(f"{self.name}: another has just written a part of the batch")

    def _expect_seen(self, files: Iterable[WrittenFile]) -> None:
        """Refuse files that executors wrote to disks of their own: the catalog chose the place."""
        for path in [each.path for each in files if is_local(each.path)]:
            if not self._table.io.new_input(path).exists():
                raise SinkRefused(
                    f"{self.name}: a task wrote {path}, and the driver does not see this file",
                    hint="Have the catalog keep the tables in an object storage, or at a path "
                    "where all machines have the same disk.",
                )

    def _expect_spec(self, files: Sequence[WrittenFile]) -> None:
        # A manifest has files of one spec; the batch comes again, and is written with the new one.
        if any(file.spec != self._table.metadata.default_spec_id for file in files):
            raise SinkUnavailable(f"{self.name}: another writer has just partitioned it otherwise")

    def _expect_whole(self) -> None:
        """Refuse a table that was rolled back: it says that it has changes which it has not."""
        marks, noted = self.marks, self._last_summary()
        if noted is None:
            return
        ends = Progress(noted.get(EPOCH, ""), int(noted.get(SEQUENCE, "0")))
        had = Progress(marks.epoch, marks.applied.get(marks.epoch, 0))
        if ends != had:
            log = "" if ends.epoch == had.epoch else " of another log"
            raise TableFailed(
                f"{self.name} was rolled back to a snapshot that ends at sequence {ends.sequence}"
                f"{log}, but had everything up to {had.sequence}"
            )

    def _last_summary(self) -> Mapping[str, str] | None:
        """What the newest snapshot of ours says; None: it was expired."""
        snapshot: Snapshot | None = self._table.current_snapshot()
        while snapshot is not None:
            summary = snapshot.summary.additional_properties if snapshot.summary else {}
            if WRITER in summary:
                return summary
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        return None


class _Conflict(Exception):
    """Another writer has committed in between."""
