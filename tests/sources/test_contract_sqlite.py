"""Triggers in a SQLite database keep what every source promises."""

from pathlib import Path

import pytest

from headrace.testing import Place, SourceContract
from tests.sources.litedb import VALUES, SqlitePlace


@pytest.mark.requirement("S1-01")
class TestSqlite(SourceContract):
    values = VALUES
    sessions_at_once = False
    truncate = "DELETE FROM {}"

    @pytest.fixture(params=["wal", "delete"])
    def place(self, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
        return SqlitePlace(tmp_path / "shop.db", wal=request.param == "wal")
