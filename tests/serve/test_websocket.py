"""GET /v1/stream: the document's conversation, with a real client on a real server."""

import json
import re
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import websocket
from hypothesis import HealthCheck, given, settings
from referencing import Registry, Resource

from headrace.change.event import Op
from headrace.config import WebSocketSection
from headrace.errors import LogError
from headrace.formats.catalogue import schemas
from headrace.log.keys import KeyLimits, KeyRequest
from headrace.serve import ServerSettings
from headrace.serve.keyring import Keyring
from headrace.serve.ws.messages import LARGEST_MESSAGE
from headrace.testing import wait_until
from tests.changes import make_change
from tests.effort import times
from tests.serve import tenants
from tests.serve.conftest import Site, Sites
from tests.serve.ws import ANY_KEY, Message, Talk

SEEDS = Path(__file__).parent.parent / "formats" / "seeds"
UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def seed(name: str) -> Message:
    message: Message = json.loads((SEEDS / f"s3_{name}.json").read_text())
    return message


def keyring(site: Site) -> Keyring:
    """The keys of a server."""
    return site.service.keyring


def key(site: Site, **wanted: Any) -> str:
    """A new key of the server."""
    return keyring(site).create(KeyRequest(**wanted)).secret


@pytest.fixture
def shop(site: Site) -> Site:
    """A server that knows some tables."""
    for table in ("orders", "customers", "products"):
        site.writer.table(table)
    return site


@pytest.fixture
def talk(shop: Site) -> Iterator[Talk]:
    """A client that has said who it is."""
    with Talk(shop.url) as talk:
        yield talk.auth()


# --- the schema ----------------------------------------------------------------------------------

DOCUMENTS = {name: json.loads(text) for name, text in schemas().items()}
REGISTRY: Registry[Any] = Registry().with_resources(
    [(document["$id"], Resource.from_contents(document)) for document in DOCUMENTS.values()]
)


def problems(message: Message, side: str) -> list[str]:
    schema = {"$ref": f"/schemas/websocket.json#/$defs/{side}"}
    validator = jsonschema.Draft202012Validator(schema, registry=REGISTRY)
    return [error.message for error in validator.iter_errors(message)]


@pytest.mark.requirement("S3-02", "S3-04", "S3-05", "S3-07", "S3-08", "S3-16", "S3-17")
@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("auth", "fromClient"),
        ("auth_success", "fromServer"),
        ("auth_failure", "fromServer"),
        ("subscribe", "fromClient"),
        ("subscription_confirmed", "fromServer"),
        ("subscription_rejected", "fromServer"),
        ("cdc_event", "fromServer"),
        ("insert", "fromServer"),
        ("update", "fromServer"),
        ("delete", "fromServer"),
        ("ping", "fromServer"),
        ("pong", "fromClient"),
        ("connection_status", "fromServer"),
        ("error", "fromServer"),
        ("protocol_version", "fromClient"),
    ],
)
def test_the_documents_examples_keep_to_the_schema(name: str, side: str) -> None:
    example = seed(name)
    if name == "auth":
        example["apiKey"] = ANY_KEY  # the document only describes one
    if name == "error":
        assert problems(example, side)  # its code is none of the document's own table
        example["error"] = "server_error"
    assert problems(example, side) == []
    assert problems(example | {"surplus": 1}, side)
    for field in example.keys() - {"requestId", "supportedVersions", "beforeData"}:
        assert problems({k: v for k, v in example.items() if k != field}, side), field


# --- the conversation ----------------------------------------------------------------------------


@pytest.mark.requirement("S3-01")
def test_the_handshake_is_an_upgrade_of_version_13(shop: Site) -> None:
    request = (
        "GET /v1/stream HTTP/1.1\r\nHost: localhost:3000\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n"
    )
    with socket.create_connection(shop.address) as client:
        client.sendall(request.encode())
        answer = client.recv(4096).decode()
    assert answer.startswith("HTTP/1.1 101 ")
    assert "s3pplmbitxaq9kygzzhzrbk+xoo=" in answer.lower()
    assert ServerSettings().port == 3000


@pytest.mark.requirement("S3-01")
def test_without_an_upgrade_the_answer_says_what_this_is(shop: Site) -> None:
    response = shop.http.get("/v1/stream")
    assert (response.status_code, response.headers["upgrade"]) == (426, "websocket")
    assert response.json()["error"] == "upgrade_required"


@pytest.mark.requirement("S3-03", "S3-04", "S3-06", "S3-07", "S3-09", "S3-35", "S3-02")
def test_the_documents_flow(shop: Site) -> None:
    with Talk(shop.url) as talk:
        welcome = talk.ask(type="auth", apiKey=ANY_KEY)
        assert list(welcome) == list(seed("auth_success"))
        assert re.fullmatch(UUID, welcome["connectionId"])
        assert welcome["message"] == "Authentication successful"
        confirmed = talk.ask(type="subscribe", tables=["orders", "customers"])
        expected = seed("subscription_confirmed")
        assert list(confirmed) == [*expected, "sequence", "epoch", "generation"]
        assert re.fullmatch(f"sub_{UUID}", confirmed["subscriptionId"])
        assert confirmed["status"] == "confirmed"
        assert confirmed["tables"] == ["orders", "customers"]
        assert confirmed["message"] == "Successfully subscribed to 2 tables"
        assert (confirmed["sequence"], confirmed["epoch"]) == (0, shop.log.epoch)
        shop.writer.put("orders", "1", total=3)
        shop.writer.put("products", "1")
        shop.writer.delete("orders", "1")
        first, second = talk.events(2)
        assert first["data"] == {"id": "1", "total": 3}
        assert (second["operation"], second["data"]) == ("DELETE", None)
        for message in (welcome, confirmed, first, second):
            assert problems(message, "fromServer") == []


@pytest.mark.requirement("S3-09", "S3-36", "S3-38")
def test_an_event_is_the_notification_of_its_change(shop: Site, talk: Talk) -> None:
    talk.subscribe("orders")
    shop.writer.put("orders", "1")
    (event,) = talk.events(1)
    (page,) = shop.get("/v1/changes", format="notification").json()["events"]
    assert event == page
    assert event["version"] == 1
    assert re.fullmatch(f"evt_{UUID}", event["eventId"])


@pytest.mark.requirement("S1-35")
def test_an_event_reaches_its_client_within_a_tenth_of_a_second(shop: Site, talk: Talk) -> None:
    talk.subscribe("orders")
    took = []
    for number in range(100):
        shop.writer.put("orders", str(number))
        committed = time.monotonic()
        talk.events(1)
        took.append(time.monotonic() - committed)
    assert statistics.median(took) < 0.1


@pytest.mark.requirement("S3-28", "S3-29", "C-08")
def test_the_events_of_a_table_come_in_order(shop: Site, talk: Talk) -> None:
    talk.subscribe("orders", "products")
    expected: dict[str, list[tuple[str, str]]] = {"orders": [], "products": []}
    for number in range(100):
        table, pk = ("orders", "products")[number % 3 == 0], str(number % 5)
        if number % 4 == 3:
            shop.writer.delete(table, pk)
            expected[table].append(("DELETE", pk))
        else:
            shop.writer.put(table, pk, op=Op.UPDATE if number % 4 else Op.INSERT, n=number)
            expected[table].append(("UPDATE" if number % 4 else "INSERT", pk))
    events = talk.events(100)
    for table, wanted in expected.items():
        came = [event for event in events if event["tableName"] == table]
        pks = [(event["data"] or event["beforeData"])["id"] for event in came]
        assert [(e["operation"], pk) for e, pk in zip(came, pks, strict=True)] == wanted


@pytest.mark.requirement("C-02")
def test_only_rows_are_told_of(shop: Site, talk: Talk) -> None:
    talk.subscribe("orders")
    orders = shop.writer.table("orders")
    shop.writer.append([make_change(Op.TRUNCATE, table=orders, after={"cascade": False})])
    shop.writer.put("orders", "1", op=Op.READ)
    assert talk.events(1)[0]["operation"] == "INSERT"


@pytest.mark.requirement("S3-27")
def test_a_second_subscribe_replaces_the_first(shop: Site, talk: Talk) -> None:
    first = talk.subscribe("orders")
    shop.writer.put("orders", "1")
    talk.events(1)
    second = talk.subscribe("customers")
    assert second["subscriptionId"] != first["subscriptionId"]
    shop.writer.put("orders", "2")
    shop.writer.put("customers", "3")
    assert [event["tableName"] for event in talk.events(1)] == ["customers"]


def test_nothing_is_missed_between_subscribe_and_the_first_event(shop: Site) -> None:
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            shop.writer.put("orders", str(number))

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for _ in range(10):
            with Talk(shop.url) as talk:
                after = talk.auth().subscribe("orders")["sequence"]
                first = talk.events(5)
                changes = shop.get("/v1/changes", format="notification", after=after, limit=5)
                assert first == changes.json()["events"]
    finally:
        stop.set()
        writing.join()


# --- tables --------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-06", "S3-08", "S3-20")
def test_tables_beyond_the_keys_scope_reject_the_subscription(shop: Site) -> None:
    with Talk(shop.url) as talk:
        talk.auth(key(shop, tables=("orders", "customers")))
        confirmed = talk.subscribe("orders")
        rejected = talk.ask(type="subscribe", tables=["orders", "customers", "products"])
        expected = seed("subscription_rejected")
        assert re.fullmatch(f"sub_{UUID}", rejected.pop("subscriptionId"))
        del expected["subscriptionId"]
        assert rejected == expected
        # What was subscribed to before stands.
        shop.writer.put("orders", "1")
        assert len(talk.events(1)) == 1
        assert confirmed["tables"] == ["orders"]


@pytest.mark.requirement("S3-21", "C-23")
def test_an_unknown_table_is_not_found_by_those_who_could_see_it(shop: Site, talk: Talk) -> None:
    rejected = talk.ask(type="subscribe", tables=["orders", "ordres"])
    assert (rejected["type"], rejected["error"]) == ("subscription_rejected", "table_not_found")
    assert rejected["details"] == {"deniedTables": ["ordres"], "allowedTables": ["orders"]}
    assert "ordres" in rejected["message"]
    assert problems(rejected, "fromServer") == []


@pytest.mark.requirement("S3-20", "C-23")
def test_whether_a_table_exists_is_not_told_to_others(shop: Site) -> None:
    with Talk(shop.url) as talk:
        talk.auth(key(shop, tables=("orders",)))
        answers = [talk.ask(type="subscribe", tables=[name]) for name in ("products", "nothing")]
        for answer, name in zip(answers, ("products", "nothing"), strict=True):
            del answer["subscriptionId"]
            assert answer.pop("details") == {"deniedTables": [name], "allowedTables": []}
            assert answer.pop("message").replace(name, "") != name
        assert answers[0] == answers[1]
        assert answers[0]["error"] == "permission_denied"


@pytest.mark.requirement("C-23")
def test_a_bare_name_means_the_default_schema(shop: Site, talk: Talk) -> None:
    other = shop.writer.log.register(
        shop.writer.table("orders").__class__(
            "shop", "postgres", "origin-1", "shop", "archive", "orders"
        )
    )
    talk.subscribe("orders")
    shop.writer.append([make_change(table=other, key={"id": "1"}, after={"id": "1"})])
    shop.writer.put("orders", "2")
    assert [event["data"]["id"] for event in talk.events(1)] == ["2"]
    talk.subscribe("archive.orders")
    shop.writer.put("orders", "3")
    shop.writer.append([make_change(table=other, key={"id": "4"}, after={"id": "4"})])
    (event,) = talk.events(1)
    assert (event["tableName"], event["data"]["id"]) == ("archive.orders", "4")


def test_a_pattern_is_no_name(shop: Site, talk: Talk) -> None:
    for pattern in ("*", "order?", "[o]rders", "public.*"):
        assert talk.ask(type="subscribe", tables=[pattern])["error"] == "table_not_found"


def test_a_table_named_twice_is_subscribed_to_once(shop: Site, talk: Talk) -> None:
    confirmed = talk.subscribe("orders", "orders", "public.orders", "customers")
    assert confirmed["tables"] == ["orders", "customers"]
    assert confirmed["message"] == "Successfully subscribed to 2 tables"
    shop.writer.put("orders", "1")
    shop.writer.put("customers", "2")
    assert [event["tableName"] for event in talk.events(2)] == ["orders", "customers"]


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-05", "C-27")
def test_bad_keys_are_all_answered_alike_and_the_connection_closed(shop: Site) -> None:
    made = keyring(shop).create(KeyRequest())
    short = keyring(shop).create(KeyRequest(seconds=1.0))
    wait_until(lambda: not keyring(shop).valid(short.key), message="the key expires")
    keyring(shop).revoke(made.key.id)
    answers = []
    for bad in (made.secret, short.secret, ANY_KEY, "", "nonsense"):
        with Talk(shop.url) as talk:
            answer = talk.ask(type="auth", apiKey=bad)
            assert TIME.fullmatch(answer.pop("timestamp"))
            answers.append(answer)
            assert talk.closed()[0] == 1008
    expected = seed("auth_failure")
    del expected["timestamp"]
    assert answers == [expected] * 5


@pytest.mark.requirement("S3-03")
def test_until_there_is_a_key_a_well_formed_one_is_enough_on_this_machine(shop: Site) -> None:
    with Talk(shop.url) as talk:
        assert talk.ask(type="auth", apiKey="cdc_short")["type"] == "auth_failure"
    Talk(shop.url).auth().close()
    good = key(shop)
    with Talk(shop.url) as talk:
        assert talk.ask(type="auth", apiKey=ANY_KEY)["type"] == "auth_failure"
    Talk(shop.url).auth(good).close()


def test_a_server_that_requires_keys_takes_no_other(sites: Sites) -> None:
    site = sites(ServerSettings(port=0, require_key=True))
    with Talk(site.url) as talk:
        assert talk.ask(type="auth", apiKey=ANY_KEY)["type"] == "auth_failure"


@pytest.mark.requirement("S3-19")
@pytest.mark.parametrize("subscribed", [False, True])
def test_a_revoked_key_ends_the_connection_within_a_second(shop: Site, subscribed: bool) -> None:
    made = keyring(shop).create(KeyRequest())
    with Talk(shop.url) as talk:
        talk.auth(made.secret)
        if subscribed:
            talk.subscribe("orders")
        keyring(shop).revoke(made.key.id)
        revoked = time.monotonic()
        shop.writer.put("orders", "secret")
        error = talk.hear()
        assert (error["type"], error["error"]) == ("error", "unauthenticated")
        assert talk.closed()[0] == 1008
        assert time.monotonic() - revoked < 5


@pytest.mark.requirement("S3-19")
def test_an_expired_key_ends_the_connection(shop: Site) -> None:
    with Talk(shop.url) as talk:
        talk.auth(key(shop, seconds=3.0)).subscribe("orders")
        assert talk.hear()["error"] == "unauthenticated"
        assert talk.closed()[0] == 1008


@pytest.mark.requirement("S3-25")
def test_a_keys_limits_are_kept(shop: Site) -> None:
    one = key(shop, limits=KeyLimits(connections=1))
    with Talk(shop.url) as first:
        first.auth(one)
        with Talk(shop.url) as second:
            assert second.ask(type="auth", apiKey=one)["error"] == "rate_limited"
            assert second.closed()[0] == 1013
    wait_until(lambda: _opens(shop, one), message="the connection is given back")
    with Talk(shop.url) as talk:
        talk.auth(key(shop, limits=KeyLimits(requests_per_second=1.0)))
        talk.subscribe("orders")
        assert talk.ask(type="subscribe", tables=["orders"])["error"] == "rate_limited"
    with Talk(shop.url) as talk:
        talk.auth(key(shop, limits=KeyLimits(events_per_second=100.0))).subscribe("orders")
        began = time.monotonic()
        for _ in range(3):
            shop.writer.put_many("orders", 100)
            talk.events(100)
        assert time.monotonic() - began > 0.9


def _opens(site: Site, secret: str) -> bool:
    with Talk(site.url) as talk:
        return bool(talk.ask(type="auth", apiKey=secret)["type"] == "auth_success")


# --- time ----------------------------------------------------------------------------------------


def quick(**settings: float) -> ServerSettings:
    return ServerSettings(port=0, websocket=WebSocketSection(**settings))  # type: ignore[arg-type]


@pytest.mark.requirement("S3-26")
def test_who_does_not_authenticate_must_go(sites: Sites) -> None:
    site = sites(quick(auth_seconds=0.3))
    with Talk(site.url) as talk:
        assert talk.hear()["error"] == "unauthenticated"
        assert talk.closed()[0] == 1008


@pytest.mark.requirement("S3-13", "S3-14")
def test_pings_are_sent_and_answered_ones_keep_the_connection(sites: Sites) -> None:
    site = sites(quick(ping_seconds=0.1, pong_seconds=2.0))
    with Talk(site.url) as talk:
        talk.auth()
        for _ in range(25):
            ping = talk.await_type("ping")
            assert list(ping) == list(seed("ping"))
            assert problems(ping, "fromServer") == []
            talk.say(type="pong", timestamp=ping["timestamp"])


@pytest.mark.requirement("S3-15")
def test_who_answers_no_ping_must_go(sites: Sites) -> None:
    site = sites(quick(ping_seconds=0.1, pong_seconds=0.3))
    with Talk(site.url) as talk:
        talk.auth()
        assert talk.closed() == (1008, "no pong")


@pytest.mark.requirement("S3-16", "S3-27")
def test_the_status_tells_what_waits(sites: Sites) -> None:
    site = sites(quick(status_seconds=0.1))
    site.writer.put("orders", "0")
    site.writer.put("users", "0")
    with Talk(site.url) as talk:
        talk.auth()
        status = talk.await_type("connection_status")
        assert status | {"timestamp": 0} == seed("connection_status") | {
            "timestamp": 0, "activeSubscriptions": 0, "uptime": 0
        }  # fmt: skip
        talk.subscribe("orders", "users")
        status = talk.await_type("connection_status")
        assert (status["activeSubscriptions"], status["queuedEventsCount"]) == (2, 0)
        assert (status["status"], status["sequence"]) == ("healthy", 2)
        assert problems(status, "fromServer") == []


# --- attacks -------------------------------------------------------------------------------------


@pytest.mark.requirement("S3-18")
def test_nonsense_is_answered_and_the_connection_goes_on(shop: Site, talk: Talk) -> None:
    talk.subscribe("orders")
    for nonsense in ("{", "[" * 50_000, '{"type":"auth"}', "\x00", "💥"):
        talk.socket.send(nonsense)
        assert talk.hear()["error"] == "invalid_message"
    talk.socket.send_binary(b"\x00\x01")
    assert talk.hear()["error"] == "invalid_message"
    assert talk.ask(type="explode")["error"] == "invalid_operation"
    shop.writer.put("orders", "1")
    assert len(talk.events(1)) == 1


@pytest.mark.parametrize("fragments", [1, 100])
def test_a_huge_message_ends_the_connection(shop: Site, talk: Talk, fragments: int) -> None:
    piece = b"x" * (10_000_000 // fragments)
    # Closed before all of it was sent, the client may not come to read why.
    with suppress(ConnectionError, websocket.WebSocketConnectionClosedException):
        for number in range(fragments):
            opcode = websocket.ABNF.OPCODE_TEXT if number == 0 else websocket.ABNF.OPCODE_CONT
            last = int(number == fragments - 1)
            frame = websocket.ABNF(last, 0, 0, 0, opcode, 1, piece)
            talk.socket.send_frame(frame)
        assert talk.closed()[0] == 1009
    with Talk(shop.url) as another:
        another.auth()


def test_a_message_of_the_largest_size_is_read(talk: Talk) -> None:
    message = {"type": "explode", "x": ""}
    message["x"] = "x" * (LARGEST_MESSAGE - len(json.dumps(message)))
    assert talk.ask(**message)["error"] == "invalid_operation"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example", "file://"]
)
def test_pages_of_other_sites_cannot_connect(shop: Site, origin: str) -> None:
    assert upgraded(shop, origin=origin) == 403
    own = websocket.create_connection(
        shop.url.replace("http", "ws") + "/v1/stream", origin=shop.url, timeout=20
    )
    own.close()


@pytest.mark.parametrize("query", [f"apiKey={ANY_KEY}", "token=x", f"x={ANY_KEY}", "tables=orders"])
def test_a_key_in_the_url_is_refused(shop: Site, query: str) -> None:
    assert upgraded(shop, f"?{query}") in (400, 403)


def upgraded(site: Site, query: str = "", **headers: str) -> int:
    """The status with which an upgrade is refused."""
    asked = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    return site.http.get(f"/v1/stream{query}", headers=asked | headers).status_code


@pytest.mark.requirement("S3-25")
def test_a_flood_is_slowed_down_and_told(shop: Site, talk: Talk) -> None:
    for _ in range(150):
        talk.say(type="nothing")
    errors = [talk.hear()["error"] for _ in range(150)]
    assert errors[0] == "invalid_operation"
    assert "rate_limited" in errors


def test_secrets_are_in_no_log(shop: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    secret = key(shop)
    with Talk(shop.url) as talk:
        talk.auth(secret)
    with Talk(shop.url) as talk:
        talk.ask(type="auth", apiKey=secret[:-1] + "_")
    assert secret[10:40] not in caplog.text


@pytest.mark.requirement("S3-23")
@pytest.mark.parametrize(
    "where", ["subscription.Subscription._take", "ws.connection.choose_tables"]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_of_ours_is_told_without_details(
    shop: Site,
    talk: Talk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    talk.subscribe("orders")
    monkeypatch.setattr(f"headrace.serve.{where}", lambda *_, **__: 1 // 0)
    if where == "ws.connection.choose_tables":
        talk.say(type="subscribe", tables=["orders"])
    shop.writer.put("orders", "1")
    error = talk.await_type("error")
    assert error["error"] == "server_error"
    assert "Zero" not in json.dumps(error)
    assert talk.closed()[0] == 1011
    assert error["requestId"] in caplog.text


@pytest.mark.requirement("S3-24")
def test_a_log_that_cannot_be_read_is_told(
    shop: Site, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object, **__: object) -> None:
        raise LogError("the log cannot be read")

    talk.subscribe("orders")
    monkeypatch.setattr("headrace.serve.feed.LogFeed.read", unreadable)
    shop.writer.put("orders", "1")
    error = talk.hear()
    assert (error["error"], error["message"]) == ("service_degraded", "the log cannot be read")
    assert problems(error, "fromServer") == []
    assert talk.closed()[0] == 1011


def test_a_server_that_stops_says_so(shop: Site, talk: Talk) -> None:
    talk.subscribe("orders")
    shop.server.stop()
    assert talk.closed()[0] == 1012


# --- tenants -------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(
    max_examples=times(9, nightly=90),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(history=tenants.HISTORIES)
def test_a_tenant_gets_its_own_rows_and_nothing_of_others(
    tenants_site: Site, history: list[tuple[list[tenants.Draft], dict[str, Any] | None]]
) -> None:
    site = tenants_site
    with Talk(site.url) as talk:
        talk.auth(key(site, tenant=tenants.OURS))
        before = talk.subscribe("users", "orders", "colours")["sequence"]
        for drafts, said in history:
            tenants.append(site.writer, drafts, said)
        # One of ours, so that the end is seen.
        mark = {"id": f"{tenants.OURS}-end", "tenant_id": tenants.OURS, "name": "", "status": ""}
        tenants.append(site.writer, [tenants.Draft(Op.INSERT, tenants.USERS, None, mark)])
        expected = [change.id for change in site.log.read(before) if tenants.ours(change)]
        events = talk.events(len(expected))
    assert [event["eventId"] for event in events] == expected
    assert tenants.THEIRS not in json.dumps(events)


@pytest.fixture
def tenants_site(sites: Sites) -> Site:
    """A server of two tenants' rows."""
    site = sites(formats=tenants.FORMATS)
    for table in (tenants.USERS, tenants.ORDERS, tenants.COLOURS):
        site.log.register(table)
    return site
