"""The settings of a PostgreSQL source that is captured by triggers and an event table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from ...errors import ConfigError
from ...secret import Secret
from ..postgres.address import Address, check_url, host_of
from ..postgres.catalog import matches
from ..redact import ColumnMask
from .outbox import Outbox

SchemaName = Annotated[str, Meta(pattern="^[a-z_][a-z0-9_]{0,40}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresEventsSettings:
    """What the config says."""

    name: str
    url: Secret
    tables: Annotated[tuple[str, ...], Meta(min_length=1)] = ("public.*",)
    # What never reaches the log: patterns of schema.table.column.
    exclude_columns: tuple[str, ...] = ()
    mask: Mapping[str, ColumnMask] = field(default_factory=dict)
    schema: SchemaName = "headrace"  # where the event table and its functions are
    install: bool = True  # whether to put triggers on tables that have none
    trim: bool = True  # whether events are removed once the log has them
    snapshot: bool = True  # whether to read the rows that are there already
    snapshot_workers: Annotated[int, Meta(ge=1, le=64)] = 2
    snapshot_rows_per_second: Annotated[int, Meta(ge=1)] | None = None  # None: as fast as can be
    poll_seconds: Annotated[float, Meta(gt=0)] = 0.2
    # What to do with a table whose rows DDL has rewritten: read it anew, or wait for an operator.
    on_rewrite: Literal["snapshot", "stop"] = "snapshot"
    outbox: Outbox | None = None  # a table of events that the application writes itself

    RENAMED: ClassVar[Mapping[str, str]] = {"copy_workers": "snapshot_workers"}

    def __post_init__(self) -> None:
        check_url(self.name, self.url)
        if self.outbox and not matches(self.outbox.table, self.tables):
            raise ConfigError(f"the outbox {self.outbox.table} is not among tables; add it there")

    @property
    def host(self) -> str:
        """The server's name in the url; a socket is a server on this machine."""
        return host_of(self.url)

    @property
    def address(self) -> Address:
        """How to reach the server."""
        return Address(self.url, application=f"headrace {self.name}")
