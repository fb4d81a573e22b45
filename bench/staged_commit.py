"""What the commit of `format("headrace.tables")` costs: time and memory by the size of a batch.

    python -m bench.staged_commit CHANGES [ROWS]

CHANGES are staged as tasks stage them, and applied in a process of their own as the commit does,
to a table that holds ROWS rows already (each change then updates one). Without Spark: its part is
the same as for any sink.
"""

import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from headrace.change.arrow import row_schema
from headrace.change.event import Column, Table
from headrace.sinks.tables.sink import Tables, TablesWriter
from headrace.sinks.tables.staged import ChangeStage, StagedInput, StagedPart

COLUMNS = (
    Column("id", "bigint", key=True),
    Column("status", "text"),
    Column("amount", "numeric(12,2)"),
    Column("note", "text"),
)
ORDERS = Table("shop", "postgres", "origin", "shop", "public", "orders", COLUMNS, version=1)
BATCH = 10_000  # rows, as Spark sends them


def batches(first: int, count: int, keys: int, op: str) -> Iterator[pa.RecordBatch]:
    """Changes in the order of the log, each of about 100 bytes of JSON."""
    same = {"op": op, "source": "shop", "connector": "postgres", "schema": "public"}
    same |= {"table": "orders", "row_schema": row_schema(ORDERS), "epoch": "e"}
    for begin in range(first, first + count, BATCH):
        numbers = range(begin, min(begin + BATCH, first + count))
        # A prime spreads the keys over the table, as changes of a shop are spread.
        ids = [number * 7919 % keys for number in numbers]
        rows: dict[str, Any] = {name: [text] * len(ids) for name, text in same.items()}
        rows["sequence"] = list(numbers)
        rows["schema_version"] = pa.array([1] * len(ids), pa.int32())
        rows["key"] = [f'{{"id":{at}}}' for at in ids]
        rows["before"] = pa.nulls(len(ids), pa.string())
        rows["after"] = [
            f'{{"id":{at},"status":"{op.lower()}ed","amount":"{at % 1000}.50",'
            f'"note":"as the customer wished, {number}"}}'
            for at, number in zip(ids, numbers, strict=True)
        ]
        rows["unchanged"] = pa.array([[]] * len(ids), pa.list_(pa.string()))
        yield pa.RecordBatch.from_pydict(rows)


def commit(path: str, staged: StagedPart, batch: int) -> None:
    """Apply what was staged, and say what that took."""
    began, sink = time.monotonic(), Tables(name="tables", path=path)
    writer = TablesWriter(sink, "bench", adopt=False)
    changes = writer.write(StagedInput(sink.folder, [staged]), batch)
    seconds = time.monotonic() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000
    print(f"changes={changes} seconds={seconds:.1f} cpu={cpu:.1f} peak_mb={peak:.0f}", flush=True)


def main() -> None:
    """Fill a table, then apply a batch to it."""
    changes, held = int(sys.argv[1]), int((*sys.argv[2:], "0")[0])
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as path:
        stage = ChangeStage(Tables(name="tables", path=path).folder, "bench")
        parts = [(1, held, held, "INSERT")] if held else []
        parts.append((held + 1, changes, held or changes, "UPDATE" if held else "INSERT"))
        for number, part in enumerate(parts):
            staged = stage.store(batches(*part))
            process = processes.Process(target=commit, args=(path, staged, number))
            process.start()
            process.join()
            stage.clear()


if __name__ == "__main__":
    main()
