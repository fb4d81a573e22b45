"""Every format, and Arrow, take what is captured from SQLite."""

from itertools import groupby
from typing import Any

import apsw
import pyarrow as pa
import pytest

from headrace.change.arrow import arrow_schema, arrow_type, decode
from headrace.change.event import Change, Op
from headrace.formats.facts import Facts
from headrace.formats.protobuf import Protobuf
from headrace.sources.sqlite import alter, install
from headrace.sources.sqlite.connector import SqlitePosition
from headrace.v1.changefeed_pb2 import CDCEvent
from tests.formats.test_schemas import FORMATS, VALIDATORS, events
from tests.sources.litedb import captured

CREATE = """
CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, score REAL, photo BLOB, joined DATE, x);
CREATE TABLE posts (id TEXT PRIMARY KEY NOT NULL, user_id REFERENCES users ON DELETE CASCADE);
INSERT INTO users VALUES (1, 'ann', 1.5, x'00ff', '2024-02-29', NULL);
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Change]:
    """Changes of every kind, as the log holds them."""
    folder = tmp_path_factory.mktemp("sqlite")
    path = folder / "shop.db"
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(20_000)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(CREATE)
    install(str(path), ["*"])
    with captured(path, folder) as feed:
        with connection:
            connection.execute("""INSERT INTO headrace_annotations VALUES ('{"user_id": "u1"}')""")
            connection.execute("INSERT INTO posts VALUES ('p', 1), ('q', 1)")
        connection.execute("INSERT INTO users VALUES (2, 'bob', -9e999, NULL, 7, x'01')")
        connection.execute("UPDATE users SET name = 'é', x = 1 WHERE id = 2")
        connection.execute("DELETE FROM users WHERE id = 1")
        alter(str(path), "ALTER TABLE users ADD COLUMN note TEXT")
        connection.execute("INSERT INTO users (id, note) VALUES (3, 'n')")
        feed.catch_up()
        connection.execute("DROP TABLE posts")
        changes = feed.changes()
    connection.close()
    return changes


@pytest.mark.requirement("S1-01", "S1-12", "S1-13", "S1-33")
@pytest.mark.parametrize("name", [name for name, _ in FORMATS])
def test_every_format_accepts_them(name: str, told: list[Change]) -> None:
    seen: list[dict[str, Any]] = []
    for _, group in groupby(told, key=lambda change: change.transaction.id):
        transaction = list(group)
        for event in events(dict(FORMATS)[name], transaction):
            VALIDATORS[name].validate(event)
            seen.append(event)
    assert seen
    if name == "entity":
        types = {event["event_type"] for event in seen}
        assert types == {"entity:created", "entity:updated", "entity:deleted"}
        assert {event["source"]["database"] for event in seen} == {"sqlite"}
        assert all(event["source"]["transaction_id"] for event in seen)


@pytest.mark.requirement("S1-33")
def test_inserts_updates_and_deletes_are_what_the_document_says(told: list[Change]) -> None:
    entity = dict(FORMATS)["entity"]
    expected = {
        Op.INSERT: "entity:created",
        Op.UPDATE: "entity:updated",
        Op.DELETE: "entity:deleted",
    }
    streamed = [change for change in told if change.op in expected and change.table.name == "users"]
    assert {change.op for change in streamed} == set(expected)
    for change in streamed:
        (event,) = events(entity, [change])
        assert event["event_type"] == expected[change.op]


def test_protocol_buffers_tell_where_they_stand(told: list[Change]) -> None:
    change = next(change for change in told if change.op is Op.UPDATE)
    at = CDCEvent.FromString(Protobuf(Facts()).encode(change) or b"").position.sqlite
    assert (at.transaction, at.entry) == (change.position.commit, change.position.own)


def test_positions_rise_and_transactions_share_theirs(told: list[Change]) -> None:
    positions = [change.position for change in told]
    assert all(isinstance(position, SqlitePosition) for position in positions)
    commits = [position.commit for position in positions]
    assert commits == sorted(commits)


def test_columns_become_arrow_by_their_affinity(told: list[Change]) -> None:
    rows = [c for c in told if c.table.name == "users" and c.op in (Op.READ, Op.INSERT)]
    table = rows[0].table
    kinds = dict(zip(table.columns, arrow_schema(table.columns, connector="sqlite"), strict=True))
    assert [field.type for field in kinds.values()] == [
        pa.int64(),
        pa.string(),
        pa.float64(),
        pa.binary(),
        pa.string(),
        pa.string(),
    ]
    found = decode([c.after for c in rows[:2]], table.columns, connector="sqlite").to_pylist()
    assert found == [
        {"id": 1, "name": "ann", "score": 1.5, "photo": b"\0\xff", "joined": "2024-02-29"}
        | {"x": None},
        {"id": 2, "name": "bob", "score": float("-inf"), "photo": None, "joined": "7"}
        | {"x": '{"base64":"AQ=="}'},
    ]


@pytest.mark.parametrize(
    ("declared", "arrow"),
    [
        ("BIGINT", pa.int64()),
        ("varchar(20)", pa.string()),
        ("DOUBLE PRECISION", pa.float64()),
        ("blob", pa.binary()),
        ("DECIMAL(10,2)", pa.string()),
        ("BOOLEAN", pa.string()),
        ("ANY", pa.string()),
    ],
)
def test_a_declared_type_has_an_arrow_type(declared: str, arrow: pa.DataType) -> None:
    assert arrow_type(declared, "sqlite") == arrow
