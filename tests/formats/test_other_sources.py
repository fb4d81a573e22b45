"""Every format over MySQL, SQLite and an event table: real changes, kept to strict schemas."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.connector import position_from_json
from headrace.change.event import Change, Op
from headrace.change.lsn import format_lsn
from headrace.errors import ConfigError
from headrace.formats.canonical import Canonical
from headrace.formats.changefeed import Changefeed
from headrace.formats.cloudevents import CloudEvents
from headrace.formats.debezium import Debezium
from headrace.formats.entity import Entity
from headrace.formats.etl import Begin, Commit, Insert, Relation, Update, table_id
from headrace.formats.etl import events as etl_events
from headrace.formats.notification import Notification
from headrace.formats.protobuf import Protobuf
from headrace.formats.savegress import Savegress, SavegressTransactions
from headrace.sources.mysql.position import MysqlPosition
from headrace.sources.postgres_events.position import EventTablePosition
from headrace.sources.sqlite.connector import SqlitePosition
from headrace.testing.mariadb import MariadbDatabase
from headrace.v1.changefeed_pb2 import CDCEvent
from tests.changes import make_change, make_table
from tests.formats.other_sources import SESSION, SOURCES, Told, place_of, workload
from tests.formats.savegress_document import KEYS, seed
from tests.formats.test_schemas import FACTS, FORMATS, VALIDATORS, Event, events
from tests.sources.mycapturing import captured

USERS = make_table(schema="shop")
CONNECTORS = {"mysql": "mysql", "sqlite": "sqlite", "postgres_events": "postgres"}


@pytest.fixture(scope="module", params=SOURCES)
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Told]:
    """The changes of the workload, of each source in turn."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 0.05)
        yield workload(place_of(request.param, stack, request, folder), request.param, folder)


def transactions(changes: Any) -> Iterator[list[Change]]:
    for _, group in groupby(changes, key=lambda change: change.transaction.id):
        yield list(group)


def of(format: Any, change: Change) -> Event:
    line = format.encode(change)
    assert line is not None
    event: Event = json.loads(line)
    return event


# --- all formats ---------------------------------------------------------------------------------


@pytest.mark.requirement("S1-01", "C-01")
@pytest.mark.parametrize("name", [name for name, _ in FORMATS])
def test_every_event_keeps_to_its_schema(told: Told, name: str) -> None:
    seen = 0
    for transaction in transactions(told.changes):
        for event in events(dict(FORMATS)[name], transaction):
            VALIDATORS[name].validate(event)
            seen += 1
    assert seen >= 6


def test_the_workload_is_told(told: Told) -> None:
    assert [change.op.value for change in told.streamed if change.op is not Op.SCHEMA] == [
        "INSERT",
        "UPDATE",
        "UPDATE",
        "DELETE",
        "INSERT",
    ]
    assert any(change.op is Op.SCHEMA for change in told.streamed)
    assert {change.table.connector for change in told.changes} == {CONNECTORS[told.kind]}


def test_a_position_reads_back_from_what_events_show(told: Told) -> None:
    for change in told.changes:
        shown = of(Canonical(), change)["position"]
        assert position_from_json(change.table.connector, shown) == change.position
    ids = [change.id for change in told.changes]
    assert len(ids) == len(set(ids))


# --- savegress -----------------------------------------------------------------------------------


def row(told: Told, **values: Any) -> dict[str, Any]:
    """A row of users; SQLite has no decimals, and gives its numbers as they are."""
    if told.kind != "sqlite" and values.get("total") is not None:
        values["total"] = f"{values['total']:.2f}"
    return values


@pytest.mark.requirement("S0-09", "S0-10", "S0-11", "S0-12")
def test_savegress_shows_old_rows_beside_new_ones(told: Told) -> None:
    told_events = [of(Savegress(FACTS), change) for change in told.streamed]
    rows = [event for event in told_events if event["operation"] != "DDL"]
    assert [(event["operation"], event["before"], event["after"]) for event in rows] == [
        ("INSERT", None, row(told, id=2, name="Bob", total=0.1)),
        ("UPDATE", row(told, id=2, name="Bob", total=0.1), row(told, id=2, name="Bo", total=0.1)),
        ("UPDATE", row(told, id=2, name="Bo", total=0.1), row(told, id=3, name="Bo", total=0.1)),
        ("DELETE", row(told, id=1, name="Ann", total=1.5), None),
        ("INSERT", None, row(told, id=4, name="Cy", total=None, note="new")),
    ]
    assert all(list(event) == KEYS for event in rows)
    places = {(event["source"], event["schema"], event["table"]) for event in told_events}
    assert places == {(CONNECTORS[told.kind], told.schema, "users")}
    (ddl,) = [event for event in told_events if event["operation"] == "DDL"]
    if told.kind == "mysql":
        command = "ALTER TABLE users ADD COLUMN note varchar(20)"
        assert (ddl["ddl_type"], ddl["ddl_command"]) == ("ALTER_TABLE", command)


def test_savegress_marks_a_copied_row(told: Told) -> None:
    copied = next(c for c in told.changes if c.op is Op.READ and c.table.name == "users")
    event = of(Savegress(FACTS), copied)
    assert (event["operation"], event["metadata"]["snapshot"]) == ("INSERT", "true")


def test_savegress_markers_surround_a_transaction(told: Told) -> None:
    (annotated,) = [
        transaction
        for transaction in transactions(told.changes)
        if transaction[0].transaction.metadata
    ]
    stream = SavegressTransactions(FACTS).open()
    lines = [
        json.loads(line) for change in annotated for line in stream.encode(change, wanted=True)
    ]
    assert [line["operation"] for line in lines] == ["BEGIN", "DELETE", "INSERT", "COMMIT"]
    assert len({line["transaction_id"] for line in lines}) == 1


def test_positions_are_the_sources_own(told: Told) -> None:
    for change in told.changes:
        at, position = change.position, of(Savegress(FACTS), change)["position"]
        if told.kind == "mysql":
            assert isinstance(at, MysqlPosition)
            assert position == {"file": at.file, "position": at.position, "gtid": at.gtid}
        elif told.kind == "sqlite":
            assert isinstance(at, SqlitePosition)
            assert position == {"transaction": at.transaction, "entry": at.entry}
        else:
            assert isinstance(at, EventTablePosition)
            assert position == {"lsn": format_lsn(at.lsn), "sequence": change.sequence}


@pytest.mark.requirement("S0-32")
def test_a_position_of_mysql_is_where_the_server_wrote_it(
    maria: MariadbDatabase, tmp_path: Path
) -> None:
    maria.execute("CREATE TABLE users (id int PRIMARY KEY)")
    with captured(maria, tmp_path) as feed:
        with maria.connect(autocommit=True) as connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO users VALUES (1)")
            cursor.execute("SELECT @@last_gtid")
            ((gtid,),) = cursor.fetchall()
        (change,) = feed.streamed(Op.INSERT)
    position = of(Savegress(FACTS), change)["position"]
    assert list(position) == list(seed("positions")["mysql"]["position"])
    assert re.fullmatch(r"mysql-bin\.\d{6}", position["file"])
    assert position["gtid"] == gtid
    written = maria.execute(f"SHOW BINLOG EVENTS IN '{position['file']}'")
    (kind,) = [each[2] for each in written if each[1] == position["position"]]
    assert kind.startswith("Write_rows")


VALUES = {
    "INT": "42",
    "BIGINT": "42",
    "DECIMAL": "123.456",
    "TINYINT(1)": "1",
    "VARCHAR": "'hello'",
    "TEXT": "'hello'",
    "DATETIME": "'2025-01-15 10:30:00'",
    "TIMESTAMP": "'2025-01-15 10:30:00'",
    "DATE": "'2025-01-15'",
    "TIME": "'10:30:00'",
    "JSON": """'{"key": "value"}'""",
    "BLOB": "'Hello World'",
    "ENUM": "'active'",
    "SET": "'b,a'",
}
DECLARED = {
    "DECIMAL": "DECIMAL(10,3)",
    "VARCHAR": "VARCHAR(20)",
    "TIMESTAMP": "TIMESTAMP NULL",
    "ENUM": "ENUM('active','gone')",
    "SET": "SET('a','b','c')",
}


@pytest.mark.requirement("S0-28", "S0-29", "S0-30")
def test_every_type_of_mysql_looks_as_in_the_document(
    maria: MariadbDatabase, tmp_path: Path
) -> None:
    expected = seed("types_mysql")
    assert list(VALUES) == list(expected)
    columns = ", ".join(f"`{name}` {DECLARED.get(name, name)}" for name in VALUES)
    maria.execute(f"CREATE TABLE everything (n int AUTO_INCREMENT PRIMARY KEY, {columns})")
    names, values = ", ".join(f"`{name}`" for name in VALUES), ", ".join(VALUES.values())
    insert = f"SET time_zone = '+00:00'; INSERT INTO everything ({names}) VALUES ({values})"
    maria.execute(insert)
    with captured(maria, tmp_path) as feed:
        maria.execute(insert)
        maria.execute("DELETE FROM everything WHERE n = 2")
        changes = feed.changes(Op.READ, Op.INSERT, Op.DELETE)
    read, inserted, deleted = (of(Savegress(FACTS), change) for change in changes)
    for number, image in [(1, read["after"]), (2, inserted["after"]), (2, deleted["before"])]:
        assert image == {"n": number} | expected
        # Python takes 1 for true; the document does not.
        kinds = [type(value) for value in image.values()]
        assert kinds == [int, *map(type, expected.values())]


# --- protobuf ------------------------------------------------------------------------------------


def test_protobuf_tells_the_same_as_the_json(told: Told) -> None:
    for change in told.rows:
        event = of(Savegress(FACTS), change)
        message = CDCEvent.FromString(Protobuf(FACTS).encode(change) or b"")
        position = getattr(message.position, CONNECTORS[told.kind])
        assert message.position.WhichOneof("connector") == CONNECTORS[told.kind]
        assert {name: getattr(position, name) for name in event["position"]} == event["position"]
        assert (message.id, message.source, message.table) == (
            event["id"],
            event["source"],
            "users",
        )
        assert json.loads(message.after_json or "null") == event["after"]


# --- entity --------------------------------------------------------------------------------------

DATABASES = {"mysql": "mysql", "sqlite": "sqlite", "postgres_events": "postgresql"}


@pytest.mark.requirement("S1-12", "S1-13", "S1-14", "S1-33")
def test_entities_say_where_they_come_from_and_who_did_it(told: Told) -> None:
    rendered = [
        json.loads(each.payload)
        for transaction in transactions(told.changes)
        for each in Entity(facts=FACTS).render(transaction)
    ]
    assert {event["source"]["database"] for event in rendered} == {DATABASES[told.kind]}
    by_session = [event for event in rendered if event["source"]["session_id"] == SESSION]
    assert [event["event_type"] for event in by_session] == ["entity:deleted", "entity:created"]
    assert {event["metadata"]["user_id"] for event in by_session} == {"u1"}
    (transaction,) = {event["source"]["transaction_id"] for event in by_session}
    assert told.transaction in ("", transaction)
    others = {e["source"]["transaction_id"] for e in rendered if e not in by_session}
    assert transaction not in others
    assert all(
        event["source"]["session_id"] is None for event in rendered if event not in by_session
    )


# --- etl -----------------------------------------------------------------------------------------


@pytest.mark.requirement("S2-03", "S2-19", "S2-20")
def test_etl_events_come_in_order_and_tell_tables_apart(told: Told) -> None:
    found = list(etl_events(told.changes))
    keys = [event.tx_ordinal for event in found]
    assert keys == sorted(set(keys))
    schemas = [event.table_schema for event in found if isinstance(event, Relation)]
    ids = {(schema.schema, schema.name): schema.id for schema in schemas}
    assert ids.keys() >= {(told.schema, "users"), (told.schema, "posts")}
    assert len(set(ids.values())) == len(ids)
    assert all(0 < each < 1 << 32 for each in ids.values())
    again = [event for event in etl_events(told.changes) if isinstance(event, Relation)]
    assert [event.table_schema.id for event in again] == [schema.id for schema in schemas]
    inserted = [e for e in found if isinstance(e, Insert) and e.table_row.get("note") == "new"]
    assert [event.table_id for event in inserted] == [ids[told.schema, "users"]]


@pytest.mark.requirement("S2-16", "S2-17")
def test_etl_events_of_a_transaction_share_its_commit(told: Told) -> None:
    commit = 0
    for event in etl_events(told.changes):
        if isinstance(event, Begin):
            commit = event.commit_lsn
        assert event.commit_lsn == commit
        if isinstance(event, Commit):
            assert event.start_lsn == commit == event.end_lsn
    updates = [event for event in etl_events(told.changes) if isinstance(event, Update)]
    assert [event.old_table_row and event.old_table_row.key_only for event in updates] == [
        False
    ] * 2
    starts = [int(change.position.own) for change in told.rows]
    assert starts == sorted(starts)


def test_two_tables_whose_names_make_the_same_number_are_not_mixed() -> None:
    # Found by trying; nothing but their names is known of tables of MySQL.
    one = msgspec.structs.replace(USERS, name="t91420", version=1)
    other = msgspec.structs.replace(USERS, name="t109937", version=2)
    assert table_id(one) == table_id(other)
    changes = [make_change(table=one, sequence=1), make_change(table=other, sequence=2)]
    with pytest.raises(ConfigError, match=r"shop\.t91420 and shop\.t109937 .* same table_id"):
        list(etl_events(changes))
    numbered = [
        msgspec.structs.replace(change, table=msgspec.structs.replace(change.table, relation=at))
        for at, change in enumerate(changes, 1)
    ]
    assert [e.table_id for e in etl_events(numbered) if isinstance(e, Insert)] == [1, 2]


# --- debezium ------------------------------------------------------------------------------------

COMMON = ["version", "connector", "name", "ts_ms", "snapshot", "db", "sequence", "ts_us", "ts_ns"]
OWN = {
    "mysql": ["table", "server_id", "gtid", "file", "pos", "row", "thread", "query"],
    "sqlite": ["schema", "table"],
    "postgres_events": ["schema", "table", "txId", "lsn", "xmin", "origin", "origin_lsn"],
}


def test_debezium_has_the_block_that_its_consumers_know(told: Told) -> None:
    for change in told.rows:
        block = of(Debezium(FACTS), change)["source"]
        assert list(block) == COMMON + OWN[told.kind]
        at = change.position
        if isinstance(at, MysqlPosition):
            assert block["connector"] == "mysql"
            assert (block["file"], block["pos"], block["gtid"]) == (at.file, at.position, at.gtid)
            assert block["server_id"] == int(at.gtid.split("-")[1])
        else:
            assert json.loads(block["sequence"]) == [str(at.commit), str(at.own)]
        if isinstance(at, EventTablePosition):
            assert block["lsn"] == at.lsn > 0
            assert block["txId"] == at.transaction


def test_debezium_tells_rows_of_one_transaction_apart(told: Told) -> None:
    places = [
        json.dumps([block.get(name) for name in ("sequence", "file", "pos", "row")])
        for change in told.rows
        for block in [of(Debezium(FACTS), change)["source"]]
    ]
    assert len(set(places)) == len(places)


@pytest.mark.requirement("C-04")
def test_a_block_with_a_key_less_or_more_is_refused(told: Told) -> None:
    event = of(Debezium(FACTS), told.rows[0])
    block = event["source"]
    for key in block:
        less = {name: value for name, value in block.items() if name != key}
        assert not VALIDATORS["debezium"].is_valid(event | {"source": less}), key
    assert not VALIDATORS["debezium"].is_valid(event | {"source": block | {"more": 1}})


# --- notification, changefeed, cloudevents -------------------------------------------------------


def test_notifications_name_the_table_as_people_do(told: Told) -> None:
    shown = "users" if told.kind != "mysql" else f"{told.schema}.users"
    messages = [of(Notification(), change) for change in told.rows]
    assert {message["tableName"] for message in messages} == {shown}
    assert messages[2]["beforeData"] == {"id": 2}
    assert messages[3]["beforeData"]["name"] == "Ann"


def test_a_schema_that_is_called_main_is_the_default_of_sqlite_alone() -> None:
    table = make_table(schema="main")
    message = of(Notification(), make_change(table=table, after={"id": 1}))
    assert message["tableName"] == "main.users"


def test_a_changed_key_names_the_one_that_is_gone(told: Told) -> None:
    feed = [of(Changefeed(), change) for change in told.rows]
    assert [event["key"] for event in feed] == [f"users:{id}" for id in (2, 2, 3, 1, 4)]
    assert [event["metadata"].get("previous_key") for event in feed] == [
        None,
        None,
        "users:2",
        None,
        None,
    ]
    clouds = [of(CloudEvents(FACTS), change) for change in told.rows]
    assert {event["subject"] for event in clouds} == {f"{told.schema}.users"}
    assert [event["partitionkey"] for event in clouds] == [event["key"] for event in feed]
