"""Processes of a pipeline by kind: how much memory each kind holds, and how much time it uses."""

import re
import threading
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psutil

Kind = Literal["server", "driver", "JVM", "workers"]

# Seconds between two looks. The kernel keeps each process's peak, so none is missed between them.
_PERIOD = 1.0


Used = dict[tuple[Kind, int], float]
"""Seconds of processor time by kind and process."""


def spent(before: Used, after: Used) -> dict[Kind, float]:
    """What each kind used between two looks.

    Process by process: one that ended between them takes its whole life's time along, which a
    difference of sums would count as negative work.
    """
    seconds: dict[Kind, float] = defaultdict(float)
    for (kind, pid), used in after.items():
        seconds[kind] += used - before.get((kind, pid), 0.0)
    return seconds


class Family:
    """A process and all that it started, now and later."""

    def __init__(self, pid: int, kind: Kind) -> None:
        """`kind` is what the process itself counts as."""
        self._root = psutil.Process(pid)
        self._kind = kind

    def members(self) -> list[tuple[Kind, psutil.Process]]:
        """Everyone alive, and what each counts as."""
        processes = {self._root.pid: self._root}
        processes |= {child.pid: child for child in self._root.children(recursive=True)}
        found: list[tuple[Kind, psutil.Process]] = []
        for process in processes.values():
            try:
                found.append((self._kind_of(process, processes), process))
            except psutil.NoSuchProcess:
                continue  # it ended while it was looked at
        return found

    def _kind_of(self, process: psutil.Process, processes: dict[int, psutil.Process]) -> Kind:
        if process.pid == self._root.pid:
            return self._kind
        parent = processes.get(process.ppid())
        above = self._kind if parent is None else self._kind_of(parent, processes)
        if above in ("JVM", "workers"):
            return "workers"
        if process.name() == "java":
            return "JVM"
        return "driver" if "pipeline" in process.cmdline() else above

    def peaks(self) -> dict[tuple[Kind, int], float]:
        """The most that everyone alive has ever held, in MB, by kind and process."""
        return {(kind, process.pid): _peak(process) / 1e6 for kind, process in self.members()}

    def seconds(self) -> Used:
        """Processor time that everyone alive has used."""
        used: Used = {}
        for kind, process in self.members():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue  # it ended while it was looked at
            used[kind, process.pid] = times.user + times.system
        return used


def _peak(process: psutil.Process) -> float:
    """Bytes; memory that forked workers share counts for each of them."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0.0  # it ended while it was looked at
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return float(found[1]) * 1024 if found else 0.0


class Peaks:
    """The peaks of all processes of each kind added up: never less than what they held at once."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._seen: dict[tuple[Kind, int], float] = {}

    @property
    def highest(self) -> dict[Kind, float]:
        """MB by kind."""
        held: dict[Kind, float] = defaultdict(float)
        for (kind, _), peak in self._seen.items():
            held[kind] += peak
        return held

    def largest(self, kind: Kind) -> float:
        """The highest peak of a single process of a kind, in MB."""
        return max((peak for (of, _), peak in self._seen.items() if of == kind), default=0.0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_PERIOD):
            try:
                peaks = self._family.peaks()
            except psutil.NoSuchProcess:
                return  # whoever waits for its answer will say so
            for process, peak in peaks.items():
                self._seen[process] = max(peak, self._seen.get(process, 0.0))
