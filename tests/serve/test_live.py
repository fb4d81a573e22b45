"""A key that ends takes everything with it that lives by it, also what its client does not take."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from headrace.log.keys import IssuedKey, Key, KeyRequest
from headrace.serve import ServerSettings
from headrace.serve.keyring import Limiter
from headrace.testing import wait_until
from tests.serve.conftest import Site, Sites
from tests.serve.ws import Talk

ROW = "x" * 30_000
ROWS = 500  # more than any buffer between here and there holds

# In a process of its own: gRPC's threads would read on behind the test's back.
CALL = """
import sys, grpc
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
target, secret = sys.argv[1:]
request = v1.SubscribeRequest(together=True)
with grpc.insecure_channel(target) as channel:
    call = ChangeFeedStub(channel).Subscribe(request, metadata=(("x-api-key", secret),))
    call.initial_metadata()
    print("asked", flush=True)
    sys.stdin.readline()
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        print(error.code().name, flush=True)
"""

SMALL = (socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)


@contextmanager
def unread(site: Site, made: IssuedKey, path: str, accept: str) -> Iterator[None]:
    with socket.socket() as client:
        client.setsockopt(*SMALL)
        client.connect(site.address)
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n"
        client.sendall(f"{head}X-API-Key: {made.secret}\r\n\r\n".encode())
        yield


def sse(site: Site, made: IssuedKey) -> AbstractContextManager[None]:
    return unread(site, made, "/v1/changes/stream", "text/event-stream")


def changefeed(site: Site, made: IssuedKey) -> AbstractContextManager[None]:
    return unread(site, made, "/changefeed/stream?keep_alive=true", "text/event-stream")


def ndjson(site: Site, made: IssuedKey) -> AbstractContextManager[None]:
    return unread(site, made, "/v1/changes", "application/x-ndjson")


@contextmanager
def websocket(site: Site, made: IssuedKey) -> Iterator[None]:
    with Talk(site.url, sockopt=(SMALL,)) as talk:
        talk.auth(made.secret).say(type="subscribe", tables=["users"], resume={"lastSequence": 0})
        yield


@contextmanager
def grpc_call(site: Site, made: IssuedKey) -> Iterator[None]:
    asked = [sys.executable, "-c", CALL, site.server.grpc_target, made.secret]
    with subprocess.Popen(
        asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "asked\n"
            yield
            assert process.communicate("\n", timeout=20)[0] == "UNAUTHENTICATED\n"
        finally:
            process.kill()


Reader = Callable[[Site, IssuedKey], AbstractContextManager[None]]


class Sent:
    """How many events went out, by what the key is charged."""

    def __init__(self, limiter: Limiter) -> None:
        self._spend = limiter.spend
        self.events = 0
        self._looks: list[int] = []

    def spend(self, key: Key, events: int) -> float:
        self.events += events
        return self._spend(key, events)

    def still(self) -> bool:
        """Whether nothing went out between the last looks."""
        self._looks.append(self.events)
        return len(self._looks) > 30 and len(set(self._looks[-30:])) == 1


@pytest.mark.parametrize("reader", [sse, changefeed, ndjson, websocket, grpc_call])
@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_a_key_that_ends_drops_a_client_that_reads_nothing(
    sites: Sites, reader: Reader, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = sites(ServerSettings(port=0, grpc_port=0, require_key=True))
    for number in range(ROWS):
        site.writer.put("users", str(number), photo=ROW)
    keyring = site.service.keyring
    now, limiter = keyring._clock, keyring.limiter
    made = keyring.create(KeyRequest(seconds=3600))
    sent = Sent(limiter)
    monkeypatch.setattr(limiter, "spend", sent.spend)

    def connections() -> int:
        return limiter._connections.get(made.key.id, 0)

    with reader(site, made):
        wait_until(lambda: connections() == 1, message="it is connected")
        wait_until(sent.still, message="it is stuck")
        assert (connections(), sent.events < ROWS) == (1, True)
        if end == "revoked":
            keyring.revoke(made.key.id)
        else:
            keyring._clock = lambda: now() + 7_200_000_000
        wait_until(lambda: connections() == 0, message="the server has let go")
        wait_until(lambda: not _unsent(site), message="nothing is kept for it")
    assert sent.events < ROWS


def _unsent(site: Site) -> int:
    connections = list(site.server._server.server_state.connections)
    return sum(each.transport.get_write_buffer_size() for each in connections)
