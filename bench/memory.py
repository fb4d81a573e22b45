"""Memory: how much capture grows while one very large transaction passes through it."""

import threading
from pathlib import Path

import msgspec
import psutil

from headrace.testing import PostgresDatabase

from . import workload
from .headrace_run import Task
from .process import Outcome, child, module, next_line
from .report import Figure, Figures

LIMIT = 200.0  # MB
_PERIOD = 0.005  # seconds between two looks


class Peak:
    """The most memory that a process and those it started have held since `start`."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before = self.highest = 0.0

    def start(self) -> None:
        """Note what it holds now, and watch."""
        self.before = self.highest = self._held()
        self._thread.start()

    @property
    def growth(self) -> float:
        """MB above what it held at the start."""
        return self.highest - self.before

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_PERIOD):
            self.highest = max(self.highest, self._held())

    def _held(self) -> float:
        return sum(_resident(process) for process in self._family()) / 1e6

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


def _resident(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0.0  # it ended while it was looked at


def measure(database: PostgresDatabase, folder: Path, *, rows: int) -> Figures:
    """Commit one transaction of many rows under a running capture, and watch it."""
    slot = "bench_memory"
    workload.create_slot(database, slot)
    task = Task(
        mode="follow",
        url=database.url,
        slot=slot,
        log=str(folder / "log"),
        expected={"INSERT": rows},
    )
    with child(module("headrace_run", task.encode())) as process:
        next_line(process)  # it is streaming
        peak = Peak(process.pid)
        peak.start()
        workload.load_one_transaction(database, rows)
        outcome = msgspec.json.decode(next_line(process), type=Outcome)
        peak.stop()
    workload.drop_slot(database, slot)
    return figures(outcome, peak)


def figures(outcome: Outcome, peak: Peak) -> Figures:
    """The growth beside its limit."""
    return Figures(
        f"One transaction of {outcome.rows:,} rows through capture",
        [
            Figure("growth of the resident set, at its peak", peak.growth, "MB", below=LIMIT),
            Figure("resident set before", peak.before, "MB"),
        ],
    )
