"""Transforms that Spark computes: a statement that reads `changes`, or a function of DataFrames.

    changes of a table ─▶ typed rows ─▶ statement ─▶ images ─┐
           └─────────────── operations, keys ────────────────┴─▶ changes of the result

The statement sees each INSERT and UPDATE as the row that it left, and never a DELETE: which row
that takes away follows from the key. So the key must come out as it went in, and each row with the
`_sequence` of its change. A change whose row does not come out has taken the row away.
"""

from __future__ import annotations

import builtins
import importlib
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    IllegalArgumentException,
    NumberFormatException,
    PySparkException,
    PythonException,
    SparkRuntimeException,
)
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls them
from pyspark.sql.pandas.types import from_arrow_schema

from ..change.arrow import RESCUED, columns_of
from ..change.arrow.encode import CONNECTOR, declared
from ..change.event import Column, Table, bounded_comment
from ..errors import DecodeError, HeadraceError, TableFailed, own_error
from .computing import (
    HINT,
    LEAVING_OPS,
    OWN,
    RESULT,
    SEQUENCE,
    Computation,
    Encode,
    Heads,
    Merge,
    TypedRows,
    Unfit,
)
from .rules import TableTransform, Transforms

if TYPE_CHECKING:
    from pyspark.sql import Column as Expression
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_VIEW = "changes"
_COMMENT = "comment"  # in the metadata of a column, as Spark has it
# What a statement or a function may raise for some rows, or for all; the rest is Spark's own.
_OF_ROWS = (
    AnalysisException,
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    IllegalArgumentException,
    NumberFormatException,
    PythonException,
    SparkRuntimeException,
)
_RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception))\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedTable(Computation):
    """A table whose rows Spark computes."""

    rule: TableTransform

    @classmethod
    def of(
        cls,
        transforms: Transforms,
        table: Table,
        *,
        as_text: frozenset[str] = frozenset(),
        exact: bool = False,
        as_source: bool = False,
        unfit: Unfit = "null",
    ) -> ComputedTable | None:
        """A table that Spark computes; None: it has no such transform."""
        known = transforms.computed(table.schema, table.name)
        if known is None:
            return None
        place, rule = known
        where = f"{place}: {'sql' if rule.sql else 'function'}"
        return cls(
            table=table,
            place=where,
            as_text=as_text,
            exact=exact,
            as_source=as_source,
            unfit=unfit,
            rule=rule,
        )

    def result(self, rows: DataFrame) -> DataFrame:
        """What the statement or the function makes of rows; TableFailed: it does not fit them."""
        try:
            found = self._selected(rows) if self.rule.sql else self._called(rows)
        except HeadraceError:
            raise
        except PySparkException as error:
            raise self.failure(error) from None
        except Exception as error:  # noqa: BLE001  # it is the user's code
            # Its text may show a value.
            place = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{type(error).__name__} in {place.name}, line {place.lineno}"
            raise self.failed(f"{self.rule.function} raises {at}") from None
        self._expect_columns(found)
        return found

    def _selected(self, rows: DataFrame) -> DataFrame:
        rows.createOrReplaceTempView(_VIEW)
        return rows.sparkSession.sql(self.rule.sql)

    def _called(self, rows: DataFrame) -> DataFrame:
        found: Any = self._function()(rows)
        if not hasattr(found, "mapInArrow"):
            kind = type(found).__name__
            raise self.failed(f"{self.rule.function} returns {kind}, not a DataFrame")
        result: DataFrame = found
        return result

    def _function(self) -> Callable[[DataFrame], object]:
        module, _, name = self.rule.function.partition(":")
        try:
            found: Callable[[Any], object] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise self.failed(
                f"{self.rule.function} cannot be imported: {error}",
                hint="Install its package, or name its folder in PYTHONPATH, wherever the pipeline "
                "and Spark's workers run.",
            ) from error
        return found

    def _expect_columns(self, found: DataFrame) -> None:
        names = found.columns
        for name in (SEQUENCE, *self.key):
            if names.count(name) != 1:
                times = "twice in" if name in names else "missing from"
                raise self.failed(
                    f"the column {name} is {times} the result, which has: {', '.join(names)}",
                    hint=f"Select {name} as it is, once: by it, a row is known.",
                )
        if twice := [name for name in names if names.count(name) > 1]:
            raise self.failed(f"the column {twice[0]} is twice in the result")

    def columns(self, result: DataFrame) -> tuple[Column, ...]:
        """The columns that are stored, with types of `encode.CONNECTOR`."""
        types = {
            each.name: each.dataType.simpleString()
            for each in result.schema.fields
            if each.name not in OWN.names and not self._is_rescued(each.name)
        }
        try:
            columns = declared(types, self.key)
        except DecodeError as error:
            raise self.failed(str(error), hint=error.hint) from None
        # A function may set it, to anything.
        found = {each.name: each.metadata.get(_COMMENT) for each in result.schema.fields}
        comments = {name: bounded_comment(str(text)) for name, text in found.items() if text}
        return tuple(
            msgspec.structs.replace(each, comment=comments.get(each.name, "")) for each in columns
        )

    def _is_rescued(self, name: str) -> bool:
        """Whether a column of the result is no column of the table, but texts of unfit values."""
        return self.shows_rescued and name == RESCUED

    def rows(self, changes: DataFrame) -> DataFrame:
        """The rows that INSERTs and UPDATEs have left, as the statement sees them."""
        left = changes.where(F.col("op").isin(*LEAVING_OPS))
        task: Any = TypedRows(self)
        return left.mapInArrow(task, self._seen)

    def empty(self, spark: SparkSession) -> DataFrame:
        """The same without any row, to see what the statement makes of the columns."""
        seen = self._seen
        for column in self.table.columns:
            # Spark hands it on with a column that is selected as it is, and with no other.
            if column.comment and column.name in seen.names:
                seen[column.name].metadata = {_COMMENT: column.comment}
        return spark.createDataFrame([], seen)

    @property
    def _seen(self) -> StructType:
        return from_arrow_schema(self.typed, prefer_timestamp_ntz=True)

    def result_table(self, spark: SparkSession) -> Table:
        """The table as the statement makes it."""
        columns = self.columns(self.result(self.empty(spark)))
        connector = self.table.connector if self.as_source else CONNECTOR
        return msgspec.structs.replace(
            self.table, connector=connector, columns=columns, references=()
        )

    def changes(self, changes: DataFrame) -> DataFrame:
        """The changes of the table, all of their fields, as changes of the result."""
        try:
            return self._changes(changes)
        except PySparkException as error:
            raise self.failure(error) from None

    def _changes(self, changes: DataFrame) -> DataFrame:
        table = self.result_table(changes.sparkSession)
        result = self.result(self.rows(changes))
        rescued = [name for name in result.columns if self._is_rescued(name)]
        names = (*(column.name for column in table.columns), *rescued)
        # By number: mapInArrow finds no column that has a dot or a backtick in its name.
        stored = result.select(
            F.col(SEQUENCE).cast("bigint").alias(SEQUENCE),
            *(quoted(name).alias(f"c{at}") for at, name in enumerate(names)),
        )
        encode: Any = Encode(self, names)
        found = (
            stored.mapInArrow(encode, from_arrow_schema(RESULT))
            .groupBy("at")
            .agg(
                F.count("*").alias("images"),
                F.min("image").alias("image"),
                F.min("image_key").alias("image_key"),
            )
        )
        read, merge = (task(self, table) for task in (Heads, Merge))
        heads = changes.mapInArrow(read, changes.schema)
        joined = heads.join(found, F.col("sequence") == F.col("at"), "full_outer")
        return joined.mapInArrow(merge, changes.schema)

    def failure(self, error: PySparkException) -> TableFailed:
        """What to say of an error of Spark's; raises it if it is not the transform's."""
        if ours := own_error(str(error)):
            if isinstance(ours, TableFailed):
                return TableFailed(str(ours), hint=HINT)
            if isinstance(ours, DecodeError):
                return self.failed(str(ours))
            raise error
        raised = [found["kind"] for found in _RAISED.finditer(str(error))]
        if not isinstance(error, _OF_ROWS) or _passes(raised[-1:]):
            raise error
        # The text of most shows a value.
        if isinstance(error, AnalysisException):
            return self.failed(str(error).strip().partition("\n")[0])
        named = raised[-1] if isinstance(error, PythonException) and raised else ""
        return self.failed(named or error.getCondition() or type(error).__name__)


def _passes(raised: Sequence[str]) -> bool:
    """Whether what a function raised may be gone the next time, or on another machine."""
    kinds = [getattr(builtins, name, None) for name in raised]
    return any(
        isinstance(kind, type) and issubclass(kind, OSError | MemoryError | ImportError)
        for kind in kinds
    )


def quoted(name: str) -> Expression:
    """A column of any name."""
    escaped = name.replace("`", "``")
    return F.col(f"`{escaped}`")


def is_of(table: Table) -> Expression:
    """Whether a change is of a table."""
    place = (table.source, table.schema, table.name)
    names = ("source", "schema", "table")
    same = (F.col(name) == value for name, value in zip(names, place, strict=True))
    return F.coalesce(reduce(and_, same), F.lit(False))  # a message of the database has no table


@dataclass(frozen=True, slots=True)
class ComputedTables:
    """The tables among changes whose rows Spark computes."""

    tables: tuple[ComputedTable, ...] = ()
    first: int = 0  # sequence among the changes of any table
    last: int = 0

    @classmethod
    def among(
        cls, changes: DataFrame, transforms: Transforms, *, as_source: bool
    ) -> ComputedTables:
        """Look for them."""
        if not transforms.computes:
            return cls()
        newest = changes.where(F.col("row_schema").isNotNull()).groupBy("source", "schema", "table")
        found = newest.agg(
            F.max("connector").alias("connector"),
            F.max("schema_version").alias("version"),
            F.max_by("row_schema", "schema_version").alias("columns"),
            F.min("sequence").alias("first"),
            F.max("sequence").alias("last"),
        ).collect()
        tables = (
            ComputedTable.of(transforms, _table(row.asDict()), as_source=as_source) for row in found
        )
        return cls(
            tuple(filter(None, tables)),
            min((row["first"] for row in found), default=0),
            max((row["last"] for row in found), default=0),
        )


def _table(row: dict[str, Any]) -> Table:
    """A table as far as its changes describe it."""
    names = ("", "", row["schema"], row["table"])
    columns = columns_of(row["columns"])
    return Table(row["source"], row["connector"], *names, columns, version=row["version"])
