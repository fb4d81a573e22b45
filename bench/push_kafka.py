"""Log → Kafka: events through a streaming query, beside a loop that only produces; and the delay.

The broker is a real one on this machine, and what it costs is part of every figure. The loop has
the same events ready in memory and gives them to the same client, equally safe; what it takes no
pipeline can beat.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from confluent_kafka import OFFSET_END, Consumer, KafkaError, Message, Producer, TopicPartition

from headrace.formats.facts import Facts
from headrace.formats.key import row_key
from headrace.formats.savegress import Savegress
from headrace.log import Log
from headrace.sinks import SinkPhase
from headrace.sinks.kafka.sink import Kafka
from headrace.sinks.report import REPORT, PipelineReport
from headrace.testing import PostgresDatabase, free_port, wait_until
from headrace.testing.kafka import KafkaServer

from . import latency
from .orders import NAME, SCHEMA, Orders
from .process import MeasurementFailed, Outcome, answer, child, measure, module, next_line
from .push import MASTER, WHO, best, size, through
from .report import Figure, Figures

ROWS = 100_000  # different ones
CHANGES = 250_000  # of a query's batch, as is the sink's default
BATCHES, WARM_UP = 3, 1
DELAYED = 1500  # rows whose delay is measured
JAVA = ("-Xmx1g",)
TARGET = 50_000  # events a second

_STAMP = re.compile(rb'"stamp":(\d+)')


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Which changes are sent where."""

    log: str
    folder: str
    servers: str
    changes: int  # of a batch of the query
    warm_up: int = WARM_UP

    def encode(self) -> str:
        """As the argument of a child."""
        return msgspec.json.encode(self).decode()

    @property
    def events(self) -> int:
        """How many there are in all."""
        return self.changes * (BATCHES + self.warm_up)

    @property
    def sink(self) -> Kafka:
        """The sink with its defaults."""
        return Kafka(name="events", servers=self.servers, max_changes_per_batch=self.changes)


def deliveries(folder: Path, *, factor: float, runs: int) -> Figures:
    """Events a second, of each the best run; every run has a broker of its own."""
    changes, log = size(CHANGES, factor), str(folder / "log")
    Orders(log).update(ROWS, batch=changes, batches=BATCHES, warm_up=WARM_UP)

    def one(who: str, place: Path) -> Outcome:
        with KafkaServer(options=JAVA) as server:
            task = Task(log=log, folder=str(place), servers=server.address, changes=changes)
            return sent(who, task)

    rates = best(folder, runs, one)
    headrace, loop = WHO
    figures = [
        Figure(headrace, rates[headrace], "events/s", at_least=TARGET),
        Figure(loop, rates[loop], "events/s"),
    ]
    return Figures("Log → Kafka: updates of 8 columns, to a broker on this machine", figures)


def sent(who: str, task: Task) -> Outcome:
    """One run; every event must have come."""
    outcome = measure(module("push_kafka", who, task.encode()), Path(task.folder))
    if (came := _messages(task.servers, f"cdc.{SCHEMA}.{NAME}")) != task.events:
        raise MeasurementFailed(f"{came} events came, not {task.events}")
    return outcome


def _messages(servers: str, topic: str) -> int:
    """How many a topic has."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "bench"})
    try:
        parts = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        marks = (consumer.get_watermark_offsets(TopicPartition(topic, part)) for part in parts)
        return sum(end - begin for begin, end in marks)
    finally:
        consumer.close()


# --- Headrace ------------------------------------------------------------------------------------


def headrace(task: Task) -> Outcome:
    """The real query."""
    folder, changes = Path(task.folder), task.changes
    return through(task.sink, task.log, folder, changes=changes, warm_up=task.warm_up)


# --- the loop ------------------------------------------------------------------------------------


def bare(task: Task) -> Outcome:
    """Events that are ready, produced as fast as the client takes them; all with headers."""
    topic, failed = f"cdc.{SCHEMA}.{NAME}", []
    with Log.open(task.log) as log:
        encode = Savegress(Facts()).encode
        events = [
            (encode(change), row_key(change), change.id, change.transaction.commit_time)
            for change in log.read(0, limit=task.events)
        ]

    def told(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failed.append(error)

    producer = Producer({"bootstrap.servers": task.servers, "enable.idempotence": True})
    producer.list_topics(timeout=10)
    began = time.perf_counter()
    for number, (payload, key, identity, at) in enumerate(events):
        headers: list[tuple[str, str | bytes | None]] = [
            ("savegress-event-id", identity),
            ("savegress-operation", "UPDATE"),
            ("savegress-table", NAME),
            ("savegress-timestamp", str(at // 1000)),
        ]
        if number % 500 == 0:
            producer.poll(0)
        while len(producer) >= 50_000:
            producer.poll(0.01)
        producer.produce(topic, payload, key, on_delivery=told, headers=headers)
    producer.flush()
    seconds = time.perf_counter() - began
    if failed:
        raise MeasurementFailed(f"{len(failed)} events were not accepted: {failed[0]}")
    return Outcome(len(events), seconds)


# --- the delay -----------------------------------------------------------------------------------


def delay(database: PostgresDatabase, folder: Path, *, changes: int = DELAYED) -> Figures:
    """From commit to a consumer, through a running capture and a running pipeline."""
    database.execute(latency.CREATE)
    topic = f"cdc.{latency.TABLE}"
    with KafkaServer(options=JAVA) as server, _running(database, folder, server.address):
        database.execute(f"INSERT INTO {latency.TABLE} VALUES (-1, 0, 'so that a topic is there')")
        wait_until(lambda: _messages(server.address, topic), timeout=60, message="an event came")
        with child(module("push_kafka", "consumer", server.address, topic, str(changes))) as reader:
            next_line(reader)  # it is at the topic's end
            with child(module("latency", "write", database.url, str(changes))) as writer:
                next_line(writer)
            delays = sorted(msgspec.json.decode(next_line(reader))["milliseconds"])
    return Figures(
        f"Commit → Kafka consumer, at {latency.RATE:,} changes/s",
        [
            Figure("p50", latency.percentile(delays, 50), "ms", below=1000),
            Figure("p99", latency.percentile(delays, 99), "ms"),
            Figure("worst", delays[-1], "ms"),
            Figure("changes", len(delays), "rows"),
        ],
    )


def consume(servers: str, topic: str, changes: str) -> None:
    """Read the stamps of so many rows, and tell how old they were."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "bench", "fetch.wait.max.ms": 10}
    )
    parts = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, part, OFFSET_END) for part in parts])
    consumer.consume(1, timeout=1.0)  # by then it has asked where the end is
    answer({"ready": True})
    delays: list[float] = []
    while len(delays) < int(changes):
        messages = consumer.consume(1000, timeout=0.005)
        now = time.monotonic_ns()
        found = (
            _STAMP.search(value) for each in messages if isinstance(value := each.value(), bytes)
        )
        delays += ((now - int(stamp[1])) / 1e6 for stamp in found if stamp)
    consumer.close()
    answer({"milliseconds": delays})


@contextmanager
def _running(database: PostgresDatabase, folder: Path, servers: str) -> Iterator[None]:
    """A `headrace run` and a `headrace pipeline` on one config."""
    config = folder / "headrace.yaml"
    content = {
        "sources": {"bench": {"type": "postgres", "url": database.url, "tables": [latency.TABLE]}},
        "server": {"port": free_port()},
        "pipeline": {
            "master": MASTER,
            "sinks": {"events": {"type": "kafka", "servers": servers}},
        },
    }
    config.write_text(msgspec.json.encode(content).decode())  # JSON is YAML
    program = str(Path(sys.executable).with_name("headrace"))
    with (folder / "output.log").open("wb") as log:
        processes = [
            subprocess.Popen(
                [program, command, "--config", str(config)], cwd=folder, stdout=log, stderr=log
            )
            for command in ("run", "pipeline")
        ]
        try:
            wait_until(
                lambda: _streams(folder, processes), timeout=120, message="the pipeline streams"
            )
            yield
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(60)


def _streams(folder: Path, processes: list[subprocess.Popen[bytes]]) -> bool:
    if any(process.poll() is not None for process in processes):
        raise MeasurementFailed((folder / "output.log").read_text()[-2000:])
    report = folder / "data" / "pipeline" / REPORT
    if not report.exists():
        return False
    told = msgspec.json.decode(report.read_bytes(), type=PipelineReport)
    return all(sink.phase is SinkPhase.STREAMING for sink in told.sinks)


def main(who: str, *given: str) -> None:
    """Be the consumer, or do one task and answer."""
    if who == "consumer":
        consume(*given)
        return
    task = msgspec.json.decode(given[0], type=Task)
    answer(headrace(task) if who == WHO[0] else bare(task))


if __name__ == "__main__":
    main(*sys.argv[1:])
