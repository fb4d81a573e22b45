"""What a hostile client sends: over real sockets, to a server that goes on for everybody else."""

import itertools
import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import websocket

from headrace.change.event import Op
from headrace.errors import LogError
from headrace.serve.query import LARGEST_BODY
from tests.serve.conftest import Site, Sites
from tests.serve.tenants import FORMATS, OURS, THEIRS, USERS, Draft, append
from tests.serve.ws import Talk

# --- messages of a WebSocket ---------------------------------------------------------------------

BEFORE_AUTH: list[Any] = [
    {"type": "subscribe", "tables": ["orders"]},
    {"type": "pong", "timestamp": "2025-01-01T00:00:00Z"},
    {"type": "protocol_version", "requestedVersion": 1, "supportedVersions": [1]},
]
AFTER_AUTH = {
    "no JSON": ("{", "invalid_message"),
    "deep": ("[" * 60_000, "invalid_message"),
    "deep in a field": ('{"type":"subscribe","tables":' + "[" * 60_000, "invalid_message"),
    "no type": ("{}", "invalid_message"),
    "unknown type": ('{"type":"drop_table"}', "invalid_operation"),
    "second auth": (json.dumps({"type": "auth", "apiKey": "cdc_" + "b" * 64}), "invalid_operation"),
    "no table": ('{"type":"subscribe","tables":[]}', "invalid_message"),
    "101 tables": (
        json.dumps({"type": "subscribe", "tables": [f"t{number}" for number in range(101)]}),
        "invalid_message",
    ),
}


@pytest.fixture
def shop(site: Site) -> Site:
    """A server with a table `orders`."""
    site.writer.table("orders")
    return site


@pytest.mark.requirement("S3-19")
@pytest.mark.parametrize("message", BEFORE_AUTH, ids=lambda message: str(message["type"]))
def test_a_message_before_auth_gets_nothing(shop: Site, message: dict[str, Any]) -> None:
    with Talk(shop.url) as talk:
        assert talk.ask(**message)["error"] == "unauthenticated"
        shop.writer.put("orders", "1")
        talk.auth()
        talk.subscribe("orders")
        shop.writer.put("orders", "2")
        assert [event["data"]["id"] for event in talk.events(1)] == ["2"]


@pytest.mark.parametrize("name", AFTER_AUTH)
def test_a_bad_message_is_answered_and_the_subscription_goes_on(shop: Site, name: str) -> None:
    text, error = AFTER_AUTH[name]
    with Talk(shop.url) as talk:
        talk.auth().subscribe("orders")
        talk.socket.send(text)
        assert talk.hear()["error"] == error
        talk.socket.send_binary(text.encode())
        assert talk.hear()["error"] == "invalid_message"
        shop.writer.put("orders", "1")
        assert [event["data"]["id"] for event in talk.events(1)] == ["1"]


@pytest.mark.requirement("S3-22")
def test_a_second_auth_does_not_make_somebody_else(sites: Sites) -> None:
    site = sites(formats=FORMATS)
    site.log.register(USERS)
    ours, theirs = (site.key(tenant=tenant)["X-API-Key"] for tenant in (OURS, THEIRS))
    with Talk(site.url) as talk:
        talk.auth(ours)
        assert talk.ask(type="auth", apiKey=theirs)["error"] == "invalid_operation"
        talk.subscribe("users")
        for tenant in (THEIRS, OURS):
            row = {"id": tenant, "tenant_id": tenant, "name": "", "status": ""}
            append(site.writer, [Draft(Op.INSERT, USERS, None, row)])
        assert [event["data"]["id"] for event in talk.events(1)] == [OURS]


@pytest.mark.parametrize(
    "frame",
    [
        b"\x83\x80\0\0\0\0",  # an opcode that there is not
        b"\xf1\x80\0\0\0\0",  # bits that nobody agreed on
        b"\x81\x01x",  # not masked
        b"\x89\xfe\x00\x7e\0\0\0\0" + b"x" * 126,  # a ping of more than 125 bytes
        b"\x80\x80\0\0\0\0",  # goes on with what never began
        b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff\0\0\0\0",  # 2^63 bytes to come
        b"\x81\x82\0\0\0\0\xff\xfe",  # text that is no UTF-8
    ],
    ids=["opcode", "reserved", "unmasked", "ping", "continuation", "huge", "utf8"],
)
def test_a_frame_that_breaks_the_protocol_ends_its_connection_alone(
    shop: Site, frame: bytes
) -> None:
    with Talk(shop.url) as other, Talk(shop.url) as talk:
        other.auth().subscribe("orders")
        talk.auth().subscribe("orders")
        assert isinstance(talk.socket.sock, socket.socket)
        talk.socket.sock.sendall(frame)
        with pytest.raises((OSError, websocket.WebSocketException)):  # noqa: PT012
            assert talk.closed()[0] in (1002, 1007, 1009)
            raise websocket.WebSocketConnectionClosedException
        shop.writer.put("orders", "1")
        assert len(other.events(1)) == 1


# --- line ends, and other things that end one thing and begin another ----------------------------

INJECTED = "x\r\nSet-Cookie: stolen=1\r\n\r\n<script>alert(1)</script>"


def operations(site: Site) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every method and path that there is."""
    for path, methods in site.get("/openapi.json").json()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_no_parameter_gets_into_the_headers_or_makes_html(shared: Site) -> None:
    asked = 0
    for method, path, operation in operations(shared):
        for parameter in operation.get("parameters", []):
            places: dict[str, dict[str, str]] = {"path": {}, "query": {}, "header": {}}
            places[parameter["in"]][parameter["name"]] = INJECTED
            if places["header"]:
                continue  # clients cannot send it; see below
            url = filled(path, **places["path"])
            if path == "/v1/changes/stream":
                places["query"].setdefault("upto", "5")  # else it would not end
            answer = shared.http.request(method, url, params=places["query"] or None)
            assert answer.status_code in (200, 400, 404), (method, path, parameter["name"])
            assert "set-cookie" not in answer.headers
            assert answer.headers["content-type"] in (
                *("application/json", "text/event-stream", "application/x-ndjson"),
            )
            asked += 1
    assert asked > 50


def filled(path: str, **values: str) -> str:
    """A path with values in its places; `shop` where none is given."""
    return re.sub(r"{(\w+)}", lambda place: quote(values.get(place[1], "shop"), safe=""), path)


@pytest.mark.parametrize(
    "line",
    [
        b"Last-Event-ID: 1\nSet-Cookie: x=1",
        b"Last-Event-ID: 1\rSet-Cookie: x=1",
        b"Last-Event-ID: 1\x00",
        b"Last-Event-ID: 1\r\n folded: 2",
        b"Last-Event-ID : 1",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: +5",
        b"Content-Length: -1",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: xchunked",
    ],
)
def test_a_request_that_two_servers_could_read_differently_is_refused(
    shared: Site, line: bytes
) -> None:
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    head = b"GET /changefeed/stream HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\n\r\n"
    with socket.create_connection(shared.address, timeout=20) as client:
        client.sendall(head + b"0\r\n\r\n" + smuggled)
        answers = client.makefile("rb").read()
    assert answers.startswith(b"HTTP/1.1 400")
    assert answers.count(b"HTTP/1.1 ") == 1
    assert b"healthy" not in answers


@pytest.mark.parametrize(
    "path",
    ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e", "canonical.json%00", "/etc"],
)
def test_no_path_leads_out_of_the_schemas(shared: Site, path: str) -> None:
    start = f"GET /schemas/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.create_connection(shared.address, timeout=20) as client:
        client.sendall(start.encode())
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"root:" not in answer


def test_no_request_writes_a_line_of_its_own_into_the_journal(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: str) -> None:
        raise LogError("the disk is full")

    monkeypatch.setattr(site.service.keyring, "revoke", refuse)
    with caplog.at_level(logging.DEBUG):
        refused = site.http.delete("/v1/keys/x%0d%0aERROR everything is lost")
        site.http.get("/v1/changes", params={"format": INJECTED})
        site.http.get("/changefeed", headers={"Origin": "http://x/\tERROR"})
    assert refused.status_code == 503
    written = [record.getMessage() for record in caplog.records if "headrace" in record.name]
    assert written
    assert [line for line in written if "\n" in line or "\r" in line] == []


# --- too much ------------------------------------------------------------------------------------


def test_every_body_has_a_largest_size(shared: Site) -> None:
    sizes = (LARGEST_BODY + 1, 10_000_000)
    with_body = [
        (method, filled(path))
        for method, path, operation in operations(shared)
        if "requestBody" in operation
    ]
    assert len(with_body) >= 6
    for (method, path), size in itertools.product(with_body, sizes):
        answer = shared.http.request(method, path, content=b"[" * size)
        assert (answer.status_code, answer.json()["error"]) == (413, "body_too_large")
    assert shared.get("/health").status_code == 200


@pytest.mark.parametrize("pattern", ["*a" * 100, "[" * 200, "?" * 200, "**" * 99 + "b"])
def test_no_pattern_keeps_the_server_busy(site: Site, pattern: str) -> None:
    site.writer.put("a" * 200, "1")
    for name in ("tables", "event_type", "trigger", "entity_type"):
        answer = site.http.get("/v1/changes", params={name: pattern}, timeout=20)
        assert answer.status_code == 200
