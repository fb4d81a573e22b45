"""A transaction of many rows reaches its Delta table in bounded memory."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from headrace.change.event import Batch, Op, Transaction
from headrace.sources.postgres.position import PostgresPosition
from tests.deltas import stored
from tests.sinks.lake import SOURCE, Shop, order, put

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ROWS, PIECE = 1_500_000, 10_000
MOST_MB = 300  # windows of it; all at once takes 440

# What a worker does with a batch; it prints by how much that raised its memory.
APPLYING = """
import resource, sys
from pathlib import Path
import pytest
from tests.sinks.plain import PlainLake

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

with pytest.MonkeyPatch.context() as patch:
    lake = PlainLake(patch, Path(sys.argv[1]))
    before = peak()
    lake.write(lake.log.latest_sequence, 2)
print(peak() - before)
"""


def write_transaction(shop: Shop, rows: int) -> None:
    """Every row in one transaction."""
    table, now = shop.table("orders"), time.time_ns() // 1000
    begun, position = Transaction("7", now, now), PostgresPosition(16, 8)
    for start in range(0, rows, PIECE):
        changes = [
            msgspec.structs.replace(
                put(table, Op.INSERT, **order(number)),
                transaction=begun,
                position=position,
                ordinal=number + 1,
                last=number + 1 == rows,
            )
            for number in range(start, start + PIECE)
        ]
        shop.log.append(SOURCE, Batch(changes, b"resume" if changes[-1].last else None))


@pytest.mark.requirement("P-23")
def test_the_memory_of_a_task_does_not_follow_the_transaction(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    write_transaction(shop, ROWS)
    shop.log.close()
    run = [sys.executable, "-c", APPLYING, str(tmp_path)]
    told = subprocess.run(run, capture_output=True, text=True, check=False)
    assert not told.returncode, told.stderr
    assert int(told.stdout) < MOST_MB
    assert stored(shop.delta(), ["id"]).num_rows == ROWS
