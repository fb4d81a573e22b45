"""The Savegress event, from changes built by hand and by hypothesis."""

import json
import pickle
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from headrace.change import connector as connectors
from headrace.change.connector import Connector
from headrace.change.event import BeforeKind, Change, Op, Position, Transaction
from headrace.change.lsn import format_lsn
from headrace.formats.facts import Facts, SourceServer
from headrace.formats.savegress import (
    Savegress,
    SavegressTransactions,
    batch,
    own_metadata,
    position,
    server_id,
    table_metadata,
)
from headrace.sources.postgres.position import PostgresPosition
from tests.changes import COMMIT_TIME, make_change, make_table
from tests.effort import times
from tests.formats.generated import transactions
from tests.formats.savegress_document import BATCH, EVENT, KEYS, completed, seed

FACTS = Facts("abc123", (SourceServer("shop", host="db1.example.com"),), version="1.0.0")
USERS = msgspec.structs.replace(make_table(version=1), origin="postgres:7412345678901234567:shop")
ANN = {"id": "1", "name": "Ann"}
BOB = {"id": "1", "name": "Bob"}


def encode(change: Change, facts: Facts = FACTS) -> dict[str, Any]:
    line = Savegress(facts).encode(change)
    assert line is not None
    event: dict[str, Any] = json.loads(line)
    EVENT.validate(event)
    return event


def marked(changes: list[Change], *, wanted: bool = True) -> list[dict[str, Any]]:
    stream = SavegressTransactions(FACTS).open()
    return [json.loads(line) for change in changes for line in stream.encode(change, wanted=wanted)]


# --- the event -----------------------------------------------------------------------------------


@pytest.mark.requirement("S0-01", "S0-02", "S0-03", "S0-04", "S0-05", "S0-06", "S0-07", "S0-08")
def test_a_row_event_has_the_eleven_keys_of_the_document_in_its_order() -> None:
    change = make_change(Op.UPDATE, table=USERS, before=ANN, after=BOB, sequence=42)
    event = encode(change)
    assert list(event) == list(seed("event")) == KEYS
    assert event == {
        "id": change.id,
        "source": "postgres",
        "schema": "public",
        "table": "users",
        "operation": "UPDATE",
        "timestamp": "2024-10-30T01:00:00.000123Z",
        "transaction_id": "7",
        "position": {"lsn": "0/16B3748", "sequence": 42},
        "before": ANN,
        "after": BOB,
        "metadata": {
            "connector_version": "1.0.0",
            "database": "shop",
            "server": "db1.example.com",
            "server_id": 7412345678901234567,
            "pipeline_id": "pipe-abc123",
            "captured_at": "2024-10-30T01:00:00.000623Z",
        },
    }


@pytest.mark.requirement("S0-09", "S0-11", "C-04")
def test_the_image_that_does_not_exist_is_null_and_never_left_out() -> None:
    inserted = encode(make_change(Op.INSERT, table=USERS, after=BOB))
    assert (inserted["before"], inserted["after"]) == (None, BOB)
    deleted = encode(make_change(Op.DELETE, table=USERS, before=ANN))
    assert (deleted["before"], deleted["after"]) == (ANN, None)
    assert list(inserted) == list(deleted) == KEYS


@pytest.mark.requirement("C-02")
def test_a_row_that_a_copy_read_is_an_insert_that_says_so() -> None:
    event = encode(make_change(Op.READ, table=USERS, after=BOB))
    assert (event["operation"], event["metadata"]["snapshot"]) == ("INSERT", "true")
    assert "snapshot" not in encode(make_change(Op.INSERT, table=USERS, after=BOB))["metadata"]


@pytest.mark.requirement("C-02")
def test_a_message_is_not_carried() -> None:
    assert Savegress(FACTS).encode(make_change(Op.MESSAGE, after={"content": "x"})) is None


@pytest.mark.requirement("C-03")
@pytest.mark.parametrize("op", [Op.UPDATE, Op.DELETE])
def test_an_old_row_of_which_only_the_key_is_known_says_so(op: Op) -> None:
    change = make_change(
        op, before={"id": "1"}, before_kind=BeforeKind.KEY, after=BOB if op is Op.UPDATE else None
    )
    event = encode(change)
    assert event["before"] == {"id": "1"}
    assert event["metadata"]["before_kind"] == "key"


@pytest.mark.requirement("C-03")
@pytest.mark.parametrize("op", [Op.UPDATE, Op.DELETE])
def test_an_old_row_that_was_not_sent_is_null_and_the_metadata_say_why(op: Op) -> None:
    event = encode(make_change(op, after=BOB if op is Op.UPDATE else None))
    assert event["before"] is None
    assert event["metadata"]["before_kind"] == "none"


@pytest.mark.requirement("C-03")
def test_a_column_that_was_not_sent_is_named_and_not_null() -> None:
    event = encode(make_change(Op.UPDATE, after={"id": "1"}, unchanged=("photo", 'a "b"')))
    assert event["after"] == {"id": "1"}
    assert event["metadata"]["unchanged"] == ["photo", 'a "b"']


def test_images_are_passed_on_byte_for_byte() -> None:
    after = b'{"n":1.10000000000000000001,"big":12345678901234567890123,"per cent":"%b %d"}'
    line = Savegress(FACTS).encode(msgspec.structs.replace(make_change(), after=after))
    assert line is not None
    assert after in line


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_an_event_is_one_line_even_when_its_json_column_was_not(end: bytes) -> None:
    after = end.join([b'{"doc":{', b'  "a": "x\\ny",', b'  "b": 1', b"}}"])
    line = Savegress(FACTS).encode(msgspec.structs.replace(make_change(), after=after))
    assert line is not None
    assert line.splitlines() == [line]
    assert json.loads(line)["after"] == {"doc": {"a": "x\ny", "b": 1}}


@pytest.mark.requirement("S0-07")
def test_a_transaction_id_may_be_any_text() -> None:
    name = 'snapshot-0/1-public."odd\n'
    change = make_change(after=BOB, transaction=Transaction(name, COMMIT_TIME, COMMIT_TIME))
    assert encode(change)["transaction_id"] == name


@pytest.mark.requirement("S0-06", "C-11")
def test_times_keep_their_microseconds_when_these_are_zero() -> None:
    whole = Transaction("7", 1_736_937_000_000_000, 1_736_937_000_000_001)
    event = encode(make_change(after=BOB, transaction=whole))
    assert event["timestamp"] == "2025-01-15T10:30:00.000000Z"
    assert event["metadata"]["captured_at"] == "2025-01-15T10:30:00.000001Z"


# --- changes of tables ---------------------------------------------------------------------------


@pytest.mark.requirement("S0-12")
def test_a_change_of_a_table_tells_the_statement() -> None:
    example = seed("ddl")
    told = {name: example[name] for name in ("ddl_type", "ddl_command")}
    event = encode(make_change(Op.SCHEMA, table=USERS, after={"columns": []} | told))
    assert event.items() >= example.items()
    assert list(event) == [*KEYS[:8], "ddl_type", "ddl_command", *KEYS[8:]]


@pytest.mark.requirement("S0-12", "C-02")
@pytest.mark.parametrize(
    ("op", "kind"), [(Op.SCHEMA, "SCHEMA"), (Op.TRUNCATE, "TRUNCATE")], ids=["schema", "truncate"]
)
def test_a_statement_that_nobody_told_is_not_made_up(op: Op, kind: str) -> None:
    event = encode(make_change(op, after={"columns": []}))
    assert (event["operation"], event["ddl_type"], event["ddl_command"]) == ("DDL", kind, None)
    assert (event["before"], event["after"]) == (None, None)


# --- metadata and positions ----------------------------------------------------------------------


@pytest.mark.requirement("S0-35")
def test_metadata_come_in_the_order_of_the_document() -> None:
    event = encode(make_change(table=USERS, after=BOB))
    assert list(event["metadata"]) == list(seed("metadata")["metadata"])


@pytest.mark.requirement("S0-35")
def test_what_is_not_known_of_a_server_is_left_out() -> None:
    event = encode(make_change(after=BOB), Facts(version="1.0.0"))
    assert event["metadata"] == {
        "connector_version": "1.0.0",
        "database": "shop",
        "server": "shop",
        "captured_at": "2024-10-30T01:00:00.000623Z",
    }


def test_only_a_number_is_a_servers_id() -> None:
    assert server_id(USERS) == 7412345678901234567
    assert server_id(make_table()) is None
    assert server_id(msgspec.structs.replace(USERS, origin="mysql:12345:shop")) is None


def test_a_pipeline_is_named_once_as_one() -> None:
    event = encode(make_change(after=BOB), Facts(pipeline="abc123"))
    assert event["metadata"]["pipeline_id"] == "pipe-abc123"


@pytest.mark.requirement("S0-31")
def test_a_position_is_the_records_lsn_and_the_logs_sequence() -> None:
    lsn = 0x7_0000_000A
    change = make_change(after=BOB, position=PostgresPosition(lsn + 99, lsn), sequence=1 << 40)
    assert encode(change)["position"] == {"lsn": format_lsn(lsn), "sequence": 1 << 40}


class OtherPosition(Position, frozen=True):
    """A position of a source that does not exist yet."""

    number: int
    shown: dict[str, Any]

    @property
    def commit(self) -> int:
        return self.number

    def to_json(self) -> dict[str, Any]:
        return self.shown


@pytest.mark.parametrize("connector", ["mysql", "mongodb"])
def test_the_positions_of_other_databases_describe_themselves(
    connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = seed("positions")[connector]["position"]
    known = Connector(name=connector, positions=(OtherPosition,))
    monkeypatch.setitem(connectors._known, connector, known)
    table = msgspec.structs.replace(USERS, connector=connector)
    event = encode(make_change(table=table, after=BOB, position=OtherPosition(1, shown)))
    assert (event["source"], event["position"]) == (connector, shown)


# --- transactions --------------------------------------------------------------------------------


@pytest.mark.requirement("S0-13")
def test_a_transaction_stands_between_its_markers() -> None:
    example = seed("transaction")
    begun = Transaction("tx-100", COMMIT_TIME, COMMIT_TIME)
    changes = [
        make_change(table=make_table("orders"), after=BOB, transaction=begun, last=False),
        make_change(
            Op.UPDATE, table=make_table("inventory"), before=ANN, after=BOB, transaction=begun,
            ordinal=2,
        ),
    ]  # fmt: skip
    events = marked(changes)
    time = {"timestamp": "2024-10-30T01:00:00.000123Z"}
    assert events[0] == example[0] | time
    assert events[3] == example[3] | time
    for event, expected in zip(events[1:3], example[1:3], strict=True):
        assert event.items() >= expected.items()
    for event in events:
        EVENT.validate(event)


@pytest.mark.requirement("S0-13")
@settings(max_examples=times(15, nightly=150))
@given(transactions())
def test_without_markers_the_same_events_come_alone(changes: list[Change]) -> None:
    plain = [Savegress(FACTS).encode(change) for change in changes]
    events = marked(changes)
    assert events[1:-1] == [json.loads(line) for line in plain if line is not None]
    assert [event["operation"] for event in (events[0], events[-1])] == ["BEGIN", "COMMIT"]


@settings(max_examples=times(8, nightly=75))
@given(transactions())
def test_markers_come_whether_or_not_the_changes_are_wanted(changes: list[Change]) -> None:
    events = marked(changes, wanted=False)
    assert [event["operation"] for event in events] == ["BEGIN", "COMMIT"]


# --- batches -------------------------------------------------------------------------------------


def lines(*changes: Change) -> list[bytes]:
    return [line for change in changes if (line := Savegress(FACTS).encode(change)) is not None]


@pytest.mark.requirement("S0-36")
def test_a_batch_holds_its_events_in_order() -> None:
    events = lines(*(make_change(after=BOB, ordinal=n, sequence=n) for n in (1, 2, 3)))
    together = json.loads(batch(events))
    BATCH.validate(together)
    assert list(together) == list(seed("batch"))
    assert together["batch_size"] == 3
    assert together["events"] == [json.loads(event) for event in events]
    assert together["batch_timestamp"] == together["events"][-1]["timestamp"]
    given = json.loads(batch(events, 1_736_937_000_000_000))
    assert given["batch_timestamp"] == "2025-01-15T10:30:00.000000Z"


@pytest.mark.requirement("S0-36")
def test_a_batch_is_named_after_its_events_alone() -> None:
    first, second = (make_change(after=BOB, ordinal=n) for n in (1, 2))
    later = [Savegress(Facts(version="9.9")).encode(change) or b"" for change in (first, second)]
    names = [
        json.loads(batch(events))["batch_id"]
        for events in (
            lines(first, second),
            later,
            lines(second, first),
            lines(first),
            lines(second),
        )
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"batch-[0-9a-f]{32}", name) for name in names)


@settings(max_examples=times(15, nightly=150))
@given(transactions())
def test_any_events_make_a_batch(changes: list[Change]) -> None:
    stream = SavegressTransactions(FACTS).open()
    events = [line for change in changes for line in stream.encode(change, wanted=True)]
    together = json.loads(batch(events))
    BATCH.validate(together)
    assert together["batch_size"] == len(together["events"]) == len(events)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one event"):
        batch([])


# --- the schema ----------------------------------------------------------------------------------


@pytest.mark.requirement("S0-01", "C-04")
@pytest.mark.slow
@settings(max_examples=times(210, nightly=2100))  # of some three changes each
@given(transactions())
def test_every_event_is_what_the_schema_says(changes: list[Change]) -> None:
    stream = SavegressTransactions(FACTS).open()
    for change in changes:
        for line in stream.encode(change, wanted=True):
            assert line.splitlines() == [line]
            event = json.loads(line)
            EVENT.validate(event)
            if event["operation"] not in ("BEGIN", "COMMIT"):
                assert event["id"] == change.id
                assert event["position"] == position(change)
                told = table_metadata(change.table, FACTS) | own_metadata(change)
                assert event["metadata"] == json.loads(msgspec.json.encode(told))


@pytest.mark.parametrize("name", ["event", "insert", "update", "delete", "ddl", "webhook"])
def test_the_documents_events_are_accepted(name: str) -> None:
    EVENT.validate(completed(seed(name)))


@pytest.mark.parametrize("connector", ["postgres", "mysql", "mongodb"])
def test_the_documents_positions_are_accepted(connector: str) -> None:
    event = completed(seed("positions")[connector])
    EVENT.validate(event)
    for name in event["position"]:
        lacking = {key: value for key, value in event["position"].items() if key != name}
        assert not EVENT.is_valid(event | {"position": lacking})
        assert not EVENT.is_valid(event | {"position": event["position"] | {name: None}})


def test_the_documents_metadata_are_accepted() -> None:
    EVENT.validate(completed(seed("metadata")))


def test_the_documents_transaction_is_accepted() -> None:
    begin, *rows, commit = seed("transaction")
    time = {"timestamp": "2025-01-15T10:30:00Z"}
    for event in (begin | time, *map(completed, rows), commit | time):
        EVENT.validate(event)


def test_the_documents_batch_is_accepted() -> None:
    example = seed("batch")
    BATCH.validate(example | {"events": [completed(event) for event in example["events"]]})
    assert not BATCH.is_valid(example), "its events are fragments"


@pytest.mark.parametrize("database", ["postgres", "mysql"])
def test_the_documents_values_are_accepted(database: str) -> None:
    EVENT.validate(completed({"operation": "INSERT", "after": seed(f"types_{database}")}))


SAMPLES = {
    "insert": make_change(table=USERS, after=BOB),
    "read": make_change(Op.READ, table=USERS, after=BOB),
    "update": make_change(Op.UPDATE, table=USERS, before=ANN, after=BOB),
    "delete": make_change(Op.DELETE, table=USERS, before=ANN),
    "schema": make_change(Op.SCHEMA, table=USERS, after={"ddl_type": "ALTER_TABLE"}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_schema_refuses_a_missing_key_and_one_too_many(name: str) -> None:
    event = encode(SAMPLES[name])
    for key in event:
        assert not EVENT.is_valid({k: v for k, v in event.items() if k != key}), key
    assert not EVENT.is_valid(event | {"key": {"id": 1}})
    assert not EVENT.is_valid(event | {"metadata": event["metadata"] | {"user": "ann"}})
    assert not EVENT.is_valid(event | {"position": event["position"] | {"commit_lsn": "0/1"}})


@pytest.mark.parametrize("name", SAMPLES)
def test_the_schema_refuses_a_null_where_a_key_must_be_absent_or_have_a_value(name: str) -> None:
    event = encode(SAMPLES[name])
    for key, value in event.items():
        if value is not None:
            assert not EVENT.is_valid(event | {key: None}), key
    for key in ("snapshot", "before_kind", "unchanged", "server_id", "pipeline_id"):
        assert not EVENT.is_valid(event | {"metadata": event["metadata"] | {key: None}}), key


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("insert", {"before": ANN}),
        ("delete", {"after": BOB}),
        ("schema", {"after": BOB}),
        ("insert", {"operation": "CREATE"}),
        ("insert", {"operation": "BEGIN"}),
        ("insert", {"ddl_type": "ALTER_TABLE", "ddl_command": None}),
        ("insert", {"timestamp": "2025-01-15 10:30:00"}),
        ("insert", {"timestamp": "2025-01-15T10:30:00+00:00"}),
        ("insert", {"transaction_id": 7}),
        ("insert", {"after": "{}"}),
    ],
)
def test_the_schema_refuses_what_contradicts_itself(name: str, wrong: dict[str, Any]) -> None:
    assert not EVENT.is_valid(encode(SAMPLES[name]) | wrong)


def test_the_schema_refuses_markers_with_more_or_less() -> None:
    begin = marked([make_change(after=BOB)])[0]
    EVENT.validate(begin)
    assert not EVENT.is_valid(begin | {"id": "evt-1"})
    for key in begin:
        assert not EVENT.is_valid({k: v for k, v in begin.items() if k != key}), key


# --- as a value ----------------------------------------------------------------------------------


def test_equal_formats_write_the_same_here_and_in_another_process() -> None:
    change = make_change(table=USERS, after=BOB)
    format = Savegress(FACTS)
    line = format.encode(change)
    there = pickle.loads(pickle.dumps(format))
    assert (there, hash(there)) == (format, hash(format))
    assert there.encode(change) == line
    assert Savegress(Facts()) != format
    marking = SavegressTransactions(FACTS)
    assert pickle.loads(pickle.dumps(marking)) == marking


def test_two_versions_of_a_table_are_told_apart() -> None:
    format = Savegress(FACTS)
    renamed = msgspec.structs.replace(USERS, name="people", version=2)
    names = [
        json.loads(format.encode(make_change(table=table, after=BOB)) or b"")["table"]
        for table in (USERS, renamed, USERS)
    ]
    assert names == ["users", "people", "users"]
