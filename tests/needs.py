"""What a test cannot do without."""

import os
from typing import NoReturn

import pytest

from headrace.testing.iceberg import HINT, iceberg_jars


def missing(reason: str) -> NoReturn:
    """A test that needs what is not there is skipped, but in CI it fails."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def expect_iceberg() -> None:
    """A test that needs Iceberg's REST catalog is skipped where its jars are not."""
    if iceberg_jars() is None:
        missing(f"Apache Iceberg is not there. {HINT}")
