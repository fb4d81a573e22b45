"""One log under test: processes that capture into it, and a reader that never looks away."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import msgspec
import psutil

from headrace.log import LogReader
from headrace.sources import Phase
from headrace.testing import PostgresDatabase, wait_until
from tests.faults.captor import Kill, Orders, Report
from tests.faults.verify import verify
from tests.faults.workload import TABLES

ROOT = Path(__file__).parents[2]


class Captor:
    """A capturing process, seen from outside."""

    def __init__(self, orders: Orders, output: Path) -> None:
        self._output = output
        with output.open("wb") as stdout, output.with_suffix(".errors").open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.captor", msgspec.json.encode(orders).decode()],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                cwd=ROOT,
            )

    @property
    def reports(self) -> list[Report]:
        """Everything it has said so far."""
        lines = self._output.read_bytes().splitlines(keepends=True)
        return [msgspec.json.decode(line, type=Report) for line in lines if line.endswith(b"\n")]

    @property
    def running(self) -> bool:
        """Whether it lives."""
        return self._process.poll() is None

    def wait_for(self, *phases: Phase, after: int | None = None) -> Report:
        """A report of one of these phases (none: any): the last one, or any but the first `after`.

        A phase that does not last is seen only with `after`.
        """

        def reported() -> list[Report]:
            reports = self.reports[-1:] if after is None else self.reports[after:]
            found = [report for report in reports if not phases or report.phase in phases]
            assert found or self.running, f"it has ended: {self.words()}"
            return found

        return wait_until(reported, timeout=120, message=f"{phases} after {self.reports}")[0]

    def wait_for_snapshots(self) -> None:
        """Wait until it streams, and every snapshot is complete."""

        def complete() -> bool:
            assert self.running, f"it has ended: {self.words()}"
            last = self.reports[-1]
            return last.phase is Phase.STREAMING and not last.copying

        wait_until(complete, timeout=120, message=f"complete after {self.reports}")

    def linger(self, seconds: float) -> None:
        """Let it run for a while, or to its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)

    def outlast(self, seconds: float) -> None:
        """Let it run for a while; it must not end by itself."""
        self.linger(seconds)
        assert self.running, f"it has ended: {self.words()}"

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self.wait(-signal.SIGKILL)

    def started(self) -> list[psutil.Process]:
        """The processes that it runs."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def stop(self) -> None:
        """Let it end in order."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.wait(0)

    def wait(self, *codes: int) -> None:
        """Wait until it has ended, with one of these exit codes."""
        self.linger(60)
        assert not self.running, f"it does not end: {self.stacks()}"
        found = self._process.returncode
        if self._process.stdin is not None:
            self._process.stdin.close()
        assert found in codes, f"it ended with {found}, not {codes}: {self.words()}"

    def abort(self) -> None:
        """Make sure that nothing of it is left."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def stacks(self) -> str:
        """What it is doing, thread by thread."""
        self._process.send_signal(signal.SIGUSR1)
        self.linger(0.5)
        return self.words()

    def words(self) -> str:
        """What it said, for whoever reads a failed test."""
        said = [self._output.read_text(), self._output.with_suffix(".errors").read_text()]
        return "\n".join(said)[-4000:]


class Watcher:
    """Reads the log from another process all the time, through every kill of its writer.

    It must never see a part of a transaction, a gap, a number that goes back, or a change that
    differs from what is in the log at the end.
    """

    def __init__(self, path: Path) -> None:
        self._reader = LogReader.open(path)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._wanted: set[bytes] = set()
        self.seen: list[int] = []  # a hash for each record
        self.polls = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def want(self, word: bytes) -> None:
        """Look out for a word."""
        self._wanted.add(word)

    def has(self, word: bytes) -> bool:
        """Whether a change with this word is in the log."""
        if self._failure is not None:
            raise self._failure
        return word not in self._wanted

    def stop(self) -> None:
        """End, and say what was wrong."""
        self._stopping.set()
        self._thread.join()
        self._reader.close()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stopping.wait(0.02):
                self._look()
            self._look()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self._failure = error

    def _look(self) -> None:
        reader, before = self._reader, len(self.seen)
        reader.refresh()
        self.polls += 1
        latest = reader.latest_sequence
        assert latest >= before, f"the last sequence was {before} and is {latest}"
        for sequence, record in reader.records(before, limit=latest - before):
            self.seen.append(hash(record))
            assert sequence == len(self.seen), f"{sequence} came after {len(self.seen) - 1}"
            for word in [word for word in tuple(self._wanted) if word in record]:
                self._wanted.discard(word)
        assert len(self.seen) == latest, f"{latest} is committed, {len(self.seen)} are there"
        if latest > before:
            (last,) = reader.read(latest - 1)
            assert last.last, f"sequence {latest} is visible but does not end its transaction"


class Scenario:
    """A database, a log, and what is done to them."""

    def __init__(self, database: PostgresDatabase, folder: Path) -> None:
        self.database = database
        self.log = folder / "log"
        self.kills = 0
        self._folder = folder
        self._captors: list[Captor] = []
        self._orphans: list[psutil.Process] = []
        self._watcher: Watcher | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for captor in self._captors:
            captor.abort()
        if self._watcher is not None:
            self._watcher.stop()

    def start(self, kill: Kill | None = None, **orders: Any) -> Captor:
        """A process that captures; returns when it has the log open, or was refused it."""
        given = Orders(data_dir=str(self.log), url=self.database.url, kill=kill, **orders)
        captor = Captor(given, self._folder / f"captor-{len(self._captors)}.out")
        self._captors.append(captor)
        captor.wait_for()
        if self._watcher is None:
            self._watcher = Watcher(self.log)
        return captor

    def start_to_die(self, kill: Kill, **orders: Any) -> None:
        """A process that captures until it kills itself."""
        self.dies(self.start(kill, **orders))

    def dies(self, captor: Captor) -> None:
        """Wait until a process has killed itself."""
        captor.wait(-signal.SIGKILL)
        self.kills += 1

    def kill(self, captor: Captor) -> None:
        """kill -9 from outside."""
        self._orphans += captor.started()
        captor.kill()
        self.kills += 1

    def wait_for_more(self, changes: int) -> None:
        """Wait until so many more are in the log."""
        assert self._watcher is not None
        seen = self._watcher.seen
        enough = len(seen) + changes
        wait_until(lambda: len(seen) >= enough, timeout=120, message=f"{changes} more changes")

    def catch_up(self, captor: Captor) -> None:
        """Wait until everything committed so far is in the log."""
        assert self._watcher is not None
        # A word from before the copy's point would come while rows are still being copied.
        captor.wait_for_snapshots()
        watcher, word = self._watcher, uuid4().hex
        watcher.want(word.encode())
        self.database.execute("SELECT pg_logical_emit_message(true, 'faults', %s)", (word,))

        def arrived() -> bool:
            assert captor.running, f"it has ended: {captor.words()}"
            return watcher.has(word.encode())

        wait_until(arrived, timeout=120, message=f"the log has caught up: {captor.reports[-1:]}")

    def finish(self, *, surprises: bool = True, more: Sequence[str] = ()) -> None:
        """Start once more, catch up, and compare the log with the database; `more`: tables."""
        captor = self.start()
        self.catch_up(captor)
        captor.stop()
        self.compare(surprises=surprises, more=more)

    def compare(self, *, surprises: bool = True, more: Sequence[str] = ()) -> None:
        """Hold the log against the database, and against what the reader saw meanwhile."""
        _, alive = psutil.wait_procs(self._orphans, timeout=120)
        assert not alive, f"processes outlive the one that started them: {alive}"
        seen: list[int] = []
        if self._watcher is not None:
            watcher, self._watcher = self._watcher, None
            watcher.stop()
            seen = watcher.seen
        with LogReader.open(self.log) as log:
            verify(log, self.database, tables=(*TABLES, *more), surprises=surprises)
            kept = [hash(record) for _, record in log.records(0, limit=len(seen))]
        assert kept == seen, "a change differs from what a reader saw of it before"
