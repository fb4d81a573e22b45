"""A destination of the tests' own: a server that takes events over a socket, and can be unkind."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.errors import SinkRefused, SinkUnavailable
from headrace.secret import Secret
from headrace.sinks.push import DeliveryOutcome, Event, PushSettings, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Courier(PushSettings):
    """Sends windows as lines of JSON, and gets a reply for each event."""

    port: int
    secret: Secret | None = None
    moves: bool = False  # a key that changes is a DELETE and an INSERT
    tombstones: bool = False

    @property
    def splits_keys(self) -> bool:
        """As the setting says."""
        return self.moves

    @property
    def adds_tombstones(self) -> bool:
        """As the setting says."""
        return self.tombstones

    def connect(self) -> CourierChannel:
        """Open a connection."""
        try:
            return CourierChannel(socket.create_connection(("127.0.0.1", self.port), timeout=30))
        except OSError as error:
            raise SinkUnavailable("nobody is at the door") from error


class CourierChannel:
    """A connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rwb")

    def send(self, events: Sequence[Event]) -> Sequence[Reply]:
        """Hand over a window."""
        told = [(*event[:-1], event.payload and event.payload.decode()) for event in events]
        try:
            self._stream.write(json.dumps(told).encode() + b"\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError:
            line = b""
        if not line:
            # It may have been taken: nobody knows.
            return [Reply(DeliveryOutcome.UNREACHABLE, "it hung up")] * len(events)
        replies = json.loads(line)
        if replies == "gone":
            raise SinkRefused("it has moved", hint="Find out where to.")
        return [Reply(DeliveryOutcome(answer), reason, after) for answer, reason, after in replies]

    def close(self) -> None:
        """Hang up."""
        self._stream.close()
        self._connection.close()


class Taken(NamedTuple):
    """An event as it came."""

    sequence: int
    at: int
    id: str
    row: str
    op: str
    source: str
    schema: str
    table: str
    key: str | None
    commit_time: int
    payload: str | None


Judge = Callable[[Taken], tuple[str, str, float]]


def kind(_: Taken) -> tuple[str, str, float]:
    """Take everything."""
    return ("accepted", "", 0.0)


class Office:
    """Where events arrive; it judges each of them."""

    def __init__(self) -> None:
        self.judge: Judge = kind
        self.taken: list[Taken] = []
        self.tried: list[Taken] = []
        self.windows: list[list[Taken]] = []
        self.hang_up_after_taking = 0  # so many times, no answer is given to what was taken
        self.gone = False
        self.slow = 0.0
        self.port = 0
        self._lock = threading.Lock()
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._connections: set[socket.socket] = set()

    def open(self) -> None:
        """Begin to listen; again at the same place after it was shut."""
        office = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                office._connections.add(self.connection)
                try:
                    for line in self.rfile:
                        answer = office.answer([Taken(*each) for each in json.loads(line)])
                        if answer is None:
                            return
                        self.wfile.write(json.dumps(answer).encode() + b"\n")
                except OSError:
                    return
                finally:
                    office._connections.discard(self.connection)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A connection that was cut is nothing to tell of."""

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def shut(self) -> None:
        """Listen no more, and cut every connection."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        assert self._thread is not None
        self._thread.join()
        self._server = None

    def answer(self, events: list[Taken]) -> Any:
        """Judge a window; None: hang up."""
        if self.slow:
            time.sleep(self.slow)
        with self._lock:
            if self.gone:
                return "gone"
            self.windows.append(events)
            replies, stuck = [], set()
            for event in events:
                self.tried.append(event)
                reply = ("unsent", "", 0.0) if event.row in stuck else self.judge(event)
                replies.append(reply)
                if reply[0] == "accepted":
                    self.taken.append(event)
                else:
                    stuck.add(event.row)
            if self.hang_up_after_taking:
                self.hang_up_after_taking -= 1
                return None
            return replies

    def rows(self) -> dict[str, list[tuple[int, int]]]:
        """The positions taken of each row, in the order they came."""
        found: dict[str, list[tuple[int, int]]] = {}
        for event in list(self.taken):
            found.setdefault(event.row, []).append((event.sequence, event.at))
        return found

    def firsts(self) -> dict[str, list[tuple[int, int]]]:
        """The same, where only the first time counts."""
        return {row: list(dict.fromkeys(positions)) for row, positions in self.rows().items()}


@contextmanager
def opened_office() -> Iterator[Office]:
    """An office until the context ends."""
    office = Office()
    office.open()
    try:
        yield office
    finally:
        office.shut()
