"""delta-spark as another reader and writer of our tables, on the newest Spark that it knows.

`scripts/setup.sh delta` fetches both; HEADRACE_DELTA_SPARK may name another folder that has Spark
in `python` and the jars in `jars`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.change.event import Op
from headrace.errors import TableFailed, TableMoved
from headrace.log import Log
from tests.changes import Writer
from tests.deltas import stored
from tests.java import QUICK_JAVA
from tests.needs import missing
from tests.sinks.deltas import Written, without

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("java")]
SCRIPT = Path(__file__).with_name("delta_spark.py")
MARK = "RESULT "


class Spark:
    """Another process with delta-spark."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def sql(self, statement: str, **tables: Path) -> list[list[str]]:
        """The rows of a statement; {names} in it are the tables at these paths."""
        assert self._process.stdin
        assert self._process.stdout
        named = {name: f"delta.`{path}`" for name, path in tables.items()}
        self._process.stdin.write(f"{statement.format(**named)}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                rows: list[list[str]] = json.loads(line.removeprefix(MARK))
                return rows
        raise AssertionError(statement)

    def ids(self, table: Path) -> list[int]:
        """The rows as delta-spark reads them."""
        return sorted(int(row[0]) for row in self.sql("select id from {t}", t=table))


@pytest.fixture(scope="module")
def installed() -> Path:
    """The folder with a Spark that delta-spark knows, and its jars."""
    folder = Path(os.environ.get("HEADRACE_DELTA_SPARK") or Path(sys.prefix, "delta-spark"))
    if not folder.exists():
        missing("delta-spark is not there (scripts/setup.sh delta)")
    return folder


@pytest.fixture(scope="module")
def spark(installed: Path) -> Iterator[Spark]:
    jars = ",".join(map(str, sorted((installed / "jars").glob("*.jar"))))
    command = [sys.executable, str(SCRIPT), jars]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=on_older_spark(installed), **pipes) as process:  # type: ignore[call-overload]
        yield Spark(process)


def on_older_spark(installed: Path) -> dict[str, str]:
    """The environment of a Python that has that Spark and not ours."""
    hidden = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME")
    known = {name: value for name, value in os.environ.items() if name not in hidden}
    paths = [str(installed / "python"), *filter(None, [known.get("PYTHONPATH")])]
    return {**known, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def table(tmp_path: Path) -> Written:
    made = Written(tmp_path / "table")
    made.kill(0, 5)
    return made


def test_delta_spark_reads_and_maintains_our_tables(table: Written, spark: Spark) -> None:
    assert spark.ids(table.path) == without(200, 5)
    spark.sql("delete from {t} where id in (7, 150)", t=table.path)
    table.kill(0, 8)  # beside the rows that are gone already
    assert spark.ids(table.path) == table.ids() == without(200, 5, 7, 8, 150)
    spark.sql("optimize {t}", t=table.path)
    with pytest.raises(TableMoved):
        table.kill(0, 9)
    [new] = table.delta.files
    rows = table.folder.read(new)["id"].to_pylist()
    table.commit([table.file([300])], {new: [rows.index(9)]})
    spark.sql("reorg table {t} apply (purge)", t=table.path)
    spark.sql("vacuum {t}", t=table.path)
    spark.sql("alter table {t} set tblproperties ('comment' = 'x')", t=table.path)
    live = [*without(200, 5, 7, 8, 9, 150), 300]
    assert table.open().files
    assert all(file.vector is None for file in table.delta.files.values())
    table.delta.checkpoint()
    for number in range(301, 313):  # delta-spark makes a checkpoint of its own every ten
        table.commit([table.file([number])])
    spark.sql("delete from {t} where id = 0", t=table.path)
    assert table.open().version > 10
    table.commit([table.file([400])])
    assert spark.ids(table.path) == table.ids() == [*live[1:], *range(301, 313), 400]


def test_rows_that_delta_spark_writes_fail_the_table(table: Written, spark: Spark) -> None:
    spark.sql("update {t} set name = 'z' where id = 3", t=table.path)
    with pytest.raises(TableFailed, match="UPDATE by Apache-Spark"):
        table.open()
    spark.sql("restore table {t} to version as of 2", t=table.path)
    table.open()
    table.kill(0, 6)
    assert spark.ids(table.path) == without(200, 5, 6)
    spark.sql("insert into {t} values (999, 'q')", t=table.path)
    with pytest.raises(TableFailed, match="WRITE by Apache-Spark"):
        table.kill(0, 7)
    spark.sql("alter table {t} add constraint small check (id < 100000)", t=table.path)
    with pytest.raises(TableFailed, match="CHECK constraint small"):
        table.open()


def test_a_merge_into_our_table_fails_it_by_name(table: Written, spark: Spark) -> None:
    spark.sql(
        "merge into {t} as t using (select 3L as id, 'z' as name) as s on t.id = s.id "
        "when matched then update set name = s.name when not matched then insert *",
        t=table.path,
    )
    with pytest.raises(TableFailed, match="MERGE by Apache-Spark"):
        table.open()


MERGE = (
    "merge into {counts} as c "
    "using (select name, count(*) as users from {users} group by name) as u "
    "on c.name = u.name "
    "when matched then update set users = u.users "
    "when not matched then insert (name, users) values (u.name, u.users) "
    "when not matched by source then delete"
)


def carry(folder: Path, environment: dict[str, str]) -> str:
    """Run our pipeline once; the version of its Spark."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "pipeline", "--once"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    program = "import pyspark; print(pyspark.__version__)"
    asked = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return asked.stdout.strip()


def test_our_sink_runs_on_either_spark_beside_delta_spark(
    tmp_path: Path, installed: Path, spark: Spark
) -> None:
    config: dict[str, Any] = {
        "sources": {"db": {"type": "postgres", "url": "postgresql://127.0.0.1:1/x"}},
        "pipeline": {
            "master": "local[2]",
            "spark": {**QUICK_JAVA, "spark.ui.enabled": False},
            "sinks": {"lake": {"type": "tables", "path": "lake"}},
        },
    }
    (tmp_path / "headrace.yaml").write_text(json.dumps(config))
    users, counts = tmp_path / "lake" / "public" / "users", tmp_path / "counts"
    spark.sql("create table {t} (name string, users bigint) using delta", t=counts)

    def merged() -> dict[str, int]:
        spark.sql(MERGE, counts=counts, users=users)
        return {row[0]: int(row[1]) for row in spark.sql("select * from {t}", t=counts)}

    with Log.open(tmp_path / "data" / "log") as log:
        writer = Writer(log)
        for number in range(20):
            writer.put("users", str(number), name="odd" if number % 2 else "even")
        newest = carry(tmp_path, dict(os.environ))
        assert merged() == {"odd": 10, "even": 10}

        spark.sql("optimize {t}", t=users)
        spark.sql("delete from {t} where id = '15'", t=users)
        for number in range(10):
            writer.put("users", str(number), Op.UPDATE, name="small")
        older = carry(tmp_path, on_older_spark(installed))
    assert older.startswith("4.2.")
    assert older != newest
    assert merged() == {"odd": 4, "even": 5, "small": 10}
    assert stored(users).num_rows == 19
