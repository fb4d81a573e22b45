"""For programs that write by apsw: their transactions stay separate wherever they are read.

Triggers record the rows, as for every other writer. What they cannot see is a commit; this
connection's hooks do, so its entries get a token that is another one for each transaction.
SQLite lets a hook neither read nor write, so the token is put there by a trigger that belongs to
this connection alone, while the transaction still runs: it is undone with the rest.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import apsw
import msgspec

from .connections import rows
from .installation import expect_installed

_FUNCTION = "headrace_token"
_TRIGGER = "headrace_attached"
_CREATE = f"""CREATE TEMP TRIGGER {_TRIGGER} AFTER INSERT ON main.headrace_changes BEGIN
  UPDATE headrace_changes SET token = {_FUNCTION}() WHERE entry = NEW.entry;
END"""


class Attached:
    """A connection whose transactions stay separate."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._token: str | None = None

    def annotate(self, metadata: Mapping[str, Any]) -> None:
        """Say who and why, of the transaction that is open."""
        statement = msgspec.json.encode(metadata).decode()
        self._connection.execute("INSERT INTO main.headrace_annotations VALUES (?)", (statement,))

    def token(self, *_: object) -> str:
        """What the entries of the present transaction carry."""
        if self._token is None:
            self._token = secrets.token_hex(8)
        return self._token

    def committing(self) -> bool:
        """A transaction ends; False: it may."""
        self._token = None
        return False

    def undone(self) -> None:
        """A transaction has ended as if it had never been."""
        self._token = None


@contextmanager
def attach(connection: apsw.Connection) -> Iterator[Attached]:
    """Tell the transactions of this connection apart while the block runs.

    The database must have Headrace's triggers. Hooks that the program has set stay as they are.
    """
    (path,) = [row[2] for row in rows(connection, "PRAGMA database_list") if row[1] == "main"]
    expect_installed(connection, str(path))
    attached = Attached(connection)
    connection.create_scalar_function(_FUNCTION, attached.token, 0)
    connection.execute(_CREATE)
    connection.set_commit_hook(attached.committing, id=_TRIGGER)
    connection.set_rollback_hook(attached.undone, id=_TRIGGER)
    try:
        yield attached
    finally:
        connection.set_commit_hook(None, id=_TRIGGER)
        connection.set_rollback_hook(None, id=_TRIGGER)
        connection.execute(f"DROP TRIGGER temp.{_TRIGGER}")
        connection.create_scalar_function(_FUNCTION, None, 0)
