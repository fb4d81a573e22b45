"""A log for each test of the log."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.log import Log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A new log, open for writing."""
    with Log.open(tmp_path / "log") as log:
        yield log
