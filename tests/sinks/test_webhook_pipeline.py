"""The webhook sink in a pipeline's query: from the log, through Spark's tasks, to a receiver."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from headrace.client import webhooks
from headrace.config import parse
from headrace.errors import SinkRefused
from headrace.retry import Backoff
from headrace.secret import Secret
from headrace.sinks.push import redrive
from headrace.sinks.push import writer as writers
from headrace.sinks.push.writer import PushWriter
from headrace.sinks.webhook.sink import Webhook
from headrace.testing import wait_until
from tests.sinks.hooks import SECRET, sink
from tests.sinks.push_harness import Post
from tests.sinks.receiver import OK, Receiver, Request, reply
from tests.sinks.socket_sink import Office


class Hooks(Post):
    """A log whose changes are posted to a receiver."""

    def __init__(self, spark: SparkSession, folder: Path, receiver: Receiver) -> None:
        self.receiver = receiver
        self.told_since: list[Request] = []  # by another one at its place
        super().__init__(spark, folder, Office())

    def reopen(self, writer: str = "query-1", *, adopt: bool = False, **chosen: Any) -> PushWriter:
        """The sink as a query that starts would open it."""
        given = {
            "folder": str(self.folder / "post"),
            "retry_first_seconds": 0.002,
            "secret": Secret(SECRET),
            "headers": {"Authorization": Secret("Bearer t0ken")},
        }
        made = sink(f"{self.receiver.url}/p4th", **(given | chosen))
        self.sink = made  # type: ignore[assignment]
        self.writer = made.open(writer, adopt=adopt)
        return self.writer

    @property
    def told(self) -> list[dict[str, Any]]:
        """All events that came, in their order."""
        requests = self.receiver.requests + self.told_since
        bodies = [json.loads(request.body) for request in requests]
        return [event for body in bodies for event in body.get("events", [body])]

    def names(self) -> dict[int, list[str]]:
        """The names that each row was told to have, in the order they came."""
        found = defaultdict(list)
        for event in self.told:
            found[event["after"]["id"]].append(event["after"]["name"])
        return dict(found)


@pytest.fixture
def hooks(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hooks]:
    monkeypatch.setattr(writers, "BACKOFF", Backoff(0.02, 60.0))
    with Receiver() as receiver:
        made = Hooks(spark, tmp_path, receiver)
        try:
            yield made
        finally:
            made.log.close()


@pytest.mark.requirement("S0-37", "S0-38", "S1-39", "S1-41")
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_change_is_posted_signed_and_rows_keep_their_order(
    hooks: Hooks, parts: int, batch: bool
) -> None:
    hooks.reopen(batch=batch, batch_size=8)
    hooks.users(*((n % 7, f"{n:03}") for n in range(100)))
    assert hooks.write(parts=parts) == 100
    assert len({event["id"] for event in hooks.told}) == len(hooks.told) == 100
    assert hooks.names() == {row: [f"{n:03}" for n in range(row, 100, 7)] for row in range(7)}
    for request in hooks.receiver.requests:
        told = json.loads(request.body)
        assert webhooks.verify(request.body, request.headers, SECRET) == (
            told["batch_id"] if batch else told["id"]
        )


@pytest.mark.requirement("C-19")
@pytest.mark.parametrize("batch", [False, True])
def test_a_row_that_is_refused_waits_and_comes_in_order_when_it_is_redriven(
    hooks: Hooks, batch: bool
) -> None:
    def script(request: Request) -> bytes:
        body = json.loads(request.body)
        rows = [event["after"]["id"] for event in body.get("events", [body])]
        return reply(422, b"no such user: 3 Bearer t0ken") if 3 in rows else OK

    hooks.reopen(batch=batch, batch_size=8)
    hooks.receiver.script = script
    hooks.users(*((n % 5, f"{n}") for n in range(20)))
    hooks.write()
    letters = hooks.letters()
    assert [each["status"] for each in letters] == ["refused", "waiting", "waiting", "waiting"]
    assert letters[0]["reason"] == "it answered 422 Unprocessable Entity: no such user: 3 ***"
    hooks.receiver.requests.clear()
    hooks.receiver.script = lambda _: OK
    request = redrive.request_redrive(hooks.sink.folder)
    hooks.writer.serve_requests(hooks.spark)
    assert redrive.result_of(hooks.sink.folder, request) == redrive.RedriveResult(
        request.id, 4, 4, 0, ""
    )
    assert hooks.names() == {3: ["3", "8", "13", "18"]}
    assert hooks.letters() == []


def test_what_was_taken_without_an_answer_comes_again_with_the_same_id(hooks: Hooks) -> None:
    silent = {"left": 3}

    def script(request: Request) -> bytes | None:
        silent["left"] -= 1
        return None if silent["left"] >= 0 else OK

    hooks.receiver.script = script
    hooks.users(*((n % 4, f"{n}") for n in range(12)))
    hooks.write()
    ids = hooks.receiver.ids
    assert len(ids) == 15
    assert len(set(ids)) == 12
    assert hooks.letters() == []


def test_a_tired_receiver_gets_everything_and_nothing_is_put_aside(hooks: Hooks) -> None:
    seen: set[str] = set()

    def script(request: Request) -> bytes:
        first = request.id not in seen
        seen.add(request.id)
        return reply(429, b"", "Retry-After: 0") if first and len(seen) % 3 == 0 else OK

    hooks.receiver.script = script
    hooks.users(*((n, "-") for n in range(60)))
    hooks.write()
    assert {event["after"]["id"] for event in hooks.told} == set(range(60))
    assert hooks.letters() == []


def test_a_receiver_that_takes_so_many_a_second_gets_everything(hooks: Hooks) -> None:
    """It says 429 to the rest and not until when; nobody is put aside for that."""
    room = {"left": 20.0, "at": time.monotonic()}
    lock = threading.Lock()

    def script(_: Request) -> bytes:
        with lock:
            now = time.monotonic()
            room["left"] = min(20.0, room["left"] + (now - room["at"]) * 100)
            room["at"] = now
            taken = room["left"] >= 1
            room["left"] -= taken
        return OK if taken else reply(429)

    hooks.receiver.script = script
    hooks.reopen(retry_first_seconds=0.05, attempts=2)
    hooks.users(*((n, "-") for n in range(300)))
    hooks.write(parts=2)
    assert {event["after"]["id"] for event in hooks.told} == set(range(300))
    assert len(hooks.told) > 300, "it did say 429"
    assert hooks.letters() == []


def test_a_receiver_that_takes_ten_seconds_a_request_gets_each_event_once(hooks: Hooks) -> None:
    def script(_: Request) -> bytes | None:
        return None if hooks.receiver.ended.wait(10) else OK

    hooks.receiver.script = script
    hooks.reopen(concurrency=16, timeout_seconds=60.0)
    hooks.users(*((n, "-") for n in range(16)))
    hooks.write()
    assert sorted(event["after"]["id"] for event in hooks.told) == list(range(16))
    assert hooks.letters() == []
    assert hooks.writer.status().retries == 0


def test_a_slow_receiver_gets_a_batch_in_pieces_that_are_noted_one_by_one(hooks: Hooks) -> None:
    def script(_: Request) -> bytes | None:
        return None if hooks.receiver.ended.wait(1) else OK

    hooks.receiver.script = script
    hooks.reopen(concurrency=2)
    hooks.users(*((n % 2, f"{n:02}") for n in range(18)))
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(hooks.write)
        wait_until(lambda: hooks.writer.status().sent, timeout=120)
        noted = hooks.writer.status().sent
        assert writing.result(60) == 18
    assert 0 < noted < 18, "its status moves while the batch is on its way"
    assert hooks.names() == {row: [f"{n:02}" for n in range(row, 18, 2)] for row in range(2)}
    assert hooks.letters() == []
    assert hooks.writer.status().retries == 0


@pytest.mark.parametrize("batch", [False, True])
def test_a_receiver_that_is_restarted_within_a_batch_gets_everything_in_order(
    hooks: Hooks, batch: bool
) -> None:
    hooks.reopen(batch=batch, batch_size=10, concurrency=4)
    first, enough = hooks.receiver, threading.Event()

    def script(_: Request) -> bytes | None:
        if len(first.requests) < 30:
            return OK
        enough.set()
        return None if first.ended.wait(60) else OK  # taken, and never answered

    def write() -> None:
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(hooks.write, parts=2)
            assert enough.wait(60)
            first.__exit__(None, None, None)
            # Away until the sink has noticed.
            wait_until(lambda: hooks.writer.status().reason, timeout=120)
            with Receiver(port=first.port) as second:
                assert writing.result(120) == 600
                hooks.told_since = second.requests

    first.script = script
    hooks.users(*((n % 200, f"{n:03}") for n in range(600)))
    write()
    names = {row: list(dict.fromkeys(each)) for row, each in hooks.names().items()}
    assert names == {row: [f"{n:03}" for n in range(row, 600, 200)] for row in range(200)}
    repeats = len(hooks.told) - 600
    assert 0 < repeats <= 2 * 4 * (10 if batch else 1), "no more than were on their way"
    assert hooks.letters() == []


def test_an_endpoint_that_is_gone_halts_the_sink_until_its_url_is_another(hooks: Hooks) -> None:
    hooks.receiver.script = lambda _: reply(410)
    hooks.users((1, "Ann"))
    with pytest.raises(SinkRefused, match="410 Gone"):
        hooks.write()
    asked = len(hooks.receiver.requests)
    hooks.receiver.script = lambda _: OK
    with pytest.raises(SinkRefused, match="410 Gone"):
        hooks.reopen().write(hooks.batch(0, 1), 0)
    assert len(hooks.receiver.requests) == asked, "it is not even asked"
    hooks.reopen(url=Secret(f"{hooks.receiver.url}/another"))
    hooks.write()
    assert [event["after"]["name"] for event in hooks.told[asked:]] == ["Ann"]


def test_what_an_endpoint_took_before_it_was_gone_is_not_sent_again(hooks: Hooks) -> None:
    left = [30]

    def script(_: Request) -> bytes:
        left[0] -= 1
        return OK if left[0] >= 0 else reply(410)

    hooks.receiver.script = script
    hooks.reopen(concurrency=1)
    hooks.users(*((n, "-") for n in range(100)))
    with pytest.raises(SinkRefused, match="410 Gone"):
        hooks.write()
    assert hooks.writer.status().sent == 30
    taken = hooks.told[:30]
    hooks.receiver.requests.clear()
    hooks.receiver.script = lambda _: OK
    hooks.reopen(url=Secret(f"{hooks.receiver.url}/another"))
    hooks.write()
    assert sorted(event["after"]["id"] for event in taken + hooks.told) == list(range(100))


def test_the_config_in_the_docs_works(hooks: Hooks, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sinks.md").read_text()
    section = page.partition("\n## webhook\n")[2].partition("\n## ")[0]
    written = section.partition("```yaml\n")[2].partition("```")[0]
    content = yaml.safe_load(written)
    content["pipeline"]["url"] = "https://headrace.example"
    config = parse(content, folder=tmp_path, environment={"WEBHOOK_SECRET": SECRET})
    assert config.pipeline is not None
    [documented] = config.pipeline.sinks
    assert isinstance(documented, Webhook)
    assert documented.secret is not None
    hooks.reopen(secret=documented.secret, tables=documented.tables, format=documented.format)
    hooks.users((1, "Ann"))
    assert hooks.write() == 1
    [request] = hooks.receiver.requests
    assert webhooks.verify(request.body, request.headers, SECRET) == request.id


def test_no_secret_is_in_any_file_of_the_sink(hooks: Hooks) -> None:
    hooks.receiver.script = lambda _: reply(400, b"Bearer t0ken")
    hooks.users((1, "Ann"))
    hooks.write()
    files = [path for path in (hooks.folder / "post").rglob("*") if path.is_file()]
    assert files
    for secret in (b"t0ken", b"p4th", SECRET[6:].encode()):
        assert not [path for path in files if secret in path.read_bytes()]
