"""Statements that wait behind a snapshot, and letting them pass.

A snapshot's sessions hold ACCESS SHARE on their tables until their transactions end. An ALTER
TABLE queues behind them, and every later statement on that table queues behind the ALTER. So the
sessions are ended once anybody has waited for one of them for a second. The server ends them: that
also works while the log is slow and nobody reads from them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Self

import psycopg

from ...errors import SourceError
from .. import Phase

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 1.0  # that another session may wait for one of ours
_LOOK_SECONDS = 0.25

# pg_blocking_pids holds up the whole lock manager for a moment: only for those who wait already.
_WAITERS = """
    WITH waiting AS MATERIALIZED (
        SELECT pid, coalesce(relation::regclass::text, locktype) AS what FROM pg_locks
        WHERE NOT granted AND waitstart < clock_timestamp() - %s * interval '1 second')
    SELECT what FROM waiting
    WHERE pid <> ALL (%s::int[]) AND pg_blocking_pids(pid) && %s::int[] LIMIT 1"""

_END = "SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS ours(pid)"

Connect = Callable[[], "psycopg.Connection[Any]"]


class WaiterWatch:
    """Looks for sessions that wait behind a snapshot, and ends the snapshot for them."""

    def __init__(self, connect: Connect, *, exporter: int) -> None:
        """`exporter` is the session that has exported the snapshot; it is not ended."""
        self.yielded = ""  # what somebody waited for; "": nobody had to wait
        self._connect = connect
        self._exporter = exporter
        self._readers: list[int] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="postgres-waiters", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def add(self, session: int) -> None:
        """A session that reads rows: it is ended when somebody waits."""
        self._readers.append(session)

    def remove(self, session: int) -> None:
        """A session is about to end: its number may soon be another's, who must not be ended."""
        self._readers.remove(session)

    def _run(self) -> None:
        connection: psycopg.Connection[Any] | None = None
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                if connection is None or connection.closed:
                    connection = self._connect()
                self._look(connection)
            except (SourceError, psycopg.Error) as error:
                # The server is away, and with it the snapshot; or the next look succeeds.
                logger.warning("cannot see who waits for the snapshot error=%s", error)
        if connection is not None:
            connection.close()

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        readers = list(self._readers)
        ours = [*readers, self._exporter]
        found = connection.execute(_WAITERS, (_WAIT_SECONDS, ours, ours)).fetchone()
        if found is not None:
            self.yielded = str(found[0])
            logger.warning("snapshot=yielded lock=%s", self.yielded)
            connection.execute(_END, (readers,))


def settled(yielded: str) -> Phase:
    """What a source does between two copies: a snapshot that has yielded is not done."""
    return Phase.SNAPSHOT if yielded else Phase.STREAMING


def yield_warnings(yielded: str, seconds: float) -> tuple[str, ...]:
    """What its status says meanwhile."""
    if not yielded:
        return ()
    return (
        f"the snapshot has let go of its tables: a statement had waited for a lock on {yielded}; "
        f"the snapshot goes on within {seconds:.0f} s",
    )
