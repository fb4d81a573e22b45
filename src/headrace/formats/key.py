"""A row's key as text: `users:alice`, `order_items:7:2`."""

from collections.abc import Mapping

import msgspec

from ..change.event import Change, Op
from ._tables import PerTable

_columns = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string = msgspec.json.Decoder(str)
_key_columns = PerTable(lambda table: frozenset(table.key))


def row_key(change: Change) -> str:
    """Table and primary key; a row of a table without a key is `table:`."""
    return f"{change.table.name}:{primary_key(change)}"


def primary_key(change: Change) -> str:
    """The key's value; several columns are percent-escaped and joined with `:`."""
    return joined(_columns.decode(change.key)) if change.key else ""


def previous_primary_key(change: Change) -> str | None:
    """The key that an update replaced; None: it kept its key, or the source did not send it."""
    if change.op is not Op.UPDATE or not change.key or not change.before:
        return None
    if change.changed is not None and _key_columns(change.table).isdisjoint(change.changed):
        return None
    new = _columns.decode(change.key)
    old = _columns.decode(change.before)
    if not new.keys() <= old.keys():
        return None
    replaced = joined({name: old[name] for name in new})
    return None if replaced == joined(new) else replaced


def joined(columns: Mapping[str, msgspec.Raw]) -> str:
    """The columns that identify a row, as one text."""
    values = [_text(value) for value in columns.values()]
    # One column stays as it is, so that `users:alice` reads as the documents show it.
    return values[0] if len(values) == 1 else ":".join(map(_escaped, values))


def _text(value: msgspec.Raw) -> str:
    # A number keeps the digits the source wrote: it never passes through a float.
    raw = bytes(value)
    return _string.decode(raw) if raw.startswith(b'"') else str(raw, "utf-8")


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace(":", "%3A")
