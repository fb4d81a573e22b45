"""Named cursors, and consumers that share one."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.change.event import BeforeKind, Change, Op
from headrace.errors import LogError
from headrace.formats import Canonical
from headrace.log import Cursor, Log, LogReader
from headrace.log.keys import Scope
from headrace.serve import BackgroundServer, ServerSettings, create_app, cursors
from headrace.serve import groups as sharing
from headrace.serve.affected import AffectedRows
from headrace.serve.feed import LogFeed
from headrace.serve.filter import Filter
from headrace.serve.groups import Consumer, Group, LeaseSubscription
from headrace.serve.permissions import Permissions
from headrace.serve.subscription import Subscription
from tests.changes import Writer, make_change, opened_writer
from tests.effort import times
from tests.serve.conftest import Site, Sites
from tests.serve.sse import Reader


def put(site: Site, name: str, sequence: int, **how: Any) -> httpx.Response:
    headers = how.pop("headers", {})
    body = {"sequence": sequence, **how}
    return site.http.put(f"/v1/cursors/{name}", json=body, headers=headers)


def lease(site: Site, name: str = "jobs", **asked: Any) -> dict[str, Any]:
    response = site.http.post(f"/v1/cursors/{name}/lease", params=asked)
    assert response.status_code == 200, response.text
    page: dict[str, Any] = response.json()
    return page


def ack(site: Site, page: dict[str, Any], *sequences: int) -> dict[str, Any]:
    body = {"lease": page["lease"], "sequences": sequences or held(page)}
    response = site.http.post("/v1/cursors/jobs/ack", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def held(page: dict[str, Any]) -> list[int]:
    return [event["sequence"] for event in page["events"]]


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]


# --- cursors -------------------------------------------------------------------------------------


def test_a_cursor_is_made_moved_listed_and_dropped(site: Site) -> None:
    site.writer.put_many("users", 5)
    made = put(site, "billing", 2).json()
    assert (made["name"], made["sequence"], made["latest_sequence"]) == ("billing", 2, 5)
    assert put(site, "billing", 4).json()["sequence"] == 4
    assert site.get("/v1/cursors/billing").json()["sequence"] == 4
    assert [each["name"] for each in site.get("/v1/cursors").json()["cursors"]] == ["billing"]
    assert site.http.delete("/v1/cursors/billing").json()["sequence"] == 4
    assert error(site.http.get("/v1/cursors/billing")) == (404, "unknown_cursor")
    assert error(site.http.delete("/v1/cursors/billing")) == (404, "unknown_cursor")


def test_an_ack_is_durable_before_it_is_answered(site: Site) -> None:
    site.writer.put_many("users", 5)
    put(site, "billing", 3)
    with LogReader.open(site.log.path) as elsewhere:  # sees only what is on disk
        cursor = elsewhere.cursor("billing")
    assert cursor is not None
    assert cursor.sequence == 3


def test_polls_and_streams_begin_after_a_cursor(site: Site) -> None:
    site.writer.put_many("users", 5)
    put(site, "billing", 3)
    page = site.get("/v1/changes", cursor="billing").json()
    assert [change["sequence"] for change in page["changes"]] == [4, 5]
    page = site.get("/changefeed", cursor="billing").json()
    assert [event["sequence"] for event in page["events"]] == [4, 5]
    for path in ("/v1/changes/stream", "/changefeed/stream"):
        with Reader(f"{site.url}{path}?cursor=billing") as reader:
            assert [event["sequence"] for event in reader.await_events(2)] == [4, 5]
    # Reading acks nothing.
    assert site.get("/v1/cursors/billing").json()["sequence"] == 3
    resumed = {"Last-Event-ID": "4"}
    with Reader(f"{site.url}/v1/changes/stream?cursor=billing", resumed) as reader:
        assert [event["sequence"] for event in reader.await_events(1)] == [5]


def test_a_cursor_never_goes_back_unless_forced(site: Site) -> None:
    site.writer.put_many("users", 5)
    put(site, "billing", 4)
    assert error(put(site, "billing", 3)) == (409, "cursor_ahead")
    assert put(site, "billing", 4).status_code == 200
    assert put(site, "billing", 1, force=True).json()["sequence"] == 1


@pytest.mark.parametrize("name", ["a b", "ä", "x" * 129, "a%2Fb", "a:b"])
def test_names_are_plain(site: Site, name: str) -> None:
    assert put(site, name, 0).status_code in (400, 404)
    assert site.http.get("/v1/changes", params={"cursor": name}).status_code == 400
    assert site.log.cursors() == []


def test_the_longest_name_is_taken(site: Site) -> None:
    assert put(site, "Az09_.-" + "x" * 121, 0).status_code == 200


def test_what_cannot_be_is_refused(site: Site) -> None:
    site.writer.put_many("users", 2)
    assert error(put(site, "billing", 3)) == (409, "other_log")
    assert error(put(site, "billing", -1)) == (400, "invalid_parameter")
    unknown = site.http.get("/v1/changes", params={"cursor": "nobody"})
    assert error(unknown) == (404, "unknown_cursor")
    put(site, "billing", 1)
    both = site.http.get("/v1/changes", params={"cursor": "billing", "after": "1"})
    assert error(both) == (400, "invalid_parameter")


@pytest.mark.requirement("S4-20", "C-24")
def test_retention_stops_at_the_slowest_cursor_and_says_so(site: Site) -> None:
    site.writer.put_many("users", 10)
    put(site, "fast", 8)
    put(site, "slow", 4)
    retain = {"before_sequence": 9}
    kept = site.http.post("/changefeed/retention", json=retain).json()
    assert (kept["before_sequence"], kept["held_by"]) == (5, "slow")
    assert site.get("/changefeed/stats").json()["total_events"] == 6
    put(site, "slow", 9)
    kept = site.http.post("/changefeed/retention", json=retain | {"before_sequence": 11}).json()
    assert (kept["before_sequence"], kept["held_by"]) == (9, "fast")


def test_every_key_has_cursors_of_its_own_and_cannot_tell_which_others_have(site: Site) -> None:
    site.writer.put_many("users", 5)
    mine, other = site.key(), site.key()
    put(site, "billing", 2, headers=mine)
    body = {"lease": "x", "sequences": [3]}
    for method, path in (
        ("GET", "/v1/cursors/{}"),
        ("DELETE", "/v1/cursors/{}"),
        ("GET", "/v1/changes?cursor={}"),
        ("GET", "/changefeed?cursor={}"),
        ("GET", "/v1/changes/stream?cursor={}"),
        ("POST", "/v1/cursors/{}/lease"),
        ("POST", "/v1/cursors/{}/ack"),
    ):
        answers = []
        for name in ("billing", "nothing"):
            sent = body if path.endswith("ack") else None
            response = site.http.request(method, path.format(name), headers=other, json=sent)
            answers.append((error(response), response.text.replace(name, "NAME")))
        assert answers[0] == answers[1]
        assert answers[0][0] == (404, "unknown_cursor")
    owner = site.service.keyring.all()[0].id
    asked = site.http.get(f"/v1/cursors/billing?owner={owner}", headers=other)
    assert error(asked) == (404, "unknown_cursor")
    # The name is not taken: it means another one.
    assert put(site, "billing", 4, headers=other).json()["sequence"] == 4
    assert site.http.get("/v1/cursors/billing", headers=mine).json()["sequence"] == 2
    assert site.http.delete("/v1/cursors/billing", headers=other).json()["sequence"] == 4
    assert site.http.get("/v1/cursors/billing", headers=mine).json()["sequence"] == 2


def test_an_admin_means_its_own_cursor_or_the_only_other_one_or_says_whose(site: Site) -> None:
    site.writer.put_many("users", 5)
    mine, other = site.key(), site.key()
    admin = site.key(scopes=frozenset({Scope.READ, Scope.ADMIN}))
    first, second, _ = [key.id for key in site.service.keyring.all()]
    put(site, "billing", 2, headers=mine)
    assert put(site, "billing", 3, headers=admin).json()["owner"] == first
    assert put(site, "billing", 4, headers=mine).status_code == 200  # it is still its own
    put(site, "billing", 1, headers=other)
    for path in ("/v1/cursors/billing", "/v1/changes?cursor=billing"):
        for key in (admin, {}):
            assert error(site.http.get(path, headers=key)) == (409, "ambiguous_cursor")
    named = site.http.get(f"/v1/cursors/billing?owner={second}", headers=admin)
    assert named.json()["sequence"] == 1
    dropped = site.http.delete(f"/v1/cursors/billing?owner={second}", headers=admin)
    assert dropped.status_code == 200
    nobody = site.http.put(
        "/v1/cursors/billing?owner=key_000000000000", json={"sequence": 1}, headers=admin
    )
    assert error(nobody) == (404, "unknown_cursor")
    # A program without a key has one of its own beside it.
    site.log.put_cursor(Cursor("billing", 5, 0))
    assert site.get("/v1/cursors/billing").json()["sequence"] == 5
    local = site.http.get("/v1/cursors/billing?owner=none", headers=admin)
    assert local.json()["sequence"] == 5
    listed = site.get("/v1/cursors").json()["cursors"]
    assert [(each["name"], each["owner"]) for each in listed] == [
        ("billing", first),
        ("billing", None),
    ]


def leased(site: Site, key: dict[str, str], **asked: Any) -> dict[str, Any]:
    response = site.http.post("/v1/cursors/jobs/lease", params=asked, headers=key)
    assert response.status_code == 200, response.text
    page: dict[str, Any] = response.json()
    return page


def acked(site: Site, key: dict[str, str], page: dict[str, Any]) -> Any:
    body = {"lease": page["lease"], "sequences": held(page)}
    return site.http.post("/v1/cursors/jobs/ack", json=body, headers=key).json()


def test_a_rotated_key_keeps_its_cursors_and_their_leases(site: Site) -> None:
    """Whichever key leased, before or after: the consumers are the same."""
    site.writer.put_many("users", 5)
    keyring = site.service.keyring
    old = site.key(tables=("users",))
    put(site, "jobs", 0, headers=old)
    first = leased(site, old, limit=1)
    made = keyring.rotate(keyring.all()[0].id, overlap=60)
    assert made is not None
    new = {"X-API-Key": made.secret}
    second = leased(site, new, limit=2)
    assert (held(first), held(second)) == ([1], [2, 3])
    keyring.revoke(keyring.all()[0].id)  # as when the overlap is over
    assert site.http.post("/v1/cursors/jobs/lease", headers=old).status_code == 401
    assert acked(site, new, second) == {"sequence": 0, "lost": []}
    assert acked(site, new, first) == {"sequence": 3, "lost": []}
    assert held(leased(site, new)) == [4, 5]


def test_what_a_revoked_key_holds_is_handed_on(site: Site) -> None:
    site.writer.put_many("users", 3)
    key, admin = site.key(), site.key(scopes=frozenset({Scope.READ, Scope.ADMIN}))
    put(site, "jobs", 0, headers=key)
    assert held(leased(site, key, limit=2, lease_ms=3_600_000)) == [1, 2]
    assert held(leased(site, admin)) == [3]
    site.service.keyring.revoke(site.service.keyring.all()[0].id)
    again = leased(site, admin)
    assert held(again) == [1, 2]
    assert acked(site, admin, again) == {"sequence": 2, "lost": []}


def test_one_key_has_only_so_many_cursors(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors, "MOST_CURSORS", 2)
    key = site.key()
    for name in ("a", "b", "a"):
        assert put(site, name, 0, headers=key).status_code == 200
    assert error(put(site, "c", 0, headers=key)) == (409, "too_many_cursors")
    assert put(site, "c", 0).status_code == 200


# --- leases --------------------------------------------------------------------------------------


def test_consumers_share_a_cursor(site: Site) -> None:
    site.writer.put_many("users", 4)
    put(site, "jobs", 0)
    one, two = lease(site, limit=2, consumer="one"), lease(site, limit=2, consumer="two")
    assert (held(one), held(two)) == ([1, 2], [3, 4])
    assert one["events"][0]["event"]["key"] == {"id": "1"}
    assert lease(site)["lease"] is None
    assert ack(site, two) == {"sequence": 0, "lost": []}
    assert [each["consumer"] for each in site.get("/v1/cursors/jobs").json()["leases"]] == ["one"]
    assert ack(site, one) == {"sequence": 4, "lost": []}
    assert ack(site, one) == {"sequence": 4, "lost": []}  # its answer may have been lost


def test_a_rows_later_change_waits_for_its_earlier_one(site: Site) -> None:
    for key in ("a", "b", "a", "c", "a"):
        site.writer.put("users", key)
    put(site, "jobs", 0)
    first = lease(site, limit=1)
    assert held(first) == [1]
    second = lease(site)
    assert held(second) == [2, 4]
    assert held(lease(site)) == []
    ack(site, first)
    assert held(lease(site)) == [3, 5]  # both at once, to one consumer, in order


def test_a_changed_key_and_an_emptied_table_wait_for_all_they_touch(site: Site) -> None:
    users = site.writer.table("users")
    old, new = {"id": "a"}, {"id": "b"}
    moved = make_change(
        Op.UPDATE, table=users, key=new, before=old, after=new, before_kind=BeforeKind.KEY
    )
    emptied = make_change(Op.TRUNCATE, table=users, after={})
    inserted = make_change(table=users, key=new, after=new)
    for change in (make_change(table=users, key=old, after=old), moved, inserted):
        site.writer.append([change])
    site.writer.append([emptied])
    site.writer.append([make_change(table=users, key={"id": "z"}, after={"id": "z"})])
    site.writer.put("orders", "a")
    put(site, "jobs", 0)
    first = lease(site, limit=1)
    assert held(lease(site)) == [6]  # orders
    ack(site, first)
    second = lease(site, limit=1)
    assert held(second) == [2]
    assert held(lease(site)) == []
    ack(site, second)
    assert held(lease(site)) == [3, 4, 5]


def test_an_expired_lease_is_handed_on_and_its_ack_is_lost(site: Site) -> None:
    site.writer.put_many("users", 2)
    put(site, "jobs", 0)
    late = lease(site, lease_ms=2000, limit=1)
    begun = time.monotonic()
    other = lease(site, limit=1, wait_ms=10_000, lease_ms=60_000)
    assert held(other) == [2]
    again = lease(site, limit=1, wait_ms=10_000, lease_ms=60_000)
    assert (held(again), time.monotonic() - begun > 0.05) == ([1], True)
    assert ack(site, late) == {"sequence": 0, "lost": [1]}
    assert ack(site, again) == {"sequence": 1, "lost": []}


def test_a_lease_waits_for_a_commit_or_an_ack(site: Site) -> None:
    put(site, "jobs", 0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lease, site, wait_ms=20_000)
        site.await_waiting()
        site.writer.put("users", "a")
        first = waiting.result(120)
        site.writer.put("users", "a")
        waiting = pool.submit(lease, site, wait_ms=20_000)
        site.await_waiting()
        ack(site, first)
        assert held(waiting.result(120)) == [2]


def test_what_the_filter_leaves_out_holds_nothing_back(site: Site) -> None:
    put(site, "jobs", 0)
    site.writer.put_many("users", 10)
    assert lease(site, tables="orders", wait_ms=50)["lease"] is None
    assert site.get("/v1/cursors/jobs").json()["sequence"] == 10
    site.writer.put("orders", "1")
    site.writer.put("users", "1")
    leased = lease(site, tables="orders")
    assert held(leased) == [11]
    assert ack(site, leased)["sequence"] == 12


def test_a_lease_may_be_of_one_source(site: Site) -> None:
    site.writer.put("users", "1")
    put(site, "jobs", 0)
    assert held(lease(site, source="crm")) == []
    put(site, "jobs", 0, force=True)
    assert held(lease(site, source="shop")) == [1]


def test_entity_events_that_are_switched_off_cannot_be_leased(sites: Sites) -> None:
    site = sites(ServerSettings(port=0, enabled=False))
    put(site, "jobs", 0)
    response = site.http.post("/v1/cursors/jobs/lease", params={"format": "entity"})
    assert error(response) == (404, "not_enabled")


def test_consumers_must_ask_for_the_same(site: Site) -> None:
    site.writer.put_many("users", 2)
    put(site, "jobs", 0)
    first = lease(site, limit=1)
    response = site.http.post("/v1/cursors/jobs/lease", params={"format": "changefeed"})
    assert error(response) == (409, "other_question")
    assert error(put(site, "jobs", 2)) == (409, "cursor_leased")
    ack(site, first)
    assert lease(site, format="changefeed")["events"][0]["event"]["type"] == "PUT"
    response = site.http.post("/v1/cursors/jobs/lease", params={"format": "etl"})
    assert error(response) == (400, "invalid_parameter")


def test_a_forced_cursor_ends_its_leases(site: Site) -> None:
    site.writer.put_many("users", 3)
    put(site, "jobs", 0)
    first = lease(site)
    assert put(site, "jobs", 1, force=True).json()["leases"] == []
    assert ack(site, first) == {"sequence": 1, "lost": [2, 3]}
    again = lease(site)
    assert held(again) == [2, 3]
    site.http.delete("/v1/cursors/jobs")
    response = site.http.post(
        "/v1/cursors/jobs/ack", json={"lease": again["lease"], "sequences": [2]}
    )
    assert error(response) == (404, "unknown_cursor")
    assert site.log.cursors() == []  # nothing brings it back


def test_entity_events_can_be_leased(site: Site) -> None:
    site.writer.put_many("users", 3)
    put(site, "jobs", 0)
    leased = lease(site, format="entity", entity_type="User")
    assert [event["event"]["sequence_number"] for event in leased["events"]] == [1, 2, 3]
    assert ack(site, leased, 1, 3)["sequence"] == 1


@contextlib.contextmanager
def served(log: Log) -> Iterator[httpx.Client]:
    options = ServerSettings(port=0)
    app = create_app(log, statuses=list, copy_again=None, settings=options)
    with BackgroundServer(app, options) as server, httpx.Client(base_url=server.url) as client:
        yield client


def test_acks_outlive_a_restart_and_leases_do_not(tmp_path: Path) -> None:
    with opened_writer(tmp_path / "log") as writer:
        writer.put_many("users", 5)
        with served(writer.log) as http:
            http.put("/v1/cursors/jobs", json={"sequence": 0})
            one = http.post("/v1/cursors/jobs/lease", params={"limit": 2}).json()
            two = http.post("/v1/cursors/jobs/lease", params={"limit": 2}).json()
            done = {"lease": two["lease"], "sequences": [3]}
            http.post("/v1/cursors/jobs/ack", json=done).raise_for_status()
    with Log.open(tmp_path / "log") as log, served(log) as http:
        done = {"lease": one["lease"], "sequences": [1, 3]}
        answer = http.post("/v1/cursors/jobs/ack", json=done).json()
        assert answer == {"sequence": 0, "lost": [1]}
        again = http.post("/v1/cursors/jobs/lease").json()
        assert held(again) == [1, 2, 4, 5]


def test_what_waited_at_a_restart_waits_after_the_next_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "WINDOW", 3)
    site.writer.put_many("users", 9)
    # As a group leaves it that had acked all but these.
    site.log.put_cursor(Cursor("jobs", 0, 0, reached=8, waiting=(1, 2, 7)))
    first = lease(site, limit=1)
    assert held(first) == [1]
    ack(site, first)
    kept = site.log.cursor("jobs")
    assert kept is not None
    assert (kept.sequence, kept.waiting) == (1, (2, 7))


def test_a_group_holds_a_bounded_number_of_events(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "WINDOW", 10)
    site.writer.put_many("users", 30)
    put(site, "jobs", 0)
    first = lease(site, limit=1)
    rest = lease(site, limit=1000)
    assert held(rest) == list(range(2, 11))
    assert lease(site)["lease"] is None
    ack(site, rest)
    assert held(lease(site, limit=1000)) == list(range(11, 20))
    assert ack(site, first)["sequence"] == 10


def test_a_group_that_was_cut_off_loses_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.writer.put_many("users", 3)
    put(site, "jobs", 0)
    read, failures = Subscription.next, iter([True])

    async def cut_off(self: Subscription, limit: int, **how: Any) -> Any:
        page = await read(self, limit, **how)
        if next(failures, False):
            raise LogError("the disk is gone")
        return page

    monkeypatch.setattr(Subscription, "next", cut_off)
    assert site.http.post("/v1/cursors/jobs/lease").status_code == 503
    assert held(lease(site)) == [1, 2, 3]


# --- whatever happens ----------------------------------------------------------------------------


EVERYTHING = LeaseSubscription(Canonical(), Filter(), Permissions())


class Shared:
    """A cursor, its consumers, and a clock that tests move."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.log = writer, writer.log
        self.start = self.log.latest_sequence
        self.clock = 0.0
        self.leases: dict[str, list[int]] = {}  # that their consumers still know
        self.acked: set[int] = set()
        self.log.put_cursor(Cursor("jobs", self.start, 0))
        self.restart()

    def restart(self) -> None:
        """The server anew: it knows what is on disk."""
        cursor = self.log.cursor("jobs")
        assert cursor is not None
        feed = LogFeed(self.log)
        self.group = Group(feed, self.log, cursor, EVERYTHING)

    async def lease(self, limit: int, seconds: float) -> bool:
        leased = await self.group.lease(Consumer("x"), limit=limit, seconds=seconds, wait=0)
        assert leased.gap is None
        handed = [delivery.sequence for delivery in leased.events]
        self.expect_order(handed)
        if handed:
            self.leases[leased.id] = handed
        return bool(handed)

    def expect_order(self, handed: list[int]) -> None:
        """Whatever came before it for the same row is acked, or handed out with it."""
        assert handed == sorted(set(handed))
        kept = {each.sequence: each for each in self.log.read(self.start, limit=10_000)}
        for sequence in handed:
            rows = touched(kept[sequence])
            earlier = [each for each in kept if each < sequence and rows & touched(kept[each])]
            assert set(earlier) <= self.acked | set(handed)

    async def ack(self, lease: str, sequences: list[int]) -> None:
        done = await self.group.ack(lease, sequences)
        self.acked |= set(sequences) - set(done.lost)
        lowest = min(
            set(range(self.start + 1, self.log.latest_sequence + 1)) - self.acked, default=0
        )
        if lowest:
            assert done.cursor.sequence < lowest

    async def drain(self) -> None:
        self.clock += 1000
        while await self.lease(7, 1):
            id, sequences = self.leases.popitem()
            await self.ack(id, sequences)


def touched(change: Change) -> set[Any]:
    return set(AffectedRows.of(change).rows)


STEPS = st.one_of(
    st.tuples(st.just("put"), st.lists(st.sampled_from("abc"), min_size=1, max_size=4)),
    st.tuples(st.just("lease"), st.tuples(st.integers(1, 5), st.sampled_from([1.0, 10.0]))),
    st.tuples(st.just("lease"), st.tuples(st.integers(1, 5), st.sampled_from([1.0, 10.0]))),
    st.tuples(st.just("ack"), st.randoms(use_true_random=False)),
    st.tuples(st.just("crash"), st.randoms(use_true_random=False)),
    st.tuples(st.just("time"), st.sampled_from([0.5, 1.0, 20.0])),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("trim"), st.none()),
)


@pytest.mark.parametrize("window", [3, 1000])
def test_every_event_is_acked_in_its_rows_order_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(sharing, "WINDOW", window)
    with opened_writer(tmp_path / "log") as writer:

        @settings(max_examples=times(45, nightly=450), deadline=None)
        @given(st.lists(STEPS, max_size=30))
        def check(steps: list[Any]) -> None:
            asyncio.run(live(Shared(writer), steps))

        check()


async def live(shared: Shared, steps: list[Any]) -> None:
    loop = asyncio.get_running_loop()
    loop.time = lambda: shared.clock  # type: ignore[method-assign]
    for step, how in steps:
        known = sorted(shared.leases)
        match step:
            case "put":
                for key in how:
                    shared.writer.put("users", key)
            case "lease":
                await shared.lease(how[0], how[1])
            case "ack" if known:
                id = how.choice(known)
                await shared.ack(id, some(shared.leases[id], how))
            case "crash" if known:
                del shared.leases[how.choice(known)]
            case "time":
                shared.clock += how
            case "restart":
                shared.restart()
            case "trim":
                shared.log.trim(shared.log.latest_sequence + 1)
                cursor = shared.log.cursor("jobs")
                assert cursor is not None
                assert shared.log.first_sequence <= cursor.sequence + 1
    await shared.drain()
    everything = set(range(shared.start + 1, shared.log.latest_sequence + 1))
    assert shared.acked == everything
    cursor = shared.log.cursor("jobs")
    assert cursor is not None
    assert (cursor.sequence, cursor.waiting) == (shared.log.latest_sequence, ())


def some(sequences: list[int], choice: Any) -> list[int]:
    """The first few: who acks a row's later change before its earlier one gives up its order."""
    return sequences[: choice.randint(1, len(sequences))]
