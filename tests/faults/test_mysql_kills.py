"""MySQL and MariaDB through kills of the server and of the capture, with DDL beside the writers."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from headrace.change.event import Op
from headrace.change.replay import Replay, TableName
from headrace.errors import LogError
from headrace.log import LogReader
from headrace.sources.mysql.decode.path import TablePath
from headrace.sources.mysql.resume import MysqlResume, decode, file_number
from headrace.testing import wait_until
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.effort import times
from tests.faults import mysqlwork
from tests.faults.mysqlwork import TABLES, Workload
from tests.sources.mycapturing import numbers, ordered, snapshot_rows

ROOT = Path(__file__).parents[2]
ROWS = 100_000  # whose copy takes much longer than to look how far it is


class Captor:
    """A capturing process, seen from outside."""

    def __init__(self, database: MysqlDatabase, data_dir: Path, *pace: str) -> None:
        self._errors = data_dir.with_suffix(".errors")
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.mysqlcaptor", data_dir, database.url, *pace],
                stdin=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
            )

    def hold(self) -> None:
        """Let it store nothing more."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._end()

    def stop(self) -> None:
        """Let it end in order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._end() == 0, self._errors.read_text()[-2000:]

    def expect_running(self) -> None:
        """It must not have ended by itself."""
        assert self._process.poll() is None, self._errors.read_text()[-2000:]

    def _end(self) -> int:
        code = self._process.wait(timeout=240)
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code


def stored(data_dir: Path) -> MysqlResume | None:
    """How far the log is, as another process sees it."""
    if not (data_dir / "CURRENT").exists():
        return None
    try:
        with LogReader.open(data_dir) as log:
            resume = log.resume("faults")
    except LogError:
        return None  # it is being made
    found = None if resume is None else decode(resume)
    return found if isinstance(found, MysqlResume) else None


def catch_up(database: MysqlDatabase, data_dir: Path, captor: Captor) -> None:
    """Wait until the log has everything."""
    file, position = database.server.end
    end = file_number(file), position

    def arrived() -> bool:
        captor.expect_running()
        resume = stored(data_dir)
        return resume is not None and resume.offset >= end and not resume.to_snapshot

    wait_until(arrived, timeout=240, message=f"the log reaches {end}")


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
