"""A destination written in Python as a sink: tasks run in this process, and once on Spark."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from headrace.change.event import Column, Op
from headrace.errors import ConfigError, LogReplaced, SinkFenced, SinkRefused, SinkUnavailable
from headrace.log import Log
from headrace.pipeline.options import Options
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.pipeline.run import Pipeline, PipelineInput, plans
from headrace.sinks import LogRange, Progress, SinkPhase
from headrace.sinks.destination import LEDGER, DestinationSink, DestinationWriter, _opened
from headrace.testing import wait_until
from headrace.testing.sinks import LocalBatch
from headrace.transforms import TableTransform
from tests.sinks.destinations import calls, stored
from tests.sinks.lake import Shop, put, remove, truncate

USERS = (Column("id", "bigint", key=True), Column("name", "text"))
SYNC, ASYNC = "tests.sinks.destinations:Rows", "tests.sinks.destinations:AsyncRows"


class Site(Shop):
    """A log, and a destination that gets batches of it."""

    def __init__(self, folder: Path, **chosen: Any) -> None:
        super().__init__(folder)
        self.file = folder / "rows.db"
        self.batches = self.written = 0
        self.reopen(**chosen)

    def reopen(self, writer: str = "query-1", *, adopt: bool = False, **chosen: Any) -> None:
        given: dict[str, Any] = {
            "name": "mine",
            "class_": SYNC,
            "options": {"file": str(self.file)},
            "folder": str(self.folder / "mine"),
            "retry_first_seconds": 0.01,
        }
        self.sink = DestinationSink(**(given | chosen))
        self.writer: DestinationWriter = self.sink.open(writer, adopt=adopt)

    def users(self, *rows: tuple[int, str]) -> None:
        table = self.table("users", USERS)
        for number, name in rows:
            self.commit(put(table, id=number, name=name))

    def batch(self, after: int, upto: int) -> LocalBatch:
        path = str(self.log.path)
        log = PipelineLog(DiskLog(path), Options(path=path))
        return LocalBatch(LogRange(log, self.log.epoch, after, upto))

    def write(self, upto: int | None = None) -> int:
        upto = self.log.latest_sequence if upto is None else upto
        count = self.writer.write(self.batch(self.written, upto), self.batches)
        self.written, self.batches = upto, self.batches + 1
        return count

    def fail(self, when: str, fault: str, times: int = 1) -> None:
        self.file.with_suffix(f".{when}").write_text(f"{fault} {times}")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.log.close()
    while _opened:
        _opened.popitem()[1].close()


@pytest.mark.requirement("S2-02")
@pytest.mark.parametrize("kind", [SYNC, ASYNC])
def test_events_come_in_order_to_coroutines_and_plain_functions(site: Site, kind: str) -> None:
    site.reopen(class_=kind)
    site.users((1, "a"), (2, "b"), (1, "c"))
    assert site.write() == 3
    site.commit(remove(site.table("users", USERS), id=2))
    assert site.write() == 1
    assert stored(site.file) == {"users": {1: "c"}}
    assert [(first, last) for first, last, *_ in calls(site.file)] == [(1, 3), (4, 4)]
    begin = ["Begin", "Relation", "Insert", "Commit"]
    assert calls(site.file)[0][3][:4] == begin
    assert site.writer.progress() == Progress(site.log.epoch, 4)
    assert (site.writer.status().sent, site.writer.status().requests) == (14, 2)


def test_a_batch_that_comes_again_calls_nobody(site: Site) -> None:
    site.users((1, "a"))
    site.write()
    site.writer.write(site.batch(0, 1), 0)
    site.reopen()
    site.writer.write(site.batch(0, 1), 0)
    assert len(calls(site.file)) == 1
    assert site.writer.progress() == Progress(site.log.epoch, 1)


@pytest.mark.parametrize("kind", [SYNC, ASYNC])
def test_a_failure_is_tried_again_from_where_it_was(site: Site, kind: str) -> None:
    site.reopen(class_=kind, batch_size=3)
    site.users(*((n, "-") for n in range(6)))
    site.write(upto=2)
    site.fail("before", "away", times=3)
    assert site.write() == 4
    found = calls(site.file)
    assert [(first, last) for first, last, *_ in found] == [(n, n) for n in range(1, 7)]
    assert [kinds.count("Relation") for *_, kinds in found] == [1, 0, 1, 0, 0, 0]
    assert site.writer.status().retries == 3
    assert site.writer.status().reason == ""
    assert len(stored(site.file)["users"]) == 6


def test_what_failed_after_it_was_stored_comes_again(site: Site) -> None:
    site.users((1, "a"), (2, "b"))
    site.fail("after", "away")
    site.write()
    assert [(first, last) for first, last, *_ in calls(site.file)] == [(1, 2), (1, 2)]
    assert stored(site.file) == {"users": {1: "a", 2: "b"}}


def test_a_wait_ends_when_the_query_does_and_shows_no_password(site: Site) -> None:
    site.reopen(
        options={"file": str(site.file), "password": "se-cret"},
        retry_first_seconds=60.0,
    )
    assert "se-cret" not in repr(site.sink)
    site.users((1, "a"))
    site.fail("before", "away", times=99)
    failures: list[BaseException] = []

    def writing() -> None:
        with pytest.raises(SinkUnavailable) as error:
            site.write()
        failures.append(error.value)

    thread = threading.Thread(target=writing)
    thread.start()
    reason = wait_until(lambda: site.writer.status().reason, timeout=30)
    assert reason == "ConnectionError: no connection with password ***"
    site.writer.close()
    thread.join()
    assert str(failures[0]) == f"mine: {reason}"


def test_values_of_options_are_masked_however_deep_they_are() -> None:
    options = {"login": {"password": "se-cret", "hosts": ["one-host"]}, "pin": 48151623, "on": True}
    sink = DestinationSink(name="mine", class_=SYNC, options=options)
    assert sink.masked("se-cret, one-host, 48151623, True") == "***, ***, ***, True"


@pytest.mark.parametrize("fault", ["cancel", "exit"])
@pytest.mark.parametrize("kind", [SYNC, ASYNC])
def test_a_cancellation_and_an_exit_are_tried_again(site: Site, kind: str, fault: str) -> None:
    site.reopen(class_=kind)
    site.users((1, "a"))
    site.fail("before", fault)
    assert site.write() == 1
    assert stored(site.file) == {"users": {1: "a"}}
    assert site.writer.status().retries == 1


def test_an_outage_is_shown_from_its_first_failure_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[float] = []
    clock = itertools.count(1000)
    monkeypatch.setattr("headrace.sinks.destination.time.time", lambda: next(clock))
    waits = site.writer._closed.wait

    def wait(seconds: float | None = None) -> bool:
        shown.append(site.writer.status().since)
        return waits(seconds)

    monkeypatch.setattr(site.writer._closed, "wait", wait)
    site.users((1, "a"))
    site.fail("before", "away", times=3)
    site.write()
    assert len(shown) == 3
    assert len(set(shown)) == 1


def test_a_destination_that_refuses_for_good_halts(site: Site) -> None:
    site.users((1, "a"))
    site.fail("before", "refuse")
    with pytest.raises(SinkRefused, match="the account is closed") as error:
        site.write()
    assert error.value.hint == "Open it."


def test_it_gets_its_tables_and_the_marks_of_all_transactions(site: Site) -> None:
    site.reopen(tables=("public.users",))
    site.users((1, "a"))
    site.commit(put(site.table("others", USERS), id=1, name="-"))
    site.write()
    [(*_, kinds)] = calls(site.file)
    assert kinds == ["Begin", "Relation", "Insert", "Commit", "Begin", "Commit"]
    site.reopen(source="another")
    site.users((2, "b"))
    site.write()
    assert len(calls(site.file)) == 1


def test_a_stream_that_begins_within_a_truncate_has_all_its_tables(site: Site) -> None:
    users, others = (
        site.log.register(msgspec.structs.replace(site.table(name, USERS), relation=number))
        for number, name in enumerate(["users", "others"], 1)
    )
    site.commit(put(users, id=1, name="a"), put(others, id=1, name="b"))
    statement = msgspec.json.encode({"relations": [1, 2]})
    emptied = [msgspec.structs.replace(truncate(each), after=statement) for each in (users, others)]
    site.commit(*emptied)
    site.write(upto=3)
    site.write()
    assert stored(site.file) == {"users": {}, "others": {}}


def test_another_log_and_another_writer_are_refused(site: Site) -> None:
    site.users((1, "a"))
    site.write()
    with pytest.raises(SinkFenced):
        site.reopen("query-2")
    site.log.close()
    site.log = Log.open(site.folder / "second")
    site.written = 0
    site.users((2, "b"), (3, "c"))
    with pytest.raises(LogReplaced):
        site.write()
    site.reopen("query-2", adopt=True)
    assert site.write() == 2
    assert site.writer.progress() == Progress(site.log.epoch, 2)


def test_a_ledger_is_whole_or_not_there(site: Site) -> None:
    site.users((1, "a"))
    site.write()
    assert [file.name for file in (site.folder / "mine").iterdir()] == [LEDGER]


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ({"class_": "rows"}, "class must be module:Name"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"retry_jitter": 1.0}, "retry_jitter must be from 0 up to 1"),
        ({"batch_seconds": 0.0}, "batch_seconds must be above 0"),
        ({"max_changes_per_batch": 0}, "max_changes_per_batch must be 1 or more"),
    ],
)
def test_wrong_settings_are_refused(chosen: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DestinationSink(**({"name": "mine", "class_": SYNC} | chosen))


@pytest.mark.parametrize("name", ["tests.sinks.nowhere:Rows", "tests.sinks.destinations:Columns"])
def test_a_class_that_is_not_there_is_refused_when_it_is_opened(site: Site, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        site.reopen(class_=name)


def test_on_spark_a_worker_killed_between_call_and_ledger_calls_again(
    spark: SparkSession, site: Site
) -> None:
    site.users(*((n, "-") for n in range(20)))
    site.fail("after", "kill")

    def run() -> SinkPhase:
        [plan] = plans(
            [site.sink],
            PipelineInput(address={"path": str(site.log.path)}),
            checkpoints=site.folder / "checkpoints",
            once=True,
        )
        with Pipeline(spark, [plan], folder=site.folder) as running:
            running.work(threading.Event(), lambda: None, once=True)
            return running.statuses()[0].phase

    assert run() is SinkPhase.STOPPED
    assert [(first, last) for first, last, *_ in calls(site.file)] == [(1, 20), (1, 20)]
    assert len(stored(site.file)["users"]) == 20
    assert run() is SinkPhase.STOPPED
    assert len(calls(site.file)) == 2


def test_a_destination_gets_what_transforms_leave(site: Site) -> None:
    rule = TableTransform(mask={"name": None}, where="id < 3 AND name <> 'gone'")
    site.reopen(transforms={"public.users": rule})
    site.users((1, "a"), (2, "gone"), (3, "c"))
    table = site.table("users", USERS)
    site.commit(put(table, Op.UPDATE, id=1, name="gone"), put(table, Op.UPDATE, id=2, name="b"))
    assert site.write() == 5
    assert stored(site.file) == {"users": {2: None}}
    assert site.writer.progress() == Progress(site.log.epoch, 5)
