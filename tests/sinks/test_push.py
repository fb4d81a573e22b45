"""A batch is sent until it is settled: in order row by row, at least once, with the same id."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.change.event import Op
from headrace.errors import ConfigError, SinkFenced, SinkRefused, SinkUnavailable
from headrace.retry import Backoff
from headrace.sinks import Progress
from headrace.sinks.push import halt, redrive
from headrace.sinks.push import ledger as ledgers
from headrace.sinks.push import writer as writers
from headrace.sinks.push.events import part_of
from headrace.testing import wait_until
from tests.sinks.lake import change, put, remove, schema, truncate
from tests.sinks.push_harness import USERS, Post, opened_post
from tests.sinks.socket_sink import Courier, Taken, kind


@pytest.fixture
def post(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Post]:
    monkeypatch.setattr(writers, "BACKOFF", Backoff(0.02, 60.0))
    with opened_post(spark, tmp_path) as made:
        yield made


def refusing(*sequences: int) -> object:
    def judge(event: Taken) -> tuple[str, str, float]:
        return ("refused", "no thanks", 0.0) if event.sequence in sequences else kind(event)

    return judge


def sequences(post: Post) -> list[int]:
    return [event.sequence for event in post.office.taken]


# --- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
def test_every_change_is_sent_once_and_rows_keep_their_order(post: Post, parts: int) -> None:
    post.users(*((n % 7, f"name {n}") for n in range(100)))
    assert post.write(parts=parts) == 100
    assert sorted(sequences(post)) == list(range(1, 101))
    assert post.office.rows() == post.office.firsts()
    assert all(found == sorted(found) for found in post.office.rows().values())
    assert len({event.id for event in post.office.taken}) == 100
    assert all(json.loads(event.payload or "")["id"] == event.id for event in post.office.taken)
    assert post.writer.progress() == Progress(post.log.epoch, 100)
    assert post.writer.status().sent == 100


def test_an_event_tells_what_addresses_and_headers_are_made_of(post: Post) -> None:
    post.users((7, "Ann"))
    post.write()
    [event] = post.office.taken
    assert event[:2] == (1, 0)
    assert event[3:9] == ("shop|public.users:7", "INSERT", "shop", "public", "users", '{"id":7}')
    assert event.id.startswith("evt_")
    assert event.commit_time == json.loads(event.payload or "")["timestamp"] or event.commit_time


def test_tables_and_schemas_have_events_too(post: Post) -> None:
    table = post.table("users", USERS)
    post.commit(schema(table), put(table, id=1, name="Ann"), truncate(table))
    post.commit(change(Op.MESSAGE, table, after=b'{"prefix":"x"}'))
    assert post.write() == 4
    told = [(event.op, event.row, event.key) for event in post.office.taken]
    assert told == [
        ("SCHEMA", "shop|public.users", None),
        ("INSERT", "shop|public.users:1", '{"id":1}'),
        ("TRUNCATE", "shop|public.users", None),
    ], "the format does not carry messages"
    assert post.writer.progress() == Progress(post.log.epoch, 4)


def test_a_key_that_changes_is_one_event_of_the_new_row(post: Post) -> None:
    table = post.table("users", USERS)
    post.users((1, "Ann"))
    post.commit(put(table, Op.UPDATE, was={"id": 1}, id=2, name="Ann"))
    post.write()
    assert [(event.op, event.row) for event in post.office.taken] == [
        ("INSERT", "shop|public.users:1"),
        ("UPDATE", "shop|public.users:2"),
    ]


@pytest.mark.requirement("C-15")
def test_or_a_delete_and_an_insert_with_tombstones_after_deletes(post: Post) -> None:
    post.reopen(moves=True, tombstones=True, batch_size=1)
    table = post.table("users", USERS)
    post.users((1, "Ann"))
    post.commit(put(table, Op.UPDATE, was={"id": 1}, id=2, name="Ann"))
    post.commit(remove(table, id=2))
    post.write()
    told = [(e.sequence, e.at, e.op, e.row.rpartition(":")[2], e.key) for e in post.office.taken]
    assert told == [
        (1, 0, "INSERT", "1", '{"id":1}'),
        (2, 0, "DELETE", "1", '{"id":1}'),
        (2, 1, "DELETE", "1", '{"id":1}'),
        (2, 2, "INSERT", "2", '{"id":2}'),
        (3, 0, "DELETE", "2", '{"id":2}'),
        (3, 1, "DELETE", "2", '{"id":2}'),
    ]
    assert [event.payload is None for event in post.office.taken] == [0, 0, 1, 0, 0, 1]
    assert len({event.id for event in post.office.taken}) == 6
    gone = json.loads(post.office.taken[1].payload or "")
    assert (gone["operation"], gone["before"], gone["after"]) == ("DELETE", {"id": 1}, None)
    assert gone["id"] == post.office.taken[1].id


def test_entities_are_sent_by_whole_transactions(post: Post) -> None:
    post.reopen(format="entity", tables=("public.users",))
    assert post.sink.whole_transactions
    users, orders = post.table("users", USERS), post.table("orders")
    post.commit(put(users, id=1, name="Ann"), put(orders, id=5, status="new"))
    post.users((2, "Bob"))
    assert post.write() == 3
    told = [json.loads(event.payload or "") for event in post.office.taken]
    assert [each["event_type"] for each in told] == ["entity:created"] * 2
    assert [each["event_id"] for each in told] == [event.id for event in post.office.taken]
    assert [event.row for event in post.office.taken] == [
        "shop|public.users:1",
        "shop|public.users:2",
    ]


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"format": "etl"}, "format: etl is for streams"),
        ({"format": "savegres"}, "did you mean savegress?"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"retry_jitter": 1.5}, "retry_jitter must be from 0 up to 1"),
        ({"parallelism": 0}, "parallelism must be 1 or more"),
        ({"batch_seconds": 0.0}, "batch_seconds must be above 0"),
        ({"patience_seconds": -1.0}, "patience_seconds must not be below 0"),
    ],
)
def test_settings_are_checked(chosen: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        Courier(**({"name": "post", "port": 1} | chosen))  # type: ignore[arg-type]


# --- again ---------------------------------------------------------------------------------------


def test_a_settled_batch_that_comes_again_sends_nothing(post: Post) -> None:
    post.users((1, "Ann"), (2, "Bob"))
    post.write()
    post.reopen()
    assert post.writer.write(post.batch(0, 2), 0) == 2
    assert sequences(post) == [1, 2]


def test_another_query_is_refused_until_it_adopts(post: Post) -> None:
    post.users((1, "Ann"))
    post.write()
    with pytest.raises(SinkFenced, match="another pipeline has sent"):
        post.reopen("query-2")
    post.reopen("query-2", adopt=True)
    post.users((2, "Bob"))
    post.writer.write(post.batch(1, 2), 0)
    assert sequences(post) == [1, 2]
    assert post.writer.progress() == Progress(post.log.epoch, 2)


def test_what_was_taken_without_an_answer_comes_again_with_the_same_id(post: Post) -> None:
    post.users(*((n, "-") for n in range(5)))
    post.office.hang_up_after_taking = 1
    post.write()
    ids = [event.id for event in post.office.taken]
    assert len(ids) > 5
    assert len(set(ids)) == 5
    assert all(found == sorted(found) for found in post.office.firsts().values())


def test_the_ledger_is_kept_short(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_KEPT", 2)
    monkeypatch.setattr(ledgers, "_MOST_LINES", 5)
    for number in range(5):
        post.users((number, "-"))
        post.write()
        post.writer.maintain()
    file = post.folder / "post" / ledgers.FILE
    lines = ledgers.read(file)
    assert len(lines) < 8
    assert sum(line.counts.sent for line in lines) == 5
    with file.open("ab") as opened:
        opened.write(b'{"what":"set')  # cut short by a crash
    post.reopen()
    assert post.writer.progress() == Progress(post.log.epoch, 5)
    assert post.writer.write(post.batch(4, 5), 4) == 1
    assert len(sequences(post)) == 5


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.requirement("C-19")
@pytest.mark.parametrize("parts", [1, 2])
def test_a_refused_row_waits_and_redriving_restores_its_order(post: Post, parts: int) -> None:
    post.users(*((n % 3, f"{n}") for n in range(12)))
    post.office.judge = refusing(4)  # type: ignore[assignment]
    post.write(parts=parts)
    assert sorted(sequences(post)) == [1, 2, 3, 5, 6, 8, 9, 11, 12]
    letters = post.letters()
    assert [(each["sequence"], each["status"]) for each in letters] == [
        (4, "refused"),
        (7, "waiting"),
        (10, "waiting"),
    ]
    assert letters[0]["reason"] == "no thanks"
    assert letters[0]["attempts"] == 1
    assert letters[0]["row"] == "shop|public.users:0"
    assert json.loads(letters[0]["event"])["after"] == {"id": 0, "name": "3"}

    post.users((0, "later"), (1, "later"))
    post.write()
    assert [each["sequence"] for each in post.letters()] == [4, 7, 10, 13]
    account = post.writer.status()
    assert (account.dead_letters, account.waiting_rows) == (4, 1)

    request = redrive.request_redrive(post.sink.folder)
    post.writer.serve_requests(post.spark)
    told = redrive.result_of(post.sink.folder, request)
    assert told == redrive.RedriveResult(
        request.id, 4, 0, 4, refused=1, waiting=3, reasons={"no thanks": 1}
    )
    assert [each["attempts"] for each in post.letters()] == [1, 0, 0, 0]

    post.office.judge = kind
    request = redrive.request_redrive(post.sink.folder)
    post.writer.serve_requests(post.spark)
    assert redrive.result_of(post.sink.folder, request) == redrive.RedriveResult(
        request.id, 4, 4, 0, ""
    )
    assert redrive.requested(post.sink.folder) is None
    assert post.letters() == []
    assert post.office.rows()["shop|public.users:0"] == [(n, 0) for n in (1, 4, 7, 10, 13)]
    post.users((0, "last"))
    post.write()
    assert sequences(post)[-1] == 15
    assert post.writer.status().waiting_rows == 0


def test_only_the_keys_that_are_asked_for_are_redriven(post: Post) -> None:
    post.users(*((n, "-") for n in range(4)))
    post.office.judge = refusing(1, 2, 3)  # type: ignore[assignment]
    post.write()
    post.users((1, "again"))
    post.write()
    post.office.judge = kind
    for key, left in (("users:1", [1, 3]), ("public.users:2", [1]), ("users:9", [1])):
        request = redrive.request_redrive(post.sink.folder, [key])
        post.writer.serve_requests(post.spark)
        told = redrive.result_of(post.sink.folder, request)
        assert told is not None
        assert told.left == len(left)
        assert [each["sequence"] for each in post.letters()] == left
    assert sequences(post) == [4, 2, 5, 3]


def test_redriving_to_nobody_loses_nothing(post: Post) -> None:
    post.users(*((n % 2, "-") for n in range(8)))
    post.office.judge = refusing(1, 2)  # type: ignore[assignment]
    post.write()
    assert len(post.letters()) == 8
    post.office.shut()
    request = redrive.request_redrive(post.sink.folder)
    post.writer.serve_requests(post.spark)
    told = redrive.result_of(post.sink.folder, request)
    assert told is not None
    assert (told.sent, told.left, told.reason) == (0, 8, "nobody is at the door")
    assert [each["sequence"] for each in post.letters()] == list(range(1, 9))
    post.office.open()
    post.office.judge = kind
    request = redrive.request_redrive(post.sink.folder)
    post.writer.serve_requests(post.spark)
    assert sorted(sequences(post)) == list(range(1, 9))
    assert all(found == sorted(found) for found in post.office.rows().values())


def test_a_batch_that_comes_again_after_its_letters_were_kept(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.users((1, "a"), (2, "b"), (1, "c"))
    post.office.judge = refusing(1)  # type: ignore[assignment]

    def die(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(ledgers.PushLedger, "settle", die)
        with pytest.raises(RuntimeError):
            post.write()
    post.reopen()
    post.write()
    assert [each["sequence"] for each in post.letters()] == [1, 3]
    assert set(sequences(post)) == {2}


def test_a_large_event_is_kept_or_told_of(post: Post) -> None:
    post.reopen(max_event_bytes=2000)
    post.users((1, "x" * 3000), (1, "small"), (2, "other"))
    post.write()
    assert sequences(post) == [3]
    [large, behind] = post.letters()
    assert "more than max_event_bytes: 2000" in large["reason"]
    assert (large["status"], behind["status"]) == ("refused", "waiting")
    post.reopen(max_event_bytes=2000, oversize="reference")
    post.users((3, "x" * 3000))
    post.write()
    told = json.loads(post.office.taken[-1].payload or "")
    assert told["bytes"] > 3000
    assert told["reference"] == "/v1/changes?after=3&limit=1&format=savegress"


# --- a destination that is not there -------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_an_outage_delays_and_leaves_no_dead_letters(post: Post, parts: int) -> None:
    post.users(*((n % 11, "-") for n in range(200)))
    post.office.shut()
    writing = threading.Thread(target=post.write, kwargs={"parts": parts})
    writing.start()
    try:
        wait_until(lambda: post.writer.status().rounds >= 2, timeout=120)
        account = post.writer.status()
        assert account.reason == "nobody is at the door"
        assert account.since > 0
    finally:
        post.office.open()
        writing.join()
    assert sorted(sequences(post)) == list(range(1, 201))
    assert all(found == sorted(found) for found in post.office.rows().values())
    assert post.letters() == []
    assert post.writer.status().reason == ""


def test_a_part_that_is_settled_is_not_sent_again_while_another_waits(post: Post) -> None:
    post.users(*((n, "-") for n in range(20)))
    file = post.folder / "post" / ledgers.FILE

    def judge(event: Taken) -> tuple[str, str, float]:
        waits = part_of(event.row, 2) == 0 and b'"paused"' not in file.read_bytes()
        return ("failed", "no room", 0.0) if waits else kind(event)

    post.office.judge = judge
    post.write(parts=2)
    assert sorted(sequences(post)) == list(range(1, 21)), "nothing twice"
    lines = ledgers.read(file)
    assert [line.counts.sent for line in lines if line.what == "paused"] == [10]
    assert lines[-1].counts.sent == 20
    assert lines[-1].doubtful == 0
    assert (lines[-1].what, lines[-1].changes, lines[-1].last) == ("settled", 20, 20)


def test_everything_may_fail_for_as_long_as_patience_lasts(post: Post) -> None:
    post.reopen(patience_seconds=0.0)
    post.users((1, "a"), (2, "b"), (1, "c"))
    post.office.judge = lambda event: ("failed", "no room", 0.0)
    post.write()
    assert [(each["sequence"], each["status"]) for each in post.letters()] == [
        (1, "refused"),
        (2, "refused"),
        (3, "waiting"),
    ]
    assert all(each["attempts"] >= 1 for each in post.letters()[:2])


def test_who_stops_while_it_waits_goes_on_where_it_was(post: Post) -> None:
    post.users(*((n, "-") for n in range(50)))
    post.office.judge = lambda event: (
        kind(event) if event.sequence <= 20 else ("failed", "no room", 0.0)
    )
    failed: list[BaseException] = []

    def write() -> None:
        try:
            post.write()
        except SinkUnavailable as error:
            failed.append(error)

    writing = threading.Thread(target=write)
    writing.start()
    wait_until(lambda: post.writer.status().rounds >= 1, timeout=120)
    post.writer.close()
    writing.join()
    assert "no room" in str(failed[0])
    before = len(sequences(post))
    assert before == 20
    post.office.judge = kind
    post.reopen()
    post.write()
    assert sorted(sequences(post)) == list(range(1, 51)), "nothing twice"


def test_one_that_wants_nothing_more_is_not_asked_again(post: Post) -> None:
    post.users((1, "a"), (2, "b"))
    post.office.gone = True
    with pytest.raises(SinkRefused, match="it has moved"):
        post.write()
    with pytest.raises(SinkRefused, match="it has moved"):
        post.reopen()
    post.office.gone = False
    halt.clear_halt(post.sink.folder)
    post.reopen()
    post.write()
    assert sequences(post) == [1, 2]
