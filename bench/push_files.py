"""Log → files: JSON Lines and Parquet through a streaming query, beside a loop that only writes.

The loop has the same events ready in memory and writes them to one file a batch, each synced to
disk; what it takes no pipeline can beat.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import pyarrow.dataset as ds

from headrace.formats.facts import Facts
from headrace.formats.savegress import Savegress
from headrace.log import Log
from headrace.sinks.files.sink import Files
from headrace.sinks.files.stage import Kind

from .orders import Orders
from .process import MeasurementFailed, Outcome, answer, measure, module
from .push import size, through
from .report import Figure, Figures

ROWS = 100_000  # different ones
CHANGES = 100_000  # of a query's batch
BATCHES, WARM_UP = 3, 2
HEADRACE, LOOP = "Headrace", "a loop that writes ready lines"
WHO: tuple[tuple[str, Kind], ...] = ((HEADRACE, "jsonl"), (HEADRACE, "parquet"), (LOOP, "jsonl"))


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Which changes are written where, and how."""

    log: str
    folder: str
    kind: Kind
    changes: int  # of a batch of the query
    warm_up: int = WARM_UP

    def encode(self) -> str:
        """As the argument of a child."""
        return msgspec.json.encode(self).decode()

    @property
    def events(self) -> int:
        """How many there are in all."""
        return self.changes * (BATCHES + self.warm_up)

    @property
    def path(self) -> Path:
        """Where the files go."""
        return Path(self.folder, "files")

    @property
    def sink(self) -> Files:
        """The sink with its defaults."""
        return Files(name="trail", path=str(self.path), kind=self.kind)


def deliveries(folder: Path, *, factor: float, runs: int) -> Figures:
    """Events a second, of each the best run."""
    changes = size(CHANGES, factor)
    log = str(folder / "log")
    Orders(log).update(ROWS, batch=changes, batches=BATCHES, warm_up=WARM_UP)
    figures: list[Figure] = []
    for who, kind in WHO:
        best = 0.0
        for run in range(runs):
            place = folder / f"{len(figures)}-{run}"
            place.mkdir()
            task = Task(log=log, folder=str(place), kind=kind, changes=changes)
            best = max(best, written(who, task).rate)
        figures.append(Figure(f"{who}: {kind}", best, "events/s"))
    return Figures("Log → files: updates of 8 columns, on this machine's disk", figures)


def written(who: str, task: Task) -> Outcome:
    """One run; every event must be there."""
    outcome = measure(module("push_files", who, task.encode()), Path(task.folder))
    if (found := _found(task)) != task.events:
        raise MeasurementFailed(f"{found} events were written, not {task.events}")
    return outcome


def _found(task: Task) -> int:
    if task.kind == "parquet":
        return int(ds.dataset(task.path, format="parquet").count_rows())
    return sum(file.read_bytes().count(b"\n") for file in task.path.glob("day=*/*.jsonl"))


def headrace(task: Task) -> Outcome:
    """The real query."""
    folder, changes = Path(task.folder), task.changes
    return through(task.sink, task.log, folder, changes=changes, warm_up=task.warm_up)


def bare(task: Task) -> Outcome:
    """Lines that are ready, written to a file for each batch."""
    with Log.open(task.log) as log:
        encode = Savegress(Facts()).encode
        read = log.read(0, limit=task.events)
        lines = [event + b"\n" for change in read if (event := encode(change)) is not None]
    folder = task.path / "day=0"
    folder.mkdir(parents=True)
    began = time.perf_counter()
    for begin in range(0, len(lines), task.changes):
        with (folder / f"{begin}.jsonl").open("wb") as file:
            file.writelines(lines[begin : begin + task.changes])
            file.flush()
            os.fsync(file.fileno())
    return Outcome(len(lines), time.perf_counter() - began)


def main(who: str, encoded: str) -> None:
    """Do one task and answer."""
    task = msgspec.json.decode(encoded, type=Task)
    answer(headrace(task) if who == HEADRACE else bare(task))


if __name__ == "__main__":
    main(*sys.argv[1:])
