"""GET /changefeed/stats and POST /changefeed/retention."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.serve import ServerSettings
from headrace.sinks.report import PipelineFolder
from tests.serve.conftest import Site, Sites
from tests.serve.sse import Reader, parse


def trim(site: Site, **body: Any) -> httpx.Response:
    return site.http.post("/changefeed/retention", json=body)


def trimmed(site: Site, **body: Any) -> dict[str, Any]:
    response = trim(site, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def checkpoint(
    sink: Path, epoch: str, *, committed: int, planned: int | None = None, batch: int = 0
) -> None:
    """What Spark leaves of a query: a batch that was stored, and one that was only planned."""
    offsets, commits = sink / "checkpoint" / "offsets", sink / "checkpoint" / "commits"
    for folder in (offsets, commits):
        folder.mkdir(parents=True, exist_ok=True)
    for number, upto in enumerate((committed, planned), batch):
        if upto is not None:
            offset = json.dumps({"epoch": epoch, "sequence": upto})
            (offsets / str(number)).write_text(f"v1\n{{}}\n{offset}")
    (commits / str(batch)).write_text("v1\n{}")


def kept(site: Site) -> list[int]:
    page = site.get("/changefeed", limit=1000).json()
    return [event["sequence"] for event in page["events"]]


@pytest.mark.requirement("S4-12")
def test_stats_count_events_and_bytes(site: Site) -> None:
    assert site.get("/changefeed/stats").json() == {
        "total_events": 0,
        "latest_sequence": 0,
        "total_size_bytes": 0,
    }
    site.writer.put_many("users", 10)
    stats = site.get("/changefeed/stats").json()
    assert stats.keys() == {"total_events", "latest_sequence", "total_size_bytes"}
    assert (stats["total_events"], stats["latest_sequence"]) == (10, 10)
    assert stats["total_size_bytes"] > 10 * len('{"id":"1"}')


@pytest.mark.requirement("S4-13", "C-10")
def test_retention_deletes_strictly_below_the_sequence(site: Site) -> None:
    site.writer.put_many("users", 10)
    assert trimmed(site, before_sequence=4) == {
        "deleted": 3,
        "before_sequence": 4,
        "latest_sequence": 10,
        "held_by": None,
    }
    assert kept(site) == [4, 5, 6, 7, 8, 9, 10]


@pytest.mark.requirement("S4-14")
def test_retention_never_resets_the_latest_sequence(site: Site) -> None:
    site.writer.put_many("users", 10)
    assert trimmed(site, before_sequence=2**64 - 1)["deleted"] == 10
    stats = site.get("/changefeed/stats").json()
    assert stats == {"total_events": 0, "latest_sequence": 10, "total_size_bytes": 0}
    assert site.get("/changefeed").json()["latest_sequence"] == 10
    assert site.writer.put("users", "next") == 11


@pytest.mark.requirement("S4-13")
@pytest.mark.parametrize("before", [0, 1])
def test_retention_below_the_first_event_deletes_nothing(site: Site, before: int) -> None:
    site.writer.put_many("users", 3)
    assert trimmed(site, before_sequence=before)["deleted"] == 0
    assert kept(site) == [1, 2, 3]


@pytest.mark.requirement("S4-20")
def test_the_lowest_checkpoint_of_all_consumers_is_a_safe_bound(site: Site) -> None:
    site.writer.put_many("users", 100)
    checkpoints = {"search": 40, "cache": 70}
    trimmed(site, before_sequence=min(checkpoints.values()))
    for checkpoint in checkpoints.values():
        page = site.get("/changefeed", from_seq=checkpoint, limit=1000)
        assert "x-headrace-gap" not in page.headers
        sequences = [event["sequence"] for event in page.json()["events"]]
        assert sequences == list(range(checkpoint + 1, 101))
    assert site.get("/changefeed/stats").json()["total_events"] == 61


@pytest.mark.requirement("C-24")
def test_retention_stops_at_the_slowest_named_cursor_and_says_so(site: Site) -> None:
    site.writer.put_many("users", 10)
    site.log.move_cursor("search", 6)
    site.log.move_cursor("cache", 3)
    answer = trimmed(site, before_sequence=9)
    assert answer == {
        "deleted": 3,
        "before_sequence": 4,
        "latest_sequence": 10,
        "held_by": "cache",
    }
    assert kept(site)[0] == 4


@pytest.mark.requirement("C-24")
def test_forced_retention_passes_a_named_cursor(site: Site) -> None:
    site.writer.put_many("users", 10)
    site.log.move_cursor("cache", 3)
    assert trimmed(site, before_sequence=9, force=True)["deleted"] == 8
    assert kept(site) == [9, 10]


@pytest.mark.requirement("P-13", "C-24")
def test_retention_keeps_what_a_sink_of_the_config_needs(sites: Sites, tmp_path: Path) -> None:
    folder = PipelineFolder(folder=tmp_path, sinks=("lake", "new"))
    site = sites(ServerSettings(port=0, pipeline=folder))
    site.writer.put_many("users", 10)
    checkpoint(tmp_path / "lake", site.log.epoch, committed=4, planned=9)
    assert trimmed(site, before_sequence=3)["held_by"] == "sink:new"  # it needs everything
    checkpoint(tmp_path / "new", site.log.epoch, committed=10)
    answer = trimmed(site, before_sequence=9)
    # A batch that was planned and not stored is read again.
    assert (answer["before_sequence"], answer["held_by"]) == (5, "sink:lake")
    answer = trimmed(site, before_sequence=9, force=True)
    assert (answer["deleted"], answer["losers"]) == (4, ["sink:lake"])
    page = site.get("/changefeed", from_seq=4)
    assert page.headers["x-headrace-gap"] == "5-8"
    assert page.headers["x-headrace-gap-reason"] == "trim --force"


@pytest.mark.requirement("P-13")
def test_a_sink_that_reads_another_servers_log_keeps_nothing_here(
    sites: Sites, tmp_path: Path
) -> None:
    folder = PipelineFolder(folder=tmp_path, sinks=("lake",), same_log=False)
    site = sites(ServerSettings(port=0, pipeline=folder))
    site.writer.put_many("users", 10)
    assert trimmed(site, before_sequence=3)["held_by"] == "sink:lake"  # nobody knows yet
    checkpoint(tmp_path / "lake", "another", committed=1)
    assert trimmed(site, before_sequence=3)["deleted"] == 2
    # The url of a pipeline may lead to its own server.
    checkpoint(tmp_path / "lake", site.log.epoch, committed=4)
    assert trimmed(site, before_sequence=9)["held_by"] == "sink:lake"


@pytest.mark.requirement("P-13")
def test_a_sink_whose_checkpoint_is_damaged_keeps_everything(sites: Sites, tmp_path: Path) -> None:
    folder = PipelineFolder(folder=tmp_path, sinks=("lake",))
    site = sites(ServerSettings(port=0, pipeline=folder))
    site.writer.put_many("users", 10)
    checkpoint(tmp_path / "lake", site.log.epoch, committed=4)
    (tmp_path / "lake" / "checkpoint" / "offsets" / "0").write_text("v1\n{}\n{")
    assert trimmed(site, before_sequence=3)["deleted"] == 0


@pytest.mark.requirement("S4-15")
@pytest.mark.parametrize("field", ["before_timestamp", "before_time", "max_age_days", "older_than"])
def test_retention_by_time_is_refused(site: Site, field: str) -> None:
    site.writer.put_many("users", 3)
    for body in ({field: 1}, {"before_sequence": 3, field: 1}):
        refused = trim(site, **body)
        assert refused.status_code == 400
        assert refused.json()["parameter"] == field
        assert "before_sequence" in refused.json()["message"]
    assert kept(site) == [1, 2, 3]


@pytest.mark.requirement("S4-13")
@pytest.mark.parametrize("value", [-1, 2**64, 1.5, "3", None, True, [], {}])
def test_before_sequence_must_be_a_uint64(site: Site, value: object) -> None:
    site.writer.put_many("users", 3)
    refused = trim(site, before_sequence=value)
    assert refused.status_code == 400
    assert refused.json()["parameter"] == "before_sequence"
    assert kept(site) == [1, 2, 3]


@pytest.mark.requirement("C-05")
def test_a_reader_whose_events_were_deleted_is_told_which(site: Site) -> None:
    site.writer.put_many("users", 10)
    trimmed(site, before_sequence=6)
    page = site.get("/changefeed", from_seq=2)
    assert [event["sequence"] for event in page.json()["events"]] == [6, 7, 8, 9, 10]
    assert page.headers["x-headrace-gap"] == "3-5"
    assert "x-headrace-gap" not in site.get("/changefeed", from_seq=5).headers
    text = site.get("/changefeed/stream", from_seq=2).text
    assert ": gap 3-5 trim\n\n" in text
    assert [event["sequence"] for event in parse(text)] == [6, 7, 8, 9, 10]


@pytest.mark.requirement("C-05")
def test_retention_in_the_middle_of_reading_is_announced(site: Site) -> None:
    site.writer.put_many("users", 600)
    first = site.get("/changefeed", limit=10).json()["events"]
    trimmed(site, before_sequence=300)
    page = site.get("/changefeed", from_seq=first[-1]["sequence"], limit=1000)
    assert page.headers["x-headrace-gap"] == "11-299"
    assert [event["sequence"] for event in page.json()["events"]] == list(range(300, 601))


def test_what_was_read_before_it_was_deleted_is_not_served_from_memory(site: Site) -> None:
    site.writer.put_many("users", 10)
    assert len(kept(site)) == 10
    trimmed(site, before_sequence=8)
    assert kept(site) == [8, 9, 10]
    trimmed(site, before_sequence=11)
    assert kept(site) == []
    site.writer.put("users", "next")
    assert kept(site) == [11]


def test_what_was_deleted_unread_leaves_no_hole_that_is_filled_wrongly(site: Site) -> None:
    site.writer.put_many("users", 10)
    assert len(kept(site)) == 10
    site.writer.put_many("users", 10)
    trimmed(site, before_sequence=15)
    assert kept(site) == [15, 16, 17, 18, 19, 20]
    page = site.get("/changefeed", from_seq=10)
    assert page.headers["x-headrace-gap"] == "11-14"


def test_an_open_stream_survives_retention(site: Site) -> None:
    site.writer.put_many("users", 5)
    with Reader(f"{site.url}/changefeed/stream?keep_alive=true") as reader:
        reader.await_events(5)
        trimmed(site, before_sequence=6)
        site.writer.put("users", "next")
        assert [event["sequence"] for event in reader.await_events(6)] == [1, 2, 3, 4, 5, 6]
        assert "gap" not in reader.text
