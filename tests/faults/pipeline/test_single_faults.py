"""One thing goes wrong: the outcome is clear, the other tables go on, and nothing is lost."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.change.event import Op
from headrace.errors import SinkFenced
from headrace.pipeline import supervise
from headrace.pipeline.run import Pipeline, PipelineInput, plans
from headrace.retry import Backoff
from headrace.sinks import FailedTable, Sink, SinkPhase, SinkStatus, Takes
from headrace.sinks.history import History
from headrace.sinks.tables.sink import Tables, TablesWriter
from headrace.testing import wait_until
from tests.disks import MEGABYTE, small_disk
from tests.faults.pipeline.runner import AUDIT, LAKE
from tests.faults.pipeline.trade import Trade
from tests.sinks.lake import Lake, put, remove, schema

pytestmark = pytest.mark.slow


class Site:
    """A log that changes, and a pipeline in the test run's own Spark."""

    def __init__(self, spark: SparkSession, folder: Path, seed: int) -> None:
        self.trade = Trade(folder, seed)
        self._spark = spark
        self._folder = folder

    def pipeline(self, *, once: bool, adopt: bool = False, who: str = "pipeline") -> Pipeline:
        """A pipeline to enter; each `who` has checkpoints of its own."""
        checkpoints = self._folder / who
        checkpoints.mkdir(exist_ok=True)
        feed = PipelineInput(address={"path": str(self._folder / "log")}, trigger_seconds=0.1)
        sinks: list[Sink] = [
            Tables(name=LAKE, path=str(self._folder / LAKE)),
            History(name=AUDIT, path=str(self._folder / AUDIT)),
        ]
        adopted = (LAKE, AUDIT) if adopt else ()
        queries = plans(sinks, feed, checkpoints=checkpoints, once=once, adopt=adopted)
        # Names of queries are known to their session, and two pipelines have the same.
        return Pipeline(self._spark.newSession(), queries, folder=checkpoints)

    def once(self, *, adopt: bool = False, who: str = "pipeline") -> dict[str, SinkStatus]:
        """Carry all that is in the log."""
        with self.pipeline(once=True, adopt=adopt, who=who) as running:
            running.work(threading.Event(), lambda: None, once=True)
        return {status.sink: status for status in running.statuses()}

    @contextmanager
    def streaming(self) -> Iterator[Pipeline]:
        """A pipeline that goes on, with all that is in the log so far."""
        with self.pipeline(once=False) as running:
            self.await_all(running)
            yield running

    def await_all(self, running: Pipeline) -> SinkStatus:
        """The tables' status when everything in the log has arrived."""
        latest = self.trade.log.latest_sequence

        def arrived() -> bool:
            return all(status.sequence >= latest for status in running.statuses())

        try:
            wait_until(arrived, timeout=300)
        except TimeoutError:
            pytest.fail(f"{latest} did not arrive: {running.statuses()}")
        return running.statuses()[0]

    def expect_equal(self, *, but: str = "") -> None:
        """Every table, or all but one, equals its source."""
        for name in self.trade.names:
            if name != but:
                assert self.trade.rows(name) == self.trade.expected(name), name

    def home(self, name: str) -> Path:
        """A table's folder."""
        return self.trade.path / "public" / name


@pytest.fixture
def site(
    spark: SparkSession, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.setattr(supervise, "BACKOFF", Backoff(0.1, 60.0))
    monkeypatch.setattr(supervise, "TRIES_ONCE", 20)  # a worker of a busy machine may be too slow
    site = Site(spark, tmp_path, seed)
    yield site
    site.trade.log.close()


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(spark, tmp_path)
    yield made
    made.log.close()


def order(number: int) -> dict[str, Any]:
    return {"id": number, "status": "new", "amount": "1.00", "note": f"n{number}"}


def the_one(troubled: tuple[FailedTable, ...]) -> FailedTable:
    (trouble,) = troubled
    return trouble


# --- twice, or by two ----------------------------------------------------------------------------


@pytest.mark.requirement("S2-21")
def test_a_batch_that_comes_again_in_other_partitions_changes_nothing(lake: Lake) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(*(put(orders, **order(n)) for n in range(20)), put(customers, **order(1)))
    lake.commit(put(orders, Op.UPDATE, was={"id": 3}, **order(33)), remove(orders, id=4))
    lake.write()
    versions = lake.delta().version(), lake.delta("customers").version()
    log = lake.spark.read.format("headrace").option("path", str(lake.log.path))
    read = log.option("endingSequence", lake.written).load().select(*lake.sink.fields)
    ranges = lake.changes(0, lake.written)
    ways = (
        (read.repartition(5), Takes.ROWS),
        (read.coalesce(1), Takes.ROWS),
        (ranges, Takes.LOG_RANGE),
    )
    for again, takes in ways:
        for _ in range(2):
            TablesWriter(lake.sink, "query-1", adopt=False, takes=takes).write(again, 0)
    assert (lake.delta().version(), lake.delta("customers").version()) == versions
    assert lake.rows() == lake.expected()
    assert lake.rows("customers") == lake.expected("customers")


def test_a_second_pipeline_is_refused_and_the_first_one_once_it_has_taken_over(site: Site) -> None:
    site.once()
    site.trade.go_on()
    for refused in site.once(who="second").values():
        assert refused.phase is SinkPhase.HALTED
        assert "another pipeline writes" in refused.error
        assert refused.hint == SinkFenced.hint
    assert [each.phase for each in site.once(who="second", adopt=True).values()] == [
        SinkPhase.STOPPED
    ] * 2
    site.trade.go_on()
    for refused in site.once().values():
        assert refused.phase is SinkPhase.HALTED
        assert "another pipeline writes" in refused.error
    site.once(who="second")
    site.trade.check_end()


def test_a_pipeline_at_work_stops_once_another_has_taken_over(site: Site) -> None:
    with site.streaming() as first:
        with site.pipeline(once=False, adopt=True, who="second") as second:
            site.await_all(second)
            site.trade.go_on()
            wait_until(lambda: len(first.halted) == 2, timeout=300, message="the first stops")
            for halted in first.halted:
                assert "another pipeline" in halted.error
                assert "--adopt" in halted.hint
            site.await_all(second)
        assert not second.halted
    site.trade.check_end()


def test_who_was_taken_over_from_no_longer_writes_tables_that_nobody_else_touched(
    lake: Lake,
) -> None:
    orders, customers = lake.table("orders"), lake.table("customers")
    lake.commit(put(orders, **order(1)), put(customers, **order(1)))
    lake.write()
    first = lake.writer
    second = lake.open("query-2", adopt=True)
    lake.commit(put(orders, **order(2)))
    begun = lake.written
    second.write(lake.changes(begun, begun + 1), 0)
    lake.commit(put(customers, **order(2)))
    with pytest.raises(SinkFenced, match="another pipeline has"):
        first.write(lake.changes(begun + 1, begun + 2), 1)
    second.write(lake.changes(begun + 1, begun + 2), 1)
    assert lake.rows("customers") == lake.expected("customers")


# --- what was damaged ----------------------------------------------------------------------------


def test_a_corrupt_checkpoint_halts_and_adopting_goes_on_where_the_sinks_are(site: Site) -> None:
    site.once()
    site.trade.go_on()
    site.once()
    for sink in (LAKE, AUDIT):
        folder = site.trade.folder / "pipeline" / sink / "checkpoint" / "offsets"
        newest = max(folder.glob("[0-9]*"), key=lambda path: int(path.name))
        newest.write_text(newest.read_text()[:9])
    site.trade.go_on()
    for halted in site.once().values():
        assert halted.phase is SinkPhase.HALTED
        assert "cannot be read; nothing that the sink has stored is lost" in halted.error
        assert f"headrace pipeline --adopt {halted.sink}" in halted.hint
    site.once(adopt=True)
    site.trade.check_end()


def test_a_table_deleted_by_hand_stops_alone_and_a_full_copy_brings_it_back(site: Site) -> None:
    with site.streaming() as running:
        shutil.rmtree(site.home("returns"))
        site.trade.go_on()
        trouble = the_one(site.await_all(running).failed_tables)
        assert trouble.table == "public.returns"
        assert "is gone" in trouble.reason
        assert "headrace snapshot" in trouble.hint
        site.expect_equal(but="returns")
        site.trade.copy_again("returns")
        site.trade.go_on()
        assert not site.await_all(running).failed_tables
    site.trade.check_end()


def test_a_damaged_delta_log_stops_its_table_alone(site: Site) -> None:
    site.once()
    first = site.home("orders") / "_delta_log" / "00000000000000000000.json"
    first.write_bytes(b"\xff" + first.read_bytes()[:40])
    site.trade.go_on()
    trouble = the_one(site.once()[LAKE].failed_tables)
    assert (trouble.table, "is damaged" in trouble.reason) == ("public.orders", True)
    assert "remove the folder" in trouble.hint
    site.expect_equal(but="orders")
    shutil.rmtree(site.home("orders"))
    site.trade.copy_again("orders")
    assert not site.once()[LAKE].failed_tables
    site.trade.check_end()


def test_when_all_tables_are_gone_none_is_begun_in_the_middle(site: Site) -> None:
    site.once()
    shutil.rmtree(site.trade.path)
    site.trade.go_on()
    halted = site.once()[LAKE]
    assert halted.phase is SinkPhase.HALTED
    assert "are gone, and 1 batches with them" in halted.error
    assert not list(site.trade.path.rglob("*.parquet"))
    site.once(adopt=True)
    site.trade.check_end()


def test_a_column_that_goes_and_comes_back_has_lost_its_values_also_after_a_restart(
    lake: Lake,
) -> None:
    orders = lake.table("orders")
    lake.commit(put(orders, **order(1)))
    lake.write()
    lake.open()
    lake.commit(schema(lake.table("orders", orders.columns[:3])))
    lake.commit(schema(lake.table("orders", orders.columns)))
    lake.write()
    assert lake.writer.failed_tables() == []
    assert lake.rows() == lake.expected()
    assert [row["note"] for row in lake.rows()] == [None]


# --- storage -------------------------------------------------------------------------------------


def test_storage_that_fails_for_a_while_is_tried_until_it_answers(site: Site) -> None:
    with site.streaming() as running:
        home = site.home("orders")
        away = home.with_name("away")
        home.rename(away)
        home.write_text("not a folder")
        site.trade.go_on()
        wait_until(
            lambda: running.statuses()[0].phase is SinkPhase.WAITING,
            timeout=300,
            message="it waits",
        )
        home.unlink()
        away.rename(home)
        assert not site.await_all(running).failed_tables
    site.trade.check_end()


def test_a_full_disk_is_tried_until_there_is_space(site: Site) -> None:
    with small_disk(site.trade.path, MEGABYTE) as disk, site.streaming() as running:
        site.trade.fill("orders", 1)
        site.await_all(running)
        block = disk.path / "block"
        block.write_bytes(bytes(shutil.disk_usage(disk.path).free))
        site.trade.go_on()
        wait_until(
            lambda: running.statuses()[0].phase is SinkPhase.WAITING,
            timeout=300,
            message="it waits",
        )
        block.unlink()
        assert not site.await_all(running).failed_tables
        site.trade.check_end()
