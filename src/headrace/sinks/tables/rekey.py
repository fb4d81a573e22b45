"""Tables whose rows are told apart by other columns than their key.

Each change gets the key that the chosen columns make, before and after it; from there on the table
is one like any other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from ...change.arrow import columns_of
from ...change.event import Column
from ...errors import TableFailed

_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode

_FULL = (
    "Run `ALTER TABLE … REPLICA IDENTITY FULL` on the server, "
    "then `headrace snapshot SOURCE TABLE`."
)


def rekeyed(row_schema: str, key: Sequence[str]) -> str:
    """The columns of a table, these ones marked as its key."""
    columns = columns_of(row_schema)
    missing = set(key) - {column.name for column in columns}
    if missing:
        raise TableFailed(
            f"keys names column {min(missing)}, and the table has none of this name",
            hint="Correct keys in the config, then run `headrace snapshot SOURCE TABLE`.",
        )
    told = [{"name": c.name, "type": c.type, "key": c.name in key} for c in columns]
    return _text(told).decode()


def with_keys(rows: pa.Table, key: Sequence[Column]) -> pa.Table:
    """Changes of rows whose `key` and `before` are made of the chosen columns."""
    names = [column.name for column in key]
    given = (rows[name].to_pylist() for name in ("sequence", "op", "key", "before", "after"))
    keys: list[str] = []
    befores: list[str | None] = []
    for sequence, op, source_key, before, after in zip(*given, strict=True):
        # A source that sends no old row has not changed its own key.
        old = {} if op in ("INSERT", "READ") else _image(before or source_key or "{}")
        new = old if op == "DELETE" else {**old, **_image(after)}
        befores.append(None if op in ("INSERT", "READ") else _key_text(names, old, sequence))
        keys.append(_key_text(names, new, sequence))
    return _replaced(_replaced(rows, "key", keys), "before", befores)


def _key_text(names: Sequence[str], image: Mapping[str, msgspec.Raw], sequence: int) -> str:
    for name in names:
        if name not in image:
            raise TableFailed(
                f"change {sequence} comes without the value of {name}, which keys names",
                hint=_FULL,
            )
    return _text({name: image[name] for name in names}).decode()


def _replaced(rows: pa.Table, name: str, values: Sequence[Any]) -> pa.Table:
    return rows.set_column(rows.column_names.index(name), name, pa.array(values, pa.string()))
