"""A table's share of a batch put into files, inside Spark's tasks.

    Fold ─▶ look-up of the old rows ─▶ new rows in a file of their own, old ones noted as dead

No file is changed: the driver commits what tasks return, and a task that fails leaves only files
that nobody knows of. A share that is larger than memory is applied window by window, each on top
of the one before.
"""

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ...change import record
from ...change.event import Column
from ...transforms.shape import shaped, verdicts
from .. import LogBlock, LogRange
from ..lake import vectors
from ..lake.conform import conformed
from ..lake.plan import (
    APPLY_ERRORS,
    SEQUENCE,
    PlannedFile,
    ShareResult,
    ShareResults,
    TablePlan,
    failure_of,
)
from ..lake.storage import Added
from .cascade_files import cascaded_records
from .fold import ROW_OPS, Fold, RowKey, SequencedRecord, Share
from .keys import Mask, bitmap, row_numbers
from .lookup import INDEXES, ON_DISK, KeyIndex
from .parquet import FILLED, LOOSE, PAST, is_in_order, joined, key_columns, read_rows, write_rows
from .rescue import NoRescuedColumn, rescued_values
from .window import KeySearch, Window

_MOST_BYTES = 64_000_000  # of the images of a window, and of the rows of a file that it makes
_MOST_APPENDED = 2 * _MOST_BYTES  # of the rows of a snapshot that make a file

_ENDING = (*APPLY_ERRORS, NoRescuedColumn)

Changes = LogBlock | list[SequencedRecord]


class TableShare:
    """One table in one share, from its first change to its result."""

    def __init__(self, at: int, plan: TablePlan, share: Share) -> None:
        self.at = at
        self.plan = plan
        self._share = share
        self._key = RowKey(plan.key, chosen=plan.chosen_key)
        self._files = list(plan.files)
        self._own: dict[str, Added] = {}  # files of earlier windows
        self._dead: dict[str, BitMap] = {}
        self._first = 0
        self._result = ShareResult(at=at)
        self._fold = self._new_fold()
        self._blocks: list[pa.Table] = []  # rows of a snapshot that are not written yet …
        self._block_rows = self._block_bytes = 0  # … and how much they are

    def _new_fold(self) -> Fold:
        plan = self.plan
        emptied = frozenset(plan.emptied) if plan.keep_history else frozenset[int]()
        return Fold(
            self._key,
            self._share,
            emptied=emptied,
            every_version=plan.keep_history,
            whole_rows=plan.whole_rows,
        )

    def extend(self, changes: Sequence[SequencedRecord]) -> None:
        """Take changes of the table, in order."""
        if changes and not self.plan.after < changes[0][0] <= changes[-1][0] <= self.plan.upto:
            changes = [each for each in changes if self.plan.after < each[0] <= self.plan.upto]
        if self._ended or not changes:
            return
        if not self._fold.versions:
            self._first = changes[0][0]
        try:
            self._fold.extend(self._visible(changes))
            keys = len(self._fold.versions) - self._fold.handed_on
            if keys >= self.plan.window_keys or self._fold.size >= _MOST_BYTES:
                self._apply()
        except _ENDING as error:
            self._end(error)

    @property
    def _ended(self) -> bool:
        """Whether it cannot go on: for good, or because it is done again."""
        return self._result.failure is not None or self._result.unfit

    def _end(self, error: Exception) -> None:
        if isinstance(error, NoRescuedColumn):
            self._result.unfit = True
        else:
            self._result.failure = failure_of(error, self._first)

    def _visible(self, changes: Sequence[SequencedRecord]) -> Sequence[SequencedRecord]:
        """Without changes of rows that `where` hides, where several rows may have one key."""
        shape = self.plan.shape
        if not self.plan.chosen_key or shape is None or not shape.rule.where:
            return changes
        after, before = (
            verdicts(
                shape,
                *self._images(changes, name),
                self.plan.connector,
                rescue=self.plan.rescue,
            )
            for name in (record.AFTER, record.BEFORE)
        )
        kept = []
        for (sequence, fields), now, was in zip(changes, after, before, strict=True):
            op, full = fields[record.OP], fields[record.BEFORE_KIND] == "full"
            hidden = full and was is False  # before this change
            if op in ("INSERT", "READ") or (op == "UPDATE" and hidden):
                if now is False:
                    continue
                kept.append((sequence, (*fields[: record.OP], "INSERT", *fields[record.OP + 1 :])))
            elif op != "DELETE" or not hidden:
                kept.append((sequence, fields))
        return kept

    def _images(
        self, changes: Sequence[SequencedRecord], name: int
    ) -> tuple[list[bytes | None], list[Sequence[str]]]:
        """An image of each change of a row, and what it lacks."""
        rows = [fields if fields[record.OP] in ROW_OPS else None for _, fields in changes]
        images = [fields[name] if fields else None for fields in rows]
        lacks = name == record.AFTER  # what an update does not send
        return images, [fields[record.UNCHANGED] if fields and lacks else () for fields in rows]

    def append(self, block: LogBlock) -> None:
        """Take rows of a snapshot; no other change of the table is in the batch."""
        if self._ended:
            return
        self._first = block.first
        try:
            self._hold(self._columns_of(block))
            count = self._block_rows
            if self._block_bytes >= _MOST_APPENDED:
                self._append(count)
            elif count >= self.plan.file_rows:
                self._append(count - count % self.plan.file_rows)
        except _ENDING as error:
            self._end(error)

    def _columns_of(self, block: LogBlock) -> pa.Table:
        plan = self.plan
        there = {column.name for column in block.described.columns}

        def decoder(columns: Sequence[Column], as_text: frozenset[str]) -> pa.Table:
            names = [column.name for column in columns if column.name in there]
            return block.columns(names, as_text=as_text & there, rescue=plan.rescue)

        kept = [column for column in plan.columns if column.name in there]
        if plan.shape is None:
            rows, verdict = decoder(kept, plan.as_text), None
        else:
            rows, verdict = shaped(plan.shape, kept, plan.as_text, decoder)
        sequences = np.arange(block.first, block.last + 1, dtype=np.int64)
        rows = rows.append_column(SEQUENCE, pa.array(sequences))
        inside = pa.array((sequences > plan.after) & (sequences <= plan.upto))
        wanted = inside if verdict is None else pc.and_(inside, verdict)
        rows = rows if pc.all(wanted).as_py() else rows.filter(wanted)
        self._result.rescued += rescued_values(rows, plan)
        return conformed(rows, plan.schema)

    def _hold(self, rows: pa.Table) -> None:
        self._blocks.append(rows)
        self._block_rows += rows.num_rows
        self._block_bytes += rows.nbytes

    def _append(self, count: int) -> None:
        """Write rows of a snapshot; each key comes once, so it is looked for in earlier files."""
        plan, gathered = self.plan, pa.concat_tables(self._blocks)
        self._blocks, self._block_rows, self._block_bytes = [], 0, 0
        self._hold(gathered.slice(count))
        rows = gathered.slice(0, count)
        if plan.key and plan.files:
            rows = rows.filter(pa.array(~self._replaced_by(rows)))
        if rows.num_rows:
            large = rows.num_rows >= plan.file_rows / 2 or rows.nbytes >= _MOST_APPENDED / 2
            ordered = plan.order and not plan.partition_by and is_in_order(rows, plan.order)
            self._write(rows, FILLED if large and ordered else LOOSE)

    def _replaced_by(self, rows: pa.Table) -> Mask:
        """Note the old rows of all keys as dead; returns which rows are older than these."""
        search, sequences = KeySearch(self.plan, rows), rows[SEQUENCE].to_numpy()
        outdated = np.zeros(rows.num_rows, dtype=np.bool_)
        for file in self.plan.files:
            keys, old = search.rows_in(file)
            if len(old) and file.newest >= sequences[0]:
                gone = vectors.read(self.plan.folder, file.vector) if file.vector else BitMap()
                alive = ~np.isin(old, row_numbers(gone))
                keys, old = keys[alive], old[alive]
                schema = pa.schema([self.plan.schema.field(SEQUENCE)])
                stored = read_rows(self.plan.folder, file, old, schema)[SEQUENCE].to_numpy()
                newer = stored >= sequences[keys]
                outdated[keys[newer]] = True
                old = old[~newer]
            if len(old):
                self._dead[file.path] = self._dead.get(file.path, BitMap()) | bitmap(old)
        return outdated

    def finish(self) -> ShareResult:
        """Apply what is left."""
        if not self._ended:
            try:
                if self._block_rows:
                    self._append(self._block_rows)
                self._apply(ends=True)
                self._tidy()
            except _ENDING as error:
                self._end(error)
        self._result.moves = self._result.moves or self._fold.moves
        self._result.added = list(self._own.values())
        self._result.dead = {path: rows.serialize() for path, rows in self._dead.items()}
        return self._result

    def _apply(self, *, ends: bool = False) -> None:
        fold, self._fold = self._fold, self._new_fold()
        self._result.moves = self._result.moves or fold.moves
        waiting = set() if ends else fold.hand_on(self._fold)  # transactions are whole at the end
        if fold.versions or fold.emptied_time is not None:
            window = Window(self.plan, fold)
            window.look_up(self._files, self._dead, waiting)
            fold.hand_over(window.left_out, self._fold)
            for name, rows in joined(window.rows(), _MOST_BYTES):
                self._write(rows, name)
            self._result.rescued += window.rescued

    def _write(self, rows: pa.Table, name: str) -> None:
        plan, key = self.plan, key_columns(self.plan)
        for added, part in write_rows(plan, rows, name):
            self._own[added.path] = added
            if name == PAST:
                continue
            newest = pc.max(part[SEQUENCE]).as_py()
            partition = tuple(added.partition.items())
            self._files.append(PlannedFile(added.path, added.rows, newest, partition=partition))
            # That of a larger file is made and stored when it is needed.
            if key.names and added.rows < ON_DISK:
                INDEXES.keep(plan.folder, added.path, key, KeyIndex.of(key.codes(part)))

    def _tidy(self) -> None:
        """Write those own files again in which a later window has replaced rows."""
        for path in [path for path in self._own if path in self._dead]:
            partition = tuple(self._own[path].partition.items())
            rows = conformed(self.plan.folder.read(path), self.plan.schema, partition)
            alive = np.ones(rows.num_rows, dtype=np.bool_)
            alive[row_numbers(self._dead.pop(path))] = False
            del self._own[path]
            if alive.any():
                alive_rows = rows.filter(pa.array(alive))
                self._own |= {
                    each.path: each for each, _ in write_rows(self.plan, alive_rows, LOOSE)
                }


@dataclass(frozen=True, slots=True)
class ApplyTask:
    """What a task does with the changes that it reads from the log."""

    plans: tuple[TablePlan, ...]

    def __call__(self, wanted: LogRange) -> ShareResults:
        """Apply its share of every table."""
        share = Share(wanted.part, wanted.parts)
        shares = table_shares(self.plans, share)
        return ShareResults(applied(shares, log_changes(wanted, self.plans, shares)))


def table_shares(plans: Sequence[TablePlan], share: Share) -> list[TableShare]:
    """What one task has of each table."""
    whole = Share(0, 1)
    return [
        TableShare(at, plan, whole if plan.together else share)
        for at, plan in enumerate(plans)
        if not plan.together or share.number == 0
    ]


def log_changes(
    wanted: LogRange, plans: Sequence[TablePlan], shares: Sequence[TableShare]
) -> Iterator[tuple[TableShare, Changes]]:
    """The changes of tables: records, some thousands at a time, or a block.

    Blocks that are appended belong to the task in whose part of the range they begin; where nothing
    else is in the batch, a part may begin within one.
    """
    by_version = {version: share for share in shares for version in share.plan.versions}
    cascaded = cascaded_records(plans)
    held: dict[int, list[SequencedRecord]] = {share.at: [] for share in shares}
    takers = {version: held[share.at] for version, share in by_version.items()}
    wanted = wanted.beyond(min((plan.after for plan in plans), default=wanted.upto))
    own = wanted.own_part()
    # Nothing else is read where all is appended.
    alone = all(plan.appends and not plan.together for plan in plans)
    for part in (own if alone else wanted).blocks():
        if isinstance(part, LogBlock):
            if (share := by_version.get(part.table)) is None:
                continue
            if share.plan.appends:
                if own.after < part.first <= own.upto or share.plan.together:
                    yield share, part
                continue
            first, count, records = part.first, part.count, part.records()
        else:
            first, count, records = part
        for each in enumerate(record.rows(records, count), first):
            if (taker := takers.get(each[1][record.TABLE])) is not None:
                taker.append(each)
        for share in shares:
            if share.plan.ref in cascaded:
                _take_cascaded(cascaded[share.plan.ref], first + count - 1, held[share.at])
            if held[share.at]:
                yield share, held[share.at].copy()
                held[share.at].clear()
    yield from ((share, left) for share in shares if (left := cascaded.get(share.plan.ref)))


def _take_cascaded(waiting: list[SequencedRecord], upto: int, held: list[SequencedRecord]) -> None:
    """Put changes that follow from foreign keys behind those that they follow from."""
    count = bisect_right(waiting, upto, key=itemgetter(0))
    held += waiting[:count]
    held.sort(key=itemgetter(0))
    del waiting[:count]


def applied(
    shares: Sequence[TableShare], changes: Iterable[tuple[TableShare, Changes]]
) -> list[ShareResult]:
    """What all shares of a task come to."""
    gc.disable()  # to look again and again at a hundred thousand tuples takes half of the time
    try:
        for share, some in changes:
            if isinstance(some, LogBlock):
                share.append(some)
            else:
                share.extend(some)
        return [share.finish() for share in shares]
    finally:
        gc.enable()
