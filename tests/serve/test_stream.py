"""GET /changefeed/stream: server-sent events."""

import asyncio
import fcntl
import json
import re
import socket
import statistics
import sys
import termios
import threading
import time

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.change.event import Op
from headrace.testing import wait_until
from tests.changes import make_change
from tests.serve.conftest import Site
from tests.serve.sse import Reader, parse

STAY = "keep_alive=true&max_seconds=60"


@pytest.mark.requirement("S4-07", "S4-18")
def test_an_event_is_one_message_with_its_sequence_as_id(site: Site) -> None:
    site.writer.put("users", "alice", name="Alice")
    site.writer.delete("users", "alice")
    response = site.get("/changefeed/stream")
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-headrace-epoch"] == site.log.epoch
    first, *messages, end = response.text.split("\n\n")
    assert (first, end) == ("retry: 1000", "")
    assert all(re.fullmatch(r"id: \d+\ndata: \{.*\}", message) for message in messages)
    assert [message.split("\n")[0] for message in messages] == ["id: 1", "id: 2"]
    assert [event["type"] for event in parse(response.text)] == ["PUT", "DELETE"]


@pytest.mark.requirement("S4-07")
def test_a_stream_carries_the_same_events_as_a_poll(site: Site) -> None:
    site.writer.put_many("users", 700)
    polled = site.get("/changefeed", limit=1000).json()["events"]
    assert parse(site.get("/changefeed/stream").text) == polled


@pytest.mark.requirement("S4-08")
def test_without_keep_alive_a_stream_ends_after_what_there_is(site: Site) -> None:
    site.writer.put_many("users", 3)
    began = time.monotonic()
    assert len(parse(site.get("/changefeed/stream", max_seconds=60).text)) == 3
    assert time.monotonic() - began < 10


@pytest.mark.requirement("S4-08", "S1-36")
def test_with_keep_alive_events_follow_as_they_are_committed(site: Site) -> None:
    site.writer.put("users", "0")
    with Reader(f"{site.url}/changefeed/stream?{STAY}") as reader:
        for number in range(1, 6):
            reader.await_events(number)
            site.writer.put("users", str(number))
        assert [event["sequence"] for event in reader.await_events(6)] == [1, 2, 3, 4, 5, 6]
        assert not reader.ended.is_set()


@pytest.mark.requirement("S1-36")
def test_an_event_reaches_its_client_within_a_tenth_of_a_second(site: Site) -> None:
    committed: list[float] = []
    with Reader(f"{site.url}/changefeed/stream?{STAY}") as reader:
        site.await_waiting()
        for number in range(100):
            site.writer.put("users", str(number))
            committed.append(time.time())
            reader.await_events(number + 1)
    arrived = [at for at, chunk in reader.arrivals for _ in range(chunk.count(b"data: "))]
    assert statistics.median(a - c for a, c in zip(arrived, committed, strict=True)) < 0.1


@pytest.mark.requirement("S4-09", "S4-10")
def test_an_idle_stream_sends_heartbeats(site: Site) -> None:
    with Reader(f"{site.url}/changefeed/stream?{STAY}&heartbeat_ms=100") as reader:
        wait_until(lambda: reader.text.count(": heartbeat\n\n") >= 3)
    times = [at for at, chunk in reader.arrivals if b"heartbeat" in chunk]
    assert times[2] - times[0] > 0.15


@pytest.mark.requirement("S4-09", "S4-10")
def test_the_heartbeat_is_every_15_seconds_unless_asked_otherwise(site: Site) -> None:
    document = site.get("/openapi.json").json()
    parameters = document["paths"]["/changefeed/stream"]["get"]["parameters"]
    heartbeat = next(p["schema"] for p in parameters if p["name"] == "heartbeat_ms")
    assert (heartbeat["default"], heartbeat["minimum"]) == (15_000, 100)
    assert site.http.get("/changefeed/stream", params={"heartbeat_ms": 99}).status_code == 400


@pytest.mark.requirement("S4-09", "C-06")
def test_a_heartbeat_comes_although_other_keys_arrive_and_moves_the_cursor(site: Site) -> None:
    url = f"{site.url}/changefeed/stream?{STAY}&heartbeat_ms=300&key_prefix=orders:"
    with Reader(url) as reader:
        wait_until(
            lambda: site.writer.put("users", "x") and ": heartbeat\n\n" in reader.text,
            message="a heartbeat comes",
        )
        assert reader.events == []
        # An id without data: a browser that reconnects begins there.
        assert re.search(r"^id: \d+\n\n", reader.text, re.MULTILINE)


@pytest.mark.requirement("S4-11")
def test_max_seconds_ends_a_stream_and_the_client_goes_on_where_it_was(site: Site) -> None:
    site.writer.put("users", "1")
    began = time.monotonic()
    with Reader(f"{site.url}/changefeed/stream?keep_alive=true&max_seconds=1") as reader:
        assert reader.ended.wait(25)  # the default is 30
        assert time.monotonic() - began >= 1
        last = reader.events[-1]["sequence"]
    site.writer.put("users", "2")
    again = site.get("/changefeed/stream", from_seq=last).text
    assert [event["sequence"] for event in parse(again)] == [2]


@pytest.mark.requirement("S4-11")
def test_max_seconds_is_30_by_default_and_from_1_to_60(site: Site) -> None:
    parameters = site.get("/openapi.json").json()["paths"]["/changefeed/stream"]["get"][
        "parameters"
    ]
    schema = next(p["schema"] for p in parameters if p["name"] == "max_seconds")
    assert (schema["default"], schema["minimum"], schema["maximum"]) == (30, 1, 60)
    for wrong in (0, 61):
        refused = site.http.get("/changefeed/stream", params={"max_seconds": wrong})
        assert (refused.status_code, refused.json()["parameter"]) == (400, "max_seconds")


@pytest.mark.requirement("S4-11")
def test_max_seconds_ends_a_stream_that_is_never_idle(site: Site) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            site.writer.put("users", "x")

    writing = threading.Thread(target=write)
    writing.start()
    try:
        with Reader(f"{site.url}/changefeed/stream?keep_alive=true&max_seconds=1") as reader:
            assert reader.ended.wait(25)  # the default is 30
    finally:
        stop.set()
        writing.join()
    assert reader.events


@pytest.mark.requirement("S4-19")
def test_key_prefix_filters_a_stream_as_it_filters_a_poll(site: Site) -> None:
    for table in ("orders", "users", "orders"):
        site.writer.put(table, "1")
    text = site.get("/changefeed/stream", key_prefix="orders:").text
    assert [event["sequence"] for event in parse(text)] == [1, 3]


@pytest.mark.requirement("S4-17")
def test_last_event_id_wins_over_from_seq(site: Site) -> None:
    site.writer.put_many("users", 5)
    response = site.http.get(
        "/changefeed/stream", params={"from_seq": 1}, headers={"Last-Event-ID": "3"}
    )
    assert [event["sequence"] for event in parse(response.text)] == [4, 5]


@pytest.mark.parametrize("bad", ["abc", "-1", "1.5", str(2**64), "evt_1"])
def test_a_last_event_id_that_is_no_sequence_is_refused(shared: Site, bad: str) -> None:
    for path in ("/changefeed/stream", "/v1/changes/stream"):
        refused = shared.http.get(path, headers={"Last-Event-ID": bad})
        assert refused.status_code == 400
        assert refused.json()["parameter"] == "Last-Event-ID"
        assert refused.json()["value"] == bad


@pytest.mark.requirement("C-06")
def test_a_stream_that_ends_tells_how_far_it_scanned(site: Site) -> None:
    site.writer.put("orders", "1")
    site.writer.put_many("users", 4)
    text = site.get("/changefeed/stream", key_prefix="orders:").text
    assert text.endswith("\n\nid: 5\n\n")
    assert [event["sequence"] for event in parse(text)] == [1]


@pytest.mark.requirement("C-02")
def test_included_operations_are_streamed(site: Site) -> None:
    users = site.writer.table("users")
    site.writer.append([make_change(Op.TRUNCATE, table=users, after={"cascade": False})])
    assert parse(site.get("/changefeed/stream").text) == []
    assert len(parse(site.get("/changefeed/stream", include="truncate").text)) == 1


@pytest.mark.requirement("S4-07", "S4-08")
def test_two_hundred_clients_get_every_change_in_order(site: Site) -> None:
    clients, first, total = 200, 300, 1300
    site.writer.put_many("users", first)

    async def read() -> list[int]:
        reader, writer = await asyncio.open_connection(*site.address)
        path = f"/changefeed/stream?{STAY}"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        sequences: list[int] = []
        while not sequences or sequences[-1] < total:
            line = await reader.readline()
            if line.startswith(b"data: "):
                sequences.append(json.loads(line[6:])["sequence"])
        writer.close()
        await writer.wait_closed()
        return sequences

    async def read_all() -> list[list[int]]:
        reading = [asyncio.create_task(read()) for _ in range(clients)]
        await asyncio.to_thread(site.await_waiting, clients)
        for _ in range(10):
            await asyncio.to_thread(site.writer.put_many, "users", 100)
        return await asyncio.gather(*reading)

    every = asyncio.run(read_all())
    assert every == [list(range(1, total + 1))] * clients


def test_a_client_that_does_not_read_holds_back_nobody_else(site: Site) -> None:
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(site.address)
        slow.sendall(f"GET /changefeed/stream?{STAY} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        site.await_waiting()
        with Reader(f"{site.url}/changefeed/stream?{STAY}") as quick:
            # Far more than the slow one's buffers hold.
            for number in range(40):
                site.writer.put("users", str(number), photo="x" * (1 << 18))
            assert len(quick.await_events(40, timeout=120)) == 40
            assert site.get("/changefeed/stats").json()["total_events"] == 40


def stuck(site: Site) -> list[HttpToolsProtocol]:
    """The connections whose clients have no room for more."""
    connected = list(site.server._server.server_state.connections)
    return [each for each in connected if isinstance(each, HttpToolsProtocol) and is_full(each)]


def is_full(connection: HttpToolsProtocol) -> bool:
    return connection.flow.write_paused


def kept(connection: HttpToolsProtocol) -> int:
    """Bytes that the server, and its kernel, keep for a client."""
    unsent = fcntl.ioctl(
        connection.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4)
    )
    return connection.transport.get_write_buffer_size() + int.from_bytes(unsent, sys.byteorder)


def test_a_client_that_does_not_read_costs_little(site: Site) -> None:
    # Half of it would be more than the client may cost, wherever it were kept.
    for number in range(250):
        site.writer.put("users", str(number), photo="x" * 20_000)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(site.address)
        slow.sendall(f"GET /changefeed/stream?{STAY} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        connections = wait_until(lambda: stuck(site), message="it is stuck")
        assert [kept(each) < 2 << 20 for each in connections] == [True]


def test_a_slow_client_gets_everything_in_the_end(site: Site) -> None:
    total = 3000
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(30)
        slow.connect(site.address)
        slow.sendall(f"GET /changefeed/stream?{STAY} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        site.await_waiting()
        for _ in range(30):
            site.writer.put_many("users", 100)
        received = b""
        while f"id: {total}\n".encode() not in received[-4096:]:
            received += slow.recv(1024)
    # Chunk headers of the transfer encoding stand between the frames, never inside an id line.
    assert [int(n) for n in re.findall(rb"id: (\d+)\n", received)] == list(range(1, total + 1))


def test_a_client_that_leaves_is_forgotten(site: Site) -> None:
    with Reader(f"{site.url}/changefeed/stream?{STAY}"):
        site.await_waiting()
    wait_until(lambda: site.feed.waiting == 0, message="nobody waits any more")
