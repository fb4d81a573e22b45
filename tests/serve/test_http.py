"""Clients that send too slowly or too much, or take nothing: each is let go."""

import http.client
import itertools
import json
import select
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import websocket

from headrace.serve import _http
from headrace.serve._http import BoundedProtocol
from headrace.testing import wait_until
from tests.serve.conftest import Site
from tests.serve.sse import Reader

HOST = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
STREAM = b"GET /v1/changes/stream HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /changefeed/retention HTTP/1.1\r\n" + HOST + b"Content-Length: 65000\r\n\r\n"
UPGRADE = b"GET /v1/stream HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"


@pytest.fixture
def hurried(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A server that waits half a second for a request."""
    monkeypatch.setattr(_http, "REQUEST_SECONDS", 0.5)
    return site


def connections(site: Site) -> list[BoundedProtocol]:
    """Those that the server has."""
    found = list(site.server._server.server_state.connections)
    return [each for each in found if isinstance(each, BoundedProtocol)]


def answered(client: socket.socket) -> tuple[int, dict[str, str]]:
    """The answer, after which the server must have closed."""
    answer = http.client.HTTPResponse(client)
    answer.begin()
    problem = json.loads(answer.read())
    assert answer.headers["connection"] == "close"
    assert client.recv(1) == b""
    return answer.status, problem


def drip(client: socket.socket) -> None:
    """Send a byte at a time for as long as nothing is answered."""
    for _ in itertools.count():
        if select.select([client], [], [], 0.02)[0]:
            return
        client.sendall(b"x")


# --- slow --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begun",
    [b"GET /", GET, GET + b"X-Slow: ", UPGRADE, POST],
    ids=["line", "head", "header", "upgrade", "body"],
)
def test_a_request_that_comes_a_byte_at_a_time_is_cut_off(hurried: Site, begun: bytes) -> None:
    with socket.create_connection(hurried.address, timeout=20) as client:
        client.sendall(begun)
        drip(client)
        status, problem = answered(client)
    assert (status, problem["error"]) == (408, "request_timeout")
    wait_until(lambda: not connections(hurried), message="nothing of it is left")
    assert hurried.get("/health").json()["status"] == "healthy"


def test_a_client_that_says_nothing_is_cut_off(hurried: Site) -> None:
    with socket.create_connection(hurried.address, timeout=20) as client:
        assert answered(client)[0] == 408


def test_a_second_request_on_a_connection_is_cut_off_too(hurried: Site) -> None:
    with socket.create_connection(hurried.address, timeout=20) as client:
        client.sendall(GET + b"\r\n")
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert (answer.status, bool(answer.read())) == (200, True)
        client.sendall(b"GET /he")
        drip(client)
        assert answered(client)[0] == 408


def test_a_hundred_slow_clients_hold_up_nobody(hurried: Site) -> None:
    slow = [socket.create_connection(hurried.address, timeout=20) for _ in range(100)]
    try:
        for client in slow:
            client.sendall(GET + b"X-Slow: ")
        assert hurried.get("/health").json()["status"] == "healthy"
        assert {answered(client)[0] for client in slow} == {408}
    finally:
        for client in slow:
            client.close()


def test_only_requests_must_hurry_and_not_their_answers(hurried: Site) -> None:
    url = f"{hurried.url}/changefeed/stream?keep_alive=true&heartbeat_ms=100"
    socket_url = hurried.url.replace("http", "ws") + "/v1/stream"
    with ThreadPoolExecutor() as pool, Reader(url) as reader:
        poll = pool.submit(hurried.get, "/v1/changes", wait_ms=1500)
        talk = websocket.create_connection(socket_url, timeout=20, suppress_origin=True)
        wait_until(lambda: reader.text.count(": heartbeat") > 12, message="a second has passed")
        assert not reader.ended.is_set()
        talk.send("{}")
        assert "error" in json.loads(talk.recv())
        talk.close()
        assert poll.result().json()["changes"] == []
        assert hurried.get("/health").status_code == 200  # on the connection that was idle


# --- large, and no HTTP at all -----------------------------------------------------------------


ENDLESS = {
    "line": b"GET /" + b"x" * 10_000_000,
    "header": GET + b"X: " + b"x" * 10_000_000,
    "headers": GET + b"".join(b"X-%d: y\r\n" % number for number in range(1_000_000)),
}


@pytest.mark.parametrize("head", ENDLESS.values(), ids=ENDLESS)
def test_a_head_of_megabytes_is_refused(site: Site, head: bytes) -> None:
    with socket.create_connection(site.address, timeout=20) as client:
        try:
            client.sendall(head)
            assert answered(client)[0] == 431
        except (ConnectionError, http.client.HTTPException):
            pass  # it was still sending when the server had hung up
    wait_until(lambda: not connections(site), message="nothing of it is left")
    assert site.get("/health").status_code == 200


def test_a_head_that_is_a_little_too_large_is_told_so(site: Site) -> None:
    with socket.create_connection(site.address, timeout=20) as client:
        # Not a byte more: what the server has not read when it closes would reset the connection.
        client.sendall((GET + b"X: ").ljust(_http.LARGEST_HEAD + 1, b"x"))
        status, problem = answered(client)
    assert (status, problem["error"]) == (431, "head_too_large")


def test_a_large_head_that_is_not_too_large_is_read(site: Site) -> None:
    assert site.http.get("/health", headers={"X": "x" * 60_000}).status_code == 200


@pytest.mark.parametrize(
    "request_", [b"\x16\x03\x01\x02\x00\x01", b"HELO there\r\n\r\n", GET + b"Bad Name: 1\r\n\r\n"]
)
def test_what_is_no_http_gets_json_too(site: Site, request_: bytes) -> None:
    with socket.create_connection(site.address, timeout=20) as client:
        client.sendall(request_)
        status, problem = answered(client)
    assert (status, problem["error"]) == (400, "bad_request")


# --- taking nothing ----------------------------------------------------------------------------


def deaf(site: Site) -> socket.socket:
    """A client that asks for a stream, and from then on reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(site.address)
    client.sendall(STREAM)
    return client


def fill(site: Site) -> None:
    """More than any buffer between here and there holds."""
    for number in range(32):
        site.writer.put("users", str(number), photo="x" * (1 << 18))


def stuck(site: Site) -> list[BoundedProtocol]:
    return [each for each in connections(site) if each.flow.write_paused]


def test_a_stream_whose_reader_takes_nothing_is_dropped(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_http, "STALLED_SECONDS", 0.5)
    with deaf(site):
        site.await_waiting()
        fill(site)
        wait_until(lambda: not connections(site), message="it is dropped")
    wait_until(lambda: site.feed.waiting == 0, message="nothing of it is left")


def test_a_stream_whose_reader_takes_a_little_all_the_time_is_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_http, "STALLED_SECONDS", 0.5)
    looks = []
    look = BoundedProtocol._look_for_less

    def looked(protocol: BoundedProtocol, left: int) -> None:
        looks.append(left)
        look(protocol, left)

    monkeypatch.setattr(BoundedProtocol, "_look_for_less", looked)
    with deaf(site) as client:
        site.await_waiting()
        fill(site)
        wait_until(lambda: bool(stuck(site)), message="it is stuck")

        def went_on() -> bool:
            assert client.recv(2000)
            return len(looks) >= 4

        wait_until(went_on, message="it was looked at several times")
        assert len(connections(site)) == 1


def test_a_stream_whose_reader_goes_on_reading_is_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_http, "STALLED_SECONDS", 30.0)
    with deaf(site) as client:
        site.await_waiting()
        fill(site)
        wait_until(lambda: bool(stuck(site)), message="it is stuck")
        received = b""
        while not (b"id: 32\n" in received[-300_000:] and received.endswith(b"\n\n\r\n")):
            received += client.recv(1 << 20)
        wait_until(lambda: not stuck(site), message="it goes on")
        assert [each._stalled for each in connections(site)] == [None]
