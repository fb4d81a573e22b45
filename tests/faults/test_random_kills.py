"""Whatever happens at random, again and again: nothing is lost, repeated or seen in half."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from headrace.sources import Phase
from headrace.testing import PostgresDatabase, PostgresServer, wait_until
from tests.conftest import Servers
from tests.faults import workload
from tests.faults.captor import Kill, Point
from tests.faults.scenario import Scenario
from tests.faults.workload import Workload


@pytest.mark.requirement("S0-34", "S1-48")
@pytest.mark.parametrize(
    ("version", "pages", "longest"),
    [(18, 13_500, 0.25), (16, 1000, 0.8)],
    ids=["in-the-snapshot", "while-streaming"],
)
def test_killed_six_times_in_a_row_the_log_still_equals_the_database(
    servers: Servers, tmp_path: Path, seed: int, version: int, pages: int, longest: float
) -> None:
    random = Random(seed)
    with servers[version].database() as database:
        workload.create(database, pages=pages)
        with Scenario(database, tmp_path) as scenario:
            with Workload(database, seed):
                for _ in range(6):
                    captor = scenario.start()
                    captor.outlast(random.uniform(0, longest))
                    scenario.kill(captor)
            scenario.finish()


def test_the_process_of_a_source_killed_alone_is_started_again_and_nothing_is_lost(
    pg: PostgresDatabase, tmp_path: Path, seed: int
) -> None:
    workload.create(pg, pages=6000)
    with Scenario(pg, tmp_path) as scenario:
        with Workload(pg, seed) as load:
            captor = scenario.start()
            for phase in (Phase.SNAPSHOT, Phase.STREAMING, Phase.STREAMING):
                captor.wait_for(phase)
                load.wait_for_more(10)
                said = len(captor.reports)
                (source,) = captor.started()
                source.kill()
                captor.wait_for(Phase.WAITING, after=said)
        scenario.catch_up(captor)
        captor.stop()
        scenario.compare()


class Faults:
    """Everything that may happen to a scenario, by the dice."""

    def __init__(self, scenario: Scenario, server: PostgresServer, random: Random) -> None:
        self._scenario = scenario
        self._server = server
        self._random = random

    def next(self) -> None:
        """Something goes wrong."""
        faults: list[Callable[[], None]] = [
            self._kill,
            self._kill_source,
            self._die,
            self._die_while_copying_again,
            self._restart_server,
            self._terminate_sessions,
        ]
        self._random.choice(faults)()

    def _kill(self) -> None:
        captor = self._scenario.start()
        captor.outlast(self._random.uniform(0, 0.6))
        self._scenario.kill(captor)

    def _kill_source(self) -> None:
        captor = self._scenario.start()
        for source in wait_until(captor.started, message="the source has a process"):
            source.kill()
        captor.outlast(self._random.uniform(0, 0.8))
        self._scenario.kill(captor)

    def _die(self) -> None:
        self._scenario.start_to_die(
            Kill(self._random.choice((Point.BEFORE_APPEND, Point.AFTER_APPEND)), self._times())
        )

    def _die_while_copying_again(self) -> None:
        tables = self._random.choice(((), ("accounts", "journal"), ("pages",)))
        kill = Kill(self._random.choice((Point.FIRST_BATCH, Point.IN_SNAPSHOT)), 1)
        self._scenario.start_to_die(kill, copy_again=tables)

    def _restart_server(self) -> None:
        captor = self._scenario.start()
        captor.outlast(self._random.uniform(0, 0.4))
        self._server.restart(self._random.choice(("fast", "immediate")))
        captor.outlast(self._random.uniform(0, 0.4))
        self._scenario.kill(captor)

    def _terminate_sessions(self) -> None:
        captor = self._scenario.start()
        captor.wait_for(Phase.SNAPSHOT, Phase.STREAMING, after=0)
        self._scenario.database.execute(
            """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
               WHERE application_name LIKE 'headrace%' AND datname = current_database()"""
        )
        captor.outlast(self._random.uniform(0, 0.4))
        self._scenario.kill(captor)

    def _times(self) -> int:
        return self._random.randrange(1, 6)


@pytest.mark.requirement("S0-34", "S1-48")
def test_after_any_sequence_of_faults_the_log_equals_the_database(
    own_server: PostgresServer, tmp_path: Path, seed: int
) -> None:
    with own_server.database() as database:
        workload.create(database, pages=4000)
        with Scenario(database, tmp_path) as scenario:
            faults = Faults(scenario, own_server, Random(seed))
            with Workload(database, seed):
                for _ in range(6):
                    faults.next()
            scenario.finish()
