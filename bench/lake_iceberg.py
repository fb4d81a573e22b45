"""A second peer: an Apache Iceberg table, written by pyiceberg on one node.

It reads the same log and decodes it with the same code as the other peer. Rows of the same keys are
overwritten: what `Table.upsert` does too, after it has compared every value in Python, which took
more than twice as long.
"""

import sys
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import In, Reference
from pyiceberg.table import Table as IcebergTable

from .lake_peer import OP, changes_of, latest, typed
from .lake_task import Lap, Task, outcome
from .orders import NAME, SCHEMA
from .process import Outcome, answer


def apply(task: Task) -> Outcome:
    """The task's changes: appended where there is no table yet, in place of others afterwards."""
    fresh = not _warehouse(task).exists()
    table = _table(task)
    laps = [Lap(time.perf_counter(), 0, _size(task))]
    for after in range(task.after, task.upto, task.batch):
        changes = changes_of(task, after, min(after + task.batch, task.upto))
        rows = typed(changes if fresh else latest(changes))
        began = time.perf_counter()
        _append(table, rows) if fresh else _overwrite(table, rows)
        now = time.perf_counter()
        laps.append(Lap(now, changes.num_rows, _size(task), now - began))
    done = outcome(task, laps, added=lambda before: _size(task) - before)
    _copy(table, task)
    return done


def _warehouse(task: Task) -> Path:
    return Path(task.folder, "iceberg")


def _size(task: Task) -> int:
    """Bytes of all that was ever written: nothing is deleted."""
    return sum(file.stat().st_size for file in _warehouse(task).rglob("*") if file.is_file())


def _table(task: Task) -> IcebergTable:
    folder = _warehouse(task)
    folder.mkdir(exist_ok=True)
    catalog = SqlCatalog("bench", uri=f"sqlite:///{task.folder}/catalog.db", warehouse=str(folder))
    catalog.create_namespace_if_not_exists(SCHEMA)
    schema = typed(_NOTHING).drop_columns([OP]).schema
    return catalog.create_table_if_not_exists(f"{SCHEMA}.{NAME}", schema)


_NOTHING = pa.table({name: pa.array([], pa.string()) for name in ("op", "key", "after")})


def _append(table: IcebergTable, rows: pa.Table) -> None:
    table.append(rows.drop_columns([OP]))


def _overwrite(table: IcebergTable, rows: pa.Table) -> None:
    alive = rows.filter(pc.not_equal(rows[OP], "DELETE"))
    replaced = In(term=Reference("id"), values=rows["id"].to_pylist())
    table.overwrite(alive.drop_columns([OP]), overwrite_filter=replaced)


def _copy(table: IcebergTable, task: Task) -> None:
    """Its rows as a Delta table, which can be compared with those of the others."""
    task.table.mkdir(parents=True, exist_ok=True)
    write_deltalake(str(task.table), table.scan().to_arrow(), mode="overwrite")


def main(encoded: str) -> None:
    """Do one task and answer."""
    answer(apply(msgspec.json.decode(encoded, type=Task)))


if __name__ == "__main__":
    main(sys.argv[1])
