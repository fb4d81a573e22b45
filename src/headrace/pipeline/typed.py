"""One table's changes with the table's own columns: what `option("table", …)` reads.

The columns are those of the newest version of the table when the query starts. Changes that were
made before it are read with the columns of their time, and shown with these; the first change
after it that has other columns ends the query.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from ..change import record
from ..change.arrow import RESCUED, arrow_schema, block_table, decode, keyless
from ..change.block import BlockRows
from ..change.event import Column, Table, same_columns
from ..errors import ColumnsChanged, ConfigError, DecodeError
from ..log import Piece

if TYPE_CHECKING:
    from .options import Options

CHANGE_TYPE, COMMIT_VERSION = "_change_type", "_commit_version"
COMMIT_TIMESTAMP, SEQUENCE, ABSENT = "_commit_timestamp", "_sequence", "_absent"

_OWN = pa.schema(
    [
        (CHANGE_TYPE, pa.string()),
        (COMMIT_VERSION, pa.int64()),
        (COMMIT_TIMESTAMP, pa.timestamp("us", tz="UTC")),
        (SEQUENCE, pa.int64()),
        (ABSENT, pa.list_(pa.string())),
    ]
)
_INSERTS = ("INSERT", "READ")


class _Ddl(msgspec.Struct):
    dropped: bool = False


_ddl = msgspec.json.Decoder(_Ddl).decode

# The image of a row after or before a change: its type in Spark's words, the image, the columns
# that it lacks.
_Shown = tuple[str, bytes | None, Sequence[str]]


@dataclass(frozen=True, slots=True)
class TypedTable:
    """A table as a query sees it from its start to its end."""

    table: Table  # the newest version
    as_text: frozenset[str] = frozenset()
    chosen: tuple[str, ...] = ()  # columns, ours included; none: all
    where: str = ""  # which changes: a condition of SQL on any of these columns

    @classmethod
    def versions(cls, options: Options, tables: Sequence[Table]) -> list[TypedTable]:
        """The table that the option names, version by version, among all that the log knows."""
        found = [
            table
            for table in tables
            if table.path == options.table and options.source in ("", table.source)
        ]
        if not found:
            raise ConfigError(f"the log has no table {options.table}{_among(tables)}")
        if several := sorted({table.source for table in found} - {found[0].source}):
            raise ConfigError(
                f"the sources {', '.join([found[0].source, *several])} have a table "
                f"{options.table}",
                hint="Name one of them in the option source.",
            )
        as_text = frozenset(options.as_text)
        versions = [cls(table, as_text, options.chosen, options.where) for table in found]
        versions[-1]._agree()
        return versions

    def _agree(self) -> None:
        names = [column.name for column in self.table.columns]
        if taken := set(names) & set(_OWN.names):
            raise ConfigError(
                f"the table {self.name} has a column {min(taken)}, a name that is needed here",
                hint="Leave out the option table, and read images instead.",
            )
        for option, given in (("columns", self.chosen), ("asText", self.as_text)):
            known = self._whole.names if option == "columns" else names
            if unknown := [name for name in given if name not in known]:
                raise ConfigError(
                    f"the option {option} names {unknown[0]!r}; there are: {', '.join(known)}"
                )
        if self.where:
            # Some of what does not fit shows only where there is a row.
            whole = self._whole
            self._passing(pa.table([pa.nulls(1, each.type) for each in whole], schema=whole))

    @property
    def name(self) -> str:
        """As the option names it."""
        return self.table.path

    @property
    def schema(self) -> pa.Schema:
        """The table's columns, then ours, as Delta's change feed has them; or those chosen."""
        whole = self._whole
        if not self.chosen:
            return whole
        return pa.schema([whole.field(name) for name in self.chosen if name in whole.names])

    @property
    def _whole(self) -> pa.Schema:
        own = self._of(self.table)
        # A column of the table's may have the name; then nothing is rescued.
        rescued = [] if RESCUED in own.names else [(RESCUED, pa.string())]
        return pa.schema([*own, *_OWN, *rescued])

    def _of(self, table: Table) -> pa.Schema:
        return arrow_schema(table.columns, as_text=self._as_text(table), connector=table.connector)

    def _as_text(self, table: Table) -> frozenset[str]:
        return self.as_text & {column.name for column in table.columns}

    def batches(
        self, parts: Iterator[Piece | BlockRows], tables: Mapping[int, Table]
    ) -> Iterator[pa.RecordBatch]:
        """The changes of the table among all that these parts have; runs in Spark's tasks."""
        for part in parts:
            if isinstance(part, BlockRows):
                yield from self._block(part, tables)
            else:
                yield from self._records(part, tables)

    def _block(self, rows: BlockRows, tables: Mapping[int, Table]) -> Iterator[pa.RecordBatch]:
        """Rows that a snapshot has read together."""
        head = rows.block.head
        table = tables[head.table]
        if self._is_of(table):
            self._expect_columns(table, rows.first)
            typed = block_table(
                rows,
                keyless(table.columns),
                connector=table.connector,
                as_text=self._as_text(table),
                rescue=True,
            )
            own: dict[str, Any] = {
                CHANGE_TYPE: pa.repeat("insert", rows.count),
                COMMIT_VERSION: pa.repeat(rows.first - rows.begin, rows.count),
                COMMIT_TIMESTAMP: pa.repeat(head.commit_time, rows.count),
                SEQUENCE: pa.array(np.arange(rows.first, rows.last + 1)),
                ABSENT: pa.repeat(pa.scalar([], pa.list_(pa.string())), rows.count),
            }
            yield from self._shown(typed, own)

    def _records(self, piece: Piece, tables: Mapping[int, Table]) -> Iterator[pa.RecordBatch]:
        runs: dict[int, list[tuple[int, tuple[Any, ...]]]] = defaultdict(list)
        for each in enumerate(record.rows(piece.records, piece.count), piece.first):
            runs[each[1][record.TABLE]].append(each)
        for version, changes in runs.items():
            table = tables[version] if version else None
            if table is None or not self._is_of(table):
                continue
            self._expect_columns(table, changes[0][0])
            own: dict[str, list[Any]] = {name: [] for name in _OWN.names}
            images: list[bytes | None] = []
            for sequence, row in changes:
                for kind, image, absent in _images(row, table):
                    own[CHANGE_TYPE].append(kind)
                    own[COMMIT_VERSION].append(sequence - row[record.ORDINAL] + 1)
                    own[COMMIT_TIMESTAMP].append(row[record.COMMIT_TIME])
                    own[SEQUENCE].append(sequence)
                    own[ABSENT].append(absent)
                    images.append(image)
            typed = decode(
                images,
                keyless(table.columns),
                connector=table.connector,
                as_text=self._as_text(table),
                rescue=True,
            )
            yield from self._shown(typed, own)

    def _shown(self, typed: pa.Table, own: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        # A condition may look at columns that are not shown.
        schema = self._whole if self.where else self.schema
        columns = []
        for field in schema:
            if field.name in own:
                values = own[field.name]
                if isinstance(values, list):
                    values = pa.array(values, _OWN.field(field.name).type)
                columns.append(values.cast(field.type))
            elif field.name in typed.column_names:
                columns.append(self._cast(typed[field.name], field))
            else:
                columns.append(pa.nulls(typed.num_rows, field.type))
        rows = pa.table(columns, schema=schema)
        if self.where:
            rows = rows.filter(self._passing(rows)).select(self.schema.names)
        yield from rows.to_batches()

    def _passing(self, rows: pa.Table) -> pa.BooleanArray:
        # Not at the top: the parser of SQL takes long to import, and few queries need it.
        from ..transforms.where import passes  # noqa: PLC0415

        try:
            return passes(self.where, rows)
        except ConfigError as error:
            raise ConfigError(f"the option where: {error}") from None

    def _cast(self, values: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
        try:
            return values.cast(field.type)
        except pa.ArrowException:
            # Arrow's own message would show the value.
            raise DecodeError(
                f"column {field.name!r} of {self.name} has an earlier value that {field.type} "
                "cannot hold",
                hint=f"Name {field.name!r} in the option asText, or start after the change of "
                "its type.",
            ) from None

    def _is_of(self, table: Table) -> bool:
        return (table.source, table.schema, table.name) == (
            self.table.source,
            self.table.schema,
            self.table.name,
        )

    def _expect_columns(self, table: Table, sequence: int) -> None:
        """Raise ColumnsChanged when changes begin to have other columns than the query."""
        if table.version > self.table.version and not same_columns(
            table.columns, self.table.columns
        ):
            raise ColumnsChanged(
                f"the columns of {self.name} have changed by sequence {sequence}: "
                f"{_difference(self.table.columns, table.columns)}",
                hint="Start the query again: it goes on where it was, with the new columns.",
            )


def _images(row: tuple[Any, ...], table: Table) -> Iterator[_Shown]:
    """What a change says of its row, in Spark's words."""
    op, before, after = row[record.OP], row[record.BEFORE], row[record.AFTER]
    absent = row[record.UNCHANGED]
    if op in _INSERTS:
        yield "insert", after, absent
    elif op == "DELETE":
        whole = row[record.BEFORE_KIND] == "full"
        yield "delete", before or row[record.KEY], () if whole else _beside_key(table)
    elif op == "UPDATE":
        if before is not None:  # all of it, or the key that the row has had
            whole = row[record.BEFORE_KIND] == "full"
            yield "update_preimage", before, () if whole else _beside_key(table)
        yield "update_postimage", after, absent
    elif op == "TRUNCATE" or (op == "SCHEMA" and _ddl(after or b"{}").dropped):
        yield "truncate", None, ()


def _beside_key(table: Table) -> tuple[str, ...]:
    return tuple(column.name for column in table.columns if not column.key)


def _difference(known: Sequence[Column], found: Sequence[Column]) -> str:
    """What differs, in names and types alone."""
    before = {column.name: column.type for column in known}
    after = {column.name: column.type for column in found}
    parts = [
        *(f"{name} {after[name]} is new" for name in after if name not in before),
        *(f"{name} is gone" for name in before if name not in after),
        *(
            f"{name} is {after[name]}, was {before[name]}"
            for name in after
            if name in before and after[name] != before[name]
        ),
    ]
    return ", ".join(parts) or "their order or the key"


def _among(tables: Sequence[Table]) -> str:
    names = sorted({table.path for table in tables if table.name})
    return f"; there are: {', '.join(names[:20])}" if names else ", and no other yet"
