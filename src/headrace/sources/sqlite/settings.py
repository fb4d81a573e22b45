"""The settings of a SQLite source."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from ..redact import ColumnMask


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteSettings:
    """What the config says."""

    name: str
    path: Annotated[str, Meta(min_length=1)]
    tables: Annotated[tuple[str, ...], Meta(min_length=1)] = ("main.*",)
    # What never reaches the log: patterns of schema.table.column.
    exclude_columns: tuple[str, ...] = ()
    mask: Mapping[str, ColumnMask] = field(default_factory=dict)
    snapshot: bool = True  # whether to copy the rows that are there already
    snapshot_rows_per_second: Annotated[int, Meta(ge=1)] | None = None  # None: as fast as can be
    poll_seconds: Annotated[float, Meta(gt=0)] = 0.02
    # Where DDL may have rewritten rows: a new snapshot of that table, or the table stops.
    on_rewrite: Literal["snapshot", "stop"] = "snapshot"

    @property
    def host(self) -> str:
        """The database is a file on this machine."""
        return "localhost"
