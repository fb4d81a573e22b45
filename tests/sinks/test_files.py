"""The files sink: every change once, a folder a day, and never half a file."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml
from pyspark.sql import SparkSession

from headrace.change.event import Op
from headrace.config import parse
from headrace.errors import ConfigError, LogReplaced, PipelineError, SinkFenced
from headrace.pipeline.verify import verify
from headrace.sinks import Progress, Sink
from headrace.sinks.files.ledger import FilesEntry, FilesLedger
from headrace.sinks.files.sink import Files
from tests.sinks.archive import account
from tests.sinks.files_harness import (
    DAY,
    FORMATS,
    NOON,
    Drawer,
    names,
    opened_drawer,
    parquet,
    rows,
)
from tests.sinks.lake import change, put, remove, schema, truncate

Open = Callable[..., Drawer]
NAME = re.compile(r"day=2026-11-1\d/log0001-\d{19}-\d{19}\.jsonl")


@pytest.fixture
def drawers(spark: SparkSession, tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as stack:
        numbers = iter(range(100))

        def drawer(**chosen: Any) -> Drawer:
            folder = tmp_path / str(next(numbers))
            return stack.enter_context(opened_drawer(spark, folder, **chosen))

        yield drawer


def every_kind(drawer: Drawer) -> None:
    """Changes of every kind, one with a line end inside its JSON."""
    accounts = drawer.accounts
    drawer.commit(schema(accounts))
    drawer.commit(put(accounts, **account(1)), put(accounts, **account(2, "ü/ =")))
    drawer.commit(put(accounts, Op.UPDATE, **account(1, name="b\nc")), remove(accounts, id=2))
    spaced = b'{"id":3,\n"tenant_id":"acme","name":"\\n"}'
    drawer.commit(change(Op.INSERT, accounts, key=b'{"id":3}', after=spaced))
    drawer.commit(change(Op.MESSAGE, accounts, after=b'{"text":"no row"}'))
    drawer.commit(truncate(accounts))


def test_files_is_a_sink_that_says_how_often() -> None:
    sink = Files(name="drawer", path="drawer")
    assert isinstance(sink, Sink)
    assert sink.batch_seconds
    assert sink.rendering is not None
    assert sink.fields == ()  # all


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"path": "s3://bucket/x"}, "use a sink of type history"),
        ({"format": ""}, "name a format, or set kind: parquet"),
        ({"format": "etl"}, "is for streams"),
        ({"format": "savegres"}, "did you mean savegress"),
        ({"kind": "parquet", "compression": "gzip"}, "Parquet takes none or zstd"),
        ({"file_mb": 0}, "file_mb must be above 0"),
        ({"batch_seconds": 0}, "batch_seconds must be above 0"),
        ({"format": "entity", "tenant": "t"}, "the model says whose an entity is"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Files(**({"name": "drawer", "path": "drawer"} | given))


@pytest.mark.requirement("S1-40")
@pytest.mark.parametrize(
    "name",
    ["savegress", "entity", "notification", "changefeed", "debezium", "cloudevents", "canonical"],
)
def test_lines_are_what_the_server_writes(drawers: Open, name: str) -> None:
    drawer = drawers(format=name)
    every_kind(drawer)
    assert drawer.write(parts=2) == drawer.log.latest_sequence
    expected = drawer.events(name)
    assert len(expected) > 2
    if name == "entity":  # it has a folder for each tenant as well
        assert sorted(drawer.lines()) == sorted(expected)
        assert all("/tenant=" in each for each in drawer.names())
    else:
        assert drawer.lines() == expected
    assert drawer.left() == []


@pytest.mark.requirement("S1-40", "S1-41", "S1-42")
def test_a_batch_that_comes_again_adds_nothing_however_it_is_parted(drawers: Open) -> None:
    drawer = drawers()
    drawer.fill(40)
    drawer.write(20)
    drawer.write(parts=2)
    assert drawer.lines() == drawer.events()
    assert len(drawer.names()) == 3  # a file a task
    assert all(NAME.fullmatch(name) for name in drawer.names())
    before = {name: (drawer.path / name).stat().st_ino for name in drawer.names()}
    for parts in (1, 3):
        drawer.open()  # as after a crash that came before Spark noted the batch as done
        assert drawer.writer.write(drawer.changes(20, 40, parts), 1) == 20
    assert {name: (drawer.path / name).stat().st_ino for name in drawer.names()} == before
    drawer.fill(5)
    drawer.writer.write(drawer.changes(10, 45), 2)  # some of it is there, some is not
    assert drawer.lines() == drawer.events()
    assert drawer.left() == []


@pytest.mark.requirement("S1-40")
def test_a_day_is_one_of_utc_and_has_a_folder(drawers: Open) -> None:
    drawer = drawers()
    table, midnight = drawer.accounts, NOON + DAY // 2
    moments = (NOON, midnight - 1, midnight, midnight + DAY - 1, midnight + DAY, NOON)
    for number, moment in enumerate(moments):  # the last one's clock goes wrong
        drawer.at(moment, put(table, **account(number)))
    zone = drawer.spark.conf.get("spark.sql.session.timeZone")
    drawer.spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        drawer.write()
    finally:
        drawer.spark.conf.set("spark.sql.session.timeZone", str(zone))
    assert drawer.names() == [
        f"day=2026-11-{day}/log0001-{first:019}-{last:019}.jsonl"
        for day, first, last in ((14, 1, 6), (15, 3, 4), (16, 5, 5))
    ]
    assert sorted(drawer.lines()) == sorted(drawer.events())


@pytest.mark.requirement("S1-40")
@pytest.mark.parametrize(
    ("kind", "compression", "ending"),
    [
        ("jsonl", "gzip", ".jsonl.gz"),
        ("jsonl", "zstd", ".jsonl.zst"),
        ("parquet", None, ".parquet"),
        ("parquet", "none", ".parquet"),
    ],
)
def test_files_may_be_of_either_kind_and_compressed(
    drawers: Open, kind: str, compression: str | None, ending: str
) -> None:
    drawer = drawers(kind=kind, compression=compression)
    every_kind(drawer)
    drawer.write()
    [name] = drawer.names()
    assert name.endswith(ending)
    assert drawer.lines() == drawer.events()
    if kind == "parquet":
        columns = ["sequence", "id", "op", "source", "schema", "table", "commit_time", "event"]
        assert list(rows(drawer.path)[0]) == [*columns, "epoch"]


@pytest.mark.requirement("S1-16", "S1-40")
def test_parquet_may_keep_all_fields_and_a_folder_a_tenant(drawers: Open) -> None:
    drawer = drawers(kind="parquet", format="", tenant="tenant_id")
    odd, long = "a/b =ü%20'", "x" * 300
    accounts = drawer.accounts
    every_kind(drawer)
    drawer.commit(put(accounts, **account(7, odd)), put(accounts, **account(8, long)))
    drawer.write(parts=2)
    stored = sorted(rows(drawer.path), key=lambda row: row["sequence"])
    assert stored == drawer.changes(0, drawer.log.latest_sequence).toArrow().to_pylist()
    of_odd = [n for n in names(drawer.path) if "/tenant=a%2Fb%20%3Dü%2520%27/" in n]
    assert [row["key"] for name in of_odd for row in parquet(drawer.path / name)] == ['{"id":7}']
    spark = drawer.spark.read.parquet(str(drawer.path))
    found = {row["sequence"]: (row["day"], row["tenant"]) for row in spark.collect()}
    assert len(found) == spark.count() == drawer.log.latest_sequence
    assert found[2] == (dt.date(2026, 11, 14), "acme")
    assert found[1][1] is None
    assert odd in {tenant for _, tenant in found.values()}


@pytest.mark.requirement("S1-40")
def test_other_readers_find_every_line_once_and_nothing_half_written(drawers: Open) -> None:
    drawer = drawers(compression="gzip")
    drawer.fill(30)
    drawer.write(parts=2)
    half = drawer.path / "_headrace" / "staging" / "killed" / "x.part"
    half.parent.mkdir()
    half.write_bytes(b"half a li")
    ids = [json.loads(event)["id"] for event in drawer.events()]
    found = [row["id"] for row in drawer.spark.read.json(str(drawer.path)).collect()]
    assert sorted(found) == sorted(ids)
    pattern = f"{drawer.path}/**/*.jsonl.gz"
    query = f"SELECT id, day FROM read_json('{pattern}', hive_partitioning=true)"
    with duckdb.connect() as connection:
        answered = connection.execute(query).fetchall()
    assert sorted(answered) == sorted((each, dt.date(2026, 11, 14)) for each in ids)
    drawer.open()
    assert drawer.left() == []


def test_the_config_of_the_docs_works(drawers: Open, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sinks.md").read_text()
    found = re.search(r"^## files$.*?^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert found
    content = yaml.safe_load(found[1])
    content["pipeline"]["url"] = "https://headrace.example"
    loaded = parse(content, folder=tmp_path, environment={})
    assert loaded.pipeline is not None
    [sink] = loaded.pipeline.sinks
    assert isinstance(sink, Files)
    drawer = drawers()
    drawer.fill(2)
    drawer.path = Path(sink.path)
    drawer.writer = dataclasses.replace(sink, formats=FORMATS).open("query-1")
    drawer.write()
    assert drawer.path == tmp_path / "trail"
    assert drawer.names() == [f"day=2026-11-14/log0001-{1:019}-{2:019}.jsonl.gz"]
    assert drawer.lines() == drawer.events()


def test_a_file_has_at_most_so_many_bytes(drawers: Open) -> None:
    drawer = drawers(file_mb=0.004)
    (drawer.path / "_headrace" / "staging" / "killed before the first batch").mkdir(parents=True)
    drawer.open()
    drawer.fill(40)
    drawer.write()
    sizes = [(drawer.path / name).stat().st_size for name in drawer.names()]
    assert len(sizes) > 3
    assert max(sizes) <= 4000
    assert drawer.lines() == drawer.events()
    assert drawer.left() == []


def test_progress_is_what_the_files_have(drawers: Open) -> None:
    drawer = drawers(format="notification")
    assert drawer.writer.progress() is None
    nothing = drawer.spark.createDataFrame([], drawer.changes(0, 1).schema)
    assert drawer.writer.write(nothing, 0) == 0
    assert drawer.open().progress() is None
    drawer.batches = 1
    drawer.fill(3)
    drawer.write()
    expected = Progress(drawer.log.epoch, 3)
    assert drawer.writer.progress() == drawer.open().progress() == expected
    drawer.open("query-2", adopt=True)  # the checkpoint was lost, and batches begin at 0 again
    drawer.fill(2)
    drawer.writer.write(drawer.changes(3, 5), 0)
    assert drawer.lines() == drawer.events("notification")


@pytest.mark.parametrize(("kind", "format"), [("jsonl", "notification"), ("parquet", "")])
def test_the_ledger_can_be_compared_with_the_log(drawers: Open, kind: str, format: str) -> None:
    drawer = drawers(kind=kind, format=format)
    every_kind(drawer)
    drawer.write()
    drawer.fill(3)
    drawer.written = drawer.log.latest_sequence  # which nobody writes
    drawer.chosen |= {"tables": ("public.*",)}  # so that there are two ranges
    drawer.open()
    drawer.fill(4)
    drawer.write()
    sink = Files(**({"name": "drawer", "path": str(drawer.path)} | drawer.chosen))
    address = {"path": str(drawer.log.path)}
    found = verify(sink, address, lambda *_: None)
    assert found.expected == len(drawer.events(format or "canonical"))
    assert found.sent == found.expected - 3
    assert [(span.events, span.last) for span in found.missing] == [(3, found.last - 4)]
    drawer.fill(2)
    assert verify(sink, address, lambda *_: None).to_come == 2


def test_another_pipeline_is_kept_out_until_it_takes_over(drawers: Open) -> None:
    drawer = drawers()
    drawer.fill(2)
    drawer.write(1)
    first = drawer.writer
    with pytest.raises(SinkFenced, match="another pipeline"):
        drawer.open("query-2")
    drawer.open("query-2", adopt=True)
    with pytest.raises(SinkFenced, match="not committed"):
        first.write(drawer.changes(1, 2), 1)
    assert drawer.lines() == drawer.events(upto=1)
    drawer.writer.write(drawer.changes(0, 2), 0)
    assert drawer.lines() == drawer.events()
    with pytest.raises(SinkFenced):
        drawer.open("query-1")


def test_who_was_replaced_long_ago_is_kept_out_though_the_entries_are_gone(
    drawers: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sinks.files.ledger._MOST", 1)
    monkeypatch.setattr("headrace.sinks.files.ledger._KEPT", 1)
    drawer = drawers()
    drawer.fill(3)
    drawer.write(1)
    first = drawer.writer
    drawer.open("query-2", adopt=True)
    drawer.write(2)
    drawer.writer.maintain()
    entries = drawer.path / "_headrace"
    assert [file.name for file in entries.glob("*.json")] == [f"{3:012}.json"]
    with pytest.raises(SinkFenced):
        first.write(drawer.changes(1, 3), 1)
    assert [file.name for file in entries.glob("*.json")] == [f"{3:012}.json"]
    drawer.open("query-2")
    drawer.write(3)
    assert drawer.lines() == drawer.events()


def test_one_that_still_lives_loses_no_file_to_the_one_that_takes_its_place(
    drawers: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same query is started anew while its old driver is cut off, and not dead."""
    drawer = drawers()
    drawer.fill(3)
    drawer.write(1)
    old, read = drawer.writer, FilesLedger.__init__

    def race(ledger: FilesLedger, path: str) -> None:
        read(ledger, path)
        if not old_done:  # the new one has read the ledger, and now the old one commits
            old_done.append(1)
            old.write(drawer.changes(1, 2), 1)
            (drawer.path / "_headrace" / "staging" / "of one that was killed").mkdir()

    old_done: list[int] = []
    monkeypatch.setattr(FilesLedger, "__init__", race)
    new = drawer.open()
    assert drawer.lines() == drawer.events(upto=2), "what the old one has committed is there"
    new.write(drawer.changes(1, 3), 1)
    assert drawer.lines() == drawer.events()
    with pytest.raises(SinkFenced):
        old.write(drawer.changes(2, 3), 2)
    assert drawer.lines() == drawer.events()


def test_what_one_has_staged_is_deleted_only_when_it_cannot_be_committed_any_more(
    drawers: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawer = drawers()
    drawer.fill(2)
    drawer.write(1)
    old, commit = drawer.writer, FilesLedger.commit

    def late(ledger: FilesLedger, entry: FilesEntry) -> None:
        monkeypatch.setattr(FilesLedger, "commit", commit)
        drawer.open()  # the new one finds staged files, and does not know whose they are
        commit(ledger, entry)

    monkeypatch.setattr(FilesLedger, "commit", late)
    with pytest.raises(SinkFenced, match="not committed"):
        old.write(drawer.changes(1, 2), 1)
    assert drawer.writer.progress() == Progress(drawer.log.epoch, 1)
    drawer.write()
    assert drawer.lines() == drawer.events()
    assert drawer.left() == []


def test_a_staged_file_that_is_gone_when_it_was_committed_is_told(
    drawers: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawer = drawers()
    drawer.fill(1)
    place = FilesLedger.place

    def rob(ledger: FilesLedger, *, fresh: bool = False) -> None:
        for file in ledger.entry.files if ledger.entry else []:
            (drawer.path / "_headrace" / "staging" / file.staged).unlink()
        place(ledger, fresh=fresh)

    monkeypatch.setattr(FilesLedger, "place", rob)
    with pytest.raises(PipelineError, match=r"was deleted in .*staging") as raised:
        drawer.write()
    assert "another path" in raised.value.hint


def test_one_that_was_killed_before_its_first_batch_has_begun_nothing(drawers: Open) -> None:
    drawer = drawers()
    (drawer.path / "_headrace" / "staging" / "left").mkdir(parents=True)
    drawer.open()
    assert drawer.left() == []
    assert drawer.writer.progress() is None
    drawer.fill(1)
    drawer.batches = 3  # by its checkpoint there were batches, and the ledger does not know them
    with pytest.raises(PipelineError, match="is gone"):
        drawer.write()
    drawer.batches = 0
    drawer.write()
    assert drawer.lines() == drawer.events()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_event_of_five_megabytes_is_kept_as_any_other(drawers: Open, kind: str) -> None:
    drawer = drawers(kind=kind, file_mb=1.0)
    drawer.fill(2)
    drawer.commit(put(drawer.accounts, **account(7, name="ü" * 2_500_000)))
    drawer.fill(2)
    drawer.write()
    assert drawer.lines() == drawer.events()
    assert max(map(len, drawer.lines())) > 2_500_000
    # Larger than a file may be, it has one of its own.
    assert len(drawer.names()) == 3
    assert drawer.left() == []


def test_another_log_is_refused_until_it_is_taken_over(drawers: Open) -> None:
    drawer = drawers()
    drawer.fill(2)
    drawer.write()
    first, log = drawer.lines(), drawer.log.path
    drawer.replace_log("log-2")
    drawer.fill(3)
    with pytest.raises(LogReplaced, match="another log"):
        drawer.write()
    assert drawer.left() == []
    drawer.open("query-2", adopt=True)
    drawer.batches = 0
    drawer.write()
    assert drawer.lines() == [*first, *drawer.events()]
    assert [name.rpartition("/")[2][:7] for name in drawer.names()] == ["log0001", "log0002"]
    drawer.replace_log(log.name)  # the first one comes back
    drawer.open("query-3", adopt=True)
    drawer.fill(1)
    second = drawer.lines()[2:]
    assert drawer.writer.write(drawer.changes(0, 3), 0) == 3
    assert drawer.lines() == [*drawer.events(), *second]


def test_files_of_other_settings_are_refused(drawers: Open) -> None:
    drawer = drawers()
    drawer.fill(1)
    drawer.write()
    for other in ({"kind": "parquet"}, {"format": "debezium"}, {"tenant": "tenant_id"}):
        before = dict(drawer.chosen)
        drawer.chosen |= other
        with pytest.raises(PipelineError, match="were made with") as raised:
            drawer.open()
        assert "another path" in raised.value.hint
        drawer.chosen = before
    drawer.chosen |= {"compression": "gzip"}  # readers see from the name what it is
    drawer.open()


def test_a_ledger_that_is_gone_or_damaged_is_not_guessed(drawers: Open) -> None:
    drawer = drawers()
    drawer.fill(2)
    drawer.write(1)
    [entry] = (drawer.path / "_headrace").glob("*.json")
    content = entry.read_bytes()
    entry.write_bytes(content[:20])
    with pytest.raises(PipelineError, match="cannot be read, and it says") as raised:
        drawer.open()
    assert "copy" in raised.value.hint
    entry.unlink()
    drawer.open()
    with pytest.raises(PipelineError, match="is gone") as raised:
        drawer.write()
    assert "--adopt drawer" in raised.value.hint


def test_a_file_that_its_reader_has_taken_does_not_come_again(
    drawers: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace")
    drawer = drawers()
    drawer.fill(2)
    drawer.write(1)
    [name] = drawer.names()
    (drawer.path / name).unlink()
    (drawer.path / name).parent.rmdir()
    drawer.open()
    assert "is gone; whoever reads these files has taken it" in caplog.text
    drawer.write(2)
    assert drawer.lines() == drawer.events()[1:]
