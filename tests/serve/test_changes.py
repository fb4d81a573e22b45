"""GET /v1/changes and /v1/changes/stream: canonical changes."""

import contextlib
import http.client
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from headrace.change.event import Op
from headrace.formats import Canonical
from headrace.formats.canonical import CanonicalChange
from headrace.log import Generation
from tests.changes import make_change
from tests.serve.conftest import Site
from tests.serve.sse import Reader, parse

LINES = {"Accept": "application/x-ndjson"}


def document(site: Site, **parameters: object) -> dict[str, Any]:
    page: dict[str, Any] = site.get("/v1/changes", **parameters).json()
    assert page["count"] == len(page["changes"])
    return page


def sequences(site: Site, **parameters: object) -> list[int]:
    return [change["sequence"] for change in document(site, **parameters)["changes"]]


def lines(site: Site, **parameters: object) -> httpx.Response:
    given = {name: str(value) for name, value in parameters.items()}
    response = site.http.get("/v1/changes", params=given, headers=LINES)
    assert response.status_code == 200, response.text
    return response


def line_sequences(response: httpx.Response) -> list[int]:
    return [json.loads(line)["sequence"] for line in response.content.splitlines()]


def test_a_page_holds_canonical_changes(site: Site) -> None:
    site.writer.put("users", "alice", name="Alice")
    page = document(site)
    names = {"changes", "count", "latest_sequence", "scanned", "epoch", "generation"}
    assert page.keys() == names
    assert (page["latest_sequence"], page["scanned"], page["epoch"]) == (1, 1, site.log.epoch)
    [stored] = site.log.read(0)
    assert page["changes"] == [json.loads(Canonical().encode(stored))]


def test_every_operation_is_there(site: Site) -> None:
    users = site.writer.table("users")
    for op in Op:
        site.writer.append([make_change(op, table=users, after={})])
    assert [change["op"] for change in document(site)["changes"]] == [op.value for op in Op]


@pytest.mark.requirement("C-10")
def test_after_is_exclusive_and_upto_is_inclusive(site: Site) -> None:
    site.writer.put_many("users", 10)
    assert sequences(site, after=3, upto=6) == [4, 5, 6]
    assert sequences(site, after=3, limit=2) == [4, 5]
    assert sequences(site, after=6, upto=6) == []
    assert document(site, after=8, upto=100)["scanned"] == 10


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ("public.users", [1]),
        ("users", [1, 4]),
        ("public.*", [1, 2]),
        ("*.users", [1, 4]),
        ("order*", [2, 3]),
        ("users,sales.orders", [1, 3, 4]),
        ("nothing", []),
        ("*", [1, 2, 3, 4]),
    ],
)
def test_tables_are_globs_of_schema_and_table_or_of_the_table_alone(
    site: Site, tables: str, expected: list[int]
) -> None:
    for schema, name in [
        ("public", "users"),
        ("public", "orders"),
        ("sales", "orders"),
        ("sales", "users"),
    ]:
        table = site.writer.table(f"{name}@{schema}", schema=schema)
        described = site.log.register(msgspec.structs.replace(table, name=name, version=0))
        site.writer.append([make_change(table=described, after={})])
    page = document(site, tables=tables)
    assert [change["sequence"] for change in page["changes"]] == expected
    assert page["scanned"] == 4


def test_operations_are_named_in_any_case(site: Site) -> None:
    site.writer.put("users", "alice")
    site.writer.put("users", "alice", Op.UPDATE)
    site.writer.delete("users", "alice")
    assert sequences(site, operations="insert,DELETE") == [1, 3]
    assert sequences(site, operations="Update", tables="users") == [2]


@pytest.mark.requirement("C-06")
def test_a_filtered_page_says_how_far_it_scanned(site: Site) -> None:
    site.writer.put_many("users", 1000)
    page = document(site, tables="orders")
    assert (page["changes"], page["scanned"]) == ([], 1000)
    response = lines(site, tables="orders", limit=5)
    assert (response.content, response.headers["x-headrace-scanned"]) == (b"", "1000")


def test_wait_ms_waits_for_a_change_that_passes_the_filter(site: Site) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(sequences, site, wait_ms=30_000, tables="orders")
        streamed = pool.submit(lines, site, wait_ms=30_000, tables="orders")
        site.await_waiting(2)
        site.writer.put("users", "alice")
        site.writer.put("orders", "1")
        assert answer.result() == [2]
        assert line_sequences(streamed.result()) == [2]


def test_a_wait_ends_when_upto_is_reached(site: Site) -> None:
    site.writer.put_many("users", 5)
    assert document(site, wait_ms=60_000, upto=3, tables="orders")["scanned"] == 3


def test_ndjson_is_everything_there_is_a_line_each(site: Site) -> None:
    site.writer.put_many("users", 3000)
    response = lines(site)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.headers["transfer-encoding"] == "chunked"
    assert response.headers["x-headrace-scanned"] == "3000"
    assert response.headers["x-headrace-epoch"] == site.log.epoch
    assert response.content.endswith(b"}\n")
    changes = [msgspec.json.decode(x, type=CanonicalChange) for x in response.content.splitlines()]
    assert [change.sequence for change in changes] == list(range(1, 3001))


def test_ndjson_obeys_after_upto_and_limit(site: Site) -> None:
    site.writer.put_many("users", 1000)
    assert line_sequences(lines(site, after=990)) == list(range(991, 1001))
    ranged = lines(site, after=100, upto=900)
    assert line_sequences(ranged) == list(range(101, 901))
    assert ranged.headers["x-headrace-scanned"] == "900"
    limited = lines(site, after=100, limit=7)
    assert line_sequences(limited) == list(range(101, 108))
    assert limited.headers["x-headrace-scanned"] == "107"
    assert lines(site, after=1000).content == b""


def test_json_is_a_thousand_changes_unless_limited(site: Site) -> None:
    site.writer.put_many("users", 1200)
    page = document(site)
    assert (page["count"], page["scanned"], page["latest_sequence"]) == (1000, 1000, 1200)
    assert document(site, limit=1100)["count"] == 1100


@pytest.mark.requirement("C-05")
def test_trimmed_changes_are_announced(site: Site) -> None:
    site.writer.put_many("users", 10)
    site.log.trim(6)
    assert site.get("/v1/changes", after=2).headers["x-headrace-gap"] == "3-5"
    assert lines(site, after=2).headers["x-headrace-gap"] == "3-5"
    text = site.get("/v1/changes/stream", after=2, upto=10).text
    assert 'event: gap\ndata: {"first":3,"last":5,"reason":"trim"}\n\n' in text


@pytest.mark.requirement("C-05")
def test_lines_whose_rest_is_trimmed_while_they_are_sent_break_off(site: Site) -> None:
    for number in range(120):
        site.writer.put("users", str(number), photo="x" * (1 << 18))
    with contextlib.closing(http.client.HTTPConnection(*site.address)) as connection:
        # Left alone, a receive buffer may grow beyond all that there is to read.
        connection.sock = socket.socket()
        connection.sock.settimeout(30)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.sock.connect(site.address)
        connection.request("GET", "/v1/changes", headers=LINES)
        response = connection.getresponse()
        # The first pages fill every buffer on the way; what follows is still to be read.
        site.log.trim(120)
        with pytest.raises(http.client.IncompleteRead) as caught:
            response.read()
    whole = caught.value.partial.rpartition(b"\n")[0].splitlines()
    assert [json.loads(line)["sequence"] for line in whole] == list(range(1, len(whole) + 1))
    assert len(whole) < 119


def test_a_stream_sends_canonical_changes_until_upto(site: Site) -> None:
    site.writer.put_many("users", 600)
    response = site.get("/v1/changes/stream", after=590, upto=600)
    assert response.headers["content-type"] == "text/event-stream"
    changes = parse(response.text)
    assert [change["sequence"] for change in changes] == list(range(591, 601))
    assert changes[0].keys() == set(CanonicalChange.__struct_fields__)
    assert re.search(r"^id: 600\ndata: ", response.text, re.MULTILINE)


@pytest.mark.requirement("S1-36")
def test_a_stream_stays_and_follows(site: Site) -> None:
    with Reader(f"{site.url}/v1/changes/stream?tables=orders&heartbeat_ms=100") as reader:
        reader.await_text(": heartbeat\n\n")
        site.writer.put("users", "alice")
        site.writer.put("orders", "1")
        assert [change["sequence"] for change in reader.await_events(1)] == [2]


def test_a_stream_resumes_after_last_event_id(site: Site) -> None:
    site.writer.put_many("users", 5)
    response = site.http.get(
        "/v1/changes/stream", params={"upto": 5}, headers={"Last-Event-ID": "3"}
    )
    assert [change["sequence"] for change in parse(response.text)] == [4, 5]


def test_a_json_column_with_line_ends_stays_one_line(site: Site) -> None:
    users = site.writer.table("users")
    after = b'{"doc": {\n"a": 1\r\n}}'
    site.writer.append([msgspec.structs.replace(make_change(table=users), after=after)])
    [line] = lines(site).content.splitlines()
    assert json.loads(line)["after"] == {"doc": {"a": 1}}
    [change] = parse(site.get("/v1/changes/stream", upto=1).text)
    assert change["after"] == {"doc": {"a": 1}}


@pytest.mark.requirement("P-36")
def test_a_reader_that_is_ahead_of_a_restored_log_is_refused(site: Site) -> None:
    site.writer.put_many("users", 10)
    was = site.log.become_copy()
    site.writer.put_many("users", 5)

    def status(path: str, **given: object) -> int:
        response = site.http.get(path, params={name: str(each) for name, each in given.items()})
        if response.status_code == 409:
            assert response.json()["error"] == "other_log"
            assert "current rows" in response.json()["hint"]
        return response.status_code

    for path, after in (("/v1/changes", "after"), ("/changefeed", "from_seq")):
        assert status(path, **{after: 10, "epoch": was.epoch}) == 200
        assert status(path, **{after: 11, "epoch": was.epoch}) == 409
        assert status(path, **{after: 11, "epoch": site.log.epoch}) == 200
        assert status(path, **{after: 0, "epoch": "another"}) == 409
        assert status(path, **{after: 15}) == 200
        assert status(path, **{after: 16}) == 409
    assert status("/v1/changes/stream", after=11, epoch=was.epoch) == 409
    assert status("/changefeed/stream", from_seq=11, epoch=was.epoch) == 409


@pytest.mark.requirement("P-06")
def test_a_place_that_is_not_in_the_log_is_refused_over_http(site: Site) -> None:
    site.writer.put_many("users", 10)
    page = site.http.get("/v1/changes").json()
    place = {"epoch": page["epoch"], "generation": page["generation"]}
    known = site.log.lineage[-1]
    # As if the log had been put back from a copy that ended at 6, and had gone on since.
    site.log._lineage = [known, Generation(known.epoch, "abc", 7)]
    streamed = {"upto": 10, "heartbeat_ms": 100}
    for path in ("/v1/changes", "/v1/changes/stream"):
        for after, status in ((6, 200), (7, 409)):
            given = {**place, "after": str(after), **(streamed if "stream" in path else {})}
            assert site.http.get(path, params=given).status_code == status
        # A sequence alone is refused beyond the newest, and the answer says what to do.
        refused = site.http.get(path, params={"after": "11"})
        assert (refused.status_code, refused.json()["error"]) == (409, "other_log")
        assert "go on after 10" in refused.json()["hint"]
    assert site.http.get("/changefeed", params={**place, "from_seq": "7"}).status_code == 409
    for id, status in ((f"6@{place['generation']}", 200), (f"7@{place['generation']}", 409)):
        response = site.http.get(
            "/v1/changes/stream", params=streamed, headers={"Last-Event-ID": id}
        )
        assert response.status_code == status


def test_ids_of_a_stream_may_be_whole_places(site: Site) -> None:
    site.writer.put_many("users", 2)
    generation = site.log.generation
    text = site.get("/v1/changes/stream", upto=2, place_ids="true").text
    assert [line for line in text.splitlines() if line.startswith("id: ")] == [
        f"id: {sequence}@{generation}" for sequence in (1, 2)
    ]
