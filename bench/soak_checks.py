"""After a soak: whether the source, the log, the clients and the lake have the same."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
from deltalake import DeltaTable

from headrace.change.event import Change, Op
from headrace.log import LogReader

from .soak_clients import ClientTotals

_OPS = {Op.INSERT: "inserted", Op.UPDATE: "updated", Op.DELETE: "deleted"}
_BLOCK = 10_000


class _Row(msgspec.Struct):
    id: int
    n: int = 0


class LogTotals:
    """What a log holds of each table."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.events: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()
        self.rows: defaultdict[str, dict[int, int]] = defaultdict(dict)  # id -> n

    def read(self, folder: Path) -> None:
        """All of it, in order."""
        with LogReader.open(folder) as log:
            after = 0
            while changes := log.read(after, limit=_BLOCK):
                for change in changes:
                    self._take(change)
                after = changes[-1].sequence

    def _take(self, change: Change) -> None:
        table, op = change.table.name, change.op
        self.events[table] += 1
        self.sums[table] += change.sequence
        if op not in (*_OPS, Op.READ):
            return
        if op in _OPS:
            self.counts[table, _OPS[op]] += 1
        image = change.key if op is Op.DELETE else change.after
        row = msgspec.json.decode(image or b"{}", type=_Row)
        if op is Op.DELETE:
            self.rows[table].pop(row.id, None)
        else:
            self.rows[table][row.id] = row.n


def compare(
    url: str, folder: Path, tables: Sequence[str], clients: Sequence[ClientTotals]
) -> list[str]:
    """What differs, in sentences."""
    log = LogTotals()
    log.read(folder / "data" / "log")
    with psycopg.connect(url) as source:
        found = _source_and_log(source, log, tables)
        found += _clients_and_log(clients, log)
        found += _lake_and_source(source, folder / "lake", tables)
    history = pa.table(DeltaTable(folder / "history").scan(columns=["sequence"]))
    distinct = len(history["sequence"].unique())
    if not len(history) == distinct >= sum(log.events.values()):
        found.append(f"history: {len(history)} rows, {distinct} sequences, {log.events.total()}")
    return found


def _source_and_log(
    source: psycopg.Connection[Any], log: LogTotals, tables: Sequence[str]
) -> list[str]:
    done = source.execute(
        "SELECT work, sum(inserted), sum(updated), sum(deleted) FROM ticks GROUP BY work"
    )
    found = []
    for number, *counts in done.fetchall():
        table = tables[number]
        kept = [log.counts[table, each] for each in ("inserted", "updated", "deleted")]
        if [int(count) for count in counts] != kept:
            found.append(f"{table}: the source has done {counts}, the log has {kept}")
    for table in tables:
        if _rows(source, table) != log.rows[table]:
            found.append(f"{table}: the log leads to other rows than the source has")
    return found


def _clients_and_log(clients: Sequence[ClientTotals], log: LogTotals) -> list[str]:
    return [
        f"a client of {had.table} had {had.events} events, the log has {log.events[had.table]}"
        for had in clients
        if (had.events, had.total) != (log.events[had.table], log.sums[had.table])
    ]


def _lake_and_source(
    source: psycopg.Connection[Any], lake: Path, tables: Sequence[str]
) -> list[str]:
    found = []
    for table in tables:
        stored = pa.table(DeltaTable(lake / "public" / table).scan(columns=["id", "n"]))
        rows = dict(zip(stored["id"].to_pylist(), stored["n"].to_pylist(), strict=True))
        if len(rows) != len(stored) or rows != _rows(source, table):
            found.append(f"{table}: the Delta table has other rows than the source")
    return found


def _rows(source: psycopg.Connection[Any], table: str) -> Mapping[int, int]:
    return dict(source.execute(f"SELECT id, n FROM {table}").fetchall())
