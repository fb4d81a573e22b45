"""Random DDL on SQLite, with rows, restarts and kills: the log equals the database."""

from pathlib import Path

import pytest

from tests.faults.sqlite_ddl import run_seed


@pytest.mark.requirement("P-01")
@pytest.mark.requirement("P-03")
def test_the_log_equals_a_database_through_random_ddl(tmp_path: Path, seed: int) -> None:
    run_seed(seed, tmp_path)
