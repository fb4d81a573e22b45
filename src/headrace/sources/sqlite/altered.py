"""What one ALTER TABLE has done to the columns of a table, and their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import apsw
import msgspec

from ...change.event import Column
from ...errors import DecodeError
from .connections import quoted, rows
from .schema import SqliteShape, declared
from .values import Images


def statements_of(script: str) -> Iterator[str]:
    """The statements of a script, one at a time."""
    pending = ""
    for piece in script.split(";"):
        pending += piece
        if pending.strip() and apsw.complete(pending + ";"):
            yield pending.strip()
            pending = ""
        else:
            pending += ";" if pending else ""
    if pending.strip(" ;\n\t"):
        yield pending.strip()


def numbered_columns(
    columns: Sequence[Column], earlier: Sequence[Sequence[Column]]
) -> tuple[Column, ...]:
    """Columns of a table whose rows are read anew; `earlier`: its layouts, the newest last."""
    last = {column.name: column.number for column in earlier[-1]} if earlier else {}
    newest = max((column.number for each in earlier for column in each), default=0)
    numbered = []
    for column in columns:
        number = last.get(column.name, 0)
        if not number:
            number = newest = newest + 1
        numbered.append(msgspec.structs.replace(column, number=number))
    return tuple(numbered)


def altered_columns(
    connection: apsw.Connection,
    earlier: Sequence[Sequence[Column]],
    shape: SqliteShape,
    statement: str,
) -> tuple[Column, ...] | None:
    """The columns after one statement, where it is certain what it did; None: it is not."""
    was, now = earlier[-1], shape.layout.columns
    plain = tuple(declared(column) for column in was)
    if statement.upper().split()[:2] != ["ALTER", "TABLE"] or not all(c.number for c in was):
        return None
    if len(now) == len(was) + 1 and now[:-1] == plain:
        return _with_added(connection, earlier, shape)
    if len(now) == len(was) - 1:
        kept = {column.name for column in now}
        left = tuple(column for column in was if column.name in kept)
        return left if tuple(map(declared, left)) == now else None
    return _with_renamed(was, now) if len(now) == len(was) else None


def _with_renamed(was: Sequence[Column], now: Sequence[Column]) -> tuple[Column, ...] | None:
    """The columns with at most one other name, which is not that of a key."""
    differing = [at for at, column in enumerate(was) if declared(column) != now[at]]
    renamed = {at: msgspec.structs.replace(was[at], name=now[at].name) for at in differing}
    if len(renamed) > 1 or any(
        column.key or declared(column) != now[at] for at, column in renamed.items()
    ):
        return None
    return tuple(renamed.get(at, column) for at, column in enumerate(was))


def _with_added(
    connection: apsw.Connection, earlier: Sequence[Sequence[Column]], shape: SqliteShape
) -> tuple[Column, ...] | None:
    added = shape.layout.columns[-1]
    if added.name in shape.generated:
        return None
    try:
        found = rows(
            connection, f"SELECT {quoted(added.name)} FROM main.{quoted(shape.name)} LIMIT 1"
        )
        default = Images.value(found[0][0], added) if found else b"null"
    except (DecodeError, UnicodeDecodeError):
        return None
    (numbered,) = numbered_columns((added,), (*earlier, ()))
    initial = "" if default == b"null" else default.decode()
    return (*earlier[-1], msgspec.structs.replace(numbered, initial_default=initial))
