"""Hostile clients one after the other, beside one that polls: it notices nothing."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from headrace.change.event import Column, Table
from headrace.formats import catalogue
from headrace.testing import free_port, wait_until
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.changes import opened_writer

# Measured alone, the 99th percentile is below 100 ms throughout (bench/RESULTS.md). Here other
# tests run at the same time; what is asserted is that nothing stops the others.
MOST_SECONDS = 1.0
ROWS, LARGE_ROWS = 20_000, 300

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
        (folder / "headrace.yaml").write_text(yaml.safe_dump(config))
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

    def worst(self, attack: Callable[["Victim"], object]) -> float:
        """The 99th percentile of polls, in seconds, while somebody attacks."""
        began = time.monotonic()
        attack(self)
        # One that was held up ends later.
        until = time.monotonic()
        wait_until(
            lambda: len(self._during(began)) >= 20 and self._polls[-1][0] > until,
            timeout=600,
            message="polls are answered",
        )
        took = sorted(self._during(began))
        return took[int(len(took) * 0.99)]

    def _during(self, began: float) -> list[float]:
        return [took for at, took in list(self._polls) if at >= began]


def _filled(folder: Path) -> int:
    columns = tuple(Column(f"c{number}", "text") for number in range(30))
    with opened_writer(folder) as writer:
        for number in range(LARGE_ROWS):
            writer.put("users", str(number), photo="x" * 30_000)
        writer.put_many("orders", ROWS)
        for number in range(200):
            name = f"t{number}"
            writer.log.register(Table("shop", "postgres", "o", "db", "public", name, columns))
        return writer.log.latest_sequence


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with ExitStack() as stack:
        yield Victim(tmp_path_factory.mktemp("victim"), stack)


def at_once(victim: Victim, count: int, path: str, **headers: str) -> None:
    asks = [
        threading.Thread(target=victim.ask, args=("GET", path), kwargs=headers)
        for _ in range(count)
    ]
    for ask in asks:
        ask.start()
    for ask in asks:
        ask.join()


def patterns(victim: Victim) -> None:
    for name in ("event_type", "trigger", "tables", "changed_fields"):
        for text in "[*?,":
            assert victim.ask("GET", f"/v1/changes?{name}={text * 60_000}") == 400


def scans(victim: Victim) -> None:
    at_once(victim, 20, f"/v1/changes?limit=10&trigger={'*a' * 99}")
    at_once(victim, 20, f"/v1/changes?limit=10&changed_fields={','.join(['x'] * 100)}")


def pages(victim: Victim) -> None:
    for name in catalogue.names():
        at_once(victim, 3, f"/v1/changes?limit=10000&format={name}")
    at_once(victim, 5, "/v1/changes", Accept="application/x-ndjson")


def documents(victim: Victim) -> None:
    for body in ("[" * 65_000, '{"a":' * 10_000, "[" + "1," * 32_000 + "1]"):
        assert victim.ask("PUT", "/v1/cursors/a", body) == 400
    assert victim.ask("PUT", "/v1/cursors/a", "x" * 10_000_000) in (0, 413)
    assert victim.ask("GET", "/v1/changes?" + "a=1&" * 15_000) == 400
    assert victim.ask("GET", "/" + "a/" * 30_000) == 404


def everything(victim: Victim) -> None:
    for path in (
        "/openapi.json",
        "/metrics",
        "/v1/tables",
        "/v1/ranges?parts=10000",
        "/v1/records",
    ):
        at_once(victim, 5, path)


def unread(victim: Victim) -> None:
    with ExitStack() as stack:
        for name in [*catalogue.names()] * 5:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", victim.port))
            path = f"/v1/changes?limit=10000&format={name}"
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        time.sleep(1)


def idle(victim: Victim) -> None:
    with ExitStack() as stack:
        for _ in range(1000):
            client = stack.enter_context(socket.socket())
            with suppress(OSError):
                client.connect(("127.0.0.1", victim.port))
        time.sleep(1)


def bombs(victim: Victim) -> None:
    target = f"127.0.0.1:{victim.grpc_port}"
    with grpc.insecure_channel(target, compression=grpc.Compression.Gzip) as channel:
        bomb = v1.PollRequest(tables=["x" * 30_000_000])
        for _ in range(3):
            with suppress(grpc.RpcError):
                ChangeFeedStub(channel).Poll(bomb, timeout=60)
    bomb_head = {"Content-Encoding": "gzip"}
    assert victim.ask("PUT", "/v1/cursors/a", "\x1f" * 60_000, **bomb_head) == 400


def keys(victim: Victim) -> None:
    wanted = json.dumps({"tables": ["a*" * 90] * 100})
    for _ in range(20):
        victim.ask("POST", "/v1/keys", wanted)


ATTACKS = (patterns, documents, scans, pages, everything, unread, idle, bombs, keys)


@pytest.mark.faults
@pytest.mark.requirement("P-16")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_keeps_no_other_client_waiting(
    victim: Victim, attack: Callable[[Victim], object]
) -> None:
    assert victim.worst(attack) < MOST_SECONDS
