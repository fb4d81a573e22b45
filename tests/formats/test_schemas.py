"""The published JSON Schemas: every event keeps to its format's, and an altered one does not."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from headrace.change.event import BeforeKind, Change, Op, Table, Transaction
from headrace.formats import AnyFormat, StreamFormat, TransactionFormat
from headrace.formats.catalogue import Formats, names, schemas
from headrace.formats.facts import Facts, SourceServer
from tests.changes import COMMIT_TIME, make_change, make_table
from tests.effort import times
from tests.formats.generated import transactions

Event = dict[str, Any]

SEEDS = Path(__file__).parent / "seeds"
ON_REQUEST = frozenset({Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE})
FACTS = Facts("6f1c", (SourceServer("shop", "db.example.com", "shop-1", "eu-west-1"),))

DOCUMENTS: dict[str, Any] = {name: json.loads(text) for name, text in schemas().items()}
# That none is missing, a test below says.
CHECKED = [name for name in names() if f"{name}.json" in DOCUMENTS]


def spelled_out(node: Any, file: str) -> Any:
    """A schema with what it refers to in place of every reference, which is looked up slowly."""
    if isinstance(node, list):
        return [spelled_out(each, file) for each in node]
    if not isinstance(node, dict):
        return node
    rest = {key: spelled_out(value, file) for key, value in node.items() if key != "$ref"}
    if "$ref" not in node:
        return rest
    other, _, pointer = node["$ref"].partition("#")
    found = DOCUMENTS[other or file]
    for part in pointer.split("/")[1:]:
        found = found[part]
    return spelled_out(found, other or file) | rest


VALIDATORS = {
    name: Draft202012Validator(spelled_out(DOCUMENTS[f"{name}.json"], f"{name}.json"))
    for name in CHECKED
}
FORMATS = [
    *((name, Formats(FACTS).named(name, include=ON_REQUEST)) for name in CHECKED),
    ("savegress", Formats().named("savegress", markers=True)),
]


def events(format: AnyFormat, transaction: Sequence[Change]) -> list[Event]:
    """What a format makes of a transaction."""
    if isinstance(format, TransactionFormat):
        payloads = [rendered.payload for rendered in format.render(transaction)]
    elif isinstance(format, StreamFormat):
        stream = format.open()
        payloads = [
            payload for change in transaction for payload in stream.encode(change, wanted=True)
        ]
    else:
        payloads = [payload for change in transaction if (payload := format.encode(change))]
    return [json.loads(payload) for payload in payloads]


# --- the schemas themselves ----------------------------------------------------------------------


def test_every_format_has_one() -> None:
    assert {f"{name}.json" for name in names()} <= DOCUMENTS.keys()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_one_and_says_where_it_is_served(name: str) -> None:
    document = DOCUMENTS[name]
    Draft202012Validator.check_schema(document)
    assert document["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert document["$id"] == f"/schemas/{name}"
    assert document["title"]


@pytest.mark.slow
@settings(max_examples=times(180, nightly=1800))
@given(transactions())
def test_every_event_keeps_to_its_schema(transaction: list[Change]) -> None:
    for name, format in FORMATS:
        for event in events(format, transaction):
            assert not (problems := problems_of(name, event)), (name, problems, event)


def problems_of(name: str, event: Event) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATORS[name].iter_errors(event)]


def test_references_between_schemas_lead_somewhere() -> None:
    known: Registry[Any] = Registry().with_resources(
        [(each["$id"], Resource.from_contents(each)) for each in DOCUMENTS.values()]
    )
    for name, format in FORMATS:
        strict = Draft202012Validator(DOCUMENTS[f"{name}.json"], registry=known)
        for event in events(format, SAMPLES[:1]):
            assert strict.is_valid(event)


@pytest.mark.parametrize(("name", "format"), FORMATS)
def test_a_comment_is_in_no_format(name: str, format: AnyFormat) -> None:
    commented = [msgspec.structs.replace(each, table=_commented(each.table)) for each in SAMPLES]
    found = events(format, commented)
    assert found == events(format, SAMPLES), name
    assert found or name == "protobuf"


def _commented(table: Table) -> Table:
    columns = tuple(msgspec.structs.replace(each, comment="a") for each in table.columns)
    return msgspec.structs.replace(table, columns=columns, comment="b")


SEEDS_ACCEPTED = {
    "notification": ["s3_cdc_event", "s3_insert", "s3_update", "s3_delete"],
}


@pytest.mark.requirement("S3-12", "C-01")
@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name in SEEDS_ACCEPTED for seed in SEEDS_ACCEPTED[name]]
)
def test_the_documents_examples_keep_to_the_schema(name: str, seed: str) -> None:
    assert problems_of(name, json.loads((SEEDS / f"{seed}.json").read_text())) == []


def test_what_debezium_wrote_keeps_to_the_schema() -> None:
    recorded = json.loads((SEEDS / "debezium.json").read_text())
    assert [problems_of("debezium", event) for event in recorded] == [[]] * len(recorded)


# --- altered events ------------------------------------------------------------------------------

KEY, OLD, NEW = {"id": "alice"}, {"id": "alice", "name": "A"}, {"id": "alice", "name": "B"}
MESSAGE = {"prefix": "prices", "transactional": True, "content": "changed"}
SAMPLES = [
    make_change(Op.INSERT, key=KEY, after=NEW),
    make_change(Op.READ, key=KEY, after=NEW),
    make_change(Op.UPDATE, key=KEY, before=OLD, after=NEW, changed=("name",)),
    make_change(
        Op.UPDATE,
        key={"id": "bob"},
        before=KEY,
        before_kind=BeforeKind.KEY,
        after={"id": "bob"},
        unchanged=("name",),
    ),
    make_change(Op.UPDATE, key=KEY, after=NEW),
    make_change(Op.DELETE, key=KEY, before=OLD),
    make_change(Op.DELETE, key=KEY, before=KEY, before_kind=BeforeKind.KEY),
    make_change(Op.DELETE, key=KEY),
    make_change(Op.TRUNCATE, after={"cascade": False, "restart_identity": False, "relations": [0]}),
    make_change(Op.SCHEMA, after={"columns": [], "ddl_type": "ALTER_TABLE", "ddl_command": "…"}),
    make_change(Op.SCHEMA, after={"columns": []}),
    make_change(Op.MESSAGE, table=make_table("", schema="", key=()), after=MESSAGE),
    make_change(
        Op.INSERT,
        key=KEY,
        after=NEW,
        transaction=Transaction("8", COMMIT_TIME, COMMIT_TIME, b'{"user":"u1","trigger":"api"}'),
    ),
]
# Objects within an event whose keys are fixed too.
WITHIN: Mapping[str, Sequence[str]] = {
    "canonical": ("transaction", "position"),
    "changefeed": ("metadata",),
    "debezium": ("source", "message"),
    "cloudevents": ("data",),
    "savegress": ("position", "metadata"),
    "entity": ("source", "entity", "operation", "cascade", "metadata"),
}
# Keys that an event may have or not.
OPTIONAL: Mapping[str, Sequence[str]] = {
    "notification": ("unchanged", "beforeData", "beforeKind"),
    "changefeed": ("metadata.unchanged", "metadata.previous_key"),
    "etl": ("unchanged",),
    "entity": ("metadata.before_kind", "metadata.unchanged", "metadata.custom_fields"),
    # The document's examples have no more than what is not named here.
    "savegress": (
        "metadata.before_kind",
        "metadata.unchanged",
        "metadata.snapshot",
        "metadata.pipeline_id",
        "metadata.captured_at",
    ),
}


def sampled(name: str) -> list[Event]:
    return [
        event
        for each, format in FORMATS
        if each == name
        for change in SAMPLES
        for event in events(format, [change])
    ]


def objects(name: str, event: Event) -> Iterator[tuple[str, Event]]:
    """The event and the objects in it that are to be altered, each with its prefix."""
    yield "", event
    for part in WITHIN.get(name, ()):
        if isinstance(event.get(part), dict):
            yield f"{part}.", event[part]


def altered(event: Event, prefix: str, within: Event) -> Event:
    """The event with another object in its place."""
    return event | {prefix[:-1]: within} if prefix else within


@pytest.mark.requirement("C-04")
@pytest.mark.parametrize("name", CHECKED)
def test_an_event_without_one_of_its_keys_is_refused(name: str) -> None:
    accepted = {
        prefix + key
        for event in sampled(name)
        for prefix, within in objects(name, event)
        for key in within
        if not problems_of(
            name, altered(event, prefix, {k: v for k, v in within.items() if k != key})
        )
    }
    assert accepted <= set(OPTIONAL.get(name, ()))


@pytest.mark.parametrize("name", CHECKED)
def test_an_event_with_a_key_more_is_refused(name: str) -> None:
    for event in sampled(name):
        for prefix, within in objects(name, event):
            assert problems_of(name, altered(event, prefix, within | {"surplus": 1})), prefix


@pytest.mark.requirement("C-04")
@pytest.mark.parametrize("name", CHECKED)
def test_a_null_where_a_key_must_be_absent_is_refused(name: str) -> None:
    seen: dict[str, set[str]] = {}
    for event in sampled(name):
        for prefix, within in objects(name, event):
            seen.setdefault(prefix, set()).update(within)
    for event in sampled(name):
        for prefix, within in objects(name, event):
            for key in seen[prefix] - within.keys():
                assert problems_of(name, altered(event, prefix, within | {key: None})), key
