"""The socket: packets of the server, and the binary log that it sends like to a replica."""

from __future__ import annotations

import socket
import struct
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymysql.err import MySQLError

from ...errors import SourceError, SourceUnavailable
from .address import MysqlAddress, classify, error_for, run
from .decode.gtid import MariadbGtids, MysqlGtids

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

_COM_BINLOG_DUMP = 0x12
_COM_REGISTER_SLAVE = 0x15
_COM_BINLOG_DUMP_GTID = 0x1E
_WITH_STATEMENTS = 2  # BINLOG_SEND_ANNOTATE_ROWS_EVENT, in the flags of the first one
_THROUGH_GTID = 0x04

_PACKET_HEAD = 4  # bytes: the length, and a number
_WHOLE = 0xFFFFFF  # bytes of a packet that goes on in the next one
_RECEIVE = 1 << 18
_OK, _END, _ERROR = 0x00, 0xFE, 0xFF
_MOST_POSITION = (1 << 32) - 1  # the command has 32 bits for it
_SILENCE_MARGIN = 20.0  # seconds beyond the heartbeats that did not come
FIRST = 4  # where the first event of a file begins


@dataclass(frozen=True, slots=True)
class DumpStart:
    """Where in the binary log to begin."""

    file: str
    position: int
    gtids: MysqlGtids | MariadbGtids | None = None  # given: begin by them, whatever the file
    statements: bool = False  # MariaDB: send also the text that rows come from


class Packets:
    """What a server sends, cut into packets."""

    def __init__(self, connection: Connection[Cursor]) -> None:
        self._socket: socket.socket = connection._sock  # type: ignore[attr-defined]
        self._pieces: list[bytes] = []  # of what has arrived and is no whole packet yet
        self._size = 0  # bytes of them
        self._enough = _PACKET_HEAD  # bytes with which there is a whole packet
        self._parts: list[bytes] = []  # of a packet that is longer than 16 MB
        self._timeout: float | None = -1.0

    def receive(self, timeout: float) -> list[bytes] | None:
        """The packets that have arrived; None: nothing in time. Raises OSError at the end."""
        if timeout != self._timeout:
            self._socket.settimeout(timeout)
            self._timeout = timeout
        try:
            data = self._socket.recv(_RECEIVE)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            if type(error).__name__ in ("SSLWantReadError", "SSLWantWriteError"):
                return None
            raise
        if not data:
            raise ConnectionResetError("the server has closed the connection")
        self._pieces.append(data)
        self._size += len(data)
        if self._size < self._enough:
            return []
        return self._cut(b"".join(self._pieces) if len(self._pieces) > 1 else data)

    def _cut(self, data: bytes) -> list[bytes]:
        packets = []
        at, size = 0, len(data)
        self._enough = _PACKET_HEAD
        while at + _PACKET_HEAD <= size:
            length = data[at] | data[at + 1] << 8 | data[at + 2] << 16
            end = at + _PACKET_HEAD + length
            if end > size:
                self._enough = end - at
                break
            packet = data[at + _PACKET_HEAD : end]
            at = end
            if length == _WHOLE:
                self._parts.append(packet)
                continue
            if self._parts:
                packet = b"".join([*self._parts, packet])
                self._parts = []
            packets.append(packet)
        self._pieces = [data[at:]] if at < size else []
        self._size = size - at
        return packets

    def wake(self) -> None:
        """End the waiting of another thread."""
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)


class BinlogDump:
    """The binary log as it comes, event by event."""

    def __init__(self, connection: Connection[Cursor], *, stale_seconds: float) -> None:
        self._connection = connection
        self._packets = Packets(connection)
        self._stale_seconds = stale_seconds
        self._heard = time.monotonic()
        self._closed = False
        self._last: bytes | None = None  # a packet of the server that is no event

    @classmethod
    def open(
        cls, address: MysqlAddress, start: DumpStart, *, replica_id: int, heartbeat_seconds: float
    ) -> BinlogDump:
        """Request everything from a position on."""
        connection = address.connect()
        try:
            _prepare(connection, start, replica_id, heartbeat_seconds)
            _request(connection, start, replica_id)
        except (MySQLError, OSError) as error:
            connection.close()
            raise classify(error, "cannot read the binary log") from error
        except Exception:
            connection.close()
            raise
        return cls(connection, stale_seconds=silence_limit(heartbeat_seconds))

    def receive(self, timeout: float) -> list[bytes]:
        """Events that have arrived, header and checksum included; none: nothing in time."""
        if self._last is not None:
            raise self._ended(self._last)
        try:
            packets = self._packets.receive(timeout)
        except OSError as error:
            if self._closed:
                return []
            raise SourceUnavailable("the connection to the server broke") from error
        if packets is None:
            if time.monotonic() - self._heard > self._stale_seconds:
                raise SourceUnavailable(
                    f"the server has sent nothing for {self._stale_seconds:.0f} s"
                )
            return []
        self._heard = time.monotonic()
        return self._events(packets)

    def _events(self, packets: list[bytes]) -> list[bytes]:
        for at, packet in enumerate(packets):
            if packet[0] != _OK:
                self._last = packet
                if not at:
                    raise self._ended(packet)
                del packets[at:]  # what came before it counts
                break
        return [packet[1:] for packet in packets]

    def _ended(self, packet: bytes) -> SourceError:
        if packet[0] == _ERROR:
            return refused(packet, "the server does not send its binary log")
        return SourceUnavailable("the server has ended the binary log")

    def wake(self) -> None:
        """End the waiting of another thread, for good."""
        self._closed = True
        self._packets.wake()

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        force_close(self._connection)


def refused(packet: bytes, what: str) -> SourceError:
    """Our error for a packet that has one of the server's."""
    (code,) = struct.unpack_from("<H", packet, 1)
    message = packet[3:].decode(errors="replace")
    if message.startswith("#"):
        message = message[6:]  # an SQL state
    return error_for(code, f"{what}: {message}")


def silence_limit(heartbeat_seconds: float) -> float:
    """Seconds of silence after which a server is taken to be gone."""
    return heartbeat_seconds * 3 + _SILENCE_MARGIN


def force_close(connection: Connection[Cursor]) -> None:
    """Close the socket without a COM_QUIT, which cannot be sent in the middle of a response."""
    connection._force_close()  # type: ignore[attr-defined]


def _prepare(
    connection: Connection[Cursor], start: DumpStart, replica_id: int, heartbeat_seconds: float
) -> None:
    nanoseconds = round(heartbeat_seconds * 1e9)
    identity = uuid.uuid5(uuid.NAMESPACE_OID, f"headrace {replica_id}")
    settings = [
        f"@master_heartbeat_period = {nanoseconds}",
        f"@source_heartbeat_period = {nanoseconds}",
        "@master_binlog_checksum = @@global.binlog_checksum",
        "@source_binlog_checksum = @@global.binlog_checksum",
        "@mariadb_slave_capability = 4",  # or the server rewrites events for an old replica
        f"@slave_uuid = '{identity}'",
        f"@replica_uuid = '{identity}'",
    ]
    if isinstance(start.gtids, MariadbGtids):
        settings.append(f"@slave_connect_state = '{start.gtids}'")
        settings.append("@slave_gtid_strict_mode = 0, @slave_gtid_ignore_duplicates = 0")
    run(connection, f"SET {', '.join(settings)}")


def _request(connection: Any, start: DumpStart, replica_id: int) -> None:
    registration = struct.pack("<IBBBHII", replica_id, 0, 0, 0, 0, 0, 0)
    connection._execute_command(_COM_REGISTER_SLAVE, registration)
    connection._read_ok_packet()
    if isinstance(start.gtids, MysqlGtids):
        gtids = start.gtids.encode()
        head = struct.pack("<HIIQI", _THROUGH_GTID, replica_id, 0, FIRST, len(gtids))
        connection._execute_command(_COM_BINLOG_DUMP_GTID, head + gtids)
        return
    by_gtid = start.gtids is not None
    file = b"" if by_gtid else start.file.encode()
    # Beyond 4 GB the command has no number; then the file is read from its start.
    position = FIRST if by_gtid or start.position > _MOST_POSITION else start.position
    flags = _WITH_STATEMENTS if start.statements else 0
    head = struct.pack("<IHI", position, flags, replica_id)
    connection._execute_command(_COM_BINLOG_DUMP, head + file)
