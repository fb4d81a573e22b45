"""What executors lack is named before the first query starts."""

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace import __version__
from headrace.errors import ExecutorUnprepared
from headrace.pipeline.executors import (
    PACKAGES,
    Installed,
    compare,
    distinct,
    expect_packages,
    installed,
    packages_of,
)
from headrace.sinks.iceberg import IcebergHistory
from headrace.sinks.kafka import Kafka
from tests.plugins.environments import ROOT, Environment, wheel_of


def python_of(environment: Environment) -> str:
    """Its Python, whatever PYTHONPATH Spark's Java has."""
    program = environment.folder / "python"
    program.write_text(f'#!/bin/sh\nexec {environment.python} -E "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_an_executor_without_headrace_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Environment.created(tmp_path / "bare", without=["obstore"])
    monkeypatch.setattr(spark.sparkContext, "pythonExec", python_of(bare))
    lacks = rf"the executor on .+ lacks headrace {__version__}, obstore \d[\d.]+$"
    with pytest.raises(ExecutorUnprepared, match=lacks) as raised:
        expect_packages(spark, threading.Event())
    assert "spark.archives" in raised.value.hint


def test_an_executor_with_another_headrace_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Environment.created(tmp_path / "older", wheel_of(ROOT, tmp_path))
    [notes] = older.packages.glob("headrace-*.dist-info/METADATA")
    notes.write_text(notes.read_text().replace(f"Version: {__version__}", "Version: 0.0.7", 1))
    monkeypatch.setattr(spark.sparkContext, "pythonExec", python_of(older))
    differs = rf"has headrace 0\.0\.7, and the driver {__version__}"
    with pytest.raises(ExecutorUnprepared, match=differs):
        expect_packages(spark, threading.Event())


def test_executors_like_the_driver_are_fine(spark: SparkSession) -> None:
    expect_packages(spark, threading.Event())
    for each in installed(spark):
        assert set(each.packages) == set(PACKAGES)


def test_other_versions_of_packages_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    theirs = {**dict.fromkeys(PACKAGES, "1"), "headrace": __version__}
    compare([Installed("h", "3.11.1", theirs)])
    assert "executor=h package=pyarrow version=1 driver=" in caplog.text


def test_executors_need_what_the_tasks_of_sinks_import() -> None:
    iceberg = IcebergHistory(name="audit", uri="http://c", namespace="n")
    needed = packages_of([iceberg, Kafka(name="events", servers="k:9092")])
    assert needed == PACKAGES | {
        "confluent-kafka": "confluent_kafka",
        "pyiceberg": "pyiceberg",
        "pyiceberg-core": "pyiceberg_core",
    }
    theirs = dict.fromkeys(needed, "1") | {"headrace": __version__, "pyiceberg": ""}
    with pytest.raises(ExecutorUnprepared, match=r"on h lacks pyiceberg \d"):
        compare([Installed("h", "3.11.1", theirs)])


def test_each_executor_of_a_machine_is_looked_at() -> None:
    whole, bare = {"headrace": __version__}, {"headrace": ""}
    found = distinct(Installed("h", "3.11.1", each) for each in (whole, bare, whole))
    assert [each.packages for each in found] == [bare, whole]
