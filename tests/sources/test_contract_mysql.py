"""The binary logs of MySQL and MariaDB keep what every source promises."""

from collections.abc import Iterator

import pytest

from headrace.testing import Place, SourceContract
from headrace.testing.mysql import MysqlServer
from tests.mysqls import KINDS, mysql_of
from tests.sources.myplaces import VALUES, MysqlPlace


@pytest.fixture(scope="module", params=KINDS)
def stoppable(request: pytest.FixtureRequest) -> Iterator[MysqlServer]:
    """A server that only these tests use."""
    with mysql_of(request.param) as server:
        yield server


@pytest.fixture(scope="module")
def elsewhere(stoppable: MysqlServer) -> Iterator[MysqlServer]:
    """Another one of its kind."""
    with type(stoppable)(install=stoppable.install) as server:
        yield server


@pytest.mark.live
@pytest.mark.requirement("S0-28", "S0-29", "S0-30", "S1-01")
class TestMysql(SourceContract):
    values = VALUES

    @pytest.fixture
    def place(self, stoppable: MysqlServer, elsewhere: MysqlServer) -> Iterator[Place]:
        with stoppable.database() as database:
            yield MysqlPlace(database, elsewhere=elsewhere)
