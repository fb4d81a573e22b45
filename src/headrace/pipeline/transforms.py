"""Changes as DataFrames of rows, for whoever writes their own Spark job.

    rows            a table's typed columns, one row a change
    log_table       a table as the log knows it, for `rows` of a stream
    as_changelog    the same in Spark's words: _change_type, _commit_version, _commit_timestamp
    latest_per_key  what the changes of a batch add up to
    entities        what happened to entities: the events of whole transactions

Filters, explosions and choices are Column expressions. Images are read by Arrow tasks, with the
same code as the sinks, because Spark's JSON functions do not keep numbers: from_json gives
12345678901234567890.10 within a document as 1.2345678901234567E19, and -0 as 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls them
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type
from pyspark.sql.types import StringType, StructField, StructType

from ..change.arrow import RESCUED, arrow_schema, columns_of, decode, keyless
from ..change.arrow.frame import expect
from ..change.event import Column, Table, piece_begin
from ..change.path import split_path
from ..errors import ConfigError
from ..formats.entity import Entity
from ..formats.facts import Facts
from ..model import Model
from . import _entities
from ._latest import BUCKET, MOVED_FROM, PLACE, Latest, split
from .options import Options
from .remote import reading
from .typed import TypedTable

Json = Literal["string", "variant"]
Batches = Iterator[pa.RecordBatch]

_ROW_OPS = ("INSERT", "UPDATE", "DELETE", "READ")
_IMAGE = "_image"
_NO_FACTS = Facts()


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the images of a table become columns."""

    columns: tuple[Column, ...]
    connector: str
    as_text: frozenset[str]
    json: Json

    def __call__(self, batches: Batches) -> Batches:
        """Put the columns in place of the images; runs in Spark's tasks."""
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            typed = decode(
                rows[_IMAGE],
                keyless(self.columns),
                as_text=self.as_text,
                connector=self.connector,
                rescue=True,
            )
            if RESCUED not in typed.column_names:
                typed = typed.append_column(RESCUED, pa.nulls(typed.num_rows, pa.string()))
            rows = rows.drop_columns([_IMAGE])
            arrays = [*rows.columns, *typed.columns]
            yield from pa.table(
                arrays, names=[*rows.column_names, *typed.column_names]
            ).to_batches()

    def typed(self, images: DataFrame) -> DataFrame:
        """The DataFrame with a column for each of the table's, instead of its images."""
        fields = [field for field in images.schema.fields if field.name != _IMAGE]
        typed = arrow_schema(self.columns, as_text=self.as_text, connector=self.connector)
        for field in typed:
            spark_type = from_arrow_type(field.type, prefer_timestamp_ntz=True)
            fields.append(StructField(field.name, spark_type))
        if RESCUED not in typed.names:
            fields.append(StructField(RESCUED, StringType()))
        table = images.mapInArrow(self, StructType(fields))
        if self.json == "string":
            return table
        documents = [c.name for c in self.columns if c.type in ("json", "jsonb")]
        return table.withColumns({name: _variant(name) for name in documents})


def log_table(name: str, **options: str) -> Table:
    """A table as the log knows it now; the options are those of `format("headrace")`."""
    given = Options.read({**options, "table": name})
    return TypedTable.versions(given, reading(given).tables())[-1].table


def rows(
    changes: DataFrame,
    table: Table | str,
    *,
    columns: Sequence[Column] = (),
    as_text: frozenset[str] = frozenset(),
    json: Json = "string",
    connector: str = "postgres",
) -> DataFrame:
    """One row for each change of a table's rows: `_sequence`, `_op`, `_commit_timestamp`, `_absent`
    and the table's columns.

    `table` is `schema.table`, or a table as the log knows it (`log_table`), which a stream needs.
    Its columns are those of its last change in the batch, unless they are given as `columns`, whose
    types are then `connector`'s. The values are the new ones, for DELETE the old ones as far as
    the source sent them; `_absent` names the columns that were not sent, which is not null. The
    types are those of `headrace.change.arrow.arrow_type`; a value that its type cannot hold is
    null, and the last column, `_rescued`, has its text: a JSON object of such texts by column.
    Columns that `as_text` names are text, with every value as it was.
    """
    known = _known(changes, table, columns, connector)
    image = F.when(F.col("op") == "DELETE", _old_image()).otherwise(F.col("after"))
    images = _of_table(changes, table).select(
        F.col("sequence").alias("_sequence"),
        F.col("op").alias("_op"),
        F.col("transaction.commit_time").alias("_commit_timestamp"),
        F.col("unchanged").alias("_absent"),
        image.alias(_IMAGE),
    )
    return _Shape(*known, as_text, json).typed(images)


def as_changelog(
    changes: DataFrame,
    table: Table | str,
    *,
    columns: Sequence[Column] = (),
    as_text: frozenset[str] = frozenset(),
    json: Json = "string",
    connector: str = "postgres",
) -> DataFrame:
    """A table's changes in Spark's words: `_change_type`, `_commit_version`, `_commit_timestamp`.

    A READ is an insert. An UPDATE gives an update_preimage where the source sent the old row, or
    the key that it had if that is another, and an update_postimage always. `_commit_version` is
    the sequence of the first change of the transaction: all its changes share it, and it grows in
    commit order. `_sequence` tells the changes of a transaction apart; `_absent` and the rest are
    as in `rows`.
    """
    known = _known(changes, table, columns, connector)
    images = _of_table(changes, table).select(
        F.col("sequence").alias("_sequence"),
        (F.col("sequence") - F.col("transaction.ordinal") + 1).alias("_commit_version"),
        F.col("transaction.commit_time").alias("_commit_timestamp"),
        F.inline(_change_types([column.name for column in known[0] if not column.key])),
    )
    return _Shape(*known, as_text, json).typed(images)


def latest_per_key(changes: DataFrame) -> DataFrame:
    """The last change of each key, with as many of its absent columns as earlier ones have.

    Columns that an UPDATE lacks come from the newest earlier change of the same row; what no
    change has stays in `unchanged`. An UPDATE that moves a row to another key also leaves a DELETE
    of the old key, and takes absent columns from there. The last TRUNCATE of a table stays, and
    nothing before it does. Changes of tables without a key all stay; SCHEMA and MESSAGE go.

    For batches, as in foreachBatch: it reads `changes` twice, so persist what is costly to read.
    A table some of whose rows moved without being whole is folded by one task, the others by key.
    """
    schema = changes.schema
    parts = changes.where(F.col("op").isin(*_ROW_OPS, "TRUNCATE")).mapInArrow(
        split, StructType([*schema.fields, StructField(MOVED_FROM, schema["key"].dataType)])
    )
    emptied, together = F.col("_emptied"), F.col("_together")
    placed = (
        _joined(parts, _about_tables(parts))
        .where(emptied.isNull() | (F.col("sequence") >= emptied))
        .withColumn(BUCKET, F.when(together, F.lit(0)).otherwise(F.xxhash64("key")))
        .drop("_emptied", "_together")
        .repartition(*PLACE, BUCKET)
    )
    return placed.mapInArrow(Latest(), schema)


def entities(changes: DataFrame, model: Model, facts: Facts = _NO_FACTS) -> DataFrame:
    """What happened to entities: an event a row, as JSON text and with columns to look for it.

    `changes` is a batch or a stream with the columns of `format("headrace")`, in any order. What
    was left out of a transaction before is not in its events, so choose tables and tenants
    from what this gives. A transaction of more than 100,000 changes is taken in pieces of so many.
    """
    expect(changes.columns, _entities.FIELDS)
    begin = piece_begin(F.col("sequence"), F.col("transaction.ordinal"))
    together = changes.select(*_entities.FIELDS).repartition("epoch", begin)
    # Spark sorts more than a task's memory holds, but it does not sort streams.
    ordered = not changes.isStreaming
    if ordered:
        together = together.sortWithinPartitions(*_entities.IN_ORDER)
    task = _entities.Render(Entity(model, facts), ordered)
    return together.mapInArrow(task, from_arrow_schema(_entities.SCHEMA))


def _about_tables(parts: DataFrame) -> DataFrame:
    """By table: the sequence of its last TRUNCATE, and whether rows moved that are not whole."""
    truncate = F.when(F.col("op") == "TRUNCATE", F.col("sequence"))
    moved = F.col(MOVED_FROM).isNotNull() & (F.size("unchanged") > 0)
    return parts.groupBy(*PLACE).agg(
        F.max(truncate).alias("_emptied"), F.bool_or(moved).alias("_together")
    )


def _joined(parts: DataFrame, about: DataFrame) -> DataFrame:
    about = about.withColumnsRenamed({name: f"_{name}" for name in PLACE})
    same = [F.col(name).eqNullSafe(F.col(f"_{name}")) for name in PLACE]
    joined = parts.join(F.broadcast(about), same, "left")
    return joined.drop(*(f"_{name}" for name in PLACE))


def _of_table(changes: DataFrame, table: Table | str) -> DataFrame:
    row = F.col("op").isin(*_ROW_OPS)
    if isinstance(table, str):
        schema, name = split_path(table)
        return changes.where(row & (F.col("schema") == schema) & (F.col("table") == name))
    there = (F.col("source") == table.source) & (F.col("schema") == table.schema)
    return changes.where(row & there & (F.col("table") == table.name))


def _known(
    changes: DataFrame, table: Table | str, columns: Sequence[Column], connector: str
) -> tuple[tuple[Column, ...], str]:
    """The columns of a table, and whose types they have."""
    if not isinstance(table, str):
        return tuple(columns) or table.columns, table.connector
    if columns:
        return tuple(columns), connector
    if changes.isStreaming:
        raise ConfigError(
            f"the columns of {table} are not known: a stream has no last change",
            hint='Read it with option("table", …), which brings them, or name it by '
            "`log_table(table, path=…)`.",
        )
    newest = _of_table(changes, table).select(
        F.max_by("row_schema", "sequence").alias("row_schema"),
        F.max_by("connector", "sequence").alias("connector"),
    )
    found = newest.first()
    if found is None or found["row_schema"] is None:
        raise ConfigError(f"no change of {table} is here to tell its columns")
    return columns_of(found["row_schema"]), found["connector"]


def _old_image() -> Expression:
    return F.coalesce("before", "key")


def _change_types(beside_key: Sequence[str]) -> Expression:
    """What a change says in Spark's words, with the image of each."""

    def image_of(change_type: str, image: Expression, absent: Expression) -> Expression:
        return F.struct(
            F.lit(change_type).alias("_change_type"),
            absent.alias("_absent"),
            image.alias(_IMAGE),
        )

    after, unchanged = F.col("after"), F.col("unchanged")
    none = F.array().cast("array<string>")
    updated = image_of("update_postimage", after, unchanged)
    rest = F.array(*map(F.lit, beside_key)).cast("array<string>")
    lacking = F.when(F.col("before_kind") == "full", none).otherwise(rest)
    return (
        F.when(F.col("op") == "DELETE", F.array(image_of("delete", _old_image(), unchanged)))
        .when(F.col("op") != "UPDATE", F.array(image_of("insert", after, unchanged)))
        .when(F.col("before").isNull(), F.array(updated))
        .otherwise(F.array(image_of("update_preimage", F.col("before"), lacking), updated))
    )


def _variant(name: str) -> Expression:
    # parse_json would show the document in its error.
    text, parsed = F.col(f"`{name}`"), F.try_parse_json(F.col(f"`{name}`"))
    refused = F.raise_error(F.lit(f"a document in column {name!r} has no place in a variant"))
    return F.when(text.isNotNull() & parsed.isNull(), refused).otherwise(parsed)
