"""The measurement of gRPC reads what it says it reads, from Headrace and from the bare server."""

from pathlib import Path

import pytest

from bench import delivery_grpc
from bench.delivery_grpc import JOINED, Task
from headrace.v1 import changefeed_pb2 as v1

EVENTS = 2 * JOINED


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("bench") / "log")
    delivery_grpc._write(path, EVENTS)
    return path


@pytest.mark.parametrize("who", delivery_grpc.WHO)
@pytest.mark.parametrize("together", [False, True])
def test_every_subscriber_reads_every_event(
    log: str, who: str, together: bool, tmp_path: Path
) -> None:
    task = Task(log=log, subscribers=2, together=together, events=EVENTS)
    outcome = delivery_grpc._read(who, task, tmp_path)
    assert outcome.rows == 2 * EVENTS
    assert outcome.seconds > 0


def test_the_bare_servers_messages_are_headraces() -> None:
    alone = delivery_grpc._messages(
        Task(log="", subscribers=1, together=False, events=EVENTS),
    )
    sequences = [v1.SubscribeResponse.FromString(each).event.sequence for each in alone]
    assert sequences == list(range(1, EVENTS + 1))
    together = delivery_grpc._messages(Task(log="", subscribers=1, together=True, events=EVENTS))
    assert [len(v1.PollResponse.FromString(each).events) for each in together] == [JOINED] * 2
