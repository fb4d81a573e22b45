"""PostgreSQL as readers of the log know it, however it was captured."""

from typing import Any

import msgspec

from ...change.connector import Connector, DebeziumBlock
from ...change.event import Change
from ...change.lsn import format_lsn
from ..postgres_events.position import EventTablePosition
from .position import PostgresPosition


class _Members(msgspec.Struct, frozen=True, rename={"tx_id": "txId"}):
    """What only the `source` block of PostgreSQL has."""

    tx_id: int | None
    lsn: int
    xmin: None = None
    origin: None = None
    origin_lsn: None = None


def _members(change: Change) -> _Members:
    position: Any = change.position  # both of them have an LSN
    # What is not a transaction of the server, as a snapshot, has a name instead of a number.
    transaction = change.transaction.id
    return _Members(int(transaction) if transaction.isdecimal() else None, position.lsn)


def _savegress_position(change: Change) -> dict[str, str | int]:
    position: Any = change.position
    return {"lsn": format_lsn(position.lsn), "sequence": change.sequence}


POSTGRES = Connector(
    name="postgres",
    positions=(PostgresPosition, EventTablePosition),
    arrow="headrace.sources.postgres.arrow:kind",
    debezium=DebeziumBlock("postgresql", members=_members),
    savegress_position=_savegress_position,
)
