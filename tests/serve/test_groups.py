"""Consumers that share a cursor: what a group keeps, for whom, and for how long."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.change.event import BeforeKind, Op
from headrace.formats import Canonical
from headrace.log import Cursor, Log
from headrace.serve import affected
from headrace.serve import groups as sharing
from headrace.serve.feed import LogFeed
from headrace.serve.filter import Filter
from headrace.serve.groups import Consumer, Group, Groups, LeaseSubscription
from headrace.serve.permissions import Permissions
from headrace.testing import wait_until
from tests.changes import Writer, opened_writer
from tests.serve.conftest import Site, Sites
from tests.serve.tenants import FORMATS, ORDERS, USERS, Draft, append

EVERYTHING = LeaseSubscription(Canonical(), Filter(), Permissions())


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    with opened_writer(tmp_path / "log") as writer:
        yield writer


def lease(site: Site, **asked: Any) -> dict[str, Any]:
    response = site.http.post("/v1/cursors/jobs/lease", params=asked)
    assert response.status_code == 200, response.text
    page: dict[str, Any] = response.json()
    return page


def ack(site: Site, page: dict[str, Any]) -> httpx.Response:
    body = {"lease": page["lease"], "sequences": held(page)}
    return site.http.post("/v1/cursors/jobs/ack", json=body)


def held(page: dict[str, Any]) -> list[int]:
    return [event["sequence"] for event in page["events"]]


def put(site: Site, sequence: int = 0) -> None:
    site.http.put("/v1/cursors/jobs", json={"sequence": sequence}).raise_for_status()


# --- keys that end -------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", range(4))
def test_a_key_that_ends_while_it_leases_passes_over_nothing(writer: Writer, looks: int) -> None:
    writer.put_many("users", 600)
    cursor = writer.log.put_cursor(Cursor("jobs", 0, 0))
    group = Group(LogFeed(writer.log), writer.log, cursor, EVERYTHING)
    left = iter([True] * looks)
    ending = Consumer("late", valid=lambda: next(left, False))

    async def run() -> tuple[list[int], list[int]]:
        got = await group.lease(ending, limit=600, seconds=60, wait=0.2)
        rest = await group.lease(Consumer("other"), limit=1000, seconds=60, wait=0)
        return [d.sequence for d in got.events], [d.sequence for d in rest.events]

    got, rest = asyncio.run(run())
    assert got + rest == list(range(1, 601))
    kept = writer.log.cursor("jobs")
    assert kept is not None
    assert kept.sequence == 0


# --- events of several rows ----------------------------------------------------------------------


@pytest.fixture
def shop(sites: Sites) -> Site:
    site = sites(formats=FORMATS)
    put(site)
    return site


USER = {"id": "u1", "tenant_id": "t", "name": "n", "status": "s"}
ORDER = {"id": "o1", "tenant_id": "t", "user_id": "u1"}
OTHER = {"id": "o2", "tenant_id": "t", "user_id": "u2"}


def deleted(table: Any, row: dict[str, str]) -> Draft:
    return Draft(Op.DELETE, table, row, None, BeforeKind.FULL)


def test_a_row_that_an_entity_event_tells_of_waits_for_it(shop: Site) -> None:
    append(shop.writer, [deleted(ORDERS, ORDER), deleted(USERS, USER)])
    append(shop.writer, [Draft(Op.INSERT, ORDERS, None, ORDER)])
    append(shop.writer, [Draft(Op.INSERT, ORDERS, None, OTHER)])
    first = lease(shop, format="entity", limit=1)
    assert [each["event"]["entity"]["entity_type"] for each in first["events"]] == ["User"]
    assert held(lease(shop, format="entity")) == [4]  # another order
    assert ack(shop, first).json()["lost"] == []
    assert held(lease(shop, format="entity")) == [3]


def test_a_row_of_an_annotated_transaction_waits_for_its_one_event(shop: Site) -> None:
    moved = Draft(Op.UPDATE, ORDERS, ORDER, ORDER | {"id": "o9"}, BeforeKind.FULL)
    append(shop.writer, [moved, Draft(Op.INSERT, USERS, None, USER)], {"root": "User:u1"})
    append(shop.writer, [Draft(Op.INSERT, ORDERS, None, ORDER)])  # the id is free again
    append(shop.writer, [Draft(Op.INSERT, ORDERS, None, OTHER)])
    first = lease(shop, format="entity", limit=1)
    assert held(first) == [2]
    assert held(lease(shop, format="entity")) == [4]
    ack(shop, first)
    assert held(lease(shop, format="entity")) == [3]


def test_rows_that_were_deleted_together_can_be_shared(shop: Site) -> None:
    rows = [USER | {"id": f"u{number}"} for number in range(4)]
    append(shop.writer, [deleted(USERS, row) for row in rows])
    assert held(lease(shop, format="entity", limit=2)) == [1, 2]
    assert held(lease(shop, format="entity", limit=2)) == [3, 4]


def test_an_event_of_very_many_rows_stands_for_their_tables(
    shop: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(affected, "MOST_ROWS", 3)
    orders = [ORDER | {"id": f"o{number}"} for number in range(5)]
    append(shop.writer, [*(deleted(ORDERS, order) for order in orders), deleted(USERS, USER)])
    append(shop.writer, [Draft(Op.INSERT, ORDERS, None, OTHER)])
    first = lease(shop, format="entity", limit=1)
    assert held(first) == [6]
    assert held(lease(shop, format="entity")) == []
    ack(shop, first)
    assert held(lease(shop, format="entity")) == [7]


# --- one group after another ---------------------------------------------------------------------


def test_an_ack_on_its_way_to_the_disk_is_not_undone_by_the_next_group(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.writer.put_many("users", 3)
    put(site)
    page = lease(site, lease_ms=2000)
    writing, go = threading.Event(), threading.Event()
    written = Log.put_cursor

    def slowly(self: Log, cursor: Cursor) -> Cursor:
        if not writing.is_set():
            writing.set()
            assert go.wait(120)
        return written(self, cursor)

    with ThreadPoolExecutor() as pool:
        monkeypatch.setattr(Log, "put_cursor", slowly)
        done = pool.submit(ack, site, page)
        assert writing.wait(120)
        # Its lease has expired, so that another question may be asked.
        wait_until(
            lambda: site.get("/v1/cursors/jobs").json()["leases"] == [], message="it expires"
        )
        following = pool.submit(lease, site, format="changefeed")
        go.set()
        assert done.result(120).json() == {"sequence": 3, "lost": []}
        assert held(following.result(120)) == []
    assert site.get("/v1/cursors/jobs").json()["sequence"] == 3


def test_names_that_were_only_asked_for_are_forgotten(site: Site) -> None:
    for number in range(50):
        assert site.http.delete(f"/v1/cursors/x{number}").status_code == 404
        site.http.post(f"/v1/cursors/x{number}/lease")
    assert len(site.service.groups._turns) == 0


# --- what is kept --------------------------------------------------------------------------------


def payloads(group: Group) -> int:
    return sum(len(payload) for item in group._items.values() for payload in item.payloads)


def test_what_was_handed_out_is_not_kept_and_read_again_when_it_is_handed_on(
    writer: Writer,
) -> None:
    for number in range(20):
        writer.put("users", "same" if number % 2 else str(number), row="x" * 30_000)
    cursor = writer.log.put_cursor(Cursor("jobs", 0, 0))
    group = Group(LogFeed(writer.log), writer.log, cursor, EVERYTHING)
    one, two = Consumer("one"), Consumer("two")
    clock = 0.0

    async def run() -> None:
        nonlocal clock
        asyncio.get_running_loop().time = lambda: clock  # type: ignore[method-assign]
        first = await group.lease(one, limit=2, seconds=10, wait=0)
        assert [each.sequence for each in first.events] == [1, 2]
        second = await group.lease(one, limit=100, seconds=100, wait=0)
        # The others are of a row that somebody holds; all have been read by now.
        assert [each.sequence for each in second.events] == list(range(3, 20, 2))
        assert payloads(group) <= sharing.AHEAD_BYTES
        clock = 20.0
        again = await group.lease(two, limit=100, seconds=10, wait=0)
        assert again.events[:2] == first.events
        assert [each.sequence for each in again.events] == [1, *range(2, 21, 2)]
        assert payloads(group) == 0

    asyncio.run(run())


def test_what_is_trimmed_by_force_before_it_is_handed_on_is_told_as_a_gap(site: Site) -> None:
    site.writer.put_many("users", 3)
    put(site)
    assert held(lease(site, limit=2, lease_ms=100)) == [1, 2]
    wait_until(lambda: site.get("/v1/cursors/jobs").json()["leases"] == [], message="it expires")
    site.log.trim(3, force=True)
    site.feed._blocks.clear()
    response = site.http.post("/v1/cursors/jobs/lease", params={"wait_ms": 5000})
    assert response.headers["x-headrace-gap"] == "1-2"
    assert held(response.json()) == [3]
    # An answer may be lost, so the gap is reported until an ack shows that one has arrived.
    again = site.http.post("/v1/cursors/jobs/lease", params={"wait_ms": 0})
    assert (again.headers["x-headrace-gap"], again.json()["lease"]) == ("1-2", None)
    assert ack(site, response.json()).json() == {"sequence": 3, "lost": []}
    after = site.http.post("/v1/cursors/jobs/lease", params={"wait_ms": 0})
    assert "x-headrace-gap" not in after.headers


def test_a_group_that_nobody_uses_is_forgotten_unless_somebody_holds_a_lease(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "IDLE_SECONDS", 0.01)
    writer.put_many("users", 3)
    cursors = [writer.log.put_cursor(Cursor(name, 0, 0)) for name in ("idle", "busy")]
    kept = Groups(LogFeed(writer.log), writer.log)

    async def run() -> None:
        idle, busy = (kept.begin(cursor, EVERYTHING) for cursor in cursors)
        expired = await idle.lease(Consumer("x"), limit=1, seconds=0.01, wait=0)
        await busy.lease(Consumer("x"), limit=1, seconds=3600, wait=0)
        await asyncio.to_thread(
            wait_until, lambda: kept.find(cursors[0].id) is None, message="it is forgotten"
        )
        assert kept.find(cursors[1].id) is busy
        assert (await idle.ack(expired.id, [1])).lost == [1]  # it comes again
        anew = kept.begin(cursors[0], EVERYTHING)
        again = await anew.lease(Consumer("x"), limit=3, seconds=60, wait=0)
        assert [each.sequence for each in again.events] == [1, 2, 3]

    asyncio.run(run())
