"""A disk that takes no more halts capture with the reason; with space again, nothing is missing."""

from pathlib import Path

from headrace.errors import LogFailed, LogInUse
from headrace.sources import Phase
from headrace.testing import PostgresDatabase
from tests.disks import MEGABYTE, small_disk
from tests.faults import workload
from tests.faults.captor import HALTED, REFUSED, Report
from tests.faults.scenario import Captor, Scenario
from tests.faults.workload import Workload, write_many


def test_a_full_disk_halts_with_the_reason_and_with_space_again_nothing_is_missing(
    pg: PostgresDatabase, tmp_path: Path, seed: int
) -> None:
    workload.create(pg, pages=300)
    with small_disk(tmp_path / "disk", 12 * MEGABYTE) as disk, Scenario(pg, tmp_path) as scenario:
        scenario.log = disk.path / "log"
        with Workload(pg, seed):
            captor = scenario.start()
            captor.wait_for(Phase.STREAMING, Phase.HALTED)
            fill(pg, captor)
            halted_for_want_of(captor, "No space left on device")
            still_full = scenario.start()
            still_full.wait(HALTED, REFUSED)
            assert "No space left on device" in said(still_full.reports[-1])
            disk.resize(200 * MEGABYTE)
            captor = scenario.start()
            captor.wait_for(Phase.STREAMING)
        scenario.catch_up(captor)
        captor.stop()
        scenario.compare()


def test_a_write_that_the_system_refuses_halts_and_leaves_the_log_whole(
    pg: PostgresDatabase, tmp_path: Path, seed: int
) -> None:
    workload.create(pg, pages=300)
    with Scenario(pg, tmp_path) as scenario:
        with Workload(pg, seed):
            captor = scenario.start(file_limit=8 * MEGABYTE)
            captor.wait_for(Phase.STREAMING, Phase.HALTED)
            fill(pg, captor)
            halted_for_want_of(captor, "File too large")
        scenario.finish()


def test_a_second_process_is_refused_the_log_and_the_first_goes_on(
    pg: PostgresDatabase, tmp_path: Path, seed: int
) -> None:
    workload.create(pg, pages=300)
    with Scenario(pg, tmp_path) as scenario:
        with Workload(pg, seed):
            captor = scenario.start()
            captor.wait_for(Phase.STREAMING)
            second = scenario.start()
            second.wait(REFUSED)
            assert "another process" in second.reports[-1].error
            assert second.reports[-1].hint == LogInUse.hint
        scenario.catch_up(captor)
        captor.stop()
        scenario.compare()


def fill(database: PostgresDatabase, captor: Captor) -> None:
    """Write until the process has halted, and not much longer."""
    with database.connect(autocommit=False) as connection:
        while captor.running:
            write_many(connection, 3000)
            connection.commit()
            captor.linger(0.1)


def said(report: Report) -> str:
    """The reason and the advice."""
    return f"{report.error} {report.hint}"


def halted_for_want_of(captor: Captor, reason: str) -> None:
    """Expect that it has halted since the log was refused a write."""
    captor.wait(HALTED)
    report = captor.reports[-1]
    assert "could not be written" in report.error
    assert reason in report.error
    assert report.hint == LogFailed.hint
