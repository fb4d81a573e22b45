"""How far a sink is, and which tables it has: properties of an empty table in the catalog.

The tables themselves say which changes they have. The ledger says it of all of them together, also
of those that do not change for long, so that a query without a checkpoint can continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import NoSuchTableError, TableAlreadyExistsError
from pyiceberg.schema import Schema
from pyiceberg.table import TableProperties
from pyiceberg.types import NestedField, StringType

from ...errors import PipelineError, SinkFenced, SinkUnavailable
from .. import FailedTable, Progress
from .catalog import CatalogLink
from .table import EPOCH, LOG_GENERATION, SEQUENCE, WRITER, Identifier

_LEDGER = "headrace.ledger"  # the sink that it is of
_TABLES = "headrace.tables"
_FAILED = "headrace.failed"
_LOST = "headrace.lost"
_NEW = "headrace.new"
_COLUMNS = Schema(NestedField(1, "note", StringType(), required=False))
_PROPERTIES = {
    TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true",
    TableProperties.METADATA_PREVIOUS_VERSIONS_MAX: "10",
}

_names = msgspec.json.Decoder(dict[str, str]).decode
_failures = msgspec.json.Decoder(dict[str, FailedTable]).decode
_set = msgspec.json.Decoder(frozenset[str]).decode


@dataclass(frozen=True, slots=True)
class IcebergEntry:
    """What a ledger says."""

    writer: str = ""  # the query that writes
    epoch: str = ""  # of the log …
    sequence: int = 0  # … of which everything up to here is in the tables
    tables: Mapping[str, str] = field(default_factory=dict)  # schema.table → its Iceberg table
    failed: Mapping[str, FailedTable] = field(default_factory=dict)  # by schema.table
    # Those of them whose Iceberg table somebody has dropped while it was followed.
    lost: frozenset[str] = frozenset()
    new: frozenset[str] = frozenset()  # without a batch so far: the Iceberg table may not be there
    generation: str = "0"  # of the log; "": not known

    @classmethod
    def read(cls, properties: Mapping[str, str]) -> IcebergEntry:
        """The entry in a table's properties."""
        return cls(
            properties.get(WRITER, ""),
            properties.get(EPOCH, ""),
            int(properties.get(SEQUENCE, "0")),
            _names(properties.get(_TABLES, "{}")),
            _failures(properties.get(_FAILED, "{}")),
            _set(properties.get(_LOST, "[]")),
            _set(properties.get(_NEW, "[]")),
            properties.get(LOG_GENERATION, "0"),
        )

    def properties(self) -> dict[str, str]:
        """The same as a table's properties."""
        return {
            WRITER: self.writer,
            EPOCH: self.epoch,
            SEQUENCE: str(self.sequence),
            _TABLES: msgspec.json.encode(self.tables).decode(),
            _FAILED: msgspec.json.encode(self.failed).decode(),
            _LOST: msgspec.json.encode(sorted(self.lost)).decode(),
            _NEW: msgspec.json.encode(sorted(self.new)).decode(),
            LOG_GENERATION: self.generation,
        }

    def progress(self) -> Progress | None:
        """How far all tables are; None: nothing has come."""
        place = Progress(self.epoch, self.sequence, self.generation)
        return place if self.epoch and self.sequence else None

    def reached(self, place: Progress) -> IcebergEntry:
        """After a batch."""
        epoch, sequence, generation = place
        before = self.sequence if epoch == self.epoch else 0
        noted = replace(self, epoch=epoch, sequence=max(sequence, before), new=frozenset())
        return replace(noted, generation=generation)

    def with_table(self, table: str, name: str) -> IcebergEntry:
        """With one more table."""
        return replace(self, tables={**self.tables, table: name}, new=self.new | {table})

    def with_failure(self, failure: FailedTable) -> IcebergEntry:
        """With a table that is not followed any more."""
        return replace(self, failed={**self.failed, failure.table: failure})

    def without_table(self, table: str) -> IcebergEntry:
        """With a table that begins anew with its next change."""
        failed = {name: each for name, each in self.failed.items() if name != table}
        tables = {name: each for name, each in self.tables.items() if name != table}
        return replace(self, tables=tables, failed=failed, lost=self.lost - {table})

    def with_lost(self, table: str) -> IcebergEntry:
        """With a failed table that does not begin anew by itself."""
        return replace(self, lost=self.lost | {table})


class IcebergLedger:
    """The ledger of a sink in the catalog."""

    def __init__(
        self, link: CatalogLink, catalog: RestCatalog, name: Identifier, sink: str
    ) -> None:
        self._link = link
        self._catalog = catalog
        self._name = name
        self._sink = sink
        self._saved = self.read()
        self.entry = self._saved or IcebergEntry()

    @property
    def absent(self) -> bool:
        """Whether nothing was ever saved, or the catalog has lost it."""
        return self._saved is None

    def read(self) -> IcebergEntry | None:
        """What the catalog has now; None: there is none."""
        with self._link.reached(".".join(self._name)):
            try:
                found = self._catalog.load_table(self._name).properties
            except NoSuchTableError:
                return None
        if found.get(_LEDGER) != self._sink:
            raise PipelineError(
                f"{'.'.join(self._name)} in the catalog is a table of somebody else",
                hint=f"Set another namespace for sink {self._sink}, or rename it.",
            )
        return IcebergEntry.read(found)

    def expect_writer(self, writer: str) -> None:
        """Refuse to go on when another query writes."""
        self._expect_known(self.read(), writer)

    def take_over(self, writer: str) -> None:
        """Be the writer, and know what the one before has noted until now.

        This is a snapshot, and a commit is refused by a table with a newer snapshot than its own
        copy: so the one before can save nothing from here on.
        """
        if self._saved is None or self._saved.writer == writer:
            return
        with self._link.reached(".".join(self._name)):
            table = self._catalog.load_table(self._name)
            transaction = table.transaction()
            transaction.set_properties({WRITER: writer})
            transaction.update_snapshot(snapshot_properties={WRITER: writer}).fast_append().commit()
            transaction.commit_transaction()
        self.entry = self._saved = IcebergEntry.read(table.properties)

    def save(self) -> None:
        """Store the entry, if it is another one."""
        if self.entry == self._saved:
            return
        properties = self.entry.properties()
        with self._link.reached(".".join(self._name)):
            if self._saved is None:
                self._create(properties)
            else:
                table = self._catalog.load_table(self._name)
                self._expect_known(IcebergEntry.read(table.properties), self.entry.writer)
                transaction = table.transaction()
                transaction.set_properties(properties)
                transaction.commit_transaction()
        self._saved = self.entry

    def _create(self, properties: Mapping[str, str]) -> None:
        try:
            self._catalog.create_table(
                self._name, _COLUMNS, properties={**_PROPERTIES, _LEDGER: self._sink, **properties}
            )
        except TableAlreadyExistsError:
            # Which of the two may write shows when this one opens the sink again.
            raise SinkUnavailable(
                f"another pipeline has just begun to write to {'.'.join(self._name[:-1])}"
            ) from None

    def _expect_known(self, found: IcebergEntry | None, writer: str) -> None:
        place = ".".join(self._name[:-1])
        if found is not None and found.writer not in ("", writer):
            raise SinkFenced(f"another pipeline writes to {place}")
        if found != self._saved:
            # A copy of this pipeline, with the same checkpoint: this one opens the sink again.
            raise SinkUnavailable(f"another pipeline has just written to {place}")
