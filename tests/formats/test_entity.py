"""The entity format: one row's change as one event."""

import json
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from headrace.change.event import BeforeKind, Op, Table, Transaction
from headrace.formats.catalogue import schemas
from headrace.formats.entity import Entity, EntityFilter
from headrace.formats.facts import Facts, SourceServer
from headrace.model import EntityType, Model, Selection
from tests.changes import COMMIT_TIME, make_change
from tests.formats.entities import (
    FIRST,
    POSTS,
    USERS,
    Event,
    Step,
    deleted,
    deleted_by_key,
    ids,
    inserted,
    make_entity_table,
    model,
    render,
    render_one,
    transaction,
    updated,
)
from tests.formats.generated import transactions

SCHEMA = Draft202012Validator(json.loads(schemas()["entity.json"]))

ALICE = {"id": "u1", "email": "alice@example.com", "status": "active"}
NEW = {"email": "alice.smith@example.com"}
NOTES = make_entity_table("notes", "text", key=())
TIME = "2024-10-30T01:00:00.000123Z"  # COMMIT_TIME
KEYS = [
    "version",
    "event_id",
    "event_type",
    "timestamp",
    "sequence_number",
    "schema_name",
    "schema_version",
    "source",
    "entity",
    "operation",
    "cascade",
    "metadata",
]


def user(**settings: Any) -> Model:
    """A model that says this of users."""
    return model(EntityType(name="User", table="public.users", **settings))


# --- every event ---------------------------------------------------------------------------------


@pytest.mark.requirement("S1-05", "S1-06", "S1-07", "S1-09", "S1-10", "S1-11", "C-01")
def test_an_event_has_the_documents_twelve_keys() -> None:
    (change,) = transaction(inserted(USERS, **ALICE))
    event = render_one([change], Model(name="acme-api", version="2.1.0"))
    assert list(event) == KEYS
    assert event["version"] == "1.0"
    assert event["event_id"] == change.id
    assert event["timestamp"] == TIME
    assert event["sequence_number"] == FIRST
    assert (event["schema_name"], event["schema_version"]) == ("acme-api", "2.1.0")
    assert event["metadata"] == {}


@pytest.mark.requirement("S1-08", "S1-55", "C-02")
@pytest.mark.parametrize(
    ("step", "type", "operation"),
    [
        (inserted(USERS, **ALICE), "entity:created", "CREATE"),
        (Step(Op.READ, USERS, after=ALICE), "entity:created", "CREATE"),
        (updated(USERS, ALICE, **NEW), "entity:updated", "UPDATE"),
        (deleted(USERS, **ALICE), "entity:deleted", "DELETE"),
    ],
)
def test_an_operation_has_its_type_and_its_time(step: Step, type: str, operation: str) -> None:
    event = render_one(transaction(step))
    assert (event["event_type"], event["operation"]["type"]) == (type, operation)
    assert event["operation"]["timestamp"] == event["timestamp"] == TIME


@pytest.mark.requirement("C-02")
@pytest.mark.parametrize("op", [Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE])
def test_what_happens_to_no_row_is_not_carried(op: Op) -> None:
    assert Entity().render([make_change(op, after={"columns": []})]) == ()
    changes = [make_change(op, last=False), make_change(key={"id": "1"}, after={"id": "1"})]
    assert len(Entity().render(changes)) == 1


@pytest.mark.requirement("S1-12", "S1-13", "C-12")
def test_the_source_has_the_documents_four_keys() -> None:
    event = render_one(transaction(inserted(USERS, **ALICE)))
    assert list(event["source"].items()) == [
        ("database", "postgresql"),
        ("instance", "shop"),
        ("transaction_id", "7"),
        ("session_id", None),
    ]


@pytest.mark.requirement("S1-12", "S1-14")
def test_the_source_tells_all_that_is_known_when_asked() -> None:
    facts = Facts(servers=(SourceServer("shop", host="pg.example.com", instance="i", region="r"),))
    said = {"session_id": "sess_1", "user": "api_service"}
    changes = transaction(inserted(USERS, **ALICE), said=said)

    def source(model: Model) -> list[tuple[str, Any]]:
        (event,) = Entity(model, facts).render(changes)
        return list(json.loads(event.payload)["source"].items())

    assert source(Model(source_details=True)) == [
        ("database", "postgresql"),
        ("instance", "i"),
        ("database_name", "shop"),
        ("host", "pg.example.com"),
        ("region", "r"),
        ("transaction_id", "7"),
        ("session_id", "sess_1"),
        ("user", "api_service"),
        ("schema", "public"),
    ]
    assert dict(source(Model())) == {
        "database": "postgresql",
        "instance": "i",
        "transaction_id": "7",
        "session_id": "sess_1",
    }


@pytest.mark.requirement("S1-01")
@pytest.mark.parametrize(
    ("connector", "database"),
    [
        ("postgres", "postgresql"),
        ("mysql", "mysql"),
        ("sqlserver", "sqlserver"),
        ("sqlite", "sqlite"),
    ],
)
def test_every_database_makes_the_same_structure(connector: str, database: str) -> None:
    table = msgspec.structs.replace(USERS, connector=connector)
    event = render_one(transaction(inserted(table, **ALICE)))
    SCHEMA.validate(event)
    assert event["source"]["database"] == database


# --- the entity ----------------------------------------------------------------------------------


@pytest.mark.requirement("S1-15", "S1-16")
def test_an_entity_has_a_type_an_id_and_always_a_tenant() -> None:
    event = render_one(transaction(inserted(USERS, **ALICE)))
    assert event["entity"] == {"entity_type": "User", "entity_id": "u1", "tenant_id": None}


@pytest.mark.requirement("S1-15")
def test_an_entity_tells_what_its_model_names() -> None:
    table = make_entity_table("users", "email", "account", "n", "deleted_at")
    row = {"id": "u1", "email": "a@b", "account": 5, "n": 3, "deleted_at": None}
    told = user(identifier="email", tenant="account", version="n", soft_delete="deleted_at")
    event = render_one(transaction(inserted(table, **row)), told)
    assert list(event["entity"].items()) == [
        ("entity_type", "User"),
        ("entity_id", "u1"),
        ("entity_identifier", "a@b"),
        ("tenant_id", "5"),
        ("version", 3),
        ("is_soft_deleted", False),
    ]


@pytest.mark.requirement("S1-15", "C-03")
def test_what_is_null_or_not_known_of_an_entity_is_left_out() -> None:
    table = make_entity_table("users", "email", "n", "deleted_at")
    told = user(identifier="email", tenant="email", version="n", soft_delete="deleted_at")
    row = {"id": "u1", "email": None, "n": "x", "deleted_at": None}
    event = render_one(transaction(inserted(table, **row)), told)
    assert event["entity"] == {
        "entity_type": "User",
        "entity_id": "u1",
        "tenant_id": None,
        "is_soft_deleted": False,
    }
    event = render_one(transaction(deleted_by_key(table, id="u1")), told)
    assert event["entity"] == {"entity_type": "User", "entity_id": "u1", "tenant_id": None}


@pytest.mark.parametrize(
    ("value", "id"), [(7, "7"), ("ä:b", "ä:b"), (True, "true"), ([1, "a"], '[1,"a"]')]
)
def test_an_id_is_always_text(value: Any, id: str) -> None:
    event = render_one(transaction(inserted(USERS, id=value)))
    assert event["entity"]["entity_id"] == id


def test_an_id_of_several_columns_is_joined() -> None:
    table = make_entity_table("order_items", key=("order_id", "line"))
    event = render_one(transaction(inserted(table, order_id="a:b", line=2)))
    assert event["entity"]["entity_id"] == "a%3Ab:2"
    turned = model(EntityType(name="Item", table="order_items", id=("line", "order_id")))
    event = render_one(transaction(inserted(table, order_id="a:b", line=2)), turned)
    assert ids([event]) == ["Item:2:a%3Ab"]


def test_an_id_may_be_another_column_than_the_key() -> None:
    told = user(id=("email",))
    assert ids(render(transaction(inserted(USERS, **ALICE)), told)) == ["User:alice@example.com"]
    # Where it was not sent, the key must do.
    assert ids(render(transaction(deleted_by_key(USERS, id="u1")), told)) == ["User:u1"]


def test_a_row_without_a_key_has_an_empty_id() -> None:
    table = make_entity_table("notes", "text", key=())
    assert ids(render(transaction(inserted(table, text="x")))) == ["Note:"]


# --- operations ----------------------------------------------------------------------------------


@pytest.mark.requirement("S1-17", "C-04")
def test_a_creation_has_no_before() -> None:
    operation = render_one(transaction(inserted(USERS, **ALICE)))["operation"]
    assert list(operation) == ["type", "trigger", "timestamp", "after", "changed_fields"]
    assert operation["after"] == ALICE
    assert operation["changed_fields"] == list(ALICE)


@pytest.mark.requirement("S1-18", "S1-19")
def test_an_update_has_both_rows_and_what_differs() -> None:
    operation = render_one(transaction(updated(USERS, ALICE, **NEW)))["operation"]
    assert list(operation) == [
        "type",
        "trigger",
        "timestamp",
        "before",
        "after",
        "changed_fields",
        "changed_field_values",
    ]
    assert (operation["before"], operation["after"]) == (ALICE, ALICE | NEW)
    assert operation["changed_fields"] == ["email"]
    assert operation["changed_field_values"] == {
        "email": {"before": ALICE["email"], "after": NEW["email"]}
    }


@pytest.mark.requirement("S1-21", "C-25")
def test_a_hard_delete_changes_every_column() -> None:
    operation = render_one(transaction(deleted(USERS, **ALICE)))["operation"]
    assert list(operation) == ["type", "trigger", "timestamp", "before", "after", "changed_fields"]
    assert (operation["before"], operation["after"]) == (ALICE, None)
    assert operation["changed_fields"] == ["id", "email", "status"]


@pytest.mark.requirement("S1-22", "S1-15", "C-25")
def test_a_soft_delete_is_an_update() -> None:
    table = make_entity_table("users", "email", "deleted_at")
    before = {"id": "u1", "email": "a", "deleted_at": None}
    at = "2026-01-11T15:45:00Z"
    told = user(soft_delete="deleted_at", fields={"UPDATE": ("id", "deleted_at")})
    said = {"trigger": "api_delete"}
    event = render_one(transaction(updated(table, before, deleted_at=at), said=said), told)
    operation = event["operation"]
    assert event["event_type"] == "entity:updated"
    assert event["entity"]["is_soft_deleted"] is True
    assert (operation["type"], operation["trigger"]) == ("UPDATE", "api_delete")
    assert operation["after"] == {"id": "u1", "deleted_at": at}
    assert operation["changed_fields"] == ["deleted_at"]
    restored = before | {"deleted_at": at}
    event = render_one(transaction(updated(table, restored, deleted_at=None)), told)
    assert event["entity"]["is_soft_deleted"] is False


@pytest.mark.requirement("S1-20")
def test_images_show_the_fields_that_the_model_names() -> None:
    told = user(fields={"CREATE": ("id", "email"), "UPDATE": ("email",), "DELETE": ("id",)})

    def operation(step: Step) -> Event:
        described: Event = render_one(transaction(step), told)["operation"]
        return described

    created = operation(inserted(USERS, **ALICE))
    assert created["after"] == {"id": "u1", "email": ALICE["email"]}
    assert created["changed_fields"] == ["id", "email"]
    changed = operation(updated(USERS, ALICE, **NEW, status="x"))
    assert (changed["before"], changed["after"]) == ({"email": ALICE["email"]}, NEW)
    assert changed["changed_fields"] == list(changed["changed_field_values"]) == ["email"]
    gone = operation(deleted(USERS, **ALICE))
    assert gone["before"] == {"id": "u1"}
    # Everything that the entity ever shows is gone, and nothing else is named.
    assert gone["changed_fields"] == ["id", "email"]


@pytest.mark.requirement("C-02", "S1-23")
def test_a_copied_row_is_created_by_a_migration() -> None:
    event = render_one(transaction(Step(Op.READ, USERS, after=ALICE)))
    assert event["operation"]["trigger"] == "data_migration"
    assert event["metadata"] == {"custom_fields": {"snapshot": True}}


def test_an_image_is_passed_on_byte_for_byte() -> None:
    after = b'{"id":"1","n":1.10000000000000000001,"big":12345678901234567890123}'
    change = msgspec.structs.replace(make_change(key={"id": "1"}), after=after)
    (event,) = Entity().render([change])
    assert after in event.payload


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_an_event_is_one_line_even_when_a_json_column_was_not(end: bytes) -> None:
    after = b'{"id":"1","doc":{%b"a":1}}' % end
    change = msgspec.structs.replace(
        make_change(Op.UPDATE, key={"id": "1"}, before={"id": "1", "doc": 1}),
        after=after,
        changed=("doc",),
    )
    (event,) = Entity().render([change])
    assert b"\n" not in event.payload
    assert b"\r" not in event.payload
    differences = json.loads(event.payload)["operation"]["changed_field_values"]
    assert differences == {"doc": {"before": 1, "after": {"a": 1}}}


# --- what is not known ---------------------------------------------------------------------------


def with_before(
    before: dict[str, Any] | None, kind: BeforeKind, *, table: Table = USERS, **fields: Any
) -> Step:
    after = {"id": "u2", "email": "new"}
    return Step(Op.UPDATE, table, before, after, {"before_kind": kind} | fields)


@pytest.mark.requirement("C-03")
def test_an_update_without_an_old_row_names_every_column_it_may_have_changed() -> None:
    event = render_one(transaction(with_before(None, BeforeKind.NONE, unchanged=("status",))))
    operation = event["operation"]
    assert operation["before"] is None
    assert operation["after"] == {"id": "u2", "email": "new"}
    assert operation["changed_fields"] == ["email"]
    assert operation["changed_field_values"] == {}
    assert event["metadata"] == {"before_kind": "none", "unchanged": ["status"]}


@pytest.mark.requirement("C-03", "S1-18")
def test_a_key_has_not_changed_where_the_source_would_have_sent_the_old_one() -> None:
    event = render_one(transaction(with_before(None, BeforeKind.NONE)))
    assert event["operation"]["changed_fields"] == ["email"]
    elsewhere = msgspec.structs.replace(USERS, connector="mysql")
    event = render_one(transaction(with_before(None, BeforeKind.NONE, table=elsewhere)))
    assert event["operation"]["changed_fields"] == ["id", "email"]


@pytest.mark.requirement("C-03")
def test_an_update_with_an_old_key_tells_the_values_that_it_knows() -> None:
    event = render_one(transaction(with_before({"id": "u1"}, BeforeKind.KEY)))
    operation = event["operation"]
    assert operation["before"] == {"id": "u1"}
    assert operation["changed_fields"] == ["id", "email"]
    assert operation["changed_field_values"] == {"id": {"before": "u1", "after": "u2"}}
    assert event["metadata"] == {"before_kind": "key"}
    same = render_one(transaction(with_before({"id": "u2"}, BeforeKind.KEY)))["operation"]
    assert same["changed_field_values"] == {}
    assert same["changed_fields"] == ["email"]


@pytest.mark.requirement("C-03")
def test_an_update_with_both_rows_knows_what_differs_though_the_source_did_not_say() -> None:
    event = render_one(transaction(with_before({"id": "u2", "email": "old"}, BeforeKind.FULL)))
    assert event["operation"]["changed_fields"] == ["email"]
    assert event["metadata"] == {}


@pytest.mark.requirement("C-03")
@pytest.mark.parametrize(
    ("step", "before", "kind"),
    [
        (deleted_by_key(USERS, id="u1"), {"id": "u1"}, "key"),
        (Step(Op.DELETE, USERS, None, None, {"before_kind": BeforeKind.NONE}), None, "none"),
    ],
)
def test_a_delete_shows_what_the_source_sent(step: Step, before: object, kind: str) -> None:
    change = make_change(Op.DELETE, table=USERS, key={"id": "u1"}, **step.fields)
    change = msgspec.structs.replace(
        change, before=None if before is None else msgspec.json.encode(before)
    )
    event = render_one([change])
    assert event["operation"]["before"] == before
    assert event["operation"]["changed_fields"] == ["id", "email", "status"]
    assert event["metadata"] == {"before_kind": kind}
    assert ids([event]) == ["User:u1"]


@pytest.mark.requirement("C-03", "C-04")
@pytest.mark.parametrize(
    "step",
    [
        with_before(None, BeforeKind.NONE),
        Step(Op.DELETE, NOTES, None, None, {"before_kind": BeforeKind.NONE}),
    ],
)
def test_an_old_row_that_is_not_shown_must_be_accounted_for(step: Step) -> None:
    event = render_one(transaction(step))
    SCHEMA.validate(event)
    for metadata in ({}, {"before_kind": "key"}):
        assert not SCHEMA.is_valid(event | {"metadata": metadata})


@pytest.mark.requirement("S1-27")
def test_an_affected_entity_has_an_id() -> None:
    asked = model(
        EntityType(name="User", table="users", queries=("users",)), affected_entities=True
    )
    event = render_one(transaction(inserted(USERS, **ALICE)), asked)
    SCHEMA.validate(event)
    (query,) = event["cascade"]["invalidations"]
    assert query["affected_entities"] == ["User:u1"]
    query["affected_entities"] = ["User:"]
    assert not SCHEMA.is_valid(event)


def test_a_column_that_is_not_shown_is_not_called_unchanged_either() -> None:
    told = user(fields={"UPDATE": ("email",)})
    event = render_one(transaction(with_before(None, BeforeKind.NONE, unchanged=("status",))), told)
    assert event["metadata"] == {"before_kind": "none"}


# --- annotations ---------------------------------------------------------------------------------

SAID = {
    "custom_fields": {"import_batch_id": "batch_123"},
    "api_version": "2.1.0",
    "user_agent": "Mozilla/5.0",
    "ip_address": "192.0.2.1",
    "user_roles": ["user", "admin"],
    "user_id": "u2",
    "request_id": "req_1",
    "session_id": "sess_1",
    "trigger": "batch_import",
}


def told(said: object, *steps: Step) -> Event:
    """The event of a transaction with this annotation."""
    event = render_one(transaction(*(steps or (inserted(USERS, **ALICE),)), said=said))
    SCHEMA.validate(event)
    return event


@pytest.mark.requirement("S1-14", "S1-23", "S1-28")
def test_an_annotation_says_who_and_why() -> None:
    event = told(SAID)
    assert event["source"]["session_id"] == "sess_1"
    assert event["operation"]["trigger"] == "batch_import"
    assert list(event["metadata"].items()) == [
        ("request_id", "req_1"),
        ("user_id", "u2"),
        ("user_roles", ["user", "admin"]),
        ("ip_address", "192.0.2.1"),
        ("user_agent", "Mozilla/5.0"),
        ("api_version", "2.1.0"),
        ("custom_fields", {"import_batch_id": "batch_123"}),
    ]


STEPS = {
    "CREATE": inserted(USERS, **ALICE),
    "UPDATE": updated(USERS, ALICE, **NEW),
    "DELETE": deleted(USERS, **ALICE),
}
FITTING = {
    "api_create": ["CREATE"],
    "api_import": ["CREATE"],
    "batch_import": ["CREATE"],
    "data_migration": ["CREATE"],
    "api_update": ["UPDATE"],
    "api_delete": ["UPDATE", "DELETE"],  # an update where it is a soft delete
    "cascade_delete": ["DELETE"],
    "admin_action": ["CREATE", "UPDATE", "DELETE"],
}


@pytest.mark.requirement("S1-17", "S1-18", "S1-21", "S1-22", "S1-23", "C-25")
@pytest.mark.parametrize("trigger", FITTING)
@pytest.mark.parametrize("operation", STEPS)
def test_a_trigger_of_the_document_is_told_where_it_fits(trigger: str, operation: str) -> None:
    event = told({"trigger": trigger, "step": 1}, STEPS[operation])
    if operation in FITTING[trigger]:
        assert event["operation"]["trigger"] == trigger
        assert event["metadata"] == {"custom_fields": {"step": 1}}
    else:
        assert event["operation"]["trigger"] == "admin_action"
        assert event["metadata"] == {"custom_fields": {"step": 1, "trigger": trigger}}
        assert not SCHEMA.is_valid(event | {"operation": event["operation"] | {"trigger": trigger}})


def test_a_custom_field_of_its_own_is_kept_where_a_trigger_does_not_fit() -> None:
    said = {"trigger": "api_delete", "custom_fields": {"trigger": "mine", "a": 1}}
    assert told(said)["metadata"] == {"custom_fields": {"trigger": "mine", "a": 1}}


@pytest.mark.requirement("S1-23")
def test_another_trigger_is_a_custom_field() -> None:
    event = told({"trigger": "nightly"})
    assert event["operation"]["trigger"] == "admin_action"
    assert event["metadata"] == {"custom_fields": {"trigger": "nightly"}}


@pytest.mark.requirement("S1-23")
def test_without_an_annotation_somebody_acted_on_the_database() -> None:
    assert told(None)["operation"]["trigger"] == "admin_action"
    assert told({})["operation"]["trigger"] == "admin_action"


@pytest.mark.requirement("S1-28")
def test_what_has_no_place_of_its_own_is_a_custom_field() -> None:
    said = {"step": [1], "custom_fields": {"a": 1, "b": 2}, "b": 3}
    assert told(said)["metadata"] == {"custom_fields": {"a": 1, "b": 2, "step": [1]}}


@pytest.mark.parametrize(
    ("said", "metadata"),
    [
        ({"user_id": 5}, {"user_id": "5"}),
        ({"user_id": None, "trigger": None, "root": None, "x": None}, {}),
        ({"user_id": {"n": 5}}, {"custom_fields": {"user_id": {"n": 5}}}),
        ({"user_roles": "admin"}, {"custom_fields": {"user_roles": "admin"}}),
        ({"user_roles": [1]}, {"custom_fields": {"user_roles": [1]}}),
        ({"custom_fields": [1]}, {"custom_fields": {"custom_fields": [1]}}),
        ({"trigger": ["x"]}, {"custom_fields": {"trigger": ["x"]}}),
        ({"session_id": ["x"]}, {"custom_fields": {"session_id": ["x"]}}),
        ({"annotation_error": "not JSON"}, {"annotation_error": "not JSON"}),
        ({"user": "app"}, {}),
    ],
)
def test_what_is_not_as_it_should_be_is_kept_somewhere(said: object, metadata: object) -> None:
    assert told(said)["metadata"] == metadata


@pytest.mark.requirement("S1-49")
def test_a_mutation_that_failed_in_part_is_one_event_that_says_so() -> None:
    error = {"code": "partial", "message": "2 of 3 posts were published"}
    said = {"root": "User:u1", "error": error}
    event = told(
        said, updated(USERS, ALICE, **NEW), inserted(POSTS, id="p1"), inserted(POSTS, id="p2")
    )
    assert ids([event]) == ["User:u1"]
    assert event["metadata"] == {"error": error}
    assert told({"root": "User:u1", "error": "quota"})["metadata"] == {"error": "quota"}


def test_an_annotation_that_came_late_counts_for_all() -> None:
    one, two = transaction(inserted(USERS, id="u1"), inserted(USERS, id="u2"))
    said = msgspec.json.encode({"user_id": "u9"})
    annotated = msgspec.structs.replace(
        two, transaction=Transaction("7", COMMIT_TIME, COMMIT_TIME, said)
    )
    events = render([one, annotated])
    assert [event["metadata"] for event in events] == [{"user_id": "u9"}] * 2


# --- which events --------------------------------------------------------------------------------


@pytest.mark.requirement("S1-53")
def test_only_chosen_operations_make_events() -> None:
    steps = (
        inserted(USERS, id="1"),
        updated(USERS, {"id": "2"}, email="x"),
        deleted(USERS, id="3"),
    )
    some = Model().selected(Selection(operations=("UPDATE", "DELETE")))
    assert ids(render(transaction(*steps), some)) == ["User:2", "User:3"]
    some = Model().selected(Selection(exclude_operations=("DELETE",)))
    assert ids(render(transaction(*steps), some)) == ["User:1", "User:2"]


@pytest.mark.requirement("S1-52")
def test_only_chosen_entities_make_events() -> None:
    steps = (inserted(USERS, id="1"), inserted(POSTS, id="2", user_id="1"))
    some = Model().selected(Selection(entities=("Post",)))
    assert ids(render(transaction(*steps), some)) == ["Post:2"]
    some = Model().selected(Selection(exclude_entities=("Post",)))
    assert ids(render(transaction(*steps), some)) == ["User:1"]


def rendered(step: Step, said: object = None) -> bytes:
    (event,) = Entity(user(tenant="status")).render(transaction(step, said=said))
    return event.payload


CREATED = rendered(inserted(USERS, **ALICE), {"trigger": "api_create"})
UPDATED = rendered(updated(USERS, ALICE, **NEW))
POSTED = rendered(inserted(POSTS, id="p1", user_id="u1"))


def wanted(**by: Any) -> list[bytes]:
    return [event for event in (CREATED, UPDATED, POSTED) if EntityFilter(**by).wants(event)]


@pytest.mark.requirement("S1-43")
def test_events_are_chosen_by_their_type_and_their_entitys() -> None:
    assert wanted() == [CREATED, UPDATED, POSTED]
    assert wanted(event_type="entity:*", entity_type="User") == [CREATED, UPDATED]
    assert wanted(event_type="entity:created") == [CREATED, POSTED]
    assert wanted(event_type="user:*") == []
    assert wanted(entity_type="Use*") == []


@pytest.mark.requirement("S1-44", "S1-16")
def test_events_are_chosen_by_their_tenant() -> None:
    assert wanted(tenant_id="active") == [CREATED, UPDATED]
    assert wanted(tenant_id="other") == []


@pytest.mark.requirement("S1-45")
def test_events_are_chosen_by_their_trigger() -> None:
    assert wanted(trigger="api_*") == [CREATED]
    assert wanted(trigger="admin_action") == [UPDATED, POSTED]


@pytest.mark.requirement("S1-46")
def test_events_are_chosen_by_the_fields_that_changed() -> None:
    assert wanted(entity_type="User", changed_fields=("status",)) == [CREATED]
    assert wanted(changed_fields=("email", "user_id")) == [CREATED, UPDATED, POSTED]


# --- all events ----------------------------------------------------------------------------------

FULL = Model(
    tenant="tenant_id",
    source_details=True,
    affected_entities=True,
    entities=(
        EntityType(
            name="User",
            table="users",
            identifier="email",
            version="version",
            soft_delete="deleted_at",
            queries={"user": ("UPDATE",), "users": ()},
            fields={"UPDATE": ("id", "name", "deleted_at"), "DELETE": ("id",)},
        ),
        EntityType(name="Order", table="orders", queries=("orders", "users")),
    ),
)
FACTS = Facts(servers=(SourceServer("shop", host="db.example.com"),))


@pytest.mark.requirement("S1-02", "S1-03", "S1-05", "S1-19", "S1-24", "S1-42")
@given(transactions(), st.sampled_from((Model(), FULL)))
def test_every_transaction_makes_events_of_the_schema(changes: list[Any], model: Model) -> None:
    events = Entity(model, FACTS).render(changes)
    assert list(events) == sorted(events)
    assert len({event.sequence for event in events}) == len(events)
    assert {event.sequence for event in events} <= {change.sequence for change in changes}
    for event in events:
        assert b"\n" not in event.payload
        decoded = json.loads(event.payload)
        SCHEMA.validate(decoded)
        assert list(decoded) == KEYS
        operation = decoded["operation"]
        if operation["type"] == "UPDATE" and "before_kind" not in decoded["metadata"]:
            assert list(operation["changed_field_values"]) == operation["changed_fields"]


@pytest.mark.requirement("S1-02", "S1-41")
@given(transactions())
def test_a_transaction_makes_the_same_events_every_time(changes: list[Any]) -> None:
    assert Entity(FULL).render(changes) == Entity(FULL).render(changes)


@pytest.mark.requirement("S1-02")
@given(transactions())
def test_every_row_is_told_once(changes: list[Any]) -> None:
    """Each row change has an event of its own, or is in the cascade of one."""
    unannotated = [
        msgspec.structs.replace(
            change, transaction=msgspec.structs.replace(change.transaction, metadata=None)
        )
        for change in changes
    ]
    rows = [change for change in unannotated if change.op in ROW_OPS]
    events = [json.loads(event.payload) for event in Entity().render(unannotated)]
    own = {event["event_id"] for event in events}
    folded = [change for change in rows if change.id not in own]
    assert all(change.op is Op.DELETE for change in folded)
    listed = sum(len(event["cascade"]["deleted"]) for event in events)
    assert len(own) == len(events)
    # A row that was deleted twice is listed once; rows without a key are never known to be one.
    known = {(change.table.name, change.key or change.id, change.before) for change in folded}
    assert len(known) >= listed
    assert bool(folded) == bool(listed)


ROW_OPS = (Op.INSERT, Op.READ, Op.UPDATE, Op.DELETE)


def test_formats_are_values_that_travel() -> None:
    format = Entity(FULL, FACTS)
    changes = transaction(inserted(USERS, **ALICE))
    events = format.render(changes)
    again = pickle.loads(pickle.dumps(format))
    assert again == format == Entity(FULL, FACTS)
    assert hash(again) == hash(format)
    assert again.render(changes) == events
    assert format != Entity()


def test_a_table_that_changes_is_looked_at_anew() -> None:
    format = Entity()
    other = make_entity_table("users", "email", "status", "age")
    for table, columns in ((USERS, 3), (other, 4), (USERS, 3)):
        (event,) = format.render(transaction(deleted(table, **ALICE)))
        assert len(json.loads(event.payload)["operation"]["changed_fields"]) == columns
