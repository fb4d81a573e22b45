"""A log and a tables sink on it, without Spark: tasks are called one after the other."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.event import Batch, Change, Table
from headrace.log import Log
from headrace.pipeline.options import Options
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.sinks import LogRange
from headrace.sinks.tables import maintenance
from headrace.sinks.tables import sink as sinks
from headrace.sinks.tables.compaction import due
from headrace.sinks.tables.rewrite import RewriteWork, Rewritten, rewrite
from headrace.sinks.tables.sink import Tables, TablesWriter
from headrace.sinks.tables.target import TargetTable
from tests.sinks.lake import SOURCE, Shop


class PlainBatch:
    """A range of the log; values reach tasks and return as they do in Spark."""

    spark: Any = None

    def __init__(self, whole: LogRange, parts: int) -> None:
        self.whole = whole
        self.upto = whole.upto
        self._parts = parts

    def run(self, task: Callable[[LogRange], msgspec.Struct | None]) -> Sequence[str]:
        """Call the task for each part."""
        whole = self.whole
        ranges = [
            LogRange(whole.log, whole.epoch, whole.after, whole.upto, part, self._parts)
            for part in range(self._parts)
        ]
        done = [pickle.loads(pickle.dumps(task))(each) for each in ranges]
        return [msgspec.json.encode(each).decode() for each in done]

    def changes_of(self, table: Table) -> Any:
        """There is no Spark to compute anything of them."""
        raise NotImplementedError(table.name)


def rewritten(_: object, work: Sequence[RewriteWork], *, aside: bool = False) -> list[Rewritten]:
    """What `run_rewrites` returns."""
    done = [rewrite(pickle.loads(pickle.dumps(each))) for each in work]
    return msgspec.json.decode(msgspec.json.encode(done), type=list[Rewritten])


class PlainLake(Shop):
    """Changes go into a log, batches of it into Delta tables, and compaction goes step by step."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> None:
        super().__init__(folder)
        patch.setattr(maintenance, "run_rewrites", rewritten)
        patch.setattr(sinks, "run_rewrites", rewritten)
        self.sink = Tables(name="lake", path=str(self.path), **settings)
        self.written = 0
        self.batches = 0
        self.open()

    def open(self) -> None:
        """The sink as a query that starts would open it."""
        self.writer = self.sink.open("query-1")
        self._compaction: Iterator[None] = iter(())

    def write(self, upto: int, parts: int) -> None:
        """The next batch; when it fails, it may come again."""
        self._write(self.written, upto, parts, self.batches)
        self.last = self.written
        self.written, self.batches = upto, self.batches + 1

    def repeat(self, parts: int) -> None:
        """The last batch once more."""
        self._write(self.last, self.written, parts, self.batches - 1)

    def _write(self, after: int, upto: int, parts: int, batch: int) -> None:
        path = str(self.log.path)
        log = PipelineLog(DiskLog(path), Options(path=path))
        self.writer.write(PlainBatch(LogRange(log, self.log.epoch, after, upto), parts), batch)

    def compact(self) -> None:
        """The next step of compaction, beside which batches may come."""
        try:
            next(self._compaction)
        except StopIteration:
            self._compaction = self._compacting()

    def _compacting(self) -> Iterator[None]:
        assert isinstance(self.writer, TablesWriter)
        for target in list(self.writer._targets.values()):
            yield from _compacting(target)

    def cut_short(self, *changes: Change) -> None:
        """Pieces of a transaction whose writer is killed before it ends."""
        for each in changes:
            self.log.append(SOURCE, Batch([each], None))
        self.begin_log_anew()

    def begin_log_anew(self) -> None:
        """The log as a process that starts opens it."""
        self.log.close()
        self.log = Log.open(self.folder / "log")


def _compacting(target: TargetTable) -> Iterator[None]:
    """What `Maintenance` does, and a pause wherever it holds no lock."""
    if not target.delta.has_vectors:
        work = target.compaction()
        target.compacted(work, rewritten(None, work))
        return
    plan, files = target.layout()
    yield
    for piece in due(plan, files):
        updated = target.updated(piece)
        yield
        done = rewritten(None, [updated])
        yield
        target.compacted([updated], done)
        yield
