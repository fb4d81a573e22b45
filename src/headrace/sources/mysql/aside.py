"""Tables whose snapshot waits, while everything else goes on: unreadable ones, and locked ones."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...errors import SourceError
from .address import MysqlAddress, error_number, quoted, run
from .decode.path import TablePath
from .dump import force_close

LOCK_TIMEOUT = 1205
LOCK_SECONDS = 1  # for any lock: whoever wants to write waits as long

# What is wrong with one table, and with no other: its tablespace is missing or was discarded, it is
# damaged, the storage engine does not know it, it must not be read, or it was dropped or altered
# (1146, 1412) while a snapshot began.
_OF_ONE_TABLE = frozenset(
    {1016, 1017, 1030, 1033, 1034, 1142, 1143, 1146, 1194, 1195, 1356, 1412, 1459, 1712, 1812}
    | {1814, 1877, 1932}
)
_FIRST_SECONDS, _LONGEST_SECONDS = 5.0, 60.0
_WAITING = ("metadata lock", "table level lock", "table flush", "global read lock")


@dataclass(frozen=True, slots=True)
class _Waiting:
    reason: str
    delay: float  # seconds from one attempt to the next
    due: float


class TablesAside:
    """Which tables wait, why, and when each is tried again."""

    def __init__(self) -> None:
        self._waiting: dict[TablePath, _Waiting] = {}
        self._delays: dict[TablePath, float] = {}

    def put(self, path: TablePath, reason: str) -> None:
        """Leave a table until later; each time for twice as long."""
        delay = min(self._delays.get(path, _FIRST_SECONDS / 2) * 2, _LONGEST_SECONDS)
        self._delays[path] = delay
        self._waiting[path] = _Waiting(reason, delay, time.monotonic() + delay)

    def done(self, path: TablePath) -> None:
        """A table was read to its end."""
        self._waiting.pop(path, None)
        self._delays.pop(path, None)

    def __contains__(self, path: TablePath) -> bool:
        """Whether it is not this table's turn."""
        waiting = self._waiting.get(path)
        return waiting is not None and time.monotonic() < waiting.due

    def reasons(self, known: Iterable[TablePath]) -> dict[str, str]:
        """Why each of these waits that does."""
        return {str(path): self._waiting[path].reason for path in known if path in self._waiting}


def unreadable(address: MysqlAddress, tables: Sequence[TablePath]) -> dict[TablePath, str]:
    """The tables of which no row can be read now, and why."""
    reasons: dict[TablePath, str] = {}
    connection = address.connect()
    try:
        run(connection, f"SET SESSION lock_wait_timeout = {LOCK_SECONDS}")
        for path in tables:
            try:
                run(connection, f"SELECT 1 FROM {quoted(path.schema, path.table)} LIMIT 1")
            except SourceError as error:
                reasons[path] = reason_of(error)
    finally:
        force_close(connection)
    return reasons


def reason_of(error: SourceError) -> str:
    """Why one table alone cannot be read; any other error is raised again."""
    number = error_number(error)
    if number == LOCK_TIMEOUT:
        return "somebody else has locked it; its snapshot is taken later"
    if number in _OF_ONE_TABLE:
        # By its number: the server's own text of an error may have values.
        return f"it cannot be read (error {number} of the server); it is tried again"
    raise error


def anyone_waits(processes: Iterable[Sequence[object]], tables: Iterable[TablePath]) -> bool:
    """Whether a session has waited a second for a lock on these, as SHOW PROCESSLIST has it."""
    names = [path.table.lower() for path in tables]
    for _, _, _, _, _, seconds, state, statement, *_ in processes:
        waits = any(each in str(state).lower() for each in _WAITING)
        if waits and int(str(seconds or 0)) >= LOCK_SECONDS:
            text = str(statement or "").lower()
            if not text or any(name in text for name in names):
                return True
    return False
