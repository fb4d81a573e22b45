"""MySQL and MariaDB through kills of the server and of the capture, with DDL beside the writers."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from headrace.change.event import Op
from headrace.change.replay import Replay, TableName
from headrace.log import LogReader
from headrace.sources.mysql.decode.path import TablePath
from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.effort import times
from tests.faults import mysqlwork
from tests.faults.mysqlcapturing import Captor, catch_up, stored
from tests.faults.mysqlwork import TABLES, Workload
from tests.sources.mycapturing import numbers, ordered, snapshot_rows

ROWS = 100_000  # whose copy takes much longer than to look how far it is


@pytest.mark.slow
@pytest.mark.requirement("S0-28", "S0-29", "S0-30")
def test_killed_again_and_again_the_log_still_equals_the_database(
    own_my: MysqlServer, tmp_path: Path, seed: int
) -> None:
    dice = Random(seed)
    data_dir = tmp_path / "log"
    with own_my.database() as database:
        for table in TABLES:
            mysqlwork.create(database, table)
        with Workload(database, seed) as load:
            for turn in range(5):
                captor = Captor(database, data_dir)
                load.progress(dice.randint(1, 15))
                if turn in (1, 3):
                    own_my.restart("immediate" if turn == 1 else "fast")
                    load.progress()
                captor.expect_running()
                captor.kill()
                load.progress(dice.randint(1, 5))
        mysqlwork.settle(database)
        captor = Captor(database, data_dir)
        database.execute(
            "CREATE TABLE IF NOT EXISTS last (id int PRIMARY KEY); INSERT INTO last VALUES (1)"
        )
        catch_up(database, data_dir, captor)
        captor.stop()
        with LogReader.open(data_dir) as log:
            replay = Replay.of(log.read(0, limit=1 << 30))
        assert replay.surprises == []
        expected = snapshot_rows(database, tmp_path / "other")
        for table in (*TABLES, "last"):
            rows = replay.rows(TableName("faults", database.name, table))
            assert ordered(rows) == expected.get(table, []), table


@pytest.mark.slow
@pytest.mark.requirement("P-24")
def test_killed_in_the_middle_of_a_copy_the_log_still_equals_the_database(
    own_my: MysqlServer, tmp_path: Path
) -> None:
    data_dir = tmp_path / "log"
    with own_my.database() as database:
        database.execute("CREATE TABLE a_done (id int PRIMARY KEY, n int)")
        database.execute("CREATE TABLE b_half (id int PRIMARY KEY, n int, s varchar(200))")
        database.execute("INSERT INTO a_done VALUES (1, 1), (2, 2)")
        database.execute(f"INSERT INTO b_half SELECT seq, 0, repeat('x', 99) FROM {numbers(ROWS)}")
        for turn in range(1, times(4, nightly=6)):
            known = (0, _copied(data_dir, database))
            captor = Captor(database, data_dir, "10000")
            _await_copied(data_dir, database, known)
            captor.hold()
            database.execute(f"UPDATE b_half SET n = {turn} WHERE id % 50 = {turn}")
            database.execute(f"DELETE FROM b_half WHERE id BETWEEN {turn} * 100 AND {turn} * 120")
            # Rows of the beginning, the middle and the end take keys of one another's ranges.
            for begin, by in ((1, ROWS), (ROWS // 2, -ROWS), (ROWS - 99, -2 * ROWS)):
                moved = f"id BETWEEN {begin} + {turn * 9} AND {begin} + {turn * 9 + 8}"
                database.execute(f"UPDATE b_half SET id = id + {by}, n = -1 WHERE {moved}")
            database.execute(f"UPDATE a_done SET n = n + 1; INSERT INTO a_done VALUES (-{turn}, 0)")
            captor.expect_running()
            captor.kill()
            resume = stored(data_dir)
            assert resume is not None
            assert resume.to_snapshot == [(database.name, "b_half")]
        captor = Captor(database, data_dir)
        catch_up(database, data_dir, captor)
        captor.stop()
        with LogReader.open(data_dir) as log:
            changes = log.read(0, limit=1 << 30)
        replay = Replay.of(changes)
        assert replay.surprises == []
        expected = snapshot_rows(database, tmp_path / "other")
        for table in ("a_done", "b_half"):
            rows = replay.rows(TableName("faults", database.name, table))
            assert ordered(rows) == expected[table], table
        reads = Counter((each.table.name, each.key) for each in changes if each.op is Op.READ)
        assert set(reads.values()) == {1}, "what was read is not read again"
        assert [each for each in changes if each.op is Op.TRUNCATE] == []


def _await_copied(data_dir: Path, database: MysqlDatabase, known: tuple[int, int]) -> None:
    """Wait until the copy goes on: the log has another number of its rows."""
    wait_until(lambda: _copied(data_dir, database) not in known, timeout=240, message="it copies")


def _copied(data_dir: Path, database: MysqlDatabase) -> int:
    """How many rows of the large table the log has from the copy that goes on."""
    resume = stored(data_dir)
    copy = None if resume is None else resume.snapshots.get(TablePath(database.name, "b_half"))
    return 0 if copy is None or not copy.begun else copy.rows
