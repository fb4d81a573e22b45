"""Filters in the words of entity events, for every format."""

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.change.event import BeforeKind, Change, Op, Table
from headrace.formats.catalogue import names
from headrace.formats.entities import Entities
from headrace.formats.entity import Entity, EntityFilter
from headrace.serve.filter import Filter
from tests.changes import make_change
from tests.effort import times
from tests.serve.conftest import Site, Sites
from tests.serve.sse import Reader
from tests.serve.tenants import (
    FORMATS,
    HISTORIES,
    MODEL,
    ORDERS,
    OURS,
    THEIRS,
    USERS,
    Draft,
    append,
)

ENTITIES = Entities(MODEL)


def user(tenant: str, number: int, **values: Any) -> dict[str, Any]:
    row = {"id": f"{tenant}-{number}", "tenant_id": tenant, "name": "Ada", "status": "new"}
    return row | values


@pytest.fixture
def shop(sites: Sites) -> Site:
    """Changes: 1 created, 2 renamed, 3 another tenant's, 4 deleted by a cascade, 5 an order."""
    site = sites(formats=FORMATS)
    writer = site.writer
    append(writer, [Draft(Op.INSERT, USERS, None, user(OURS, 1))], {"trigger": "api_create"})
    before, after = user(OURS, 1), user(OURS, 1, name="Eve")
    renamed = Draft(Op.UPDATE, USERS, before, after, BeforeKind.FULL)
    append(writer, [renamed], {"trigger": "api_update"})
    append(writer, [Draft(Op.INSERT, USERS, None, user(THEIRS, 1))], {"trigger": "api_create"})
    gone = Draft(Op.DELETE, USERS, after, None, BeforeKind.FULL)
    append(writer, [gone], {"trigger": "cascade_delete"})
    order = {"tenant_id": OURS, "id": "1", "user_id": f"{OURS}-1"}
    append(writer, [Draft(Op.INSERT, ORDERS, None, order)])
    return site


CASES = [
    pytest.param(
        {"event_type": "entity:*", "entity_type": "User"},
        [1, 2, 3, 4],
        marks=pytest.mark.requirement("S1-43"),
    ),
    pytest.param({"event_type": "entity:deleted"}, [4], marks=pytest.mark.requirement("S1-43")),
    pytest.param({"event_type": "row:*"}, [], marks=pytest.mark.requirement("S1-43")),
    pytest.param({"entity_type": "Order"}, [5], marks=pytest.mark.requirement("S1-43")),
    pytest.param({"entity_type": "user"}, [], marks=pytest.mark.requirement("S1-43")),
    pytest.param(
        {"tenant_id": OURS}, [1, 2, 4, 5], marks=pytest.mark.requirement("S1-44", "S1-16")
    ),
    pytest.param({"trigger": "api_*"}, [1, 2, 3], marks=pytest.mark.requirement("S1-45")),
    pytest.param({"trigger": "admin_action"}, [5], marks=pytest.mark.requirement("S1-45")),
    pytest.param(
        {"entity_type": "User", "changed_fields": "name", "event_type": "entity:updated"},
        [2],
        marks=pytest.mark.requirement("S1-46"),
    ),
    pytest.param(
        {"entity_type": "User", "changed_fields": "status", "event_type": "entity:updated"},
        [],
        marks=pytest.mark.requirement("S1-46"),
    ),
    pytest.param(
        {"changed_fields": "user_id,nothing"}, [5], marks=pytest.mark.requirement("S1-46")
    ),
    pytest.param(
        {"tenant_id": OURS, "trigger": "cascade_*", "entity_type": "User"},
        [4],
        marks=pytest.mark.requirement("S1-44", "S1-45"),
    ),
    pytest.param({"tables": "orders", "entity_type": "User"}, []),
]

SEQUENCE = {
    "canonical": "sequence", "changefeed": "sequence", "entity": "sequence_number"
}  # fmt: skip


@pytest.mark.parametrize("format", SEQUENCE)
@pytest.mark.parametrize(("asked", "expected"), CASES)
def test_a_page_holds_what_the_filter_wants(
    shop: Site, format: str, asked: dict[str, str], expected: list[int]
) -> None:
    page = shop.get("/v1/changes", format=format, **asked).json()
    events = page.get("changes", page.get("events"))
    assert [event[SEQUENCE[format]] for event in events] == expected
    assert page["scanned"] == 5  # the reader's cursor moves past what it does not want


@pytest.mark.parametrize("format", names())
def test_every_format_obeys(shop: Site, format: str) -> None:
    asked = {"format": format, "tenant_id": OURS, "entity_type": "User"}
    text = shop.get("/v1/changes", **asked).text
    assert f"{OURS}-1" in text
    assert THEIRS not in text


@pytest.mark.requirement("S1-44", "S1-45")
def test_a_stream_holds_what_the_filter_wants(shop: Site) -> None:
    url = f"{shop.url}/v1/changes/stream?tenant_id={OURS}&trigger=api_*"
    with Reader(url) as reader:
        assert [event["sequence"] for event in reader.await_events(2)] == [1, 2]
        append(shop.writer, [Draft(Op.INSERT, USERS, None, user(THEIRS, 2))])
        said = {"trigger": "api_create"}
        append(shop.writer, [Draft(Op.INSERT, USERS, None, user(OURS, 2))], said)
        assert [event["sequence"] for event in reader.await_events(3)] == [1, 2, 7]


def test_a_created_and_then_changed_row_is_one_created_event(shop: Site) -> None:
    created = Draft(Op.INSERT, USERS, None, user(OURS, 9))
    changed = Draft(Op.UPDATE, USERS, user(OURS, 9), user(OURS, 9, name="X"), BeforeKind.FULL)
    append(shop.writer, [created, changed], {"root": f"User:{OURS}-9"})
    asked = {"after": 5, "event_type": "entity:created"}
    [event] = shop.get("/v1/changes", format="entity", **asked).json()["events"]
    # The event stands at the change that is called the same.
    assert (event["event_type"], event["sequence_number"]) == ("entity:created", 6)
    [change] = shop.get("/v1/changes", **asked).json()["changes"]
    assert change["sequence"] == 6


def test_a_trigger_that_the_operation_cannot_have_is_not_its_own(shop: Site) -> None:
    gone = Draft(Op.DELETE, USERS, user(OURS, 9), None, BeforeKind.FULL)
    created = Draft(Op.INSERT, USERS, None, user(OURS, 8))
    append(shop.writer, [gone, created], {"trigger": "api_create"})
    for trigger, expected in (("api_create", [7]), ("admin_action", [6])):
        for format in SEQUENCE:
            asked = {"after": 5, "trigger": trigger, "format": format}
            page = shop.get("/v1/changes", **asked).json()
            events = page.get("changes", page.get("events"))
            assert [event[SEQUENCE[format]] for event in events] == expected


def test_a_number_is_a_tenant_too(shop: Site) -> None:
    append(shop.writer, [Draft(Op.INSERT, USERS, None, user(OURS, 9, tenant_id=42))])
    [change] = shop.get("/v1/changes", tenant_id="42").json()["changes"]
    assert change["sequence"] == 6


@pytest.mark.parametrize(
    ("name", "value"), [("changed_fields", "a,,b"), ("tenant_id", ""), ("event_type", "")]
)
def test_what_means_nothing_is_refused_by_name(shop: Site, name: str, value: str) -> None:
    response = shop.http.get("/v1/changes", params={name: value})
    assert response.status_code == 400
    assert response.json()["parameter"] == name


def test_a_change_passes_exactly_where_its_own_event_does(sites: Sites) -> None:
    site, format = sites(), Entity(MODEL)

    @settings(
        max_examples=times(30, nightly=300),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(HISTORIES, FILTERS)
    def check(history: Any, by: EntityFilter) -> None:
        start = site.log.latest_sequence
        for drafts, said in history:
            # Each alone and without a root: then an event is about one change.
            only = {"trigger": said["trigger"]} if said else None
            for draft in drafts:
                append(site.writer, [draft], only)
        for change in site.log.read(start, limit=1000):
            events = [event.payload for event in format.render([change])]
            assert ENTITIES.wanted(by)(change) is any(map(by.wants, events)), change

    check()


FILTERS = st.builds(
    EntityFilter,
    event_type=st.sampled_from(["*", "entity:*", "entity:deleted", "*:created"]),
    entity_type=st.sampled_from([None, "User", "Order"]),
    tenant_id=st.sampled_from([None, OURS, THEIRS]),
    trigger=st.sampled_from(["*", "api_*", "admin_action", "data_migration"]),
    changed_fields=st.sampled_from([(), ("name",), ("status", "user_id"), ("tenant_id",)]),
)


def test_nothing_is_asked_of_a_change_that_nobody_filters() -> None:
    assert Filter().predicate(ENTITIES) is None


def test_a_tables_answer_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    matches = Table.matches

    def counted(table: Table, glob: str) -> bool:
        asked.append(glob)
        return matches(table, glob)

    monkeypatch.setattr(Table, "matches", counted)
    passes = Filter(tables=("users",)).predicate(ENTITIES)
    assert passes is not None
    changes: list[Change] = [make_change() for _ in itertools.repeat(None, 5)]
    assert all(map(passes, changes))
    assert asked == ["users"]
