"""What Spark's tasks get to know of a table before a batch, and what they return."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa

from ...change.arrow import RESCUED, arrow_type
from ...change.event import Column
from ...change.path import table_path
from ...errors import HeadraceError, TableFailed
from ...transforms.rules import Selected
from .storage import Added, Folder
from .vectors import VectorRef

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


class TableRef(msgspec.Struct, frozen=True):
    """Which table of which source."""

    source: str
    schema: str
    table: str

    def __str__(self) -> str:
        return table_path(self.schema, self.table)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file in which a batch may find rows that it replaces."""

    path: str
    rows: int
    newest: int  # the highest `_sequence` in it
    low: object = None  # bounds of the first column of the key or the order; None: not known
    high: object = None
    nulls: bool = False  # whether that column may be null
    vector: VectorRef | None = None  # the rows that are dead already
    partition: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class CascadedPlace:
    """Where a batch has changes that follow from foreign keys, and that the log does not have."""

    folder: Folder  # of the sink
    token: str  # of these changes


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """One table before a batch."""

    ref: TableRef
    connector: str  # whose types the columns have
    folder: Folder
    columns: tuple[Column, ...]  # of the source's table at the end of the batch
    schema: pa.Schema  # of the Delta table
    files: tuple[PlannedFile, ...]
    versions: frozenset[int]  # of the source's columns that are applied
    after: int  # changes up to this sequence are in the table already, or do not matter
    upto: int  # changes beyond it follow other columns, and are left for the next job
    emptied: tuple[int, ...] = ()  # changes that empty the table, such as a TRUNCATE
    as_text: frozenset[str] = frozenset()  # columns kept as their exact text
    chosen_key: bool = False  # a person has said which columns the key is
    keep_history: bool = False
    appends: bool = False  # the batch has rows of one snapshot, and no other change
    together: bool = False  # all keys in one share: a row that is not whole moves between keys
    file_rows: int = 1 << 31  # at most in a file
    window_keys: int = 1 << 31  # that are applied at once
    order: tuple[str, ...] = ()  # columns by which the rows of a file are sorted
    partition_by: tuple[str, ...] = ()
    shape: Selected | None = None  # what rows become before they are stored
    computed: bool = False  # rows come from Spark, which may have put RESCUED into their images
    rescue: bool = False  # a value that its column cannot hold stops nothing
    has_rescued: bool = False  # RESCUED is there, and is not a column of the source
    whole_rows: bool = True  # old rows come whole, so several may have one key in a transaction
    cascaded: CascadedPlace | None = None  # changes of the table that are taken beside the log's

    @property
    def key(self) -> tuple[Column, ...]:
        """The key columns; none: each row is its own."""
        return tuple(column for column in self.columns if column.key)


def delta_schema(
    columns: Sequence[Column],
    as_text: frozenset[str],
    *,
    connector: str,
    keep_history: bool,
    has_rescued: bool = False,
) -> pa.Schema:
    """The columns of a Delta table: the source's, and our own."""
    own = OWN_COLUMNS if keep_history else {SEQUENCE: OWN_COLUMNS[SEQUENCE]}
    if has_rescued:
        own = {**own, RESCUED: pa.string()}
    reserved = {*OWN_COLUMNS, *own}
    taken = [column.name for column in columns if column.name in reserved]
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
    return pa.schema(fields + [pa.field(name, kind) for name, kind in own.items()])


@dataclass(slots=True, kw_only=True)
class VersionSummary:
    """What a batch has of one version of a table's columns."""

    ref: TableRef
    connector: str
    version: int
    columns: tuple[Column, ...]
    first_sequence: int
    last_sequence: int
    changes: int
    inputs: tuple[Column, ...] = ()  # of the source, where rows are computed from them
    comment: str | None = None  # of the table; None: neither it nor those of columns are known
    last_record: int = 0  # the last change of a row that is no row of a block
    snapshots: set[bytes] = field(default_factory=set)  # of which there are blocks
    emptied: list[int] = field(default_factory=list)  # every TRUNCATE, and DROP
    dropped: int = 0  # the last DROP: what comes after it is of another table of the name
    failure: "TableFailure | None" = None  # what the source could not read
    whole_rows: bool = True  # old rows may come whole: the table's replica identity is full
    cascades: bool = False  # its foreign keys change rows without a change event


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


class ShareResult(msgspec.Struct, kw_only=True):
    """What a task did to its share of a table; nothing of it counts until it is committed."""

    at: int  # which plan
    added: list[Added] = []
    dead: dict[str, bytes] = {}  # by file: the rows that are dead now, as a bitmap
    moves: bool = False  # a row that is not whole has changed its key: do it all in one share
    unfit: bool = False  # a value does not fit, and the table has no RESCUED yet: do it with one
    rescued: int = 0  # values whose text is in RESCUED
    failure: TableFailure | None = None


class ShareResults(msgspec.Struct, frozen=True):
    """What a task did to all tables."""

    tables: list[ShareResult]
