"""Many clients of server-sent events in one process, which come back whenever they are cut off.

Each has one table, and remembers the last sequence, how many events it had and their sum: that is
enough to tell later whether it had every change of its table exactly once.
"""

import json
import re
import selectors
import socket
import sys
import time
from collections.abc import Sequence

import msgspec

EVENT = re.compile(rb"^id: (\d+)\ndata: ", re.MULTILINE)
REST_SECONDS = 0.02  # between two looks, so that a look finds more
AGAIN_SECONDS = 0.5  # before a client that was cut off comes back
REPORT_SECONDS = 1.0
_READ = 1 << 18


class ClientTotals(msgspec.Struct):
    """What one client has had."""

    table: str
    last: int = 0
    events: int = 0
    total: int = 0  # the sum of the sequences
    reconnects: int = 0


class StreamClient:
    """A client, connected or about to be."""

    def __init__(self, port: int, table: str) -> None:
        self.had = ClientTotals(table)
        self._port = port
        self._socket: socket.socket | None = None
        self._rest = b""
        self._due = 0.0

    def connect(self, ready: selectors.BaseSelector) -> None:
        """Connect, if it is time to and it is not."""
        if self._socket is not None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + AGAIN_SECONDS
        try:
            connection = socket.create_connection(("127.0.0.1", self._port), timeout=5)
        except OSError:
            return
        path = f"/v1/changes/stream?tables=public.{self.had.table}&after={self.had.last}"
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        connection.setblocking(False)
        self._socket, self._rest = connection, b""
        self.had.reconnects += 1
        ready.register(connection, selectors.EVENT_READ, self)

    def read(self, ready: selectors.BaseSelector) -> None:
        """Take what has come; at the end of the stream, leave."""
        assert self._socket is not None
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            ready.unregister(self._socket)
            self._socket.close()
            self._socket = None
            return
        self._take(self._rest + data)

    def _take(self, data: bytes) -> None:
        # Chunks of HTTP end anywhere; an event counts when its end is there.
        data = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data)
        whole, _, self._rest = data.rpartition(b"\n\n")
        for match in EVENT.finditer(whole):
            sequence = int(match[1])
            if sequence <= self.had.last:
                raise SystemExit(f"{self.had.table}: {sequence} came after {self.had.last}")
            self.had.last = sequence
            self.had.events += 1
            self.had.total += sequence


def main(port: int, tables: Sequence[str]) -> None:
    """Until the standard input ends; prints what the clients have had, once a second."""
    clients = [StreamClient(port, table) for table in tables]
    ready = selectors.DefaultSelector()
    ready.register(sys.stdin, selectors.EVENT_READ, None)
    report = 0.0
    while True:
        for client in clients:
            client.connect(ready)
        for key, _ in ready.select(timeout=0.1):
            if key.data is None:
                return
            key.data.read(ready)
        if time.monotonic() >= report:
            report = time.monotonic() + REPORT_SECONDS
            print(msgspec.json.encode([client.had for client in clients]).decode(), flush=True)
        time.sleep(REST_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
