"""`entities` on a real Spark: what the format makes of a log, however its changes are split."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from headrace.change.arrow.frame import Framing
from headrace.change.event import Change
from headrace.change.record import encode
from headrace.errors import ConfigError
from headrace.formats.entity import Entity
from headrace.formats.facts import Facts, SourceServer
from headrace.model import EntityType, Model
from headrace.pipeline import _entities, entities
from headrace.testing import PostgresDatabase
from tests.changes import Writer, make_change, opened_writer
from tests.formats import generated
from tests.serve.histories import told, write
from tests.sources.capturing import captured

MODEL = Model(
    tenant="tenant_id",
    entities=(EntityType(name="Person", table="users", identifier="email", queries=("people",)),),
)
FACTS = Facts(servers=(SourceServer("shop", instance="main", region="eu"),))
FORMAT = Entity(MODEL, FACTS)

COLUMNS = {
    "sequence": "sequence_number",
    "event_id": "event_id",
    "event_type": "event_type",
    "entity_type": "entity.entity_type",
    "entity_id": "entity.entity_id",
    "tenant_id": "entity.tenant_id",
    "trigger": "operation.trigger",
    "changed_fields": "operation.changed_fields",
    "transaction_id": "source.transaction_id",
}


def log_of(spark: SparkSession, folder: Path, **options: Any) -> DataFrame:
    return spark.read.format("headrace").options(path=str(folder), **options).load()


def expected(writer: Writer) -> list[tuple[int, str]]:
    """The events that the format writes, in order."""
    return [(sequence, event.decode()) for sequence, event in told(writer.log, FORMAT)]


def events(rows: list[Row]) -> list[tuple[int, str]]:
    return sorted((row.sequence, row.event) for row in rows)


def in_any_order(changes: DataFrame, parts: int) -> DataFrame:
    """The changes of a log, torn apart."""
    return changes.repartition(parts, F.xxhash64("id")).sortWithinPartitions(F.xxhash64("id"))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    with opened_writer(tmp_path / "log") as writer:
        yield writer


def streamed(stream: DataFrame, checkpoint: Path) -> list[Row]:
    """What a stream has now."""
    rows: list[Row] = []

    def take(batch: DataFrame, _: int) -> None:
        rows.extend(batch.collect())

    query = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    running = query.trigger(availableNow=True).start()
    running.awaitTermination()
    running.stop()
    return rows


def random_history(count: int) -> list[list[Change]]:
    """So many transactions, for one run of Spark to stand them all."""
    history: list[list[Change]] = []

    @settings(max_examples=count, phases=[Phase.generate], database=None)
    @given(generated.transactions())
    def draw(transaction: list[Change]) -> None:
        history.append(transaction)

    draw()
    return history


@pytest.mark.slow
@pytest.mark.requirement("S1-42")
def test_events_are_those_of_the_format_however_changes_are_split(
    spark: SparkSession, writer: Writer, tmp_path: Path
) -> None:
    write(writer, random_history(150))
    changes = log_of(spark, writer.log.path)
    assert events(entities(changes, MODEL, FACTS).collect()) == expected(writer)
    torn = entities(in_any_order(changes, 5), MODEL, FACTS)
    assert events(torn.collect()) == expected(writer)
    stream = spark.readStream.format("headrace").options(
        path=str(writer.log.path), maxChangesPerBatch=200
    )
    torn = entities(stream.load().repartition(3, F.xxhash64("id")), MODEL, FACTS)
    assert events(streamed(torn, tmp_path / "checkpoint")) == expected(writer)


def batch_of(changes: list[Change]) -> pa.RecordBatch:
    tables = {change.table.version: change.table for change in changes}
    framing = Framing("epoch-1", tables)
    return framing.batch(changes[0].sequence, len(changes), b"".join(encode(changes)))


@given(transaction=generated.transactions(), seed=st.integers())
def test_columns_say_what_the_event_says(transaction: list[Change], seed: int) -> None:
    rows = [batch_of([change]) for change in transaction]
    random.Random(seed).shuffle(rows)
    task = _entities.Render(FORMAT, ordered=False)
    found = [row for batch in task(iter(rows)) for row in batch.to_pylist()]
    assert [(row["sequence"], row["event"].encode()) for row in found] == list(
        FORMAT.render(transaction)
    )
    for row in found:
        event = msgspec.json.decode(row["event"])
        assert row["timestamp"].isoformat(timespec="microseconds") == event["timestamp"].replace(
            "Z", "+00:00"
        )
        for column, path in COLUMNS.items():
            value: Any = event
            for name in path.split("."):
                value = value[name]
            assert row[column] == value, column


def test_a_large_transaction_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.change.event.PIECE", 3)
    sizes: list[int] = []

    class Counted(Entity):
        def render(self, transaction: Any) -> Any:
            sizes.append(len(transaction))
            return super().render(transaction)

    changes = [
        make_change(key={"id": str(n)}, after={"id": str(n)}, sequence=n, ordinal=n, last=n == 8)
        for n in range(1, 9)
    ]
    found = _entities.Render(Counted(), ordered=True)(iter([batch_of(changes)]))
    assert [row["sequence"] for batch in found for row in batch.to_pylist()] == list(range(1, 9))
    assert sizes == [3, 3, 2]


@pytest.mark.requirement("S1-47")
def test_what_a_transaction_did_stays_together_and_can_be_looked_for(
    pg: PostgresDatabase, spark: SparkSession, tmp_path: Path
) -> None:
    pg.execute("CREATE TABLE users (id int PRIMARY KEY, tenant_id text, status text)")
    pg.execute(
        "CREATE TABLE posts (id int PRIMARY KEY, author int REFERENCES users ON DELETE CASCADE)"
    )
    with captured(pg, tmp_path) as shop:
        pg.execute("INSERT INTO users VALUES (1, 'acme', 'new'), (2, 'other', 'new')")
        pg.execute("INSERT INTO posts VALUES (1, 1), (2, 1), (3, 1), (4, 2)")
        pg.execute("UPDATE users SET status = 'active' WHERE id = 2")
        pg.execute("ALTER TABLE users REPLICA IDENTITY FULL")
        pg.execute("ALTER TABLE posts REPLICA IDENTITY FULL")
        pg.execute("DELETE FROM users WHERE id = 1")
        shop.until_caught_up()
        changes = log_of(spark, shop.log.path, minPartitions=3)
        found = entities(changes.repartition(4, "id"), Model(tenant="tenant_id")).persist()
        assert found.where("entity_type = 'User' AND event_type = 'entity:updated'").count() == 1
        [deleted] = found.where("event_type = 'entity:deleted'").collect()
    assert (deleted.entity_type, deleted.entity_id, deleted.tenant_id) == ("User", "1", "acme")
    cascade = msgspec.json.decode(deleted.event)["cascade"]["deleted"]
    assert sorted((each["entity_type"], each["entity_id"]) for each in cascade) == [
        ("Post", "1"), ("Post", "2"), ("Post", "3")
    ]  # fmt: skip
    found.unpersist()


def test_changes_of_which_a_column_was_left_out_are_refused(
    spark: SparkSession, writer: Writer
) -> None:
    writer.put("users", "1")
    changes = log_of(spark, writer.log.path)
    assert entities(changes.drop("id"), MODEL).count() == 1
    with pytest.raises(ConfigError, match="no column metadata"):
        entities(changes.drop("metadata"), MODEL)
