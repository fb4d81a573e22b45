"""Killed at one of three points of a commit, the Iceberg history goes on: every change once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.catalog.rest import RestCatalog

from headrace.sinks import SinkPhase
from headrace.testing.iceberg import IcebergServer
from tests.faults.pipeline.dying import Run, RunResult
from tests.faults.pipeline.iceberger import NAMESPACE, Point
from tests.faults.pipeline.outside import Outside
from tests.needs import expect_iceberg
from tests.sinks.archive import ACCOUNTS, account
from tests.sinks.lake import Shop, put

pytestmark = pytest.mark.slow

TABLES = ("accounts", "orders")


class Iceberger(Outside[RunResult]):
    """The process that writes the tables."""

    def __init__(self, folder: Path, server: IcebergServer) -> None:
        super().__init__("iceberger", str(folder), folder, RunResult, server.uri)

    def run(self) -> None:
        """Carry all that is in the log."""
        ended = self.does(Run())
        assert ended.phase is SinkPhase.STOPPED, ended


class IcebergPlace(Shop):
    """A log, Iceberg tables of it, and the process between them."""

    def __init__(self, folder: Path, server: IcebergServer) -> None:
        super().__init__(folder)
        self.server = server
        self.process = self._started()

    def _started(self) -> Iceberger:
        return Iceberger(self.folder, self.server)

    def grow(self) -> None:
        """Changes of two tables."""
        for number in range(20):
            for name in TABLES:
                self.commit(put(self.table(name, ACCOUNTS), **account(number)))

    def die(self, point: Point) -> None:
        """Let it die; the next one takes its place."""
        self.process.dies_of(Run(point))
        self.process.close()
        self.process = self._started()

    def check(self) -> None:
        """Every change is there once; a killed driver may leave files that no snapshot has."""
        catalog = RestCatalog("reader", uri=self.server.uri)
        found: list[int] = []
        used: set[str] = set()
        for name in TABLES:
            scan = catalog.load_table((NAMESPACE, f"public_{name}")).scan()
            found += scan.to_arrow()["sequence"].to_pylist()
            used |= {Path(each.file.file_path).name for each in scan.plan_files()}
        assert sorted(found) == list(range(1, self.log.latest_sequence + 1))
        assert used <= {each.name for each in self.server.warehouse.rglob("*.parquet")}

    def close(self) -> None:
        """Leave nothing behind."""
        self.process.close()
        self.log.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IcebergPlace]:
    expect_iceberg()
    with IcebergServer() as server:
        made = IcebergPlace(tmp_path_factory.mktemp("iceberg"), server)
        made.grow()
        made.process.run()  # which makes the tables
        yield made
        made.close()


@pytest.mark.parametrize("point", Point, ids=[point.name for point in Point])
def test_killed_when(place: IcebergPlace, point: Point) -> None:
    place.grow()
    place.die(point)
    place.process.run()
    place.check()
