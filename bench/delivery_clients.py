"""Many subscribers in one process, as cheap as Python allows: it is the server that is measured.

Plain sockets. The ones that time what comes are told by epoll; the ones that only count look at
all sockets a few times a second, so that a delivery costs them next to nothing.
"""

import json
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from .process import MeasurementFailed, answer

Kind = Literal["websocket", "sse"]
Manner = Literal["time", "count", "hold", "ignore"]

LIMIT = 150.0  # seconds for everything to come
LOOK_SECONDS = 0.05
# Those who time what comes rest so long between two looks, and note it later by as much. Else
# every single delivery would wake their process, at the server's expense.
REST_SECONDS = 0.001
SMALL_BUFFER = 4096  # of those who read nothing, so that it is the server that must wait
APART = 13  # changes between the places at which two of them begin, so that they share nothing
PER_ADDRESS = 20_000  # connections from one loopback address, which has some 28,000 ports

END = b'"version":1}'  # the end of every event, in both protocols
_STAMP = re.compile(rb'"stamp":(\d+)')
_READ = 1 << 16  # more would be mapped anew each time


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Who subscribes to what, and what is done with the events."""

    kind: Kind
    port: int
    table: str
    key: str = "cdc_" + "0" * 64
    subscribers: int
    manner: Manner
    first: int = 1  # the number of the first of them, where they begin at different places
    events: int = 0  # that each subscriber must get, where they are timed or counted

    def encode(self) -> str:
        """As the argument of a child."""
        return msgspec.json.encode(self).decode()


class Told(msgspec.Struct, frozen=True):
    """What the subscribers saw."""

    deliveries: int
    seconds: float  # from the first arrival to the last
    cpu: float  # seconds of processor time that the subscribers used meanwhile
    size: float  # bytes of a delivery
    delays: dict[str, float] = {}  # milliseconds, where they were timed

    @property
    def rate(self) -> float:
        """Deliveries a second."""
        return self.deliveries / self.seconds


# --- opening -------------------------------------------------------------------------------------


def subscribe(task: Task, number: int) -> socket.socket:
    """One subscriber, whose subscription is confirmed."""
    connection = socket.socket()
    connection.settimeout(30)
    if task.manner == "ignore":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    connection.bind((f"127.0.0.{1 + number // PER_ADDRESS}", 0))
    connection.connect(("127.0.0.1", task.port))
    after = APART * (task.first + number) if task.manner == "ignore" else None
    if task.kind == "websocket":
        _converse(connection, task, after)
    else:
        path = f"/v1/changes/stream?format=notification&tables={task.table}&after={after or 0}"
        _ask(connection, f"GET {path} HTTP/1.1\r\nX-API-Key: {task.key}", expected=b" 200 ")
    connection.setblocking(False)
    return connection


def _converse(connection: socket.socket, task: Task, after: int | None) -> None:
    upgrade = (
        "GET /v1/stream HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13"
    )
    _ask(connection, upgrade, expected=b" 101 ")
    wanted: dict[str, object] = {"type": "subscribe", "tables": [task.table]}
    if after is not None:
        wanted["resume"] = {"lastSequence": after}
    for message in ({"type": "auth", "apiKey": task.key}, wanted):
        connection.sendall(_frame(json.dumps(message).encode()))
        if b"error" in (said := _message(connection)) or b"fail" in said:
            raise MeasurementFailed(f"{message['type']} was answered {said!r}")


def _ask(connection: socket.socket, request: str, *, expected: bytes) -> None:
    connection.sendall(f"{request}\r\nHost: localhost\r\n\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += _exactly(connection, 1)
    if expected not in head.splitlines()[0]:
        raise MeasurementFailed(f"{request.splitlines()[0]} was answered {head!r}")


def _frame(payload: bytes) -> bytes:
    """A text frame as clients send it, masked with zeros."""
    size = len(payload)
    head = bytes((0x81, 0x80 | size)) if size < 126 else b"\x81\xfe" + size.to_bytes(2, "big")
    return head + bytes(4) + payload


def _message(connection: socket.socket) -> bytes:
    _, size = _exactly(connection, 2)
    if size == 126:
        size = int.from_bytes(_exactly(connection, 2), "big")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise MeasurementFailed(f"the server hung up after {data!r}")
        data += piece
    return data


# --- reading -------------------------------------------------------------------------------------


class Crowd:
    """The subscribers, and what each has got."""

    def __init__(self, sockets: Sequence[socket.socket], events: int) -> None:
        self._sockets = {each.fileno(): each for each in sockets}
        self._rest = dict.fromkeys(self._sockets, b"")
        self._left = dict.fromkeys(self._sockets, events)
        self._waiting = len(sockets)  # who have not got everything
        self._deliveries = len(sockets) * events
        self._bytes = 0
        self._first = self._last = 0.0
        self._cpu = self._ended = 0.0

    def count(self) -> Told:
        """Look at all sockets now and then."""
        while self._goes_on():
            time.sleep(LOOK_SECONDS)
            for number in self._sockets:
                self._take(number)
        return self._told()

    def time(self) -> Told:
        """Read each as soon as something is there, and compare clocks.

        All get the same events in the same order, so the stamps are read by one alone: for the
        others it is enough to note how many came when.
        """
        arrivals: dict[int, list[tuple[int, int]]] = {number: [] for number in self._sockets}
        reader, stamps = next(iter(self._sockets)), list[int]()
        text = b""
        with select.epoll() as epoll:
            for number in self._sockets:
                epoll.register(number, select.EPOLLIN)
            while self._goes_on():
                time.sleep(REST_SECONDS)
                for number, _ in epoll.poll(1.0):
                    data, events = self._take(number)
                    arrivals[number].append((time.time_ns() // 1000, events))
                    if number == reader:
                        text += data
                        end = text.rfind(END) + 1
                        stamps += map(int, _STAMP.findall(text, 0, end))
                        text = text[end:]
        return self._told(delays(stamps, arrivals.values()))

    def _take(self, number: int) -> tuple[bytes, int]:
        """What has come to a subscriber, and how many events end in it."""
        data = self._read(number)
        if not data:
            return data, 0
        chunk = self._rest[number] + data
        events = chunk.count(END)
        self._rest[number] = chunk[1 - len(END) :]
        self._note(number, events)
        return data, events

    def _read(self, number: int) -> bytes:
        try:
            data = self._sockets[number].recv(_READ)
        except BlockingIOError:
            return b""
        if not data:
            raise MeasurementFailed("the server hung up")
        self._bytes += len(data)
        return data

    def _note(self, number: int, events: int) -> None:
        if not events:
            return
        self._last, self._ended = time.monotonic(), time.process_time()
        if not self._first:
            self._first, self._cpu = self._last, self._ended
        left = self._left[number] = self._left[number] - events
        if left < 0:
            raise MeasurementFailed(f"a subscriber got {-left} events too many")
        self._waiting -= left == 0

    def _goes_on(self) -> bool:
        if self._first and time.monotonic() - self._first > LIMIT:
            raise MeasurementFailed(f"{self._waiting} subscribers did not get everything")
        return self._waiting > 0

    def _told(self, microseconds: Iterable[int] = ()) -> Told:
        cpu = self._ended - self._cpu
        return Told(
            self._deliveries,
            self._last - self._first,
            cpu,
            self._bytes / self._deliveries,
            spread(microseconds),
        )


def delays(stamps: Sequence[int], arrivals: Iterable[Sequence[tuple[int, int]]]) -> Iterator[int]:
    """How long each event took to each subscriber, who noted how many came when."""
    for noted in arrivals:
        at = 0
        for arrived, events in noted:
            for stamp in stamps[at : at + events]:
                yield arrived - stamp
            at += events


def spread(microseconds: Iterable[int]) -> dict[str, float]:
    """Percentiles in milliseconds: of each the smallest value that so many do not exceed."""
    ordered = sorted(microseconds)
    ranks = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "worst": 100.0} if ordered else {}
    return {
        name: ordered[max(0, -int(-len(ordered) * percent // 100) - 1)] / 1000
        for name, percent in ranks.items()
    }


def main(encoded: str) -> None:
    """Subscribe, say so, and do what the task asks."""
    task = msgspec.json.decode(encoded, type=Task)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sockets = [subscribe(task, number) for number in range(task.subscribers)]
    answer({"ready": True})
    if task.manner in ("hold", "ignore"):
        signal.pause()  # until the parent ends it
    crowd = Crowd(sockets, task.events)
    answer(msgspec.to_builtins(crowd.time() if task.manner == "time" else crowd.count()))


if __name__ == "__main__":
    main(sys.argv[1])
