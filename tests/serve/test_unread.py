"""Readers that stop reading, besides those of a WebSocket: each costs little."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import psutil
import pytest

from headrace.serve import ServerSettings, _http
from headrace.testing import wait_until
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.serve.conftest import Site, Sites

STUCK = 20
ROWS = 1000
ROW = "x" * 30_000
MOST = 2 << 20  # bytes that a client which does not read may cost

# In a process of its own: what the clients themselves keep is not the server's.
CALLS = """
import sys, grpc
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
kept = []
for number in range(int(sys.argv[2])):
    options = (("grpc.use_local_subchannel_pool", 1),)
    channel = grpc.insecure_channel(sys.argv[1], options=options)
    call = ChangeFeedStub(channel).Subscribe(v1.SubscribeRequest(together=True))
    call.initial_metadata()
    kept.append((channel, call))
print("asked", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def site(sites: Sites) -> Site:
    """A server with more to read than any buffer between here and there holds."""
    site = sites(ServerSettings(port=0, grpc_port=0))
    for number in range(ROWS):
        site.writer.put("users", str(number), photo=ROW)
    return site


@contextmanager
def unread_lines(site: Site) -> Iterator[None]:
    ask = b"GET /v1/changes HTTP/1.1\r\nHost: localhost\r\nAccept: application/x-ndjson\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(STUCK):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(site.address)
            client.sendall(ask)
        wait_until(lambda: _paused(site) == STUCK, timeout=120, message="all are stuck")
        yield


@contextmanager
def unread_calls(site: Site, count: int = STUCK) -> Iterator[None]:
    asked = [sys.executable, "-c", CALLS, site.server.grpc_target, str(count)]
    with subprocess.Popen(
        asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "asked\n"
            yield
        finally:
            process.kill()


def _paused(site: Site) -> int:
    connections = list(site.server._server.server_state.connections)
    bounded = [each for each in connections if isinstance(each, _http.BoundedProtocol)]
    return sum(each.flow.write_paused for each in bounded)


def read_lines(site: Site) -> None:
    answer = site.http.get("/v1/changes", headers={"Accept": "application/x-ndjson"})
    assert answer.text.count("\n") == ROWS


def read_call(site: Site) -> None:
    with grpc.insecure_channel(site.server.grpc_target) as channel:
        request = v1.SubscribeRequest(limit=ROWS)
        # None is kept: what this client needs is in the same process.
        assert sum(1 for _ in ChangeFeedStub(channel).Subscribe(request, timeout=60)) == ROWS


def test_lines_that_are_not_read_cost_little(site: Site) -> None:
    read_lines(site)  # everything is in memory now that is kept for all
    before = psutil.Process().memory_info().rss
    with unread_lines(site):
        assert psutil.Process().memory_info().rss - before < STUCK * MOST


def test_calls_that_are_not_read_cost_little(site: Site) -> None:
    with unread_calls(site, 1):
        read_call(site)  # everything is in memory now that is kept for all
    before = psutil.Process().memory_info().rss
    with unread_calls(site):
        read_call(site)  # the server has come to all of them
        assert psutil.Process().memory_info().rss - before < STUCK * MOST
