"""What the tests of pipelines share."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace import plugins
from headrace.pipeline import supervise
from headrace.retry import Backoff
from tests.pipeline.sites import PLUGINS, Site


@pytest.fixture
def site(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A log with the sinks of `plugins`, which are tried again soon."""
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setattr(plugins, "_installed", plugins._installed.__wrapped__)
    monkeypatch.setattr(supervise, "BACKOFF", Backoff(0.05, 60.0))
    return Site(tmp_path, spark)
