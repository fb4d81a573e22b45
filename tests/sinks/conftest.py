"""Fixtures of the sinks' tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.testing.iceberg import IcebergServer
from tests.needs import expect_iceberg
from tests.sinks.lake import Lake


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    """A fresh log with a fresh tables sink on it."""
    made = Lake(spark, tmp_path)
    yield made
    made.log.close()


@pytest.fixture(scope="module")
def iceberg_server() -> Iterator[IcebergServer]:
    """A catalog for all tests of a module; each has a namespace of its own."""
    expect_iceberg()
    with IcebergServer() as started:
        yield started
