"""Transforms that Spark computes, beside a pipeline: for `check`, `preview` and `verify`."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls them

from ..change.event import Column, Table
from ..errors import HeadraceError
from ..plugins import Finding
from ..sinks import LogRange, Sink
from ..sinks.lake.storage import Folder
from ..sinks.push.computed import computed_changes
from ..sinks.push.computing import ComputedChanges
from ..sinks.push.events import EventRendering
from ..transforms.computed import ComputedTable, is_of
from ..transforms.computing import ROW_OPS
from .query import RangesBatch
from .session import hide_task_errors, opened_session

Session = Callable[[], AbstractContextManager[SparkSession]]


@contextmanager
def own_session() -> Iterator[SparkSession]:
    """Spark for a moment, on this machine."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-") as folder,
        opened_session(
            "local[1]", {"spark.ui.enabled": "false"}, journal=Path(folder, "log")
        ) as it,
    ):
        hide_task_errors(it)
        yield it


def computed_table(sink: Sink, table: Table) -> ComputedTable | None:
    """A table that Spark computes for a sink; None: it has no such transform."""
    name = table.path
    keyed = msgspec.structs.replace(table, columns=sink.keyed(name, table.columns))
    return ComputedTable.of(sink.shaping, keyed, as_text=sink.text_columns(name), unfit=sink.unfit)


def check_computed(
    sinks: Sequence[Sink], tables: Sequence[Table], session: Session = own_session
) -> list[Finding]:
    """What Spark makes of the columns of each table that it is to compute."""
    wanted = [
        (sink, computed)
        for sink in sinks
        for table in tables
        if not sink.tables or any(map(table.matches, sink.tables))
        if (computed := computed_table(sink, table))
    ]
    if not wanted:
        return []
    with session() as spark:
        return [_checked(spark, sink, computed) for sink, computed in wanted]


def _checked(spark: SparkSession, sink: Sink, computed: ComputedTable) -> Finding:
    table = computed.table
    name = f"{sink.name}: {table.path}"
    try:
        columns = computed.result_table(spark).columns
    except HeadraceError as error:
        return Finding(name, ok=False, detail=str(error), fix=error.hint)
    return Finding(name, ok=True, detail=_shown(columns))


def _shown(columns: Sequence[Column]) -> str:
    return ", ".join(f"{column.name} {column.type}" for column in columns)


def newest(
    computed: ComputedTable, changes: DataFrame, limit: int
) -> list[tuple[str, int, str | None]]:
    """The newest of some changes as the sink gets them: operation, sequence, image."""
    try:
        shown = computed.changes(changes.where(is_of(computed.table)))
        rows = shown.where(F.col("op").isin(*ROW_OPS)).orderBy(F.col("sequence").desc())
        found = rows.select("op", "sequence", F.coalesce("after", "key").alias("image"))
        return [tuple(row) for row in reversed(found.limit(limit).collect())]
    except PySparkException as error:
        raise computed.failure(error) from None


@contextmanager
def computed_range(
    rendering: EventRendering, wanted: LogRange, address: Mapping[str, str], session: Session
) -> Iterator[ComputedChanges]:
    """What events of a range show, until the context ends; `address` says where the log is."""
    with session() as spark, tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        batch = RangesBatch(spark.range(0), wanted.log, wanted, address=address)
        yield computed_changes(batch, rendering, Folder.of(folder, {}))
