"""The soak's own parts: clients that count, a judge of /health, a drawing."""

import time
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.soak_clients import StreamClient
from bench.soak_judge import WRONG_SECONDS, Down, HealthJudge
from bench.soak_plot import drawing


def test_a_client_counts_each_event_once_however_its_stream_is_cut_up() -> None:
    frames = b"".join(b'id: %d\ndata: {"a":"\\n"}\n\n' % n for n in range(5, 25))
    stream = b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n11\r\nretry: 1000\n\n"
    for at in range(0, len(frames), 37):
        piece = frames[at : at + 37]
        stream += b"\r\n%x\r\n" % len(piece) + piece
    stream += b"\r\n9\r\nid: 99\n\n\r\n"  # past what the filter leaves out
    client = StreamClient(1, "work_00")
    for at in range(0, len(stream), 11):
        client._take(client._rest + stream[at : at + 11])
    assert (client.had.events, client.had.total, client.had.last) == (20, sum(range(5, 25)), 24)
    with pytest.raises(SystemExit, match="24 came after 24"):
        client._take(b"id: 24\ndata: {}\n\n")


@pytest.mark.parametrize(
    ("status", "down", "stalled", "wrong"),
    [
        ("healthy", False, False, False),
        ("healthy", True, False, True),
        ("degraded", True, False, False),
        ("degraded", False, False, True),
        ("degraded", False, True, False),
    ],
)
def test_the_judge_finds_what_is_green_without_a_part_and_red_with_all(
    monkeypatch: pytest.MonkeyPatch, status: str, down: bool, stalled: bool, wrong: bool
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    parts = Down()
    judge = HealthJudge("", parts, lambda: {"sink": 0.0 if stalled else now[0]}, begun=1000.0)
    answer: Any = (status, ["why"])
    monkeypatch.setattr(judge, "_asked", lambda: answer)
    if down:
        parts.begin("database")
    judge.look()
    assert judge.wrong == []
    now[0] += WRONG_SECONDS + 1
    judge.look()
    assert bool(judge.wrong) is wrong


def test_the_drawing_is_well_formed() -> None:
    memory = {"server": [(0.0, 80.0), (60.0, 90.0)], "java": [(0.0, 500.0), (60.0, 700.0)]}
    drawn = drawing(memory, [(0.0, "healthy"), (30.0, "")], [(20.0, "run & redis")])
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
