"""The Kafka sink in a pipeline's query: from the log, through Spark's tasks, to a real broker."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from headrace.change.event import Op
from headrace.config import parse
from headrace.retry import Backoff
from headrace.secret import Secret
from headrace.sinks.kafka.sink import Kafka
from headrace.sinks.push import Template, redrive
from headrace.sinks.push import writer as writers
from headrace.sinks.push.writer import PushWriter
from headrace.testing import wait_until
from headrace.testing.kafka import KafkaServer
from tests.sinks.brokers import Record, expect_kafka, read, sink
from tests.sinks.lake import put, remove
from tests.sinks.push_harness import USERS, Post
from tests.sinks.socket_sink import Office

SECRET = "hunter2-of-nobody"


class Topics(Post):
    """A log whose changes are sent to a broker."""

    def __init__(self, spark: SparkSession, folder: Path, server: KafkaServer) -> None:
        self.server = server
        super().__init__(spark, folder, Office())

    def reopen(self, writer: str = "query-1", *, adopt: bool = False, **chosen: Any) -> PushWriter:
        """The sink as a query that starts would open it."""
        given = {
            "name": "post",
            "folder": str(self.folder / "post"),
            "retry_first_seconds": 0.01,
            "timeout_seconds": 20.0,
            # A topic of the test's own.
            "topic": f"{self.folder.name}.${{table}}",
        }
        settings: dict[str, Any] = given | chosen
        made = sink(self.server, **(settings | {"topic": Template(settings["topic"])}))
        self.sink = made  # type: ignore[assignment]
        self.writer = made.open(writer, adopt=adopt)
        return self.writer

    def read(self, table: str = "users") -> list[Record]:
        """What the topic of a table has."""
        return read(self.server, f"{self.folder.name}.{table}")

    def names(self) -> dict[str | None, list[str]]:
        """The names that each row was told to have, in order."""
        found = defaultdict(list)
        for record in self.read():
            found[record.key].append(json.loads(record.value or b"")["after"]["name"])
        return dict(found)


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaServer]:
    """The broker that these tests share."""
    expect_kafka()
    with KafkaServer() as server:
        yield server


@pytest.fixture
def topics(
    spark: SparkSession, tmp_path: Path, kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Topics]:
    monkeypatch.setattr(writers, "BACKOFF", Backoff(0.02, 60.0))
    made = Topics(spark, tmp_path, kafka)
    yield made
    made.log.close()


@pytest.mark.requirement("S0-41", "S0-42", "S1-37")
@pytest.mark.parametrize("parts", [1, 3])
def test_every_change_is_in_its_topic_once_and_rows_keep_their_order(
    topics: Topics, parts: int
) -> None:
    topics.reopen(batch_size=16)
    topics.users(*((n % 7, f"{n:03}") for n in range(100)))
    assert topics.write(parts=parts) == 100
    records = topics.read()
    assert len({record.id for record in records}) == len(records) == 100
    for record in records:
        told = json.loads(record.value or b"")
        assert told["id"] == record.id
        assert record.key == f"users:{told['after']['id']}"
        assert record.headers["savegress-operation"] == told["operation"] == "INSERT"
        assert record.headers["savegress-table"] == told["table"] == "users"
    assert topics.names() == {
        f"users:{row}": [f"{n:03}" for n in range(row, 100, 7)] for row in range(7)
    }


@pytest.mark.requirement("C-15")
def test_a_key_that_changes_is_deleted_and_inserted_and_a_delete_leaves_a_tombstone(
    topics: Topics,
) -> None:
    topics.reopen(tombstones=True)
    table = topics.table("users", USERS)
    topics.users((1, "Ann"))
    topics.commit(put(table, Op.UPDATE, was={"id": 1}, id=2, name="Ann"))
    topics.commit(remove(table, id=2))
    topics.write()
    told = defaultdict(list)
    for record in topics.read():
        told[record.key].append((record.headers["savegress-operation"], record.value is None))
    assert told == {
        "users:1": [("INSERT", False), ("DELETE", False), ("DELETE", True)],
        "users:2": [("INSERT", False), ("DELETE", False), ("DELETE", True)],
    }


def test_an_event_of_five_megabytes_is_a_dead_letter_and_its_row_waits(topics: Topics) -> None:
    topics.users((1, "Ann"), (1, "x" * 5_000_000), (2, "Bob"), (1, "Eve"))
    topics.write()
    assert topics.names() == {"users:1": ["Ann"], "users:2": ["Bob"]}
    assert [each["sequence"] for each in topics.letters()] == [2, 4]


def test_dead_letters_that_are_sent_again_come_in_order(topics: Topics) -> None:
    topics.reopen(max_event_bytes=2_000)
    topics.users((1, "x" * 3_000), (1, "later"), (2, "Bob"))
    topics.write()
    assert topics.names() == {"users:2": ["Bob"]}
    topics.reopen()
    request = redrive.request_redrive(topics.sink.folder)
    topics.writer.serve_requests(topics.spark)
    assert redrive.result_of(topics.sink.folder, request) == redrive.RedriveResult(
        request.id, 2, 2, 0
    )
    assert topics.names() == {"users:1": ["x" * 3_000, "later"], "users:2": ["Bob"]}
    assert topics.letters() == []


def test_a_broker_that_is_killed_and_comes_back_gets_everything_in_order(topics: Topics) -> None:
    topics.reopen(batch_size=50, timeout_seconds=2.0)
    topics.users((0, "first"))
    topics.write()
    topics.users(*((n % 7, f"{n:03}") for n in range(200)))
    topics.server.kill()
    sending = threading.Thread(target=topics.write)
    sending.start()
    try:
        wait_until(lambda: topics.writer.status().reason, timeout=120, message="it says it waits")
        assert topics.server.address in topics.writer.status().reason
    finally:
        topics.server.start()
        sending.join()
    found = topics.names()
    found["users:0"].remove("first")
    assert {row: list(dict.fromkeys(names)) for row, names in found.items()} == {
        f"users:{row}": [f"{n:03}" for n in range(row, 200, 7)] for row in range(7)
    }
    assert topics.writer.status().reason == ""
    assert topics.letters() == []


def test_no_secret_is_in_any_file_of_the_sink(topics: Topics) -> None:
    topics.reopen(settings={"sasl.oauthbearer.client.secret": SECRET})
    topics.users((1, "x" * 2_000_000))
    topics.write()
    files = [path for path in (topics.folder / "post").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_the_config_in_the_docs_works(topics: Topics, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sinks.md").read_text()
    section = page.partition("\n## kafka\n")[2].partition("\n## ")[0]
    content = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    content["pipeline"]["url"] = "https://headrace.example"
    config = parse(content, folder=tmp_path, environment={"KAFKA_PASSWORD": SECRET})
    assert config.pipeline is not None
    [documented] = config.pipeline.sinks
    assert isinstance(documented, Kafka)
    assert documented.password == Secret(SECRET)
    topics.reopen(tables=documented.tables, tombstones=documented.tombstones)
    topics.users((1, "Ann"))
    assert topics.write() == 1
    assert topics.names() == {"users:1": ["Ann"]}
