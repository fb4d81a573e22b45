"""Columns from one version of a table to the next: which is which, and how a SCHEMA shows them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from .cascade import acts
from .event import Column, Table


def carried_columns(
    before: Sequence[Column], after: Sequence[Column]
) -> tuple[tuple[Column, Column | None], ...]:
    """The later columns of a table, each with the earlier one whose values it has; None: none.

    A column without a value from before has its `initial_default` in every row.
    """
    numbered = {column.number: column for column in before if column.number}
    named = {column.name: column for column in before}

    def earlier(column: Column) -> Column | None:
        if column.number in numbered:
            return numbered[column.number]
        found = named.get(column.name)
        # Two numbers say that they are two columns, whatever their names are.
        return None if found is None or (found.number and column.number) else found

    return tuple((column, earlier(column)) for column in after)


def schema_payload(table: Table) -> dict[str, Any]:
    """What a SCHEMA change says."""
    shown: dict[str, Any] = {"columns": shown_columns(table.columns)}
    if acting := list(filter(acts, table.references)):
        shown["foreign_keys"] = acting
    return shown


def shown_columns(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Columns as a SCHEMA change shows them."""
    return [_shown(column) for column in columns]


def _shown(column: Column) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": column.name, "type": column.type, "key": column.key}
    if column.number:
        shown["number"] = column.number
    if column.initial_default:
        shown["initial_default"] = msgspec.Raw(column.initial_default.encode())
    return shown
