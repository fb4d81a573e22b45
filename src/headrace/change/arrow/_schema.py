"""A table's columns, and the foreign keys over them, as the text that its changes carry."""

from functools import lru_cache
from typing import Any

import msgspec

from ..event import Column, Reference, Table


class _Referring(msgspec.Struct, frozen=True):
    """A column, as far as foreign keys begin with it."""

    references: tuple[Reference, ...] = ()


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


def _described(column: Column) -> dict[str, Any]:
    """What decides how the values of a column are read, and carried on to the next version."""
    shown: dict[str, Any] = {"name": column.name, "type": column.type, "key": column.key}
    if column.number:
        shown["number"] = column.number
    if column.initial_default:
        shown["initial_default"] = column.initial_default
    return shown


def row_schema(table: Table) -> str:
    """A table's columns as the text that its changes carry.

    A foreign key stands with the first of its columns: whoever looks for columns passes it over.
    """
    columns = {column.name: _described(column) for column in table.columns}
    for reference in table.references:
        columns[reference.columns[0]].setdefault("references", []).append(reference)
    return msgspec.json.encode(list(columns.values())).decode()
