"""Readers that stop reading, besides those of a WebSocket: each costs little."""

import gc
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from headrace.formats import catalogue
from headrace.serve import ServerSettings, _http
from headrace.testing import wait_until
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.serve.conftest import Site, Sites

STUCK = 20
ROWS = 1000
ROW = "x" * 30_000
MOST = 2 << 20  # bytes that a client which does not read may cost

SERVING = Path(__file__).parents[2] / "docs" / "serving.md"

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


Ask = tuple[str, str, str]  # method, path, further headers

LINES = "Accept: application/x-ndjson\r\n"
PAGES = [f"/v1/changes?limit=10000&format={name}" for name in catalogue.names()]
# Every route whose answer grows with the log. A lease is somebody's, so each has its own cursor.
ROUTES: dict[str, list[Ask]] = {
    "pages": [("GET", path, "") for path in PAGES * 3],
    "pages of lines": [("GET", path, LINES) for path in PAGES * 3],
    "lines": [("GET", "/v1/changes", LINES)] * STUCK,
    "streams": [("GET", f"/v1/changes/stream?format={n}", "") for n in catalogue.names()] * 3,
    "changefeed": [("GET", "/changefeed?limit=10000", "")] * STUCK,
    "changefeed stream": [("GET", "/changefeed/stream?keep_alive=true", "")] * STUCK,
    "records": [("GET", "/v1/records", "")] * STUCK,
    "leases": [
        ("POST", f"/v1/cursors/c{number}/lease?limit=1000", "Content-Length: 0\r\n")
        for number in range(STUCK)
    ],
}


@contextmanager
def unread(site: Site, asks: list[Ask]) -> Iterator[None]:
    """Requests whose answers nobody takes."""
    before = _paused(site)
    with ExitStack() as stack:
        for method, path, headers in asks:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(site.address)
            ask = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n"
            client.sendall(ask.encode())
        wait_until(
            lambda: _paused(site) >= before + len(asks), timeout=120, message="all are stuck"
        )
        yield
    wait_until(lambda: _paused(site) <= before, timeout=120, message="they are gone")


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


def read_call(site: Site) -> None:
    with grpc.insecure_channel(site.server.grpc_target) as channel:
        request = v1.SubscribeRequest(limit=ROWS)
        # None is kept: what this client needs is in the same process.
        assert sum(1 for _ in ChangeFeedStub(channel).Subscribe(request, timeout=60)) == ROWS


@pytest.mark.slow
@pytest.mark.requirement("P-16")
def test_whatever_is_not_read_costs_little(site: Site) -> None:
    for number in range(STUCK):
        site.http.put(f"/v1/cursors/c{number}", json={"sequence": 0}).raise_for_status()
    for name, asks in ROUTES.items():
        first = asks[: len(catalogue.names())] if name != "leases" else []
        with unread(site, first):
            pass  # everything is in memory now that is kept for all
        gc.collect()
        before = psutil.Process().memory_info().rss
        with unread(site, asks):
            cost = (psutil.Process().memory_info().rss - before) / len(asks)
            assert cost < MOST, f"{name}: {cost / (1 << 20):.2f} MB a reader"


@pytest.mark.slow
@pytest.mark.requirement("P-16")
def test_a_hundred_readers_that_do_not_read_cost_what_the_docs_say(site: Site) -> None:
    (said,) = re.findall(r"holds back nobody and costs at most (\d+) MB", SERVING.read_text())
    assert int(said) << 20 == MOST
    everything = [ask for name, asks in ROUTES.items() if name != "leases" for ask in asks]
    with unread(site, everything[::7]):
        pass
    gc.collect()
    before = psutil.Process().memory_info().rss
    with unread(site, everything[:100]):
        assert psutil.Process().memory_info().rss - before < 100 * MOST


def test_calls_that_are_not_read_cost_little(site: Site) -> None:
    with unread_calls(site, 1):
        read_call(site)  # everything is in memory now that is kept for all
    before = psutil.Process().memory_info().rss
    with unread_calls(site):
        read_call(site)  # the server has come to all of them
        assert psutil.Process().memory_info().rss - before < STUCK * MOST
