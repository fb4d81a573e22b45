"""Which foreign keys act in the log of a tables sink, and what of their work is stored."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from ...change.event import Table
from ...errors import TableFailed
from .. import LogBatch, LogLineage, LogRange
from ..lake.plan import TableRef, VersionSummary
from .cascade_files import CascadedChanges, forget_cascaded, read_cascaded, write_cascaded
from .cascades import Child, Family, acting, alike, ref_of
from .fold import RowChange
from .ledger import TablesLedger
from .target import shaped_columns, texts_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from .scan import Summaries
    from .sink import Tables


class ForeignKeys:
    """The tables whose foreign keys act, whether the sink follows them or not."""

    def __init__(self, sink: Tables, ledger: TablesLedger) -> None:
        self._folder = sink.folder
        self._ledger = ledger
        self._met: set[TableRef] = set()
        self._fresh: dict[TableRef, Table] = {}
        self._stored: CascadedChanges | None = None
        self._looked = False

    def begin(self) -> None:
        """Forget which tables the last batch had."""
        self._met.clear()
        self._fresh.clear()

    def meet(self, table: Table) -> None:
        """Note a table of the batch."""
        ref = ref_of(table)
        self._met.add(ref)
        known = self._fresh.get(ref)
        if acting(table) and (known is None or known.version < table.version):
            self._fresh[ref] = table

    def in_force(self, changes: LogRange) -> dict[TableRef, Table]:
        """The tables whose foreign keys act."""
        tables = changes.tables()
        known = {ref: tables[version] for ref, version in self._ledger.cascading.items()}
        return {**self._fresh, **known}

    def concerns(self, tables: Mapping[TableRef, Table]) -> bool:
        """Whether the batch has changes of a table that these name."""
        return any(
            TableRef(ref.source, each.schema, each.table) in self._met
            for ref, table in tables.items()
            for each in acting(table)
        )

    def note(self, changes: LogRange, seen: Collection[VersionSummary]) -> None:
        """Remember what foreign keys do after a batch, of all its tables."""
        known = self._ledger.cascading
        newest = {
            each.ref: each.version if each.cascades else 0
            for each in sorted(seen, key=lambda each: each.last_sequence)
        }
        others = {ref: table.version for ref, table in self._fresh.items() if ref not in newest}
        for ref, version in {**others, **newest}.items():
            if known.get(ref, 0) != version:
                self._ledger.note_cascading(ref, version)

    def cut(self, changes: LogRange, seen: Summaries) -> int:
        """Where a part of the batch ends, so that columns and foreign keys are the same in it.

        A new version comes alone in its part: the rows have its columns after it. 0: nowhere.
        """
        ledger = self._ledger
        if not ledger.cascading and not any(each.cascades for each in seen.values()):
            return 0
        tables = changes.tables()
        last = {ref: tables[version] for ref, version in ledger.cascading.items()}
        for each in sorted(seen.values(), key=lambda each: each.first_sequence):
            table, before = tables[each.version], last.get(each.ref)
            last[each.ref] = table
            if before is None:
                differs = ledger.knows(each.ref) and bool(acting(table))
            else:
                acts = bool(acting(before) or acting(table))
                differs = acts and not alike(before, table)
            if differs:
                first = each.first_sequence
                if first - 1 > changes.after:
                    return first - 1
                return first if first < changes.upto else 0
        return 0

    # --- what is stored --------------------------------------------------------------------------

    def stored(self, epoch: str, after: int, lineage: LogLineage | None) -> CascadedChanges | None:
        """What was stored for a range that is not written whole, and that begins here or before."""
        if not self._looked:
            self._stored, self._looked = read_cascaded(self._folder), True
        found = self._stored
        if found is None or found.epoch != epoch or not found.after <= after < found.upto:
            return None
        if lineage is not None:
            # The log may have lost its end, and have got another.
            shared = lineage.shared_upto(epoch, found.generation)
            return found if shared is not None and found.upto <= shared else None
        return found

    def store(
        self, changes: LogRange, generation: str, rows: Mapping[TableRef, Sequence[RowChange]]
    ) -> CascadedChanges:
        """Store what foreign keys do in a range, before any table has it."""
        tables = [(ref, list(some)) for ref, some in rows.items() if some]
        epoch, after, upto = changes.epoch, changes.after, changes.upto
        found = CascadedChanges(epoch, generation, after, upto, uuid.uuid4().hex, tables)
        self._ledger.expect_ours()
        write_cascaded(self._folder, found)
        self._stored, self._looked = found, True
        return found

    def continue_in(self, before: str, epoch: str, upto: int, generation: str) -> None:
        """Keep what is stored for the log of another name, if that has all of the range."""
        found = read_cascaded(self._folder)
        if found is not None and found.epoch == before and found.upto <= upto:
            kept = msgspec.structs.replace(found, epoch=epoch, generation=generation)
            write_cascaded(self._folder, kept)
        elif found is not None:
            forget_cascaded(self._folder)
        self._looked = False


def family_of(
    sink: Tables, tables: Mapping[TableRef, Table], applied: Mapping[TableRef, int]
) -> Family:
    """Tables whose foreign keys act; `applied`: those that are followed, and how far they are."""
    naming: dict[TableRef, list[TableRef]] = defaultdict(list)
    named: dict[TableRef, set[str]] = defaultdict(set)
    for ref, table in tables.items():
        for each in acting(table):
            parent = TableRef(ref.source, each.schema, each.table)
            naming[parent].append(ref)
            named[parent].update(each.parent_columns)
    children = []
    for ref, table in tables.items():
        below = () if ref in applied else _followed_below(ref, naming, applied)
        if ref not in applied and not below:
            continue  # nothing in the sink follows from its rows
        failure = _not_followed(ref) if below else unfollowable(sink, table, named[ref])
        columns = sink.keyed(str(ref), table.columns) if not failure else ()
        children.append(
            Child(
                table=table,
                key=tuple(column.name for column in columns if column.key),
                chosen_key=str(ref) in sink.keys,
                applied=applied.get(ref, 0),
                failure=failure,
                instead=below,
            )
        )
    return Family(children)


def _followed_below(
    ref: TableRef, naming: Mapping[TableRef, Sequence[TableRef]], followed: Collection[TableRef]
) -> tuple[TableRef, ...]:
    """The tables whose rows follow those of a table, be it by way of others."""
    found, left = set[TableRef](), [ref]
    while left:
        fresh = set(naming.get(left.pop(), ())) - found
        found |= fresh
        left += fresh
    return tuple(each for each in found if each in followed)


def _not_followed(ref: TableRef) -> TableFailed:
    return TableFailed(
        f"a foreign key has changed rows of {ref}, which its own name and the sink does not follow",
        hint=f"Add {ref} to `tables` of the sink, then run `headrace snapshot SOURCE TABLE`.",
    )


def unfollowable(sink: Tables, table: Table, named: Collection[str]) -> TableFailed | None:
    """Why rows of a table cannot follow its foreign keys in this sink; None: they can.

    `named` are its columns that foreign keys of others name.
    """
    ref = ref_of(table)
    if sink.shaping.computed(ref.schema, ref.table):
        return _transformed("its rows are computed", sink, ref)
    try:
        kept, shape = shaped_columns(sink, ref, table.columns, table.connector)
    except TableFailed as error:
        return error
    if not any(column.key for column in kept):
        return TableFailed(
            "a foreign key has changed rows, and the table has no key",
            hint="Give it a primary key, or name columns in keys, then run `headrace snapshot "
            "SOURCE TABLE`.",
        )
    own = {name for each in acting(table) for name in each.columns}
    needed = {*own, *named, *(column.name for column in kept if column.key)}
    hidden = needed - {column.name for column in kept} or needed & texts_of(sink, ref, shape)
    if hidden:
        return _transformed(f"{min(hidden)} is not stored as it is", sink, ref)
    looked_at = {column.name for column in shape.conditions} if shape else set()
    if looked_at & own or (looked_at and named):
        return _transformed("where leaves rows out that others follow", sink, ref)
    return None


def _transformed(what: str, sink: Tables, ref: TableRef) -> TableFailed:
    return TableFailed(
        f"a foreign key has changed rows, and {what}",
        hint=f"Change transforms, as_text or keys of {sink.name} for {ref}, then run `headrace "
        f"reset {sink.name}`.",
    )


def idle_summary(table: Table, first: int, last: int) -> VersionSummary:
    """What a batch has of a table whose rows only foreign keys change."""
    return VersionSummary(
        ref=ref_of(table),
        connector=table.connector,
        version=table.version,
        columns=table.columns,
        first_sequence=first,
        last_sequence=last,
        changes=0,
        comment=table.comment,
        last_record=last,
        whole_rows=table.identity == "full",
        cascades=True,
    )


# --- a part of a batch ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Some neighbouring changes of a batch, as a batch of its own."""

    batch: LogBatch
    after: int
    upto: int

    @property
    def spark(self) -> SparkSession:
        """Where its tasks run."""
        return self.batch.spark

    @property
    def whole(self) -> LogRange | None:
        """All of it."""
        whole = self.batch.whole
        return whole and _within(whole, self)

    def run(self, task: Callable[[LogRange], msgspec.Struct | None]) -> Sequence[str]:
        """Run a task with these changes of each part of the batch."""
        return self.batch.run(_PartTask(task, self.after, self.upto))

    def changes_of(self, table: Table) -> DataFrame:
        """Its changes of one table."""
        changes = self.batch.changes_of(table)
        sequence = changes["sequence"]
        return changes.where((sequence > self.after) & (sequence <= self.upto))


@dataclass(frozen=True, slots=True)
class _PartTask:
    task: Callable[[LogRange], msgspec.Struct | None]
    after: int
    upto: int

    def __call__(self, wanted: LogRange) -> msgspec.Struct | None:
        return self.task(_within(wanted, self))


def _within(whole: LogRange, part: BatchPart | _PartTask) -> LogRange:
    return replace(whole, after=max(whole.after, part.after), upto=min(whole.upto, part.upto))
