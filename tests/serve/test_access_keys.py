"""Clients with API keys: who is let in, to what, and for how long."""

import hmac
import logging
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from headrace.log import keys
from headrace.log.keys import KeyLimits, KeyRequest, Scope
from headrace.serve import ServerSettings
from headrace.sources import Phase, Status
from headrace.testing import wait_until
from tests.serve.conftest import Site, Sites
from tests.serve.sse import Reader

CLOSED = ServerSettings(port=0, require_key=True)
ADMIN = frozenset({Scope.ADMIN})
UNKNOWN = "cdc_" + "0" * 64

STREAMS = ["/changefeed/stream?keep_alive=true&max_seconds=60", "/v1/changes/stream"]


@pytest.fixture
def closed(sites: Sites) -> Site:
    """A server that answers nobody without a key."""
    return sites(CLOSED)


def routes(site: Site, key: dict[str, str]) -> list[tuple[str, str]]:
    """Every route that the server describes, with something in place of its parameters."""
    paths = site.http.get("/openapi.json", headers=key).json()["paths"]
    return [
        (method.upper(), path.replace("{", "").replace("}", ""))
        for path, methods in paths.items()
        for method in methods
    ]


def told(response: httpx.Response) -> tuple[Any, ...]:
    """All that a client can see of an answer."""
    headers = {name: value for name, value in response.headers.items() if name != "date"}
    return response.status_code, response.content, headers


def written(caplog: pytest.LogCaptureFixture) -> str:
    """What the server writes down; its access log is off, only pytest listens to it."""
    records = [record for record in caplog.records if record.name != "uvicorn.access"]
    ours = [record for record in records if record.name.startswith(("headrace", "uvicorn"))]
    return "\n".join(record.getMessage() for record in ours)


# --- who is let in -------------------------------------------------------------------------------


def test_no_route_but_health_answers_without_a_key(closed: Site) -> None:
    every = routes(closed, closed.key(scopes=ADMIN))
    assert len(every) > 15
    answered = {
        path: closed.http.request(method, path).status_code
        for method, path in every
        # The WebSocket takes the key in its first message.
        if path not in ("/health", "/livez", "/readyz", "/v1/stream")
    }
    assert set(answered.values()) == {401}, answered
    assert closed.http.get("/openapi.json").status_code == 401


def test_a_server_that_others_reach_needs_keys_and_has_any_name(
    sites: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        site = sites(ServerSettings(host="0.0.0.0", port=0))
    assert "host=0.0.0.0 needs API keys and there is none" in caplog.text
    assert site.http.get("/changefeed").status_code == 401
    named = {"Host": "feed.example.com", **site.key()}
    assert site.http.get("/changefeed", headers=named).status_code == 200


def test_behind_a_trusted_proxy_no_key_is_needed_but_one_that_comes_binds(sites: Sites) -> None:
    site = sites(ServerSettings(host="0.0.0.0", port=0, allow_remote=True))
    assert site.http.get("/changefeed").status_code == 200
    assert site.http.get("/changefeed", headers={"X-API-Key": UNKNOWN}).status_code == 401


def test_on_this_machine_no_key_is_needed_but_one_that_comes_binds(site: Site) -> None:
    site.writer.put("orders", "1")
    site.writer.put("users", "1")
    assert site.http.get("/v1/changes").json()["count"] == 2
    assert site.http.get("/v1/changes", headers={"X-API-Key": UNKNOWN}).status_code == 401
    assert site.http.get("/v1/keys").status_code == 200
    key = site.key(tables=("orders",))
    assert site.http.get("/v1/changes", headers=key).json()["count"] == 1
    assert site.http.get("/v1/keys", headers=key).status_code == 403


def test_unknown_expired_and_revoked_keys_are_answered_alike(
    closed: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyring = closed.service.keyring
    revoked, expired = (keyring.create(KeyRequest()) for _ in range(2))
    keyring.revoke(revoked.key.id)
    keyring.rotate(expired.key.id, overlap=0)
    valid = keyring.create(KeyRequest())
    compared: list[str] = []
    compare = hmac.compare_digest

    def counted(one: str, other: str) -> bool:
        compared.append(other)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    wrong = [
        UNKNOWN,
        revoked.secret,
        expired.secret,
        valid.secret[:-1],
        valid.secret + "0",
        valid.secret.upper(),
        valid.key.hash,
        valid.key.id,
        "x" * 5000,
        "",
    ]
    answers = [closed.http.get("/changefeed", headers={"X-API-Key": each}) for each in wrong]
    answers += [
        closed.http.get("/changefeed", headers={"Authorization": f"Bearer {each}"})
        for each in filter(None, wrong)
    ]
    answers.append(closed.http.get("/changefeed"))
    assert {repr(told(answer)) for answer in answers} == {repr(told(answers[0]))}
    assert answers[0].status_code == 401
    assert answers[0].json()["error"] == "unauthenticated"
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert len(compared) == len(answers)  # each went the whole way


def test_a_key_is_taken_from_either_header_but_not_from_both(closed: Site) -> None:
    secret = closed.key()["X-API-Key"]
    bearer = {"Authorization": f"Bearer {secret}"}
    assert closed.http.get("/changefeed", headers={"x-api-key": secret}).status_code == 200
    assert closed.http.get("/changefeed", headers=bearer).status_code == 200
    assert (
        closed.http.get("/changefeed", headers={"Authorization": f"bEARER {secret}"}).status_code
        == 200
    )
    both = closed.http.get("/changefeed", headers={**bearer, "X-API-Key": secret})
    assert (both.status_code, both.json()["error"]) == (400, "ambiguous_key")
    twice = closed.http.get("/changefeed", headers=[("X-API-Key", secret), ("X-API-Key", UNKNOWN)])
    assert (twice.status_code, twice.json()["error"]) == (400, "ambiguous_key")


def test_a_proxys_own_password_is_no_key(site: Site, closed: Site) -> None:
    basic = {"Authorization": "Basic cmVhZGVyOnNlY3JldA=="}
    assert site.http.get("/changefeed", headers=basic).status_code == 200
    assert closed.http.get("/changefeed", headers=basic).status_code == 401
    assert closed.http.get("/changefeed", headers={**basic, **closed.key()}).status_code == 200


@pytest.mark.parametrize(
    "line",
    [
        b"X-API-Key: %b\x00",
        b"X-API-Key: %b\xff",
        b"X-API-Key: %b, other",
        b"X-API-Key: x\r\n %b",
        b"X-API-Key : %b",
        b"X-API-Key: x\nX-API-Key: %b",
        b"X_API_Key: %b",
        b"Authorization: Bearer x %b",
        b"Authorization: %b",
        b"Cookie: X-API-Key=%b",
    ],
)
def test_a_key_in_a_header_that_is_not_quite_one_opens_nothing(closed: Site, line: bytes) -> None:
    secret = closed.key()["X-API-Key"].encode()
    with socket.create_connection(closed.address, timeout=10) as connection:
        connection.sendall(
            b"GET /changefeed HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            + line % secret
            + b"\r\n\r\n"
        )
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert answer.split()[1] in (b"400", b"401"), answer
    assert secret not in answer


# --- to what -------------------------------------------------------------------------------------

CHANGING = [
    ("POST", "/changefeed/retention"),
    ("POST", "/v1/sources/shop/snapshot"),
    ("POST", "/v1/keys"),
    ("GET", "/v1/keys"),
    ("DELETE", "/v1/keys/key_000000000000"),
    ("POST", "/v1/keys/key_000000000000/rotate"),
]


@pytest.mark.parametrize(("method", "path"), CHANGING)
def test_a_key_that_may_read_may_not_change_anything(closed: Site, method: str, path: str) -> None:
    refused = closed.http.request(method, path, headers=closed.key())
    assert (refused.status_code, refused.json()["error"]) == (403, "permission_denied")
    assert "cdc:admin" in refused.json()["message"]
    allowed = closed.http.request(method, path, headers=closed.key(scopes=ADMIN))
    assert allowed.status_code in (200, 400, 404)


WHOLE = ["/changefeed/stats", "/v1/records", "/v1/ranges", "/v1/tables", "/v1/sources", "/metrics"]


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("held", [{"tables": ("users",)}, {"tenant": "t1"}])
def test_what_tells_of_everything_is_refused_to_a_key_of_a_part(
    closed: Site, path: str, held: dict[str, Any]
) -> None:
    closed.writer.put("users", "1")
    refused = closed.http.get(path, headers=closed.key(**held))
    assert (refused.status_code, refused.json()["error"]) == (403, "permission_denied")
    assert "/v1/changes" in refused.json()["hint"]
    assert closed.http.get(path, headers=closed.key()).status_code == 200


def test_health_without_a_key_is_a_verdict_and_nothing_else(closed: Site) -> None:
    assert closed.http.get("/health").json() == {"status": "healthy"}
    part = closed.http.get("/health", headers=closed.key(tables=("users",)))
    assert part.json() == {"status": "healthy"}
    assert "log" in closed.http.get("/health", headers=closed.key()).json()
    assert closed.http.get("/health", headers={"X-API-Key": UNKNOWN}).status_code == 401


def test_the_description_tells_of_keys(shared: Site) -> None:
    described = shared.http.get("/openapi.json").json()
    assert set(described["components"]["securitySchemes"]) == {"key", "bearer"}
    for path, methods in described["paths"].items():
        for method in methods.values():
            assert {"401", "403", "429"} <= set(method["responses"]), path


# --- never in the URL, never in the journal ------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "api_key={0}",
        "apiKey={0}",
        "X-API-Key=whatever",
        "access_token=",
        "tables={0}",
        "tables=a%2C{0}",
        "{0}",
        "from_seq=1&%61pi_key=1",
        "tables=%63dc_{1}",
    ],
)
def test_a_key_in_the_url_is_refused_and_not_repeated(
    site: Site, query: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = site.key()["X-API-Key"]
    with caplog.at_level(logging.DEBUG):
        refused = site.http.get("/v1/changes?" + query.format(secret, secret.removeprefix("cdc_")))
    assert (refused.status_code, refused.json()["error"]) == (400, "key_in_url")
    assert secret.removeprefix("cdc_") not in refused.text
    assert secret.removeprefix("cdc_") not in written(caplog)


def test_a_key_in_the_path_is_refused_too(site: Site) -> None:
    secret = site.key()["X-API-Key"]
    refused = site.http.delete(f"/v1/keys/{secret}")
    assert (refused.status_code, refused.json()["error"]) == (400, "key_in_url")


def test_nothing_the_server_writes_down_holds_a_key(
    closed: Site, caplog: pytest.LogCaptureFixture
) -> None:
    admin = closed.key(scopes=ADMIN)
    closed.statuses = [Status(source="shop", phase=Phase.STREAMING)]
    closed.copy_error = RuntimeError("a bug, whose traceback is written down")
    with caplog.at_level(logging.DEBUG):
        made = closed.http.post("/v1/keys", json={"name": "billing"}, headers=admin).json()
        rotated = closed.http.post(
            f"/v1/keys/{made['key']['id']}/rotate", json={}, headers=admin
        ).json()
        closed.http.delete(f"/v1/keys/{made['key']['id']}", headers=admin)
        failed = closed.http.post("/v1/sources/shop/snapshot", json={}, headers=admin)
    assert failed.status_code == 500
    assert f"key={made['key']['id']} created" in written(caplog)
    assert "a bug, whose traceback" in caplog.text
    for secret in (admin["X-API-Key"], made["secret"], rotated["secret"]):
        assert secret not in caplog.text
        assert secret not in failed.text


# --- for how long --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", STREAMS)
def test_a_live_stream_ends_with_its_revoked_key(closed: Site, path: str) -> None:
    made, other = (closed.service.keyring.create(KeyRequest()) for _ in range(2))
    closed.writer.put("users", "1")
    with (
        Reader(closed.url + path, {"X-API-Key": made.secret}) as reader,
        Reader(closed.url + path, {"X-API-Key": other.secret}) as bystander,
    ):
        reader.await_events(1)
        closed.await_waiting(2)
        closed.service.keyring.revoke(made.key.id)
        assert reader.ended.wait(50)  # max_seconds is 60
        closed.writer.put("users", "2")
        bystander.await_events(2)
        assert len(reader.events) == 1


@pytest.mark.parametrize("path", STREAMS)
def test_a_live_stream_ends_with_its_expired_key(closed: Site, path: str) -> None:
    made = closed.service.keyring.create(KeyRequest(seconds=3.0))
    closed.writer.put("users", "1")
    with Reader(closed.url + path, {"X-API-Key": made.secret}) as reader:
        reader.await_events(1)
        assert reader.ended.wait(50)  # max_seconds is 60
    assert made.key.expires_at is not None
    assert time.time() >= made.key.expires_at / 1e6


def test_a_change_after_the_revocation_is_not_delivered_any_more(closed: Site) -> None:
    made = closed.service.keyring.create(KeyRequest())
    with Reader(closed.url + STREAMS[1], {"X-API-Key": made.secret}) as reader:
        closed.await_waiting(1)
        closed.service.keyring.revoke(made.key.id)
        closed.writer.put("users", "1")  # wakes the stream at once
        assert reader.ended.wait(120)
        assert reader.events == []


def test_both_keys_of_a_rotation_open_until_the_overlap_is_over(closed: Site) -> None:
    keyring = closed.service.keyring
    old = keyring.create(KeyRequest(tables=("orders",)))
    new = keyring.rotate(old.key.id, overlap=1.0)
    assert new is not None
    for made in (old, new):
        answer = closed.http.get("/changefeed", headers={"X-API-Key": made.secret})
        assert answer.status_code == 200
    old_key, new_key = ({"X-API-Key": made.secret} for made in (old, new))
    wait_until(
        lambda: closed.http.get("/changefeed", headers=old_key).status_code == 401,
        message="the old key has ended",
    )
    assert closed.http.get("/changefeed", headers=new_key).status_code == 200
    assert closed.http.get("/v1/records", headers=new_key).status_code == 403


# --- how much ------------------------------------------------------------------------------------


def test_requests_beyond_a_keys_rate_are_told_when_to_come_back(closed: Site) -> None:
    key = closed.key(limits=KeyLimits(requests_per_second=0.1))
    assert closed.http.get("/changefeed", headers=key).status_code == 200
    refused = closed.http.get("/changefeed", headers=key)
    assert (refused.status_code, refused.json()["error"]) == (429, "rate_limited")
    assert 1 <= int(refused.headers["retry-after"]) <= 10
    assert closed.http.get("/changefeed", headers=closed.key()).status_code == 200


@pytest.mark.parametrize("path", ["/changefeed?limit=50", "/v1/changes?limit=50"])
def test_whoever_has_had_too_many_events_must_wait(closed: Site, path: str) -> None:
    closed.writer.put_many("users", 50)
    key = closed.key(limits=KeyLimits(events_per_second=5.0))
    assert closed.http.get(path, headers=key).json()["count"] == 50
    refused = closed.http.get(path, headers=key)
    assert (refused.status_code, refused.json()["error"]) == (429, "rate_limited")
    assert 8 <= int(refused.headers["retry-after"]) <= 10


def test_a_stream_is_slowed_down_and_loses_nothing(closed: Site) -> None:
    key = closed.key(limits=KeyLimits(events_per_second=20.0))
    with Reader(closed.url + STREAMS[1], key) as reader:
        closed.await_waiting(1)
        began = time.monotonic()
        closed.writer.put_many("users", 30)
        reader.await_events(30)
        closed.writer.put("users", "after")
        assert [event["sequence"] for event in reader.await_events(31)] == list(range(1, 32))
        assert time.monotonic() - began > 0.4  # the debt of ten, at twenty a second


def test_a_stream_that_waits_for_its_turn_ends_with_its_key(closed: Site) -> None:
    made = closed.service.keyring.create(KeyRequest(limits=KeyLimits(events_per_second=1.0)))
    closed.writer.put_many("users", 50)
    with Reader(closed.url + STREAMS[1], {"X-API-Key": made.secret}) as reader:
        reader.await_events(50)
        closed.service.keyring.revoke(made.key.id)
        assert reader.ended.wait(1.5)


def test_connections_beyond_a_keys_limit_are_refused_while_the_others_stand(closed: Site) -> None:
    key = closed.key(limits=KeyLimits(connections=1))
    with Reader(closed.url + STREAMS[1], key) as reader:
        assert reader.response.status == 200
        refused = closed.http.get("/changefeed", headers=key)
        assert (refused.status_code, refused.json()["error"]) == (429, "rate_limited")
        assert "retry-after" in refused.headers
    wait_until(
        lambda: closed.http.get("/changefeed", headers=key).status_code == 200,
        message="the connection is given back",
    )


def test_a_connection_is_given_back_however_its_answer_ended(closed: Site) -> None:
    key = closed.key(limits=KeyLimits(connections=1))
    for path in ("/nothing", "/v1/changes?limit=x", "/v1/keys", "/changefeed"):
        closed.http.get(path, headers=key)
    assert closed.http.get("/changefeed", headers=key).status_code == 200


def test_many_clients_at_once_are_counted_right(closed: Site) -> None:
    key = closed.key(limits=KeyLimits(connections=3))
    readers = [Reader(closed.url + STREAMS[1], key) for _ in range(8)]
    for reader in readers:
        reader.__enter__()
    answers = sorted(reader.response.status for reader in readers)
    assert answers == [200] * 3 + [429] * 5
    for reader in readers:
        threading.Thread(target=reader.__exit__, args=(None, None, None)).start()
    wait_until(
        lambda: closed.http.get("/changefeed", headers=key).status_code == 200,
        message="connections are given back",
    )


# --- one store -----------------------------------------------------------------------------------


def test_keys_outlive_the_server_and_the_operators_does_not(sites: Sites) -> None:
    operator = keys.make(KeyRequest(scopes=ADMIN), now=time.time_ns() // 1000)
    site = sites(CLOSED)
    made = site.service.keyring.create(KeyRequest())
    again = type(site.service.keyring)(site.log, operator=operator.key)
    assert again.find(made.secret) == made.key
    assert again.find(operator.secret) == operator.key
    assert again.all() == [made.key]
    assert type(again)(site.log).find(operator.secret) is None


def test_a_client_may_ask_again_on_its_one_connection_as_soon_as_it_has_an_answer(
    site: Site,
) -> None:
    site.writer.put_many("users", 5)
    key = site.key(limits=KeyLimits(connections=1))
    lines = {"Accept": "application/x-ndjson"}
    for path in ["/v1/changes", "/v1/changes/stream?upto=5"] * 25:
        reply = site.http.get(path, headers=key | lines)
        assert reply.status_code == 200, reply.text
    counted = site.service.keyring.limiter._connections
    wait_until(lambda: not any(counted.values()), message="none is left")
