"""Events whose rows Spark computes: a statement between the log and a destination."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from pyspark.sql import SparkSession
from referencing import Registry, Resource

from headrace.change.event import Batch, Column, Op, Table, Transaction
from headrace.errors import PipelineError, TableFailed
from headrace.formats.catalogue import Formats, schemas
from headrace.pipeline.verify import verify
from headrace.retry import Backoff
from headrace.sinks import LogRange
from headrace.sinks.push import writer as writers
from headrace.sinks.push.computed import computed_changes
from headrace.sinks.push.events import EventRendering
from headrace.sinks.push.writer import PushWriter
from headrace.sources.mysql.position import MysqlPosition
from headrace.transforms.rules import TableTransform, Transforms
from tests.sinks.lake import put, remove, schema, truncate
from tests.sinks.push_harness import USERS, Post, opened_post
from tests.sinks.socket_sink import Taken

LOUD = "SELECT _sequence, id, upper(name) AS name FROM changes WHERE name <> 'hidden'"


def sql(text: str = LOUD, table: str = "public.users") -> dict[str, TableTransform]:
    return {table: TableTransform(sql=text)}


@pytest.fixture
def post(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Post]:
    monkeypatch.setattr(writers, "BACKOFF", Backoff(0.02, 60.0))
    with opened_post(spark, tmp_path, transforms=sql()) as opened:
        yield opened


def shown(event: Taken) -> tuple[int, str, Any, Any]:
    """What an event says happened."""
    payload = json.loads(event.payload or "")
    return event.sequence, payload["operation"], payload["before"], payload["after"]


def staged(post: Post) -> list[Path]:
    """The files with computed rows that are left."""
    return list((post.folder / "post").rglob("computed-*"))


def verified(post: Post) -> Any:
    @contextmanager
    def session() -> Iterator[SparkSession]:
        yield post.spark

    address = {"path": str(post.log.path)}
    return verify(post.sink, address, lambda *_: None, session=session)


def test_events_show_what_the_statement_makes_of_each_row(post: Post) -> None:
    users, other = post.table("users", USERS), post.table("other", USERS)
    post.commit(put(users, id=1, name="ann"), put(users, id=2, name="hidden"))
    post.commit(put(other, id=1, name="hidden"))
    post.commit(
        put(users, Op.UPDATE, id=1, name="eve"),
        put(users, Op.UPDATE, id=1, name="hidden"),  # leaves
        put(users, Op.UPDATE, id=2, name="joe"),  # comes in
        put(users, Op.UPDATE, was={"id": 2}, id=3, name="zoe"),  # moves
        put(users, Op.UPDATE, was={"id": 3}, id=4, name="hidden"),  # moves away
        put(users, Op.READ, id=5, name="kim"),
        remove(users, id=5),
        truncate(users),
    )
    assert post.write(parts=3) == 11
    assert sorted(map(shown, post.office.taken)) == [
        (1, "INSERT", None, {"id": 1, "name": "ANN"}),
        (3, "INSERT", None, {"id": 1, "name": "hidden"}),
        (4, "UPDATE", None, {"id": 1, "name": "EVE"}),
        (5, "DELETE", {"id": 1}, None),
        (6, "UPDATE", None, {"id": 2, "name": "JOE"}),
        (7, "UPDATE", {"id": 2}, {"id": 3, "name": "ZOE"}),
        (8, "DELETE", {"id": 3}, None),
        (9, "INSERT", None, {"id": 5, "name": "KIM"}),
        (10, "DELETE", {"id": 5}, None),
        (11, "DDL", None, None),
    ]
    in_log = {change.sequence: change.id for change in post.log.read(0)}
    assert {event.sequence: event.id for event in post.office.taken}.items() <= in_log.items()
    rows = post.office.rows()
    assert rows["shop|public.users:1"] == [(1, 0), (4, 0), (5, 0)]
    assert rows["shop|public.users:3"] == [(7, 0), (8, 0)]
    assert staged(post) == []
    found = verified(post)
    assert (found.expected, found.sent, found.missing, found.surplus) == (10, 10, [], [])


def test_a_batch_that_comes_again_sends_the_same_events(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.users((1, "ann"), (2, "hidden"), (3, "bob"))
    post.users((1, "hidden"), (3, "eve"), op=Op.UPDATE)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PushWriter, "_settle", dies)
        with pytest.raises(KeyboardInterrupt):
            post.write(parts=2)
    first, post.office.taken = post.office.taken, []
    post.reopen(transforms=sql())
    post.office.hang_up_after_taking = 1
    post.write(parts=2)
    assert {event.sequence for event in first} == {1, 3, 4, 5}
    assert set(post.office.taken) == set(first)


def test_dead_letters_hold_the_computed_event_and_a_redrive_sends_it(post: Post) -> None:
    post.office.judge = lambda event: (
        ("refused", "not her", 0.0) if "ANN" in (event.payload or "") else ("accepted", "", 0.0)
    )
    post.users((1, "ann"), (2, "bob"))
    post.users((1, "eve"), op=Op.UPDATE)
    post.write(parts=2)
    letters = post.letters()
    assert [(row["sequence"], row["status"]) for row in letters] == [(1, "refused"), (3, "waiting")]
    events = [json.loads(row["event"])["after"] for row in letters]
    assert events == [{"id": 1, "name": "ANN"}, {"id": 1, "name": "EVE"}]
    assert verified(post).complete

    post.office.judge = lambda event: ("accepted", "", 0.0)
    post.reopen(transforms=sql("SELECT _sequence, id, 'new' AS name FROM changes"))
    post.writer.redrive(post.spark, [])
    assert [event.payload for event in post.office.taken[-2:]] == [row["event"] for row in letters]


def test_a_statement_that_fails_sends_nothing(post: Post) -> None:
    post.reopen(transforms=sql("SELECT *, CAST(name AS INT) AS number FROM changes"))
    post.users(*((number, f"{number}") for number in range(1, 40)), (40, "none"))
    with pytest.raises(TableFailed) as failed:
        post.write()
    assert str(failed.value) == "post.transforms.public.users: sql: CAST_INVALID_INPUT"
    assert failed.value.hint.endswith("then the sink goes on from here.")
    assert not post.office.tried
    assert staged(post) == []

    post.reopen(transforms=sql("SELECT *, try_cast(name AS INT) AS number FROM changes"))
    post.write()
    assert len(post.office.taken) == 40


ITEMS = Table(
    "shop",
    "mysql",
    "mysql:1",
    "shop",
    "shop",
    "items",
    (
        Column("id", "bigint", key=True),
        Column("name", "varchar(20)"),
        Column("price", "decimal(12,2)"),
        Column("at", "datetime(6)"),
    ),
)
EVERY = (
    "SELECT _sequence, id, price * 2 AS twice, at, CAST(at AS DATE) AS day, array(name) AS names, "
    "CAST(name AS BINARY) AS bytes, double('NaN') AS odd, CAST(NULL AS STRING) AS none FROM changes"
)
FORMATS = ["canonical", "changefeed", "cloudevents", "debezium", "notification", "savegress"]


def test_every_format_shows_computed_columns_of_another_database(post: Post) -> None:
    items = post.log.register(ITEMS)
    row: Any = {"name": "chair", "price": "12345678.90", "at": "2026-11-17 10:00:00.500000"}
    position = MysqlPosition("bin.000001", 120, "", 4)
    changes = [
        put(items, id=1, **row),
        put(items, Op.UPDATE, was={"id": 1}, id=2, **row),
        remove(items, id=2),
        schema(items),
    ]
    at = {"transaction": Transaction("1", 1, 1), "position": position}
    placed = [
        msgspec.structs.replace(each, ordinal=number, last=number == len(changes), **at)
        for number, each in enumerate(changes, 1)
    ]
    post.log.append("shop", Batch(placed, b"resume"))
    batch = post.batch(0, len(changes))
    assert batch.whole
    transforms = Transforms(sql(EVERY, "shop.items"), "post")
    plain = EventRendering(Formats(), "savegress", transforms=transforms)
    with pytest.raises(PipelineError, match=r"shop\.items was not computed"):
        list(plain.events(batch.whole))
    rendering = replace(plain, computed=computed_changes(batch, plain, post.sink.letters))
    for name in FORMATS:
        events = payloads(replace(rendering, format=name), batch.whole)
        assert len(events) >= 3, name
        for event in events:
            VALIDATORS[name].validate(event)
    first, moved, gone, altered = payloads(replace(rendering, format="canonical"), batch.whole)
    assert (first["connector"], first["position"]["file"]) == ("mysql", "bin.000001")
    assert first["after"] == {
        "id": 1,
        "twice": "24691357.80",
        "at": "2026-11-17T10:00:00.500000Z",
        "day": "2026-11-17",
        "names": ["chair"],
        "bytes": "Y2hhaXI=",
        "odd": "NaN",
        "none": None,
    }
    assert (moved["before"], moved["before_kind"], moved["key"]) == ({"id": 1}, "key", {"id": 2})
    assert (gone["op"], gone["before"], gone["after"]) == ("DELETE", {"id": 2}, None)
    assert [each["name"] for each in altered["after"]["columns"]] == list(first["after"])

    # As for Kafka: a key that changes is a DELETE, its tombstone, and an INSERT.
    split = replace(rendering, splits_keys=True, adds_tombstones=True)
    [chunk] = split.events(batch.whole)
    assert [(event.sequence, event.at, event.op) for event in chunk.events] == [
        (1, 0, "INSERT"),
        (2, 0, "DELETE"),
        (2, 1, "DELETE"),
        (2, 2, "INSERT"),
        (3, 0, "DELETE"),
        (3, 1, "DELETE"),
        (4, 0, "SCHEMA"),
    ]


def payloads(rendering: EventRendering, wanted: LogRange) -> list[Any]:
    events = [event for chunk in rendering.events(wanted) for event in chunk.events]
    return [json.loads(event.payload or b"") for event in events]


_DOCUMENTS = {name: json.loads(text) for name, text in schemas().items()}
_REGISTRY: Registry[Any] = Registry().with_resources(
    (f"/schemas/{name}", Resource.from_contents(document)) for name, document in _DOCUMENTS.items()
)
VALIDATORS = {
    name: Draft202012Validator(_DOCUMENTS[f"{name}.json"], registry=_REGISTRY) for name in FORMATS
}
