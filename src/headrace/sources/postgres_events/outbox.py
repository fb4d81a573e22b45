"""An application's own outbox: what it appends becomes changes of what it names. No I/O.

A row of the outbox says that something happened to an aggregate. It becomes an INSERT of the table
`outbox.<aggregate type>`, whose key is the row's id; that rows are marked or deleted later on says
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...change.columns import schema_payload
from ...change.event import Change, Op, Table
from ...errors import DecodeError
from .. import Register

SCHEMA = "outbox"

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


class Outbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which table is an outbox, and which of its columns say what."""

    table: str  # schema.table
    id: str = "id"
    aggregate_type: str = "aggregatetype"
    aggregate_id: str = "aggregateid"
    event_type: str = "type"
    payload: str = "payload"

    @property
    def names(self) -> dict[str, str]:
        """The columns whose name is always the same."""
        return {
            self.id: "id",
            self.aggregate_id: "aggregate_id",
            self.event_type: "type",
            self.payload: "payload",
        }


class OutboxRouter:
    """Turns the rows of an outbox into changes of what they name."""

    def __init__(self, outbox: Outbox | None, register: Register, versions: dict[str, int]) -> None:
        self.versions = versions  # schema.table -> the version of its last SCHEMA change
        self._outbox = outbox
        self._register = register
        self._tables: dict[tuple[int, str], Table] = {}

    def transaction(self, changes: Sequence[Change]) -> list[Change]:
        """A whole transaction, with the rows of the outbox as what they name."""
        rerouted = [each for change in changes for each in self.routed(change)]
        return [
            msgspec.structs.replace(change, ordinal=ordinal, last=ordinal == len(rerouted))
            for ordinal, change in enumerate(rerouted, 1)
        ]

    def routed(self, change: Change) -> list[Change]:
        """What a change becomes: itself, unless it is of the outbox; their ordinals are all its."""
        outbox = self._outbox
        if outbox is None or change.op is Op.MESSAGE or change.table.path != outbox.table:
            return [change]
        if change.op not in (Op.READ, Op.INSERT):
            return []  # it was marked or tidied up
        fields = _fields(change.after or b"{}")
        table = self._table(outbox, change.table, fields)
        names = outbox.names
        row = {names.get(name, name): value for name, value in fields.items()}
        del row[outbox.aggregate_type]
        key = _encode({"id": row["id"]})
        rerouted = msgspec.structs.replace(change, table=table, key=key, after=_encode(row))
        if self.versions.get(table.path) == table.version:
            return [rerouted]
        self.versions = self.versions | {table.path: table.version}
        payload = _encode(schema_payload(table))
        return [msgspec.structs.replace(rerouted, op=Op.SCHEMA, key=None, after=payload), rerouted]

    def _table(self, outbox: Outbox, table: Table, fields: dict[str, msgspec.Raw]) -> Table:
        """The table of the event that a row becomes."""
        missing = [name for name in (*outbox.names, outbox.aggregate_type) if name not in fields]
        if missing:
            raise DecodeError(f"the outbox {outbox.table} has no column {', '.join(missing)}")
        try:
            name = _text(fields[outbox.aggregate_type])
        except msgspec.MsgspecError as error:
            raise DecodeError(f"{outbox.aggregate_type} of a row is no text") from error
        known = self._tables.get((table.version, name))
        if known is None:
            known = self._register(_named(outbox, table, name))
            self._tables[table.version, name] = known
        return known


def _named(outbox: Outbox, table: Table, name: str) -> Table:
    columns = tuple(
        msgspec.structs.replace(
            column, name=outbox.names.get(column.name, column.name), key=column.name == outbox.id
        )
        for column in table.columns
        if column.name != outbox.aggregate_type
    )
    return Table(table.source, table.connector, table.origin, table.database, SCHEMA, name, columns)
