"""One Delta table of the tables sink, as the driver sees it: what it has, how it must change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa
from pyroaring import BitMap

from ...change.arrow import RESCUED
from ...change.columns import carried_columns
from ...change.event import Column, Table
from ...errors import LogReplaced, TableFailed
from ...transforms.rules import Selected, TransformNote
from ...transforms.shape import fitted
from ..lake import vectors
from ..lake.comments import TableComments
from ..lake.delta import EPOCH, KEEP, SOURCE, Delta, Marks
from ..lake.deltalog import DataFile
from ..lake.plan import (
    SEQUENCE,
    PlannedFile,
    ShareResult,
    TableFailure,
    TablePlan,
    TableRef,
    VersionSummary,
    delta_schema,
)
from ..lake.storage import Added, Folder
from .bounds import EXACT, column_bounds
from .compaction import due
from .evolution import (
    DROPPED,
    Carry,
    Evolution,
    InitialDefaults,
    Keep,
    column_note,
    evolved,
    grown,
    initial_defaults,
    key_note,
    noted_columns,
    touched,
    with_first_defaults,
)
from .keys import bitmap, row_numbers, united
from .lookup import INDEXES, KeyColumns
from .parquet import LOOSE, PAST, kind, read_rows
from .rewrite import RewriteWork, Rewritten

if TYPE_CHECKING:
    from .sink import Tables

logger = logging.getLogger(__name__)

KEY = "headrace.key"
COLUMNS = "headrace.columns"
INPUTS = "headrace.inputs"  # columns of the source by which rows are chosen, or computed
TRANSFORM = "headrace.transform"
HAS_RESCUED = "headrace.rescued"  # "true": RESCUED is ours, and no column of the source
# Writes all files of a table anew, with other columns.
Rewrite = Callable[["TargetTable", Evolution, Mapping[str, str]], None]
RunRewrites = Callable[[Sequence[RewriteWork]], Sequence[Rewritten]]

FILE_ROWS = 500_000  # at most in a file: so the vectors of its dead rows stay small
WINDOW_KEYS = 250_000  # that are applied at once: so much of a share is in memory


class Opening(NamedTuple):
    """What a table is opened for."""

    epoch: str  # of the log
    writer: str
    adopt: bool  # take it over from another writer or log
    known: bool  # the sink has had it, so it must be there
    restart: bool  # it had failed, and a full snapshot replaces all of its rows


class TargetTable:
    """A table, kept equal to its source."""

    def __init__(self, sink: Tables, ref: TableRef, delta: Delta, *, applied: int) -> None:
        self.ref = ref
        self.delta = delta
        self.applied = applied
        self._sink = sink
        self._columns: tuple[Column, ...] = ()  # of the source, when the last batch ended
        self._comments: TableComments | None = None  # of the source; None: they are not known
        self._commented_by = 0  # the version of the source's table that has them
        self._together = False
        self.cascaded = False  # foreign keys have changed rows

    @classmethod
    def open(
        cls,
        sink: Tables,
        ref: TableRef,
        first: VersionSummary,
        opening: Opening,
    ) -> TargetTable:
        """The table behind changes that come for the first time; created if there is none."""
        epoch, writer, adopt, known, restart = opening
        folder = sink.folder.within(ref.schema, ref.table)
        delta = Delta.open(folder, writer, adopt=adopt, restart=restart)
        if delta is None:
            if known:
                raise TableFailed(f"the Delta table {folder.uri} is gone")
            delta = cls._created(sink, ref, first, epoch, folder, writer)
        _check(sink, ref, delta)
        _, shape = shaped_columns(sink, ref, first.columns, first.connector)
        _follow_transform(sink, ref, delta, shape, restart=restart)
        if sink.deletes == "vectors":
            delta.enable_vectors()
        if (before := delta.properties.get(EPOCH, "")) != epoch:
            # A table that was emptied may be filled from any log.
            if not adopt and (delta.files or delta.applied(before)):
                raise LogReplaced(f"{folder.uri} was filled from another log")
            # The mark too: the table may have come from this very log before.
            delta.empty(epoch)
            delta.note({EPOCH: epoch})
        return cls(sink, ref, delta, applied=delta.applied(epoch))

    @staticmethod
    def _created(
        sink: Tables, ref: TableRef, first: VersionSummary, epoch: str, folder: Folder, writer: str
    ) -> Delta:
        columns, shape = shaped_columns(sink, ref, first.columns, first.connector)
        schema = _schema(sink, ref, columns, shape, first.connector)
        properties = {
            SOURCE: ref.source,
            KEEP: sink.keep,
            EPOCH: epoch,
            KEY: key_note(columns),
            COLUMNS: column_note(columns),
            INPUTS: column_note(_inputs(first, shape)),
            TRANSFORM: _transform_note(sink, ref, shape),
        }
        vectors = sink.deletes == "vectors"
        partition_by = _partition_by(sink, ref, schema)
        _expect_order(sink, ref, schema)
        return Delta.create(
            folder,
            schema,
            properties,
            writer=writer,
            vectors=vectors,
            partition_by=partition_by,
        )

    def start_at(self, sequence: int) -> None:
        """Begin with this change, which empties the table."""
        self.applied = max(self.applied, sequence - 1)

    # --- before a batch --------------------------------------------------------------------------

    def plan(self, seen: Sequence[VersionSummary], rewrite: Rewrite) -> TablePlan | None:
        """What the tasks must know; None: the table has everything already.

        `rewrite` writes all files anew, with other columns. A change that cannot be followed raises
        TableFailed, unless the batch empties the table afterwards, which makes up for it.
        """
        fresh = [each for each in seen if each.last_sequence > self.applied]
        if not fresh:
            return None
        failure = _first_failure(fresh, self.applied)
        if failure:
            self.recover(failure, fresh)
            return self.plan(seen, rewrite)
        try:
            return self._planned(fresh, rewrite)
        except TableFailed as error:
            first = max(min(each.first_sequence for each in fresh), self.applied + 1)
            self.recover(TableFailure(first, str(error), error.hint), fresh)
            return self.plan(seen, rewrite)

    def _planned(self, fresh: Sequence[VersionSummary], rewrite: Rewrite) -> TablePlan:
        segment, upto = self._segment(fresh)
        newest = max(segment, key=lambda each: each.last_sequence)
        columns, shape = shaped_columns(self._sink, self.ref, newest.columns, newest.connector)
        history = self._sink.keep == "history"
        emptied = sorted(at for each in segment for at in each.emptied if self.applied < at <= upto)
        after = emptied[-1] if emptied and not history else self.applied
        schema = _schema(
            *(self._sink, self.ref, columns, shape, newest.connector), has_rescued=self._has_rescued
        )
        if after == self.applied and self.applied + 1 not in emptied:
            self._expect_keyed(columns)
        _follow_transform(self._sink, self.ref, self.delta, shape, restart=after > self.applied)
        lost = [name for name in self.delta.partition_by if name not in schema.names]
        if lost and not history:
            raise TableFailed(
                f"column {lost[0]} is gone, and partition_by names it",
                hint="Remove it from partition_by and the folder of the Delta table, then run "
                "`headrace snapshot SOURCE TABLE`.",
            )
        if self._columns and self._columns != columns:
            logger.info("columns have changed table=%s", self.ref)
        self._columns = columns
        notes = {
            KEY: key_note(columns),
            COLUMNS: column_note(columns),
            INPUTS: column_note(_inputs(newest, shape)),
        }
        if newest.dropped == newest.last_sequence:
            notes |= {COLUMNS: DROPPED, INPUTS: ""}
        if after == self.applied:
            self._expect_same_values(_inputs(newest, shape))
            keep = Keep(history, history and self._replaces_rows(segment, emptied))
            given = with_first_defaults(columns, [each.columns for each in segment])
            evolution = self._evolution(given, shape, newest.connector, keep)
            self._follow(evolution, notes, rewrite)
            schema = self.delta.schema  # in the order that Delta keeps columns
        self._note(notes)
        self._follow_comments(segment)
        return TablePlan(
            ref=self.ref,
            connector=newest.connector,
            folder=self.delta.folder,
            columns=columns,
            schema=schema,
            files=()
            if after > self.applied
            else self._planned_files(columns, every=history and bool(emptied)),
            versions=frozenset(each.version for each in segment),
            after=after,
            upto=upto,
            emptied=tuple(emptied),
            as_text=texts_of(self._sink, self.ref, shape),
            chosen_key=str(self.ref) in self._sink.keys,
            keep_history=history,
            appends=not history
            and str(self.ref) not in self._sink.keys  # a key of one's own may come twice
            and all(each.last_record <= after for each in segment)
            and len(set().union(*(each.snapshots for each in segment))) == 1,
            together=self._together or (history and bool(emptied)),
            file_rows=self._file_rows(),
            window_keys=WINDOW_KEYS,
            order=self._order(columns, schema),
            partition_by=self.delta.partition_by,
            shape=shape,
            computed=self._sink.shaping.computed(self.ref.schema, self.ref.table) is not None,
            rescue=self._rescues(columns),
            has_rescued=self._has_rescued,
            whole_rows=any(each.whole_rows for each in segment),
        )

    @property
    def _has_rescued(self) -> bool:
        return self.delta.properties.get(HAS_RESCUED) == "true"

    def _rescues(self, columns: Sequence[Column]) -> bool:
        """Whether the texts of unfit values can be kept: a column of the source has the name."""
        names = {*(each.name for each in columns), *self.delta.schema.names}
        taken = not self._has_rescued and RESCUED in names
        return self._sink.unfit == "rescue" and not taken

    def rescue(self) -> None:
        """Have a column for the texts of unfit values from the next plan on."""
        # Noted before it is there: so a column of this name is never taken for the source's.
        self.delta.note({HAS_RESCUED: "true"})
        logger.warning("a value does not fit its column, and becomes null table=%s", self.ref)

    def _file_rows(self) -> int:
        """How many rows a file of the largest size has, as far as the files tell."""
        files = self.delta.files.values()
        rows, size = sum(file.rows for file in files), sum(file.size for file in files)
        fitting = int(self._sink.file_mb * 1_000_000 * rows / size) if size else FILE_ROWS
        return max(min(fitting, FILE_ROWS), 1)

    def _order(self, columns: Sequence[Column], schema: pa.Schema) -> tuple[str, ...]:
        """The columns by which rows are sorted, those that there are."""
        chosen = self._sink.cluster_by.get(str(self.ref), ())
        keys = [column.name for column in columns if column.key]
        # Within a folder of a partition its value is the same.
        left = {column.name for column in columns} - set(self.delta.partition_by)
        left -= {each.name for each in schema if pa.types.is_nested(each.type)}
        order = [name for name in chosen if name in left] or [name for name in keys if name in left]
        return tuple(order)

    def _planned_files(self, columns: Sequence[Column], *, every: bool) -> tuple[PlannedFile, ...]:
        """The files in which a batch may find rows.

        Rows without a key are looked for only by a TRUNCATE, which ends `every` one.
        """
        key = next((column.name for column in columns if column.key), "")
        if not key and not every:
            return ()
        return tuple(
            planned(file, key, self.delta.schema)
            for file in self.delta.files.values()
            if kind(file.path) != PAST
        )

    def _segment(self, fresh: Sequence[VersionSummary]) -> tuple[list[VersionSummary], int]:
        """The first changes whose columns only grow, and where they end.

        A change that lost a column, or has another type or key, must not be read with the columns
        of a later one: it is applied before those are followed.
        """
        ordered = sorted(fresh, key=lambda each: each.first_sequence)
        columns = ordered[0].columns
        gone = set(self.delta.schema.names).difference(each.name for each in columns)
        for each in ordered:
            back = any(column.name in gone for column in each.columns)
            if not grown(columns, each.columns) or back:
                upto = each.first_sequence - 1
                if upto <= self.applied:
                    raise TableFailed("changes with several versions of its columns are mixed")
                return [one for one in ordered if one.first_sequence <= upto], upto
            columns = each.columns
        return ordered, max(each.last_sequence for each in ordered)

    def recover(self, failure: TableFailure, seen: Sequence[VersionSummary]) -> None:
        """Start at the batch's last TRUNCATE, if it comes after what is wrong."""
        emptied = max((at for each in seen for at in each.emptied), default=0)
        if emptied <= max(failure.sequence, self.applied + 1):
            raise TableFailed(failure.reason, hint=failure.hint)
        logger.warning(
            "changes are left out, and the table is emptied after them table=%s from=%d reason=%s",
            *(self.ref, self.applied + 1, failure.reason),
        )
        self.start_at(emptied)

    def _replaces_rows(self, segment: Sequence[VersionSummary], emptied: Sequence[int]) -> bool:
        """Whether no row that is current now stays so: they go before any other change."""
        first = max(min(each.first_sequence for each in segment), self.applied + 1)
        dropped = self.delta.properties.get(COLUMNS) == DROPPED
        return dropped or (bool(emptied) and emptied[0] <= first + 1)

    @property
    def _known_columns(self) -> tuple[Column, ...]:
        """The source's columns that the rows have."""
        return noted_columns(self.delta.properties.get(COLUMNS, ""), self.delta.schema.names)

    def _evolution(
        self, columns: tuple[Column, ...], shape: Selected | None, connector: str, keep: Keep
    ) -> Evolution:
        known = self._known_columns
        fresh = [column for column, was in carried_columns(known, columns) if was is None]
        texts, defaults = texts_of(self._sink, self.ref, shape), InitialDefaults()
        if self.delta.files:
            defaults = initial_defaults(
                *(fresh, texts, shape, connector), rescue=self._rescues(columns)
            )
        if defaults.rescued and not self._has_rescued:
            self.rescue()
        wanted = _schema(
            *(self._sink, self.ref, columns, shape, connector), has_rescued=self._has_rescued
        )
        if not self.delta.files:
            return Evolution(wanted, Carry(), rewrites=wanted != self.delta.schema)
        return evolved(self.delta.schema, wanted, known, columns, defaults=defaults, keep=keep)

    def _expect_same_values(self, inputs: Sequence[Column]) -> None:
        """Expect that what chooses or computes rows finds the same values as before in them."""
        noted = self.delta.properties.get(INPUTS, "")
        if noted and self.delta.files and (column := touched(noted_columns(noted, ()), inputs)):
            raise TableFailed(
                f"column {column} has another value now in rows that did not change, and the "
                "table's transform looks at it"
            )

    def _follow(self, evolution: Evolution, notes: Mapping[str, str], rewrite: Rewrite) -> None:
        """Take over the columns of the source, with the least that this needs."""
        known = self.delta.schema
        if evolution.rewrites and self.delta.files:
            rewrite(self, evolution, notes)
        elif evolution.rewrites:
            self.delta.replace_columns([], [], evolution.schema, notes)
        elif added := [each for each in evolution.schema if each.name not in known.names]:
            self.delta.add_columns(added, notes)

    def _expect_keyed(self, columns: Sequence[Column]) -> None:
        """Expect that rows can be found by a key that is another one from now on."""
        if self.delta.properties.get(KEY) == key_note(columns):
            return
        files = [file for file in self.delta.files.values() if kind(file.path) != PAST]
        for column, was in carried_columns(self._known_columns, columns):
            if not column.key or not files:
                continue
            if was is None or any(file.has_nulls(was.name) for file in files):
                raise TableFailed(f"its key is {column.name} now, which its rows do not have")

    def _note(self, notes: Mapping[str, str]) -> None:
        noted = self.delta.properties
        if {name: noted.get(name, "") for name in notes} != notes:
            self.delta.note(notes)

    def _follow_comments(self, segment: Sequence[VersionSummary]) -> None:
        """Take over the comments of the newest version.

        A snapshot reads them anew, and rows that the stream brings after it may have the version
        before: those do not bring older comments back.
        """
        newest = max(segment, key=lambda each: each.version)
        if newest.comment is not None and newest.version > self._commented_by:
            columns, _ = shaped_columns(self._sink, self.ref, newest.columns, newest.connector)
            by_column = {column.name: column.comment for column in columns}
            self._comments = TableComments(newest.comment, by_column)
            self._commented_by = newest.version
        self._describe()

    def _describe(self) -> None:
        if self._comments is not None:
            self.delta.describe(self._comments)

    # --- after it --------------------------------------------------------------------------------

    def commit(
        self, plan: TablePlan, done: Sequence[ShareResult], marks: Marks, rewrite: RunRewrites
    ) -> None:
        """Make what the tasks have written part of the table, if they have written anything."""
        added = [file for each in done for file in each.added]
        dead = united(each.dead for each in done)
        removed: list[str] = []
        if dead and self._sink.deletes == "rewrite":
            work = self._without(plan, dead)
            for each in rewrite(work):
                added += each.added
                removed += each.removed
            dead = {}
        emptied = plan.after > self.applied
        if added or removed or dead or emptied:
            schema = plan.schema if emptied and plan.schema != self.delta.schema else None
            self.delta.commit(
                added, removed, dead=dead, schema=schema, replace=emptied, marks=marks
            )
        if emptied:
            self._describe()  # there may be new columns
        self.applied = marks.sequence
        self._together = False

    # --- files written anew ----------------------------------------------------------------------

    def _without(self, plan: TablePlan, dead: Mapping[str, bytes]) -> list[RewriteWork]:
        """The work of writing files without their dead rows, for readers that know no vectors."""
        files = [file for file in plan.files if file.path in dead]
        return [
            RewriteWork(plan=plan, name=kind(file.path) or LOOSE, whole=(file,), dead=dead)
            for file in files
        ]

    def rewrites(self, evolution: Evolution) -> list[RewriteWork]:
        """The work of giving all files other columns: each by itself, since they are in order."""
        plan, carry = self._rewrite_plan(evolution.schema), evolution.carry
        return [
            RewriteWork(plan=plan, name=kind(file.path) or LOOSE, whole=(file,), carry=carry)
            for file in (planned(each, "", plan.schema) for each in self.delta.files.values())
        ]

    @property
    def current_rows(self) -> int:
        """How many rows there are now."""
        files = self.delta.files.values()
        return sum(file.live for file in files if kind(file.path) != PAST)

    def layout(self) -> tuple[TablePlan, list[PlannedFile]]:
        """What compaction must know."""
        return self._rewrite_plan(self.delta.schema), self._all_files()

    def compaction(self) -> list[RewriteWork]:
        """The work that is worth doing."""
        return list(due(*self.layout(), has_vectors=self.delta.has_vectors))

    def updated(self, work: RewriteWork) -> RewriteWork:
        """Work that was planned earlier, with the files as they are now."""
        files = self.delta.files
        whole, parts = (
            tuple(replace(f, vector=files[f.path].vector) for f in some if f.path in files)
            for some in (work.whole, work.parts)
        )
        return replace(work, whole=whole, parts=parts)

    def take_over(
        self, done: Sequence[Rewritten], schema: pa.Schema, properties: Mapping[str, str]
    ) -> None:
        """The same rows in other files, and with other columns."""
        added = [file for each in done for file in each.added]
        removed = [path for each in done for path in each.removed]
        self.delta.replace_columns(added, removed, schema, properties)

    def compacted(self, work: Sequence[RewriteWork], done: Sequence[Rewritten]) -> bool:
        """Take over what compaction has made of files; False: nothing of it is of use.

        The stream may have gone on with these files meanwhile. What is dead in them now, or has
        gone with a whole file, is dead in the new ones too.
        """
        there = self.delta.files
        removed = {path for each in done for path in each.removed}
        if self.delta.has_vectors:
            taken = [
                {path: each.taken[path] for path in each.taken if path in there} for each in done
            ]
        else:
            removed |= {file.path for each in work for file in each.parts}
            taken = []
        if not any(
            path in there for path in (*removed, *(path for each in taken for path in each))
        ):
            return False
        added = [file for each in done for file in each.added]
        dead = united([*taken, self._late(work, added)])
        self.delta.commit(added, [path for path in removed if path in there], dead=dead)
        return True

    def _late(self, work: Sequence[RewriteWork], added: Sequence[Added]) -> dict[str, bytes]:
        """The rows of new files that were replaced or deleted after compaction read them."""
        folder = self.delta.folder
        # Where foreign keys act, several rows may have followed one change.
        names = (SEQUENCE, *(msgspec.json.decode(self.delta.properties[KEY]) * self.cascaded))
        sequence = KeyColumns(names, tuple(self.delta.schema.field(name).type for name in names))
        sequences = []
        files = {file.path: file for each in work for file in (*each.whole, *each.parts)}
        for file in files.values():
            before = vectors.read(folder, file.vector) if file.vector else BitMap()
            there = file.path in self.delta.files
            now = self.delta.dead(file.path) if there else BitMap(range(file.rows))
            if late := now - before:
                sequences.append(read_rows(folder, file, row_numbers(late), sequence.schema))
        found: dict[str, bytes] = {}
        if sequences:
            wanted = sequence.codes(pa.concat_tables(sequences))
            for each in added:
                new = PlannedFile(each.path, each.rows, 0, partition=(*each.partition.items(),))
                _, rows = INDEXES.of(folder, new, sequence).find(wanted)
                if len(rows):
                    found[each.path] = bitmap(rows).serialize()
        return found

    def _all_files(self) -> list[PlannedFile]:
        schema = self.delta.schema
        first = next(iter(self._order(self._columns, schema)), "")
        files = self.delta.files.values()
        return [planned(file, first, schema, exact=False) for file in files]

    def _rewrite_plan(self, schema: pa.Schema) -> TablePlan:
        return TablePlan(
            ref=self.ref,
            connector="",
            folder=self.delta.folder,
            columns=self._columns,
            schema=schema,
            files=(),
            versions=frozenset(),
            after=0,
            upto=0,
            chosen_key=str(self.ref) in self._sink.keys,
            file_rows=self._file_rows(),
            order=self._order(self._columns, schema),
            partition_by=self.delta.partition_by,
            has_rescued=self._has_rescued,
        )

    def apply_together(self) -> None:
        """Do the batch again with all keys in one share."""
        self._together = True


def planned(file: DataFile, column: str, schema: pa.Schema, *, exact: bool = True) -> PlannedFile:
    """A file as tasks see it, with the bounds of a column; `exact`: only if rounding is none."""
    sequences = file.bounds(SEQUENCE)
    low = high = None
    kinds = EXACT if exact else (*EXACT, pa.types.is_timestamp, pa.types.is_decimal)
    if column and any(bounded(of := schema.field(column).type) for bounded in kinds):
        low, high = column_bounds(file, column, of) or (None, None)
    return PlannedFile(
        file.path,
        file.rows,
        sequences[1] if sequences else 1 << 62,
        low,
        high,
        nulls=file.may_be_null(column),
        vector=file.vector,
        partition=file.partition,
    )


def _check(sink: Tables, ref: TableRef, delta: Delta) -> None:
    noted = delta.properties
    if noted.get(SOURCE) != ref.source:
        raise TableFailed(
            f"{delta.folder.uri} holds the table of source {noted.get(SOURCE)}, "
            f"and source {ref.source} has one of the same name",
            hint="Rename one of them, or run a Headrace of its own for each source.",
        )
    if noted.get(KEEP) != sink.keep:
        raise TableFailed(
            f"{delta.folder.uri} was made with keep: {noted.get(KEEP)}, "
            f"and the config says keep: {sink.keep}",
            hint="Set another path for the other way of keeping.",
        )
    if (wanted := sink.partition_by.get(str(ref), ())) != delta.partition_by:
        logger.warning(
            "a table keeps the partitions that it was made with table=%s partition_by=%s config=%s",
            *(ref, ",".join(delta.partition_by), ",".join(wanted)),
        )


def _expect_order(sink: Tables, ref: TableRef, schema: pa.Schema) -> None:
    for name in sink.cluster_by.get(str(ref), ()):
        if name not in schema.names or pa.types.is_nested(schema.field(name).type):
            raise TableFailed(
                f"cluster_by names {name}: no column whose values have an order",
                hint="Correct cluster_by, then run `headrace snapshot SOURCE TABLE`.",
            )


def _partition_by(sink: Tables, ref: TableRef, schema: pa.Schema) -> tuple[str, ...]:
    names = sink.partition_by.get(str(ref), ())
    for name in names:
        kinds = (*EXACT, pa.types.is_boolean)
        if name not in schema.names or not any(kind(schema.field(name).type) for kind in kinds):
            raise TableFailed(
                f"partition_by names {name}: no column of whole numbers, text, dates or booleans",
                hint="Correct partition_by, then run `headrace snapshot SOURCE TABLE`.",
            )
    return names


def _schema(
    sink: Tables,
    ref: TableRef,
    columns: Sequence[Column],
    shape: Selected | None,
    connector: str,
    *,
    has_rescued: bool = False,
) -> pa.Schema:
    texts, history = texts_of(sink, ref, shape), sink.keep == "history"
    return delta_schema(
        columns, texts, connector=connector, keep_history=history, has_rescued=has_rescued
    )


def texts_of(sink: Tables, ref: TableRef, shape: Selected | None) -> frozenset[str]:
    """The columns that are read as text: to be kept so, or to be coded."""
    return sink.text_columns(str(ref)) | (shape.coded if shape else frozenset())


def shaped_columns(
    sink: Tables, ref: TableRef, columns: tuple[Column, ...], connector: str
) -> tuple[tuple[Column, ...], Selected | None]:
    """The columns of a table as the sink stores them, and what their rows go through before."""
    keyed = sink.keyed(str(ref), columns)
    shape = fitted(sink.shaping, ref.schema, ref.table, keyed, connector)
    return (shape.columns if shape else keyed), shape


def _transform_note(sink: Tables, ref: TableRef, shape: Selected | None) -> str:
    computed = sink.shaping.computed(ref.schema, ref.table)
    noted = shape.note if shape else computed[1].computed_note if computed else TransformNote()
    return "" if noted == TransformNote() else msgspec.json.encode(noted).decode()


def _follow_transform(
    sink: Tables, ref: TableRef, delta: Delta, shape: Selected | None, *, restart: bool
) -> None:
    """Rows that another transform has made do not go with those of this one."""
    before = delta.properties.get(TRANSFORM, "")
    if before == (wanted := _transform_note(sink, ref, shape)):
        return
    noted, now = (
        msgspec.json.decode(text or "{}", type=TransformNote) for text in (before, wanted)
    )
    # A snapshot replaces rows, but not what is past.
    replaced = restart and sink.keep != "history"
    if delta.files and not replaced and noted.differs(now, delta.schema.names):
        raise TableFailed(
            f"{delta.folder.uri} was filled with another transform than {sink.name}.transforms has "
            f"for {ref}",
            hint=f"Run `headrace reset {sink.name}`: it fills the tables again.",
        )
    delta.note({TRANSFORM: wanted})


def finds_key(sink: Tables, ref: TableRef, table: Table, noted: str) -> bool:
    """Whether keys in a Delta table with this note of its transform are written as now."""
    _, shape = shaped_columns(sink, ref, table.columns, table.connector)
    before, now = (
        msgspec.json.decode(text or "{}", type=TransformNote).mask
        for text in (noted, _transform_note(sink, ref, shape))
    )
    return all(before.get(name, "") == now.get(name, "") for name in table.key)


def _first_failure(fresh: Sequence[VersionSummary], applied: int) -> TableFailure | None:
    """What the source could not read first, of what the table does not have."""
    found = [each.failure for each in fresh if each.failure and each.failure.sequence > applied]
    return min(found, key=lambda failure: failure.sequence, default=None)


def _inputs(newest: VersionSummary, shape: Selected | None) -> Sequence[Column]:
    return shape.conditions if shape else newest.inputs
