"""One Delta table of the tables sink, as the driver sees it: what it has, how it must change."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from ...change.arrow import columns_of, widened
from ...change.event import Column
from ...errors import HeadraceError, LogReplaced, TableFailed
from ..lake.delta import EPOCH, KEEP, SOURCE, Delta, Marks
from ..lake.plan import (
    BucketFile,
    BucketResult,
    TableFailure,
    TablePlan,
    TableRef,
    VersionSummary,
    delta_schema,
)
from ..lake.storage import Added, Folder

if TYPE_CHECKING:
    from .sink import Tables

logger = logging.getLogger(__name__)

KEY = "headrace.key"

# Images are JSON with a name before each value; what is stored of them is about this share.
_STORED_SHARE = 0.15
_LARGEST_LEVEL = 16


class TargetTable:
    """A table, kept equal to its source."""

    def __init__(self, sink: Tables, ref: TableRef, delta: Delta, *, applied: int) -> None:
        self.ref = ref
        self.delta = delta
        self.applied = applied
        self._keep_history = sink.keep == "history"
        self._connector = ""  # known with the first change
        self._as_text = as_text(sink, ref)
        self._columns: tuple[Column, ...] = ()
        self._had = set(delta.schema.names)  # the columns after the last commit
        self._upto = 0
        self._restarts = False  # with a TRUNCATE, after which no earlier row or column matters
        self._schema = delta.schema
        self._versions: frozenset[int] = frozenset()
        self._version = 0  # of the source's columns, after the last batch
        self._level = max((part.level for part in _parts(delta)), default=0)
        self._together = False
        self._rewrite = False

    @classmethod
    def open(
        cls,
        sink: Tables,
        ref: TableRef,
        seen: Sequence[VersionSummary],
        *,
        writer: str,
        adopt: bool,
        known: bool,
    ) -> TargetTable:
        """The table behind changes that come for the first time; created if there is none."""
        folder = sink.folder.within(ref.schema, ref.table)
        epoch = seen[0].epoch
        delta = Delta.open(folder, writer, adopt=adopt)
        if delta is None:
            if known:
                raise TableFailed(f"the Delta table {folder.uri} is gone")
            delta = cls._created(sink, ref, seen, folder, writer)
        cls._check(sink, ref, delta)
        if (before := delta.properties.get(EPOCH, "")) != epoch:
            # A table that was emptied may be filled from any log.
            if not adopt and (delta.files or delta.applied(before)):
                raise LogReplaced(f"{folder.uri} was filled from another log")
            # The mark too: the table may have come from this very log before.
            delta.empty(epoch)
            delta.note({EPOCH: epoch})
        target = cls(sink, ref, delta, applied=delta.applied(epoch))
        if not delta.files:
            target._level = level_for(
                sum(each.size for each in seen) * _STORED_SHARE, sink.file_bytes
            )
        if not target.applied:
            target.adapt(seen)  # else after a look at only those changes that it lacks
        return target

    @staticmethod
    def _created(
        sink: Tables, ref: TableRef, seen: Sequence[VersionSummary], folder: Folder, writer: str
    ) -> Delta:
        columns = columns_of(_oldest(seen).row_schema)
        schema = delta_schema(
            columns,
            as_text(sink, ref),
            connector=seen[0].connector,
            keep_history=sink.keep == "history",
        )
        properties = {
            SOURCE: ref.source,
            KEEP: sink.keep,
            EPOCH: seen[0].epoch,
            KEY: _key_note(columns, schema),
        }
        return Delta.create(folder, schema, properties, writer=writer)

    @staticmethod
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

    def start_at(self, sequence: int) -> None:
        """Begin with this change, which empties the table."""
        self.applied = max(self.applied, sequence - 1)
        self._restarts = not self._keep_history

    def plan(self) -> TablePlan:
        """What the tasks must know."""
        return TablePlan(
            ref=self.ref,
            connector=self._connector,
            folder=self.delta.folder,
            columns=self._columns,
            schema=self._schema,
            as_text=self._as_text,
            keep_history=self._keep_history,
            level=self._level,
            parts=tuple(_parts(self.delta)),
            versions=self._versions,
            applied=self.applied,
            upto=self._upto,
            together=self._together,
            rewrite=self._rewrite,
        )

    def adapt(self, seen: Sequence[VersionSummary]) -> bool:
        """Get ready for what a batch brings; True: the plan has changed.

        A change that cannot be followed raises TableFailed, unless the batch empties the table
        afterwards, which makes up for it.
        """
        fresh = [each for each in seen if each.last_sequence > self.applied]
        if not fresh:
            return False
        failure = next((each.failure for each in fresh if each.failure), None)
        if failure:
            return self.recover(failure, seen)
        segment, upto = self._segment(fresh)
        moves = any(each.moves for each in segment) and not self._together
        versions = frozenset(each.version for each in segment)
        if versions <= self._versions and upto == self._upto and not moves:
            return False
        try:
            self._follow(_newest(segment), versions)
        except TableFailed as error:
            return self.recover(
                TableFailure(segment[0].first_sequence, str(error), error.hint), seen
            )
        self._together, self._upto = self._together or moves, upto
        return True

    def _segment(self, fresh: Sequence[VersionSummary]) -> tuple[list[VersionSummary], int]:
        """The first changes whose columns only grow, and where they end; 0: with the batch.

        A change that lost a column, or has another type or key, must not be read with the columns
        of a later one: it is applied before those are followed.
        """
        ordered = sorted(fresh, key=lambda each: each.first_sequence)
        columns = columns_of(ordered[0].row_schema)
        gone = self._had - _names(columns)
        for each in ordered:
            later = columns_of(each.row_schema)
            if not _grown(columns, later) or gone & _names(later):
                upto = each.first_sequence - 1
                return [one for one in ordered if one.first_sequence <= upto], upto
            columns = later
        return ordered, 0

    def recover(self, failure: TableFailure, seen: Sequence[VersionSummary]) -> bool:
        """Start at the batch's last TRUNCATE, if it comes after what is wrong."""
        emptied = max(each.emptied_at for each in seen)
        if emptied <= max(failure.sequence, self.applied + 1):
            raise TableFailed(failure.reason, hint=failure.hint)
        self.start_at(emptied)
        self._versions = frozenset()  # what follows is looked at anew
        return True

    def _follow(self, newest: VersionSummary, versions: frozenset[int]) -> None:
        """Take over the columns of the newest version, with the least that this needs."""
        columns = columns_of(newest.row_schema)
        wanted = delta_schema(
            columns,
            self._as_text,
            connector=newest.connector,
            keep_history=self._keep_history,
        )
        if self._restarts:
            self.delta.commit([], [], schema=wanted, replace=True)
            self.delta.note({KEY: _key_note(columns, wanted)})
            self._restarts = False
        schema, lost, widens = _evolved(self.delta.schema, wanted, keep_lost=self._keep_history)
        rekeyed = self.delta.properties.get(KEY) != _key_note(columns, schema)
        self._rewrite = bool(lost or widens or rekeyed) and bool(self.delta.files)
        self._together = rekeyed and self._rewrite
        if not self._rewrite and (lost or widens or rekeyed):
            self.delta.commit([], [], schema=schema, replace=True)
            self.delta.note({KEY: _key_note(columns, schema)})
        elif not self._rewrite:
            added = [each for each in schema if each.name not in self.delta.schema.names]
            if added:
                self.delta.add_columns(added)
                schema = self.delta.schema  # in the order that Delta keeps them
        if self._columns:
            logger.info("columns have changed table=%s version=%d", self.ref, newest.version)
        self._connector = newest.connector
        self._columns, self._schema = columns, schema
        self._versions, self._version = versions, newest.version

    def commit(self, plan: TablePlan, done: Sequence[BucketResult], marks: Marks) -> None:
        """Make what the tasks have written part of the table, if they have written anything."""
        added = [file for each in done for file in each.added]
        removed = [path for each in done for path in each.removed]
        if plan.rewrite:
            self._replace(plan, done, added, marks)
        elif added or removed:
            self.delta.commit(added, removed, marks=marks)
        if plan.rewrite or added or removed or plan.upto:
            self.applied = marks.sequence
        self._together = self._rewrite = False
        self._upto = 0
        self._had = set(self._schema.names)
        # From now on, another version than the newest is news.
        self._versions = frozenset({self._version})

    def _replace(
        self, plan: TablePlan, done: Sequence[BucketResult], added: Sequence[Added], marks: Marks
    ) -> None:
        missing = set(plan.buckets) - {each.bucket for each in done}
        if missing:
            raise HeadraceError(f"{self.ref}: {len(missing)} buckets were not written anew")
        self.delta.commit(added, [], schema=plan.schema, replace=True, marks=marks)
        self.delta.note({KEY: _key_note(plan.columns, plan.schema)})

    def compacted(self, level: int, added: Sequence[Added], removed: Sequence[str]) -> None:
        """The same rows in other files."""
        self.delta.commit(added, removed)
        self._level = level

    @property
    def level(self) -> int:
        """There are 2 ** level buckets."""
        return self._level

    @property
    def parts(self) -> list[BucketFile]:
        """The table's files."""
        return _parts(self.delta)

    @property
    def key(self) -> list[str]:
        """Names of the key columns."""
        return [column.name for column in self._columns if column.key]

    @property
    def ready(self) -> bool:
        """Whether every file belongs to one bucket of the table's level."""
        return all(part.level == self._level for part in _parts(self.delta))


def _parts(delta: Delta) -> list[BucketFile]:
    return [BucketFile.of(file.path, file.size, file.rows) for file in delta.files.values()]


def as_text(sink: Tables, ref: TableRef) -> frozenset[str]:
    """The columns of a table that the sink keeps as text."""
    prefix = f"{ref}."
    return frozenset(path.removeprefix(prefix) for path in sink.as_text if path.startswith(prefix))


def _hashed_as(kind: pa.DataType) -> str:
    """Whole numbers fall into the same bucket at every width."""
    return "integer" if pa.types.is_integer(kind) else str(kind)


def _grown(columns: Sequence[Column], later: Sequence[Column]) -> bool:
    """Whether later columns are the same, or these and others that are not part of the key."""
    known = {column.name: (column.type, column.key) for column in later}
    return all(known.get(column.name) == (column.type, column.key) for column in columns) and (
        [column.name for column in columns if column.key]
        == [column.name for column in later if column.key]
    )


def _names(columns: Sequence[Column]) -> set[str]:
    return {column.name for column in columns}


def _oldest(seen: Sequence[VersionSummary]) -> VersionSummary:
    return min(seen, key=lambda each: each.first_sequence)


def _newest(seen: Sequence[VersionSummary]) -> VersionSummary:
    return max(seen, key=lambda each: each.last_sequence)


def level_for(size: float, file_bytes: float) -> int:
    """So many bits of the hash that a bucket is about one file."""
    return min(max(math.ceil(math.log2(max(size / file_bytes, 1))), 0), _LARGEST_LEVEL)


def _key_note(columns: Sequence[Column], schema: pa.Schema) -> str:
    """By what the rows are put into buckets."""
    keyed = [
        (column.name, _hashed_as(schema.field(column.name).type))
        for column in columns
        if column.key
    ]
    return msgspec.json.encode(keyed).decode()


def _evolved(
    known: pa.Schema, wanted: pa.Schema, *, keep_lost: bool
) -> tuple[pa.Schema, list[str], list[str]]:
    """The schema that follows, the columns that it loses, and those that get a wider type."""
    lost = [name for name in known.names if name not in wanted.names]
    widens = []
    for each in wanted:
        if each.name not in known.names or known.field(each.name).type == each.type:
            continue
        was = known.field(each.name).type
        if not widened(was, each.type):
            raise TableFailed(
                f"column {each.name} was {was} and is {each.type} now, "
                "and its earlier values are not known in the new type"
            )
        widens.append(each.name)
    if keep_lost:
        return pa.schema([*wanted, *(known.field(name) for name in lost)]), [], widens
    return wanted, lost, widens
