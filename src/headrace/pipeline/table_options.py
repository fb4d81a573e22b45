"""The options of `format("headrace.tables")`, read and checked whole.

They have the names of the settings of the `tables` sink, written as Spark writes options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import msgspec

from ..errors import ConfigError
from ..sinks.lake.storage import Folder
from ..sinks.tables.sink import Tables
from .checkpoint import writer_of
from .options import (
    Known,
    parsed,
    read_columns,
    read_flag,
    read_list,
    read_path,
    read_table,
    read_text,
)

_Columns = Mapping[str, tuple[str, ...]]
_columns_by_table = msgspec.json.Decoder(dict[str, tuple[str, ...]]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """Which tables, and how they are written or read; holds no secret, so it may be shown."""

    path: str = ""  # the folder of the tables, or of one that is read
    table: str = ""  # schema.table: this one alone
    chosen: tuple[str, ...] = ()  # columns that are read; none: all
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the sink
    adopt: bool = False  # take over tables that another query has written
    checkpoint: str = ""

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "TableOptions":
        """The options of a query or a job; a wrong one is refused by name."""
        values = parsed(given, _KNOWN, _SPARKS)
        own = {name: values.pop(name) for name in ("path", "table", "chosen", "adopt", "checkpoint")
               if name in values}  # fmt: skip
        values.pop("name", None)
        return cls(**own, settings=values)

    def of_catalog(self, columns: Sequence[str], place: str) -> "TableOptions":
        """The options for a table of Spark's catalog, which Spark reads with no options at all."""
        return self if self.path else replace(self, path=place, chosen=tuple(columns))

    def expect_reading(self) -> None:
        """Refuse what only a writer takes."""
        if self.settings or self.adopt:
            name = next(iter(self.settings), "adopt")
            raise ConfigError(f"the option {_option_of(name)} is for writing tables")

    @property
    def folder(self) -> Folder:
        """Where the tables lie."""
        self._expect_path()
        # What a storage must know to let somebody in comes from the environment: Spark shows
        # options in its plans.
        return Folder.of(self.path, {})

    @property
    def sink(self) -> Tables:
        """The sink that writes them."""
        if self.chosen:
            raise ConfigError("the option columns is for reading a table")
        self._expect_path()
        settings = {name: self._by_table(name, value) for name, value in self.settings.items()}
        return Tables(name=self.table or "tables", path=self.path, **settings)

    def _expect_path(self) -> None:
        if not self.path:
            raise ConfigError(
                "the option path is missing",
                hint="path is the folder of the tables, or an address such as s3://bucket/lake.",
            )

    def _by_table(self, name: str, value: Any) -> Any:
        """A setting of each table; columns without a table belong to the only one."""
        if name not in _BY_TABLE or isinstance(value, Mapping):
            return value
        if not self.table:
            raise ConfigError(
                f"the option {_option_of(name)} does not say whose columns they are",
                hint='Give the option table too, or JSON such as {"public.orders": ["id"]}.',
            )
        return {self.table: value}

    @property
    def stream_writer(self) -> str:
        """The name under which the tables know a query."""
        if not self.checkpoint:
            raise ConfigError(
                "the option checkpointLocation is missing: the tables know a query by it",
                hint='Add .option("checkpointLocation", "…") to the query.',
            )
        return writer_of(self.checkpoint)

    @property
    def batch_writer(self) -> str:
        """The name under which the tables know jobs, which have no checkpoint: all are one."""
        return f"write-{uuid5(NAMESPACE_URL, self.folder.uri)}"


def _option_of(field_name: str) -> str:
    return next(name for name, (field, _) in _KNOWN.items() if field == field_name)


def _folder(name: str, text: str) -> str:
    remote = "://" in text and not text.startswith("file:")
    return text.rstrip("/") if remote else read_path(name, text)


def _columns_of(name: str, text: str) -> _Columns | tuple[str, ...]:
    """Columns between commas, or by table, as JSON."""
    if not text.lstrip().startswith("{"):
        return read_columns(name, text)
    try:
        return _columns_by_table(text)
    except msgspec.DecodeError:
        raise ConfigError(
            f"the option {name} must be columns between commas, or JSON such as "
            '{"public.orders": ["id"]}'
        ) from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"the option {name} must be a number, not {text!r}") from None


def _word(*words: str) -> Any:
    def read(name: str, text: str) -> str:
        if text.lower() not in words:
            raise ConfigError(f"the option {name} must be {' or '.join(words)}, not {text!r}")
        return text.lower()

    return read


_BY_TABLE = ("keys", "cluster_by", "partition_by")
_SPARKS = frozenset(("queryName",))
_KNOWN: Known = {
    "path": ("path", _folder),
    "table": ("table", read_table),
    "columns": ("chosen", read_columns),
    "keys": ("keys", _columns_of),
    "keep": ("keep", _word("rows", "history")),
    "asText": ("as_text", read_list),
    "unfit": ("unfit", _word("rescue", "stop")),
    "deletes": ("deletes", _word("vectors", "rewrite")),
    "clusterBy": ("cluster_by", _columns_of),
    "partitionBy": ("partition_by", _columns_of),
    "fileMb": ("file_mb", _number),
    "vacuumHours": ("vacuum_hours", _number),
    "adopt": ("adopt", read_flag),
    "checkpointLocation": ("checkpoint", read_text),
    "queryName": ("name", read_text),
}
