"""Clients that do not read, or are gone without a word: they cost little, and delay nobody."""

import json
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from headrace.config import WebSocketSection
from headrace.log.keys import KeyRequest
from headrace.serve import ServerSettings
from headrace.serve.ws.frames import FramesProtocol
from headrace.testing import wait_until
from tests.serve.conftest import Site, Sites
from tests.serve.ws import Message, Talk

STUCK = 20
ROW = "x" * 20_000
MOST = 2 << 20  # bytes that a client which does not read may cost


def connected(site: Site) -> list[FramesProtocol]:
    """The connections that the server has."""
    connections = site.server._server.server_state.connections
    return [each for each in list(connections) if isinstance(each, FramesProtocol)]


def deaf(site: Site) -> Talk:
    """A client that subscribes, and from then on reads nothing."""
    small = ((socket.SOL_SOCKET, socket.SO_RCVBUF, 4096),)
    talk = Talk(site.url, sockopt=small).auth()
    talk.subscribe("orders")
    return talk


def is_stuck(connection: FramesProtocol) -> bool:
    return not connection.writable.is_set()


@pytest.fixture
def crowd(site: Site) -> Iterator[Site]:
    """A server with clients that read nothing, although there is much to read."""
    site.writer.table("orders")
    with ExitStack() as stack:
        for _ in range(STUCK):
            stack.enter_context(deaf(site))
        for number in range(200):
            site.writer.put("orders", str(number), row=ROW)
        wait_until(lambda: sum(map(is_stuck, connected(site))) == STUCK, message="all are stuck")
        yield site


def test_a_client_that_reads_nothing_costs_little(crowd: Site) -> None:
    before = psutil.Process().memory_info().rss
    for number in range(1000):
        crowd.writer.put("orders", str(number), row=ROW)
    with Talk(crowd.url) as talk:  # everything is in memory now that is kept for all
        talk.auth().subscribe("orders", resume={"lastSequence": crowd.log.latest_sequence - 1000})
        talk.events(1000)
    assert all(each.transport.get_write_buffer_size() < MOST for each in connected(crowd))
    kept_for_all = 2 * (32 << 20)  # blocks, and what they were encoded to
    assert psutil.Process().memory_info().rss - before < kept_for_all + STUCK * MOST


def test_a_client_that_reads_nothing_delays_nobody(crowd: Site) -> None:
    took = []
    with Talk(crowd.url) as talk:
        talk.auth().subscribe("orders")
        for number in range(100):
            crowd.writer.put("orders", str(number), row=ROW)
            committed = time.monotonic()
            talk.events(1)
            took.append(time.monotonic() - committed)
    assert statistics.median(took) < 0.1
    assert sum(map(is_stuck, connected(crowd))) == STUCK


@pytest.mark.requirement("S3-28")
def test_a_client_that_reads_again_has_missed_nothing(site: Site) -> None:
    site.writer.table("orders")
    with deaf(site) as talk:
        for number in range(1000):
            site.writer.put("orders", str(number), row=ROW)
        wait_until(lambda: all(map(is_stuck, connected(site))), message="it is stuck")
        assert [event["data"]["id"] for event in talk.events(1000)] == list(map(str, range(1000)))


@pytest.mark.requirement("S3-15")
def test_a_client_that_vanished_is_found_although_its_socket_is_full(sites: Sites) -> None:
    site = sites(
        ServerSettings(port=0, websocket=WebSocketSection(ping_seconds=0.2, pong_seconds=1.0))
    )
    site.writer.table("orders")
    with deaf(site):
        for number in range(200):
            site.writer.put("orders", str(number), row=ROW)
        wait_until(lambda: not connected(site), message="it is dropped")
    wait_until(lambda: site.feed.waiting == 0, message="nothing of it is left")


@pytest.mark.requirement("S3-15")
def test_a_client_that_vanished_while_nothing_happened_is_found(sites: Sites) -> None:
    site = sites(
        ServerSettings(port=0, websocket=WebSocketSection(ping_seconds=0.2, pong_seconds=0.5))
    )
    site.writer.table("orders")
    with deaf(site):
        wait_until(lambda: not connected(site), message="it is dropped")
    wait_until(lambda: site.feed.waiting == 0, message="nothing of it is left")


def test_a_revoked_key_drops_a_client_that_reads_nothing(sites: Sites) -> None:
    # Only the key may end it: a ping that is not answered does not.
    site = sites(ServerSettings(port=0, websocket=WebSocketSection(pong_seconds=3600)))
    site.writer.table("orders")
    made = site.service.keyring.create(KeyRequest())
    small = ((socket.SOL_SOCKET, socket.SO_RCVBUF, 4096),)
    with Talk(site.url, sockopt=small) as talk:
        talk.auth(made.secret).subscribe("orders")
        for number in range(200):
            site.writer.put("orders", str(number), row=ROW)
        wait_until(lambda: any(map(is_stuck, connected(site))), message="it is stuck")
        site.service.keyring.revoke(made.key.id)
        wait_until(lambda: not connected(site), timeout=120, message="it is dropped")


@pytest.mark.requirement("S3-16")
def test_the_status_of_a_slow_client_tells_how_far_behind_it_is(sites: Sites) -> None:
    settings = WebSocketSection(status_seconds=0.1, degraded_events=100, critical_events=500)
    site = sites(ServerSettings(port=0, websocket=settings))
    site.writer.table("orders")
    site.writer.table("users")
    with deaf(site) as talk:
        for number in range(1000):
            site.writer.put("orders", str(number), row=ROW)
            site.writer.put("users", str(number))
        behind = [status for status in _statuses(talk, 1000) if status["queuedEventsCount"]]
    words = {status["status"] for status in behind}
    assert words & {"degraded", "critical"}
    for status in behind:
        # Those of the other table do not count.
        assert status["queuedEventsCount"] <= 1000
        count = status["queuedEventsCount"]
        assert status["status"] == (
            "critical" if count >= 500 else "degraded" if count >= 100 else "healthy"
        )


def _statuses(talk: Talk, events: int) -> list[Message]:
    """The reports that come with so many events and right after."""
    found: list[Message] = []
    while events or found[-1]["queuedEventsCount"]:
        message = json.loads(talk.socket.recv())
        events -= message["type"] == "cdc_event"
        if message["type"] == "connection_status":
            found.append(message)
    return found
