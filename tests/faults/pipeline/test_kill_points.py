"""Killed between any two steps, the pipeline goes on: tables equal their source, nothing twice."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.sinks import SinkPhase
from tests.faults.pipeline.runner import WORKER_DIED, Orders, Point
from tests.faults.pipeline.trade import Runner, Trade

pytestmark = pytest.mark.slow


class Site:
    """A log, the process that carries it, and the next one, which starts meanwhile."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.trade = Trade(folder, seed)
        self._orders = Orders(str(folder), vacuum_hours=0)
        self.runner = Runner(self._orders)
        self._spare = Runner(self._orders)
        self.runner.run()

    def replace(self) -> None:
        """Go on with another process."""
        self.runner.close()
        self.runner, self._spare = self._spare, Runner(self._orders)

    def expect_all(self) -> None:
        """Change every table a little more, and find everything in its place, once."""
        self._go_on()
        # A vacuum finds them unused, and a later one deletes them; it may be busy meanwhile.
        unused = set(self.trade.orphans())
        for _ in range(4):
            if not unused:
                return
            self._go_on()
            unused &= set(self.trade.orphans())
        raise AssertionError(f"never deleted: {sorted(unused)}")

    def _go_on(self) -> None:
        self.trade.go_on(2)
        told = self.runner.run()
        assert [status.phase for status in told.sinks] == [SinkPhase.STOPPED] * 2, told
        assert not told.sinks[0].failed_tables
        self.trade.check_end()

    def close(self) -> None:
        """Leave nothing behind."""
        self.runner.close()
        self._spare.close()
        self.trade.log.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("kills"), random.getrandbits(32))
    yield site
    site.close()


@pytest.fixture
def site(shared: Site) -> Site:
    """The same for every point, in whatever order they come: each finds what the last one left."""
    if shared.runner.process.poll() is not None:  # a test that failed has left it so
        shared.replace()
    return shared


def grow(trade: Trade) -> None:
    """More rows than a file holds."""
    trade.fill("orders", 4000)


def begin(trade: Trade) -> None:
    """Another table."""
    trade.begin(f"table{len(trade.names)}")
    trade.go_on()


def add_column(trade: Trade) -> None:
    """Another column."""
    trade.go_on()
    trade.add_column("customers")
    trade.go_on()


def change_columns(trade: Trade) -> None:
    """A table whose files must all be written anew."""
    name = f"changing{len(trade.names)}"
    trade.begin(name)
    trade.fill(name, 20)
    trade.change_columns(name)
    trade.go_on()


def empty(trade: Trade) -> None:
    """A table without its rows."""
    trade.go_on()
    trade.empty("returns")
    trade.go_on()


def small_batches(trade: Trade) -> None:
    """Many small files."""
    for _ in range(4):
        trade.fill("returns", 3)


PLACES: list[tuple[Point, Callable[[Trade], None], int]] = [
    (Point.CREATED, begin, 1000),
    (Point.WRITTEN, empty, 1000),
    (Point.ONE_COMMITTED, empty, 1000),
    (Point.COMMITTED, begin, 1000),
    (Point.NOTED, empty, 1000),
    (Point.COLUMNS_ADDED, add_column, 1000),
    (Point.REPLACED, change_columns, 20),
    (Point.JOINED, small_batches, 3),
    (Point.ARRANGED, grow, 5000),
    (Point.HISTORY_WRITTEN, empty, 1000),
    (Point.HISTORY_COMMITTED, empty, 1000),
]


@pytest.mark.requirement("S2-21", "S2-24")
@pytest.mark.parametrize(("point", "happen", "most"), PLACES, ids=[p.name for p, *_ in PLACES])
def test_killed_when(site: Site, point: Point, happen: Callable[[Trade], None], most: int) -> None:
    happen(site.trade)
    site.runner.die(kill=point, most=most)
    site.trade.check_moment()
    site.replace()
    site.expect_all()


def test_java_killed_alone_ends_the_process_in_order(site: Site) -> None:
    empty(site.trade)
    told = site.runner.run(kill=Point.JAVA)
    assert "Spark's Java process has ended; no batch is lost" in told.error
    site.trade.check_moment()
    site.replace()
    site.expect_all()


def test_a_worker_killed_alone_fails_its_task_and_the_batch_is_tried_again(site: Site) -> None:
    empty(site.trade)
    told = site.runner.run(kill=Point.WORKER)
    assert (site.trade.folder / WORKER_DIED).exists()
    assert [status.phase for status in told.sinks] == [SinkPhase.STOPPED] * 2, told
    site.trade.check_end()
    site.expect_all()
