"""The binary log of MariaDB keeps what every source promises."""

from collections.abc import Iterator

import pytest

from headrace.testing import Place, SourceContract
from headrace.testing.mariadb import MariadbServer
from tests.conftest import expect_mariadb
from tests.sources.mariaplaces import VALUES, MariadbPlace


@pytest.fixture(scope="module")
def stoppable() -> Iterator[MariadbServer]:
    """A server that only these tests use."""
    expect_mariadb()
    with MariadbServer() as server:
        yield server


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[MariadbServer]:
    """Another one."""
    expect_mariadb()
    with MariadbServer() as server:
        yield server


@pytest.mark.live
@pytest.mark.requirement("S0-28", "S0-29", "S0-30", "S1-01")
class TestMariadb(SourceContract):
    values = VALUES

    @pytest.fixture
    def place(self, stoppable: MariadbServer, elsewhere: MariadbServer) -> Iterator[Place]:
        with stoppable.database() as database:
            yield MariadbPlace(database, elsewhere=elsewhere)
