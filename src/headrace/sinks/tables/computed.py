"""A batch some of whose tables are computed by Spark (`transforms.computed`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from pyspark.errors import PySparkException

from ...change.event import Table
from ...errors import TableFailed
from ...transforms.computed import ComputedTable
from .. import LogBatch, LogRange
from ..lake.plan import (
    ShareResult,
    TableFailure,
    TablePlan,
    TableRef,
    VersionSummary,
    failure_of,
)
from .input import LogInput, RowsInput
from .scan import Summaries

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from .sink import Tables

Follows = Callable[[TableRef, Sequence[VersionSummary]], bool]


class _Computed(NamedTuple):
    """What a batch has of one table."""

    table: ComputedTable
    source: Table
    first: int  # sequence


class ComputedInput:
    """A range of the log: tasks read it themselves, but for tables that Spark computes."""

    def __init__(
        self,
        batch: LogBatch,
        sink: Tables,
        wanted: Callable[[Table], bool],
        follows: Follows,
    ) -> None:
        """`follows` says of a table whether it is followed, by what the batch has of it."""
        self._batch = batch
        self._sink = sink
        self._follows = follows
        self._log = LogInput(batch, wanted)
        self._computed: dict[int, _Computed] = {}  # by version
        self.failures: dict[TableRef, TableFailure] = {}

    @property
    def spark(self) -> SparkSession:
        """Where its tasks run."""
        return self._batch.spark

    @property
    def epochs(self) -> set[str]:
        """The logs that it comes from."""
        return self._log.epochs

    @property
    def whole(self) -> LogRange | None:
        """The range."""
        return self._log.whole

    def scan(self) -> Summaries:
        """What the log has, with the columns of what is computed; what fails is left out."""
        seen = self._log.scan()
        by_table: dict[TableRef, list[VersionSummary]] = defaultdict(list)
        for each in list(seen.values()):
            if self._sink.shaping.computed(each.ref.schema, each.ref.table):
                by_table[each.ref].append(seen.pop(each.version))
        for ref, versions in by_table.items():
            if self._follows(ref, versions):
                try:
                    computed = self._planned(versions)
                except TableFailed as error:
                    first = min(each.first_sequence for each in versions)
                    self.failures[ref] = failure_of(error, first)
                else:
                    seen[computed.version] = computed
        return seen

    def _planned(self, versions: Sequence[VersionSummary]) -> VersionSummary:
        """Plan what Spark computes, with all versions of the table's columns as the newest."""
        newest = max(versions, key=lambda each: each.version)
        ref, first = newest.ref, min(each.first_sequence for each in versions)
        sink, whole = self._sink, self._batch.whole
        assert whole  # since it has a change
        source = whole.tables()[newest.version]
        columns = sink.keyed(str(ref), source.columns)
        keyed = msgspec.structs.replace(source, columns=columns)
        as_text = sink.text_columns(str(ref))
        computed = ComputedTable.of(
            sink.shaping, keyed, as_text=as_text, exact=True, unfit=sink.unfit
        )
        assert computed  # since the table is among those
        table = computed.result_table(self.spark)
        self._computed[newest.version] = _Computed(computed, source, first)
        return VersionSummary(
            ref=ref,
            connector=table.connector,
            version=newest.version,
            columns=table.columns,
            first_sequence=first,
            last_sequence=max(each.last_sequence for each in versions),
            changes=sum(each.changes for each in versions),
            inputs=source.columns,
            comment=table.comment,
            last_record=max(each.last_sequence for each in versions),
            emptied=sorted(at for each in versions for at in each.emptied),
            dropped=max(each.dropped for each in versions),
            cascades=newest.cascades,
            failure=min(
                (each.failure for each in versions if each.failure),
                key=lambda failure: failure.sequence,
                default=None,
            ),
        )

    def run(self, plans: Sequence[TablePlan]) -> dict[int, list[ShareResult]]:
        """A job for what tasks read, and one for all that is computed."""
        computed = {
            at: self._computed[version]
            for at, plan in enumerate(plans)
            for version in plan.versions
            if version in self._computed
        }
        others = [at for at in range(len(plans)) if at not in computed]
        found = self._log.run([plans[at] for at in others]) if others else {}
        done = {at: found[number] for number, at in enumerate(others)}
        if not computed:
            return done
        try:
            return done | self._run(plans, computed)
        except (PySparkException, TableFailed):
            # One of them fails for its rows, and perhaps for those alone.
            return done | {at: self._run_alone(at, plans, each) for at, each in computed.items()}

    def _run_alone(
        self, at: int, plans: Sequence[TablePlan], computed: _Computed
    ) -> list[ShareResult]:
        try:
            return self._run(plans, {at: computed})[at]
        except TableFailed as error:
            failed = error
        except PySparkException as error:
            failed = computed.table.failure(error)
        return [ShareResult(at=at, failure=failure_of(failed, computed.first))]

    def _run(
        self, plans: Sequence[TablePlan], computed: dict[int, _Computed]
    ) -> dict[int, list[ShareResult]]:
        several = [self._changes(each, plans[at]) for at, each in computed.items()]
        changes = reduce(lambda one, two: one.unionByName(two), several)
        found = RowsInput(changes).run([plans[at] for at in computed])
        return {at: found[number] for number, at in enumerate(computed)}

    def _changes(self, computed: _Computed, plan: TablePlan) -> DataFrame:
        """What the table does not have; what a TRUNCATE has taken away need not be computed."""
        changes = self._batch.changes_of(computed.source)
        fresh = changes.where(changes["sequence"] > plan.after)
        return computed.table.changes(fresh).select(*self._sink.fields)
