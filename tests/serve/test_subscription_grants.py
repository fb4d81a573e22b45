"""What a key does not allow is never seen, whatever is asked for."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.change.event import BeforeKind, Op
from headrace.formats.catalogue import names
from headrace.serve import ServerSettings, renderings
from headrace.testing import wait_until
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.changes import COMMIT_TIME
from tests.effort import times
from tests.serve.conftest import Site, Sites
from tests.serve.sse import Reader
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
from tests.serve.ws import Talk

LINES = {"Accept": "application/x-ndjson"}


@pytest.fixture
def shop(sites: Sites) -> Site:
    return sites(formats=FORMATS)


def changes(site: Site, key: dict[str, str], **asked: object) -> list[dict[str, Any]]:
    parameters = {name: str(value) for name, value in asked.items()}
    response = site.http.get("/v1/changes", params=parameters, headers=key)
    assert response.status_code == 200, response.text
    page = response.json()
    events: list[dict[str, Any]] = page["changes" if "changes" in page else "events"]
    return events


def user(tenant: str, number: int, **values: str) -> dict[str, Any]:
    row = {"id": f"{tenant}-{number}", "tenant_id": tenant, "name": f"{tenant} name"}
    return row | {"status": f"{tenant}1"} | values


# --- random attempts -----------------------------------------------------------------------------

FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "tables": st.sampled_from(["*", "users", "public.orders", "colours,users"]),
        "operations": st.sampled_from(["delete", "insert,update,read", "truncate,schema,message"]),
        "event_type": st.sampled_from(["*", "entity:*", "entity:deleted"]),
        "entity_type": st.sampled_from(["User", "Order", "Colour"]),
        "tenant_id": st.sampled_from([OURS, THEIRS]),
        "trigger": st.sampled_from(["*", "api_*", "data_migration"]),
        "changed_fields": st.sampled_from(["name", "tenant_id,id"]),
    },
)


@pytest.mark.requirement("S1-16", "S1-44")
def test_a_tenants_key_sees_all_of_its_own_and_nothing_of_others(shop: Site) -> None:
    key = shop.key(tenant=OURS)
    shop.http.put("/v1/cursors/mine", json={"sequence": 0}, headers=key).raise_for_status()

    @settings(
        max_examples=times(36, nightly=360),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(HISTORIES, st.data())
    def check(history: Any, data: st.DataObject) -> None:
        start = shop.log.latest_sequence
        for drafts, said in history:
            append(shop.writer, drafts, said)
        latest = shop.log.latest_sequence
        visible = [each.sequence for each in shop.log.read(start, limit=1000) if ours(each)]
        seen = changes(shop, key, after=start)
        assert [each["sequence"] for each in seen] == visible

        format = data.draw(st.sampled_from(names()))
        asked: dict[str, Any] = {"format": format, **data.draw(FILTERS)}
        if format == "savegress":
            asked["preserve_transactions"] = str(data.draw(st.booleans())).lower()
        after = start + data.draw(st.integers(0, latest - start))
        limit = data.draw(st.integers(1, 20))
        told = attempts(shop, key, asked | {"after": after}, limit)
        begun = {"sequence": after, "force": True}
        shop.http.put("/v1/cursors/mine", json=begun, headers=key).raise_for_status()
        told += [shop.http.get("/v1/changes", params=asked | {"cursor": "mine"}, headers=key)]
        if format != "etl" and asked.pop("preserve_transactions", "false") != "true":
            leasing = asked | {"lease_ms": 100, "limit": limit}
            told += [shop.http.post("/v1/cursors/mine/lease", params=leasing, headers=key)]
        for response in told:
            assert response.status_code == 200, response.text
            # What was asked for is not told back.
            assert THEIRS not in response.text, asked
            assert THEIRS not in str(response.headers)

    check()


def attempts(
    site: Site, key: dict[str, str], asked: dict[str, Any], limit: int
) -> list[httpx.Response]:
    upto = {"upto": site.log.latest_sequence}
    feed = {"from_seq": asked["after"]}
    include = {"include": "truncate,schema,message"}
    get = site.http.get
    return [
        get("/v1/changes", params=asked | {"limit": limit}, headers=key),
        get("/v1/changes", params=asked, headers=key | LINES),
        get("/v1/changes/stream", params=asked | upto, headers=key),
        get("/changefeed", params=feed | include, headers=key),
        get("/changefeed", params=feed | {"key_prefix": f"users:{THEIRS}"}, headers=key),
        get("/changefeed/stream", params=feed | include, headers=key),
    ]


# --- each rule -----------------------------------------------------------------------------------


def test_a_deleted_row_of_which_only_the_key_is_known_is_nobodys(shop: Site) -> None:
    key = shop.key(tenant=OURS)
    gone = Draft(Op.DELETE, USERS, {"id": f"{OURS}-1"}, None, BeforeKind.KEY)
    known = {"tenant_id": OURS, "id": "1"}
    append(shop.writer, [gone, Draft(Op.DELETE, ORDERS, known, None, BeforeKind.KEY)])
    assert [each["table"] for each in changes(shop, key)] == ["orders"]
    assert len(changes(shop, {})) == 2


def test_a_row_that_changes_its_tenant_is_shown_to_neither(shop: Site) -> None:
    moved = Draft(Op.UPDATE, USERS, user(THEIRS, 1), user(OURS, 1), BeforeKind.FULL)
    append(shop.writer, [moved])
    for tenant in (OURS, THEIRS):
        assert changes(shop, shop.key(tenant=tenant)) == []


def test_a_cascade_tells_only_of_the_tenants_own_rows(shop: Site) -> None:
    orders = [
        {"tenant_id": tenant, "id": f"{tenant}-7", "user_id": f"{OURS}-1"}
        for tenant in (OURS, THEIRS)
    ]
    append(
        shop.writer,
        [
            *(Draft(Op.DELETE, ORDERS, order, None, BeforeKind.FULL) for order in orders),
            Draft(Op.DELETE, USERS, user(OURS, 1), None, BeforeKind.FULL),
        ],
    )
    [everything] = changes(shop, {}, format="entity")
    assert len(everything["cascade"]["deleted"]) == 2
    [event] = changes(shop, shop.key(tenant=OURS), format="entity")
    [deleted] = event["cascade"]["deleted"]
    assert deleted["entity_id"] == f"{OURS}:{OURS}-7"
    assert THEIRS not in json.dumps(event)


def test_an_annotation_names_its_root_only_to_whom_may_see_it(shop: Site) -> None:
    inserted = [Draft(Op.INSERT, USERS, None, user(tenant, 1)) for tenant in (OURS, THEIRS)]
    append(shop.writer, inserted, {"root": f"User:{THEIRS}-1", "user_id": "u1"})
    for tenant, rooted in ((OURS, False), (THEIRS, True)):
        key = shop.key(tenant=tenant)
        [change] = changes(shop, key)
        assert ("root" in change["metadata"]) is rooted
        assert change["metadata"]["user_id"] == "u1"
        [event] = changes(shop, key, format="entity")
        assert "annotation_error" not in event["metadata"]


def test_a_key_of_some_tables_is_not_told_which_row_of_others_a_transaction_is_about(
    shop: Site,
) -> None:
    order = {"tenant_id": OURS, "id": "1", "user_id": "x"}
    secret = Draft(Op.INSERT, COLOURS, None, {"id": THEIRS, "name": THEIRS})
    said = {"root": f"Colour:{THEIRS}", "user_id": "u1"}
    append(shop.writer, [secret, Draft(Op.INSERT, ORDERS, None, order), secret], said)
    key = shop.key(tables=("orders",))
    for format in names():
        asked: dict[str, Any] = {"format": format, "after": 0}
        for response in attempts(shop, key, asked, limit=10):
            assert (response.status_code, THEIRS in response.text) == (200, False), format
    [change] = changes(shop, key)
    assert change["metadata"] == {"user_id": "u1"}
    first, *_ = changes(shop, shop.key(tables=("colours",)))
    assert first["metadata"]["root"] == f"Colour:{THEIRS}"


def test_a_tenant_never_hears_of_a_truncate(shop: Site) -> None:
    # A stream that begins within the statement tells of all its tables.
    said = {"relations": [7, USERS.relation]}
    append(shop.writer, [Draft(Op.TRUNCATE, each, None, said) for each in (ORDERS, USERS)])
    key = shop.key(tenant=OURS)
    kinds = [each["type"] for each in changes(shop, key, format="etl", after=1)]
    assert kinds == []
    kinds = [each["type"] for each in changes(shop, {}, format="etl", after=1)]
    assert "Truncate" in kinds


def test_a_key_of_some_tables_sees_only_these(shop: Site) -> None:
    append(shop.writer, [Draft(Op.INSERT, USERS, None, user(OURS, 1))])
    order = {"tenant_id": OURS, "id": "1", "user_id": f"{OURS}-1"}
    append(
        shop.writer,
        [
            Draft(Op.INSERT, ORDERS, None, order),
            Draft(Op.TRUNCATE, ORDERS, None, {}),
            Draft(Op.TRUNCATE, USERS, None, {}),
        ],
    )
    key = shop.key(tables=("public.ord*",))
    for asked in ({}, {"tables": "*"}, {"tables": "user*,orders"}):
        assert [each["table"] for each in changes(shop, key, **asked)] == ["orders", "orders"]
    assert changes(shop, key, tables="user*") == []
    page = shop.http.get("/changefeed", headers=key).json()
    assert [each["metadata"]["table"] for each in page["events"]] == ["orders"]


@pytest.mark.parametrize("table", ["users", "public.users", "nothing", "public.or.ders", "a.b.c"])
def test_a_table_that_a_key_may_not_see_is_refused_by_name_wherever_it_is_asked_for(
    sites: Sites, table: str
) -> None:
    shop = sites(ServerSettings(port=0, grpc_port=0), formats=FORMATS)
    append(shop.writer, [Draft(Op.INSERT, USERS, None, user(OURS, 1))])
    order = {"tenant_id": OURS, "id": "1", "user_id": "x"}
    append(shop.writer, [Draft(Op.INSERT, ORDERS, None, order)])
    key = shop.key(tables=("orders", "x.*"))
    shop.http.put("/v1/cursors/mine", json={"sequence": 0}, headers=key).raise_for_status()
    for method, path in (
        ("GET", "/v1/changes"),
        ("GET", "/v1/changes/stream"),
        ("POST", "/v1/cursors/mine/lease"),
    ):
        asked = {"tables": f"orders,{table}"}
        refused = shop.http.request(method, path, params=asked, headers=key)
        assert (refused.status_code, refused.json()["error"]) == (403, "permission_denied")
        assert table in refused.json()["message"]
    with grpc.insecure_channel(shop.server.grpc_target) as channel:
        metadata = (("x-api-key", key["X-API-Key"]),)
        with pytest.raises(grpc.RpcError) as denied:
            ChangeFeedStub(channel).Poll(
                v1.PollRequest(tables=["orders", table]), timeout=30, metadata=metadata
            )
        assert denied.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with Talk(shop.url) as talk:
        talk.auth(key["X-API-Key"])
        rejected = talk.ask(type="subscribe", tables=["orders", table])
        assert rejected["error"] == "permission_denied"


def test_a_stream_that_begins_within_a_truncate_describes_only_tables_that_may_be_seen(
    shop: Site,
) -> None:
    tables = [
        msgspec.structs.replace(table, relation=number)
        for number, table in enumerate((USERS, COLOURS, ORDERS), 11)
    ]
    said = {"relations": [11, 12, 13]}
    append(shop.writer, [Draft(Op.TRUNCATE, table, None, said) for table in tables])
    told = []
    for wanted in ({}, shop.key(tables=("users", "orders")), shop.key(tenant=OURS)):
        events = changes(shop, wanted, format="etl", after=2)
        described = [e["table_schema"]["name"] for e in events if e["type"] == "Relation"]
        told.append((described, [e["rel_ids"] for e in events if e["type"] == "Truncate"]))
    assert told == [
        (["users", "colours", "orders"], [[11, 12, 13]]),
        (["users", "orders"], [[11, 13]]),
        ([], []),
    ]


def test_an_old_id_of_ones_own_row_is_its_root_too(shop: Site) -> None:
    moved = Draft(Op.UPDATE, USERS, user(OURS, 1), user(OURS, 2), BeforeKind.FULL)
    order = {"tenant_id": OURS, "id": "7", "user_id": f"{OURS}-2"}
    inserted = Draft(Op.INSERT, ORDERS, None, order)
    append(shop.writer, [moved, inserted], {"root": f"User:{OURS}-1"})
    for key in ({}, shop.key(tenant=OURS)):
        [event] = changes(shop, key, format="entity")
        assert event["entity"]["entity_id"] == f"{OURS}-2"


def test_what_no_memory_could_hold_is_refused_by_the_name_of_its_format(
    shop: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderings, "LARGEST", 1)
    append(shop.writer, [Draft(Op.INSERT, USERS, None, user(OURS, 1))])
    asked = {"format": "entity"}
    refused = shop.http.get("/v1/changes", params=asked, headers=shop.key(tenant=OURS))
    assert refused.status_code == 503
    assert "another format than entity" in refused.json()["hint"]


def test_renderings_of_one_tenant_are_not_anothers(shop: Site) -> None:
    inserted = [Draft(Op.INSERT, USERS, None, user(tenant, 1)) for tenant in (OURS, THEIRS)]
    append(shop.writer, inserted)
    for tenant in (OURS, THEIRS, OURS):
        [event] = changes(shop, shop.key(tenant=tenant), format="entity")
        assert event["entity"]["tenant_id"] == tenant
    assert len(changes(shop, {}, format="entity")) == 2


# --- marks of transactions -----------------------------------------------------------------------

MARKED = [{"format": "etl"}, {"format": "savegress", "preserve_transactions": "true"}]


@pytest.mark.parametrize("asked", MARKED, ids=lambda asked: asked["format"])
@pytest.mark.parametrize("held", [{"tenant": OURS}, {"tables": ("users",)}], ids=str)
def test_marks_are_told_only_of_transactions_with_a_row_that_may_be_seen(
    shop: Site, asked: dict[str, str], held: dict[str, Any]
) -> None:
    key = shop.key(**held)
    visible = ours if "tenant" in held else lambda change: change.table.name == "users"

    @settings(
        max_examples=times(9, nightly=90),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(HISTORIES, st.data())
    def check(history: Any, data: st.DataObject) -> None:
        start = shop.log.latest_sequence
        for drafts, said in history:
            append(shop.writer, drafts, said)
        log = shop.log.read(start, limit=1000)
        seen = list(dict.fromkeys(each.transaction for each in log if visible(each)))
        told = changes(shop, key, after=start, **asked)
        begun = [each for each in map(mark, told) if each]
        assert begun == [(word, each.commit_time) for each in seen for word in ("BEGIN", "COMMIT")]
        assert balanced(map(mark, told))
        # Wherever a reader begins, it gets what it would have got there.
        after = start + data.draw(st.integers(0, len(log)))
        limit = data.draw(st.integers(1, 5))
        rest, at = [], after
        while at < shop.log.latest_sequence:
            page = shop.http.get(
                "/v1/changes", params=asked | {"after": at, "limit": limit}, headers=key
            ).json()
            rest += page["events"]
            at = page["scanned"]
        earlier = changes(shop, key, after=start, upto=after, **asked)
        assert unrelated(earlier) + unrelated(rest) == unrelated(told)

    check()


def mark(event: dict[str, Any]) -> tuple[str, Any] | None:
    """What an event says of its transaction's begin or end."""
    word = str(event.get("type", event.get("operation"))).upper()
    if word not in ("BEGIN", "COMMIT"):
        return None
    time = event["timestamp"]
    return word, time if isinstance(time, int) else COMMIT_TIME


def balanced(marks: Iterable[tuple[str, Any] | None]) -> bool:
    """Whether every event stands between a begin and an end."""
    open = False
    for each in marks:
        if each is not None:
            if (each[0] == "BEGIN") is open:
                return False
            open = not open
        elif not open:
            return False
    return not open


def unrelated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events but for those that each stream tells anew."""
    return [event for event in events if event.get("type") != "Relation"]


def test_the_marks_that_somebody_hears_name_only_their_own_transactions(shop: Site) -> None:
    append(shop.writer, [Draft(Op.INSERT, USERS, None, user(THEIRS, 1))])
    ours_and_theirs = [user(THEIRS, 2), user(OURS, 2), user(THEIRS, 3)]
    append(shop.writer, [Draft(Op.INSERT, USERS, None, row) for row in ours_and_theirs])
    append(shop.writer, [Draft(Op.INSERT, USERS, None, user(THEIRS, 4))])
    xid = shop.log.read(1, limit=1)[0].transaction.id
    key = shop.key(tenant=OURS)
    events = changes(shop, key, **MARKED[1])
    assert [each["operation"] for each in events] == ["BEGIN", "INSERT", "COMMIT"]
    assert {each["transaction_id"] for each in events} == {xid}
    for after, told in ((2, ["BEGIN", "INSERT", "COMMIT"]), (3, ["COMMIT"]), (4, [])):
        events = changes(shop, key, after=after, **MARKED[1])
        assert [each["operation"] for each in events] == told


# --- keys that end -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/v1/changes/stream", "/changefeed/stream?keep_alive=true&max_seconds=60"],
)
@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_stream_ends_with_its_key(shop: Site, path: str, how: str) -> None:
    key = shop.key(seconds=3.0 if how == "expired" else None)
    keyring = shop.service.keyring
    with Reader(shop.url + path, key) as reader:
        shop.writer.put("users", "1")
        reader.await_events(1)
        if how == "revoked":
            keyring.revoke(keyring.all()[-1].id)
            shop.writer.put("users", "2")  # nothing may come any more
        wait_until(reader.ended.is_set, timeout=50, message="the stream ends before max_seconds")
        assert len(reader.events) == 1


def test_a_long_poll_ends_with_its_key(shop: Site) -> None:
    key = shop.key()
    keyring = shop.service.keyring
    with ThreadPoolExecutor() as pool:
        asked = {"wait_ms": "60000"}  # longer than this client has patience
        waiting = pool.submit(shop.http.get, "/v1/changes", params=asked, headers=key)
        shop.await_waiting()
        keyring.revoke(keyring.all()[-1].id)
        assert waiting.result(120).json()["count"] == 0
