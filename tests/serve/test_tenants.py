"""A tenant tries every filter, every cursor and every way to resume, to see another's rows."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.change.event import BeforeKind, Op
from headrace.config import WebSocketSection
from headrace.serve import ServerSettings
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.effort import times
from tests.serve.conftest import Site, Sites
from tests.serve.tenants import (
    COLOURS,
    FORMATS,
    HISTORIES,
    ORDERS,
    OURS,
    THEIRS,
    USERS,
    Draft,
    append,
    ours,
)
from tests.serve.ws import Message, Talk

TABLES = ("users", "orders", "colours")

trying = settings(
    max_examples=times(18, nightly=180),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Shop:
    """A server of two tenants, and what one of them has there."""

    def __init__(self, site: Site) -> None:
        self.site = site
        for table in (USERS, ORDERS, COLOURS):
            site.log.register(table)
        self.ours = site.key(tenant=OURS)
        self.theirs = site.key(tenant=THEIRS)
        self.write([([Draft(Op.INSERT, USERS, None, _user(THEIRS))], None)])
        site.http.put("/v1/cursors/theirs", json={"sequence": 0}, headers=self.theirs)
        with Talk(site.url) as talk:
            talk.auth(self.theirs["X-API-Key"])
            self.subscription: str = talk.subscribe(*TABLES)["subscriptionId"]

    def write(self, history: Any) -> None:
        """Commit transactions, the last of which is ours, so that the end is seen."""
        for drafts, said in history:
            append(self.site.writer, drafts, said)
        append(self.site.writer, [Draft(Op.INSERT, USERS, None, _user(OURS))])

    def visible(self, after: int) -> list[str]:
        """The ids of what our tenant may see."""
        found = self.site.log.read(after, limit=1_000_000)
        return [change.id for change in found if ours(change)]


def _user(tenant: str) -> dict[str, str]:
    return {"id": f"{tenant}-9", "tenant_id": tenant, "name": tenant, "status": tenant}


@pytest.fixture
def shop(sites: Sites) -> Shop:
    held = WebSocketSection(held_seconds=1e9)  # what tests write is years old
    return Shop(sites(ServerSettings(port=0, grpc_port=0, websocket=held), formats=FORMATS))


# --- by resuming a WebSocket ---------------------------------------------------------------------


# Ways to say where one was: of sequences and events how far back, of the others which.
BACK = st.integers(-1, 30)
RESUMES = st.fixed_dictionaries(
    {},
    optional={
        "subscriptionId": st.sampled_from(["theirs", "sub_" + "0" * 32]),
        "lastEventId": BACK,
        "lastSequence": BACK,
        "epoch": st.sampled_from(["right", "another"]),
    },
).filter(bool)


def _resume(shop: Shop, ways: dict[str, Any]) -> dict[str, Any]:
    log = shop.site.log
    latest = log.latest_sequence

    def event(back: int) -> str:
        found = log.read(max(latest - back - 1, 0), limit=1)
        return found[0].id if found else "evt_none"

    meant: dict[str, Callable[[Any], Any]] = {
        "subscriptionId": lambda which: shop.subscription if which == "theirs" else which,
        "lastEventId": event,
        "lastSequence": lambda back: max(latest - back, 0),
        "epoch": lambda which: log.epoch if which == "right" else which,
    }
    return {name: meant[name](way) for name, way in ways.items()}


@pytest.mark.slow
@pytest.mark.requirement("S1-16", "S1-44")
def test_no_way_to_resume_shows_anothers_rows(shop: Shop) -> None:
    @trying
    @given(HISTORIES, RESUMES)
    def check(history: Any, ways: dict[str, Any]) -> None:
        shop.write(history)
        resume = _resume(shop, ways)
        with Talk(shop.site.url) as talk:
            talk.auth(shop.ours["X-API-Key"])
            talk.say(type="subscribe", tables=list(TABLES), resume=resume)
            heard = [talk.hear()]
            while heard[-1]["type"] != "subscription_confirmed":
                heard.append(talk.hear())
            confirmed = heard[-1]
            shop.write([])
            expected = shop.visible(confirmed["sequence"])
            heard += _until(talk, len(expected))
        events = [message for message in heard if message["type"] == "cdc_event"]
        assert [event["eventId"] for event in events] == expected
        assert confirmed["subscriptionId"] != shop.subscription
        # What was asked for is not told back.
        assert THEIRS not in json.dumps(heard), resume

    check()


def _until(talk: Talk, events: int) -> Iterator[Message]:
    while events:
        message = talk.hear()
        events -= message["type"] == "cdc_event"
        yield message


# --- over gRPC -----------------------------------------------------------------------------------

FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "tables": st.sampled_from([["*"], ["users"], ["public.*", "orders"]]),
        "operations": st.lists(st.sampled_from([v1.INSERT, v1.UPDATE, v1.DELETE, v1.DDL])),
        "key_prefix": st.sampled_from(["users:", f"users:{THEIRS}", f"orders:{THEIRS}"]),
        "event_type": st.sampled_from(["*", "entity:deleted"]),
        "entity_type": st.sampled_from(["User", "Order"]),
        "tenant_id": st.sampled_from([OURS, THEIRS]),
        "trigger": st.sampled_from(["*", "api_*"]),
        "changed_fields": st.sampled_from([["name"], ["tenant_id", "id"]]),
        "source": st.sampled_from(["", "shop"]),
    },
)


PASSING = (["*"], ["users"], "users:", "*", "User", OURS, "", "shop")


@pytest.mark.slow
@pytest.mark.requirement("S1-16", "S1-44")
def test_no_filter_over_grpc_shows_anothers_rows(shop: Shop) -> None:
    key = (("x-api-key", shop.ours["X-API-Key"]),)
    with grpc.insecure_channel(shop.site.server.grpc_target) as channel:
        stub = ChangeFeedStub(channel)

        @trying
        @given(HISTORIES, FILTERS, st.integers(0, 30), st.booleans())
        def check(history: Any, asked: dict[str, Any], back: int, together: bool) -> None:
            start = shop.site.log.latest_sequence
            shop.write(history)
            latest = shop.site.log.latest_sequence
            after = max(latest - back, 0)
            polled = stub.Poll(v1.PollRequest(after=start), timeout=30, metadata=key)
            assert [event.id for event in polled.events] == shop.visible(start)
            told = [stub.Poll(v1.PollRequest(after=after, **asked), timeout=30, metadata=key)]
            # Of the same filters those that let the last change pass, so that the end is seen.
            passing = {name: value for name, value in asked.items() if value in PASSING}
            wanted = v1.SubscribeRequest(after=start, together=together, **passing)
            call = stub.Subscribe(wanted, timeout=30, metadata=key)
            told += _told(call, latest)
            call.cancel()
            assert THEIRS.encode() not in b"".join(each.SerializeToString() for each in told)

        check()


def _told(call: Any, latest: int) -> list[Any]:
    """What a stream says until it has passed this sequence."""
    found = []
    for response in call:
        found.append(response)
        events = [*response.events, *([response.event] if response.HasField("event") else [])]
        if max((event.sequence for event in events), default=0) >= latest:
            return found
    raise AssertionError("the stream ended")


# --- by another's cursor -------------------------------------------------------------------------

ATTEMPTS = [
    ("GET", "/v1/cursors/theirs", {}),
    ("PUT", "/v1/cursors/theirs", {"json": {"sequence": 1}}),
    ("PUT", "/v1/cursors/theirs", {"json": {"sequence": 0, "force": True}}),
    ("DELETE", "/v1/cursors/theirs", {}),
    ("POST", "/v1/cursors/theirs/lease", {}),
    ("POST", "/v1/cursors/theirs/ack", {"json": {"lease": "x", "sequences": [1]}}),
    ("GET", "/v1/changes?cursor=theirs", {}),
    ("GET", "/v1/changes?cursor=theirs", {"headers": {"Accept": "application/x-ndjson"}}),
    ("GET", "/v1/changes/stream?cursor=theirs", {}),
    ("GET", "/changefeed?cursor=theirs", {}),
    ("GET", "/changefeed/stream?cursor=theirs", {}),
]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("method", "path", "more"), ATTEMPTS)
def test_anothers_cursor_opens_and_moves_nothing(
    shop: Shop, method: str, path: str, more: dict[str, Any], named: bool
) -> None:
    http = shop.site.http
    before = http.get("/v1/cursors/theirs", headers=shop.theirs).json()
    if named:  # as an admin would say whose it is
        path += ("&" if "?" in path else "?") + f"owner={before['owner']}"
    headers = shop.ours | more.get("headers", {})
    answer = http.request(method, path, **(more | {"headers": headers}))
    if answer.status_code == 200:  # of the same name, and one's own
        assert (method, answer.json()["owner"] == before["owner"]) == ("PUT", False)
    else:
        assert answer.status_code in (400, 403, 404)
    assert THEIRS not in answer.text
    seen = http.get("/v1/cursors", headers=shop.ours).json()["cursors"]
    assert before["owner"] not in [cursor["owner"] for cursor in seen]
    assert http.get("/v1/cursors/theirs", headers=shop.theirs).json() == before


def test_anothers_lease_cannot_be_acked_through_ones_own_cursor(shop: Shop) -> None:
    http = shop.site.http
    http.put("/v1/cursors/mine", json={"sequence": 0}, headers=shop.ours).raise_for_status()
    leased = http.post("/v1/cursors/theirs/lease", headers=shop.theirs).json()
    (sequence,) = [each["sequence"] for each in leased["events"]]
    asked = {"lease": leased["lease"], "sequences": [sequence]}
    acked = http.post("/v1/cursors/mine/ack", json=asked, headers=shop.ours).json()
    assert acked == {"sequence": 0, "lost": [sequence]}
    mine = http.post("/v1/cursors/mine/lease", headers=shop.ours)
    assert (THEIRS in mine.text, OURS in mine.text) == (False, True)
    theirs = http.post("/v1/cursors/theirs/ack", json=asked, headers=shop.theirs).json()
    assert theirs["lost"] == []


@pytest.mark.parametrize("known", ["full", "key"])
def test_a_deleted_row_of_another_is_told_to_nobody_else(shop: Shop, known: str) -> None:
    row = {"tenant_id": THEIRS, "id": f"{THEIRS}-1", "user_id": f"{THEIRS}-1"}
    image = row if known == "full" else {name: row[name] for name in ("tenant_id", "id")}
    start = shop.site.log.latest_sequence
    with Talk(shop.site.url) as talk:
        talk.auth(shop.ours["X-API-Key"]).subscribe(*TABLES)
        kind = {"full": "FULL", "key": "KEY"}[known]
        gone = Draft(Op.DELETE, ORDERS, image, None, getattr(BeforeKind, kind))
        shop.write([([gone], None)])
        assert [event["data"]["tenant_id"] for event in talk.events(1)] == [OURS]
    told = shop.site.http.get(f"/v1/changes?after={start}", headers=shop.theirs).json()["changes"]
    assert [change["op"] for change in told] == ["DELETE"]
    for path in ("/v1/changes?after=", "/changefeed?from_seq="):
        text = shop.site.http.get(f"{path}{start}", headers=shop.ours).text
        assert (THEIRS in text, OURS in text) == (False, True)
