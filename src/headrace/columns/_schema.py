"""A table's columns, and the foreign keys over them, as the text that its changes carry."""

from functools import lru_cache
from typing import Any

import msgspec

from ..event import Column, Reference, Table


class _Referring(msgspec.Struct, frozen=True):
    """A column, as far as foreign keys begin with it."""

    references: tuple[Reference, ...] = ()


_CARRIED = ("mysql", "sqlite")
_columns = msgspec.json.Decoder(tuple[Column, ...]).decode
_referring = msgspec.json.Decoder(tuple[_Referring, ...]).decode


@lru_cache(maxsize=4096)
def columns_of(row_schema: str) -> tuple[Column, ...]:
    """The columns behind the text that a change carries as its `row_schema`."""
    return _columns(row_schema)


@lru_cache(maxsize=4096)
def references_of(row_schema: str) -> tuple[Reference, ...]:
    """The foreign keys behind the same text."""
    return tuple(each for column in _referring(row_schema) for each in column.references)


def carried(type_text: str, connector: str) -> str:
    """A type with the name of the kind of database that it is of; `parted` takes it off again."""
    return type_text if connector == "postgres" else f"{connector}:{type_text}"


def parted(type_text: str) -> tuple[str, str | None]:
    """A type, and the kind of database that it says it is of."""
    connector, colon, rest = type_text.partition(":")
    return (rest, connector) if colon and connector in _CARRIED else (type_text, None)


@lru_cache(maxsize=4096)
def plain_columns_of(row_schema: str) -> tuple[Column, ...]:
    """The columns as the source declares them."""
    replace = msgspec.structs.replace
    return tuple(replace(column, type=parted(column.type)[0]) for column in _columns(row_schema))


def row_schema(table: Table) -> str:
    """A table's columns as the text that its changes carry.

    A foreign key stands with the first of its columns: whoever looks for columns passes it over.
    A type says whose it is, unless it is PostgreSQL's.
    """
    columns: dict[str, dict[str, Any]] = {
        c.name: {"name": c.name, "type": carried(c.type, table.connector), "key": c.key}
        for c in table.columns
    }
    for reference in table.references:
        columns[reference.columns[0]].setdefault("references", []).append(reference)
    return msgspec.json.encode(list(columns.values())).decode()
