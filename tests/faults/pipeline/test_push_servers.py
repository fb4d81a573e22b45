"""One pipeline that sends to five real servers at once, and what goes wrong on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.testing import wait_until
from tests.faults.pipeline.servers import SMALL, PushDestination, Town, opened_town
from tests.faults.pipeline.works import (
    PATIENCE,
    Works,
    assert_arrived,
    files_with,
    opened_works,
)
from tests.sinks.receiver import OK, HttpAnswer, Request, reply
from tests.sparkui import assert_hidden, pages

pytestmark = pytest.mark.slow

OUTAGE_SECONDS = 60
HOT_ROWS = [f"hot{number}" for number in range(20)]


@pytest.fixture(scope="module")
def town() -> Iterator[Town]:
    with opened_town() as made:
        made.make("warm")
        yield made


@pytest.fixture(scope="module")
def shared(town: Town, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Works]:
    with opened_works(tmp_path_factory.mktemp("works"), town) as made:
        yield made


@pytest.fixture
def works(shared: Works, town: Town) -> Works:
    """The pipeline, running and warm; each test has tables of its own."""
    town.start()
    shared.run()
    shared.put("warm", ["1"])
    shared.await_settled()
    return shared


def burst() -> list[str]:
    """Changes of 4,000 rows, and between them 100 of each of some hot ones."""
    return [
        row
        for turn in range(100)
        for row in (*(f"{turn * 40 + number}" for number in range(40)), *HOT_ROWS)
    ]


def at_first(town: Town, table: str, do: Callable[[PushDestination], None]) -> dict[str, int]:
    """Do something to each server as soon as it has got something; how much that was."""

    def watched(each: PushDestination) -> int:
        count = wait_until(
            lambda: each.count(table), timeout=PATIENCE, message=f"{each.name} got something"
        )
        do(each)
        return count

    with ThreadPoolExecutor(len(town)) as threads:
        counts = list(threads.map(watched, town))
    return {each.name: count for each, count in zip(town, counts, strict=True)}


@pytest.mark.requirement("S1-41")
def test_a_minute_without_any_of_them_costs_nothing(works: Works, town: Town) -> None:
    town.make("outage")
    works.put("outage", ["1", "2", "3"])
    works.await_settled()
    town.kill()
    begin = time.monotonic()
    for turn in range(20):
        works.put("outage", [f"{row}" for row in range(turn, turn + 30)])
    for each in town:
        works.await_status(each, phase="waiting")
        wait_until(
            lambda sink=each: "Connection refused" in works.status(sink)["error"],  # type: ignore[misc]
            timeout=PATIENCE,
            message=f"{each.name} says why it waits",
        )
    told = " ".join(works.ask("status").split())  # lines are as long as the terminal is wide
    for each in town:
        error = works.status(each)["error"]
        assert each.sink().get("servers", "127.0.0.1") in error
        assert "nothing has been taken since" in error
        assert f"{each.name}: {error.partition('refused')[0]}refused" in told
    wait_until(
        lambda: time.monotonic() - begin > OUTAGE_SECONDS,
        timeout=OUTAGE_SECONDS * 2,
        message="a minute is over",
    )
    for each in town:
        assert works.status(each)["phase"] == "waiting"
    town.start()
    works.await_settled()
    works.check("outage")
    for each in town:
        works.await_status(each, phase="streaming", error="")


@pytest.mark.requirement("S1-41")
def test_killed_in_the_middle_of_a_batch_they_get_everything(works: Works, town: Town) -> None:
    town.make("killed")
    changes = burst()
    works.put("killed", changes)
    before = at_first(town, "killed", lambda each: each.kill())
    assert all(0 < count < len(changes) for count in before.values()), before
    assert not any(works.settled(each) for each in town)
    town.start()
    works.await_settled()
    works.check("killed")


@pytest.mark.requirement("S1-41")
def test_the_driver_killed_between_sending_and_noting_sends_it_again(
    works: Works, town: Town
) -> None:
    town.make("driver")
    works.put("driver", burst())
    try:
        at_first(town, "driver", lambda each: each.pause())
        works.kill()
    finally:
        for each in town:
            each.resume()
    assert [each.name for each in town if works.settled(each)] == []
    works.run()
    works.await_settled()
    works.check("driver")
    last = works.writer.log.latest_sequence
    for each in town:
        repeated = works.verified(each)["repeated"][-1]
        assert (repeated["last"], repeated["events"]) == (last, len(burst())), each.name


def test_what_one_refuses_waits_while_others_flow_and_redriving_restores_order(
    works: Works, town: Town
) -> None:
    """The webhook, Kafka and NATS refuse a row; RabbitMQ, NATS and Redis, a whole table.

    No queue is bound to it, no stream has its subject, its key holds something else.
    """
    each: PushDestination
    for each in town:
        each.make("gated", small=True)
        each.make("open")
    for each in (town.hooks, town.topics):
        each.make("barred")
    town.streams.bar("barred")
    town.hooks.judge = refusing_row("gated", "large")
    by_row = (town.hooks, town.topics, town.subjects)
    by_table = (town.exchange, town.subjects, town.streams)

    works.commit(
        [
            *(("gated", row, "") for row in "12"),
            ("gated", "large", "x" * 2 * SMALL),
            *(("gated", row, "") for row in ("1", "large", "2")),
            *(("barred", row, "") for row in "121"),
            *(("open", f"{number}", "") for number in range(600)),
        ]
    )
    works.await_settled()
    works.commit([("gated", "large", ""), ("barred", "1", ""), ("open", "1", "")])
    works.await_settled()
    works.check("open")
    for each in town:
        large = works.letters(each, "gated")
        wanted = ["refused", "waiting", "waiting"] if each in by_row else []
        assert [letter["status"] for letter in large] == wanted, each.name
        barred = works.letters(each, "barred")
        wanted = ["refused", "refused", "waiting", "waiting"] if each in by_table else []
        assert [letter["status"] for letter in barred] == wanted, each.name
        assert_arrived(each, "gated", works.rows("gated"), but={"large"} if large else set())
    reasons: dict[PushDestination, str] = {
        town.hooks: "it answered 422 Unprocessable Entity: not this one",
        town.topics: "Message size too large",
        town.exchange: "no queue takes the routing key public.barred",
        town.streams: "stream cdc:public:barred: the key is there, and is no stream",
    }
    for each, reason in reasons.items():
        letters = works.letters(each, "gated") + works.letters(each, "barred")
        assert reason in letters[0]["reason"], letters[0]["reason"]

    town.hooks.judge = lambda _: OK
    town.topics.enlarge("gated")
    town.subjects.enlarge("gated")
    for each in (town.exchange, town.subjects):
        each.make("barred")
    town.streams.unbar("barred")
    for each in town:
        keys = ["gated:large"] * (each in by_row) + ["barred:1", "barred:2"] * (each in by_table)
        count = len(works.letters(each, "gated") + works.letters(each, "barred"))
        chosen = [word for key in keys for word in ("--key", key)]
        told = works.ask("redrive", each.name, *chosen)
        assert f"sent {count} of {count} dead letters again" in told
    works.commit([("gated", "large", ""), ("barred", "1", "")])
    works.await_settled()
    works.check("gated")
    works.check("barred")


def refusing_row(table: str, row: str) -> Callable[[Request], HttpAnswer]:
    """What a receiver says that takes all but one row."""

    def judge(request: Request) -> HttpAnswer:
        told = json.loads(request.body)
        wanted = (told["table"], told["after"]["id"]) != (table, row)
        return OK if wanted else reply(422, b"not this one")

    return judge


def test_5_mb_in_the_middle_arrive_whole_or_are_kept_and_others_flow(
    works: Works, town: Town
) -> None:
    town.make("heavy")
    sizes = {"huge": 5 * 1024 * 1024, "large": 4_500_000}
    works.commit(
        [
            ("heavy", "1", ""),
            *(("heavy", row, "x" * size) for row, size in sizes.items()),
            *(("heavy", row, "") for row in ("1", "2", "huge", "large")),
        ]
    )
    works.await_settled()
    kept: dict[PushDestination, dict[str, int]] = {
        town.topics: {"huge": 1_000_000, "large": 1_000_000},
        town.subjects: {"huge": 1_000_000, "large": 1_000_000},
        town.streams: {"huge": 5_000_000},
    }
    for each in town:
        limits = kept.get(each, {})
        letters = works.letters(each, "heavy")
        first = {json.loads(letter["key"])["id"]: letter for letter in letters[: len(limits)]}
        assert first.keys() == limits.keys()
        for row, letter in first.items():
            size = len(letter["event"])
            assert sizes[row] < size < sizes[row] + 2000
            said = f"it has {size} bytes, more than max_event_bytes: {limits[row]}"
            assert (letter["status"], letter["reason"]) == ("refused", said)
        assert [letter["status"] for letter in letters[len(limits) :]] == ["waiting"] * len(limits)
        assert_arrived(each, "heavy", works.rows("heavy"), but=set(limits))
        arrived = {got.row: got.size for got in each.read("heavy") if got.number == 1}
        for row in sizes.keys() - limits.keys():
            assert arrived[row] > sizes[row]
        if letters:
            said = f"{each.name}: {len(letters)} dead letters of {len(limits)} rows"
            works.await_status(each, dead_letters=len(letters))
            assert said in works.ask("status")
    for each in town:
        assert works.verified(each)["dead_letters"] == len(works.letters(each, "heavy"))


def test_no_secret_can_be_read_anywhere(works: Works, town: Town) -> None:
    town.make("hidden")
    works.put("hidden", ["1", "2", "3"])
    works.await_settled()
    works.check("hidden")
    for each in town:
        works.verified(each)
    works.ask("status", "--json")
    found = pages(f"http://127.0.0.1:{works.ui}")
    assert_hidden(found, *town.secrets.values())
    assert files_with(works.folder, *town.secrets.values()) == []


def test_nor_a_wrong_one_that_lets_nobody_in(
    town: Town, tmp_path_factory: pytest.TempPathFactory
) -> None:
    town.make("wrong")
    wrong = {name: f"wr0ng-{secret}" for name, secret in town.secrets.items()}
    with opened_works(tmp_path_factory.mktemp("wrong"), town) as works:
        works.environment |= wrong
        works.run()
        works.put("wrong", [f"{number}" for number in range(30)])
        for each in town:
            works.await_status(each, phase="waiting")
        wait_until(
            lambda: "401" in works.status(town.hooks)["error"],
            timeout=PATIENCE,
            message="it says why",
        )
        told = works.ask("status") + works.ask("status", "--json")
        for each in town:
            assert each.count("wrong") == 0
        # Whoever tells what it was told is not repeated.
        assert "hooks: it answered 401 Unauthorized: ***" in told
        for name in ("topics", "exchange", "subjects", "streams"):
            assert f"{name}: " in told
        found = pages(f"http://127.0.0.1:{works.ui}")
        works.ask("verify", "hooks")
        works.ask("redrive", "hooks", code=1)
        works.stop()
        hidden = [*wrong.values(), *town.secrets.values()]
        assert_hidden(found, *hidden)
        assert files_with(works.folder, *hidden) == []
