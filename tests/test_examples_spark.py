"""The examples for Spark run, each on the session that it names."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from headrace.change.event import Column, Op
from tests.java import QUICK_JAVA
from tests.needs import missing
from tests.sinks.lake import ORDERS, Lake, Shop, order, put, remove
from tests.test_examples import EXAMPLES, run

CUSTOMERS = (Column("id", "bigint", key=True), Column("name", "text"))
BOUGHT = (*ORDERS, Column("customer_id", "bigint"))


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """Orders and customers that have changed."""
    made = Shop(tmp_path)
    filled(made)
    yield made
    made.log.close()


def filled(shop: Shop) -> None:
    orders, customers = shop.table("orders", BOUGHT), shop.table("customers", CUSTOMERS)
    shop.commit(*(put(customers, id=n, name=f"customer {n}") for n in range(2)))
    shop.commit(*(put(orders, **order(n), customer_id=n % 3) for n in range(4)))
    shop.commit(put(orders, Op.UPDATE, id=1, status="paid"), remove(orders, id=2))
    shop.commit(put(customers, Op.UPDATE, id=1, name="Ann"))


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(spark, tmp_path)
    filled(made)
    yield made
    made.log.close()


def settings(shop: Shop) -> dict[str, str]:
    return {"HEADRACE_LOG": str(shop.log.path), "HEADRACE_LAKE": str(shop.path)}


@pytest.mark.requirement("P-27")
def test_structured_streaming(lake: Lake) -> None:
    left = run("structured_streaming.py", **settings(lake))
    assert [tuple(row) for row in left["by_status"].collect()] == [("new", 2), ("paid", 1)]
    assert lake.rows() == lake.expected()
    assert lake.rows("customers") == lake.expected("customers")


def test_foreach_batch(lake: Lake) -> None:
    run("foreach_batch.py", **settings(lake))
    found = lake.spark.read.parquet(str(lake.path / "statuses")).orderBy("status").collect()
    assert [(row.status, row["count"]) for row in found] == [("new", 4), ("paid", 1)]


@pytest.mark.faults
@pytest.mark.slow
def test_two_tables_are_joined_while_they_change(lake: Lake) -> None:
    run("live_join.py", **settings(lake))
    orders = lake.table("orders", BOUGHT)
    customers = lake.table("customers", CUSTOMERS)
    lake.commit(put(customers, id=2, name="Bob"), put(orders, **order(9), customer_id=2))
    run("live_join.py", **settings(lake))
    found = lake.spark.read.parquet(str(lake.path / "orders_with_customers")).orderBy("id")
    assert [(row.id, row.name) for row in found.select("id", "name").collect()] == [
        (0, "customer 0"),
        (1, "Ann"),
        (2, None),
        (3, "customer 0"),
        (9, "Bob"),
    ]


def command(*words: str, cwd: Path, **environment: str) -> str:
    """What a program prints, which must succeed."""
    own = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **own, "SPARK_LOCAL_IP": "127.0.0.1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def spark_program(name: str) -> str:
    return str(Path(pyspark.__file__).parent / "bin" / name)


def need_connect() -> None:
    if find_spec("grpc_status") is None:
        missing("Spark Connect's client is not installed (pip install 'headrace[connect]')")


QUICK = [word for name, value in QUICK_JAVA.items() for word in ("--conf", f"{name}={value}")]


@pytest.mark.requirement("P-27")
@pytest.mark.faults
@pytest.mark.slow
def test_spark_submit(java: None, shop: Shop) -> None:
    submit = [spark_program("spark-submit"), "--master", "local[2]", *QUICK]
    submit += ["--conf", "spark.ui.enabled=false", str(EXAMPLES / "spark_submit.py")]
    command(*submit, str(shop.log.path), str(shop.path), cwd=shop.folder)
    assert shop.rows() == shop.expected()
    assert shop.rows("customers") == shop.expected("customers")


@pytest.mark.requirement("P-27")
@pytest.mark.faults
@pytest.mark.slow
def test_spark_connect(java: None, shop: Shop) -> None:
    need_connect()
    program = [sys.executable, str(EXAMPLES / "spark_connect.py")]
    shown = command(*program, cwd=shop.folder, SPARK_REMOTE="local[2]", **settings(shop))
    assert "update_postimage" in shown
    lake = shop.path
    for name in ("by_format", "by_function"):
        shop.path = lake / name
        assert shop.rows() == shop.expected()
        assert shop.rows("customers") == shop.expected("customers")


@pytest.mark.requirement("P-27")
@pytest.mark.faults
@pytest.mark.slow
def test_declarative_pipelines(java: None, shop: Shop) -> None:
    need_connect()
    project = shop.folder / "project"
    shutil.copytree(EXAMPLES / "declarative_pipeline", project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text()
    assert "storage: pipeline-storage " in text
    storage = (shop.folder / "storage").as_uri()
    spec.write_text(text.replace("storage: pipeline-storage ", f"storage: {storage} "))
    words = [spark_program("spark-pipelines"), "run", "--spec", str(spec), *QUICK]
    said = command(*words, "--conf", "spark.ui.enabled=false", cwd=project, **settings(shop))
    assert "Run is COMPLETED" in said
    assert shop.rows() == shop.expected()
    assert shop.rows("customers") == shop.expected("customers")
