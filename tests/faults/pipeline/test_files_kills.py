"""Killed between any two steps, the files sink goes on: every change once, no file cut short."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.formats.catalogue import Formats
from headrace.sinks import Phase
from tests.faults.pipeline.filer import Point, Run, Told
from tests.faults.pipeline.trade import ROOT
from tests.sinks.drawer import DAY, Cabinet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BATCH = 60  # changes, of two days


class Filer:
    """The process that writes the files, seen from outside."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "filer.errors"
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.pipeline.filer", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
            )
        self._ready = False

    def run(self) -> None:
        """Carry all that is in the log."""
        told = self._asked(Run())
        assert told is not None, self._errors.read_text()[-4000:]
        assert told.phase is Phase.STOPPED, told

    def die(self, point: Point) -> None:
        """Carry until it kills itself."""
        told = self._asked(Run(point))
        assert told is None, f"it did not die: {told}"
        assert self._process.wait() == -signal.SIGKILL, self._errors.read_text()[-4000:]

    def close(self) -> None:
        """Make sure that nothing of it is left."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            stream.close()

    def _asked(self, order: Run) -> Told | None:
        if not self._ready:
            assert self._heard(), f"it does not start: {self._errors.read_text()[-4000:]}"
            self._ready = True
        assert self._process.stdin
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> Told | None:
        assert self._process.stdout
        line = self._process.stdout.readline()
        return msgspec.json.decode(line, type=Told) if line else None


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
