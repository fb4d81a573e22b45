"""What Spark's tasks get to know of a table before a batch, and what they return."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from ...change.arrow import arrow_type
from ...change.event import Column
from ...errors import HeadraceError, TableFailed
from .storage import Added, Folder

SEQUENCE = "_sequence"
VALID_FROM = "_valid_from"
VALID_TO = "_valid_to"
CURRENT = "_current"
_MOMENT = pa.timestamp("us", tz="UTC")
OWN_COLUMNS = {
    SEQUENCE: pa.int64(),
    VALID_FROM: _MOMENT,
    VALID_TO: _MOMENT,
    CURRENT: pa.bool_(),
}

_part_name = re.compile(r"(?:.*/)?part-(\d+)-(\d+)-[0-9a-f]{32}\.parquet").fullmatch


class TableRef(msgspec.Struct, frozen=True):
    """Which table of which source."""

    source: str
    schema: str
    table: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}"


class BucketFile(msgspec.Struct, frozen=True):
    """A file of a table: rows whose keys fall into one bucket of 2 ** level."""

    path: str
    size: int
    rows: int
    level: int  # -1: not one of ours, its rows may belong to any bucket
    bucket: int
    partition: tuple[tuple[str, str | None], ...] = ()  # values that all of its rows share

    @classmethod
    def of(
        cls, path: str, size: int, rows: int, partition: Mapping[str, str | None] | None = None
    ) -> "BucketFile":
        """The part behind a file's name."""
        found = _part_name(path)
        level, bucket = (int(found[1]), int(found[2])) if found else (-1, 0)
        return cls(path, size, rows, level, bucket, tuple((partition or {}).items()))


def part_name(level: int, bucket: int) -> str:
    """The beginning of a file's name."""
    return f"part-{level:02d}-{bucket:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """One table before a batch."""

    ref: TableRef
    connector: str  # whose types the columns have
    folder: Folder
    columns: tuple[Column, ...]  # of the source's table at the end of the batch
    schema: pa.Schema  # of the Delta table after the batch
    as_text: frozenset[str]  # columns kept as their exact text
    keep_history: bool
    level: int
    parts: tuple[BucketFile, ...]
    versions: frozenset[int]  # of the source's columns that may come
    applied: int  # changes up to this sequence are in the table already
    upto: int  # changes beyond it follow other columns, and are left for the next job; 0: none are
    together: bool = False  # all buckets in one task: a row that is not whole moves between them
    rewrite: bool = False  # every file, since a column is gone or has another type

    @property
    def key(self) -> tuple[Column, ...]:
        """The key columns; none: each row is its own."""
        return tuple(column for column in self.columns if column.key)

    def parts_of(self, bucket: int) -> tuple[BucketFile, ...]:
        """The files that a task of a bucket owns."""
        if self.together:
            return self.parts
        return tuple(part for part in self.parts if part.bucket == bucket)

    @property
    def buckets(self) -> range:
        """Every bucket that has a task of its own."""
        return range(1 if self.together else 1 << self.level)


def delta_schema(
    columns: Sequence[Column], as_text: frozenset[str], *, connector: str, keep_history: bool
) -> pa.Schema:
    """The columns of a Delta table: the source's, and our own."""
    taken = [column.name for column in columns if column.name in OWN_COLUMNS]
    if taken:
        raise TableFailed(
            f"the source has a column {taken[0]}, a name that Headrace uses for itself",
            hint="Rename the column, then run `headrace snapshot SOURCE TABLE`.",
        )
    types = [
        pa.string() if column.name in as_text else arrow_type(column.type, connector)
        for column in columns
    ]
    fields = [pa.field(column.name, kind) for column, kind in zip(columns, types, strict=True)]
    own = OWN_COLUMNS if keep_history else {SEQUENCE: OWN_COLUMNS[SEQUENCE]}
    return pa.schema(fields + [pa.field(name, kind) for name, kind in own.items()])


class VersionSummary(msgspec.Struct, kw_only=True):
    """What a task met of one version of a table's columns."""

    ref: TableRef
    connector: str
    version: int
    row_schema: str
    epoch: str
    first_sequence: int
    last_sequence: int
    changes: int
    size: int  # bytes of images
    emptied_at: int = 0  # the last TRUNCATE; 0: none
    moves: bool = False  # a row that is not whole changed its key
    failure: "TableFailure | None" = None


class TableFailure(msgspec.Struct, frozen=True):
    """Why a table cannot follow its source."""

    sequence: int
    reason: str
    hint: str = ""


# What a value or a column may do to those who were not made for it; an OSError is the storage's.
APPLY_ERRORS = (HeadraceError, pa.ArrowException, ValueError, TypeError, LookupError, OverflowError)


def failure_of(error: Exception, sequence: int) -> TableFailure:
    """Why a table cannot follow; what passes by itself is raised instead."""
    if isinstance(error, HeadraceError):
        if error.retry:
            raise error
        return TableFailure(sequence, str(error), error.hint)
    # Its text may show a value.
    hint = TableFailed.hint
    return TableFailure(sequence, f"a change cannot be applied ({type(error).__name__})", hint)


class BucketResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a task did to a bucket; nothing of it counts until it is committed."""

    bucket: int
    added: list[Added]
    removed: list[str]
    changes: int
