"""A table's columns as the text that its changes carry."""

from functools import lru_cache

import msgspec

from ..event import Column, Table

_columns = msgspec.json.Decoder(tuple[Column, ...]).decode


@lru_cache(maxsize=4096)
def columns_of(row_schema: str) -> tuple[Column, ...]:
    """The columns behind the text that a change carries as its `row_schema`."""
    return _columns(row_schema)


def row_schema(table: Table) -> str:
    """A table's columns as the text that its changes carry."""
    columns = [{"name": c.name, "type": c.type, "key": c.key} for c in table.columns]
    return msgspec.json.encode(columns).decode()
