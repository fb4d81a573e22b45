"""Triggers and an event table keep what every source promises, without logical replication."""

from collections.abc import Iterator

import pytest

from headrace.secret import Secret
from headrace.sources.postgres_events import PostgresEvents
from headrace.testing import Place, PostgresDatabase, PostgresServer, Setting, SourceContract
from tests.conftest import Servers, install_of
from tests.sources.places import VALUES, PostgresPlace


def events(database: PostgresDatabase) -> PostgresEvents:
    return PostgresEvents(name="shop", url=Secret(database.url), tables=("*.*",), poll_seconds=0.02)


@pytest.fixture(scope="module", params=[15, 16], ids=lambda version: f"postgres{version}")
def replica(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server that could not be captured by logical replication, and that only these tests use."""
    settings: dict[str, Setting] = {"wal_level": "replica", "max_prepared_transactions": 10}
    with PostgresServer(install_of(request.param), settings=settings) as server:
        yield server


@pytest.mark.live
@pytest.mark.requirement("S1-01", "S1-30", "S1-32")
class TestPostgresEvents(SourceContract):
    values = VALUES
    commit_order = False  # two that commit between two looks come in the order of their last rows

    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A look for new tables every moment."""
        monkeypatch.setattr("headrace.sources.postgres_events.stream._WATCH_SECONDS", 0.05)

    @pytest.fixture
    def place(self, replica: PostgresServer, servers: Servers) -> Iterator[Place]:
        with replica.database() as database:
            yield PostgresPlace(database, events, server=replica, elsewhere=servers[16])
