"""The demo's proof: what the log replays to is what the database holds, table by table.

The database's side is read with SELECT and turned into JSON values from Python's own types, so
that it shares no line of code with the capture that it judges.
"""

import base64
from collections import Counter
from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from ..change.replay import Replay, Row, TableName
from .database import Database

_canonical = msgspec.json.Encoder(order="deterministic").encode


class Verdict(NamedTuple):
    """How one table compares."""

    table: TableName
    in_database: int
    found: int  # rows on the other side: replayed, or in the Delta table
    missing: int  # rows of the database that are not there
    surplus: int  # rows that the database does not have
    example: str = ""  # one such row's columns that differ, never their values
    mistyped: tuple[str, ...] = ()  # columns whose type is not the one it should be

    @property
    def equal(self) -> bool:
        """Whether both sides hold the same rows, of the same types."""
        return not (self.missing or self.surplus or self.mistyped)


def prove(database: Database, replay: Replay, tables: Iterable[TableName]) -> list[Verdict]:
    """Compare every table of the database with its rows in the replay."""
    return [compare(name, images(database, name.name), replay.rows(name)) for name in tables]


def images(database: Database, table: str) -> list[Row]:
    """What a table holds now, as the log should tell it."""
    kinds = database.declared(table)
    return [
        {name: database.image(kinds[name], value) for name, value in row.items()}
        for row in database.rows(table)
    ]


def compare(name: TableName, database: list[Row], found: list[Row]) -> Verdict:
    """Compare two sets of rows, in any order."""
    here = Counter(map(_canonical, database))
    there = Counter(map(_canonical, found))
    missing, surplus = here - there, there - here
    example = _difference(missing, surplus) if missing or surplus else ""
    return Verdict(name, len(database), len(found), missing.total(), surplus.total(), example)


def _difference(missing: Counter[bytes], surplus: Counter[bytes]) -> str:
    wanted = msgspec.json.decode(next(iter(missing), b"{}"), type=dict[str, Any])
    found = msgspec.json.decode(next(iter(surplus), b"{}"), type=dict[str, Any])
    if not wanted or not found:
        return "whole rows"
    columns = [name for name in wanted | found if wanted.get(name) != found.get(name)]
    return f"columns {', '.join(columns)}"


def json_value(value: Any) -> Any:
    """A value of Python as the documents say it looks in JSON."""
    match value:
        case list():
            return [json_value(item) for item in value]
        case float():
            # PostgreSQL writes 3.0 as 3.
            return int(value) if value.is_integer() else Decimal(repr(value))
        case Decimal():
            return format(value, "f")
        case datetime():
            return _timestamp(value)
        case date():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode()
        case bool() | int() | str() | None:
            return value
        case _:
            return str(value)


def _timestamp(value: datetime) -> str:
    seconds, _, fraction = value.replace(tzinfo=None).isoformat().partition(".")
    zone = "Z" if value.tzinfo is None else "+00:00"
    return f"{seconds}.{fraction.rstrip('0')}{zone}" if fraction else f"{seconds}{zone}"
