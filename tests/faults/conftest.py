"""What every test that breaks things begins with."""

import random
import zlib

import pytest

from tests.effort import times


@pytest.fixture(params=range(times(1, nightly=5)), ids=lambda number: f"seed{number}")
def seed(request: pytest.FixtureRequest) -> int:
    """What everything random in a test follows from; the same `-p randomly_seed` gives the same."""
    # The shared generator is seeded alike for every test: the name makes the difference.
    chosen = random.getrandbits(32) ^ zlib.crc32(request.node.name.encode())
    request.node.add_report_section("setup", "seed", str(chosen))
    return chosen
