"""What a test cannot do without."""

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """A test that needs what is not there is skipped, but in CI it fails."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
