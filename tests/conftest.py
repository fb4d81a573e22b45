"""Fixtures that give tests real PostgreSQL servers, fresh databases in them, and a real Spark."""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
from pyspark.sql import SparkSession

from headrace.pipeline.reading import close_readers
from headrace.pipeline.session import check_java
from headrace.testing import PostgresDatabase, PostgresInstall, PostgresServer, postgres_installs
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.effort import times
from tests.java import QUICK_JAVA
from tests.mysqls import KINDS, Mysqls, mysql_of
from tests.needs import missing

# How long one example takes says more about the machine's load than about the code.
hypothesis.settings.register_profile(
    "headrace",
    max_examples=times(30, nightly=300),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("headrace")

VERSIONS = (15, 16, 18)
FAULTS = Path(__file__).parent / "faults"

# Room for two-phase commits, which a default server refuses.
SETTINGS = {"max_prepared_transactions": 10}


def install_of(version: int) -> PostgresInstall:
    """The install of a version; without it the test is skipped, but in CI it fails."""
    install = postgres_installs().get(version)
    if install is None:
        package = f"postgresql-{version}"
        missing(f"PostgreSQL {version} is not installed (Debian: apt-get install {package})")
    return install


class Servers:
    """One server of each version, started when a test first asks for it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._running: dict[int, PostgresServer] = {}

    def __getitem__(self, version: int) -> PostgresServer:
        if version not in self._running:
            server = PostgresServer(install_of(version), settings=SETTINGS)
            self._running[version] = self._stack.enter_context(server)
        return self._running[version]


@pytest.fixture(scope="module", autouse=True)
def _logs_closed() -> Iterator[None]:
    """Close what the tests of a file have read: each log keeps some files open."""
    yield
    close_readers()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The servers that tests share; a test that stops or breaks one takes `own_server`."""
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def pg(servers: Servers) -> Iterator[PostgresDatabase]:
    """A fresh database on PostgreSQL 16."""
    with servers[16].database() as database:
        yield database


@pytest.fixture(params=VERSIONS, ids=lambda version: f"postgres{version}")
def any_pg(request: pytest.FixtureRequest, servers: Servers) -> Iterator[PostgresDatabase]:
    """A fresh database on each supported PostgreSQL in turn."""
    with servers[request.param].database() as database:
        yield database


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A PostgreSQL 16 of the test's own, to stop, kill and break."""
    with PostgresServer(install_of(16), settings=SETTINGS) as server:
        yield server


@pytest.fixture(scope="session")
def mysqls() -> Iterator[Mysqls]:
    """The servers that tests share; a test that stops or breaks one takes `own_my`."""
    with Mysqls() as servers:
        yield servers


@pytest.fixture(scope="session")
def mariadb(mysqls: Mysqls) -> MysqlServer:
    """The MariaDB that tests share."""
    return mysqls["mariadb"]


@pytest.fixture
def maria(mariadb: MysqlServer) -> Iterator[MysqlDatabase]:
    """A fresh database on MariaDB."""
    with mariadb.database() as database:
        yield database


@pytest.fixture(params=KINDS)
def my_kind(request: pytest.FixtureRequest) -> str:
    """MariaDB, and each MySQL in turn."""
    return str(request.param)


@pytest.fixture
def my(my_kind: str, mysqls: Mysqls) -> Iterator[MysqlDatabase]:
    """A fresh database on MariaDB, and on each MySQL in turn."""
    with mysqls[my_kind].database() as database:
        yield database


@pytest.fixture
def own_my(my_kind: str) -> Iterator[MysqlServer]:
    """A MariaDB, and each MySQL in turn, of the test's own, to stop, kill and break."""
    with mysql_of(my_kind) as server:
        yield server


SPARK = {
    **QUICK_JAVA,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.python.authenticate.socketTimeout": "60s",  # a busy machine starts Python slowly
}


@pytest.fixture(scope="session")
def java() -> None:
    """A Java for Spark; without it the test is skipped, but in CI it fails."""
    found = check_java()
    if not found.ok:
        missing(f"{found.detail}. {found.fix}")


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark of a test run, with two cores; it starts in six to ten seconds."""
    # Workers are new processes: without these they look for another Python.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # What reads a source takes its limit from here, and not from the session's settings.
    os.environ["SPARK_AUTH_SOCKET_TIMEOUT"] = "60"
    builder = SparkSession.builder.master("local[2]").appName("headrace-tests")
    for name, value in SPARK.items():
        builder = builder.config(name, value)
    warehouse = tmp_path_factory.mktemp("warehouse")
    session = builder.config("spark.sql.warehouse.dir", str(warehouse)).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark what follows from a test's folder and fixtures, and begin with the longest files."""
    for item in items:
        if {"servers", "own_server", "mysqls", "my_kind"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("live")
        if FAULTS in item.path.parents:
            item.add_marker("faults")
    yield  # others choose by the marks, and make the order random
    seconds: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        seconds[item.path] += _seconds(item)
    # Each file is one worker's, so one that began last would keep the others waiting.
    items.sort(key=lambda item: -seconds[item.path])


def _seconds(item: pytest.Item) -> float:
    """About how long a test takes."""
    if item.get_closest_marker("slow"):
        return 20
    if "spark" in getattr(item, "fixturenames", ()):
        return 3
    return 0.5 if item.get_closest_marker("live") else 0.1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Give `caplog` back pytest's own format.

    pytest adds its handler to every logger that does not propagate; a logger of PySpark is one,
    and makes each handler that it is given write JSON.
    """
    plugin = item.config.pluginmanager.get_plugin("logging-plugin")
    assert plugin is not None
    plugin.caplog_handler.setFormatter(plugin.formatter)
