"""The event as a protobuf message: a reader with the document's own definition understands it."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.struct_pb2 import Struct
from grpc_tools import protoc
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.change import connector as connectors
from headrace.change.connector import Connector
from headrace.change.event import Change, Op, Position, Transaction
from headrace.formats.facts import Facts, SourceServer
from headrace.formats.protobuf import Protobuf
from headrace.formats.protostruct import DEEPEST, written
from headrace.formats.savegress import Savegress
from headrace.v1.changefeed_pb2 import DESCRIPTOR, CDCEvent, Operation, PollResponse
from tests.changes import make_change, make_table
from tests.effort import times
from tests.formats.generated import transactions
from tests.formats.savegress_document import SEEDS, seed

ROOT = Path(__file__).parent.parent.parent
FACTS = Facts("abc123", (SourceServer("shop", host="db1.example.com"),), version="1.0.0")
USERS = msgspec.structs.replace(make_table(version=1), origin="postgres:12345:shop")


def decoded(change: Change) -> CDCEvent:
    """The change, written and read again."""
    payload = Protobuf(FACTS).encode(change)
    assert payload is not None
    return CDCEvent.FromString(payload)


def of_after(after: bytes) -> CDCEvent:
    return decoded(msgspec.structs.replace(make_change(), after=after))


# --- the definition ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents_event(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The class that a reader gets who compiles the document's definition."""
    folder = tmp_path_factory.mktemp("proto")
    imports = "".join(
        f'import "google/protobuf/{name}.proto";\n' for name in ("struct", "timestamp")
    )
    text = (SEEDS / "s0_message.proto").read_text()
    # The document does not say what a Position is.
    (folder / "event.proto").write_text(f'syntax = "proto3";\n{imports}{text}message Position {{}}')
    google = Path(protoc.__file__).parent / "_proto"
    out = folder / "set"
    options = [f"-I{folder}", f"-I{google}", "--include_imports", f"--descriptor_set_out={out}"]
    assert protoc.main(["protoc", *options, "event.proto"]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("CDCEvent"))


def fields(message: Any) -> dict[str, tuple[Any, ...]]:
    """The fields of a message: number, kind, and which message or enum it is."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type and field.message_type.name,
            field.enum_type and field.enum_type.name,
        )
        for field in message.DESCRIPTOR.fields
    }


@pytest.mark.requirement("S0-43", "C-16")
def test_fields_one_to_eleven_are_the_documents_and_further_ones_follow(
    documents_event: Any,
) -> None:
    expected, ours = fields(documents_event), fields(CDCEvent)
    assert [field[0] for field in expected.values()] == list(range(1, 12))
    assert {name: ours.pop(name) for name in expected} == expected
    assert {name: field[0] for name, field in ours.items()} == {
        "before_json": 12,
        "after_json": 13,
        "ddl_type": 14,
        "ddl_command": 15,
        "sequence": 16,
    }


@pytest.mark.requirement("S0-44")
def test_operations_have_the_documents_names_and_numbers() -> None:
    assert Operation.items() == [
        ("OPERATION_UNSPECIFIED", 0),
        ("INSERT", 1),
        ("UPDATE", 2),
        ("DELETE", 3),
        ("DDL", 4),
        ("BEGIN", 5),
        ("COMMIT", 6),
    ]


def test_the_service_can_be_polled_and_subscribed_to() -> None:
    service = DESCRIPTOR.services_by_name["ChangeFeed"]
    assert service.full_name == "headrace.v1.ChangeFeed"
    assert {name: method.server_streaming for name, method in service.methods_by_name.items()} == {
        "Subscribe": True,
        "Poll": False,
    }
    filters = ["key_prefix", "event_type", "entity_type", "tenant_id", "trigger", "changed_fields"]
    shared = ["after", "tables", "operations", "limit", *filters]
    own = {"Subscribe": "together", "Poll": "wait_ms"}
    for method, asked in {
        method: [*shared, last, "source", "epoch", "generation"] for method, last in own.items()
    }.items():
        fields = service.methods_by_name[method].input_type.fields
        assert [(field.number, field.name) for field in fields] == list(enumerate(asked, start=1))


def test_the_code_is_what_the_compiler_writes() -> None:
    command = [sys.executable, "scripts/protos.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.requirement("S0-43", "S0-44")
def test_a_reader_with_the_documents_definition_reads_our_event(documents_event: Any) -> None:
    expected = seed("event")
    change = make_change(
        Op.UPDATE,
        table=msgspec.structs.replace(USERS, database="production"),
        before=expected["before"],
        after=expected["after"],
        transaction=Transaction("tx-12345", 1_736_937_000_123_456, 1_736_937_000_200_000),
    )
    event = documents_event.FromString(Protobuf(FACTS).encode(change))
    shown = json_format.MessageToDict(event, preserving_proto_field_name=True)
    assert shown.pop("metadata").items() >= expected.pop("metadata").items()
    assert shown.pop("id") == change.id
    del expected["id"], expected["position"], shown["position"]
    assert shown == expected


# --- the event -----------------------------------------------------------------------------------


@pytest.mark.requirement("S0-43", "C-16")
@settings(max_examples=times(60, nightly=600))
@given(transactions())
def test_the_message_says_what_the_json_says(changes: list[Change]) -> None:
    for change in changes:
        line = Savegress(FACTS).encode(change)
        if line is None:
            assert Protobuf(FACTS).encode(change) is None
            continue
        expected, event = json.loads(line), decoded(change)
        for name in ("id", "source", "schema", "table", "transaction_id"):
            assert getattr(event, name) == expected[name]
        assert Operation.Name(event.operation) == expected["operation"]
        assert event.timestamp.ToMicroseconds() == change.transaction.commit_time
        assert event.sequence == change.sequence
        place = event.position.postgres
        assert {"lsn": place.lsn, "sequence": place.sequence} == expected["position"]
        assert dict(event.metadata) == {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in expected["metadata"].items()
        }
        assert_images(event, expected, change)


def assert_images(event: CDCEvent, expected: dict[str, Any], change: Change) -> None:
    for name in ("before", "after"):
        image = expected[name]
        assert event.HasField(f"{name}_json") == event.HasField(name) == (image is not None)
        if image is not None:
            assert getattr(event, f"{name}_json") == getattr(change, name)
            assert getattr(event, name).fields.keys() == image.keys()
    for name in ("ddl_type", "ddl_command"):
        told = expected.get(name)
        assert event.HasField(name) == (told is not None)
        assert getattr(event, name) == (told or "")


@pytest.mark.requirement("C-16")
def test_metadata_that_are_no_text_become_text() -> None:
    change = make_change(Op.UPDATE, table=USERS, after={"id": 1}, unchanged=("photo", "Größe"))
    event = decoded(change)
    assert event.metadata["server_id"] == "12345"
    assert event.metadata["unchanged"] == '["photo", "Größe"]'
    assert event.metadata["before_kind"] == "none"


@pytest.mark.requirement("C-16", "C-13")
def test_a_large_integer_keeps_its_digits_in_the_json() -> None:
    after = b'{"id":9223372036854775807,"price":"12345678901234567890.10"}'
    event = of_after(after)
    assert event.after_json == after
    assert event.after["id"] == float(2**63)
    assert event.after["price"] == "12345678901234567890.10"


@pytest.mark.parametrize("digits", ["1e1000", "-1e1000", "9" * 400, "1" * 5000])
def test_a_number_that_no_double_holds_is_text_in_the_struct(digits: str) -> None:
    after = f'{{"n":{digits}}}'.encode()
    event = of_after(after)
    assert event.after["n"] == digits
    assert event.after_json == after


def test_text_that_is_no_unicode_does_not_stop_the_message() -> None:
    after = rb'{"doc":{"half \ud800":"\udfff and \ud83d\ude00"},"name":"\ud800"}'
    event = of_after(after)
    assert event.after_json == after
    assert json_format.MessageToDict(event.after) == {
        "doc": {"half ?": "? and 😀"},
        "name": "?",
    }


def test_a_row_without_columns_is_not_the_same_as_no_row() -> None:
    event = decoded(make_change(Op.UPDATE, after={}))
    assert event.HasField("after")
    assert not event.HasField("before")


@pytest.mark.parametrize("levels", [DEEPEST - 1, DEEPEST, 90, 500, 980])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")], ids=["arrays", "objects"])
def test_however_deep_a_document_is_the_message_can_be_read(
    levels: int, brackets: tuple[str, str]
) -> None:
    opening, closing = brackets
    after = f'{{"doc":{opening * levels}"x"{closing * levels}}}'.encode()
    event = of_after(after)
    assert event.after_json == after
    document = json_format.MessageToDict(event.after)
    if levels < DEEPEST:
        assert document == json.loads(after)
    # A poll wraps it once more.
    again = PollResponse.FromString(PollResponse(events=[event]).SerializeToString())
    assert again.events[0] == event


def test_a_document_that_no_parser_follows_is_only_in_the_json() -> None:
    after = b'{"doc":%b%b}' % (b"[" * 100_000, b"]" * 100_000)
    event = of_after(after)
    assert event.after_json == after
    assert not event.HasField("after")


@pytest.mark.requirement("C-16")
@pytest.mark.parametrize("connector", ["mysql", "mongodb"])
def test_positions_of_other_databases_have_their_own_messages(
    connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = seed("positions")[connector]["position"]

    class Place(Position, frozen=True):
        number: int

        @property
        def commit(self) -> int:
            return self.number

        def to_json(self) -> dict[str, Any]:
            return dict(shown)

    known = Connector(name=connector, positions=(Place,))
    monkeypatch.setitem(connectors._known, connector, known)
    table = msgspec.structs.replace(USERS, connector=connector)
    event = decoded(make_change(table=table, after={"id": 1}, position=Place(1)))
    assert event.position.WhichOneof("connector") == connector
    place = getattr(event.position, connector)
    for name, value in shown.items():
        told = getattr(place, name)
        assert (json_format.MessageToDict(told) if isinstance(value, dict) else told) == value


def test_the_message_is_the_same_each_time_and_in_another_process() -> None:
    change = make_change(Op.UPDATE, table=USERS, after={"id": 1}, unchanged=("a", "b"))
    format = Protobuf(FACTS)
    there = pickle.loads(pickle.dumps(format))
    assert (there, hash(there)) == (format, hash(format))
    assert {format.encode(change), format.encode(change), there.encode(change)} == {
        format.encode(change)
    }
    assert format.media_type == "application/x-protobuf"


# --- rows as Structs -----------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
ROWS = st.dictionaries(
    st.text(),
    st.recursive(
        SCALARS | st.integers(-(2**63), 2**64),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=30,
    ),
)


@settings(max_examples=times(90, nightly=900))
@given(ROWS)
def test_a_row_is_the_struct_that_the_library_makes_of_it(row: dict[str, Any]) -> None:
    expected = Struct()
    expected.update(row)
    found = written(json.dumps(row).encode())
    assert found is not None
    assert Struct.FromString(found) == expected


@pytest.mark.parametrize("length", [0, 1, 117, 120, 127, 128, 16_383, 16_384, 3_000_000])
def test_lengths_are_told_however_many_bytes_they_take(length: int) -> None:
    row = {"x" * min(length, 300): "y" * length, "list": ["z" * length, {"deep": "z" * length}]}
    found = written(json.dumps(row).encode())
    assert found is not None
    assert json_format.MessageToDict(Struct.FromString(found)) == row
