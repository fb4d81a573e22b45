"""Every sink has its own query: it goes on where it was, and its failures are its own."""

import logging
import os
import threading
from pathlib import Path

import msgspec
import pytest

from headrace.errors import ConfigError, LogUnreachable, PipelineError, QueryFailed, WorkerLate
from headrace.log import Holder, Log, LogRetention
from headrace.pipeline import supervise
from headrace.pipeline.checkpoint import in_use
from headrace.pipeline.options import Options
from headrace.pipeline.query import QueryPlan
from headrace.pipeline.run import PipelineInput, SinkStatusLog, alone_in, announce, plans
from headrace.pipeline.source import ChangeStreamReader
from headrace.retry import Backoff
from headrace.serve.retention import sink_holders
from headrace.sinks import FailedTable, SinkPhase, SinkStatus, SinkWriter, report
from headrace.sinks.lake.catalog import SparkCatalog, UnityCatalog
from headrace.sinks.report import PipelineFolder, PipelineReport
from headrace.sinks.tables import Tables
from headrace.testing import wait_until
from tests.pipeline.sites import Site, await_phase


def test_every_sink_gets_every_change_once_however_often_it_runs(site: Site) -> None:
    site.fill(1200)
    site.fill(300, "orders")
    lake, orders = site.sink(), site.sink("orders", tables=("public.orders",))
    first = site.once(lake, orders)
    assert site.stored() == list(range(1, 1501))
    assert site.stored("orders") == list(range(1201, 1501))
    assert first["lake"].phase is SinkPhase.STOPPED
    assert (first["lake"].changes, first["lake"].sequence, first["lake"].lag) == (1500, 1500, 0)
    again = site.once(lake, orders)
    assert [status.changes for status in again.values()] == [0, 0]
    assert [status.sequence for status in again.values()] == [1500, 1500]
    assert len(site.stored()) == 1500
    written = msgspec.json.decode(
        (site.checkpoints / "status.json").read_bytes(), type=PipelineReport
    )
    assert written.sinks == list(again.values())


def test_the_lag_of_a_sink_is_known_whatever_it_does(site: Site) -> None:
    site.fill(700)
    site.fault("SinkUnavailable")
    with site.pipeline(once=False) as running:
        assert await_phase(running, SinkPhase.WAITING).lag == 700, "it has never stored a batch"
        site.fill(50)
        wait_until(lambda: running.statuses()[0].lag == 750, timeout=120)
        site.fault(None)
        wait_until(lambda: running.statuses()[0].lag == 0, timeout=120)
    site.fill(300)
    site.fault("SinkFenced")
    lags = set[int | None]()
    with site.pipeline(once=False) as running:
        while (status := running.statuses()[0]).phase is not SinkPhase.HALTED:
            lags.add(status.lag)
        assert status.lag == 300
    assert lags <= {None, 300}, "it is 300 behind from its first moment on"


def test_the_lag_of_a_sink_is_reported_before_spark_has_started(site: Site) -> None:
    site.fill(500)
    site.once()
    site.fill(40)
    feed = PipelineInput(address={"path": str(site.log)})
    queries = plans([site.sink(), site.sink("new")], feed, checkpoints=site.checkpoints)
    announce(queries, site.checkpoints)
    known = report.read(site.checkpoints).sinks
    assert [(each.sink, each.sequence, each.lag) for each in known] == [
        ("lake", 500, 40),
        ("new", 0, 540),
    ]
    damage(site, "commits cut")
    announce(queries, site.checkpoints)
    assert report.read(site.checkpoints).sinks[0].lag is None


def test_a_query_that_is_behind_does_not_wait_between_batches(site: Site) -> None:
    for _ in range(4):
        site.fill(10)
    with site.pipeline(once=False, most=10, seconds=3600.0) as running:
        wait_until(lambda: running.statuses()[0].batch == 3, timeout=120, message="four batches")
        assert len(site.stored()) == 40


def test_a_query_that_has_all_looks_again_after_its_time(site: Site) -> None:
    for _ in range(3):
        site.fill(1)
    looks = ChangeStreamReader(Options(path=str(site.log), most=2, pause=3_600_000))
    limit, start = looks.getDefaultReadLimit(), looks.initialOffset()
    first = looks.latestOffset(start, limit)
    second = looks.latestOffset(first, limit)
    assert [first["sequence"], second["sequence"]] == [2, 3]
    site.fill(1)
    assert looks.latestOffset(second, limit) == second
    looks._due = 0.0
    assert looks.latestOffset(second, limit)["sequence"] == 4


def test_a_sink_that_fails_stops_no_other(site: Site) -> None:
    site.fill(10)
    site.fault("RuntimeError", sink="broken")
    ended = site.once(site.sink("broken"), site.sink())
    assert ended["broken"].phase is SinkPhase.HALTED
    assert ended["broken"].error == "the query ended with RuntimeError"
    assert "spark.log" in ended["broken"].hint
    assert ended["lake"].phase is SinkPhase.STOPPED
    assert len(site.stored()) == 10
    site.fault(None, sink="broken")
    assert site.once(site.sink("broken"))["broken"].phase is SinkPhase.STOPPED
    assert len(site.stored("broken")) == 10


@pytest.mark.parametrize("fault", ["SinkUnavailable", "os", "RuntimeError"])
def test_what_passes_is_tried_again_and_told_meanwhile(site: Site, fault: str) -> None:
    site.fill(10)
    site.fault(fault)
    with site.pipeline(once=False) as running:
        waiting = await_phase(running, SinkPhase.WAITING)
        assert waiting.error
        site.fault(None)
        streaming = await_phase(running, SinkPhase.STREAMING)
        assert (streaming.error, streaming.hint) == ("", "")
        wait_until(lambda: len(site.stored()) == 10, message="it is stored")
    assert running.statuses()[0].phase is SinkPhase.STOPPED
    assert site.stored() == list(range(1, 11))


def test_what_passes_does_not_count_toward_the_ten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "BACKOFF", Backoff(0.0, 0.0))
    [plan] = plans([site.sink()], PipelineInput(address={}), checkpoints=site.checkpoints)
    sink = supervise.Supervised(plan, site.spark)
    failed = [sink._failed(WorkerLate("late")) for _ in range(30)]
    failed += [sink._failed(QueryFailed("odd")) for _ in range(10)]
    assert failed == [False] * 39 + [True]


def test_a_writer_is_closed_also_if_its_query_cannot_start(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(plan: QueryPlan, writer: SinkWriter[object]) -> None:
        raise LogUnreachable("the server does not answer")

    closed = threading.Event()
    monkeypatch.setattr(QueryPlan, "starting", away)
    monkeypatch.setattr(SinkWriter, "close", lambda writer: closed.set())
    [plan] = plans([site.sink()], PipelineInput(address={}), checkpoints=site.checkpoints)
    assert not supervise.Supervised(plan, site.spark)._tried()
    assert closed.is_set(), "what it runs beside its batches would go on for good"


def test_what_a_person_must_mend_halts_at_once(site: Site) -> None:
    site.fill(10)
    site.fault("SinkFenced")
    with site.pipeline(once=False) as running:
        halted = await_phase(running, SinkPhase.HALTED)
    assert halted.error == "SinkFenced was asked for"
    assert "--adopt" in halted.hint
    assert running.halted == [halted]


def test_an_idle_query_is_not_mistaken_for_one_that_starts(site: Site) -> None:
    site.fill(10)
    site.once()
    with site.pipeline(once=False) as running:
        status = await_phase(running, SinkPhase.STREAMING)
        assert (status.batch, status.sequence) == (-1, 10)


# --- maintenance ---------------------------------------------------------------------------------


def test_a_sink_is_maintained_after_each_batch(site: Site) -> None:
    for _ in range(3):
        site.fill(10)
    site.once(most=10)
    assert (site.folder / "lake" / "maintained").read_text() == "maintained\n" * 3


def test_a_failure_of_maintenance_neither_repeats_nor_stops_the_batches(site: Site) -> None:
    for _ in range(2):
        site.fill(10)
    site.fault("RuntimeError", where="maintain")
    assert site.once(most=10)["lake"].phase is SinkPhase.STOPPED
    assert site.stored() == list(range(1, 21))


def test_a_passing_failure_of_maintenance_is_only_logged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.fill(10)
    site.fault("SinkUnavailable", where="maintain")
    with caplog.at_level(logging.WARNING, logger="headrace"):
        assert site.once()["lake"].phase is SinkPhase.STOPPED
    assert "sink=lake maintained=no error=SinkUnavailable was asked for" in caplog.messages


# --- checkpoints ---------------------------------------------------------------------------------


def damage(site: Site, how: str) -> None:
    """Break what Spark keeps of a query."""
    folder = site.checkpoints / "lake" / "checkpoint"
    if how == "metadata gone":
        (folder / "metadata").unlink()
        return
    file = {"offsets": folder / "offsets" / "0", "commits": folder / "commits" / "0"}.get(
        how.partition(" ")[0], folder / "writer.json"
    )
    file.write_text(file.read_text()[:5])


@pytest.mark.parametrize("how", ["offsets cut", "commits cut", "metadata gone", "writer cut"])
def test_a_damaged_checkpoint_halts_its_sink_and_is_replaced_by_adopting(
    site: Site, how: str
) -> None:
    site.fill(10)
    site.once()
    damage(site, how)
    site.fill(5)
    halted = site.once()["lake"]
    assert halted.phase is SinkPhase.HALTED
    assert "cannot be read" in halted.error
    assert "nothing that the sink has stored is lost" in halted.error
    assert "headrace pipeline --adopt lake" in halted.hint
    assert site.stored() == list(range(1, 11))
    assert site.once(adopt=["lake"])["lake"].phase is SinkPhase.STOPPED
    assert site.stored() == list(range(1, 16))
    site.fill(5)
    site.once()
    assert site.stored() == list(range(1, 21))
    assert len(list((site.checkpoints / "lake").glob("checkpoint-until-*"))) == 1


def test_a_checkpoint_that_was_moved_away_needs_adopting(site: Site) -> None:
    site.fill(10)
    site.once()
    (site.checkpoints / "lake").rename(site.folder / "away")
    fenced = site.once()["lake"]
    assert fenced.phase is SinkPhase.HALTED
    assert "writes to" in fenced.error
    site.fill(5)
    assert site.once(adopt=["lake"])["lake"].phase is SinkPhase.STOPPED
    assert site.stored() == list(range(1, 16))


def test_only_sinks_of_the_config_can_be_adopted(site: Site) -> None:
    with pytest.raises(ConfigError, match="no sink called lkae; there are: lake"):
        site.pipeline(adopt=["lkae"])


def test_two_pipelines_never_share_their_checkpoints(tmp_path: Path) -> None:
    refused = pytest.raises(PipelineError, match="another pipeline")
    with alone_in(tmp_path), refused, alone_in(tmp_path):
        pass
    with alone_in(tmp_path):
        assert in_use(tmp_path)
    assert not in_use(tmp_path)


def test_a_pipeline_that_is_about_to_end_is_waited_for_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entered, stopping = threading.Event(), threading.Event()

    def wait() -> None:
        with alone_in(tmp_path, stopping=stopping, seconds=600):
            entered.set()

    second = threading.Thread(target=wait)
    with alone_in(tmp_path):
        second.start()
        wait_until(lambda: caplog.messages, timeout=120)
        assert not entered.wait(0.5)
    second.join(120)
    assert entered.is_set()
    [line] = caplog.messages
    assert line.startswith(f"waiting until another pipeline (process {os.getpid()}) ends")
    stopping.set()
    refused = pytest.raises(PipelineError, match=f"process {os.getpid()}")
    with alone_in(tmp_path), refused, alone_in(tmp_path, stopping=stopping, seconds=600):
        pass


# --- the log -------------------------------------------------------------------------------------


def test_changes_removed_before_they_were_read_halt_the_sink(site: Site) -> None:
    site.fill(10)
    site.once()
    site.fill(10)
    with Log.open(site.log) as log:
        log.trim(15)
    halted = site.once()["lake"]
    assert halted.phase is SinkPhase.HALTED
    assert "changes 11 to 14 are no longer in the log" in halted.error
    assert "removed by trim at" in halted.error
    assert "headrace pipeline --adopt lake" in halted.hint
    assert site.stored() == list(range(1, 11))
    assert site.once(adopt=["lake"])["lake"].phase is SinkPhase.STOPPED
    assert site.stored() == [*range(1, 11), *range(15, 21)]


@pytest.mark.requirement("P-13")
def test_trimming_keeps_what_a_sink_needs_while_nothing_runs(site: Site) -> None:
    site.fill(10)
    sinks = ("lake", "other")
    folder = PipelineFolder(folder=site.checkpoints, sinks=sinks)
    with Log.open(site.log) as log:
        retention = LogRetention(log, sinks=lambda: sink_holders(log, folder))
        # None of them has stored anything: they need all of it.
        assert retention.trim(8).removed == 0
    site.once(site.sink("lake"), site.sink("other"))
    site.fill(10)
    site.once(site.sink("other"))
    with Log.open(site.log) as log:
        retention = LogRetention(log, sinks=lambda: sink_holders(log, folder))
        assert sink_holders(log, folder) == [Holder("sink:lake", 10), Holder("sink:other", 20)]
        trimmed = retention.trim(18)
        assert (trimmed.first_sequence, trimmed.held_by) == (11, "sink:lake")
    site.once(site.sink("lake"))
    assert site.stored() == list(range(1, 21))


def test_another_log_halts_the_sink_until_it_is_adopted(site: Site) -> None:
    site.fill(10)
    site.once()
    site.log.rename(site.folder / "old")
    site.fill(20)
    assert site.once()["lake"].phase is SinkPhase.HALTED
    (site.checkpoints / "lake" / "checkpoint" / "offsets" / "0").unlink()
    halted = site.once()["lake"]
    assert halted.phase is SinkPhase.HALTED
    assert site.once(adopt=["lake"])["lake"].phase is SinkPhase.STOPPED
    assert len(site.stored()) == 30


def test_a_log_that_is_not_there_yet_is_waited_for(site: Site) -> None:
    with site.pipeline(once=False) as running:
        waiting = await_phase(running, SinkPhase.WAITING)
        assert "there is no log" in waiting.error
        site.fill(10)
        await_phase(running, SinkPhase.STREAMING)
        wait_until(lambda: len(site.stored()) == 10, timeout=120, message="it is stored")


# --- what is told --------------------------------------------------------------------------------


def test_a_sink_is_told_of_once_a_phase(caplog: pytest.LogCaptureFixture) -> None:
    log = SinkStatusLog()
    streaming = SinkStatus(sink="lake", phase=SinkPhase.STREAMING, sequence=7)
    failed = (FailedTable("public.users", 8, "its key went", "copy anew"),)
    halted = SinkStatus(
        sink="lake", phase=SinkPhase.HALTED, sequence=7, error="gone", hint="mend it"
    )
    with caplog.at_level(logging.INFO, logger="headrace"):
        log.report([streaming])
        log.report([msgspec.structs.replace(streaming, batch=2)])
        log.report([msgspec.structs.replace(streaming, failed_tables=failed)])
        log.report([msgspec.structs.replace(streaming, failed_tables=failed)])
        log.report([SinkStatus(sink="lake", phase=SinkPhase.WAITING, error="away")])
        log.report([halted])
        log.report([halted])
    assert caplog.messages == [
        "sink=lake phase=streaming sequence=7",
        "sink=lake table=public.users failed=its key went",
        "sink=lake phase=waiting sequence=0",
        "sink=lake is tried again; error=away",
        "sink=lake phase=halted sequence=7",
        "sink=lake halted, the others go on; error=gone; hint=mend it",
    ]


def test_a_failed_table_shows_with_its_sink(site: Site) -> None:
    site.fill(10)
    (site.folder / "lake").mkdir()
    (site.folder / "lake" / "failed").write_text("public.users")
    [failed] = site.once()["lake"].failed_tables
    assert (failed.table, failed.reason) == ("public.users", "the file names it")


def test_tables_are_found_in_the_catalog_and_one_that_is_away_shows_with_its_sink(
    site: Site,
) -> None:
    site.fill(10)
    here, away = SparkCatalog(database="shop"), UnityCatalog(url="http://127.0.0.1:1", catalog="m")
    found = site.once(
        Tables(name="lake", path=str(site.folder / "lake"), catalog=here),
        Tables(name="away", path=str(site.folder / "away"), catalog=away),
    )
    assert [status.changes for status in found.values()] == [10, 10]
    assert found["lake"].catalog == ""
    assert found["away"].catalog.startswith("public.users is not in the catalog as it is now: ")
    try:
        assert site.spark.table("shop.users").count() == 10
    finally:
        site.spark.sql("DROP DATABASE shop CASCADE")
