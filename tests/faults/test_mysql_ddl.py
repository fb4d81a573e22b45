"""Random DDL and foreign keys on MariaDB, with rows and kills: the log equals the database."""

from pathlib import Path

import pytest

from headrace.testing.mysql import MysqlServer
from tests.faults.mysqlddl import run


@pytest.mark.requirement("P-03", "P-39")
def test_after_random_ddl_and_kills_the_log_equals_mariadb(
    mariadb: MysqlServer, tmp_path: Path, seed: int
) -> None:
    assert run(mariadb, seed, 60, tmp_path) == []
