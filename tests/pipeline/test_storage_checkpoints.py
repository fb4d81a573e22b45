"""Checkpoints that only Spark reaches, by Hadoop's file systems: here the one of a folder."""

import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.errors import CheckpointUnavailable, ConfigError
from headrace.pipeline.hadoop import HadoopFiles
from headrace.pipeline.query import QueryPlan
from headrace.pipeline.run import Pipeline, PipelineInput, announce, plans
from headrace.sinks import Progress, Sink, SinkPhase, SinkStatus
from headrace.sinks import report as reports
from headrace.sinks.report import PipelineFolder
from headrace.sinks.requests import Requests
from headrace.sinks.tables.sink import Tables
from headrace.testing import wait_until
from tests.deltas import stored
from tests.pipeline.sites import Site, await_phase


def queries(
    site: Site,
    address: str,
    *,
    once: bool = True,
    here: str = "pipeline",
    sink: Sink | None = None,
) -> list[QueryPlan]:
    """The queries of a pipeline whose own folder is `here`."""
    feed = PipelineInput(address={"path": str(site.log)}, trigger_seconds=0.1)
    notes = site.folder / here
    notes.mkdir(exist_ok=True)
    found = plans([sink or site.sink()], feed, checkpoints=notes, once=once)
    return [plan.kept_at(address) for plan in found]


def started(site: Site, address: str, **options: Any) -> Pipeline:
    return Pipeline(site.spark, queries(site, address, **options), folder=site.checkpoints)


def carried(site: Site, address: str, **options: Any) -> SinkStatus:
    """How the sink is after a run to its end."""
    with started(site, address, **options) as running:
        running.work(threading.Event(), lambda: None, once=True)
    [status] = running.statuses()
    return status


def storage_of(site: Site) -> tuple[Path, str]:
    folder = site.folder / "storage"
    return folder, folder.as_uri()


def test_another_machine_goes_on_with_the_checkpoint_of_a_storage(site: Site) -> None:
    folder, address = storage_of(site)
    site.fill(20)
    assert carried(site, address).batch == 0
    site.fill(10)
    status = carried(site, address, here="another")
    assert (status.phase, status.batch, status.changes) == (SinkPhase.STOPPED, 1, 10)
    assert site.stored() == list(range(1, 31))
    assert (folder / "lake" / "checkpoint" / "commits" / "1").exists()
    assert not (site.folder / "another" / "lake" / "checkpoint").exists()


def test_what_a_sink_needs_of_the_log_is_known_without_spark(site: Site) -> None:
    _, address = storage_of(site)
    site.fill(20)
    pipeline = PipelineFolder(folder=site.checkpoints, sinks=("lake",), elsewhere=True)
    assert pipeline.committed() == {"lake": None}
    carried(site, address)
    with site.writing() as writer:
        assert pipeline.committed() == {"lake": Progress(writer.log.epoch, 20, "0")}
    announce(queries(site, address), site.checkpoints)
    [status] = reports.read(site.checkpoints).sinks
    assert (status.phase, status.lag) == (SinkPhase.STARTING, None)


def test_a_driver_whose_checkpoint_another_takes_stores_nothing_more(site: Site) -> None:
    _, address = storage_of(site)
    site.fill(5)
    with started(site, address, once=False) as running:
        wait_until(lambda: len(site.stored()) == 5, timeout=120, message="five are stored")
        [plan] = queries(site, address)
        plan.reached_by(site.spark).checkpoint.claim("another")
        site.fill(5)
        halted = await_phase(running, SinkPhase.HALTED)
    assert halted.error == (
        f"another pipeline has taken over the checkpoint of sink lake in {address}"
    )
    assert len(site.stored()) == 5
    assert carried(site, address, here="another").phase is SinkPhase.STOPPED
    assert site.stored() == list(range(1, 11))


def test_a_reset_moves_the_checkpoint_of_a_storage_aside(site: Site) -> None:
    folder, address = storage_of(site)
    lake = Tables(name="lake", path=str(site.folder / "lake"))
    site.fill(5)
    carried(site, address, sink=lake)
    before = (folder / "lake" / "checkpoint" / "writer.json").read_text()
    Requests(site.checkpoints / "lake").reset()
    assert carried(site, address, sink=lake).sequence == 5
    [aside] = (folder / "lake").glob("checkpoint-until-*")
    assert (aside / "writer.json").read_text() == before
    assert (folder / "lake" / "checkpoint" / "writer.json").read_text() != before
    assert stored(site.folder / "lake" / "public" / "users").num_rows == 5


@pytest.mark.parametrize(
    ("address", "lacking"),
    [
        ("s3a://bucket/x", "the package org.apache.hadoop:hadoop-aws:"),
        ("s3://bucket/x", "the package org.apache.hadoop:hadoop-aws:"),
        ("abfss://c@account.example.net/x", "the package org.apache.hadoop:hadoop-azure:"),
        ("cosn://bucket/x", "a Hadoop file system for cosn://"),
    ],
)
def test_a_storage_without_a_file_system_is_refused_before_a_query_starts(
    site: Site, address: str, lacking: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        started(site, address)
    assert f"checkpoint_dir: {address} cannot be used, because this Spark lacks {lacking}" in str(
        raised.value
    )
    assert "\n" not in str(raised.value)


def test_a_storage_that_refuses_is_no_damaged_checkpoint(site: Site, spark: SparkSession) -> None:
    folder, address = storage_of(site)
    folder.write_text("in the way")
    with pytest.raises(CheckpointUnavailable, match=r"cannot be used: \w+Exception: "):
        HadoopFiles.of(spark, f"{address}/lake").write("writer.json", "{}")
    site.fill(1)
    status = carried(site, address)
    assert status.phase is SinkPhase.HALTED  # after three tries: somebody waits for the end
    assert "Exception" in status.error
