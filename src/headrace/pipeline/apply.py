"""Delta tables kept equal to their source by a Spark job of one's own."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls them
from pyspark.sql.streaming.query import StreamingQuery

from ..change.arrow.frame import expect
from ..change.path import split_path
from ..errors import ConfigError, HeadraceError
from ..sinks import Takes
from ..sinks.tables.sink import Tables, TablesWriter
from .checkpoint import writer_of
from .query import Batches, Stored

logger = logging.getLogger(__name__)

EVERY_SECOND: Mapping[str, Any] = {"processingTime": "1 second"}


class Settings(TypedDict, total=False):
    """Further settings of the tables; see `Tables`."""

    keep: Literal["rows", "history"]
    as_text: tuple[str, ...]
    unfit: Literal["rescue", "stop"]
    deletes: Literal["vectors", "rewrite"]
    cluster_by: Mapping[str, tuple[str, ...]]
    partition_by: Mapping[str, tuple[str, ...]]
    file_mb: float
    vacuum_hours: float
    storage: Mapping[str, str]


class MoreSettings(Settings, total=False):
    """Further settings of the query."""

    adopt: bool  # take over tables that another query has written


def apply_changes(
    changes: DataFrame,
    *,
    into: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    table: str = "",
    keys: Sequence[str] | Mapping[str, Sequence[str]] = (),
    trigger: Mapping[str, Any] = EVERY_SECOND,
    **settings: Unpack[MoreSettings],
) -> StreamingQuery:
    """Start a query that keeps Delta tables equal to their source.

    `changes` is a stream with the columns of `format("headrace")`. Each table goes to
    `into`/schema/table; with `table` (schema.table) there is only that one. `keys` are the columns
    that identify the rows of that table if its own key does not, or such columns for several
    tables by name. `trigger` is what Spark's `DataStreamWriter.trigger` takes. A folder `into`
    belongs to one query: another one is refused with SinkFenced, unless `adopt` is set.

    A query goes on where its `checkpoint` is; every change is applied once, even if the checkpoint
    is lost. A table that cannot be followed any more is logged and left as it is, while the others
    go on: `Tables(name=…, path=into).failed_tables()` names them, with the reason.
    """
    adopt = settings.pop("adopt", False)
    more = cast("Settings", settings)
    sink = Tables(name=table or "tables", path=os.fspath(into), keys=_keys(keys, table), **more)
    _expect_columns(changes, sink.fields)
    batches = _ApplyBatches(sink, writer_of(checkpoint), adopt=adopt)
    if hasattr(changes.sparkSession, "sparkContext"):
        # What is wrong shows now, and not in a batch; with Spark Connect, only the server may be
        # able to reach the tables.
        batches.open()
    if table:
        changes = changes.where(_is_of(table))
    stream = changes.select(*sink.fields).writeStream.foreachBatch(batches)
    return stream.option("checkpointLocation", os.fspath(checkpoint)).trigger(**trigger).start()


class _ApplyBatches:
    """What Spark calls with each batch, perhaps on another machine: it can be pickled.

    Its errors say what to do, also in the text that Spark makes of them.
    """

    def __init__(self, sink: Tables, writer: str, *, adopt: bool) -> None:
        self._sink = sink
        self._writer = writer
        self._adopt = adopt
        self._batches: Batches | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None}

    def open(self) -> Batches:
        """Begin to write, where this process does that."""
        if self._batches is None:
            writer = TablesWriter(self._sink, self._writer, adopt=self._adopt, takes=Takes.ROWS)
            self._batches = Batches(writer, self._sink.name, _note)
        return self._batches

    def __call__(self, changes: DataFrame, batch_id: int) -> None:
        try:
            self.open()(changes, batch_id)
        except HeadraceError as error:
            if error.hint:
                error.add_note(error.hint)
            raise


def _note(stored: Stored) -> None:
    for failed in stored.failed_tables:
        logger.warning("table=%s failed=%s hint=%s", failed.table, failed.reason, failed.hint)


def _is_of(table: str) -> Column:
    schema, name = split_path(table)
    return (F.col("schema") == schema) & (F.col("table") == name)


def _expect_columns(changes: DataFrame, fields: Sequence[str]) -> None:
    if not changes.isStreaming:
        raise ConfigError(
            "the changes are no stream",
            hint="Read them with spark.readStream; the trigger {'availableNow': True} ends when "
            "all is applied.",
        )
    expect(changes.columns, fields)


def _keys(
    given: Sequence[str] | Mapping[str, Sequence[str]], table: str
) -> dict[str, tuple[str, ...]]:
    if isinstance(given, Mapping):
        return {name: tuple(columns) for name, columns in given.items()}
    if given and not table:
        raise ConfigError("keys without table: it is not clear whose columns they are")
    if isinstance(given, str):
        raise ConfigError(f"keys must be a list of columns, such as [{given!r}]")
    return {table: tuple(given)} if given else {}
