"""The thread that reads the replication stream and reports to the server how far the log is.

While the log is slow it stops reading but keeps answering, so the server neither drops the
connection nor forgets anything that is not durable. Only a table's columns, which come before its
first row and after each DDL, make it wait until the log has their version.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping

import msgspec

from ...change.event import Change
from ...errors import ProtocolError, SourceUnavailable
from .catalog import Catalog
from .lag import WalLag
from .looks import LookState
from .pgoutput import EPOCH_MICROSECONDS, WalBegin
from .replication import Replication, readable
from .resume import PostgresResume
from .transactions import PostgresAssembler

_WAL, _KEEPALIVE = b"wk"
_WAL_HEAD = 25  # type, LSN, end of the log, time
_KEEPALIVE_BODY = struct.Struct(">cQqB")
_STATUS = struct.Struct(">cQQQqB")

_PIECE = 8192  # changes; a longer transaction is handed over in pieces
_PIECE_BYTES = 4 << 20
_FULL = 32768  # changes waiting for the log; then reading stops
_FULL_BYTES = 32 << 20
_BURST = 1024  # messages between two looks at the clock
_SILENCE = 120.0  # seconds; a reply is requested at least every ten
_APPROACHING = 0.05  # seconds between two questions how far the server has come
_IDLE_ADVANCE = 5.0  # seconds between two steps of an idle position
_LSN = struct.Struct(">Q")


class Received(msgspec.Struct, frozen=True, gc=False):
    """Changes that arrived, and the position after them; None: their transaction goes on."""

    changes: list[Change]
    position: int | None
    xid: int
    size: int
    errored: dict[str, str]
    versions: dict[str, int]
    looks: dict[str, LookState]
    again: dict[str, str]  # tables whose rows must be read anew, and why
    gone: frozenset[str]  # tables that are not there any more
    begin: WalBegin | None = None  # of the last complete transaction of this stream


class Receiver:
    """Reads the stream in a thread of its own and keeps what the log has not taken yet."""

    def __init__(
        self,
        replication: Replication,
        assembler: PostgresAssembler,
        catalog: Catalog,
        *,
        status_seconds: float,
    ) -> None:
        self._assembler = assembler
        self._catalog = catalog  # closed with the thread that asks it
        self.lag = WalLag(assembler.position)
        self.heard_at = 0  # µs since 1970
        self._replication = replication
        self._status_seconds = status_seconds
        self._waiting: deque[Received] = deque()
        self._waiting_changes = self._waiting_bytes = 0
        self._size = 0  # bytes read since the last hand-over
        self._boundary: int | None = None
        self._held: tuple[int, bytes] | None = None  # the first message beyond the boundary
        self._at_boundary = False
        self._acked = 0  # until it is started
        self._offered = assembler.position  # the last position that was handed over
        self._heard = time.monotonic()
        self._reported = (0, 0.0)  # what the server was sent last, and when
        self._advanced = time.monotonic()
        self._asking = False
        self._seen = assembler.settled[2:]  # as they were handed over last
        self._closed = False
        self._error: Exception | None = None
        self._turn = threading.Condition()
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="postgres-receive", daemon=True)

    def start(self, *, acked: int, boundary: int | None = None) -> None:
        """Begin to read; stop before the first transaction that commits at `boundary` or later.

        Everything before `acked` is durable.
        """
        self._acked, self._boundary = acked, boundary
        self._thread.start()

    @property
    def unlooked_leaves(self) -> Mapping[int, int]:
        """Partitions that were written to since the last look at their tables; leaf -> table."""
        return self._assembler.unlooked_leaves

    def take(self, timeout: float) -> Received | None:
        """What has arrived, complete transactions together; None: nothing in time."""
        with self._turn:
            self._turn.wait_for(lambda: self._waiting or self._stopped(), timeout)
            if self._waiting:
                return self._next()
            if self._error is not None:
                raise self._error
            return None

    def ack(self, position: int) -> None:
        """Everything before `position` is durable."""
        self.lag.stored(position)
        self._acked = max(self._acked, position)

    def ask(self) -> None:
        """Ask the server how far it has come."""
        self._asking = True
        self._wake()

    def reached_boundary(self) -> bool:
        """Whether everything before the boundary has arrived and been taken."""
        with self._turn:
            if self._error is not None and not self._waiting:
                raise self._error
            return self._at_boundary and not self._waiting

    @property
    def position(self) -> int:
        """Where it has stopped: every transaction that commits before has come."""
        return self._assembler.position

    @property
    def last_begin(self) -> WalBegin | None:
        """Of the last transaction before that; None: none came."""
        return self._assembler.last_begin

    def pause(self) -> None:
        """Stop before the next transaction."""
        self.set_boundary(0)

    def set_boundary(self, boundary: int | None) -> None:
        """Stop before the first transaction that commits there or later; None: go on."""
        with self._turn:
            self._boundary = boundary
            self._at_boundary = False
            self._turn.notify_all()
        self._wake()

    def renew(self, resume: PostgresResume) -> None:
        """Go on beyond the boundary, with tables that were copied there."""
        with self._turn:
            if self._closed:
                return  # with the connection over which tables are described
            self._assembler.renew(resume.live, resume.errored, resume.versions, resume.looks)
            self._seen = self._assembler.settled[2:]
        self.set_boundary(None)

    def close(self) -> None:
        """Stop reading and end the session."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _stopped(self) -> bool:
        return self._closed or self._error is not None or self._at_boundary

    def _next(self) -> Received:
        """Under the lock: join what is complete; a piece of a transaction goes alone."""
        first = self._waiting.popleft()
        while first.position is not None and self._waiting:
            following = self._waiting[0]
            if following.position is None:
                break
            self._waiting.popleft()
            first.changes.extend(following.changes)
            size = first.size + following.size
            first = msgspec.structs.replace(following, changes=first.changes, size=size)
        self._waiting_changes -= len(first.changes)
        self._waiting_bytes -= first.size
        self._turn.notify_all()
        return first

    def _run(self) -> None:
        try:
            while not self._closed:
                self._tell_status()
                if self._pause_if_full():
                    continue
                if not self._read_some():
                    self._wait_for_input()
        except Exception as error:  # noqa: BLE001 - raised again by whoever takes
            with self._turn:
                self._error = error
                self._turn.notify_all()
        finally:
            self._replication.close()
            self._catalog.close()
            self._wake_in.close()
            self._wake_out.close()

    def _pause_if_full(self) -> bool:
        with self._turn:
            if not self._at_boundary and not self._is_full():
                return False
            self._heard = time.monotonic()  # who does not listen hears nothing
            self._turn.wait_for(
                lambda: self._closed or not (self._at_boundary or self._is_full()),
                self._until_status(),
            )
            return True

    def _is_full(self) -> bool:
        return self._waiting_changes >= _FULL or self._waiting_bytes >= _FULL_BYTES

    def _read_some(self) -> bool:
        """Read what has arrived, at most a burst; False when nothing is left."""
        if self._held is not None:
            (lsn, data), self._held = self._held, None
            if self._beyond(data, lsn):
                return True
            self._assembler.feed(lsn, data)
        count = self._read_burst()
        if count:
            self._heard = time.monotonic()
            self.heard_at = time.time_ns() // 1000
        self._hand_over()
        return count > 0

    def _read_burst(self) -> int:
        feed, unpack = self._assembler.feed, _LSN.unpack_from
        bounded = self._boundary is not None
        count = lsn = 0
        size = self._size
        for message in self._replication.messages():
            count += 1
            if message[0] == _WAL:
                (lsn,) = unpack(message, 1)
                data = bytes(message[_WAL_HEAD:])
                del message  # it may have many megabytes
                size += len(data)
                if bounded and self._beyond(data, lsn):
                    break
                feed(lsn, data)
            else:
                self._other(bytes(message))
                # A boundary that was set meanwhile counts from here on: this message may have
                # reached it, and whoever waits for that creates a point which must not be passed.
                bounded = self._boundary is not None
                if self._at_boundary:
                    break
            if count >= _BURST or size >= _PIECE_BYTES:
                break
        self._size = size
        return count

    def _beyond(self, data: bytes, lsn: int) -> bool:
        """Whether this message begins what lies beyond the boundary; it is kept for later."""
        if self._boundary is None or not self._assembler.between_transactions:
            return False
        at = lsn
        if data[:1] == b"B" and len(data) >= 9:
            (at,) = _LSN.unpack_from(data, 1)  # where it commits
        elif data[:1] != b"M":
            return False
        if at < self._boundary:
            return False
        self._held = (lsn, data)
        self._hand_over()
        self._stop_at_boundary()
        return True

    def _stop_at_boundary(self) -> None:
        with self._turn:
            self._at_boundary = True
            self._turn.notify_all()

    def _hand_over(self) -> None:
        """Make what is complete available, and what is large."""
        assembler = self._assembler
        if assembler.done or self._settled_news():
            changes, assembler.done = assembler.done, []
            self._offer(changes, assembler.position)
        if len(assembler.open) >= _PIECE or (assembler.open and self._size >= _PIECE_BYTES):
            piece = assembler.take_open()
            if piece:
                self._offer(piece, None)

    def _settled_news(self) -> bool:
        """Whether a transaction without a change has found out something about a table."""
        _, _, looks, again, gone = self._assembler.settled
        return looks is not self._seen[0] or again is not self._seen[1] or gone is not self._seen[2]

    def _offer(self, changes: list[Change], position: int | None) -> None:
        assembler = self._assembler
        if position is not None:
            self._seen = assembler.settled[2:]
        received = Received(
            changes, position, assembler.xid, self._size, *assembler.settled, assembler.last_begin
        )
        self._size = 0
        self._offered = position or self._offered
        if changes:
            self.lag.received(position, changes[0].transaction.commit_time / 1e6)
        with self._turn:
            self._waiting.append(received)
            self._waiting_changes += len(received.changes)
            self._waiting_bytes += received.size
            self._turn.notify_all()

    def _other(self, message: bytes) -> None:
        if message[0] != _KEEPALIVE or len(message) != _KEEPALIVE_BODY.size:
            raise ProtocolError(f"unknown replication message {message[:1]!r}")
        _, wal_end, _, wants_reply = _KEEPALIVE_BODY.unpack(message)
        if not self._assembler.proof.proven:
            self._assembler.proof.reached(wal_end)
        if self._assembler.between_transactions:
            self._hand_over()
            self.lag.sent(wal_end)
            if self._boundary is not None and wal_end >= self._boundary:
                self._stop_at_boundary()
            else:
                self._advance_idle(wal_end)
        if wants_reply:
            self._tell_status(now=True, answering=True)

    def _advance_idle(self, wal_end: int) -> None:
        """Nothing of ours lies before `wal_end`: store that, so that the server may forget it."""
        due = time.monotonic() - self._advanced >= _IDLE_ADVANCE
        if wal_end <= self._offered or not due:
            return
        with self._turn:
            idle = not self._waiting
        if idle:
            self._advanced = time.monotonic()
            self._assembler.position = max(self._assembler.position, wal_end)
            self._offer([], self._assembler.position)

    def _tell_status(self, *, now: bool = False, answering: bool = False) -> None:
        reported, at = self._reported
        # A slot of another history must not move to our position: it would look like ours then.
        acked = self._acked if self._assembler.proof.proven else 0
        since = time.monotonic() - at
        now, self._asking = now or self._asking, False
        if not now and since < self._interval and not (acked > reported and since > 1.0):
            return
        clock = time.time_ns() // 1000 - EPOCH_MICROSECONDS
        # In a requested reply the server reports how far it has come even when nothing is written.
        reply = not answering
        self._replication.send(_STATUS.pack(b"r", acked, acked, acked, clock, reply))
        self._reported = (acked, time.monotonic())

    @property
    def _interval(self) -> float:
        """Seconds between two words to the server; less while its answer is waited for."""
        approaching = self._boundary is not None and not self._at_boundary
        return _APPROACHING if approaching else self._status_seconds

    def _until_status(self) -> float:
        return max(min(self._reported[1] + self._interval - time.monotonic(), 1.0), 0.0)

    def _wait_for_input(self) -> None:
        stream, wake = self._replication.socket, self._wake_out.fileno()
        ready = readable(stream, wake, seconds=self._until_status())
        if wake in ready:
            self._wake_out.recv(4096)
        if stream in ready:
            self._replication.receive()
        elif time.monotonic() - self._heard > _SILENCE:
            raise SourceUnavailable(f"the server has sent nothing for {_SILENCE:.0f} s")

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"x")
        except OSError:
            # The thread has ended and closed its end; there is nobody left to wake.
            return
