"""GET /health with sinks, warnings and pauses; GET /livez and /readyz."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.serve import ServerSettings
from headrace.sinks import FailedTable, SinkPhase, SinkStatus, report, verification
from headrace.sinks.report import PipelineFolder
from headrace.sinks.verification import TableOutcome, TableVerification, Verification
from headrace.sources import Phase, Status
from headrace.testing import wait_until
from tests.serve.conftest import Site, Sites

pytestmark = pytest.mark.requirement("P-12")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    return folder


@pytest.fixture
def site(sites: Sites, folder: Path) -> Site:
    """A server over twenty changes, of a config with one sink."""
    pipeline = PipelineFolder(folder=folder, sinks=("lake",))
    site = sites(ServerSettings(port=0, pipeline=pipeline))
    site.writer.put_many("users", 20)
    return site


def source(phase: Phase = Phase.STREAMING, **fields: Any) -> Status:
    return Status(source="shop", phase=phase, **({"heard_at": time.time_ns() // 1000} | fields))


def lake(phase: SinkPhase = SinkPhase.STREAMING, **fields: Any) -> SinkStatus:
    return SinkStatus(sink="lake", phase=phase, **({"sequence": 20} | fields))


def judged(site: Site) -> tuple[int, str, dict[str, Any]]:
    """The code, the verdict, and what is said of the sink `lake`."""
    response = site.http.get("/health")
    document = response.json()
    [sink] = document["pipeline"]["sinks"]
    return response.status_code, document["status"], sink


# --- sinks ---------------------------------------------------------------------------------------


def test_a_sink_that_has_everything_is_healthy(site: Site, folder: Path) -> None:
    report.write(folder, [lake()])
    code, verdict, sink = judged(site)
    assert (code, verdict, sink["reasons"]) == (200, "healthy", [])
    assert (sink["phase"], sink["lag"], sink["lag_seconds"]) == ("streaming", 0, 0.0)


def test_a_sink_that_starts_is_degraded_and_its_lag_unknown_until_it_knows(
    site: Site, folder: Path
) -> None:
    report.write(folder, [lake(SinkPhase.STARTING, sequence=0)])
    _, verdict, sink = judged(site)
    assert (verdict, sink["lag"], sink["lag_seconds"]) == ("degraded", None, None)
    assert sink["reasons"] == ["it is starting"]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (lake(SinkPhase.HALTED, error="another writer", hint="Use --adopt."), "another writer Use"),
        (lake(SinkPhase.WAITING, error="connection refused"), "tried again: connection refused"),
        # Between two attempts it starts, and has not recovered for all that.
        (lake(SinkPhase.STARTING, error="connection refused"), "tried again: connection refused"),
        (lake(SinkPhase.STOPPED), "it is stopped"),
        (lake(dead_letters=3), "headrace redrive lake"),
        (lake(catalog="public.orders is not in the catalog"), "is not in the catalog"),
        (lake(failed_tables=(FailedTable("public.x", 7, "no key", "Give it one."),)), "Give it"),
    ],
)
def test_a_sink_that_does_not_go_on_makes_it_degraded_with_the_reason(
    site: Site, folder: Path, status: SinkStatus, said: str
) -> None:
    report.write(folder, [status])
    code, verdict, sink = judged(site)
    assert (code, verdict, sink["status"]) == (200, "degraded", "degraded")
    [reason] = sink["reasons"]
    assert said in reason
    report.write(folder, [lake()])
    assert judged(site)[1] == "healthy"


@pytest.mark.requirement("P-11")
def test_the_last_comparison_with_the_source_is_shown_and_a_difference_degrades(
    site: Site, folder: Path
) -> None:
    report.write(folder, [lake()])
    now = time.time_ns() // 1000
    for outcome, missing, verdict in (("equal", 0, "healthy"), ("differs", 2, "degraded")):
        table = TableVerification(
            source="shop",
            table="public.users",
            outcome=TableOutcome(outcome),
            rows=20,
            missing=missing,
        )
        found = Verification(sink="lake", at=now, tables=(table,))
        verification.note(folder / "lake", found)
        _, status, sink = judged(site)
        assert status == verdict
        assert sink["verified"]["at"] == now
        assert sink["verified"]["tables"][0]["missing"] == missing
        said = [*sink["reasons"], *sink["notes"]]
        assert any(found.summary().partition(": ")[2] in text for text in said)
    # That nothing could be compared says nothing of the tables …
    tried = msgspec.structs.replace(found, error="it is away", failed_at=now + 1)
    verification.note(folder / "lake", tried)
    _, status, sink = judged(site)
    assert status == "degraded"
    assert "not equal to the source: public.users" in sink["reasons"][0]
    assert "could not be verified: it is away" in sink["reasons"][0]
    # … also if nothing ever was.
    never = Verification(sink="lake", error="it is away", failed_at=now)
    verification.note(folder / "lake", never)
    assert judged(site)[1] == "healthy"


def test_a_sink_too_far_behind_makes_it_degraded(sites: Sites, folder: Path) -> None:
    pipeline = PipelineFolder(folder=folder, sinks=("lake",))
    site = sites(ServerSettings(port=0, pipeline=pipeline, max_sink_lag_seconds=0.001))
    site.writer.put_many("users", 20)
    report.write(folder, [lake(sequence=15)])
    wait_until(lambda: judged(site)[1] == "degraded")
    sink = judged(site)[2]
    assert sink["lag"] == 5
    assert sink["lag_seconds"] > 0.001
    assert "server.max_sink_lag_seconds" in sink["reasons"][0]
    report.write(folder, [lake(SinkPhase.PAUSED, sequence=15)])
    _, verdict, sink = judged(site)
    assert (verdict, sink["reasons"], sink["notes"]) == ("healthy", [], ["it is paused"])


def test_a_pipeline_that_never_ran_is_degraded_and_everything_waits_for_it(site: Site) -> None:
    code, verdict, sink = judged(site)
    assert (code, verdict) == (200, "degraded")
    assert (sink["phase"], sink["lag"]) == (None, 20)
    assert "never run" in site.get("/health").json()["pipeline"]["reasons"][0]


def test_a_sink_that_the_running_pipeline_does_not_have_is_degraded(
    site: Site, folder: Path
) -> None:
    report.write(folder, [])
    _, verdict, sink = judged(site)
    assert verdict == "degraded"
    assert "does not have it" in sink["reasons"][0]


def write_as(pid: int, folder: Path) -> None:
    report.write(folder, [lake()])
    file = folder / report.REPORT
    known = msgspec.json.decode(file.read_bytes(), type=report.PipelineReport)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, pid=pid)))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems list no process states")
def test_a_pipeline_that_has_ended_is_lost_before_its_parent_has_noticed(
    site: Site, folder: Path
) -> None:
    # Its JVM holds the same pipe, so that whoever started it may not wait for it yet.
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        write_as(process.pid, folder)
        _, verdict, _ = judged(site)
        assert verdict == "degraded"
        state = site.get("/health").json()["pipeline"]
        assert "not running" in state["reasons"][0]
        assert state["sinks"][0]["reasons"] == ["the pipeline does not run"]


def test_without_a_pipeline_there_is_none_to_judge(sites: Sites) -> None:
    document = sites().get("/health").json()
    assert (document["status"], document["pipeline"]) == ("healthy", None)


# --- sources -------------------------------------------------------------------------------------


def test_what_a_source_warns_of_makes_it_degraded(sites: Sites) -> None:
    site = sites()
    site.statuses = [source(warnings=("the slot retains 9 GB, max_wal_gb is 10",))]
    document = site.get("/health").json()
    assert document["status"] == "degraded"
    assert document["sources"][0]["reasons"] == ["the slot retains 9 GB, max_wal_gb is 10"]


def test_a_paused_source_is_shown_and_judged_neither_by_silence_nor_by_lag(sites: Sites) -> None:
    site = sites(ServerSettings(port=0, stall_seconds=0.001))
    site.statuses = [source(Phase.PAUSED, heard_at=1, lag_seconds=1e6)]
    document = site.get("/health").json()
    assert document["status"] == "healthy"
    assert document["sources"][0]["notes"] == ["it is paused"]


def test_tables_that_were_dropped_or_renamed_are_named(sites: Sites) -> None:
    site = sites()
    site.statuses = [source(former=("public.parcel",))]
    document = site.get("/health").json()
    assert document["status"] == "healthy"
    (note,) = document["sources"][0]["notes"]
    assert note.startswith("table public.parcel is not captured any more: it was dropped, renamed")


def test_tables_captured_for_inserts_only_are_shown_and_well(sites: Sites) -> None:
    site = sites()
    statement = "ALTER TABLE public.logs REPLICA IDENTITY FULL;"
    site.statuses = [source(inserts_only={"public.logs": statement})]
    document = site.get("/health").json()
    assert document["status"] == "healthy"
    assert document["sources"][0]["inserts_only"] == {"public.logs": statement}
    assert "public.logs is captured for inserts only" in document["sources"][0]["notes"][0]


def test_nothing_bad_is_without_a_reason_and_nothing_halted_without_a_verdict(
    site: Site, folder: Path
) -> None:
    for phase in Phase:
        for sink_phase in SinkPhase:
            report.write(folder, [lake(sink_phase, error="x" if sink_phase == "waiting" else "")])
            site.statuses = [source(phase, error="y" if phase == "waiting" else "")]
            state = site.http.get("/health").json()
            for part in (*state["sources"], *state["pipeline"]["sinks"], state["pipeline"]):
                bad = part["status"] != "healthy"
                below = part.get("sinks", [])
                assert bad == bool(part["reasons"] or any(s["reasons"] for s in below))
            stuck = {"halted", "waiting", "stopped"} & {phase.value, sink_phase.value}
            stuck |= {sink_phase.value} & {"starting"}
            assert (state["status"] != "healthy") == bool(stuck)


# --- probes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_probes_answer_without_a_key_whatever_the_sources_do(sites: Sites, path: str) -> None:
    site = sites(ServerSettings(port=0, require_key=True))
    site.statuses = [source(Phase.HALTED, error="password=hunter2")]
    response = site.http.get(path)
    assert response.status_code == 200
    assert response.json()["status"] in ("alive", "ready")
    assert "hunter2" not in response.text
    assert site.http.get("/health").status_code == 503


def test_a_server_that_is_stopping_is_alive_and_not_ready(site: Site) -> None:
    site.feed.closing = True  # as it is from the signal until the last answer
    try:
        response = site.http.get("/readyz")
        assert response.status_code == 503
        assert response.json() == {"status": "not ready", "reason": "the server is stopping"}
        assert site.http.get("/livez").status_code == 200
    finally:
        site.feed.closing = False


def test_a_server_that_cannot_read_its_log_is_not_ready(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("/secret/place: Input/output error")

    monkeypatch.setattr(site.log, "stats", broken)
    response = site.http.get("/readyz")
    assert (response.status_code, response.json()["reason"]) == (503, "the log cannot be read")
    assert site.http.get("/livez").status_code == 200


# --- the log -------------------------------------------------------------------------------------


@pytest.mark.requirement("P-09")
def test_changes_that_cannot_be_read_are_an_error_for_readers_and_for_health(site: Site) -> None:
    site.writer.put_many("users", 3000)
    site.log._db.flush()
    file = max(site.log.path.glob("*.sst"), key=lambda file: file.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))
    after, last = 0, site.log.latest_sequence
    while True:
        response = site.http.get("/v1/changes", params={"after": str(after), "limit": "500"})
        if response.status_code != 200:
            break
        sequences = [change["sequence"] for change in response.json()["changes"]]
        assert sequences == list(range(after + 1, after + len(sequences) + 1))
        assert "X-Headrace-Gap" not in response.headers
        after = response.json()["scanned"]
    refused = response.json()
    assert response.status_code == 503
    _, first, _, *_ = refused["message"].split()
    assert 0 < after < int(first) < last
    assert "snapshot" in refused["hint"]
    with pytest.raises(httpx.HTTPError):  # it breaks off, and does not end
        site.http.get("/v1/records", params={"after": "0"})
    health = site.http.get("/health").json()
    assert (health["status"], health["log"]["status"]) == ("unhealthy", "unhealthy")
    assert f"changes {first} to " in health["log"]["reasons"][0]
