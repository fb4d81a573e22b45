"""The changefeed's example, produced by a real change of a real PostgreSQL."""

import json
from pathlib import Path

import pytest

from headrace.formats import Changefeed
from headrace.testing import PostgresDatabase
from tests.sources.capturing import captured

SEED = Path(__file__).parent / "seeds" / "s4_event.json"


@pytest.mark.requirement("S4-02", "S4-03", "S4-05")
def test_a_real_change_is_the_event_of_the_document(pg: PostgresDatabase, tmp_path: Path) -> None:
    pg.execute("CREATE TABLE users (name text PRIMARY KEY, age int)")
    with captured(pg, tmp_path) as feed:
        pg.execute("INSERT INTO users VALUES ('alice', 30)")
        pg.execute("DELETE FROM users")
        put, delete = feed.streamed()
    expected = json.loads(SEED.read_text())
    event = json.loads(Changefeed().encode(put) or b"")
    assert list(event) == list(expected)
    assert {name: type(value) for name, value in event.items()} == {
        name: type(value) for name, value in expected.items()
    }
    assert (event["type"], event["key"]) == (expected["type"], expected["key"])
    assert expected["metadata"].items() <= event["metadata"].items()
    assert json.loads(event["value"]) == {"name": "alice", "age": 30}
    assert event["sequence"] == put.sequence
    assert event["timestamp_ms"] == put.transaction.commit_time // 1000
    gone = json.loads(Changefeed().encode(delete) or b"")
    assert list(gone) == list(expected)
    assert (gone["type"], gone["key"], gone["value"]) == ("DELETE", expected["key"], None)
    assert gone["sequence"] == put.sequence + 1
