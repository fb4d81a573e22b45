"""The Python client against a server that follows a script: it repeats, breaks off, speaks TLS."""

import asyncio
import gc
import gzip
import itertools
import json
import shutil
import socket
import ssl
import subprocess
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from websockets.sync.server import ServerConnection, serve

from headrace.client import AsyncClient, Client
from headrace.errors import ConfigError, ServerAbsent
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedServicer, add_ChangeFeedServicer_to_server
from tests.client.conftest import Both, Sleep
from tests.needs import missing

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Headrace-Epoch: e\r\n\r\n"
KINDS: dict[str, Any] = {"sync": Client, "async": Both}


def event(name: str, sequence: int | None = None) -> bytes:
    """A frame; without a sequence, another event of the same one follows."""
    id = b"" if sequence is None else b"id: %d\n" % sequence
    return b'%bdata: {"event_id":"%b"}\n\n' % (id, name.encode())


class Script:
    """Answers one connection after the other, and records the path of each request."""

    def __init__(self, answers: Sequence[bytes], tls: ssl.SSLContext | None) -> None:
        self._answers = answers
        self._tls = tls
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.paths: list[str] = []
        name = "localhost" if tls else "127.0.0.1"
        port = self._socket.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://{name}:{port}"

    def run(self) -> None:
        for answer in self._answers:
            connection, _ = self._socket.accept()
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                self.paths.append(connection.recv(65536).split()[1].decode())
                connection.sendall(answer)
        self._socket.close()


@contextmanager
def scripted(*answers: bytes, tls: ssl.SSLContext | None = None) -> Iterator[Script]:
    script = Script(answers, tls)
    thread = threading.Thread(target=script.run)
    thread.start()
    yield script
    thread.join()


@contextmanager
def client_of(
    kind: str, url: str, sleep: Sleep = lambda seconds: None, *, at: str = ""
) -> Iterator[Any]:
    client = KINDS[kind](url, grpc=at, sleep=sleep)
    yield client
    if isinstance(client, Both):
        client.close()


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.requirement("S1-41")
def test_what_a_broken_connection_repeats_is_skipped(kind: str) -> None:
    # Two events at sequence 5, and the connection breaks between them.
    first = HEAD + event("a", 4) + event("b")
    second = HEAD + event("b") + event("c", 5) + event("d", 6)
    with scripted(first, second) as script, client_of(kind, script.url) as client:
        events = client.changes(format="entity")
        got = list(itertools.islice(events, 4))
        events.close()
    assert [(each.id, each.sequence) for each in got] == [("a", 4), ("b", 4), ("c", 5), ("d", 6)]
    assert ["after=0" in script.paths[0], "after=4" in script.paths[1]] == [True, True]


@contextmanager
def websocket_sending(*turns: Sequence[str]) -> Iterator[str]:
    """A server of the WebSocket that sends each connection some events, and closes it."""
    batches = iter(turns)

    def talk(connection: ServerConnection) -> None:
        connection.recv()
        connection.send('{"type":"auth_success"}')
        connection.recv()
        connection.send('{"type":"subscription_confirmed","sequence":4,"epoch":"e"}')
        for id in next(batches, ()):
            connection.send(json.dumps({"type": "cdc_event", "eventId": id}))

    with serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.requirement("S1-41")
def test_what_a_websocket_repeats_is_skipped(kind: str) -> None:
    with (
        websocket_sending(["a", "b"], ["a", "b", "c"], ["c", "d"]) as url,
        client_of(kind, url) as client,
    ):
        events = client.changes(["users"], transport="websocket", after=4)
        assert [each.id for each in itertools.islice(events, 4)] == ["a", "b", "c", "d"]
        events.close()


class Repeating(ChangeFeedServicer):
    """Sends each call some events, and breaks off."""

    def __init__(self, *turns: Sequence[str]) -> None:
        self._turns = iter(turns)

    def Subscribe(self, request: Any, context: Any) -> Iterator[v1.SubscribeResponse]:  # noqa: N802
        context.send_initial_metadata((("x-headrace-epoch", "e"),))
        for id in next(self._turns, ()):
            yield v1.SubscribeResponse(events=[v1.CDCEvent(id=id, sequence=5)])
        context.abort(grpc.StatusCode.UNAVAILABLE, "broken off")


@pytest.mark.requirement("S1-41")
def test_what_grpc_repeats_is_skipped(kind: str) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    add_ChangeFeedServicer_to_server(Repeating(["a", "b"], ["b", "c"], ["c", "d"]), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with client_of(kind, "http://127.0.0.1:1", at=target) as client:
            events = client.changes(transport="grpc")
            assert [each.id for each in itertools.islice(events, 4)] == ["a", "b", "c", "d"]
            events.close()
    finally:
        server.stop(None).wait()


def test_an_event_that_breaks_off_is_not_delivered(kind: str) -> None:
    whole = event("a", 1)
    answers = [HEAD + whole[:length] for length in range(0, len(whole), 7)]
    with scripted(*answers, HEAD + whole) as script, client_of(kind, script.url) as client:
        events = client.changes(format="entity")
        assert next(events).id == "a"
        events.close()
    assert len(script.paths) == len(answers) + 1


def test_another_server_and_a_failing_proxy_are_tried_again(kind: str) -> None:
    answers = [
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 3\r\n\r\nno!",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b'HTTP/1.1 503 Later\r\nContent-Length: 33\r\n\r\n{"error":"unavailable","message":',
        b"",
    ]
    slept: list[float] = []
    with (
        scripted(*answers, HEAD + event("a", 1)) as script,
        client_of(kind, script.url, slept.append) as client,
    ):
        events = client.changes(format="entity")
        assert next(events).id == "a"
        events.close()
    assert slept == [1, 2, 4, 8]


BUSY = b"""HTTP/1.1 429 Too Many Requests\r
Retry-After: 7\r
Content-Length: 42\r
\r
{"error":"rate_limited","message":"later"}"""


def test_it_waits_as_long_as_a_response_says_and_logs_once_why(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    slept: list[float] = []
    with (
        caplog.at_level("INFO", "headrace.client"),
        scripted(BUSY, BUSY, BUSY, BUSY, HEAD + event("a", 1)) as script,
        client_of(kind, script.url, slept.append) as client,
    ):
        events = client.changes(format="entity")
        assert next(events).id == "a"
        events.close()
    assert slept == [7, 7, 7, 8]
    first, last = (record.message for record in caplog.records)
    assert "answers 429: later; this is tried again" in first
    assert last == "connected again after 4 attempts"


def test_the_position_of_a_cursor_is_requested_alone(kind: str) -> None:
    view = b'{"name":"billing","sequence":41}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(view), view)
    with scripted(answer, HEAD + event("a", 42)) as script, client_of(kind, script.url) as client:
        events = client.changes(format="entity", cursor="billing")
        assert next(events).sequence == 42
        events.close()
    assert script.paths[0] == "/v1/cursors/billing"


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server's TLS whose certificate this process trusts."""
    if shutil.which("openssl") is None:
        missing("openssl makes the certificate, and is not installed")
    key, made = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(made))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    return context


def test_it_speaks_tls_to_a_proxy(kind: str, certificate: ssl.SSLContext) -> None:
    with (
        scripted(HEAD + event("a", 1), tls=certificate) as script,
        client_of(kind, script.url) as client,
    ):
        events = client.changes(format="entity")
        assert next(events).id == "a"
        events.close()


@pytest.mark.parametrize("base", ["/feeds/shop", "/feeds/shop/"])
def test_a_server_may_have_a_path_of_its_own(kind: str, base: str) -> None:
    with (
        scripted(HEAD + event("a", 1)) as script,
        client_of(kind, script.url + base) as client,
    ):
        events = client.changes(format="entity")
        assert next(events).id == "a"
        events.close()
    assert script.paths[0].startswith("/feeds/shop/v1/changes/stream?")


def test_a_loop_that_is_left_at_once_closes_its_connection_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def first(url: str) -> str:
        async for received in AsyncClient(url).changes(format="entity"):
            return received.id
        return ""

    with scripted(HEAD + event("a", 1) + event("b", 2)) as script:
        assert asyncio.run(first(script.url), debug=True) == "a"
    gc.collect()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("key", ["cdc_0\n", "cdc_\N{SNOWMAN}"])
def test_a_key_that_cannot_be_sent_is_not_shown(kind: str, key: str) -> None:
    client = KINDS[kind]("http://127.0.0.1:1", key, grpc="", sleep=lambda seconds: None)
    with pytest.raises(ConfigError, match="characters that no key has") as caught:
        next(client.changes())
    assert key not in "".join(traceback.format_exception(caught.value))
    if isinstance(client, Both):
        client.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://a\x00b:1",
        "http://[v1.x]:1",
        "http://[::1",
        "http://xn--zz\N{SNOWMAN}..:1",
        "http://:1",
    ],
)
def test_an_address_that_is_none_is_named(kind: str, url: str) -> None:
    with pytest.raises(ConfigError, match="the url must be like"), client_of(kind, url):
        pass


def test_a_body_that_is_compressed_without_a_request_is_not_unpacked() -> None:
    body = gzip.compress(b" " * 1_000_000 + b"{}")
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    answers = [head % len(body) + body, head % 3 + b"no!"]
    with scripted(*answers, *answers) as script:
        for _ in answers:
            with pytest.raises(ServerAbsent, match="not a Headrace server"):
                Client(script.url).get("/health")
        for _ in answers:
            with pytest.raises(ServerAbsent, match="not a Headrace server"):
                asyncio.run(AsyncClient(script.url).get("/health"))


def test_the_scheme_of_an_address_may_be_in_capitals(
    kind: str, certificate: ssl.SSLContext
) -> None:
    with (
        scripted(HEAD + event("a", 1), tls=certificate) as script,
        client_of(kind, script.url.replace("https", "HTTPS")) as client,
    ):
        events = client.changes(format="entity")
        assert next(events).id == "a"
        events.close()


def test_an_address_without_a_server_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ServerAbsent, match=str(port)):
        Client(f"http://127.0.0.1:{port}").get("/health")
    with pytest.raises(ServerAbsent, match=str(port)):
        asyncio.run(AsyncClient(f"http://127.0.0.1:{port}").get("/health"))
