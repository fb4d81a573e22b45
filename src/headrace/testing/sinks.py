"""What every sink promises, as tests: a sink runs them all by subclassing `SinkContract`.

    class TestMine(SinkContract):
        @pytest.fixture
        def trial(self, tmp_path: Path) -> SinkTrial:
            sink = Mine(name="mine", path=str(tmp_path / "mine"))
            return SinkTrial(sink, stored=…)

A sink that takes rows needs a Spark session as well; the tasks of one that takes log ranges run in
the test's own process. pytest is not needed to import it.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import FrozenInstanceError, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from ..change.event import Batch, BeforeKind, Change, Column, Op, Table, Transaction
from ..errors import HeadraceError, LogReplaced, SinkFenced
from ..log import Log
from ..sinks import LogBatch, LogRange, Sink, SinkWriter, Takes
from ..sources.postgres.position import PostgresPosition

_COLUMNS = (Column("id", "bigint", key=True), Column("name", "text"))
_SOURCE = "shop"

Row = tuple[str, int]  # a table, and the id of a row that was inserted


@dataclass(slots=True)
class SinkTrial:
    """A sink on trial, and what shows its work."""

    sink: Sink  # as its pipeline would have it
    stored: Callable[[], Iterable[Row]]  # every row that has arrived, as often as it did
    spark: Any = None  # a SparkSession


@dataclass(frozen=True)
class LocalBatch(LogBatch):
    """A batch whose task runs in this process, on a copy as Spark would make it."""

    wanted: LogRange
    spark: Any = None  # a SparkSession, for a sink that runs tasks of its own

    @property
    def whole(self) -> LogRange | None:
        """All of it; None: the batch is empty."""
        return self.wanted if self.upto else None

    @property
    def upto(self) -> int:
        """The last change's sequence; 0: the batch is empty."""
        return self.wanted.upto if self.wanted.after < self.wanted.upto else 0

    def run(self, task: Callable[[LogRange], msgspec.Struct | None]) -> Sequence[str]:
        """Run `task` once."""
        if not self.upto:
            return []
        result = pickle.loads(pickle.dumps(task))(self.wanted)
        return [] if result is None else [msgspec.json.encode(result).decode()]

    def changes_of(self, table: Table) -> Any:
        """Only a sink that Spark computes tables for asks for them."""
        raise NotImplementedError(f"the changes of {table.name} as a DataFrame")


class SinkRun:
    """A query of a sink: a log, and batches of it."""

    def __init__(self, trial: SinkTrial, folder: Path, name: str = "log") -> None:
        self._trial = trial
        self._folder = folder
        self.log = Log.open(folder / name)
        self.rows: list[Row] = []  # that are in the log
        self.batches = self.written = self._transactions = 0

    def insert(self, *rows: Row, **fields: Any) -> None:
        """Rows, each in a transaction of its own."""
        for table, number in rows:
            image = msgspec.json.encode({"id": number, "name": f"{table} {number}"})
            key = msgspec.json.encode({"id": number})
            self._append(table, key=key, after=image, **fields)
            self.rows.append((table, number))

    def update_in_part(self, table: str, number: int) -> None:
        """A change of a row that nobody has seen, without one of its columns."""
        key = msgspec.json.encode({"id": number})
        self._append(table, op=Op.UPDATE, key=key, after=key, unchanged=("name",))

    def _append(self, table: str, op: Op = Op.INSERT, **fields: Any) -> None:
        self._transactions += 1
        number, now = self._transactions, time.time_ns() // 1000
        described = Table(_SOURCE, "postgres", "origin", "shop", "public", table, _COLUMNS)
        change = {
            "before": None,
            "before_kind": BeforeKind.NONE,
            "changed": None,
            "unchanged": (),
            "transaction": Transaction(str(number), now, now),
            "ordinal": 1,
            "position": PostgresPosition(number * 16, number * 16 - 8),
            "last": True,
        }
        made = Change(op=op, table=self.log.register(described), **(change | fields))
        self.log.append(_SOURCE, Batch([made], b"resume"))

    def open(self, writer: str = "query-1", *, adopt: bool = False) -> SinkWriter[Any]:
        """The sink as a query that starts opens it."""
        return self._trial.sink.open(writer, adopt=adopt)

    def batch(self, after: int, upto: int) -> Any:
        """Some changes of the log, as the sink takes them."""
        # Not at the top: the tests of sources need no pyarrow.
        from ..pipeline.options import Options  # noqa: PLC0415
        from ..pipeline.reading import DiskLog, PipelineLog  # noqa: PLC0415

        sink, path = self._trial.sink, str(self.log.path)
        if sink.takes is Takes.LOG_RANGE:
            log = PipelineLog(DiskLog(path), Options(path=path))
            wanted = LogRange(log, self.log.epoch, after, upto)
            return LocalBatch(wanted, self._trial.spark)
        reader = self._trial.spark.read.format("headrace").option("path", path)
        if sink.fields:
            reader = reader.option("columns", ",".join(sink.fields))
        return reader.options(startingSequence=after + 1, endingSequence=upto).load()

    def write(self, writer: SinkWriter[Any]) -> int:
        """The next batch, of all that the log has; returns how many changes it had."""
        upto = self.log.latest_sequence
        count = writer.write(self.batch(self.written, upto), self.batches)
        self.written, self.batches = upto, self.batches + 1
        return count

    def expect_stored(self) -> None:
        """Every row has arrived, and none twice."""
        assert sorted(self._trial.stored()) == sorted(self.rows)


class SinkContract:
    """The tests; a subclass gives the fixture `trial`, with a sink that holds nothing yet."""

    # -- settings ---------------------------------------------------------------------------------

    def test_settings_are_frozen_and_can_be_pickled(self, trial: SinkTrial) -> None:
        assert isinstance(trial.sink, Sink)
        assert isinstance(trial.sink.takes, Takes)
        sink: Any = trial.sink
        assert pickle.loads(pickle.dumps(sink)) == sink
        for setting in fields(sink):
            try:
                setattr(sink, setting.name, None)
            except FrozenInstanceError:
                continue
            raise AssertionError(f"{setting.name} can be set")

    def test_importing_it_loads_no_spark(self, trial: SinkTrial) -> None:
        """A config is read, and a status shown, where Spark is not installed."""
        module = type(trial.sink).__module__
        code = f"import sys, {module}; sys.exit('pyspark' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    # -- batches ----------------------------------------------------------------------------------

    def test_every_change_arrives_once(self, trial: SinkTrial, tmp_path: Path) -> None:
        run = SinkRun(trial, tmp_path)
        writer = run.open()
        assert writer.progress() is None
        for first in (1, 11):
            run.insert(*(("users", number) for number in range(first, first + 10)))
            assert run.write(writer) == 10
        run.expect_stored()
        assert _place(writer) == (run.log.epoch, 20)
        assert writer.failed_tables() == []

    def test_a_batch_that_comes_twice_changes_nothing(
        self, trial: SinkTrial, tmp_path: Path
    ) -> None:
        run = SinkRun(trial, tmp_path)
        run.insert(("users", 1), ("users", 2))
        writer = run.open()
        run.write(writer)
        writer.write(run.batch(0, 2), 0)
        run.expect_stored()
        writer.close()
        again = run.open()
        again.write(run.batch(0, 2), 0)
        run.insert(("users", 3))
        run.write(again)
        run.expect_stored()

    def test_an_empty_batch_is_a_batch(self, trial: SinkTrial, tmp_path: Path) -> None:
        run = SinkRun(trial, tmp_path)
        writer = run.open()
        run.insert(("users", 1))
        assert writer.write(run.batch(1, 1), 0) == 0
        run.batches = 1
        run.write(writer)
        run.expect_stored()

    def test_maintenance_changes_nothing(self, trial: SinkTrial, tmp_path: Path) -> None:
        run = SinkRun(trial, tmp_path)
        writer = run.open()
        writer.maintain()
        for number in range(10):
            run.insert(("users", number))
            run.write(writer)
            writer.maintain()
        run.expect_stored()

    def test_a_failed_table_does_not_stop_the_others(
        self, trial: SinkTrial, tmp_path: Path
    ) -> None:
        """A sink of rows cannot apply a change in part; one of events just has another event."""
        run = SinkRun(trial, tmp_path)
        writer = run.open()
        run.insert(("users", 1))
        run.update_in_part("orders", 1)
        run.write(writer)
        run.insert(("users", 2))
        run.write(writer)
        kept = [row for row in trial.stored() if row[0] == "users"]
        assert sorted(kept) == run.rows
        assert {failed.table for failed in writer.failed_tables()} <= {"public.orders"}

    # -- writers and logs -------------------------------------------------------------------------

    def test_another_query_is_refused_unless_it_adopts(
        self, trial: SinkTrial, tmp_path: Path
    ) -> None:
        run = SinkRun(trial, tmp_path)
        run.insert(("users", 1))
        run.write(run.open())
        _expect(SinkFenced, lambda: run.open("query-2"))
        assert _place(run.open("query-2", adopt=True)) == (run.log.epoch, 1)

    def test_without_its_checkpoint_a_query_goes_on_after_the_progress(
        self, trial: SinkTrial, tmp_path: Path
    ) -> None:
        run = SinkRun(trial, tmp_path)
        run.insert(("users", 1), ("users", 2))
        first = run.open()
        run.write(first)
        first.close()
        run.insert(("users", 3))
        run.batches = 0  # as Spark counts them in a new checkpoint
        adopted = run.open("query-2", adopt=True)
        progress = adopted.progress()
        assert progress is not None
        run.written = progress.sequence
        run.write(adopted)
        run.expect_stored()

    def test_a_batch_of_another_log_is_refused_unless_it_is_adopted(
        self, trial: SinkTrial, tmp_path: Path
    ) -> None:
        run = SinkRun(trial, tmp_path)
        run.insert(("users", 1))
        writer = run.open()
        run.write(writer)
        other = SinkRun(trial, tmp_path, "another")
        other.batches = 1
        other.insert(("users", 2), ("users", 3))
        _expect(LogReplaced, lambda: other.write(writer))
        writer.close()
        adopted = other.open("query-2", adopt=True)
        other.batches = 0
        other.write(adopted)
        assert _place(adopted) == (other.log.epoch, 2)
        # What the first log brought may go: a table equals the source of its log.
        assert set(other.rows) <= set(trial.stored())


def _place(writer: SinkWriter[Any]) -> tuple[str, int] | None:
    """How far a sink is; whether it notes the generation is its own choice."""
    progress = writer.progress()
    return None if progress is None else (progress.epoch, progress.sequence)


def _expect(kind: type[HeadraceError], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")
