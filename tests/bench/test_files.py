"""The measurement of files writes what it says it writes."""

from pathlib import Path

from bench import push_files
from bench.orders import Orders
from bench.push_files import BATCHES, LOOP, WARM_UP, Task


def test_the_loop_writes_every_event(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    Orders(log).update(100, batch=1000, batches=BATCHES, warm_up=WARM_UP)
    task = Task(log=log, folder=str(tmp_path), kind="jsonl", changes=1000)
    outcome = push_files.written(LOOP, task)
    assert outcome.rows == 1000 * (BATCHES + WARM_UP)
    assert outcome.seconds > 0
