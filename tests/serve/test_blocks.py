"""Whoever reads over the network sees single changes, whether or not the log keeps blocks."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.change.event import Batch
from headrace.log import Log
from headrace.serve import ServerSettings
from headrace.v1 import changefeed_pb2 as v1
from headrace.v1.changefeed_pb2_grpc import ChangeFeedStub
from tests.changes import opened_writer
from tests.log.blocks import as_block, rows
from tests.log.transactions import SOURCE, known_table, transaction
from tests.serve.conftest import Site
from tests.serve.sse import parse

pytestmark = pytest.mark.requirement("C-28")

SIZES = [3, 600, 1, 50]  # a transaction, then blocks


def fill(log: Log, *, blocks: bool) -> None:
    for number, size in enumerate(SIZES, 1):
        table = known_table(log)
        changes = rows(table, number, size) if number > 1 else transaction(table, number, size)
        packed = as_block(changes, table, number) if blocks and number > 1 else changes
        log.append(SOURCE, Batch(packed, b"%d" % number))


@pytest.fixture
def both(tmp_path: Path) -> Iterator[list[Site]]:
    """A server over a log with blocks, and one over the same changes without."""
    with ExitStack() as stack:
        found = []
        for blocks in (True, False):
            writer = stack.enter_context(opened_writer(tmp_path / str(blocks)))
            fill(writer.log, blocks=blocks)
            found.append(Site(writer, ServerSettings(port=0, grpc_port=0), stack))
        yield found


def alike(both: list[Site], path: str, **parameters: object) -> Any:
    """What both answer."""
    texts = [site.get(path, **parameters).text.replace(site.log.epoch, "EPOCH") for site in both]
    assert texts[0] == texts[1]
    return texts[0]


def test_polls_that_begin_and_end_in_a_block_are_the_same(both: list[Site]) -> None:
    for after in (0, 2, 3, 4, 300, 602, 603, 604, 653):
        for limit in (1, 7, 100, 1000):
            alike(both, "/changefeed", from_seq=after, limit=limit)
    for name in ("debezium", "entity", "notification"):
        alike(both, "/v1/changes", after=500, limit=20, format=name)
    assert both[0].log.latest_sequence == 654


def test_streams_that_begin_in_a_block_are_the_same(both: list[Site]) -> None:
    events = parse(alike(both, "/changefeed/stream", from_seq=300))
    assert [event["sequence"] for event in events] == list(range(301, 655))


def test_what_a_trim_hides_of_a_block_is_gone_for_readers(both: list[Site]) -> None:
    for site in both:
        site.log.trim(301)
    alike(both, "/changefeed", from_seq=300, limit=50)
    for path in ("/changefeed", "/v1/changes", "/changefeed/stream"):
        codes = {site.http.get(path, params={"from_seq": "3", "after": "3"}).status_code
                 for site in both}  # fmt: skip
        assert len(codes) == 1
    stats = [site.get("/changefeed/stats").json() for site in both]
    assert [each["total_events"] for each in stats] == [354, 354]


def test_grpc_is_the_same(both: list[Site]) -> None:
    answers: list[Any] = []
    for site in both:
        with grpc.insecure_channel(site.server.grpc_target) as channel:
            stub = ChangeFeedStub(channel)
            polled = stub.Poll(v1.PollRequest(after=300, limit=50), timeout=30)
            streamed = stub.Subscribe(v1.SubscribeRequest(after=300, limit=100), timeout=30)
            answers.append(([*polled.events], [response.event for response in streamed]))
    assert answers[0] == answers[1]
    assert [event.sequence for event in answers[0][0]] == list(range(301, 351))


def test_a_cursor_in_a_block_goes_on_there(both: list[Site]) -> None:
    for site in both:
        answer = site.http.put("/v1/cursors/reader", json={"sequence": 400})
        assert answer.status_code < 300, answer.text
    for site in both:
        assert site.log.trim(600).first_sequence == 401
    alike(both, "/v1/changes", after=400, limit=5)
