"""The others: the Debezium engine, and the two PostgreSQL tools that are the limit of the server.

`pg_recvlogical` receives the same bytes as any consumer of logical replication and writes them to
a file unread; `\\copy` does the same with a table. Nobody who decodes can be faster.
"""

import time
from pathlib import Path

import msgspec

from headrace.change.lsn import parse_lsn
from headrace.testing import PostgresDatabase

from . import workload
from .process import MeasurementFailed, Outcome, measure, module, run

# As many as Headrace's `snapshot_workers`: Debezium 3.6 cuts a table into a chunk for each thread.
DEBEZIUM_SNAPSHOT_THREADS = 2


class Task(msgspec.Struct, frozen=True):
    """What the Debezium engine is to read."""

    url: str
    slot: str
    publication: str
    table: str
    mode: str  # Debezium's snapshot.mode: no_data or initial_only
    expected: int  # records
    threads: int  # Debezium's snapshot.max.threads


def debezium_stream(
    database: PostgresDatabase, slot: str, *, changes: int, folder: Path
) -> Outcome:
    """The backlog, from a slot made before it, through the Debezium engine."""
    task = Task(
        url=database.url,
        slot=slot,
        publication=workload.PUBLICATION,
        table=workload.BACKLOG_TABLE,
        mode="no_data",
        expected=changes,
        threads=1,
    )
    return measure(module("debezium_run", msgspec.json.encode(task).decode()), folder)


def debezium_snapshot(database: PostgresDatabase, slot: str, *, rows: int, folder: Path) -> Outcome:
    """A whole table through the Debezium engine."""
    task = Task(
        url=database.url,
        slot=slot,
        publication=slot,
        table=workload.COPY_TABLE,
        mode="initial_only",
        expected=rows,
        threads=DEBEZIUM_SNAPSHOT_THREADS,
    )
    return measure(module("debezium_run", msgspec.json.encode(task).decode()), folder)


def pg_recvlogical(
    database: PostgresDatabase, slot: str, *, changes: int, end: str, folder: Path
) -> Outcome:
    """The backlog into a file, undecoded, with the tool's own fsync every ten seconds."""
    received = folder / "received"
    command: list[str | Path] = [database.server.install.bin / "pg_recvlogical"]
    command += ["--dbname", database.url, "--slot", slot, "--start", "--no-loop"]
    command += ["--option", "proto_version=1"]
    command += ["--option", f"publication_names={workload.PUBLICATION}"]
    command += ["--file", received, "--endpos", end]
    seconds = _timed(command, folder)
    if workload.confirmed(database, slot) < parse_lsn(end):
        raise MeasurementFailed(f"pg_recvlogical stopped before {end}")
    return Outcome(changes, seconds, {"bytes": received.stat().st_size})


def copy(database: PostgresDatabase, *, rows: int, folder: Path) -> Outcome:
    """A whole table to /dev/null, unread."""
    psql = database.server.install.bin / "psql"
    statement = rf"\copy {workload.COPY_TABLE} to '/dev/null'"
    seconds = _timed([psql, "--no-psqlrc", "-d", database.url, "-c", statement], folder)
    return Outcome(rows, seconds)


def _timed(command: list[str | Path], folder: Path) -> float:
    began = time.perf_counter()
    run(command, folder)
    return time.perf_counter() - began
