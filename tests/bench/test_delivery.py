"""The arithmetic of the delivery benchmark, and its clients against the bare peer."""

import socket
import struct
import threading

import pytest

from bench import delivery, delivery_clients, delivery_peer, delivery_report
from bench.__main__ import WHOLE, Part, parts
from bench.delivery_clients import Crowd, Told, spread
from bench.delivery_report import Delay, Idle, Offer, Reached, Slow
from bench.process import MeasurementFailed
from bench.report import markdown


def told(rate: float = 50_000.0, **delays: float) -> Told:
    return Told(500_000, 500_000 / rate, 1.0, 334.0, delays)


def event(number: int) -> bytes:
    return b'{"data":{"stamp":%d},"version":1}' % number


def test_every_delivery_is_timed_by_the_stamps_that_one_subscriber_read() -> None:
    arrivals = [[(110, 1), (130, 2)], [(150, 3)]]
    assert sorted(delivery_clients.delays([100, 110, 120], arrivals)) == [10, 10, 20, 30, 40, 50]


def test_a_percentile_is_a_delay_that_was_measured() -> None:
    found = spread(range(1000, 1_001_000, 1000))
    assert found == {"p50": 500.0, "p99": 990.0, "p99.9": 999.0, "worst": 1000.0}
    assert spread([]) == {}


@pytest.mark.parametrize("manner", ["time", "count"])
def test_events_are_counted_wherever_they_are_cut(manner: str) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        text = event(1) + event(2) + event(3)

        def send() -> None:
            for at in range(len(text)):
                far.sendall(text[at : at + 1])

        sending = threading.Thread(target=send)
        sending.start()
        crowd = Crowd([near], 3)
        found = crowd.time() if manner == "time" else crowd.count()
        sending.join()
    assert found.deliveries == 3
    assert found.size == len(text) / 3
    assert bool(found.delays) == (manner == "time")


def test_an_event_too_many_is_no_measurement() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.sendall(event(1) + event(2))
        with pytest.raises(MeasurementFailed, match="1 events too many"):
            Crowd([near], 1).count()


def test_the_peer_tells_every_client_every_event() -> None:
    reached = delivery._broadcast(Offer(3, 200), 20, size=300)
    assert (reached.told.deliveries, reached.told.size) == (60, 304.0)
    assert reached.used["server"] >= 0


def test_the_peers_event_has_the_size_of_ours() -> None:
    assert len(delivery_peer.event(330)) == 330


def test_the_whole_of_delivery_is_its_parts_and_everything_has_each_once() -> None:
    assert parts([Part.DELIVERY]) == list(WHOLE[Part.DELIVERY])
    assert parts([Part.FORMATS, Part.DELIVERY_IDLE]) == [Part.FORMATS, Part.DELIVERY_IDLE]
    everything = parts(None)
    assert len(everything) == len(set(everything))
    assert set(everything) == set(Part) - set(WHOLE)


def test_delays_are_judged_for_each_protocol_and_say_who_used_the_cores() -> None:
    used = {"server": 5.0, "capture": 2.0, "PostgreSQL": 1.0, "clients": 0.5}
    ours = {"p50": 9.0, "p99": 120.0, "p99.9": 130.0, "worst": 140.0}
    behind = Delay("sse", told(90_000, **ours), used)
    grid = delivery_report.delays(
        [Delay("websocket", told(100_000, **ours), used), behind], subscribers=100, rate=1000
    )
    page = markdown([grid], {})
    assert "| WebSocket | 9.0 | 120.0 | 130.0 | 140.0 | 100,000 | 100 % | 40 % | 20 % |" in page
    assert "- WebSocket: p50 9.0 ms; the target is < 10 ms: reached." in page
    assert "- WebSocket: p99 120.0 ms; the target is < 100 ms: missed." in page
    assert "WebSocket fell behind" not in page
    assert "- SSE fell behind what was written" in page


def test_an_offer_that_is_the_target_is_kept_up_with_or_not() -> None:
    used = {"server": 5.0, "clients": 0.5}
    measured = [
        Reached(Offer(100, 500), "Headrace", told(49_900), used),
        Reached(Offer(1000, 50), "Headrace", told(40_000), used),
        Reached(Offer(1000, 50), "websockets broadcast", told(60_000), used),
    ]
    page = markdown([delivery_report.fanout(measured)], {})
    assert "100 × 500/s: 49,900 deliveries/s of the 50,000 that were offered" in page
    assert page.count("kept up") == page.count("fell behind") == 1
    assert "- the most that was seen: 100 × 500/s 49,900.0 deliveries/s" in page
    assert "| 1,000 × 50/s | Headrace | 40,000 | 80 % | 10.0 |" in page


def test_a_clients_cost_is_judged_by_its_bound() -> None:
    page = markdown([delivery_report.idle(Idle(5000, 25.0, 1.0))], {})
    assert "| resident set of the server, for each | 25.0 KB | < 25 KB | missed |" in page
    spread_of = {"p50": 1.0, "p99": 2.0}
    slow = Slow("sse", 700.0, 300.0, told(**spread_of), told(**spread_of))
    page = markdown([delivery_report.slow([slow], stuck=10)], {})
    assert "| SSE | 700 | 300 | 1.0 | 2.0 | 1.0 | 2.0 |" in page
    assert "- SSE: each costs 700.0 KB; the target is < 2048 KB: reached." in page


def test_a_clients_frame_is_masked_with_zeros_and_tells_its_length() -> None:
    for size in (5, 125, 126, 300):
        frame = delivery_clients._frame(b"x" * size)
        assert frame[0] == 0x81
        short = frame[1] & 0x7F
        assert (struct.unpack(">H", frame[2:4])[0] if short == 126 else short) == size
        assert frame.endswith(bytes(4) + b"x" * size)
