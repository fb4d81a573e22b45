"""A pipeline in a process of its own, from a log to five destinations at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from headrace.change.event import Change, Op, Transaction
from headrace.sinks.push import ledger
from headrace.sources.postgres.position import PostgresPosition
from headrace.testing import free_port, wait_until
from tests.changes import COMMIT_TIME, Writer, make_change, opened_writer
from tests.faults.pipeline.servers import PushDestination, Town
from tests.java import QUICK_JAVA

HEADRACE = [sys.executable, "-m", "headrace.cli"]
PATIENCE = 180  # seconds, for whatever is waited for

Rows = dict[str, list[int]]  # the numbers of each row's changes


class Works:
    """A folder with a config and a log; `headrace pipeline` runs there when it is told to."""

    def __init__(self, folder: Path, town: Town, writer: Writer) -> None:
        self.folder = folder
        self.town = town
        self.writer = writer
        self.ui = 0  # the port of Spark's pages
        self.environment = {**os.environ, **town.secrets}
        self._started: list[subprocess.Popen[bytes]] = []  # the last one may run
        self._numbers: dict[tuple[str, str], int] = {}

    def _configure(self) -> None:
        self.ui = free_port()  # one that was killed may still be there
        for name in ("events", "local"):
            (self.folder / name).mkdir(exist_ok=True)
        spark = {
            "spark.ui.enabled": True,
            "spark.ui.port": self.ui,
            "spark.driver.memory": "1g",
            **QUICK_JAVA,
            "spark.python.authenticate.socketTimeout": "60s",
            "spark.eventLog.enabled": True,
            "spark.eventLog.compress": False,
            "spark.eventLog.dir": f"file://{self.folder}/events",
            "spark.local.dir": f"{self.folder}/local",
        }
        # Small windows: a batch takes many, so that something may happen in its middle.
        common = {"batch_seconds": 0.1, "batch_size": 50, "parallelism": 2}
        content = {
            "sources": {"idle": {"type": "postgres", "url": "postgresql://127.0.0.1:1/shop"}},
            "server": {"port": free_port()},
            "pipeline": {
                "master": "local[2]",
                "spark": spark,
                "sinks": {each.name: {**each.sink(), **common} for each in self.town},
            },
        }
        (self.folder / "headrace.yaml").write_text(json.dumps(content))

    # --- the process -----------------------------------------------------------------------------

    def run(self) -> None:
        """Start the pipeline, unless it runs."""
        if self._started and self._started[-1].poll() is None:
            return
        self._configure()
        with (self.folder / "output.txt").open("ab") as output:
            self._started.append(
                subprocess.Popen(
                    [*HEADRACE, "pipeline"],
                    cwd=self.folder,
                    stdout=output,
                    stderr=output,
                    env=self.environment,
                    start_new_session=True,
                )
            )

    def kill(self) -> None:
        """End the driver at once; what it has started, Spark and its workers, is left alone."""
        self._started[-1].send_signal(signal.SIGKILL)
        assert self._started[-1].wait() == -signal.SIGKILL

    def stop(self) -> None:
        """End it in order, and make sure that nothing is left of any that ran."""
        try:
            if self._started and self._started[-1].poll() is None:
                self._started[-1].send_signal(signal.SIGTERM)
                self._started[-1].wait(120)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end; it said:\n{(self.folder / 'output.txt').read_text()}")
        finally:
            for each in self._started:
                with suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
                each.wait()

    def ask(self, *command: str, code: int = 0) -> str:
        """What a command says."""
        told = subprocess.run(
            [*HEADRACE, *command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            env={**self.environment, "COLUMNS": "1000"},
        )
        said = told.stdout + told.stderr
        with (self.folder / "output.txt").open("a") as output:
            output.write(said)
        assert told.returncode == code, said
        return said

    # --- what goes in ----------------------------------------------------------------------------

    def put(self, table: str, rows: Sequence[str]) -> None:
        """One transaction: the next change of each row, in this order."""
        self.commit([(table, row, "") for row in rows])

    def commit(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """One transaction: the next change of each table's row, with a note."""
        sequence = self.writer.log.latest_sequence + 1
        changes: list[Change] = []
        for at, (table, row, note) in enumerate(rows, 1):
            number = self._numbers[(table, row)] = self._numbers.get((table, row), 0) + 1
            changes.append(
                make_change(
                    Op.INSERT if number == 1 else Op.UPDATE,
                    table=self.writer.table(table),
                    key={"id": row},
                    after={"id": row, "number": number, "name": note},
                    ordinal=at,
                    last=at == len(rows),
                    transaction=Transaction(str(sequence), COMMIT_TIME, COMMIT_TIME),
                    position=PostgresPosition(sequence * 16, sequence * 16 - 8),
                )
            )
        self.writer.append(changes)

    def rows(self, table: str) -> Rows:
        """What a consumer should see of a table."""
        counts = {row: count for (of, row), count in self._numbers.items() if of == table}
        return {row: list(range(1, count + 1)) for row, count in counts.items()}

    # --- what it says ----------------------------------------------------------------------------

    def status(self, sink: PushDestination) -> dict[str, Any]:
        """What the running pipeline says of a sink."""
        file = self.folder / "data/pipeline/status.json"
        sinks = json.loads(file.read_text())["sinks"] if file.exists() else []
        told: dict[str, Any] = next((each for each in sinks if each["sink"] == sink.name), {})
        return {name: value for name, value in told.items() if name != "troubled"}

    def settled(self, sink: PushDestination) -> bool:
        """Whether all that is in the log was sent or kept."""
        return self._progress(sink) >= self.writer.log.latest_sequence

    def _progress(self, sink: PushDestination) -> int:
        file = self.folder / "data/pipeline" / sink.name / ledger.FILE
        lines = ledger.read(file) if file.exists() else []
        return max((line.last for line in lines if line.what in ledger.SETTLED), default=0)

    def await_settled(self) -> None:
        """Until every sink is done with all that is in the log."""
        for each in self.town:
            wait_until(
                lambda sink=each: self.settled(sink),  # type: ignore[misc]
                timeout=PATIENCE,
                message=f"{each.name} has settled everything",
            )

    def await_status(self, sink: PushDestination, **wanted: object) -> None:
        """Until the running pipeline says so of a sink."""
        wait_until(
            lambda: wanted.items() <= self.status(sink).items(),
            timeout=PATIENCE,
            message=f"{sink.name} says {wanted}",
        )

    def letters(self, sink: PushDestination, table: str) -> list[dict[str, Any]]:
        """A sink's dead letters of a table, in order."""
        folder = self.folder / "data/pipeline" / sink.name / "dead_letters"
        if not folder.exists():
            return []
        rows = DeltaTable(str(folder)).to_pyarrow_table().sort_by("sequence").to_pylist()
        return [each for each in rows if each["table"] == table]

    # --- what came of it -------------------------------------------------------------------------

    def check(self, table: str) -> None:
        """Everything is everywhere, rows are in order, and repeats have the same id."""
        for each in self.town:
            assert self.letters(each, table) == [], each.name
            assert_arrived(each, table, self.rows(table))

    def verified(self, sink: PushDestination) -> dict[str, Any]:
        """What `headrace verify` says of a sink that misses nothing."""
        told: dict[str, Any] = json.loads(self.ask("verify", sink.name, "--json"))
        assert (told["missing"], told["letters_missing"], told["to_come"]) == ([], 0, 0), told
        return told


def assert_arrived(
    sink: PushDestination, table: str, rows: Rows, *, but: Collection[str] = ()
) -> None:
    """Without its repeats, which have the same id, each row is whole and in order.

    Nothing came of the rows that are excepted.
    """
    rows = {row: numbers for row, numbers in rows.items() if row not in but}
    ids: dict[tuple[str, int], str] = {}
    seen: Rows = {}
    for event in sink.read(table):
        place = event.row, event.number
        if place not in ids:
            seen.setdefault(event.row, []).append(event.number)
        assert ids.setdefault(place, event.id) == event.id, f"{sink.name}: {place} has two ids"
    assert len(set(ids.values())) == len(ids), f"{sink.name}: two events have the same id"
    lost = sum(len(set(numbers) - set(seen.get(row, []))) for row, numbers in rows.items())
    assert lost == 0, f"{sink.name}: {lost} of {sum(map(len, rows.values()))} events are lost"
    assert seen == rows, sink.name


# --- secrets -------------------------------------------------------------------------------------


def files_with(folder: Path, *secrets: str) -> list[Path]:
    """The files in which one of these can be read."""
    wanted = [each.encode() for each in secrets]
    found = []
    for file in folder.rglob("*"):
        try:
            content = file.read_bytes() if file.is_file() else b""
        except FileNotFoundError:
            continue  # Spark deletes some of its own
        if any(each in content for each in wanted):
            found.append(file)
    return found


@contextmanager
def opened_works(folder: Path, town: Town) -> Iterator[Works]:
    """A place whose pipeline ends with the context."""
    with opened_writer(folder / "data" / "log") as writer:
        made = Works(folder, town, writer)
        try:
            yield made
        finally:
            made.stop()
