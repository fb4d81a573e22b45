"""delta-spark as another reader and writer of our tables.

It needs a Python that has it, and its jars, since it knows no Spark as new as ours:

    HEADRACE_DELTA_SPARK="…/bin/python …/delta-spark_4.2_2.13-4.4.0.jar,…/delta-storage-4.4.0.jar"
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import TableFailed, TableMoved
from tests.sinks.deltas import Written, without

pytestmark = pytest.mark.faults
SCRIPT = Path(__file__).with_name("delta_spark.py")
MARK = "RESULT "


class Spark:
    """Another process with delta-spark."""

    def __init__(self, process: "subprocess.Popen[str]", path: Path) -> None:
        self._process = process
        self._table = f"delta.`{path}`"

    def sql(self, statement: str) -> list[list[str]]:
        """The rows of a statement; `T` is the table."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(statement.replace("T", self._table, 1) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                rows: list[list[str]] = json.loads(line.removeprefix(MARK))
                return rows
        raise AssertionError(statement)

    def ids(self) -> list[int]:
        """The rows as delta-spark reads them."""
        return sorted(int(row[0]) for row in self.sql("select id from T"))


@pytest.fixture
def table(tmp_path: Path) -> Written:
    made = Written(tmp_path / "table")
    made.kill(0, 5)
    return made


@pytest.fixture
def spark(table: Written) -> Iterator[Spark]:
    given = os.environ.get("HEADRACE_DELTA_SPARK", "").split()
    if not given:
        pytest.skip("HEADRACE_DELTA_SPARK names no delta-spark")
    python, jars = given
    command = [python, str(SCRIPT), jars]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    known = {name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME") if name in os.environ}
    with subprocess.Popen(command, text=True, env=known, **pipes) as process:  # type: ignore[call-overload]
        yield Spark(process, table.path)


def test_delta_spark_reads_and_maintains_our_tables(table: Written, spark: Spark) -> None:
    assert spark.ids() == without(200, 5)
    spark.sql("delete from T where id in (7, 150)")
    table.kill(0, 8)  # beside the rows that are gone already
    assert spark.ids() == table.ids() == without(200, 5, 7, 8, 150)
    spark.sql("optimize T")
    with pytest.raises(TableMoved):
        table.kill(0, 9)
    [new] = table.delta.files
    rows = table.folder.read(new)["id"].to_pylist()
    table.commit([table.file([300])], {new: [rows.index(9)]})
    spark.sql("reorg table T apply (purge)")
    spark.sql("vacuum T")
    spark.sql("alter table T set tblproperties ('comment' = 'x')")
    live = [*without(200, 5, 7, 8, 9, 150), 300]
    assert table.open().files
    assert all(file.vector is None for file in table.delta.files.values())
    table.delta.checkpoint()
    for number in range(301, 313):  # delta-spark makes a checkpoint of its own every ten
        table.commit([table.file([number])])
    spark.sql("delete from T where id = 0")
    assert table.open().version > 10
    table.commit([table.file([400])])
    assert spark.ids() == table.ids() == [*live[1:], *range(301, 313), 400]


def test_rows_that_delta_spark_writes_fail_the_table(table: Written, spark: Spark) -> None:
    spark.sql("update T set name = 'z' where id = 3")
    with pytest.raises(TableFailed, match="UPDATE by Apache-Spark"):
        table.open()
    spark.sql("restore table T to version as of 2")
    table.open()
    table.kill(0, 6)
    assert spark.ids() == without(200, 5, 6)
    spark.sql("insert into T values (999, 'q')")
    with pytest.raises(TableFailed, match="WRITE by Apache-Spark"):
        table.kill(0, 7)
    spark.sql("alter table T add constraint small check (id < 100000)")
    with pytest.raises(TableFailed, match="CHECK constraint small"):
        table.open()
