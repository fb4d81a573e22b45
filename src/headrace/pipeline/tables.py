"""`format("headrace.tables")`: Delta tables that a query of Spark writes, or that it reads.

    df.writeStream.format("headrace.tables")    changes of format("headrace"), applied exactly once
    df.write.format("headrace.tables")          the same for a batch
    spark.read.format("headrace.tables")        the rows of a table

A data source written in Python cannot ask Spark to send rows to the task of their key, so tasks
store what they get, and the commit applies it in one process beside the driver. `apply_changes`
applies in all tasks instead.
"""

import logging
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from ..change.arrow.frame import expect
from ..errors import ConfigError, HeadraceError
from ..sinks.lake.modes import make_folder
from ..sinks.tables.sink import Tables, TablesWriter
from ..sinks.tables.staged import ChangeStage, StagedInput, StagedPart
from .source import PUSHDOWN
from .table_options import TableOptions
from .table_reader import FilteredTableReader, TableReader, catalog_options, table_schema

if TYPE_CHECKING:
    from pyarrow import RecordBatch

logger = logging.getLogger(__name__)

_VACUUM_BATCHES = 100  # to list all files of a table takes longer than most batches


class TablesSource(DataSource):
    """The Delta tables of a folder."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        with _hinting():
            self._options = TableOptions.read(options)

    @classmethod
    def name(cls) -> str:
        """What `format` calls it."""
        return "headrace.tables"

    def schema(self) -> StructType:
        """The columns of the table that is read."""
        with _hinting():
            return table_schema(self._options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        # Where Spark does not push filters, a reader that could take them is an error.
        kind = FilteredTableReader if PUSHDOWN in sys.modules else TableReader
        with _hinting():
            return kind(catalog_options(self._options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write."""
        with _hinting():
            return TablesBatchWriter(self._options, self._sink(schema, overwrite=overwrite))

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,
    ) -> DataSourceStreamWriter:
        """A streaming write."""
        with _hinting():
            return TablesStreamWriter(self._options, self._sink(schema, overwrite=overwrite))

    def _sink(self, schema: StructType, *, overwrite: bool) -> Tables:
        if overwrite:
            raise ConfigError(
                "tables are not overwritten, changes are applied to them",
                hint='Write with mode("append"), and a stream with outputMode("append").',
            )
        sink = self._options.sink
        expect(schema.names, sink.fields)
        return sink


class StagedChanges(WriterCommitMessage):
    """What a task tells the commit."""

    def __init__(self, staged: StagedPart) -> None:
        self.staged = staged


Messages = Sequence[WriterCommitMessage | None]


class TablesStreamWriter(DataSourceStreamArrowWriter):
    """Applies each batch of a query once."""

    def __init__(self, options: TableOptions, sink: Tables) -> None:
        self._options = options
        self._sink = sink
        self._writer = options.stream_writer
        self._stage = ChangeStage(sink.folder, self._writer)

    def write(self, iterator: Iterator["RecordBatch"]) -> WriterCommitMessage:
        """Store what a task gets."""
        return _stored(self._sink, self._stage, iterator, self._options.table)

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        """Apply what the tasks have stored; a batch that comes again changes nothing."""
        # Only the first batch of a checkpoint takes over: later ones must notice if another did.
        adopt = self._options.adopt and batchId == 0
        with _hinting():
            writer = TablesWriter(self._sink, self._writer, adopt=adopt)
            _apply(writer, self._sink, messages, batchId)
            writer.maintain(vacuum=batchId % _VACUUM_BATCHES == _VACUUM_BATCHES - 1)
            writer.finish()
            self._stage.clear()

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        """Forget a batch that failed."""
        self._stage.clear()


class TablesBatchWriter(DataSourceArrowWriter):
    """Applies the changes of a DataFrame, except those that the tables have already."""

    def __init__(self, options: TableOptions, sink: Tables) -> None:
        self._options = options
        self._sink = sink
        self._stage = ChangeStage(sink.folder, f"job-{uuid4()}")

    def write(self, iterator: Iterator["RecordBatch"]) -> WriterCommitMessage:
        """Store what a task gets."""
        return _stored(self._sink, self._stage, iterator, self._options.table)

    def commit(self, messages: Messages) -> None:
        """Apply what the tasks have stored."""
        with _hinting():
            writer = TablesWriter(self._sink, self._options.batch_writer, adopt=self._options.adopt)
            _apply(writer, self._sink, messages, 0)
            writer.maintain(vacuum=True)
            writer.finish()
            self._stage.clear()

    def abort(self, messages: Messages) -> None:
        """Forget a job that failed."""
        self._stage.clear()


def _stored(
    sink: Tables, stage: ChangeStage, batches: Iterator["RecordBatch"], table: str
) -> WriterCommitMessage:
    if not os.path.exists(sink.path):  # Spark may have made it, for a checkpoint within
        make_folder(sink.path, sink.mode)
    needed = (batch.select(list(sink.fields)) for batch in batches)
    return StagedChanges(stage.store(needed, table))


def _apply(writer: TablesWriter, sink: Tables, messages: Messages, batch_id: int) -> None:
    staged = [each.staged for each in messages if isinstance(each, StagedChanges)]
    writer.write(StagedInput(sink.folder, staged), batch_id)
    for failed in writer.failed_tables():
        logger.warning("table=%s failed=%s hint=%s", failed.table, failed.reason, failed.hint)


@contextmanager
def _hinting() -> Iterator[None]:
    """Let errors say what to do, also in the text that Spark makes of them."""
    try:
        yield
    except HeadraceError as error:
        if error.hint:
            error.add_note(error.hint)
        raise
