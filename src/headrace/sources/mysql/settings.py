"""The settings of a MySQL or MariaDB source."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from ...change.path import is_qualified, path_matches
from ...errors import ConfigError
from ...secret import Secret
from ..redact import ColumnMask
from .address import MysqlAddress
from .decode.path import TablePath

ANNOTATIONS = "headrace_annotations"

_SERVER_IDS = range(2_000_000_000, 4_000_000_000)  # far from what people give to their servers


@dataclass(frozen=True, slots=True, kw_only=True)
class MysqlSettings:
    """The settings of the config, and what follows from them."""

    name: str
    url: Secret
    tables: Annotated[tuple[str, ...], Meta(min_length=1)] = ("*",)
    # What never reaches the log: patterns of schema.table.column.
    exclude_columns: tuple[str, ...] = ()
    mask: Mapping[str, ColumnMask] = field(default_factory=dict)
    server_id: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0  # 0: made of the name and the url
    follow: Literal["position", "gtid"] = "position"  # how a position is found again
    snapshot: bool = True  # whether to capture the rows that are there already
    snapshot_workers: Annotated[int, Meta(ge=1, le=64)] = 2
    snapshot_rows_per_second: Annotated[int, Meta(ge=1)] | None = None  # None: as fast as can be
    # What follows where a statement gives rows other values than the binary log shows.
    on_rewrite: Literal["snapshot", "stop"] = "snapshot"
    xa_memory_mb: Annotated[int, Meta(ge=1)] = 256  # for rows of prepared XA transactions
    heartbeat_seconds: Annotated[float, Meta(gt=0, le=600)] = 10.0

    def __post_init__(self) -> None:
        if not MysqlAddress(self.url).plausible:
            # Without the text: what cannot be read may be the password.
            raise ConfigError(
                f"the url of source {self.name} is no address of a MySQL or MariaDB server; "
                "write mysql://user:password@host:3306/database"
            )
        if not self.database and not all(map(is_qualified, self.tables)):
            raise ConfigError(
                f"source {self.name}: its url names no database, so each of `tables` must; "
                "write database.table, or mysql://user:password@host:3306/database"
            )

    @property
    def host(self) -> str:
        """The server's name in the url; a socket is a server on this machine."""
        return self.address.host

    @property
    def database(self) -> str:
        """The database that a bare table's name means; "": none."""
        return self.address.database

    @property
    def address(self) -> MysqlAddress:
        """How to reach the server."""
        return MysqlAddress(self.url)

    @property
    def replica_id(self) -> int:
        """The number under which the server knows us; two readers with one evict each other."""
        if self.server_id:
            return self.server_id
        number = zlib.crc32(f"{self.name} {self.url.reveal()}".encode())
        return _SERVER_IDS.start + number % len(_SERVER_IDS)

    def wants(self, schema: str, table: str) -> bool:
        """Whether a table is to be captured."""
        if table == ANNOTATIONS or schema in SYSTEM_SCHEMAS:
            return False
        return matches(TablePath(schema, table), self.tables, self.database)


SYSTEM_SCHEMAS = frozenset({"mysql", "information_schema", "performance_schema", "sys"})


def matches(path: TablePath, globs: Sequence[str], database: str) -> bool:
    """Whether a table matches one of the globs; a bare name is of the url's database."""
    return any(path_matches(path.schema, path.table, glob, default=database) for glob in globs)
