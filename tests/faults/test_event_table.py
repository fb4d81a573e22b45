"""An event table through every kill: nothing is lost, repeated or seen in half."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from headrace.sources import Phase
from headrace.testing import PostgresDatabase, PostgresServer, Setting, wait_until
from tests.conftest import install_of
from tests.faults import workload
from tests.faults.alterations import Alterations
from tests.faults.captor import Kill, Point
from tests.faults.scenario import Captor, Scenario
from tests.faults.workload import Workload


class EventScenario(Scenario):
    """The same, by an event table."""

    def start(self, kill: Kill | None = None, **orders: Any) -> Captor:
        return super().start(kill, type="postgres_events", **orders)

    def catch_up(self, captor: Captor) -> None:
        """A word that is a row: without logical replication no message is told."""
        captor.wait_for(Phase.STREAMING)
        assert self._watcher is not None
        watcher, word = self._watcher, uuid4().hex
        watcher.want(word.encode())
        self.database.execute("INSERT INTO journal VALUES (%s)", (word,))

        def arrived() -> bool:
            assert captor.running, f"it has ended: {captor.words()}"
            return watcher.has(word.encode())

        wait_until(arrived, timeout=120, message=f"the log has caught up: {captor.reports[-1:]}")


@pytest.fixture(scope="module", params=[15, 16], ids=lambda version: f"postgres{version}")
def replica(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server that could not be captured by logical replication."""
    settings: dict[str, Setting] = {"wal_level": "replica"}
    with PostgresServer(install_of(request.param), settings=settings) as server:
        yield server


@contextmanager
def late_commits(database: PostgresDatabase, seed: int) -> Iterator[None]:
    """Writers whose transactions stay open while many others begin and end."""
    ending = threading.Event()

    def write(number: int) -> None:
        dice = Random(f"{seed}-late-{number}")
        with psycopg.connect(database.url) as connection:
            while not ending.is_set():
                amount = dice.randrange(1000)
                connection.execute(
                    "INSERT INTO journal VALUES (%s, %s)", (f"late {number}", amount)
                )
                ending.wait(dice.uniform(0.05, 0.4))
                connection.execute("DELETE FROM journal WHERE amount = %s", (amount + 1,))
                (connection.rollback if dice.random() < 0.2 else connection.commit)()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
@pytest.mark.requirement("S1-30", "S1-32", "S1-48")
def test_killed_again_and_again_the_log_still_equals_the_database(
    replica: PostgresServer, tmp_path: Path, seed: int
) -> None:
    dice = Random(seed)
    with replica.database() as database:
        workload.create(database, pages=2000)
        alterations = Alterations(database, seed)
        with EventScenario(database, tmp_path) as scenario:
            with Workload(database, seed), late_commits(database, seed), alterations:
                for turn in range(4):
                    alterations.wait_for_more(dice.randrange(1, 5))
                    if turn % 2 == 1:
                        points = (Point.BEFORE_APPEND, Point.AFTER_APPEND)
                        scenario.start_to_die(Kill(dice.choice(points), dice.randrange(1, 4)))
                        continue
                    captor = scenario.start()
                    captor.outlast(dice.uniform(0, 1.2))
                    scenario.kill(captor)
            scenario.finish(more=alterations.settle())
            left = "SELECT count(*) FROM headrace.events"
            captor = scenario.start()
            wait_until(lambda: database.execute(left) == [(0,)], timeout=120, message="trimmed")
            captor.stop()


def test_a_server_that_crashes_loses_no_event(tmp_path: Path, seed: int) -> None:
    settings: dict[str, Setting] = {"wal_level": "replica"}
    with (
        PostgresServer(install_of(16), settings=settings) as server,
        server.database() as database,
    ):
        workload.create(database, pages=500)
        with EventScenario(database, tmp_path) as scenario:
            captor = scenario.start()
            for mode in ("immediate", "fast"):
                with Workload(database, seed) as load:
                    captor.wait_for(Phase.STREAMING)
                    load.wait_for_more(20)
                    server.restart("immediate" if mode == "immediate" else "fast")
            scenario.catch_up(captor)
            captor.stop()
            scenario.compare()
