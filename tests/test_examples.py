"""The examples run, and show what they say."""

import runpy
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark.sql import SparkSession

from headrace.event import Op
from tests.sinks.lake import Lake, Row, put, remove

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, **environment: str) -> dict[str, Any]:
    """What an example leaves behind."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        return runpy.run_path(str(EXAMPLES / name))


def test_the_notebook_reads_a_log_and_fills_tables_that_equal_the_source(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = Lake(spark, tmp_path)
    orders = lake.table("orders")
    row: Row = {"status": "new", "amount": "1.00", "note": "-"}
    lake.commit(*(put(orders, id=number, **row) for number in range(4)))
    lake.commit(put(orders, Op.UPDATE, id=1, **row | {"status": "paid"}), remove(orders, id=2))
    left = run("spark_notebook.py", HEADRACE_LOG=str(lake.log.path), HEADRACE_LAKE=str(lake.path))
    kinds = {kind["op"]: kind["count"] for kind in left["kinds"].collect()}
    assert kinds == {"INSERT": 4, "UPDATE": 1, "DELETE": 1}
    assert left["typed"].count() == 6
    assert {kind["_change_type"] for kind in left["changelog"].collect()} == {
        "insert", "update_postimage", "delete"
    }  # fmt: skip
    assert lake.rows() == lake.expected()
    found = spark.sql("SELECT id, status FROM current_rows ORDER BY id").collect()
    assert [tuple(each) for each in found] == [(0, "new"), (1, "paid"), (3, "new")]
    assert pl.read_delta(str(lake.path / "public" / "orders")).height == 3
    assert "last_change" in capsys.readouterr().out
    lake.log.close()
