"""Logical replication keeps what every source promises."""

from collections.abc import Iterator

import pytest

from headrace.testing import Place, PostgresServer, SourceContract
from tests.conftest import SETTINGS, Servers, install_of
from tests.sources.capturing import postgres
from tests.sources.places import VALUES, PostgresPlace


@pytest.fixture(scope="module")
def stoppable() -> Iterator[PostgresServer]:
    """A server that only these tests use."""
    with PostgresServer(install_of(16), settings=SETTINGS) as server:
        yield server


@pytest.mark.live
@pytest.mark.requirement("S1-01", "S1-31")
class TestPostgres(SourceContract):
    values = VALUES

    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A look for new tables every moment."""
        monkeypatch.setattr("headrace.sources.postgres.stream._WATCH_SECONDS", 0.05)

    @pytest.fixture
    def place(self, stoppable: PostgresServer, servers: Servers) -> Iterator[Place]:
        with stoppable.database() as database:
            yield PostgresPlace(database, postgres, server=stoppable, elsewhere=servers[16])
