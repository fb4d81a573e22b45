"""The ETL format: eight kinds of events, from changes built by hand and by hypothesis."""

import json
import pickle
from collections.abc import Callable, Iterable
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.event import BeforeKind, Change, Column, Op, Table, Transaction
from headrace.change.lsn import parse_lsn
from headrace.formats.etl import (
    Begin,
    Commit,
    Delete,
    Etl,
    Event,
    Insert,
    Lsn,
    OldRow,
    Relation,
    TableColumn,
    TableSchema,
    Truncate,
    Unsupported,
    Update,
    decode,
    events,
)
from headrace.sources.postgres.position import PostgresPosition
from tests.changes import COMMIT_TIME, make_change
from tests.formats.generated import transactions

SEEDS = Path(__file__).parent / "seeds"
SCHEMA = json.loads(files("headrace.formats").joinpath("schemas/etl.json").read_bytes())
KINDS = (Insert, Update, Delete, Relation, Truncate, Begin, Commit, Unsupported)

USERS = Table(
    "shop",
    "postgres",
    "origin-1",
    "shop",
    "public",
    "users",
    (
        Column("id", "bigint", key=True, type_id=20),
        Column("name", "character varying(9)", modifier=13),
    ),
    relation=16384,
    version=1,
)
ORDERS = msgspec.structs.replace(USERS, name="orders", relation=16390, version=2)

validate: Callable[[Any], None] = jsonschema.Draft202012Validator(SCHEMA).validate


def seed(name: str) -> Any:
    return json.loads((SEEDS / name).read_bytes())


def lines(
    changes: Iterable[Change], wanted: Callable[[Change], bool] = lambda change: True
) -> list[bytes]:
    """What a stream says of changes."""
    stream = Etl().open()
    return [line for each in changes for line in stream.encode(each, wanted=wanted(each))]


def told(*changes: Change) -> list[dict[str, Any]]:
    """The same as JSON, each event by the schema."""
    found = [json.loads(line) for line in lines(changes)]
    for event in found:
        validate(event)
    return found


def middle(op: Op, table: Table = USERS, **fields: Any) -> Change:
    """A change that neither begins nor ends its transaction."""
    return make_change(op, table=table, **{"ordinal": 2, "last": False} | fields)


def only(kind: type[Event], *changes: Change) -> Any:
    """The one event of a kind among those of changes."""
    [event] = [event for event in events(changes) if isinstance(event, kind)]
    return event


def truncated(*tables: Table, first: int = 10, **said: Any) -> list[Change]:
    """A TRUNCATE as the source tells it: a change for each table."""
    after = {"cascade": False, "restart_identity": False} | said
    after["relations"] = [table.relation for table in tables]
    return [
        middle(Op.TRUNCATE, table, after=after, ordinal=number + 2, sequence=first + number)
        for number, table in enumerate(tables)
    ]


# --- kinds ---------------------------------------------------------------------------------------


def one_of_each() -> list[Change]:
    """A transaction that makes an event of every kind."""
    row, now = {"id": 1, "name": "ann"}, {"id": 1, "name": "anna"}
    steps: list[dict[str, Any]] = [
        {"op": Op.INSERT, "after": row},
        {"op": Op.UPDATE, "after": now, "before": row},
        {"op": Op.DELETE, "before": now},
        {"op": Op.TRUNCATE, "after": {"cascade": True, "relations": [16384]}},
        {"op": Op.MESSAGE, "after": {"prefix": "p"}},
    ]
    return [
        make_change(table=USERS, ordinal=at, sequence=at, last=at == len(steps), **step)
        for at, step in enumerate(steps, 1)
    ]


@pytest.mark.requirement(
    "S2-01", "S2-03", "S2-04", "S2-08", "S2-09", "S2-10", "S2-11", "S2-12"
)  # fmt: skip
def test_the_eight_kinds_have_the_fields_of_the_document_and_their_ordinal() -> None:
    found = {event["type"]: event for event in told(*one_of_each())}
    assert {kind: set(event) for kind, event in found.items()} == {
        kind: {"type", "tx_ordinal", *fields} for kind, fields in seed("s2_events.json").items()
    }


@pytest.mark.requirement("S2-01")
def test_rows_name_their_table_and_markers_name_none() -> None:
    found = {event["type"]: event for event in told(*one_of_each())}
    assert {kind for kind, event in found.items() if event.get("table_id") == 16384} == {
        "Insert", "Update", "Delete"
    }  # fmt: skip
    assert found["Relation"]["table_schema"]["id"] == 16384
    assert found["Truncate"]["rel_ids"] == [16384]
    assert not any(
        "16384" in json.dumps(found[kind]) for kind in ("Begin", "Commit", "Unsupported")
    )


@pytest.mark.requirement("S2-01", "S2-02")
def test_python_gets_the_eight_kinds_as_values_that_can_be_matched() -> None:
    found = list(events(one_of_each()))
    assert {type(event) for event in found} == set(KINDS)
    match found:
        case [
            Begin(xid=7),
            Relation(table_schema=TableSchema(id=16384, name="users")),
            Insert(table_id=16384, table_row={"name": "ann"}),
            Update(old_table_row=OldRow(key_only=False)),
            Delete(old_table_row=OldRow(row={"name": "anna"})),
            Truncate(rel_ids=(16384,), cascade=True, restart_identity=False),
            Unsupported(),
            Commit(flags=0),
        ]:
            pass
        case _:
            pytest.fail(str(found))


@pytest.mark.requirement("S2-03")
def test_an_insert_carries_the_new_row() -> None:
    row = {"id": 1, "name": None}
    event = only(Insert, middle(Op.INSERT, after=row, sequence=5))
    assert (event.start_lsn, event.commit_lsn) == (0x16B3748, 0x16B3800)
    assert (event.table_id, event.table_row, event.sequence) == (16384, row, 5)


@pytest.mark.requirement("S2-13")
def test_a_row_read_by_a_copy_is_an_insert_of_a_transaction_without_an_id() -> None:
    snapshot = Transaction("snapshot-0/16B3748-public.users-(0,0)", COMMIT_TIME, COMMIT_TIME)
    begin, _, row, _ = events(
        [make_change(Op.READ, table=USERS, after={"id": 1}, transaction=snapshot)]
    )
    assert isinstance(begin, Begin)
    assert begin.xid == 0
    assert isinstance(row, Insert)
    assert row.table_row == {"id": 1}


@pytest.mark.requirement("S2-04", "S2-05")
@pytest.mark.parametrize("identity", ["default", "index"])
def test_an_update_that_kept_its_key_has_the_key_as_its_old_row(identity: str) -> None:
    table = msgspec.structs.replace(USERS, identity=identity)
    change = middle(Op.UPDATE, table, key={"id": 1}, after={"id": 1, "name": "anna"})
    assert only(Update, change).old_table_row == OldRow(True, {"id": 1})


@pytest.mark.requirement("S2-04", "S2-05")
def test_an_update_that_changed_its_key_has_the_old_key() -> None:
    change = middle(
        Op.UPDATE, key={"id": 2}, after={"id": 2}, before={"id": 1}, before_kind=BeforeKind.KEY
    )
    assert only(Update, change).old_table_row == OldRow(True, {"id": 1})


@pytest.mark.requirement("S2-07")
def test_without_an_identity_nothing_is_known_of_the_old_row() -> None:
    table = msgspec.structs.replace(USERS, identity="nothing")
    update = middle(Op.UPDATE, table, key={"id": 1}, after={"id": 1})
    assert only(Update, update).old_table_row is None
    assert only(Delete, middle(Op.DELETE, table)).old_table_row is None


def test_a_key_that_was_not_sent_is_not_invented() -> None:
    change = middle(Op.UPDATE, after={"name": "ann"}, unchanged=("id",))
    assert only(Update, change).old_table_row is None


def test_columns_that_were_not_sent_are_absent_and_listed() -> None:
    change = middle(Op.UPDATE, key={"id": 1}, after={"id": 1}, unchanged=("name", "big\nname"))
    event = only(Update, change)
    assert event.table_row == {"id": 1}
    assert event.unchanged == ("name", "big\nname")
    sent = middle(Op.UPDATE, key={"id": 1}, after={"id": 1, "name": None})
    assert all("unchanged" not in event for event in told(sent))


@pytest.mark.requirement("S2-12")
def test_a_relation_describes_every_column() -> None:
    event = only(Relation, middle(Op.INSERT, after={"id": 1}))
    assert event.table_schema == TableSchema(
        16384,
        "shop",
        "public",
        "users",
        (
            TableColumn("id", "bigint", 20, -1, True),
            TableColumn("name", "character varying(9)", 0, 13, False),
        ),
    )


@pytest.mark.parametrize(
    "said", [{"prefix": "p", "content": "x"}, {"error": "e", "pgoutput": "SQ=="}]
)
def test_what_no_other_kind_can_say_is_unsupported(said: dict[str, str]) -> None:
    assert [type(event) for event in events([middle(Op.MESSAGE, after=said)])] == [Unsupported]


def test_a_dropped_table_has_no_rows_from_here_on() -> None:
    gone = middle(Op.SCHEMA, after={"ddl_type": "DROP_TABLE", "dropped": True})
    relation, event = events([gone])
    assert isinstance(relation, Relation)
    assert isinstance(event, Truncate)
    assert list(event.rel_ids) == [gone.table.relation]


# --- tables and their versions -------------------------------------------------------------------


@pytest.mark.requirement("S2-12")
def test_a_relation_comes_before_the_first_row_of_every_version_and_no_more() -> None:
    wider = msgspec.structs.replace(USERS, version=3)
    tables = [USERS, ORDERS, USERS, wider, ORDERS, wider, USERS]
    changes = [middle(Op.INSERT, table, after={"id": 1}) for table in tables]
    found = [
        event.table_schema.name if isinstance(event, Relation) else type(event).__name__
        for event in events(changes)
    ]
    assert found == [
        "users", "Insert", "orders", "Insert", "Insert", "users", "Insert", "Insert", "Insert",
        "users", "Insert",
    ]  # fmt: skip


@pytest.mark.requirement("S2-12")
@pytest.mark.parametrize(
    "change",
    [
        middle(Op.READ, after={"id": 1}),
        middle(Op.UPDATE, after={"id": 1}),
        middle(Op.DELETE, before={"id": 1}),
        *truncated(USERS),
    ],
)
def test_a_relation_comes_before_a_first_event_of_any_kind(change: Change) -> None:
    relation, event = events([change])
    assert isinstance(relation, Relation)
    assert not isinstance(event, Relation)


@pytest.mark.requirement("S2-12")
def test_a_schema_change_is_a_relation_and_rows_after_it_need_no_other() -> None:
    schema = middle(Op.SCHEMA, after={"columns": []})
    row = middle(Op.INSERT, after={"id": 1})
    assert [type(event) for event in events([schema, row])] == [Relation, Insert]


def test_two_sources_may_use_one_number_for_two_tables() -> None:
    other = msgspec.structs.replace(USERS, source="copy", name="people")
    rows = [middle(Op.INSERT, table, after={"id": 1}) for table in (USERS, other, USERS)]
    assert [type(event) for event in events(rows)] == [Relation, Insert, Relation, Insert, Insert]


def test_a_table_that_nobody_wants_is_not_described() -> None:
    rows = [middle(Op.INSERT, table, after={"id": 1}) for table in (USERS, ORDERS)]
    found = list(events(rows, wanted=lambda change: change.table.name == "orders"))
    assert [type(event) for event in found] == [Relation, Insert]
    assert isinstance(found[0], Relation)
    assert found[0].table_schema.name == "orders"


# --- truncates -----------------------------------------------------------------------------------


@pytest.mark.requirement("S2-09")
@pytest.mark.parametrize(
    ("said", "options"),
    [
        ({}, 0),
        ({"cascade": True}, 1),
        ({"restart_identity": True}, 2),
        ({"cascade": True, "restart_identity": True}, 3),
    ],
)
def test_a_truncate_of_several_tables_is_one_event_with_its_options(
    said: dict[str, bool], options: int
) -> None:
    found = list(events(truncated(USERS, ORDERS, **said)))
    assert [type(event) for event in found] == [Relation, Relation, Truncate]
    event = only(Truncate, *truncated(USERS, ORDERS, **said))
    assert (event.options, event.rel_ids, event.sequence) == (options, (16384, 16390), 11)
    assert (event.cascade, event.restart_identity) == (options in (1, 3), options in (2, 3))


@pytest.mark.parametrize("said", [{"snapshot": True}, {"cascade": False}])
def test_a_truncate_that_does_not_say_what_else_was_emptied_is_its_tables_own(
    said: dict[str, bool],
) -> None:
    both = [middle(Op.TRUNCATE, table, after=said) for table in (USERS, ORDERS)]
    found = [event.rel_ids for event in events(both) if isinstance(event, Truncate)]
    assert found == [(16384,), (16390,)]


@pytest.mark.parametrize(("name", "rel_ids"), [("users", (16384,)), ("orders", (16390,))])
def test_a_truncate_tells_only_of_wanted_tables(name: str, rel_ids: tuple[int, ...]) -> None:
    changes = truncated(USERS, ORDERS)
    found = list(events(changes, wanted=lambda change: change.table.name == name))
    assert [type(event) for event in found] == [Relation, Truncate]
    assert isinstance(found[1], Truncate)
    assert found[1].rel_ids == rel_ids
    assert list(events(changes, wanted=lambda change: False)) == []


def resumed(
    changes: list[Change], at: int, *, wanted: Callable[[Change], bool] | None = None
) -> list[Event]:
    """What a stream tells that begins with the change at an index."""
    first = changes[at].sequence
    earlier = [c for c in changes if Etl().begin(changes[at]) <= c.sequence < first]
    return list(events(changes[at:], wanted=wanted, earlier=earlier))


@pytest.mark.parametrize(
    ("names", "rel_ids"),
    [
        ({"users", "orders"}, [(16384, 16390), (16390, 16384)]),
        ({"users"}, [(16384,), (16384,)]),
        ({"orders"}, [(16390,), (16390,)]),
        ({"carts"}, []),
    ],
)
def test_a_stream_that_begins_within_a_truncate_tells_what_the_others_tell(
    names: set[str], rel_ids: list[tuple[int, ...]]
) -> None:
    changes = [*truncated(USERS, ORDERS), *truncated(ORDERS, USERS, first=12)]

    def wanted(change: Change) -> bool:
        return change.table.name in names

    for at in (0, 1):
        found = resumed(changes, at, wanted=wanted)
        emptied = [event for event in found if isinstance(event, Truncate)]
        assert [event.rel_ids for event in emptied] == rel_ids
        described = {event.table_schema.name for event in found if isinstance(event, Relation)}
        assert described == names & {"users", "orders"}
    last = [event for event in resumed(changes, 3, wanted=wanted) if isinstance(event, Truncate)]
    assert [event.rel_ids for event in last] == rel_ids[1:]


def test_a_statement_whose_end_was_lost_adds_nothing_to_the_next_one() -> None:
    changes = [*truncated(USERS, ORDERS)[:1], *truncated(ORDERS, USERS, first=20)[1:]]
    assert only(Truncate, *changes).rel_ids == (16384,)
    assert only(Truncate, *changes).sequence == 21


# --- transactions --------------------------------------------------------------------------------


@pytest.mark.requirement("S2-10", "S2-11")
def test_markers_say_where_and_when_a_transaction_is_committed() -> None:
    transaction = Transaction(str((5 << 32) + 4_000_000_000), COMMIT_TIME, COMMIT_TIME + 9)
    first = make_change(table=USERS, transaction=transaction, last=False, after={"id": 1})
    end = PostgresPosition(0x16B3800, 0x16B3760, 0x16B3830)
    last = middle(Op.INSERT, transaction=transaction, position=end, last=True, after={"id": 2})
    begin, commit = only(Begin, first, last), only(Commit, first, last)
    assert (str(begin.start_lsn), str(begin.commit_lsn)) == ("0/16B3748", "0/16B3800")
    assert (begin.timestamp, begin.xid) == (COMMIT_TIME, 4_000_000_000)
    assert (str(commit.start_lsn), str(commit.commit_lsn)) == ("0/16B3800", "0/16B3800")
    assert (commit.flags, commit.end_lsn, commit.timestamp) == (0, 0x16B3830, COMMIT_TIME)


def test_markers_come_also_where_the_rows_are_not_wanted() -> None:
    found = list(events(one_of_each(), wanted=lambda change: False))
    assert [type(event) for event in found] == [Begin, Commit]


@pytest.mark.requirement("S2-16", "S2-17", "S2-18")
def test_the_two_inserts_of_the_document() -> None:
    expected = seed("s2_two_inserts.json")
    rows = [
        make_change(
            table=USERS,
            after={"id": at},
            ordinal=at,
            sequence=at,
            last=at == 2,
            position=PostgresPosition(
                parse_lsn(insert["commit_lsn"]), parse_lsn(insert["start_lsn"])
            ),
        )
        for at, insert in enumerate(expected, 1)
    ]
    inserts = [event for event in told(*rows) if event["type"] == "Insert"]
    assert [{name: event[name] for name in expected[0]} for event in inserts] == expected
    assert {event["commit_lsn"] for event in told(*rows)} == {"0/16B3800"}


@pytest.mark.requirement("S2-15")
@given(st.integers(0, (1 << 64) - 1))
def test_an_lsn_is_a_number_that_prints_as_postgres_writes_it(number: int) -> None:
    lsn = Lsn(number)
    assert Lsn.parse(str(lsn)) == lsn == number
    assert repr(lsn) == f"Lsn('{lsn}')"
    assert pickle.loads(pickle.dumps(lsn)) == lsn


def test_lsns_compare_as_places_and_not_as_texts() -> None:
    assert Lsn.parse("0/9") < Lsn.parse("0/10") < Lsn.parse("1/0")
    assert str(Lsn.parse("0/16B3748")) == f"{Lsn(0x16B3748)}" == "0/16B3748"


# --- values --------------------------------------------------------------------------------------


def test_python_gets_exact_numbers() -> None:
    numbers = b'{"a":0.1,"b":1e400,"c":12345678901234567890.10,"d":%b,"e":"1.50"}' % (b"9" * 30)
    change = msgspec.structs.replace(middle(Op.INSERT), after=numbers)
    found = only(Insert, change).table_row
    assert found == {
        "a": 0.1,
        "b": Decimal("1e400"),
        "c": Decimal("12345678901234567890.10"),
        "d": 10**30 - 1,
        "e": "1.50",
    }
    assert type(found["a"]) is float


def test_formats_are_values() -> None:
    assert Etl() == pickle.loads(pickle.dumps(Etl()))
    assert hash(Etl()) == hash(Etl())
    assert (Etl.name, Etl.media_type) == ("etl", "application/json")


# --- generated changes ---------------------------------------------------------------------------


def _images(change: Change) -> list[bytes]:
    if change.op in (Op.TRUNCATE, Op.SCHEMA, Op.MESSAGE):
        return []
    return [image for image in (change.before, change.after) if image is not None]


def _one_line(image: bytes) -> bytes:
    return image.replace(b"\n", b" ").replace(b"\r", b" ")


@pytest.mark.requirement("S2-01", "S2-12")
@given(transactions())
def test_every_event_of_every_transaction_follows_the_schema(changes: list[Change]) -> None:
    stream = Etl().open()
    for change in changes:
        told_here = stream.encode(change, wanted=True)
        for line in told_here:
            assert b"\n" not in line
            assert b"\r" not in line
            validate(json.loads(line))
            assert decode(line).sequence == change.sequence
        for image in _images(change):
            assert any(_one_line(image) in line for line in told_here)


@pytest.mark.requirement("S2-16", "S2-17", "S2-19", "S2-20")
@given(transactions())
def test_keys_are_unique_and_grow_within_one_commit(changes: list[Change]) -> None:
    found = list(events(changes))
    keys = [event.key for event in found]
    assert keys == sorted(set(keys))
    assert {event.commit_lsn for event in found} == {changes[0].position.commit}
    assert isinstance(found[0], Begin)
    assert isinstance(found[-1], Commit)
    assert [type(event) for event in found].count(Begin) == 1
    assert [type(event) for event in found].count(Commit) == 1


@pytest.mark.requirement("S2-12")
@given(transactions())
def test_whoever_reads_a_row_knows_its_table(changes: list[Change]) -> None:
    described: dict[int, set[str]] = {}
    for event in events(changes):
        match event:
            case Relation(table_schema=schema):
                described[schema.id] = {column.name for column in schema.columns}
            case Insert(table_id=table, table_row=row) | Update(table_id=table, table_row=row):
                assert row.keys() <= described[table]
            case Delete(table_id=table):
                assert table in described
            case Truncate(rel_ids=tables):
                assert described.keys() >= set(tables)


@pytest.mark.requirement("S2-20")
@given(transactions(), st.data())
def test_a_stream_can_be_resumed_anywhere_and_only_tables_are_told_again(
    changes: list[Change], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(changes)))
    whole = {event.key: event for event in events(changes)}
    rest = resumed(changes, cut) if cut < len(changes) else []
    parts = [*events(changes[:cut]), *rest]
    told = [event for event in parts if not isinstance(event, Relation)]
    assert len({event.key for event in told}) == len(told)
    again = [event for event in parts if event.key not in whole]
    assert all(isinstance(event, Relation) for event in again)
    assert {event.key: event for event in parts if event not in again} == whole


@given(transactions(), st.data())
def test_a_filter_leaves_whole_events_out_and_changes_none(
    changes: list[Change], data: st.DataObject
) -> None:
    names = {change.table.name for change in changes}
    chosen = data.draw(st.sets(st.sampled_from(sorted(names))))
    wanted = {change.sequence for change in changes if change.table.name in chosen}
    whole = {event.key: event for event in events(changes)}
    for event in events(changes, wanted=lambda change: change.sequence in wanted):
        if isinstance(event, Truncate):
            continue  # of a statement it tells the wanted tables alone
        assert whole[event.key] == event
        assert event.sequence in wanted or isinstance(event, Begin | Commit)


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "Merge"},
        {"start_lsn": "16B3748"},
        {"start_lsn": "0/016B3748"},
        {"tx_ordinal": None},
        {"table_id": -1},
        {"table_row": None},
        {"extra": 1},
    ],
)
def test_the_schema_refuses_what_no_event_has(wrong: dict[str, Any]) -> None:
    [_, insert] = told(middle(Op.INSERT, after={"id": 1}))
    with pytest.raises(jsonschema.ValidationError):
        validate(insert | wrong)
    for name in insert:
        with pytest.raises(jsonschema.ValidationError):
            validate({key: value for key, value in insert.items() if key != name})
