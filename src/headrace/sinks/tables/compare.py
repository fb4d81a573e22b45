"""Two Delta tables compared row by row in Spark's tasks: the same keys, the same values.

    files of both ─▶ tasks: a hash of each key and of each row, in files by parts of the keys
                     tasks: a part of the keys each, of both sides ─▶ mismatched keys
                     tasks: rows of mismatched keys ─▶ their keys as text, a hash of each value

Only hashes are stored, and a part of the keys at a time is in memory, so that a comparison of any
size needs little. Values are hashed by their bytes: -0.0 is not 0.0, and 1.10 is not 1.1 of
another scale. A difference is not seen when two rows of one key have the same hash of 64 bits.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ...change.arrow import RESCUED, rescued_under, widened
from ..lake import vectors
from ..lake.deltalog import DataFile, TableState
from ..lake.plan import CURRENT, OWN_COLUMNS
from ..lake.storage import Folder
from ..results import result, results
from .codes import part_of, row_codes, value_codes
from .keys import Numbers, key_codes, row_numbers
from .parquet import PAST, kind
from .target import KEY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMED = 1000  # keys at most that are named of a table

_BATCH_ROWS = 65_536
_PART_ROWS = 500_000  # of a part of the keys, both sides together
_HELD_ROWS = 1_000_000  # whose hashes a task holds before it stores them
_WANTED, _FOUND = 0, 1  # the two sides
_HASHES = np.dtype([("key", "<i8"), ("check", "<i8"), ("row", "<i8")])
_FILES_OF_TASK = 64
_MOST_TASKS = 1000


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table at a version."""

    folder: Folder
    state: TableState

    @property
    def files(self) -> list[DataFile]:
        """The files that have rows of now."""
        return [file for file in self.state.files.values() if kind(file.path) != PAST]

    @property
    def rows(self) -> int:
        """How many rows there are at most: some of another writer may be past."""
        return sum(file.live for file in self.files)


@dataclass(frozen=True, slots=True)
class TablePair:
    """The table as it should be, and as it is; None: there is none."""

    wanted: StoredTable | None
    found: StoredTable | None

    @property
    def key(self) -> tuple[str, ...]:
        """The key's columns; none: rows are compared as a whole, and counted."""
        known = self.wanted or self.found
        assert known is not None
        names = msgspec.json.decode(known.state.metadata.configuration.get(KEY, "[]"))
        there = [set(each.state.schema.names) for each in (self.wanted, self.found) if each]
        return tuple(names) if all(set(names) <= each for each in there) else ()


class RowDifference(msgspec.Struct, frozen=True):
    """A row that is not the same in both tables."""

    key: tuple[str, ...]  # values as text; none: the table has no key
    missing: bool = False  # it is not in the table
    surplus: bool = False  # only the table has it
    repeated: bool = False  # the table has it more than once
    columns: tuple[str, ...] = ()  # whose values differ


class ComparedTables(msgspec.Struct, frozen=True):
    """What a comparison of one pair has found; a row is counted once."""

    missing: int = 0
    surplus: int = 0
    repeated: int = 0
    differing: int = 0
    examples: tuple[RowDifference, ...] = ()  # some of them, `NAMED` at most

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.missing or self.surplus or self.repeated or self.differing)


def compare(spark: SparkSession, pairs: Sequence[TablePair], folder: Path) -> list[ComparedTables]:
    """Compare each pair; `folder` is of this machine, and takes what tasks store meanwhile."""
    views = [_View.of(pair) for pair in pairs]
    found = _all_mismatches(spark, _stored_hashes(spark, views, folder))
    return [_compared(spark, view, found[at]) for at, view in enumerate(views)]


# --- which rows there are ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Side:
    """The rows of one table, with the columns in which it is compared."""

    folder: Folder
    files: tuple[DataFile, ...]
    schema: pa.Schema  # of the table; those of some columns as both are compared in
    past: bool = False  # it has columns that are not compared, and RESCUED may have texts of them

    def rows(self, file: DataFile) -> Iterator[pa.Table]:
        """The rows of a file that count, some thousands at a time."""
        dead = vectors.read(self.folder, file.vector) if file.vector else BitMap()
        gone = row_numbers(dead)
        with self.folder.open(file.path) as parquet:
            there = [name for name in parquet.schema_arrow.names if name in self._read]
            begin = 0
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=there, use_threads=False):
                alive = np.ones(batch.num_rows, dtype=np.bool_)
                first, last = np.searchsorted(gone, [begin, begin + batch.num_rows])
                alive[gone[first:last] - begin] = False
                begin += batch.num_rows
                rows = pa.Table.from_batches([batch])
                if CURRENT in rows.column_names:
                    alive &= pc.fill_null(rows[CURRENT], False).to_numpy()
                yield self._conformed(
                    rows if alive.all() else rows.filter(pa.array(alive)), file.partition
                )

    @property
    def _read(self) -> set[str]:
        return {*self.schema.names, CURRENT}

    def _conformed(self, rows: pa.Table, partition: Sequence[tuple[str, str | None]]) -> pa.Table:
        """With null for what a file does not have."""
        shared, columns = dict(partition), []
        for field in self.schema:
            if field.name in shared:
                value = pa.scalar(shared[field.name], pa.string()).cast(field.type)
                columns.append(pa.repeat(value, rows.num_rows))
            elif field.name in rows.column_names:
                columns.append(_as(rows[field.name], field.type))
            else:
                columns.append(pa.nulls(rows.num_rows, field.type))
            if field.name == RESCUED and self.past:
                kept = {name: name for name in self.schema.names}
                columns[-1] = rescued_under(columns[-1], kept)
        return pa.table(columns, names=self.schema.names)


@dataclass(frozen=True, slots=True)
class _View:
    """A pair as it is compared."""

    sides: tuple[_Side | None, _Side | None]
    key: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, pair: TablePair) -> _View:
        tables = (pair.wanted, pair.found)
        schemas = [each.state.schema if each else pa.schema([]) for each in tables]
        past = _past_columns(pair)
        names = dict.fromkeys(name for schema in schemas for name in schema.names)
        columns = tuple(name for name in names if name not in OWN_COLUMNS and name not in past)
        types = {name: _common(name, *schemas) for name in columns}
        sides = []
        for table, schema in zip(tables, schemas, strict=True):
            wanted = pa.schema([(name, _type(types[name], schema, name)) for name in columns])
            side = _Side(table.folder, tuple(table.files), wanted, bool(past)) if table else None
            sides.append(side)
        return cls((sides[0], sides[1]), pair.key, columns)


def _past_columns(pair: TablePair) -> set[str]:
    """The columns that a table has kept for its history, and that its source has not any more."""
    if not pair.wanted or not pair.found or CURRENT not in pair.found.state.schema.names:
        return set()
    return {*pair.found.state.schema.names} - {*pair.wanted.state.schema.names, RESCUED}


def _common(name: str, wanted: pa.Schema, found: pa.Schema) -> pa.DataType | None:
    """The type in which a column is compared; None: each in its own."""
    types = [schema.field(name).type for schema in (wanted, found) if name in schema.names]
    if len(types) == 1 or types[0] == types[1]:
        return types[0]
    if any(map(pa.types.is_nested, types)):
        return None
    if widened(types[1], types[0]):
        return types[0]
    return types[1] if widened(types[0], types[1]) else pa.string()


def _type(common: pa.DataType | None, schema: pa.Schema, name: str) -> pa.DataType:
    return schema.field(name).type if common is None and name in schema.names else common


def _as(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return column if column.type == kind else column.cast(kind)


# --- hashes --------------------------------------------------------------------------------------


class _HashRun(msgspec.Struct, frozen=True):
    """Hashes of one side of a pair and one part of the keys, next to each other in a file."""

    at: int  # which pair
    side: int
    part: int
    path: str
    first: int
    count: int

    def read(self) -> Any:
        """Load them."""
        offset = self.first * _HASHES.itemsize
        return np.fromfile(self.path, _HASHES, self.count, offset=offset)


class _HashRuns(msgspec.Struct, frozen=True):
    stored: list[_HashRun]


def _stored_hashes(spark: SparkSession, views: Sequence[_View], folder: Path) -> list[_HashRun]:
    """Store hashes of the key and the values of each row of both sides."""
    files = [
        _Work(at, side, file)
        for at, view in enumerate(views)
        for side, each in enumerate(view.sides)
        for file in (each.files if each else ())
    ]
    shares = _divided(files, 4 * spark.sparkContext.defaultParallelism)
    rows = [sum(each.file.live for each in files if each.at == at) for at in range(len(views))]
    parts = tuple(max(each // _PART_ROWS, 1) for each in rows)
    task = _Hashing(tuple(views), tuple(shares), parts, str(folder))
    frame = spark.range(len(shares), numPartitions=max(len(shares), 1))
    return [one for each in results(frame, task, _HashRuns) for one in each.stored]


@dataclass(frozen=True, slots=True)
class _Work:
    at: int  # which pair
    side: int
    file: DataFile


def _divided(files: Sequence[_Work], least: int) -> list[tuple[_Work, ...]]:
    """Files for tasks that take about as long as each other."""
    count = max(min(len(files), least), -(-len(files) // _FILES_OF_TASK))
    shares: list[list[_Work]] = [[] for _ in range(count)]
    for number, work in enumerate(sorted(files, key=lambda each: -each.file.size)):
        shares[number % count].append(work)
    return [tuple(share) for share in shares]


@dataclass(frozen=True, slots=True)
class _Hashing:
    """Hashes the rows of some shares of the files, in tasks."""

    views: tuple[_View, ...]
    shares: tuple[tuple[_Work, ...], ...]
    parts: tuple[int, ...]  # into which the keys of each pair are divided
    folder: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (each for batch in batches for each in batch["id"].to_pylist()):
            # A file of its own, also when a task is repeated: what it has returned counts.
            path = f"{self.folder}/hashes-{secrets.token_hex(8)}"
            yield result(_HashRuns(list(self._stored(self.shares[number], path))))

    def _stored(self, share: Sequence[_Work], path: str) -> Iterator[_HashRun]:
        begin = 0
        with open(path, "wb") as file:
            for work, hashes in self._gathered(share):
                parts = part_of(hashes["key"], self.parts[work.at])
                order = np.argsort(parts, kind="stable")
                hashes[order].tofile(file)
                for part, count in zip(*np.unique(parts, return_counts=True), strict=True):
                    yield _HashRun(work.at, work.side, int(part), path, begin, int(count))
                    begin += int(count)

    def _gathered(self, share: Sequence[_Work]) -> Iterator[tuple[_Work, Any]]:
        """The hashes of rows of one side of a pair, many at a time."""
        for work in share:
            view = self.views[work.at]
            side = view.sides[work.side]
            assert side is not None
            held: list[Any] = []
            for rows in side.rows(work.file):
                held.append(_row_hashes(rows, view.key))
                if sum(map(len, held)) >= _HELD_ROWS:
                    yield work, np.concatenate(held)
                    held = []
            if held:
                yield work, np.concatenate(held)


def _row_hashes(rows: pa.Table, key: Sequence[str]) -> Any:
    found = np.empty(rows.num_rows, dtype=_HASHES)
    (found["key"], found["check"]), found["row"] = row_codes(rows, key)
    return found


# --- mismatches ----------------------------------------------------------------------------------


class _MismatchedKey(msgspec.Struct, frozen=True):
    key: int
    check: int
    wanted: int
    found: int


class _Mismatches(msgspec.Struct):
    """The keys of a pair that are not once on either side, with the same values."""

    at: int
    missing: int = 0
    surplus: int = 0
    repeated: int = 0
    differing: int = 0
    some: list[_MismatchedKey] = []

    def add(self, other: _Mismatches) -> None:
        """Take those of another part of the keys."""
        self.missing += other.missing
        self.surplus += other.surplus
        self.repeated += other.repeated
        self.differing += other.differing
        self.some = (self.some + other.some)[:NAMED]


def _all_mismatches(spark: SparkSession, stored: Sequence[_HashRun]) -> Mapping[int, _Mismatches]:
    """What differs, by pair."""
    parts: dict[tuple[int, int], list[_HashRun]] = defaultdict(list)
    for each in stored:
        parts[each.at, each.part].append(each)
    task = _Comparing(tuple(map(tuple, parts.values())))
    frame = spark.range(len(parts), numPartitions=max(min(len(parts), _MOST_TASKS), 1))
    found: dict[int, _Mismatches] = {}
    for mismatch in results(frame, task, _Mismatches):
        found.setdefault(mismatch.at, _Mismatches(mismatch.at)).add(mismatch)
    return defaultdict(lambda: _Mismatches(0), found)


@dataclass(frozen=True, slots=True)
class _Comparing:
    """Compares some parts of the keys, in tasks."""

    parts: tuple[tuple[_HashRun, ...], ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (each for batch in batches for each in batch["id"].to_pylist()):
            yield result(mismatches(self.parts[number]))


def mismatches(stored: Sequence[_HashRun]) -> _Mismatches:
    """What differs in a part of the keys of a pair."""
    read = [each.read() for each in stored]
    hashes = np.concatenate(read)
    side = np.repeat([each.side for each in stored], [len(each) for each in read])
    order = np.lexsort((hashes["check"], hashes["key"]))
    hashes, side = hashes[order], side[order]
    keys, checks = hashes["key"], hashes["check"]
    fresh = np.ones(len(hashes), dtype=np.bool_)
    fresh[1:] = (keys[1:] != keys[:-1]) | (checks[1:] != checks[:-1])
    begins = np.flatnonzero(fresh)
    found = np.add.reduceat(side, begins)
    wanted = np.diff(begins, append=len(hashes)) - found
    # Rows without a key have no values beside it, and may come several times.
    values = np.bitwise_xor.reduceat(hashes["row"], begins)
    differ = np.flatnonzero((wanted != found) | (values != 0))
    more = np.maximum(found[differ] - wanted[differ], 0)
    alone = wanted[differ] == 0
    return _Mismatches(
        stored[0].at,
        missing=int(np.maximum(wanted[differ] - found[differ], 0).sum()),
        surplus=int(more[alone].sum()),
        repeated=int(more[~alone].sum()),
        differing=int((wanted[differ] == found[differ]).sum()),
        some=[
            _MismatchedKey(
                int(keys[begins[at]]), int(checks[begins[at]]), int(wanted[at]), int(found[at])
            )
            for at in differ[:NAMED].tolist()
        ],
    )


class _MismatchedRow(msgspec.Struct, frozen=True):
    """A row of a mismatched key: its values as hashes, since they may be nobody's to see."""

    key: int
    check: int
    side: int
    text: tuple[str, ...]
    values: list[int]


class _MismatchedRows(msgspec.Struct, frozen=True):
    rows: list[_MismatchedRow]


def _compared(spark: SparkSession, view: _View, mismatch: _Mismatches) -> ComparedTables:
    """What a pair comes to, with the names of what differs."""
    if not mismatch.some:
        return ComparedTables()
    rows: dict[tuple[int, int], list[_MismatchedRow]] = defaultdict(list)
    if view.key:
        for each in _mismatched_rows(spark, view, mismatch.some):
            rows[each.key, each.check].append(each)
    named = [_difference(view, each, rows[each.key, each.check]) for each in mismatch.some]
    return ComparedTables(
        missing=mismatch.missing,
        surplus=mismatch.surplus,
        repeated=mismatch.repeated,
        differing=mismatch.differing,
        examples=tuple(sorted(named, key=lambda each: (len(each.key), each.key))),
    )


def _difference(
    view: _View, mismatch: _MismatchedKey, rows: Sequence[_MismatchedRow]
) -> RowDifference:
    text = rows[0].text if rows else ()
    sides: list[list[int]] = [
        next((each.values for each in rows if each.side == side), []) for side in (_WANTED, _FOUND)
    ]
    columns = [name for name, one, other in zip(view.columns, *sides, strict=False) if one != other]
    return RowDifference(
        text,
        missing=mismatch.found < mismatch.wanted,
        surplus=mismatch.wanted == 0,
        repeated=0 < mismatch.wanted < mismatch.found,
        columns=tuple(columns),
    )


def _mismatched_rows(
    spark: SparkSession, view: _View, mismatch: Sequence[_MismatchedKey]
) -> Iterator[_MismatchedRow]:
    files = [
        _Work(0, side, file)
        for side, each in enumerate(view.sides)
        for file in (each.files if each else ())
    ]
    shares = _divided(files, 4 * spark.sparkContext.defaultParallelism)
    keys = np.array(sorted(each.key for each in mismatch), dtype=np.int64)
    task = _Naming(view, tuple(shares), keys)
    frame = spark.range(len(shares), numPartitions=max(len(shares), 1))
    for each in results(frame, task, _MismatchedRows):
        yield from each.rows


@dataclass(frozen=True, slots=True)
class _Naming:
    """Looks for the rows of some keys."""

    view: _View
    shares: tuple[tuple[_Work, ...], ...]
    keys: Numbers

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (each for batch in batches for each in batch["id"].to_pylist()):
            for work in self.shares[number]:
                side = self.view.sides[work.side]
                assert side is not None
                found = [row for rows in side.rows(work.file) for row in self._named(work, rows)]
                if found:
                    yield result(_MismatchedRows(found))

    def _named(self, work: _Work, rows: pa.Table) -> Iterator[_MismatchedRow]:
        codes = key_codes([rows[name] for name in self.view.key], exact=False)
        assert codes.check is not None
        chosen = np.flatnonzero(np.isin(codes.codes, self.keys))
        if not len(chosen):
            return
        some = rows.take(pa.array(chosen))
        values = list(value_codes(some).values())
        texts = [_texts(some[name]) for name in self.view.key]
        for at, place in enumerate(chosen.tolist()):
            yield _MismatchedRow(
                int(codes.codes[place]),
                int(codes.check[place]),
                work.side,
                tuple(text[at] for text in texts),
                [int(each[at].view(np.int64)) for each in values],
            )


def _texts(column: pa.ChunkedArray) -> list[str]:
    if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
        return [str(each) for each in column.to_pylist()]
    return cast("list[str]", pc.fill_null(column.cast(pa.string()), "null").to_pylist())
