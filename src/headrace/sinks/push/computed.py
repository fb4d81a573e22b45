"""Has Spark compute what the events of a range of the log show (`transforms.computed`)."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls them

from ...change.event import Table
from ...errors import SinkUnavailable, TableFailed
from ...transforms.computed import ComputedTable
from ...transforms.computing import halting
from .. import LogBatch
from ..lake.plan import TableRef
from ..lake.storage import Folder
from ..results import results
from ..tables.scan import scan_log
from .computing import FIELDS, SPAN, ComputedChanges, ComputedFile, StageComputed, sweep

if TYPE_CHECKING:
    from .events import EventRendering


def computed_changes(batch: LogBatch, rendering: EventRendering, folder: Folder) -> ComputedChanges:
    """Compute each table of a batch with its newest columns there; TableFailed: one cannot be.

    What is written to `folder` is the caller's to remove, and is removed if this fails.
    """
    found = ComputedChanges(folder, {}, {})
    try:
        for versions, source in _sources(batch, rendering):
            computed = ComputedTable.of(rendering.transforms, source, as_source=True)
            assert computed  # since the table is among those
            shown = computed.result_table(batch.spark)
            files = dict(found.files)
            for each in _staged(computed, batch, source, folder):
                files[each.span] = (*files.get(each.span, ()), each.path)
            tables = {**found.tables, **dict.fromkeys(versions, shown)}
            found = ComputedChanges(folder, tables, files)
    except BaseException as error:
        with suppress(SinkUnavailable):  # whoever opens the sink next does it too
            sweep(folder)
        if isinstance(error, TableFailed):
            raise halting(error) from None
        raise
    return found


def _sources(batch: LogBatch, rendering: EventRendering) -> list[tuple[list[int], Table]]:
    """The tables that a batch has changes of and that are computed: versions, and the newest."""
    if (whole := batch.whole) is None:
        return []
    by_table: dict[TableRef, list[int]] = defaultdict(list)
    for version, seen in scan_log(whole, rendering.computes).items():
        by_table[seen.ref].append(version)
    tables = whole.tables()
    return [(versions, tables[max(versions)]) for versions in by_table.values()]


def _staged(
    computed: ComputedTable, batch: LogBatch, source: Table, folder: Folder
) -> list[ComputedFile]:
    try:
        changes = computed.changes(batch.changes_of(source)).select(*FIELDS)
        # A span is whole in one task, so that it is one file.
        parts = batch.spark.sparkContext.defaultParallelism
        spans = changes.repartition(parts, F.expr(f"sequence div {SPAN}"))
        return results(spans.sortWithinPartitions("sequence"), StageComputed(folder), ComputedFile)
    except PySparkException as error:
        raise computed.failure(error) from None
