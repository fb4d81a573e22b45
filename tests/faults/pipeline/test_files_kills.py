"""Killed between any two steps, the files sink goes on: every change once, no file cut short."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.formats.catalogue import Formats
from headrace.sinks import SinkPhase
from tests.faults.pipeline.dying import Run, RunResult
from tests.faults.pipeline.filer import Point
from tests.faults.pipeline.outside import Outside
from tests.sinks.files_harness import DAY, Cabinet

pytestmark = pytest.mark.slow

BATCH = 60  # changes, of two days


class Filer(Outside[RunResult]):
    """The process that writes the files."""

    def __init__(self, folder: Path) -> None:
        super().__init__("filer", str(folder), folder, RunResult)

    def run(self) -> None:
        """Carry all that is in the log."""
        ended = self.does(Run())
        assert ended.phase is SinkPhase.STOPPED, ended

    def die(self, point: Point) -> None:
        """Carry until it kills itself."""
        self.dies_of(Run(point))


class Place(Cabinet):
    """A log, files of it, and the process between them, with the next one that starts meanwhile."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.filer, self._spare = Filer(folder), Filer(folder)

    def grow(self) -> int:
        """Changes of two days; returns how many events the log had before."""
        before = self.log.latest_sequence
        for _ in range(2):
            self.fill(BATCH // 2)
            self.clock += DAY
        return before

    def die(self, point: Point) -> None:
        """Let it die; the next one takes its place."""
        self.filer.die(point)
        self.filer.close()
        self.filer, self._spare = self._spare, Filer(self.folder)

    def due(self, upto: int | None = None) -> list[str]:
        """The lines that there should be."""
        return self.events(upto=upto, formats=Formats())

    def check(self) -> None:
        """Every change is there once, and nothing else is."""
        assert self.lines() == self.due()
        assert self.left() == []

    def close(self) -> None:
        """Leave nothing behind."""
        self.filer.close()
        self._spare.close()
        self.log.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("files"))
    yield made
    made.close()


@pytest.mark.requirement("S1-40", "S1-41")
@pytest.mark.parametrize("point", Point, ids=[point.name for point in Point])
def test_killed_when(place: Place, point: Point) -> None:
    place.filer.run()
    before = place.grow()
    files = len(place.names())
    place.die(point)
    seen = {
        Point.STAGED: 0,
        Point.WRITTEN: 0,
        Point.COMMITTED: 0,
        Point.ONE_MOVED: 1,
    }.get(point)
    if seen is not None:
        assert len(place.names()) == files + seen
        assert place.left()
    # What a reader finds meanwhile has no gap: files come to their places in order.
    assert place.lines() == place.due()[: len(place.lines())]
    assert place.lines()[:before] == place.due(before)
    place.filer.run()
    place.check()


@pytest.mark.requirement("S1-41")
def test_without_its_checkpoint_it_goes_on_where_the_files_end(place: Place) -> None:
    place.filer.run()
    place.grow()
    [owner] = {entry["writer"] for entry in entries(place.path)}
    checkpoint = place.folder / "pipeline" / "drawer" / "checkpoint"
    for part in ("offsets", "commits", "metadata"):
        found = checkpoint / part
        shutil.rmtree(found) if found.is_dir() else found.unlink()
    place.filer.run()
    place.check()
    assert {entry["writer"] for entry in entries(place.path)} == {owner}


def entries(path: Path) -> list[dict[str, object]]:
    """What the ledger says."""
    return [msgspec.json.decode(file.read_bytes()) for file in path.glob("_headrace/*.json")]
