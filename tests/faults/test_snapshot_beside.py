"""Tables that are read again under load, and killed meanwhile: the log equals the database."""

from pathlib import Path
from random import Random

import pytest

from headrace.sources import Phase
from headrace.testing import wait_until
from tests.conftest import VERSIONS, Servers
from tests.faults import workload
from tests.faults.scenario import Scenario
from tests.faults.workload import TABLES, Workload


@pytest.mark.requirement("P-03")
@pytest.mark.parametrize("version", VERSIONS)
def test_killed_while_tables_are_read_again_beside_the_stream_nothing_is_lost(
    servers: Servers, tmp_path: Path, seed: int, version: int
) -> None:
    random = Random(seed)
    with servers[version].database() as database:
        workload.create(database, pages=4000)
        with Scenario(database, tmp_path) as scenario:
            captor = scenario.start()
            captor.wait_for_snapshots()
            captor.stop()
            with Workload(database, seed) as load:
                for _ in range(4):
                    tables = tuple(random.sample(TABLES, random.randrange(1, 4)))
                    captor = scenario.start(copy_again=tables)
                    captor.wait_for(Phase.STREAMING)
                    captor.outlast(random.uniform(0, 2.0))
                    scenario.kill(captor)
                captor = scenario.start(copy_again=("pages", "journal", "documents"))
                wait_until(lambda: any(report.copying for report in captor.reports))
                load.wait_for_more(20)
            scenario.catch_up(captor)
            captor.stop()
            scenario.compare()
