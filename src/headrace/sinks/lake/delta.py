"""A Delta table as a sink writes it: one commit a batch, by one writer.

delta-rs keeps the log; the files are written by Spark's tasks. A commit carries two marks: the
query's batch, and up to which sequence of the log the table has everything.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.schema import Schema
from deltalake.transaction import AddAction, CommitProperties, RemoveAction, Transaction

from ...errors import LogReplaced, SinkFenced, TableFailed
from .plan import DataFile
from .storage import Added, Folder

WRITER = "headrace.writer"
SOURCE = "headrace.source"
KEEP = "headrace.keep"
EPOCH = "headrace.epoch"

# How delta-rs reports a damaged log that it can reach: it has no kind of error for it.
_DAMAGE = ("Json error", "No table metadata or protocol")
_FIX_LOG = (
    "Bring _delta_log back from a copy, or remove the folder; then run "
    "`headrace snapshot SOURCE TABLE` for a full snapshot, and the table goes on."
)


class Delta:
    """A Delta table that is there, and belongs to this writer."""

    def __init__(self, folder: Folder, table: DeltaTable, writer: str) -> None:
        self.folder = folder
        self._table = table
        self._writer = writer
        self.parts: dict[str, DataFile] = _parts(table)

    @classmethod
    def open(cls, folder: Folder, writer: str, *, adopt: bool = False) -> "Delta | None":
        """The table in a folder; None: there is none."""
        try:
            table = DeltaTable(folder.uri, storage_options=dict(folder.options))
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            if _damaged(error):
                raise TableFailed(
                    f"the Delta log in {folder.uri} is damaged", hint=_FIX_LOG
                ) from error
            raise folder.failure("the Delta table cannot be read", error) from error
        owner = table.metadata().configuration.get(WRITER)
        if owner != writer:
            if not adopt:
                raise SinkFenced(f"another pipeline writes the Delta table {folder.uri}")
            table.alter.set_table_properties({WRITER: writer}, raise_if_not_exists=False)
        return cls(folder, table, writer)

    @classmethod
    def create(
        cls,
        folder: Folder,
        schema: pa.Schema,
        properties: dict[str, str],
        *,
        writer: str,
        partition_by: Sequence[str] = (),
    ) -> "Delta":
        """A new, empty table."""
        try:
            table = DeltaTable.create(
                folder.uri,
                schema=schema,
                partition_by=list(partition_by),
                storage_options=dict(folder.options),
                configuration={**properties, WRITER: writer},
                raise_if_key_not_exists=False,
            )
        except (DeltaError, OSError) as error:
            raise folder.failure("the Delta table cannot be created", error) from error
        except Exception as error:  # what delta-rs has no kind of error for
            raise TableFailed(
                f"Delta takes no table with the columns of {folder.uri}",
                hint="Columns whose names differ only in case are one to Delta: rename one, then "
                "run `headrace snapshot SOURCE TABLE`.",
            ) from error
        return cls(folder, table, writer)

    @property
    def properties(self) -> dict[str, str]:
        """What is noted beside the schema."""
        return dict(self._table.metadata().configuration)

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return pa.schema(self._table.schema().to_arrow())

    def applied(self, epoch: str) -> int:
        """The sequence of that log up to which the table has everything; 0: nothing of it."""
        try:
            return self._table.transaction_version(_sequence_mark(epoch)) or 0
        except (DeltaError, OSError) as error:
            raise self.folder.failure("the Delta table cannot be read", error) from error

    def note(self, properties: dict[str, str]) -> None:
        """Change what is noted beside the schema."""
        with self._committing():
            self._table.alter.set_table_properties(properties, raise_if_not_exists=False)

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Give the table columns that its files do not have: they read as null."""
        delta = Schema.from_arrow(pa.schema(list(fields)))
        with self._committing():
            self._table.alter.add_columns(delta.fields)

    def commit(
        self,
        added: Sequence[Added],
        removed: Sequence[str],
        *,
        schema: pa.Schema | None = None,
        marks: "Marks | None" = None,
        partition_by: Sequence[str] = (),
    ) -> None:
        """Take files in and out at once.

        A `schema` replaces the table's, and `added` all of its files. Without `marks` the table's
        rows stay as they are: the same rows are in other files.
        """
        actions: list[AddAction | RemoveAction] = [_add(file, marks) for file in added]
        if schema is None:
            now = time.time_ns() // 1_000_000
            actions += [
                RemoveAction(path, marks is not None, now, part.size, dict(part.partition))
                for path, part in ((path, self.parts[path]) for path in removed)
            ]
        transactions = marks.transactions(self._writer) if marks else []
        self._written(actions, schema, transactions, partition_by)
        gone = list(self.parts) if schema is not None else removed
        for path in gone:
            del self.parts[path]
        self.parts |= {
            file.path: DataFile.of(file.path, file.size, file.rows, file.partition)
            for file in added
        }

    def continue_in(
        self, before: str, epoch: str, upto: int, partition_by: Sequence[str] = ()
    ) -> None:
        """Count what the table has of the log `before` as of `epoch`, its restored copy."""
        if self.properties.get(EPOCH) != before:
            return
        applied = self.applied(before)
        if applied > upto:
            raise LogReplaced(
                f"the Delta table {self.folder.uri} has changes up to {applied}, but the log was "
                f"restored from a copy that ends at {upto}"
            )
        marks = Marks(batch_id=None, epoch=epoch, sequence=applied)
        self.commit([], [], marks=marks, partition_by=partition_by)
        self.note({EPOCH: epoch})

    def empty(self, epoch: str, partition_by: Sequence[str] = ()) -> None:
        """Take all files out, and forget how far the table had come in that log."""
        marks = Marks(batch_id=None, epoch=epoch, sequence=0)
        self.commit([], [], schema=self.schema, marks=marks, partition_by=partition_by)

    def _written(
        self,
        actions: list[AddAction | RemoveAction],
        schema: pa.Schema | None,
        transactions: list[Transaction],
        partition_by: Sequence[str],
    ) -> None:
        with self._committing():
            self._table.create_write_transaction(
                actions,
                "append" if schema is None else "overwrite",
                self._table.schema() if schema is None else Schema.from_arrow(schema),
                list(partition_by) or None,
                commit_properties=CommitProperties(app_transactions=transactions),
            )
            self._table.update_incremental()
        # Somebody may have taken over just before, and this commit have gone in all the same.
        if self.properties.get(WRITER) != self._writer:
            raise SinkFenced(f"another pipeline has taken over the Delta table {self.folder.uri}")

    @contextmanager
    def _committing(self) -> Iterator[None]:
        """Say what it means that a commit fails."""
        try:
            yield
        except CommitFailedError as error:
            raise SinkFenced(
                f"another pipeline has just written the Delta table {self.folder.uri}; "
                "this batch was not committed"
            ) from error
        except (DeltaError, OSError) as error:
            raise self.folder.failure("the Delta table did not take a commit", error) from error

    def vacuum(self, hours: float) -> int:
        """Delete files that no version younger than so many hours refers to; returns how many."""
        try:
            deleted = self._table.vacuum(
                retention_hours=math.ceil(hours),
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
            )
            self._table.update_incremental()
            self.folder.delete_unfinished(hours)
        except (DeltaError, OSError) as error:
            raise self.folder.failure("old files cannot be deleted", error) from error
        return len(deleted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What a commit says of the batch it holds."""

    batch_id: int | None  # None: it is no batch's
    epoch: str
    sequence: int

    def upto(self, sequence: int) -> "Marks":
        """The marks of a part of the batch; 0: of all of it."""
        return replace(self, sequence=sequence or self.sequence)

    def transactions(self, writer: str) -> list[Transaction]:
        """The marks as Delta keeps them."""
        now = time.time_ns() // 1_000_000
        reached = Transaction(_sequence_mark(self.epoch), self.sequence, now)
        if self.batch_id is None:
            return [reached]
        return [Transaction(writer, self.batch_id, now), reached]


def _damaged(error: DeltaError | OSError) -> bool:
    """Whether the log can be reached but says nothing that makes sense, and never will."""
    return any(sign in str(error) for sign in _DAMAGE)


def _sequence_mark(epoch: str) -> str:
    return f"headrace.sequence:{epoch}"


def _add(file: Added, marks: Marks | None) -> AddAction:
    return AddAction(
        file.path,
        file.size,
        file.partition,
        file.written_at,
        marks is not None,
        file.statistics,
    )


def _parts(table: DeltaTable) -> dict[str, DataFile]:
    actions = pa.table(table.get_add_actions())
    # The log has paths as they stand in an address.
    paths = [unquote(path) for path in actions["path"].to_pylist()]
    sizes, rows = actions["size_bytes"].to_pylist(), actions["num_records"].to_pylist()
    given = zip(paths, sizes, rows, _partitions(actions), strict=True)
    return {path: DataFile.of(path, size, count or 0, of) for path, size, count, of in given}


def _partitions(actions: pa.Table) -> list[dict[str, str | None]]:
    """The values that the rows of each file share."""
    if "partition" not in actions.column_names:
        return [{}] * actions.num_rows
    return [
        {name: None if value is None else str(value) for name, value in values.items()}
        for values in actions["partition"].to_pylist()
    ]
