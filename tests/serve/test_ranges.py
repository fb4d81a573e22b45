"""The log as it is stored, over HTTP: where to cut it, its records, its tables."""

import struct
import time

import msgspec

from headrace.change.event import Table
from headrace.change.record import rows
from tests.serve.conftest import Site

HEAD = struct.Struct(">QII")


def pieces(body: bytes) -> list[tuple[int, int, bytes]]:
    """(first sequence, count, records) of every piece, read as docs/http.md describes it."""
    found, at = [], 0
    while at < len(body):
        first, count, size = HEAD.unpack_from(body, at)
        at += HEAD.size
        found.append((first, count, body[at : at + size]))
        at += size
    return found


def test_ranges_end_with_transactions(site: Site) -> None:
    for _ in range(3):
        site.writer.put_many("users", 4)
    asked = site.get("/v1/ranges", after=0, limit=9).json()
    left_since = asked.pop("left_since")
    assert abs(time.time() - left_since / 1e6) < 600
    assert asked == {
        "epoch": site.log.epoch,
        "first_sequence": 1,
        "latest_sequence": 12,
        "ends": [8],
        "removed": "",
        "lineage": [[site.log.epoch, "0", 1]],
        "since": 0,
    }
    assert site.get("/v1/ranges", after=0, since=0).json()["since"] == 1
    assert site.get("/v1/ranges", after=0, since=2**62).json()["since"] == 13
    assert site.get("/v1/ranges", after=8, limit=1).json()["ends"] == [12]
    assert site.get("/v1/ranges", after=12).json()["ends"] == []
    assert site.get("/v1/ranges", after=8, upto=10).json()["ends"] == [10]
    assert site.get("/v1/ranges", after=2**64 - 1, limit=2**64 - 1).json()["ends"] == []


def test_a_large_batch_is_cut_into_parts(site: Site) -> None:
    for _ in range(4):
        site.writer.put_many("users", 5000)
    assert site.get("/v1/ranges", parts=2).json()["ends"] == [10_000, 20_000]
    assert site.get("/v1/ranges", parts=100).json()["ends"] == [5000, 10_000, 15_000, 20_000]


def test_records_are_the_bytes_of_the_log(site: Site) -> None:
    site.writer.put_many("users", 25)
    site.writer.put("orders", "1")
    answer = site.get("/v1/records", after=3, upto=20)
    ((first, count, records),) = pieces(answer.content)
    assert (first, count) == (4, 17)
    assert records == b"".join(record for _, record in site.log.records(3, limit=17))
    assert len(rows(records, count)) == 17
    assert answer.headers["X-Headrace-Epoch"] == site.log.epoch
    assert answer.headers["X-Headrace-Latest"] == "26"


def test_many_records_come_in_pieces_without_holes(site: Site) -> None:
    site.writer.put_many("users", 25_000)
    found = pieces(site.get("/v1/records").content)
    assert len(found) > 2
    assert [first for first, _, _ in found] == [
        1 + sum(count for _, count, _ in found[:n]) for n in range(len(found))
    ]
    assert sum(count for _, count, _ in found) == 25_000


def test_records_that_are_gone_are_left_out_and_their_place_is_told(site: Site) -> None:
    site.writer.put_many("users", 9)
    site.log.trim(5)
    ((first, count, _),) = pieces(site.get("/v1/records").content)
    assert (first, count) == (5, 5)
    assert site.get("/v1/ranges").json()["first_sequence"] == 5


def test_nothing_to_send_is_an_empty_answer(site: Site) -> None:
    assert site.get("/v1/records").content == b""
    site.writer.put("users", "1")
    assert site.get("/v1/records", after=1).content == b""


def test_tables_come_version_by_version(site: Site) -> None:
    site.writer.put("users", "1")
    site.writer.put("orders", "1")
    everything = site.get("/v1/tables").json()
    assert everything["epoch"] == site.log.epoch
    assert msgspec.convert(everything["tables"], list[Table]) == site.log.tables()
    assert [table["name"] for table in site.get("/v1/tables", after=1).json()["tables"]] == [
        "orders"
    ]


def test_a_page_of_another_site_gets_no_records(site: Site) -> None:
    for path in ("/v1/records", "/v1/ranges", "/v1/tables"):
        assert site.http.get(path, headers={"Origin": "http://evil.example"}).status_code == 403
        assert site.http.get(path, headers={"Host": "evil.example"}).status_code == 403
        assert site.http.get(path, params={"after": "x"}).status_code == 400
