"""The settings of a SQLite source."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteSettings:
    """What the config says."""

    name: str
    path: Annotated[str, Meta(min_length=1)]
    tables: Annotated[tuple[str, ...], Meta(min_length=1)] = ("main.*",)
    snapshot: bool = True  # whether to copy the rows that are there already
    snapshot_rows_per_second: Annotated[int, Meta(ge=1)] | None = None  # None: as fast as can be
    poll_seconds: Annotated[float, Meta(gt=0)] = 0.02

    @property
    def host(self) -> str:
        """The database is a file on this machine."""
        return "localhost"
