"""GET /changefeed: polling and long polling."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.change.event import Op
from headrace.serve import ServerSettings
from tests.changes import make_change
from tests.serve.conftest import Site, Sites


def events(site: Site, **parameters: object) -> list[dict[str, Any]]:
    page = site.get("/changefeed", **parameters).json()
    assert page["count"] == len(page["events"])
    return list(page["events"])


def keys(site: Site, **parameters: object) -> list[str]:
    return [event["key"] for event in events(site, **parameters)]


@pytest.mark.requirement("S4-04", "S4-05")
def test_a_poll_answers_events_count_and_latest_sequence(site: Site) -> None:
    site.writer.put("users", "alice", name="Alice")
    site.writer.delete("users", "alice")
    response = site.get("/changefeed", from_seq=0, limit=1)
    assert response.headers["content-type"] == "application/json"
    page = response.json()
    assert page.keys() == {"events", "count", "latest_sequence"}
    assert (page["count"], page["latest_sequence"]) == (1, 2)
    [event] = page["events"]
    assert event.keys() == {"sequence", "type", "key", "value", "timestamp_ms", "metadata"}
    assert (event["sequence"], event["type"], event["key"]) == (1, "PUT", "users:alice")
    assert json.loads(event["value"]) == {"id": "alice", "name": "Alice"}
    assert abs(event["timestamp_ms"] - time.time() * 1000) < 60_000


@pytest.mark.requirement("S4-03")
def test_puts_and_deletes_come_in_the_order_they_were_committed(site: Site) -> None:
    site.writer.put("users", "alice")
    site.writer.put("users", "alice", Op.UPDATE)
    site.writer.delete("users", "alice")
    found = [(e["sequence"], e["type"], e["value"] is None) for e in events(site)]
    assert found == [(1, "PUT", False), (2, "PUT", False), (3, "DELETE", True)]


@pytest.mark.requirement("S4-16", "C-10")
def test_from_seq_is_exclusive(site: Site) -> None:
    site.writer.put_many("users", 5)
    assert [event["sequence"] for event in events(site, from_seq=3)] == [4, 5]
    assert events(site, from_seq=5) == []


def test_a_poll_without_parameters_gives_the_first_hundred(site: Site) -> None:
    site.writer.put_many("users", 120)
    assert [event["sequence"] for event in events(site)] == list(range(1, 101))


def test_a_poll_without_a_limit_gives_as_many_as_the_server_is_set_to(sites: Sites) -> None:
    site = sites(ServerSettings(port=0, batch_size=7))
    site.writer.put_many("users", 20)
    assert len(events(site)) == 7
    assert len(events(site, limit=9)) == 9


@pytest.mark.requirement("S4-24")
def test_a_page_never_exceeds_the_limit_and_pages_lose_nothing(site: Site) -> None:
    site.writer.put_many("users", 2500)
    seen: list[int] = []
    while page := events(site, from_seq=seen[-1] if seen else 0, limit=1000):
        assert len(page) <= 1000
        seen += [event["sequence"] for event in page]
    assert seen == list(range(1, 2501))


@pytest.mark.requirement("S4-24")
def test_a_page_of_large_rows_ends_early_instead_of_filling_the_memory(site: Site) -> None:
    for number in range(12):
        site.writer.put("users", str(number), photo="x" * (128 << 10))
    page = events(site, limit=10_000)
    assert 1 <= len(page) < 12
    rest = events(site, from_seq=page[-1]["sequence"], limit=10_000)
    assert [event["sequence"] for event in page + rest] == list(range(1, 13))


@pytest.mark.requirement("S4-19")
def test_key_prefix_gives_only_keys_that_start_so(site: Site) -> None:
    for table, pk in [("orders", "1"), ("orders_old", "1"), ("users", "1"), ("orders", "22")]:
        site.writer.put(table, pk)
    assert keys(site, key_prefix="orders:") == ["orders:1", "orders:22"]
    assert keys(site, key_prefix="orders:2") == ["orders:22"]
    assert keys(site, key_prefix="orders") == ["orders:1", "orders_old:1", "orders:22"]
    assert keys(site, key_prefix="rders:") == []
    assert len(keys(site, key_prefix="")) == 4


@pytest.mark.requirement("S4-06")
def test_a_long_poll_answers_as_soon_as_an_event_arrives(site: Site) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(events, site, long_poll_ms=30_000)
        site.await_waiting()
        site.writer.put("users", "alice")
        committed = time.monotonic()
        assert [event["key"] for event in answer.result()] == ["users:alice"]
    assert time.monotonic() - committed < 10


@pytest.mark.requirement("S4-06")
def test_a_long_poll_that_finds_something_does_not_wait(site: Site) -> None:
    site.writer.put("users", "alice")
    began = time.monotonic()
    assert len(events(site, long_poll_ms=30_000)) == 1
    assert time.monotonic() - began < 5


@pytest.mark.requirement("S4-06")
def test_a_long_poll_that_expires_is_empty(site: Site) -> None:
    began = time.monotonic()
    assert events(site, long_poll_ms=200) == []
    assert 0.2 <= time.monotonic() - began < 10


@pytest.mark.requirement("S4-06", "S4-19")
def test_a_long_poll_with_a_prefix_keeps_waiting_while_other_keys_arrive(site: Site) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(events, site, long_poll_ms=30_000, key_prefix="orders:")
        site.await_waiting()
        for number in range(20):
            site.writer.put("users", str(number))
            site.await_waiting()
        assert not answer.done()
        site.writer.put("orders", "1")
        assert [event["sequence"] for event in answer.result()] == [21]


@pytest.mark.requirement("S4-06")
def test_a_long_poll_waits_through_changes_that_the_feed_does_not_carry(site: Site) -> None:
    users = site.writer.table("users")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(events, site, long_poll_ms=30_000)
        site.await_waiting()
        site.writer.append([make_change(Op.SCHEMA, table=users, after={"columns": []})])
        site.await_waiting()
        assert not answer.done()
        site.writer.put("users", "alice")
        assert [event["sequence"] for event in answer.result()] == [2]


@pytest.mark.requirement("C-06")
def test_a_filtered_page_says_how_far_the_log_was_scanned(site: Site) -> None:
    site.writer.put("orders", "1")
    site.writer.put_many("users", 600)
    response = site.get("/changefeed", key_prefix="orders:")
    assert [event["sequence"] for event in response.json()["events"]] == [1]
    assert response.headers["x-headrace-scanned"] == "601"
    full = site.get("/changefeed", key_prefix="orders:", limit=1)
    assert full.headers["x-headrace-scanned"] == "1"


@pytest.mark.requirement("C-02")
def test_what_neither_puts_nor_deletes_comes_when_included(site: Site) -> None:
    users = site.writer.table("users")
    for op in (Op.SCHEMA, Op.INSERT, Op.TRUNCATE, Op.MESSAGE):
        site.writer.append([make_change(op, table=users, after={})])
    assert [event["type"] for event in events(site)] == ["PUT"]
    some = events(site, include="truncate,schema")
    assert [event["type"] for event in some] == ["SCHEMA", "PUT", "TRUNCATE"]
    assert len(events(site, include="truncate,schema,message")) == 4


@pytest.mark.requirement("C-06")
def test_the_epoch_tells_one_log_from_another(site: Site) -> None:
    assert site.get("/changefeed").headers["x-headrace-epoch"] == site.log.epoch


@pytest.mark.requirement("P-06")
def test_a_sequence_beyond_the_log_is_refused_with_where_to_go_on(site: Site) -> None:
    site.writer.put("users", "alice")
    for path in ("/changefeed", "/changefeed/stream"):
        response = site.http.get(path, params={"from_seq": 2**64 - 1})
        assert (response.status_code, response.json()["error"]) == (409, "other_log")
        assert "go on after 1, the newest sequence" in response.json()["hint"]


@pytest.mark.requirement("S4-16", "S4-17", "S4-24")
def test_the_documents_consumer_loop_loses_nothing_and_repeats_nothing(site: Site) -> None:
    total = 1050
    checkpoints: list[int] = []
    handled: list[int] = []

    def consume(last_seq: int, stop_at: int) -> None:
        processed_count = len(handled)
        while processed_count < stop_at:
            url = f"/changefeed?from_seq={last_seq}&limit=1000&long_poll_ms=10000"
            for ev in site.http.get(url).json()["events"]:
                handled.append(ev["sequence"])
                last_seq = ev["sequence"]
                processed_count += 1
                if processed_count % 100 == 0:
                    checkpoints.append(last_seq)

    def produce() -> None:
        for _ in range(total // 50):
            site.writer.put_many("users", 50)

    producer = threading.Thread(target=produce)
    producer.start()
    consume(0, stop_at=500)
    # A restart: what follows the last checkpoint is handled again, nothing else.
    del handled[checkpoints[-1] :]
    consume(checkpoints[-1], stop_at=total)
    producer.join()
    assert handled == list(range(1, total + 1))


def test_many_long_polls_at_once_are_all_answered(site: Site) -> None:
    with ThreadPoolExecutor(40) as pool:
        answers = [pool.submit(events, site, long_poll_ms=30_000) for _ in range(40)]
        site.await_waiting(40)
        site.writer.put("users", "alice")
        assert all(len(answer.result()) == 1 for answer in answers)
