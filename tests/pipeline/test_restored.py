"""A log restored from a backup: sinks go on without repeats or loss, or halt with what to do."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from pyspark.sql import SparkSession

from headrace.log import Log
from headrace.log.backup import BackupFolders, copy, restore, stage
from headrace.pipeline import supervise
from headrace.pipeline.verify import verify
from headrace.retry import Backoff
from headrace.sinks import Progress, Sink, SinkPhase, informed
from headrace.sinks.files import Files
from headrace.sinks.history import History
from headrace.sinks.push.ledger import LedgerEntry, PushLedger, joined, read
from headrace.sinks.requests import Requests
from headrace.sinks.tables import Tables
from tests.pipeline.sites import Site
from tests.sinks.socket_sink import Courier, Office, opened_office


@pytest.fixture
def office() -> Iterator[Office]:
    with opened_office() as opened:
        yield opened


@pytest.fixture
def site(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(supervise, "BACKOFF", Backoff(0.05, 60.0))
    return Site(tmp_path, spark)


def folders(site: Site) -> BackupFolders:
    return BackupFolders(data=site.folder, sinks=site.checkpoints, left_out=(site.folder / "lake",))


def back_up(site: Site, target: Path) -> None:
    with Log.open(site.log) as log:
        copy(stage(log, folders(site)), target, lambda *_: None)


def put_back(site: Site, backup: Path) -> str:
    """Lose the log, and restore it; returns the new epoch."""
    site.log.rename(site.folder / f"lost-{time.monotonic_ns()}")
    return restore(backup, folders(site), lambda *_: None).epoch


def every_kind(site: Site, office: Office) -> tuple[Sink, ...]:
    """A sink of each kind that notes how far it is."""
    lake = site.folder / "lake"
    return (
        Tables(name="tables", path=str(lake / "tables")),
        History(name="history", path=str(lake / "history")),
        Files(name="files", path=str(lake / "files"), format="canonical"),
        Courier(name="post", port=office.port, retry_first_seconds=0.005, batch_seconds=0.1),
    )


def fill(site: Site, *ids: str) -> None:
    with site.writing() as writer:
        for id in ids:
            writer.put("users", id)


def rows(site: Site) -> set[str]:
    table = pl.read_delta(str(site.folder / "lake" / "tables" / "public" / "users"))
    return set(table["id"])


def history(site: Site) -> list[int]:
    return sorted(pl.read_delta(str(site.folder / "lake" / "history"))["sequence"])


def filed(site: Site) -> list[int]:
    files = (site.folder / "lake" / "files").glob("day=*/*.jsonl")
    lines = [line for file in files for line in file.read_text().splitlines()]
    return sorted(json.loads(line)["sequence"] for line in lines)


@pytest.mark.requirement("P-36")
def test_sinks_that_are_not_ahead_of_the_backup_go_on_without_repeats_or_loss(
    site: Site, office: Office, tmp_path: Path
) -> None:
    sinks = every_kind(site, office)
    fill(site, "1", "2", "3")
    first = site.once(*sinks)
    assert {status.phase for status in first.values()} == {SinkPhase.STOPPED}, first
    fill(site, "4", "5")
    back_up(site, tmp_path / "backup")
    put_back(site, tmp_path / "backup")
    fill(site, "6", "7")
    again = site.once(*sinks)
    assert {status.phase for status in again.values()} == {SinkPhase.STOPPED}, again
    assert rows(site) == {"1", "2", "3", "4", "5", "6", "7"}
    assert history(site) == filed(site) == list(range(1, 8))
    assert [event.sequence for event in office.taken] == list(range(1, 8))
    post = informed(sinks[-1], folder=str(site.checkpoints / "post"))
    verified = verify(post, {"path": str(site.log)}, look=lambda *_: None)
    assert (verified.expected, verified.sent, verified.missing) == (7, 7, [])


@pytest.mark.requirement("P-36")
def test_sinks_that_are_ahead_of_the_backup_halt_with_what_to_do(
    site: Site, office: Office, tmp_path: Path
) -> None:
    sinks = every_kind(site, office)
    fill(site, "1", "2")
    back_up(site, tmp_path / "backup")
    fill(site, "lost-1", "lost-2")
    site.once(*sinks)
    put_back(site, tmp_path / "backup")
    # The restored log hands the same sequences out again, to other changes, and more.
    fill(site, "3", "4", "5")
    halted = site.once(*sinks)
    assert {status.phase for status in halted.values()} == {SinkPhase.HALTED}, halted
    for name, status in halted.items():
        assert "has changes up to 4, but the log was restored from a copy that ends at 2" in (
            status.error
        ), name
    assert "headrace reset tables" in halted["tables"].hint
    for name in ("history", "files", "post"):
        assert f"headrace pipeline --adopt {name}" in halted[name].hint
    assert rows(site) == {"1", "2", "lost-1", "lost-2"}
    assert len(office.taken) == 4
    # What the hints say works.
    others = sinks[1:]
    gone_on = site.once(*others, adopt=[sink.name for sink in others])
    assert {status.phase for status in gone_on.values()} == {SinkPhase.STOPPED}, gone_on
    assert history(site) == filed(site) == [1, 2, 3, 3, 4, 4, 5]
    assert [event.sequence for event in office.taken] == [1, 2, 3, 4, 3, 4, 5]
    Requests(site.checkpoints / "tables").reset()
    site.once(sinks[0])
    assert rows(site) == {"1", "2", "3", "4", "5"}


@pytest.mark.requirement("P-06")
def test_sinks_that_have_more_than_a_copy_that_was_put_back_halt_with_what_to_do(
    site: Site, office: Office, tmp_path: Path
) -> None:
    sinks = every_kind(site, office)
    with site.writing() as writer:
        for id in ("1", "2"):
            writer.put("users", id)
        shutil.copytree(site.log, tmp_path / "copy")
        for id in ("lost-1", "lost-2"):
            writer.put("users", id)
    site.once(*sinks)
    shutil.rmtree(site.log)
    (tmp_path / "copy").rename(site.log)
    # The same sequences, of the same epoch, for other changes, and more of them.
    fill(site, "3", "4", "5")
    halted = site.once(*sinks)
    assert {status.phase for status in halted.values()} == {SinkPhase.HALTED}, halted
    for name, status in halted.items():
        assert f"sink {name} has changes up to 4, but this log has other changes after 2" in (
            status.error
        )
    assert "headrace reset tables" in halted["tables"].hint
    for name in ("history", "files", "post"):
        assert f"headrace pipeline --adopt {name}" in halted[name].hint
    assert rows(site) == {"1", "2", "lost-1", "lost-2"}
    assert len(office.taken) == 4
    # What the hints say works, and holds over another start of the writer.
    others = sinks[1:]
    gone_on = site.once(*others, adopt=[sink.name for sink in others])
    assert {status.phase for status in gone_on.values()} == {SinkPhase.STOPPED}, gone_on
    Requests(site.checkpoints / "tables").reset()
    site.once(sinks[0])
    fill(site, "6")
    again = site.once(*sinks)
    assert {status.phase for status in again.values()} == {SinkPhase.STOPPED}, again
    assert history(site) == filed(site) == [1, 2, 3, 3, 4, 4, 5, 6]
    assert [event.sequence for event in office.taken] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert rows(site) == {"1", "2", "3", "4", "5", "6"}


@pytest.mark.requirement("P-06")
def test_a_delta_table_that_is_ahead_of_its_ledger_is_not_taken_for_what_the_log_has(
    site: Site, tmp_path: Path
) -> None:
    """A process that dies between the commit of a table and the ledger leaves it so."""
    tables = Tables(name="tables", path=str(site.folder / "lake" / "tables"))
    ledger = site.folder / "lake" / "tables" / "_headrace" / "ledger.json"
    with site.writing() as writer:
        writer.put("users", "1")
        site.once(tables)
        kept = ledger.read_text()
        checkpoint = shutil.copytree(site.checkpoints, tmp_path / "checkpoints")
        writer.put("users", "2")
        shutil.copytree(site.log, tmp_path / "copy")
        writer.put("users", "lost")
    site.once(tables)
    shutil.rmtree(site.log)
    (tmp_path / "copy").rename(site.log)
    shutil.rmtree(site.checkpoints)
    checkpoint.rename(site.checkpoints)
    ledger.write_text(kept)
    fill(site, "3", "4")
    [halted] = site.once(tables).values()
    assert halted.phase is SinkPhase.HALTED
    assert "has changes up to 3, but this log has other changes after 2" in halted.error
    assert "headrace reset tables" in halted.hint


@pytest.mark.requirement("P-06")
def test_a_writer_that_is_started_often_is_no_other_history(site: Site, office: Office) -> None:
    sinks = every_kind(site, office)
    for id in ("1", "2", "3"):
        fill(site, id)
        statuses = site.once(*sinks)
        assert {status.phase for status in statuses.values()} == {SinkPhase.STOPPED}, statuses
    assert rows(site) == {"1", "2", "3"}
    assert history(site) == filed(site) == [1, 2, 3]


@pytest.mark.requirement("P-36")
def test_restored_elsewhere_with_its_notes_a_push_sink_goes_on_where_it_was(
    site: Site, office: Office, tmp_path: Path
) -> None:
    *_, post = every_kind(site, office)
    fill(site, "1", "2", "3")
    site.once(post)
    back_up(site, tmp_path / "backup")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = Site(elsewhere, site.spark)
    other.checkpoints.rmdir()
    done = restore(tmp_path / "backup", folders(other), lambda *_: None)
    assert done.sinks == ["post"]
    fill(other, "4")
    other.once(post)
    assert [event.sequence for event in office.taken] == [1, 2, 3, 4]
    # The first one works on, and neither takes the other's place.
    fill(site, "a", "b")
    site.once(post)
    assert [event.sequence for event in office.taken] == [1, 2, 3, 4, 4, 5]


def test_the_ledger_of_a_push_sink_keeps_the_restored_logs_name_when_it_is_compacted(
    tmp_path: Path,
) -> None:
    opened = PushLedger.open(str(tmp_path), "query", adopt=False)
    for batch in range(2000):
        epoch = "first" if batch < 100 else "copy"
        if batch == 100:
            opened.settle(LedgerEntry("continued", "query", epoch="copy"))
            assert opened.progress() == Progress("copy", 100, "0")
        last = batch + 1
        opened.settle(LedgerEntry("settled", "query", batch, epoch, last, last, 1))
    file = tmp_path / "sent.jsonl"
    kept = joined(read(file))
    assert [(each.what, each.epoch, each.changes) for each in kept[1:4]] == [
        ("earlier", "first", 100),
        ("continued", "copy", 0),
        ("earlier", "copy", 900),
    ]
