"""Killed at any named point, Headrace goes on without losing, repeating or halving anything."""

from pathlib import Path

import pytest

from headrace.change.replay import Replay, TableName
from headrace.log import LogReader
from headrace.sources import Phase
from headrace.testing import PostgresDatabase, wait_until
from tests.faults import workload
from tests.faults.captor import SOURCE, Kill, Point
from tests.faults.scenario import Scenario
from tests.faults.verify import every_change
from tests.faults.workload import LARGE, Workload, write_many

# An index in nearly the order of the rows, which the planner would like to use.
FILTERED = """
    CREATE TABLE visits (id int PRIMARY KEY, at float, filling text);
    INSERT INTO visits
        SELECT n, n + 1000 * random(), repeat('v', 200) FROM generate_series(1, 40000) n;
    CREATE INDEX ON visits (at);
    CREATE PUBLICATION headrace_faults FOR TABLE ONLY visits WHERE (at > 20000)
"""

BEING_CREATED = """
    SELECT 1 FROM pg_replication_slots
    WHERE database = current_database() AND confirmed_flush_lsn IS NULL"""

FEW, MANY = 300, 13_500  # pages: no more than a batch; more than one range


def named(kill: Kill) -> str:
    """A kill as a part of a test's name."""
    name = f"{kill.at} ({kill.nth})".replace(" ", "-").replace(",", "")
    return f"{name}-and-the-server-was-told" if kill.told else name


@pytest.mark.requirement("S0-34", "S1-48", "S2-21", "S4-22")
@pytest.mark.parametrize(
    "kill",
    [
        Kill(Point.BEFORE_APPEND, 2),
        Kill(Point.BEFORE_APPEND, 5, told=True),
        Kill(Point.AFTER_APPEND, 8),
        Kill(Point.AFTER_ACK, 5, told=True),
    ],
    ids=named,
)
def test_killed_while_streaming_it_goes_on_after_the_last_stored_transaction(
    pg: PostgresDatabase, tmp_path: Path, seed: int, kill: Kill
) -> None:
    workload.create(pg, pages=FEW)
    # Then Headrace tells the server every second or so how far it is, not every ten.
    pg.execute(f"ALTER DATABASE {pg.name} SET wal_sender_timeout = '4s'")
    with Scenario(pg, tmp_path) as scenario:
        captor = scenario.start(kill)
        captor.wait_for(Phase.STREAMING)
        # While a process is held up it cannot give tables their versions.
        workload.touch(pg)
        with Workload(pg, seed):
            scenario.dies(captor)
        scenario.finish(surprises=False)


@pytest.mark.requirement("S0-34", "S2-19")
@pytest.mark.parametrize(
    "kill",
    [
        Kill(Point.IN_TRANSACTION, 2),
        Kill(Point.BEFORE_LAST_PIECE),
    ],
    ids=named,
)
def test_killed_inside_a_large_transaction_it_stores_that_transaction_whole_and_once(
    pg: PostgresDatabase, tmp_path: Path, seed: int, kill: Kill
) -> None:
    workload.create(pg, pages=FEW)
    with Scenario(pg, tmp_path) as scenario:
        captor = scenario.start(kill)
        captor.wait_for(Phase.STREAMING)
        with Workload(pg, seed), pg.connect(autocommit=False) as connection:
            write_many(connection, 2 * LARGE)
            connection.commit()
            scenario.dies(captor)
        scenario.finish(surprises=False)


def test_cut_off_inside_a_large_transaction_it_stores_that_transaction_whole_and_once(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    workload.create(pg, pages=FEW)
    with Scenario(pg, tmp_path) as scenario:
        captor = scenario.start(Kill(Point.IN_TRANSACTION, cut=True))
        captor.wait_for(Phase.STREAMING)
        with pg.connect(autocommit=False) as connection:
            write_many(connection, 50_000)  # more than is read ahead
            connection.commit()
        captor.wait_for(Phase.WAITING, after=0)
        scenario.catch_up(captor)
        captor.stop()
        scenario.compare(surprises=False)


@pytest.mark.parametrize(
    "kill",
    [
        Kill(Point.FIRST_BATCH),
        Kill(Point.IN_SNAPSHOT, 9),
    ],
    ids=named,
)
def test_killed_during_the_snapshot_it_copies_only_what_is_left(
    pg: PostgresDatabase, tmp_path: Path, seed: int, kill: Kill
) -> None:
    workload.create(pg, pages=MANY)
    with Scenario(pg, tmp_path) as scenario:
        with Workload(pg, seed):
            scenario.start_to_die(kill)
            scenario.start_to_die(Kill(Point.BEFORE_STREAM))
        scenario.finish()


def test_killed_while_the_slot_waits_for_an_open_transaction_it_takes_that_slot_later(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    workload.create(pg, pages=FEW)
    with Scenario(pg, tmp_path) as scenario:
        with pg.connect(autocommit=False) as connection:
            write_many(connection, 10)
            captor = scenario.start()
            wait_until(lambda: pg.execute(BEING_CREATED), message="the slot is being created")
            # The server goes on creating it although nobody is left to use it.
            scenario.kill(captor)
            captor = scenario.start()
            captor.wait_for(Phase.WAITING, after=0)
            assert pg.execute(BEING_CREATED)
        scenario.catch_up(captor)
        captor.stop()
        scenario.compare(surprises=False)


def test_killed_before_moved_rows_are_read_again_it_keeps_their_large_values(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    workload.create(pg, pages=16_000)
    with Scenario(pg, tmp_path) as scenario:
        # The second of two ranges, which is short, has been read; the first one has not.
        scenario.start_to_die(Kill(Point.IN_SNAPSHOT, 14))
        # Every row moves behind the second range; the stream leaves out what is large in them.
        pg.execute("UPDATE pages SET visits = visits + 1")
        # Nothing is left in the first range, but many moved rows are.
        scenario.start_to_die(Kill(Point.IN_SNAPSHOT, 4))
        scenario.finish()


def test_killed_while_a_filtered_table_is_copied_it_misses_no_row(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    pg.execute(FILTERED)
    pg.execute("VACUUM ANALYZE visits")
    with Scenario(pg, tmp_path) as scenario:
        for nth in (1, 2):
            scenario.start_to_die(Kill(Point.IN_SNAPSHOT, nth))
        captor = scenario.start()
        scenario.catch_up(captor)
        captor.stop()
        with LogReader.open(scenario.log) as log:
            replay = Replay.of(every_change(log))
    copied = {row["id"] for row in replay.rows(TableName(SOURCE, "public", "visits"))}
    assert copied == {row[0] for row in pg.execute("SELECT id FROM visits WHERE at > 20000")}


@pytest.mark.parametrize(
    ("kill", "tables"),
    [
        (Kill(Point.OPENING), ()),
        (Kill(Point.FIRST_BATCH), ()),
        (Kill(Point.IN_SNAPSHOT, 2), ("public.pages", "journal")),
    ],
    ids=lambda value: named(value) if isinstance(value, Kill) else "some" if value else "all",
)
def test_killed_while_tables_are_copied_again_it_ends_with_their_rows(
    pg: PostgresDatabase, tmp_path: Path, seed: int, kill: Kill, tables: tuple[str, ...]
) -> None:
    workload.create(pg, pages=2000)
    with Scenario(pg, tmp_path) as scenario:
        with Workload(pg, seed):
            scenario.start_to_die(kill, copy_again=tables)
        scenario.finish()


def test_a_snapshot_under_load_meets_the_stream_exactly(
    pg: PostgresDatabase, tmp_path: Path, seed: int
) -> None:
    workload.create(pg, pages=MANY)
    with Scenario(pg, tmp_path) as scenario:
        # A snapshot sees a table empty that was truncated after it: changes from before would
        # then be about rows that nobody has seen.
        with Workload(pg, seed, truncating=False):
            captor = scenario.start()
            captor.wait_for(Phase.STREAMING)
            scenario.catch_up(captor)
        scenario.catch_up(captor)
        captor.stop()
        scenario.compare(surprises=False)
