"""MySQL and MariaDB as readers of the log know them."""

import re

import msgspec

from ...change.connector import Connector, DebeziumBlock
from ...change.event import Change
from .position import MysqlPosition

_mariadb_gtid = re.compile(r"\d+-(\d+)-\d+").fullmatch  # domain, server and number


class _Members(msgspec.Struct, frozen=True):
    """What only the `source` block of MySQL has."""

    server_id: int
    gtid: str | None
    file: str
    pos: int
    row: int
    thread: None = None
    query: None = None


def _members(change: Change) -> _Members:
    at = _position(change)
    gtid = _mariadb_gtid(at.gtid)
    # Debezium counts the rows of an event of the binary log, we those of the transaction.
    row = change.ordinal - 1
    return _Members(int(gtid[1]) if gtid else 0, at.gtid or None, at.file, at.position, row)


def _savegress_position(change: Change) -> dict[str, str | int]:
    at = _position(change)
    return {"file": at.file, "position": at.position, "gtid": at.gtid}


def _position(change: Change) -> MysqlPosition:
    assert isinstance(change.position, MysqlPosition)
    return change.position


MYSQL = Connector(
    name="mysql",
    positions=(MysqlPosition,),
    arrow="headrace.sources.mysql.arrow:kind",
    debezium=DebeziumBlock(schema=False, sequence=False, members=_members),
    savegress_position=_savegress_position,
)
