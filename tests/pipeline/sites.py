"""A log, sinks that are folders, and a pipeline between them in the test run's own Spark."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from headrace.config import sink_class
from headrace.pipeline.run import Pipeline, PipelineInput, plans
from headrace.sinks import Sink, SinkPhase, SinkStatus
from headrace.testing import wait_until
from tests.changes import Writer, opened_writer

PLUGINS = Path(__file__).parent / "plugins"


class Site:
    """A folder with a log and what was made of it."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder = folder
        self.spark = spark
        self.log = folder / "log"
        self.checkpoints = folder / "pipeline"
        self.checkpoints.mkdir()

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """The log, to put changes in."""
        with opened_writer(self.log) as writer:
            yield writer

    def fill(self, count: int, table: str = "users") -> None:
        """So many changes, in one transaction."""
        with self.writing() as writer:
            writer.put_many(table, count)

    def sink(self, name: str = "lake", **settings: Any) -> Sink:
        """A sink that is a folder."""
        kind: Any = sink_class("folder")
        sink: Sink = kind(**{"name": name, "path": str(self.folder / name), **settings})
        return sink

    def fault(self, kind: str | None, *, where: str = "write", sink: str = "lake") -> None:
        """Make a sink fail with an error of that name, until told otherwise."""
        (self.folder / sink).mkdir(exist_ok=True)
        file = self.folder / sink / f"fault-{where}"
        file.write_text(kind) if kind else file.unlink()

    def stored(self, sink: str = "lake") -> list[int]:
        """The sequences that a sink has; one stored twice shows twice."""
        files = (self.folder / sink).glob("*.json")
        rows = [row for file in files for row in json.loads(file.read_text())]
        return sorted(row["sequence"] for row in rows)

    def pipeline(
        self,
        *sinks: Sink,
        once: bool = True,
        adopt: Sequence[str] = (),
        most: int = 1000,
        seconds: float = 0.1,
    ) -> Pipeline:
        """A pipeline to enter."""
        feed = PipelineInput(
            address={"path": str(self.log)}, max_changes_per_batch=most, trigger_seconds=seconds
        )
        queries = plans(
            sinks or (self.sink(),), feed, checkpoints=self.checkpoints, once=once, adopt=adopt
        )
        return Pipeline(self.spark, queries, folder=self.checkpoints)

    def once(self, *sinks: Sink, **options: Any) -> dict[str, SinkStatus]:
        """Run it until every sink has ended."""
        with self.pipeline(*sinks, once=True, **options) as running:
            running.work(threading.Event(), lambda: None, once=True)
        return {status.sink: status for status in running.statuses()}


def await_phase(running: Pipeline, phase: SinkPhase) -> SinkStatus:
    """The status of the first sink once it is in a phase."""

    def reached() -> SinkStatus | None:
        [status, *_] = running.statuses()
        return status if status.phase is phase else None

    status = wait_until(reached, timeout=120, message=f"the sink is {phase}")
    assert status is not None
    return status
