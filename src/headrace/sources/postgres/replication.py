"""PostgreSQL's sessions at libpq's level: replication commands, streams and COPY."""

from __future__ import annotations

import math
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq

from ...change.lsn import format_lsn, parse_lsn
from ...errors import SourceError, SourceUnavailable

_LOOK_SECONDS = 0.2
_LINES_BYTES = 1 << 16  # of COPY, handed over together

ErrorFor = Callable[[str, str, str], SourceError]
"""Our error for a code of PostgreSQL's, what failed, and PostgreSQL's text."""


@dataclass(frozen=True, slots=True)
class Server:
    """Which server this is, and where it stands."""

    system: str
    timeline: int
    database: str
    wal_lsn: int


class Replication:
    """A replication session: commands first, then a stream in both directions."""

    def __init__(
        self, connection: psycopg.Connection[Any], closing: threading.Event, error_for: ErrorFor
    ) -> None:
        self._session = connection
        self._connection = connection.pgconn
        self._closing = closing
        self._error_for = error_for

    def close(self) -> None:
        """End the session."""
        self._session.close()

    @property
    def socket(self) -> int:
        """The descriptor to wait on."""
        return self._connection.socket

    @property
    def session(self) -> int:
        """The number of its process on the server."""
        return self._connection.backend_pid

    def identify(self) -> Server:
        """Ask the server who it is; needs no privilege, unlike the control file's functions."""
        system, timeline, lsn, database = self.command("IDENTIFY_SYSTEM")[0]
        return Server(str(system), int(timeline or 0), str(database), parse_lsn(str(lsn)))

    def command(self, text: str) -> list[list[str | None]]:
        """Run a replication command and return its rows."""
        result = self._execute(text)
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise self._failure(result, text.partition(" ")[0])
        rows = range(result.ntuples)
        return [[_text(result.get_value(r, c)) for c in range(result.nfields)] for r in rows]

    def start(self, slot: str, after: int, options: Mapping[str, str]) -> None:
        """Begin to stream what was committed after an LSN."""
        given = ", ".join(f"{name} {_literal(value)}" for name, value in options.items())
        command = f'START_REPLICATION SLOT "{slot}" LOGICAL {format_lsn(after)} ({given})'
        result = self._execute(command)
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise self._failure(result, "START_REPLICATION")
        self._connection.nonblocking = 1

    def messages(self) -> Iterator[memoryview]:
        """What has arrived and was not read yet; does not wait."""
        get = self._connection.get_copy_data
        dry = False
        while True:
            size, data = get(1)
            if size > 0:
                dry = False
                # Whoever takes it lets go of it: a message may have many megabytes.
                message = [data]
                del data
                yield message.pop()
            elif size < 0:
                raise self._ended()
            elif dry:
                return
            else:
                dry = True
                self.receive()

    def receive(self) -> None:
        """Take what the socket holds."""
        try:
            self._connection.consume_input()
        except psycopg.OperationalError as error:
            raise SourceUnavailable("the connection to the server was lost") from error

    def send(self, message: bytes) -> None:
        """Send a message to the server."""
        try:
            self._connection.put_copy_data(message)
            self._connection.flush()
        except psycopg.OperationalError as error:
            raise SourceUnavailable("the connection to the server was lost") from error

    def _execute(self, text: str) -> pq.abc.PGresult:
        """Run a command without holding up other threads while the server works on it."""
        connection = self._connection
        try:
            connection.send_query(text.encode())
            connection.flush()
            while connection.is_busy():
                self._wait()
            result = connection.get_result()
            if result is None:
                raise SourceUnavailable("the server gave no answer")
            if result.status != pq.ExecStatus.COPY_BOTH:
                while connection.get_result() is not None:
                    pass
        except psycopg.OperationalError as error:
            raise SourceUnavailable("the connection to the server was lost") from error
        return result

    def _wait(self) -> None:
        """Wait for an answer; creating a slot takes as long as the longest open transaction."""
        if readable(self._connection.socket, seconds=_LOOK_SECONDS):
            self._connection.consume_input()
        elif self._closing.is_set():
            raise SourceUnavailable("closed while the server was still at work")

    def _ended(self) -> SourceError:
        result = self._connection.get_result()
        if result is None or result.status in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.COPY_IN):
            return SourceUnavailable("the server ended the stream")
        return self._failure(result, "the stream ended")

    def _failure(self, result: pq.abc.PGresult, what: str) -> SourceError:
        sqlstate = _text(result.error_field(pq.DiagnosticField.SQLSTATE)) or "08000"
        text = result.get_error_message().strip().partition("\n")[0]
        return self._error_for(sqlstate, what, text)


def copy_lines(connection: pq.abc.PGconn, statement: bytes) -> Iterator[list[bytes]]:
    """The lines of a COPY TO STDOUT, as many at a time as have come; whoever takes a list has it.

    Row by row, handing over a line would cost as much as receiving it.
    """
    result = connection.exec_(statement)
    if result.status != pq.ExecStatus.COPY_OUT:
        raise psycopg.errors.error_from_result(result)
    get = connection.get_copy_data
    lines: list[bytes] = []
    total, dry = 0, False
    while True:
        size, data = get(1)
        if size > 0:
            lines.append(bytes(data))
            total += size
            if total < _LINES_BYTES:
                continue
            del data  # a line may have many megabytes
        elif size < 0:
            break
        if lines:
            taken, lines, total, dry = [lines], [], 0, False
            yield taken.pop()
        if size == 0:
            # Waiting lets other threads in, and a busy one gives the turn back late: so first
            # take what has come meanwhile, and wait only when that is nothing.
            if dry:
                readable(connection.socket)
            dry = True
            connection.consume_input()
    if lines:
        yield lines
    while (ending := connection.get_result()) is not None:
        if ending.status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(ending)


def readable(*descriptors: int, seconds: float | None = None) -> list[int]:
    """Wait for input and return where it is; select() would refuse descriptors above 1,023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    milliseconds = None if seconds is None else math.ceil(seconds * 1000)
    return [descriptor for descriptor, _ in poll.poll(milliseconds)]


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
