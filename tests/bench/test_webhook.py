"""The measurement of webhooks posts what it says it posts."""

from pathlib import Path

import pytest

from bench import push_webhook
from bench.orders import Orders
from bench.push import WHO
from bench.push_webhook import BATCHES, WARM_UP, Task


@pytest.mark.parametrize("together", [False, True])
def test_the_loop_posts_every_event_and_the_receiver_counts_them(
    together: bool, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    Orders(log).update(100, batch=1000, batches=BATCHES, warm_up=WARM_UP)
    task = Task(log=log, folder="", together=together, changes=1000)
    outcome = push_webhook.posted(task, WHO[1], tmp_path)
    assert outcome.rows == 1000 * (BATCHES + WARM_UP)
    assert outcome.seconds > 0
