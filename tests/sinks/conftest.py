"""Fixtures of the sinks' tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.sinks.lake import Lake


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[Lake]:
    """A fresh log with a fresh tables sink on it."""
    made = Lake(spark, tmp_path)
    yield made
    made.log.close()
