"""What one client notices while another attacks: how long its polls take.

A `headrace run` in a process of its own over a log of 20,300 changes, a client in another process
that polls its end all the time, and attacks one after the other.
"""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import msgspec

from headrace.change.event import Batch
from headrace.formats import catalogue
from headrace.log import Log
from headrace.testing import free_port, wait_until
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub

from .delivery_report import Grid, verdict
from .formats import updates
from .report import Figure

SMALL_ROWS, LARGE_ROWS = 20_000, 300
P99 = 100  # ms
ATTACK_SECONDS = 2.0  # at least, each

# In a process of its own, so that it waits for the server alone.
POLLING = """
import http.client, sys, time
client = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=600)
while True:
    began = time.monotonic()
    client.request("GET", "/v1/changes?limit=10&after=" + sys.argv[2])
    client.getresponse().read()
    print(time.monotonic(), time.monotonic() - began, flush=True)
    time.sleep(0.005)
"""


class Victim:
    """A server with something to read, and a client that polls it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.port, self.grpc_port = free_port(), free_port()
        latest = _filled(folder / "data" / "log")
        config = {
            "sources": {"shop": {"type": "sqlite", "path": "absent.db"}},
            "server": {"port": self.port, "grpc_port": self.grpc_port, "stall_seconds": 80_000},
        }
        (folder / "headrace.yaml").write_text(msgspec.json.encode(config).decode())
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-m", "headrace.cli", "run"]
        self.server = stack.enter_context(
            subprocess.Popen(command, cwd=folder, stdout=quiet, stderr=quiet)
        )
        stack.callback(self.server.kill)
        wait_until(lambda: self.ask("GET", "/livez") == 200, timeout=240, message="it answers")
        polling = [sys.executable, "-c", POLLING, str(self.port), str(latest - 20)]
        poller = stack.enter_context(subprocess.Popen(polling, stdout=subprocess.PIPE, text=True))
        stack.callback(poller.kill)
        self._polls: list[tuple[float, float]] = []
        threading.Thread(target=self._count, args=(poller.stdout,), daemon=True).start()

    def _count(self, lines: Any) -> None:
        for line in lines:
            at, took = map(float, line.split())
            self._polls.append((at, took))

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> int:
        """A request on a connection of its own; 0: there was no answer."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            client.request(method, path, body, headers)
            reply = client.getresponse()
            reply.read()
            return reply.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            client.close()

    def polls(self, attack: Callable[["Victim"], object]) -> list[float]:
        """How long polls took, in seconds, while somebody attacked; the shortest first."""
        began = time.monotonic()
        while time.monotonic() < began + ATTACK_SECONDS:
            attack(self)
        # One that was held up ends later.
        until = time.monotonic()
        wait_until(
            lambda: len(self._during(began)) >= 20 and self._polls[-1][0] > until,
            timeout=600,
            message="polls are answered",
        )
        return sorted(self._during(began))

    def _during(self, began: float) -> list[float]:
        return [took for at, took in list(self._polls) if at >= began]


def _filled(folder: Path) -> int:
    """A log of small rows behind large ones; returns its last sequence."""
    small = updates(SMALL_ROWS)
    large = msgspec.json.encode({"id": "1", "photo": "x" * 30_000})
    with Log.open(folder) as log:
        table = log.register(small[0][0].table)
        for transaction in [*small[: LARGE_ROWS // len(small[0])], *small]:
            rows = [msgspec.structs.replace(change, table=table) for change in transaction]
            if log.latest_sequence < LARGE_ROWS:
                rows = [msgspec.structs.replace(change, after=large) for change in rows]
            log.append("shop", Batch(rows, b"{}"))
        return log.latest_sequence


# --- the attacks ---------------------------------------------------------------------------------


def _at_once(victim: Victim, count: int, path: str, **headers: str) -> None:
    asks = [
        threading.Thread(target=victim.ask, args=("GET", path), kwargs=headers)
        for _ in range(count)
    ]
    for ask in asks:
        ask.start()
    for ask in asks:
        ask.join()


def patterns(victim: Victim) -> None:
    """Patterns that are long to read."""
    for name in ("event_type", "trigger", "tables", "changed_fields"):
        for text in "[*?,":
            assert victim.ask("GET", f"/v1/changes?{name}={text * 60_000}") == 400


def scans(victim: Victim) -> None:
    """Filters that nothing passes, over all of the log, many at once."""
    _at_once(victim, 20, f"/v1/changes?limit=10&trigger={'*a' * 99}")
    _at_once(victim, 20, f"/v1/changes?limit=10&changed_fields={','.join(['x'] * 100)}")


def pages(victim: Victim) -> None:
    """As much as can be read, in every format."""
    for name in catalogue.names():
        _at_once(victim, 3, f"/v1/changes?limit=10000&format={name}")
    _at_once(victim, 5, "/v1/changes", Accept="application/x-ndjson")


def documents(victim: Victim) -> None:
    """Bodies that are deep or large, many parameters, long paths."""
    for body in ("[" * 65_000, '{"a":' * 10_000, "[" + "1," * 32_000 + "1]"):
        assert victim.ask("PUT", "/v1/cursors/a", body) == 400
    assert victim.ask("PUT", "/v1/cursors/a", "x" * 10_000_000) in (0, 413)
    assert victim.ask("GET", "/v1/changes?" + "a=1&" * 15_000) == 400
    assert victim.ask("GET", "/" + "a/" * 30_000) == 404


def everything(victim: Victim) -> None:
    """Routes that show all there is."""
    for path in (
        "/openapi.json",
        "/metrics",
        "/v1/tables",
        "/v1/ranges?parts=10000",
        "/v1/records",
    ):
        _at_once(victim, 5, path)


def unread(victim: Victim) -> None:
    """Answers that nobody takes."""
    with ExitStack() as stack:
        for name in [*catalogue.names()] * 5:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", victim.port))
            path = f"/v1/changes?limit=10000&format={name}"
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        time.sleep(1)


def idle(victim: Victim) -> None:
    """Connections that send nothing."""
    with ExitStack() as stack:
        for _ in range(1000):
            client = stack.enter_context(socket.socket())
            with suppress(OSError):
                client.connect(("127.0.0.1", victim.port))
        time.sleep(1)


def bombs(victim: Victim) -> None:
    """Small requests that are large when unpacked."""
    target = f"127.0.0.1:{victim.grpc_port}"
    with grpc.insecure_channel(target, compression=grpc.Compression.Gzip) as channel:
        bomb = v1.PollRequest(tables=["x" * 30_000_000])
        for _ in range(3):
            with suppress(grpc.RpcError):
                ChangeFeedStub(channel).Poll(bomb, timeout=60)
    bomb_head = {"Content-Encoding": "gzip"}
    assert victim.ask("PUT", "/v1/cursors/a", "\x1f" * 60_000, **bomb_head) == 400


def keys(victim: Victim) -> None:
    """Keys with many patterns."""
    wanted = json.dumps({"tables": ["a*" * 90] * 100})
    for _ in range(20):
        victim.ask("POST", "/v1/keys", wanted)


def nothing(victim: Victim) -> None:
    """To compare with."""
    time.sleep(ATTACK_SECONDS)


ATTACKS = (nothing, patterns, documents, scans, pages, everything, unread, idle, bombs, keys)


# --- what was measured ---------------------------------------------------------------------------


def measure(folder: Path) -> Grid:
    """Every attack once."""
    rows, reached = [], []
    with ExitStack() as stack:
        victim = Victim(folder, stack)
        for attack in ATTACKS:
            polls = [1000 * seconds for seconds in victim.polls(attack)]
            p50, p99 = (polls[int(len(polls) * rank)] for rank in (0.5, 0.99))
            about = (attack.__doc__ or "").rstrip(".")
            rows.append((about, f"{len(polls):,}", *(f"{n:.1f}" for n in (p50, p99, polls[-1]))))
            figure = Figure("p99", p99, "ms", below=P99)
            reached.append(verdict(about, figure))
    header = ("", "polls", "p50, ms", "p99, ms", "worst, ms")
    return Grid("Attacks, and another client's polls", header, rows, reached)
