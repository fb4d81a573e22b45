"""Connections to PostgreSQL at libpq's level, and what its errors mean to us."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import conninfo, pq

from ..errors import PositionLost, SourceError, SourceRefused, SourceUnavailable
from ..event import format_lsn, parse_lsn
from ._pgvalues import SESSION_SETTINGS

# A long copy or an idle stream is not a mistake.
_NO_TIMEOUTS = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}

_UNDEFINED = "42704"
_NOT_NOW = ("08", "53", "57", "58", "40", "25006", "55006", "55P03", "XX")
_CONNECT_SECONDS = 10
_LOOK_SECONDS = 0.2


def connect(url: str, *, application: str) -> psycopg.Connection[Any]:
    """An ordinary session with pinned settings, in autocommit."""
    try:
        return psycopg.connect(_dsn(url, application), autocommit=True)
    except psycopg.Error as error:
        raise classify(error, "cannot connect") from error


def connect_replication(url: str, *, application: str, closing: threading.Event) -> Replication:
    """A session that can create slots and stream; `closing` ends its waiting."""
    dsn = conninfo.make_conninfo(_dsn(url, application), replication="database")
    connection = pq.PGconn.connect_start(dsn.encode())
    _wait_for_connection(connection)
    return Replication(connection, closing)


def classify(error: psycopg.Error, what: str) -> SourceError:
    """Our error for one of PostgreSQL's."""
    return _error_for(error.sqlstate or "08000", f"{what}: {_first_line(str(error))}")


def _error_for(sqlstate: str, message: str) -> SourceError:
    if "can no longer" in message and "replication slot" in message:
        return PositionLost(message)
    if sqlstate == _UNDEFINED and "replication slot" in message:
        return PositionLost(message)
    if sqlstate.startswith(_NOT_NOW):
        return SourceUnavailable(message)
    return SourceRefused(message)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _dsn(url: str, application: str) -> str:
    pinned = SESSION_SETTINGS | _NO_TIMEOUTS
    settings = " ".join(
        f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in pinned.items()
    )
    given = conninfo.conninfo_to_dict(url)
    options = f"{given.get('options') or ''} {settings}".strip()
    return conninfo.make_conninfo(
        url,
        options=options,
        application_name=application,
        connect_timeout=given.get("connect_timeout") or _CONNECT_SECONDS,
        client_encoding="UTF8",
    )


def _wait_for_connection(connection: pq.abc.PGconn) -> None:
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        status = connection.connect_poll()
        if status == pq.PollingStatus.OK:
            return
        left = deadline - time.monotonic()
        if status == pq.PollingStatus.FAILED or left <= 0:
            message = _first_line(connection.get_error_message()) or "no answer"
            connection.finish()
            refused = "FATAL" in message and "starting up" not in message
            refused = refused and "shutting down" not in message
            refused = refused and "too many" not in message and "requested standby" not in message
            raise (SourceRefused if refused else SourceUnavailable)(f"cannot connect: {message}")
        reading = [connection.socket] if status == pq.PollingStatus.READING else []
        writing = [connection.socket] if status == pq.PollingStatus.WRITING else []
        select.select(reading, writing, [], left)


@dataclass(frozen=True, slots=True)
class Server:
    """Which server this is, and where it stands."""

    system: str
    timeline: int
    database: str
    wal_lsn: int


class Replication:
    """A replication session: commands first, then a stream in both directions."""

    def __init__(self, connection: pq.abc.PGconn, closing: threading.Event) -> None:
        self._connection = connection
        self._closing = closing

    def close(self) -> None:
        """End the session."""
        self._connection.finish()

    @property
    def socket(self) -> int:
        """The descriptor to wait on."""
        return self._connection.socket

    def identify(self) -> Server:
        """Ask the server who it is; needs no privilege, unlike the control file's functions."""
        system, timeline, lsn, database = self.command("IDENTIFY_SYSTEM")[0]
        return Server(str(system), int(timeline or 0), str(database), parse_lsn(str(lsn)))

    def command(self, text: str) -> list[list[str | None]]:
        """Run a replication command and return its rows."""
        result = self._execute(text)
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise self._failure(result, text)
        rows = range(result.ntuples)
        return [[_text(result.get_value(r, c)) for c in range(result.nfields)] for r in rows]

    def start(self, slot: str, after: int, options: Mapping[str, str]) -> None:
        """Begin to stream what was committed after an LSN."""
        given = ", ".join(f"{name} {quote(value)}" for name, value in options.items())
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
                yield data
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
            raise SourceUnavailable(f"connection lost: {_first_line(str(error))}") from error

    def send(self, message: bytes) -> None:
        """Send a message to the server."""
        try:
            self._connection.put_copy_data(message)
            self._connection.flush()
        except psycopg.OperationalError as error:
            raise SourceUnavailable(f"connection lost: {_first_line(str(error))}") from error

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
            raise SourceUnavailable(f"connection lost: {_first_line(str(error))}") from error
        return result

    def _wait(self) -> None:
        """Wait for an answer; creating a slot takes as long as the longest open transaction."""
        ready, _, _ = select.select([self._connection.socket], [], [], _LOOK_SECONDS)
        if ready:
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
        message = _first_line(result.get_error_message())
        return _error_for(sqlstate, f"{what.split(' (', maxsplit=1)[0]}: {message}")


def copy_lines(connection: pq.abc.PGconn) -> Iterator[bytes]:
    """The lines of a COPY TO STDOUT that was begun."""
    get = connection.get_copy_data
    dry = False
    while True:
        size, data = get(1)
        if size > 0:
            dry = False
            yield bytes(data)
        elif size < 0:
            break
        else:
            # Waiting lets other threads in, and a busy one gives the turn back late: so first
            # take what has come meanwhile, and wait only when that is nothing.
            if dry:
                select.select([connection.socket], [], [])
            dry = True
            connection.consume_input()
    while (result := connection.get_result()) is not None:
        if result.status == pq.ExecStatus.FATAL_ERROR:
            sqlstate = _text(result.error_field(pq.DiagnosticField.SQLSTATE)) or "08000"
            raise _error_for(sqlstate, f"COPY: {_first_line(result.get_error_message())}")


def quote(value: str) -> str:
    """A string literal of the replication grammar."""
    return "'" + value.replace("'", "''") + "'"


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
