"""The Python client against a server that follows a script: it repeats, breaks off, speaks TLS."""

import asyncio
import itertools
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.client import AsyncClient, Client
from headrace.errors import ServerAbsent
from tests.client.conftest import Both, Sleep

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Headrace-Epoch: e\r\n\r\n"
KINDS: dict[str, Any] = {"sync": Client, "async": Both}


def event(name: str, sequence: int | None = None) -> bytes:
    """A frame; without a sequence, another event of the same one follows."""
    id = b"" if sequence is None else b"id: %d\n" % sequence
    return b'%bdata: {"event_id":"%b"}\n\n' % (id, name.encode())


class Script:
    """Answers one connection after the other, and notes what each asked."""

    def __init__(self, answers: Sequence[bytes], tls: ssl.SSLContext | None) -> None:
        self._answers = answers
        self._tls = tls
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.asked: list[str] = []
        name = "localhost" if tls else "127.0.0.1"
        port = self._socket.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://{name}:{port}"

    def run(self) -> None:
        for answer in self._answers:
            connection, _ = self._socket.accept()
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                self.asked.append(connection.recv(65536).split()[1].decode())
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
def client_of(kind: str, url: str, sleep: Sleep = lambda seconds: None) -> Iterator[Any]:
    client = KINDS[kind](url, grpc="", sleep=sleep)
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
    assert ["after=0" in script.asked[0], "after=4" in script.asked[1]] == [True, True]


def test_an_event_that_breaks_off_was_never_told(kind: str) -> None:
    whole = event("a", 1)
    answers = [HEAD + whole[:length] for length in range(0, len(whole), 7)]
    with scripted(*answers, HEAD + whole) as script, client_of(kind, script.url) as client:
        events = client.changes(format="entity")
        assert next(events).id == "a"
        events.close()
    assert len(script.asked) == len(answers) + 1


def test_a_stranger_and_a_tired_proxy_are_tried_again(kind: str) -> None:
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


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server's TLS whose certificate this process trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
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
    assert script.asked[0].startswith("/feeds/shop/v1/changes/stream?")


def test_nobody_at_the_address_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ServerAbsent, match=str(port)):
        Client(f"http://127.0.0.1:{port}").get("/health")
    with pytest.raises(ServerAbsent, match=str(port)):
        asyncio.run(AsyncClient(f"http://127.0.0.1:{port}").get("/health"))
