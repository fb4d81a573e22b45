"""A disk that takes no more: the files sink waits, leaves nothing behind, and then goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.formats.catalogue import Formats
from headrace.pipeline.run import Pipeline, PipelineInput, plans
from headrace.sinks import SinkPhase
from headrace.sinks.files.sink import Files
from headrace.testing import wait_until
from tests.disks import MEGABYTE, small_disk
from tests.sinks.archive import account
from tests.sinks.files_harness import Cabinet
from tests.sinks.lake import put


@pytest.mark.requirement("S1-40")
def test_a_full_disk_is_waited_for_and_no_file_is_cut_short(
    spark: SparkSession, tmp_path: Path
) -> None:
    cabinet = Cabinet(tmp_path)
    long = "x" * 10_000
    for number in range(200):  # about twice what the disk holds
        cabinet.commit(put(cabinet.accounts, **account(number, name=long)))
    (tmp_path / "pipeline").mkdir()
    feed = PipelineInput(address={"path": str(cabinet.log.path)}, max_changes_per_batch=60)
    with small_disk(tmp_path / "files", MEGABYTE) as disk:
        sink = Files(name="drawer", path=str(disk.path), batch_seconds=0.2)
        queries = plans([sink], feed, checkpoints=tmp_path / "pipeline")
        with Pipeline(spark, queries, folder=tmp_path / "pipeline") as running:

            def waits() -> bool:
                [status] = running.statuses()
                assert status.phase is not SinkPhase.HALTED, status
                return status.phase is SinkPhase.WAITING and "No space left on" in status.error

            wait_until(waits, timeout=300, message="the sink waits")
            whole = cabinet.lines()
            assert whole == cabinet.events(formats=Formats())[: len(whole)]
            assert len(whole) == 60  # the batch that the disk had room for
            disk.resize(50 * MEGABYTE)
            wait_until(lambda: len(cabinet.lines()) == 200, timeout=300, message="all is there")
        assert cabinet.lines() == cabinet.events(formats=Formats())
        assert cabinet.left() == []
    cabinet.log.close()
