"""Random DDL of every kind, rows, restarts and kills: the log replays to every table."""

from pathlib import Path

import pytest

from tests.conftest import VERSIONS, Servers
from tests.faults.ddlwork import DdlRun


@pytest.mark.requirement("P-03", "P-04")
def test_after_random_ddl_and_kills_the_log_equals_the_database(
    servers: Servers, tmp_path: Path, seed: int
) -> None:
    with servers[VERSIONS[seed % len(VERSIONS)]].database() as database:
        DdlRun(database, tmp_path, seed).run(60)
