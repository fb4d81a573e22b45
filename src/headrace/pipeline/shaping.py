"""A batch for a sink that takes rows: its changes as the sink's transforms let it see them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls them

from ..errors import TableFailed
from ..sinks import Sink
from ..transforms.computed import ComputedTable, ComputedTables, is_of
from ..transforms.computing import halting
from ..transforms.frames import ShapedFrames

_PART = 10_000  # sequences of which one task has what was computed, if there are tasks enough


@contextmanager
def shaped_rows(changes: DataFrame, sink: Sink) -> Iterator[DataFrame]:
    """Changes as the transforms of a sink let it see them, for as long as it writes them.

    An error of Spark's is raised as that of the table whose transform fails.
    """
    if not sink.shaping.computes:
        yield _shaped(changes, sink) if sink.shaping else changes
        return
    # They are read several times, and each time Spark would read the log and count them as input.
    changes.persist()
    try:
        tables = ComputedTables.among(changes, sink.shaping, as_source=sink.renders)
        computed = _computed(changes, tables)
        try:
            yield _with_computed(changes, sink, tables, computed)
        except PySparkException as error:
            raise _failure(computed, error) from None
    finally:
        changes.unpersist()


def _computed(changes: DataFrame, tables: ComputedTables) -> dict[ComputedTable, DataFrame]:
    try:
        return {each: each.changes(changes.where(is_of(each.table))) for each in tables.tables}
    except TableFailed as error:
        raise halting(error) from None


def _with_computed(
    changes: DataFrame,
    sink: Sink,
    tables: ComputedTables,
    computed: Mapping[ComputedTable, DataFrame],
) -> DataFrame:
    """All changes of a batch, in order: those that are computed as they came out."""
    rest = changes
    for each in computed:
        rest = rest.where(~is_of(each.table))
    result = _shaped(rest, sink)
    for own in computed.values():
        result = result.unionByName(own.select(*result.columns))
    return _in_order(result, tables.first, tables.last) if computed else result


def _failure(
    computed: Mapping[ComputedTable, DataFrame], error: PySparkException
) -> PySparkException | TableFailed:
    """What an error is about: the table whose rows cannot be computed by themselves either."""
    for each, changes in computed.items():
        try:
            changes.write.format("noop").mode("overwrite").save()
        except PySparkException as own:
            return halting(each.failure(own))
    return error


def _in_order(changes: DataFrame, first: int, last: int) -> DataFrame:
    """Changes as the source gives them: neighbours in one task, in the order of the log."""
    cores = changes.sparkSession.sparkContext.defaultParallelism
    parts = max(1, min(cores, (last - first + 1) // _PART))
    part = F.expr(f"(sequence - {first}) * {parts} div {last - first + 1}")
    within = F.least(F.greatest(part, F.lit(0)), F.lit(parts - 1)).cast("int")
    return changes.repartitionById(parts, within).sortWithinPartitions("sequence")


def _shaped(changes: DataFrame, sink: Sink) -> DataFrame:
    fields = sink.fields or tuple(changes.columns)
    task: Any = ShapedFrames(sink.shaping, fields)
    return changes.mapInArrow(task, changes.select(*fields).schema)
