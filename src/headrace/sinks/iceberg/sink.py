"""Every change, once, in Iceberg tables of a REST catalog: one for each table of the source.

    a batch ─▶ append (tasks write files) ─▶ one snapshot a table ─▶ ledger

The columns are those of a Delta history, and a struct `row` with the table's own. The snapshot that
adds files says which changes the table has, so a batch that comes again adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import ClassVar

from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import NamespaceAlreadyExistsError

from ...change.path import split_path
from ...errors import ConfigError, HeadraceError, TableFailed
from ...plugins import Finding
from ...secret import Secret
from ...transforms.rules import TableTransform
from .. import Sink
from ..erasing import ErasedPlace, ErasedRow
from ..lake.refusal import has_login
from ..lake.shape import expect_tenant
from ..lake.storage import is_local
from ..push.routing import Template, escaped
from .catalog import CatalogLink
from .erasure import erase_in_iceberg
from .ledger import IcebergEntry, IcebergLedger
from .partitions import PartitionBy, partition_fields
from .table import IcebergTable, Identifier
from .writer import IcebergHistoryWriter

_TABLE = Template("${schema}_${table}")
_MESSAGES = "messages"  # what belongs to no table
_RESERVED = ("uri", "warehouse", "credential", "token", "type", "py-catalog-impl")


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergHistory(Sink):
    """Every change appended to Iceberg tables, one for each table."""

    task_packages: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"pyiceberg": "pyiceberg", "pyiceberg-core": "pyiceberg_core"}
    )

    name: str
    uri: str  # of the REST catalog
    namespace: str  # in which the tables are made; levels have dots between
    table: Template = _TABLE  # what a table is called
    warehouse: str = ""  # as the catalog calls it; "": its own choice
    credential: Secret | None = None  # client id and secret, with a colon between
    token: Secret | None = None
    # Any other of pyiceberg's, such as s3.endpoint; they may be secret, so they do not print.
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    tables: tuple[str, ...] = ()  # globs; none: all
    tenant: str = ""  # the column that says whose a row is
    as_text: tuple[str, ...] = ()  # schema.table.column: kept as the source's exact text
    partition_by: tuple[str, ...] = ("day(commit_time)",)
    keep_snapshots_hours: float = 24.0  # older ones are expired
    batch_seconds: float = 60.0  # how often to look for changes: each batch is a snapshot
    transforms: Mapping[str, TableTransform] = field(default_factory=dict)  # by table

    def __post_init__(self) -> None:
        if not self.uri.startswith(("http://", "https://")):
            raise ConfigError(
                "uri: a REST catalog has an address that begins with http:// or https://"
            )
        if has_login(self.uri):
            raise ConfigError(
                "uri: it has a user or a password in it; set token or credential instead"
            )
        if not all(self.levels):
            raise ConfigError(f"namespace: {self.namespace!r} has an empty level")
        if "${table}" not in self.table.text:
            raise ConfigError(f"table: {self.table} names all tables alike; it needs ${{table}}")
        if self.keep_snapshots_hours < 0 or self.batch_seconds <= 0:
            raise ConfigError("batch_seconds must be above 0, and keep_snapshots_hours not below")
        for name in _RESERVED:
            if name in self.options:
                raise ConfigError(f"options: {name} is no option of its own; set the sink's {name}")
        expect_tenant(self.tenant, self.transforms)
        self.partitions()

    @property
    def levels(self) -> Identifier:
        """The namespace, level by level."""
        return tuple(self.namespace.split("."))

    @property
    def local_folders(self) -> Mapping[str, str]:
        """The warehouse, where it is a folder of this machine."""
        local = self.warehouse.startswith(("/", "file:")) and is_local(self.warehouse)
        return {"warehouse": self.warehouse} if local else {}

    @property
    def link(self) -> CatalogLink:
        """How to reach the catalog."""
        chosen = {
            "warehouse": self.warehouse,
            "credential": self.credential.reveal() if self.credential else "",
            "token": self.token.reveal() if self.token else "",
        }
        given = {name: value for name, value in chosen.items() if value}
        return CatalogLink(self.uri, {**self.options, **given})

    @property
    def keep_snapshots(self) -> timedelta:
        """How long a snapshot stays."""
        return timedelta(hours=self.keep_snapshots_hours)

    def partitions(self) -> list[PartitionBy]:
        """How tables are partitioned."""
        fields = partition_fields(self.partition_by)
        if not self.tenant and "tenant" in [each.column for each in fields]:
            raise ConfigError(
                "partition_by: tenant is null everywhere unless tenant names a column"
            )
        return fields

    def identifier(self, source: str, table: str) -> Identifier:
        """The Iceberg table of a source's table (`schema.table`)."""
        schema, name = split_path(table)
        if not name:
            return (*self.levels, _MESSAGES)
        # Without a schema there is nothing before the underscore. Other underscores stay, because
        # names may differ in them alone.
        template = self.table if schema else Template(self.table.text.replace("${schema}_", ""))
        filled = template.fill(source=source, schema=schema, table=name, escape=escaped)
        return (*self.levels, filled)

    def ledger(self, catalog: RestCatalog) -> IcebergLedger:
        """What it has stored of its progress."""
        return IcebergLedger(
            self.link, catalog, (*self.levels, f"headrace_{escaped(self.name)}"), self.name
        )

    def open(self, writer: str, *, adopt: bool = False) -> IcebergHistoryWriter:
        """Begin to write."""
        return IcebergHistoryWriter(self, writer, adopt=adopt)

    def make_namespace(self, catalog: RestCatalog) -> None:
        """Make the namespace, and those that it is in."""
        for depth in range(1, len(self.levels) + 1):
            with self.link.reached(f"namespace {self.namespace}"):
                try:
                    if not catalog.namespace_exists(self.levels[:depth]):
                        catalog.create_namespace(self.levels[:depth])
                except NamespaceAlreadyExistsError:
                    continue

    def check(self) -> list[Finding]:
        """Whether the catalog answers, and has the namespace."""
        try:
            catalog = self.link.connect()
            with self.link.reached(f"namespace {self.namespace}"):
                there = catalog.namespace_exists(self.levels)
        except HeadraceError as error:
            return [Finding("catalog", ok=False, detail=str(error), fix=error.hint)]
        state = "is there" if there else "will be made"
        return [
            Finding("catalog", ok=True, detail=f"{self.uri}: namespace {self.namespace} {state}")
        ]

    def reset_effect(self) -> str:
        """What `reset` will do."""
        return (
            f"empties the Iceberg tables of {self.name} in {self.namespace}; what is no longer in "
            "the log is then only in their earlier snapshots, which stay for "
            f"{self.keep_snapshots_hours:g} hours"
        )

    def reset(self, writer: str) -> None:
        """Empty every table; the ledger says last that nothing is there."""
        catalog = self.link.connect()
        ledger = self.ledger(catalog)
        ledger.take_over(writer)
        tables = dict(ledger.entry.tables)
        for table, name in ledger.entry.tables.items():
            try:
                found = IcebergTable.open(self.link, catalog, (*self.levels, name), table, writer)
            except TableFailed:
                continue  # it fails again, with its reason, at its next change
            if found is None:
                del tables[table]  # it begins anew
                continue
            found.take_over()
            found.empty()
        ledger.entry = IcebergEntry(writer, tables=tables)
        ledger.save()

    def erase(self, row: ErasedRow) -> list[ErasedPlace]:
        """Take the values out of the row's changes, and delete every earlier snapshot."""
        return erase_in_iceberg(self, row)
