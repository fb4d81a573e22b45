"""Destinations that hang keep nobody else waiting: `headrace pipeline` on one core."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headrace.testing import free_port, wait_until
from tests.changes import opened_writer
from tests.java import QUICK_JAVA
from tests.sinks.receiver import OK, Receiver, Request

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.usefixtures("java")]

HUNG = ("first", "second", "third")


def hook(url: str) -> dict[str, object]:
    return {
        "type": "webhook",
        "url": url,
        "secret": "a secret of the test",
        "allow_private_networks": True,
        "batch_seconds": 0.1,
        "timeout_seconds": 300.0,
    }


@contextmanager
def running(folder: Path) -> Iterator[None]:
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", "pipeline"],
            cwd=folder,
            stdout=output,
            stderr=output,
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def test_destinations_that_hang_leave_the_cores_to_the_others(tmp_path: Path) -> None:
    answering = threading.Event()

    def hang(_: Request) -> bytes:
        answering.wait()
        return OK

    with ExitStack() as stack:
        flows = stack.enter_context(Receiver())
        hanging = {name: stack.enter_context(Receiver(hang)) for name in HUNG}
        stack.callback(answering.set)
        receivers = {**hanging, "flows": flows}
        config = {
            "sources": {"idle": {"type": "postgres", "url": "postgresql://127.0.0.1:1/shop"}},
            "server": {"port": free_port()},
            "pipeline": {
                "master": "local[1]",
                "spark": {"spark.driver.memory": "1g", **QUICK_JAVA},
                "sinks": {name: hook(each.url) for name, each in receivers.items()},
            },
        }
        (tmp_path / "headrace.yaml").write_text(json.dumps(config))
        writer = stack.enter_context(opened_writer(tmp_path / "data" / "log"))
        writer.put("users", "1")
        stack.enter_context(running(tmp_path))
        wait_until(
            lambda: all(each.requests for each in hanging.values()),
            timeout=180,
            message="all that hang have a request",
        )
        for row in ("2", "3"):  # also in batches that follow
            writer.put("users", row)
            expect(flows, int(row))
        assert not answering.is_set()
        answering.set()
        for each in receivers.values():
            expect(each, 3)


def expect(receiver: Receiver, requests: int) -> None:
    """That so many come, or more: what was not answered may come again."""
    wait_until(lambda: len(receiver.requests) >= requests, timeout=120, message=f"{requests} come")
