"""What a database does by itself to rows whose foreign key names a row that goes or changes.

InnoDB logs no change of these rows, so whoever holds the rows does what it did: in the order of
the log, at each DELETE and each UPDATE of the other table. No I/O.
"""

from collections.abc import Mapping
from typing import Any

from .event import Reference

CASCADE, SET_NULL = "cascade", "set null"


def acts(reference: Reference) -> bool:
    """Whether rows change with those that they name, and no change event says so."""
    return bool(reference.on_delete or reference.on_update)


def named_by(
    reference: Reference, old: Mapping[str, Any], new: Mapping[str, Any] | None
) -> tuple[Any, ...] | None:
    """The values by which rows name a row that goes (`new` is None) or changes.

    None: nothing happens to them.
    """
    named = tuple(old.get(name) for name in reference.parent_columns)
    if None in named:
        return None  # a null names no row
    if new is None:
        return named if reference.on_delete else None
    same = named == tuple(new.get(name) for name in reference.parent_columns)
    return None if same or not reference.on_update else named


def consequence(
    reference: Reference, row: Mapping[str, Any], new: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """What becomes of a row that names one which has gone (`new` is None) or changed.

    None: it goes, too.
    """
    action = reference.on_delete if new is None else reference.on_update
    if action == CASCADE and new is None:
        return None
    given: Mapping[str, Any] = {}
    if action == CASCADE and new is not None:
        pairs = zip(reference.columns, reference.parent_columns, strict=True)
        given = {column: new.get(parent) for column, parent in pairs}
    return {**row, **dict.fromkeys(reference.columns), **given}
