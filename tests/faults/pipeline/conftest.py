"""Every test here runs Spark in processes of its own."""

import pytest


@pytest.fixture(autouse=True)
def startable_spark(java: None) -> None:
    """Skips the test where Spark cannot start."""
