"""The document's examples: made by a real PostgreSQL, or accepted by the schema."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

import pytest
import yaml
from jsonschema import Draft202012Validator

from headrace.change.event import Change
from headrace.config import CdcSection, Config, parse
from headrace.errors import ConfigError
from headrace.formats.catalogue import schemas
from headrace.formats.entity import Entity
from headrace.model import Model
from headrace.run import formats
from headrace.testing import PostgresDatabase
from tests.formats.entities import Event, ids
from tests.sources.capturing import SOURCE, Captured, captured

SEEDS = Path(__file__).parent / "seeds"
SCHEMA = Draft202012Validator(json.loads(schemas()["entity.json"]))

EVENT_ID = re.compile(r"evt_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def seed(name: str) -> Event:
    """An example of the document."""
    example: Event = json.loads((SEEDS / f"s1_{name}.json").read_text())
    return example


# --- accepted by the schema ----------------------------------------------------------------------


@pytest.mark.requirement("S1-29", "S1-05")
@pytest.mark.parametrize("name", ["created", "updated", "deleted"])
def test_the_whole_examples_keep_to_the_schema(name: str) -> None:
    SCHEMA.validate(seed(name))


# Which whole example a fragment is of, and what the document leaves out of it.
NO_CASCADE: Event = {"updated": [], "deleted": [], "invalidations": []}
FRAGMENTS: dict[str, tuple[str, Event]] = {
    "source": ("created", {}),
    "session": ("created", {"source": seed("created")["source"]}),
    "entity": ("created", {}),
    "tenant": ("created", {"entity": seed("created")["entity"]}),
    "create": ("created", {}),
    "update": ("updated", {}),
    "delete": ("deleted", {}),
    "soft_delete": (
        "updated",
        {
            "operation": {
                "timestamp": "2026-01-11T15:45:00.123456Z",
                "before": {"id": "550e8400-e29b-41d4-a716-446655440000", "deleted_at": None},
                "changed_field_values": {
                    "deleted_at": {"before": None, "after": "2026-01-11T15:45:00Z"}
                },
            }
        },
    ),
    "cascade": ("deleted", {}),
    "cascade_updated": ("created", {"cascade": NO_CASCADE}),
    "cascade_deleted": ("deleted", {"cascade": NO_CASCADE}),
    "cascade_invalidations": ("deleted", {"cascade": NO_CASCADE}),
    "metadata": ("created", {}),
}
PLACES = {
    "session": "source",
    "cascade_updated": "cascade",
    "cascade_deleted": "cascade",
    "cascade_invalidations": "cascade",
}


def alternatives(example: Event) -> Iterator[Event]:
    """The example with each of the values that it writes as `a|b|c`."""
    for path, value in _leaves(example):
        if isinstance(value, str) and "|" in value:
            for choice in value.split("|"):
                chosen = copy.deepcopy(example)
                within = chosen
                for part in path[:-1]:
                    within = within[part]
                within[path[-1]] = choice
                yield from alternatives(chosen)
            return
    yield example


def _leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    inner = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, value in inner:
        yield (*path, key), value
        yield from _leaves(value, (*path, key))


@pytest.mark.requirement(
    "S1-12",
    "S1-14",
    "S1-15",
    "S1-17",
    "S1-18",
    "S1-21",
    "S1-22",
    "S1-25",
    "S1-26",
    "S1-27",
    "S1-28",
)
@pytest.mark.parametrize("name", FRAGMENTS)
def test_the_fragments_keep_to_the_schema_within_an_event(name: str) -> None:
    whole, left_out = FRAGMENTS[name]
    given = seed(name)
    if name in PLACES:
        given = {PLACES[name]: given}
    count = 0
    for fragment in alternatives(given):
        event = seed(whole)
        for part, value in fragment.items():
            event[part] = left_out.get(part, {}) | value
        SCHEMA.validate(event)
        count += 1
    assert count >= 1


@pytest.mark.requirement("S1-05", "S1-08")
def test_the_top_level_keeps_to_the_schema_with_each_type() -> None:
    wholes = {seed(name)["event_type"]: seed(name) for name in ("created", "updated", "deleted")}
    for event in alternatives(seed("event")):
        whole = wholes.pop(event["event_type"])
        for part in ("operation", "cascade", "metadata"):
            assert event[part] == {}
            event[part] = whole[part]
        SCHEMA.validate(event)
    assert not wholes


@pytest.mark.requirement("S1-51")
def test_the_documents_settings_are_settings() -> None:
    sources = {"shop": {"type": "postgres", "url": "dbname=shop"}}

    def cdc(example: Event) -> CdcSection:
        content = {"sources": sources, **example}
        return parse(content, folder=Path("/srv"), environment={}).cdc

    wal, kafka, table = alternatives(seed("cdc"))
    assert cdc(wal) == CdcSection(
        enabled=True, storage="postgres_wal", retention_days=30, batch_size=100
    )
    assert cdc(table).storage == "event_table"
    with pytest.raises(ConfigError, match="storage kafka: it is not supported yet"):
        cdc(kafka)


@pytest.mark.requirement("C-04")
@pytest.mark.parametrize("name", ["created", "updated", "deleted"])
def test_an_altered_example_is_refused(name: str) -> None:
    event = seed(name)
    optional = {"request_id", "user_id", "user_roles", "api_version"}
    for part in (None, "source", "entity", "operation", "cascade", "metadata"):
        within = event if part is None else event[part]
        for key in within:
            if key not in optional:
                less = {k: v for k, v in within.items() if k != key}
                assert not SCHEMA.is_valid(less if part is None else event | {part: less}), key
        more = within | {"surplus": 1}
        assert not SCHEMA.is_valid(more if part is None else event | {part: more}), part
    created = seed("created")
    created["operation"]["before"] = None
    assert not SCHEMA.is_valid(created)
    assert not SCHEMA.is_valid(event | {"event_type": "entity:renamed"})
    other = "updated" if name != "updated" else "deleted"
    assert not SCHEMA.is_valid(event | {"event_type": f"entity:{other}"})


# --- made by a real server -----------------------------------------------------------------------

MODEL = """
name: acme-api
version: "2.1.0"
tenant: tenant_id
instances: {shop: prod-primary-1}
entities:
  User:
    table: public.users
    queries: {user: [UPDATE], users: []}
    fields:
      CREATE: [id, email, name, status, created_at, updated_at]
      UPDATE: [email, status, updated_at]
      DELETE: [id, email, status]
  Post: {table: public.posts, queries: [userPosts]}
"""
TABLES: LiteralString = """
CREATE TABLE organizations (id uuid PRIMARY KEY, member_count int);
CREATE TABLE users (
    id uuid PRIMARY KEY, email text, name text, status text, created_at timestamp,
    updated_at timestamp, tenant_id text, org_id uuid REFERENCES organizations
);
CREATE TABLE posts (id uuid PRIMARY KEY, user_id uuid REFERENCES users ON DELETE CASCADE);
ALTER TABLE organizations REPLICA IDENTITY FULL;
ALTER TABLE users REPLICA IDENTITY FULL;
ALTER TABLE posts REPLICA IDENTITY FULL;
INSERT INTO organizations VALUES ('880e8400-e29b-41d4-a716-446655440000', 1);
"""
# What makes each example, in this order.
STATEMENTS: dict[str, LiteralString] = {
    "created": """
        INSERT INTO users VALUES (
            '550e8400-e29b-41d4-a716-446655440000', 'alice@example.com', 'Alice Smith', 'active',
            '2026-01-11 15:35:00', '2026-01-11 15:35:00', 'tenant-123',
            '880e8400-e29b-41d4-a716-446655440000'
        )""",
    "updated": """
        UPDATE users
        SET email = 'alice.smith@example.com', updated_at = '2026-01-11 15:40:00.654321'""",
    "deleted": """
        DELETE FROM users;
        UPDATE organizations SET member_count = member_count - 1""",
}
POSTS: LiteralString = """
INSERT INTO posts VALUES
    ('990e8400-e29b-41d4-a716-446655440001', '550e8400-e29b-41d4-a716-446655440000'),
    ('990e8400-e29b-41d4-a716-446655440002', '550e8400-e29b-41d4-a716-446655440000')
"""


def the_config() -> Config:
    sources = {SOURCE: {"type": "postgres", "url": "dbname=shop"}}
    content = {"sources": sources, "model": yaml.safe_load(MODEL)}
    return parse(content, folder=Path("/srv"), environment={})


def annotation(example: Event) -> str:
    """What an application says for an event to be this one."""
    entity = example["entity"]
    return json.dumps(
        {
            "root": f"{entity['entity_type']}:{entity['entity_id']}",
            "trigger": example["operation"]["trigger"],
            "session_id": example["source"]["session_id"],
            **example["metadata"],
        }
    )


def mutate(database: PostgresDatabase, statement: LiteralString, said: str | None = None) -> None:
    """One transaction, with what its application says about it."""
    with database.connect(autocommit=False) as connection:
        if said is not None:
            connection.execute("SELECT pg_logical_emit_message(true, 'headrace', %s)", (said,))
        connection.execute(statement)


def by_transaction(changes: list[Change]) -> list[list[Change]]:
    transactions: list[list[Change]] = []
    for change in changes:
        if change.ordinal == 1:
            transactions.append([])
        transactions[-1].append(change)
    return transactions


def events(feed: Captured) -> list[Event]:
    """Every event since the first copy."""
    format = formats(the_config()).named("entity")
    assert isinstance(format, Entity)
    payloads = [
        event.payload
        for changes in by_transaction(feed.streamed())
        for event in format.render(changes)
    ]
    decoded: list[Event] = [json.loads(payload) for payload in payloads]
    for event in decoded:
        SCHEMA.validate(event)
    return decoded


def compared(event: Event) -> Event:
    """An event without what every server gives by itself, once that is as it must be."""
    event = copy.deepcopy(event)
    assert EVENT_ID.fullmatch(event.pop("event_id"))
    assert TIME.fullmatch(event.pop("timestamp"))
    assert TIME.fullmatch(event["operation"].pop("timestamp"))
    assert re.fullmatch(r"\d+", event["source"].pop("transaction_id"))
    assert event.pop("sequence_number") > 0
    return event


def in_order(event: Event) -> str:
    """An event as text, so that the order of its keys is compared, too."""
    return json.dumps(event, indent=1)


@pytest.mark.requirement(
    "S1-09", "S1-17", "S1-18", "S1-19", "S1-20", "S1-21", "S1-25", "S1-26", "S1-27", "S1-29",
    "S1-31", "S1-55", "C-07",
)  # fmt: skip
def test_real_mutations_are_the_events_of_the_document(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(TABLES)
    with captured(pg, tmp_path) as feed:
        for name, statement in STATEMENTS.items():
            if name == "deleted":
                pg.execute(POSTS)
            mutate(pg, statement, annotation(seed(name)))
        made = events(feed)
    told = [event for event in made if event["operation"]["trigger"] != "admin_action"]
    assert [in_order(compared(event)) for event in told] == [
        in_order(compared(seed(name))) for name in STATEMENTS
    ]
    assert [event["sequence_number"] for event in made] == sorted(
        {event["sequence_number"] for event in made}
    )
    assert all(event["operation"]["timestamp"] == event["timestamp"] for event in told)


@pytest.mark.requirement("S1-47", "S1-13", "C-07", "C-12")
def test_a_real_cascade_is_one_event_though_nobody_says_so(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(TABLES)
    with captured(pg, tmp_path) as feed:
        pg.execute(STATEMENTS["created"])
        pg.execute(POSTS)
        pg.execute("INSERT INTO posts SELECT gen_random_uuid(), user_id FROM posts LIMIT 1")
        number = feed.log.latest_sequence
        mutate(pg, STATEMENTS["deleted"])
        made = events(feed)
    user, organization = made[-2:]
    assert user["sequence_number"] > number
    assert (user["entity"]["entity_type"], user["event_type"]) == ("User", "entity:deleted")
    assert [entry["entity_type"] for entry in user["cascade"]["deleted"]] == ["Post"] * 3
    assert {entry["reason"] for entry in user["cascade"]["deleted"]} == {"parent_deleted"}
    assert organization["cascade"] == NO_CASCADE
    assert user["source"]["transaction_id"] == organization["source"]["transaction_id"]
    assert user["operation"]["trigger"] == "admin_action"


@pytest.mark.requirement("S1-31", "C-03")
def test_a_real_update_without_an_old_row_says_so(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, email text, bio text)")
    pg.execute("ALTER TABLE users ALTER bio SET STORAGE EXTERNAL")
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO users VALUES (1, 'a', repeat('x', 10000))")
        pg.execute("UPDATE users SET email = 'b'")
        pg.execute("DELETE FROM users")
        (created, updated, deleted) = (
            json.loads(event.payload)
            for changes in by_transaction(feed.streamed())
            for event in Entity().render(changes)
        )
    assert created["operation"]["changed_fields"] == ["id", "email", "bio"]
    assert updated["operation"]["before"] is None
    assert updated["operation"]["after"] == {"id": 1, "email": "b"}
    assert updated["operation"]["changed_fields"] == ["email"]
    assert updated["metadata"] == {"before_kind": "none", "unchanged": ["bio"]}
    assert deleted["operation"]["before"] == {"id": 1}
    assert deleted["metadata"] == {"before_kind": "key"}
    assert ids([created, updated, deleted]) == ["User:1"] * 3


@pytest.mark.requirement("S1-31", "C-03", "C-07")
def test_a_real_row_is_followed_from_key_to_key(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, email text)")
    said = json.dumps({"root": "User:1"})
    with captured(pg, tmp_path) as feed:
        mutate(pg, "INSERT INTO users VALUES (1, 'a'); UPDATE users SET email = 'b'", said)
        mutate(pg, "UPDATE users SET email = 'c'; UPDATE users SET id = 2", said)
        mutate(pg, "UPDATE users SET id = 1", said)
        mutate(pg, "UPDATE users SET email = 'd'; DELETE FROM users", said)
        made = [
            json.loads(event.payload)
            for changes in by_transaction(feed.streamed())
            for event in Entity(Model(tenant="email")).render(changes)
        ]
    assert ids(made) == ["User:1", "User:2", "User:1", "User:1"]
    assert [event["entity"]["tenant_id"] for event in made] == ["b", "c", "c", "d"]
    created, moved, back, gone = (event["operation"] for event in made)
    assert (created["type"], created["after"]) == ("CREATE", {"id": 1, "email": "b"})
    assert (moved["before"], moved["after"]) == ({"id": 1}, {"id": 2, "email": "c"})
    assert (back["before"], back["after"]) == ({"id": 2}, {"id": 1, "email": "c"})
    assert (gone["type"], gone["before"]) == ("DELETE", {"id": 1})
    assert all("annotation_error" not in event["metadata"] for event in made)


@pytest.mark.requirement("S1-49")
def test_a_real_mutation_that_failed_makes_no_event(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with captured(pg, tmp_path) as feed:
        with pg.connect(autocommit=False) as connection:
            connection.execute("INSERT INTO users VALUES (1)")
            connection.rollback()
        said = json.dumps({"root": "User:2", "error": {"failed": ["welcome mail"]}})
        mutate(pg, "INSERT INTO users VALUES (2), (3)", said)
        (event,) = (
            json.loads(event.payload)
            for changes in by_transaction(feed.streamed())
            for event in Entity().render(changes)
        )
    assert ids([event]) == ["User:2"]
    assert event["metadata"] == {"error": {"failed": ["welcome mail"]}}
    assert ids(event["cascade"]["updated"]) == ["User:3"]


def test_real_models_are_checked_against_real_tables(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute(TABLES)
    with captured(pg, tmp_path) as feed:
        the_config().model.check(feed.source.captured_tables())
