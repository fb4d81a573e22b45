"""An Iceberg history while a query writes it."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ...change.arrow import columns_of, frame
from ...errors import LogReplaced, PipelineError, TableFailed
from .. import FailedTable, Progress, SinkWriter
from ..lake.append import epoch_of
from ..results import results
from .append import AppendHistory, HistoryWritten, Misfit, TableWritten, VersionMet
from .columns import TableVersion, names_in_text
from .table import IcebergTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from .sink import IcebergHistory

T = TypeVar("T")

logger = logging.getLogger(__name__)

_AT_ONCE = 8  # requests to the catalog
_MOST_ROUNDS = 20  # a round makes tables follow their columns, or sets a table aside
_EXPIRE_SECONDS = 3600.0
_BEGIN_ANEW = (
    "Rename or drop {name} in the catalog: a new table begins with the next change, and "
    "`headrace snapshot SOURCE TABLE` brings all rows."
)
_ADOPT = (
    "Run `headrace pipeline --adopt {sink}`: a new table begins with the next change, and "
    "`headrace snapshot SOURCE TABLE` brings all rows."
)


class IcebergHistoryWriter(SinkWriter["DataFrame"]):
    """The tables of a sink while a query writes them."""

    def __init__(self, sink: IcebergHistory, writer: str, *, adopt: bool) -> None:
        self._sink = sink
        self._writer = writer
        self._adopt = adopt
        self._catalog = sink.link.connect()
        sink.make_namespace(self._catalog)
        self._ledger = sink.ledger(self._catalog)
        if adopt:
            self._ledger.take_over(writer)
        else:
            self._ledger.expect_writer(writer)
        self._tables: dict[str, IcebergTable] = {}  # by schema.table
        self._places_expected = False
        self._expiry_due = time.monotonic()
        self._open_tables()
        entry = self._ledger.entry
        # Whether the settings name each table otherwise now shows with its next change.
        failed = {name: each for name, each in entry.failed.items() if name in entry.tables}
        self._ledger.entry = replace(entry, writer=writer, failed=failed)
        if adopt and not self._ledger.absent:
            self._ledger.save()

    def _open_tables(self) -> None:
        names = list(self._ledger.entry.tables)
        found = self._each(names, self._opened)
        for table in names:
            try:
                if (opened := found[table]()) is not None:
                    self._tables[table] = opened
                elif self._adopt:
                    logger.warning("an Iceberg table is gone and begins anew table=%s", table)
                    self._ledger.entry = self._ledger.entry.without_table(table)
                elif table not in {*self._ledger.entry.failed, *self._ledger.entry.new}:
                    self._lose(table)
            except TableFailed as error:
                self._give_up(table, self._ledger.entry.sequence + 1, error)

    def _opened(self, table: str) -> IcebergTable | None:
        name = (*self._sink.levels, self._ledger.entry.tables[table])
        opened = IcebergTable.open(self._sink.link, self._catalog, name, table, self._writer)
        if opened is not None:
            if self._adopt:
                opened.take_over()
            opened.complete()
            opened.partition(self._sink.partitions())
        return opened

    def progress(self) -> Progress | None:
        """Up to where all tables have everything."""
        return self._ledger.entry.progress()

    def failed_tables(self) -> list[FailedTable]:
        """The tables that are not followed any more."""
        return list(self._ledger.entry.failed.values())

    def continue_in(self, epoch: str, upto: int) -> None:
        """Mark every table; the ledger last, because it says which log they are of."""
        before = self._ledger.entry
        # A table is ahead of the ledger after a crash between their commits.
        has = {
            table: each.marks.applied.get(before.epoch, 0) for table, each in self._tables.items()
        }
        if max(before.sequence, *has.values(), 0) > upto:
            raise LogReplaced(f"the tables in {self._sink.namespace} have changes beyond {upto}")

        def mark(table: str) -> None:
            self._tables[table].mark(Progress(epoch, has[table], self.generation))

        for done in self._each(self._tables, mark).values():
            done()
        self._ledger.entry = replace(before, epoch=epoch, generation=self.generation)
        self._ledger.save()

    def go_back(self, upto: int) -> None:
        """Mark every table, and the ledger last; what they have beyond stays."""
        epoch = self._ledger.entry.epoch

        def mark(table: str) -> None:
            has = self._tables[table].marks.applied.get(epoch, 0)
            self._tables[table].mark(Progress(epoch, min(has, upto), self.generation))

        for done in self._each(self._tables, mark).values():
            done()
        entry = self._ledger.entry
        sequence = min(entry.sequence, upto)
        self._ledger.entry = replace(entry, sequence=sequence, generation=self.generation)
        self._ledger.save()

    def _expect_places(self) -> None:
        """Refuse tables that a crash left ahead of the ledger, with changes of a lost tail."""
        if not self._ledger.entry.generation or self._places_expected:
            return
        for table, each in self._tables.items():
            self.expect_place(each.marks.place, table, self._sink.ahead_hint(0))
        self._places_expected = True

    # --- batches ---------------------------------------------------------------------------------

    def write(self, batch: DataFrame, batch_id: int) -> int:
        """Add those changes that the tables do not have."""
        self._ledger.expect_writer(self._writer)
        if self._ledger.absent and batch_id > 0:
            raise PipelineError(
                f"the history in {self._sink.namespace} is gone, and {batch_id} batches with it",
                hint="Bring it back from a copy, or run `headrace pipeline --adopt "
                f"{self._sink.name}` to begin a new one with all that is still in the log.",
            )
        self._expect_places()
        changes = batch.select(*frame.FIELDS)
        self._go_on_with_dropped()
        met = results(changes, self._task(), HistoryWritten)
        epoch = epoch_of(
            met,
            self._ledger.entry.epoch,
            adopt=self._adopt,
            place=self._sink.namespace,
        )
        written = self._followed(changes, _by_table(met))
        self._commit(written, epoch, batch_id)
        last = max((each.last for each in met), default=0)
        self._ledger.entry = self._ledger.entry.reached(Progress(epoch, last, self.generation))
        self._ledger.save()
        return sum(each.changes for each in met)

    def _task(self, only: Iterable[str] | None = None) -> AppendHistory:
        failed = self._ledger.entry.failed
        plans = {
            table: found.plan(failed[table].sequence if table in failed else None)
            for table, found in self._tables.items()
            # The files of the others were written with their last plan.
            if only is None or table in only
        }
        sink = self._sink
        return AppendHistory(
            {**dict.fromkeys(failed), **plans},
            sink.tenant,
            sink.as_text,
            None if only is None else frozenset(only),
        )

    def _followed(
        self, changes: DataFrame, written: dict[str, TableWritten]
    ) -> dict[str, TableWritten]:
        """What was written, after all tables have the columns that the batch brings."""
        for _ in range(_MOST_ROUNDS):
            again = {table: each for table, each in written.items() if each.unknown or each.misfit}
            if not again:
                return written
            self._make(
                {
                    table: min(each.unknown)
                    for table, each in again.items()
                    if each.unknown and table not in self._tables
                }
            )
            for table, each in again.items():
                if each.files:
                    self._tables[table].discard(each.files)
                self._follow(table, each)
                del written[table]
            redone = results(changes, self._task(again), HistoryWritten)
            written |= _by_table(redone)
        raise PipelineError(f"the batch reads differently each time: {next(iter(again))}")

    def _follow(self, table: str, written: TableWritten) -> None:
        """Give a table the columns that it lacks, or set it aside from where it cannot follow."""
        followed = table in self._tables
        for version in sorted(written.unknown) if followed else ():
            try:
                self._tables[table].follow(self._version(table, version))
            except TableFailed as error:
                self._give_up(table, version.sequence, error)
                break
        if written.misfit is not None:
            self._set_aside(table, written.misfit)

    def _version(self, table: str, met: VersionMet) -> TableVersion:
        columns = columns_of(met.row_schema) if met.row_schema else ()
        return TableVersion(columns, met.connector, names_in_text(table, self._sink.as_text))

    def _make(self, new: Mapping[str, VersionMet]) -> None:
        """Make the Iceberg tables of new tables, or set those aside that can have none."""
        for table, first in new.items():
            try:
                self._note_name(table, first.source)
            except TableFailed as error:
                self._give_up(table, first.sequence, error)
        # All at once, and before any is made: what is made is then always known.
        self._ledger.save()
        named = [table for table in new if table not in self._ledger.entry.failed]
        for table, made in self._each(named, self._made).items():
            try:
                self._tables[table] = made()
            except TableFailed as error:
                self._give_up(table, new[table].sequence, error)

    def _note_name(self, table: str, source: str) -> None:
        entry, name = self._ledger.entry, self._sink.identifier(source, table)
        for other, taken in entry.tables.items():
            if taken == name[-1] and other != table:
                raise TableFailed(
                    f"{'.'.join(name)} is the history of {other} already",
                    hint="Set `table` of the sink so that each table has a name of its own.",
                )
        self._ledger.entry = entry.with_table(table, name[-1])

    def _made(self, table: str) -> IcebergTable:
        made = self._opened(table)
        if made is None:
            name = (*self._sink.levels, self._ledger.entry.tables[table])
            IcebergTable.create(self._sink.link, self._catalog, name, table, self._writer)
            made = self._opened(table)
        assert made is not None
        return made

    def _commit(self, written: Mapping[str, TableWritten], epoch: str, batch_id: int) -> None:
        def commit(table: str) -> None:
            found, each = self._tables[table], written[table]
            found.append(each.files, Progress(epoch, each.last, self.generation), batch_id)

        with_files = [table for table, each in written.items() if each.files]
        for table, done in self._each(with_files, commit).items():
            try:
                done()
            except TableFailed as error:
                self._give_up(table, self._ledger.entry.sequence + 1, error)

    def _each(self, tables: Iterable[str], work: Callable[[str], T]) -> dict[str, Callable[[], T]]:
        """Do something with tables side by side; a call gives what was returned or raises."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return {table: threads.submit(work, table).result for table in tables}

    # --- tables that cannot follow ---------------------------------------------------------------

    def _set_aside(self, table: str, misfit: Misfit) -> None:
        self._give_up(table, misfit.sequence, TableFailed(misfit.reason, hint=misfit.hint))

    def _give_up(self, table: str, sequence: int, error: TableFailed) -> None:
        logger.error("a table is not followed any more table=%s reason=%s", table, error)
        failed = self._ledger.entry.failed.get(table)
        if failed is None or sequence < failed.sequence:
            hints = [] if error.hint == TableFailed.hint else [error.hint]
            if name := self._ledger.entry.tables.get(table):  # else it has none to be dropped
                hints.append(_BEGIN_ANEW.format(name=f"{self._sink.namespace}.{name}"))
            failure = FailedTable(table, sequence, str(error), " ".join(hints))
            self._ledger.entry = self._ledger.entry.with_failure(failure)

    def _lose(self, table: str) -> None:
        """Set a table aside whose history somebody has dropped: nobody asked for a new one."""
        entry, name = (
            self._ledger.entry,
            f"{self._sink.namespace}.{self._ledger.entry.tables[table]}",
        )
        reason = f"{name} is gone from the catalog, and the history of {table} with it"
        logger.error("a table is not followed any more table=%s reason=%s", table, reason)
        hint = _ADOPT.format(sink=self._sink.name)
        failure = FailedTable(table, entry.sequence + 1, reason, hint)
        self._ledger.entry = entry.with_failure(failure).with_lost(table)

    def _go_on_with_dropped(self) -> None:
        """Follow those again whose Iceberg table was dropped or renamed after it had failed."""
        entry = self._ledger.entry
        names = entry.tables
        for table in [each for each in entry.failed if each in names and each not in entry.lost]:
            with self._sink.link.reached(table):
                there = self._catalog.table_exists((*self._sink.levels, names[table]))
            if not there:
                logger.info("a new Iceberg table begins table=%s", table)
                self._tables.pop(table, None)
                self._ledger.entry = self._ledger.entry.without_table(table)

    # --- maintenance -----------------------------------------------------------------------------

    def maintain(self) -> None:
        """Now and then expire snapshots."""
        if time.monotonic() < self._expiry_due:
            return
        keep = self._sink.keep_snapshots
        self._expiry_due = time.monotonic() + min(_EXPIRE_SECONDS, keep.total_seconds())
        for table, found in self._tables.items():
            try:
                expired = found.expire(keep)
            except PipelineError as error:  # such as another writer's commit at the same time
                logger.warning("snapshots are not expired table=%s reason=%s", table, error)
                continue
            if expired:
                logger.info("snapshots are expired table=%s snapshots=%d", table, expired)


def _by_table(met: Iterable[HistoryWritten]) -> dict[str, TableWritten]:
    """What all tasks have written, table by table."""
    found: dict[str, TableWritten] = defaultdict(TableWritten)
    for each in met:
        for table, part in each.tables.items():
            whole = found[table]
            misfits = [one for one in (whole.misfit, part.misfit) if one is not None]
            found[table] = TableWritten(
                max(whole.last, part.last),
                whole.files + part.files,
                whole.unknown + part.unknown,
                min(misfits, default=None),
            )
    return dict(found)
