"""Whatever happens to PostgreSQL, the log equals it afterwards, or Headrace says why it cannot."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.sources import Phase
from headrace.testing import PostgresDatabase, PostgresServer, wait_until
from tests.faults import workload
from tests.faults.captor import HALTED, SOURCE
from tests.faults.scenario import Scenario
from tests.faults.workload import Workload

SLOT = f"headrace_{SOURCE}"


def crash(server: PostgresServer, database: PostgresDatabase) -> None:
    """Kill the process that streams: the server then ends every session and recovers."""
    (pid,) = wait_until(lambda: walsender(database), message="somebody streams")
    os.kill(pid, signal.SIGKILL)


def kill(server: PostgresServer, database: PostgresDatabase) -> None:
    """Kill every process of the server, and start it again."""
    server.kill()
    server.start()


RESTARTS: dict[str, Callable[[PostgresServer, PostgresDatabase], None]] = {
    "in-order": lambda server, _: server.restart("fast"),
    "as-if-it-crashed": lambda server, _: server.restart("immediate"),
    "kill-9": kill,
    "kill-9-of-one-process": crash,
}


@pytest.mark.parametrize("restart", RESTARTS.values(), ids=RESTARTS)
def test_a_server_that_restarts_under_load_loses_nothing(
    own_server: PostgresServer,
    tmp_path: Path,
    seed: int,
    restart: Callable[[PostgresServer, PostgresDatabase], None],
) -> None:
    with own_server.database() as database:
        workload.create(database, pages=6000)
        with Scenario(database, tmp_path) as scenario:
            with Workload(database, seed) as load:
                captor = scenario.start()
                captor.wait_for(Phase.SNAPSHOT, after=0)
                for _ in range(2):
                    said = len(captor.reports)
                    restart(own_server, database)
                    captor.wait_for(Phase.WAITING, after=said)
                    load.wait_for_more(50)
                    captor.wait_for(Phase.STREAMING)
            scenario.catch_up(captor)
            captor.stop()
            scenario.compare()


def test_a_terminated_walsender_loses_nothing(
    pg: PostgresDatabase, tmp_path: Path, seed: int
) -> None:
    workload.create(pg, pages=300)
    with Scenario(pg, tmp_path) as scenario:
        captor = scenario.start()
        captor.wait_for(Phase.STREAMING)
        with Workload(pg, seed) as load:
            for _ in range(3):
                captor.wait_for(Phase.STREAMING)
                load.wait_for_more(30)
                said = len(captor.reports)
                (pid,) = walsender(pg)
                pg.execute("SELECT pg_terminate_backend(%s)", (pid,))
                captor.wait_for(Phase.WAITING, after=said)
        scenario.catch_up(captor)
        captor.stop()
        scenario.compare(surprises=False)


def test_sessions_terminated_during_the_snapshot_lose_nothing(
    pg: PostgresDatabase, tmp_path: Path, seed: int
) -> None:
    workload.create(pg, pages=16_000)
    with Scenario(pg, tmp_path) as scenario:
        with Workload(pg, seed):
            captor, said = scenario.start(), 0
            for _ in range(2):
                captor.wait_for(Phase.SNAPSHOT, Phase.STREAMING, after=said)
                scenario.wait_for_more(1000)
                said = len(captor.reports)
                pg.execute(
                    """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                       WHERE application_name LIKE 'headrace%' AND datname = current_database()"""
                )
                captor.wait_for(Phase.WAITING, after=said)
        scenario.catch_up(captor)
        captor.stop()
        scenario.compare()


def test_a_dropped_slot_halts_with_the_reason_and_a_full_copy_mends_it(
    pg: PostgresDatabase, tmp_path: Path, seed: int
) -> None:
    workload.create(pg, pages=300)
    with Scenario(pg, tmp_path) as scenario:
        with Workload(pg, seed) as load:
            captor = scenario.start()
            captor.wait_for(Phase.STREAMING)
            load.wait_for_more(20)
            pg.drop_slots()
            captor.wait(HALTED)
            load.wait_for_more(20)
            mending = scenario.start(copy_again=())
            mending.wait_for(Phase.SNAPSHOT, Phase.STREAMING)
        scenario.catch_up(mending)
        mending.stop()
        scenario.compare()
    report = captor.reports[-1]
    assert f"{SLOT} does not exist any more" in report.error
    assert f"headrace snapshot {SOURCE}" in report.hint


def test_a_slot_made_anew_under_the_same_name_is_not_read(
    pg: PostgresDatabase, tmp_path: Path, seed: int
) -> None:
    workload.create(pg, pages=300)
    with Scenario(pg, tmp_path) as scenario:
        with Workload(pg, seed) as load:
            captor = scenario.start()
            captor.wait_for(Phase.STREAMING)
            load.wait_for_more(20)
            captor.stop()
            pg.drop_slots()
            pg.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (SLOT,))
            confirmed = slot_position(pg)
            refused = scenario.start()
            refused.wait(HALTED)
            assert "was created anew" in refused.reports[-1].error
            assert slot_position(pg) == confirmed
            mending = scenario.start(copy_again=())
            mending.wait_for(Phase.SNAPSHOT, Phase.STREAMING)
        scenario.catch_up(mending)
        mending.stop()
        scenario.compare()


def walsender(database: PostgresDatabase) -> list[int]:
    """The process that streams from the slot, if there is one now."""
    rows = database.execute(
        "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND active", (SLOT,)
    )
    return [pid for (pid,) in rows]


def slot_position(database: PostgresDatabase) -> str:
    """How far the server thinks that we are."""
    (row,) = database.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", (SLOT,)
    )
    return str(row[0])
