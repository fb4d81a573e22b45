"""Killed at random, again and again, Headrace neither loses nor repeats nor halves anything."""

from pathlib import Path
from random import Random

import pytest

from headrace.sources import Phase
from headrace.testing import PostgresDatabase
from tests.faults import workload
from tests.faults.scenario import Scenario
from tests.faults.workload import Workload


@pytest.mark.parametrize("longest", [0.25, 0.8], ids=["in-the-snapshot", "while-streaming"])
def test_killed_seven_times_in_a_row_the_log_still_equals_the_database(
    pg: PostgresDatabase, tmp_path: Path, seed: int, longest: float
) -> None:
    random = Random(seed)
    workload.create(pg, pages=24_000 if longest < 0.5 else 1000)
    with Scenario(pg, tmp_path) as scenario:
        with Workload(pg, seed):
            for _ in range(7):
                captor = scenario.start()
                if longest > 0.5 and random.random() < 0.5:
                    captor.wait_for(Phase.STREAMING)
                captor.outlast(random.uniform(0, longest))
                scenario.kill(captor)
        scenario.finish()
