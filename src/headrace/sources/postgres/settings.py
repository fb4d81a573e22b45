"""The settings of a PostgreSQL source."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from ...secret import Secret
from ..redact import ColumnMask
from .address import Address, check_url, host_of

SlotName = Annotated[str, Meta(pattern="^[a-z0-9_]{0,63}$")]  # what PostgreSQL allows, or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSettings:
    """What the config says, and the names that follow from it."""

    name: str
    url: Secret
    tables: Annotated[tuple[str, ...], Meta(min_length=1)] = ("public.*",)
    # What never reaches the log: patterns of schema.table.column.
    exclude_columns: tuple[str, ...] = ()
    mask: Mapping[str, ColumnMask] = field(default_factory=dict)
    slot: SlotName = ""  # "": headrace_<name>
    publication: str = ""  # "": headrace_<name>
    ddl: bool = False  # whether to install the event trigger that reports DDL
    # What to do with a table whose rows DDL has rewritten: read it anew, or wait for an operator.
    on_rewrite: Literal["snapshot", "stop"] = "snapshot"
    identity: Literal["table", "full"] = "table"  # whether tables get REPLICA IDENTITY FULL
    snapshot: bool = True  # whether to read the rows that are there already
    snapshot_workers: Annotated[int, Meta(ge=1, le=64)] = 2
    snapshot_rows_per_second: Annotated[int, Meta(ge=1)] | None = None  # None: as fast as can be
    max_wal_gb: Annotated[float, Meta(gt=0)] | None = None  # then the slot is given up; None: never
    heartbeat_seconds: Annotated[float, Meta(gt=0)] = 20.0  # a third of server.max_lag_seconds

    RENAMED: ClassVar[Mapping[str, str]] = {"copy_workers": "snapshot_workers"}

    def __post_init__(self) -> None:
        check_url(self.name, self.url)

    @property
    def host(self) -> str:
        """The server's name in the url; a socket is a server on this machine."""
        return host_of(self.url)

    @property
    def slot_name(self) -> str:
        """The slot's name on the server."""
        return self.slot or f"headrace_{self.name}"

    @property
    def publication_name(self) -> str:
        """The publication's name on the server."""
        return self.publication or f"headrace_{self.name}"

    @property
    def address(self) -> Address:
        """How to reach the server."""
        return Address(self.url, application=f"headrace {self.name}")
