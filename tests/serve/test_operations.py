"""GET /health, GET /v1/sources, POST /v1/sources/{name}/snapshot."""

import threading
import time
from typing import Any

import pytest

from headrace.errors import LogFailed
from headrace.serve import ServerSettings, create_app
from headrace.serve.health import HealthCheck, HealthStatus
from headrace.serve.run import BackgroundServer
from headrace.sources import CopyProgress, Phase, Status
from headrace.testing import wait_until
from tests.serve.conftest import Site, Sites

NOW = 1_730_250_000.0


def status(phase: Phase = Phase.STREAMING, **fields: Any) -> Status:
    return Status(source="shop", phase=phase, **({"heard_at": time.time_ns() // 1000} | fields))


def health(site: Site, *statuses: Status) -> tuple[int, str, list[str]]:
    site.statuses = list(statuses)
    response = site.http.get("/health")
    document = response.json()
    reasons = [reason for source in document["sources"] for reason in source["reasons"]]
    return response.status_code, document["status"], reasons


def test_a_server_without_sources_is_healthy(site: Site) -> None:
    assert health(site) == (200, "healthy", [])


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.SNAPSHOT, Phase.STREAMING])
def test_a_source_at_work_is_healthy(site: Site, phase: Phase) -> None:
    assert health(site, status(phase, lag_seconds=5.0)) == (200, "healthy", [])


def test_a_halted_source_is_unhealthy_and_says_what_to_do(site: Site) -> None:
    halted = status(Phase.HALTED, error="the slot is gone", hint="Run `headrace snapshot shop`.")
    code, verdict, [reason] = health(site, halted)
    assert (code, verdict) == (503, "unhealthy")
    assert "the slot is gone" in reason
    assert "headrace snapshot shop" in reason


def test_a_source_too_far_behind_is_unhealthy(site: Site) -> None:
    code, verdict, [reason] = health(site, status(lag_seconds=61.0))
    assert (code, verdict) == (503, "unhealthy")
    assert "server.max_lag_seconds" in reason


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.SNAPSHOT, Phase.STREAMING])
def test_a_source_that_says_nothing_any_more_is_unhealthy(sites: Sites, phase: Phase) -> None:
    site = sites(ServerSettings(port=0, stall_seconds=2.0))
    silent = status(phase)
    assert health(site, silent)[:2] == (200, "healthy")
    wait_until(lambda: health(site, silent)[:2] == (503, "unhealthy"))
    [reason] = health(site, silent)[2]
    assert "server.stall_seconds" in reason
    assert health(site, status())[:2] == (200, "healthy")


def test_a_source_that_waits_for_its_server_is_degraded_at_first_and_then_unhealthy(
    site: Site,
) -> None:
    now = [NOW]
    judge = HealthCheck(ServerSettings(stall_seconds=90.0), clock=lambda: now[0])
    waiting = status(Phase.WAITING, heard_at=0, error="connection refused")

    def verdict() -> HealthStatus:
        return judge.report([waiting], site.log).status

    assert verdict() is HealthStatus.DEGRADED
    now[0] += 89
    assert verdict() is HealthStatus.DEGRADED
    now[0] += 2
    assert verdict() is HealthStatus.UNHEALTHY


def test_a_source_that_forgot_when_it_was_heard_is_judged_by_what_it_said_before(
    site: Site,
) -> None:
    now = [NOW]
    judge = HealthCheck(ServerSettings(stall_seconds=90.0), clock=lambda: now[0])
    now[0] += 3600
    streaming = status(heard_at=int(now[0] * 1e6))
    assert judge.report([streaming], site.log).status is HealthStatus.HEALTHY
    now[0] += 10
    waiting = status(Phase.WAITING, heard_at=0, error="connection refused")
    assert judge.report([waiting], site.log).status is HealthStatus.DEGRADED


def test_an_errored_table_makes_it_degraded_with_the_reason(site: Site) -> None:
    errored = status(errored={"public.maps": "cannot decode geometry"})
    code, verdict, [reason] = health(site, errored)
    assert (code, verdict) == (200, "degraded")
    assert "public.maps" in reason
    assert "cannot decode geometry" in reason


def test_the_worst_source_decides(site: Site) -> None:
    code, verdict, _ = health(site, status(), status(Phase.HALTED, error="x"), status())
    assert (code, verdict) == (503, "unhealthy")


def test_health_tells_what_the_log_holds(site: Site) -> None:
    site.writer.put_many("users", 5)
    site.log.trim(3)
    log = site.get("/health").json()["log"]
    assert log.pop("total_size_bytes") > 0
    assert log == {
        "epoch": site.log.epoch,
        "total_events": 3,
        "first_sequence": 3,
        "latest_sequence": 5,
        "status": "healthy",
        "reasons": [],
    }


@pytest.mark.requirement("C-24")
def test_health_names_who_needs_changes_that_are_gone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.writer.put_many("users", 5)
    site.log.move_cursor("slow", 1)
    site.log.trim(4, force=True)
    stopping = threading.Event()
    monkeypatch.setattr(stopping, "wait", lambda _: stopping.set())
    site.service.retention.work(stopping)
    report = site.get("/health").json()
    assert (report["status"], report["log"]["status"]) == ("degraded", "degraded")
    [reason] = report["log"]["reasons"]
    assert "slow needs changes 2 to 3, which are gone: removed by trim --force at" in reason


def test_sources_are_listed_with_all_that_is_known(site: Site) -> None:
    copying = CopyProgress("public.users", rows=10, estimated_rows=100, done=False)
    site.statuses = [status(Phase.SNAPSHOT, position="0/16B3748", copies=(copying,))]
    [source] = site.get("/v1/sources").json()["sources"]
    assert source.keys() == set(Status.__struct_fields__)
    assert (source["source"], source["phase"]) == ("shop", "snapshot")
    assert source["copies"] == [
        {"table": "public.users", "rows": 10, "estimated_rows": 100, "done": False}
    ]


@pytest.mark.parametrize(
    ("body", "tables"), [({"tables": ["public.users"]}, ["public.users"]), ({}, [])]
)
def test_tables_can_be_copied_again(site: Site, body: dict[str, Any], tables: list[str]) -> None:
    site.statuses = [status()]
    response = site.http.post("/v1/sources/shop/snapshot", json=body)
    assert response.status_code == 202
    assert response.json() == {"source": "shop", "tables": tables}
    assert site.copies == [("shop", tables)]


def test_copying_an_unknown_source_names_the_known_ones(site: Site) -> None:
    site.statuses = [status()]
    response = site.http.post("/v1/sources/shpo/snapshot", json={"tables": []})
    assert response.status_code == 404
    assert response.json()["error"] == "unknown_source"
    assert response.json()["known"] == ["shop"]
    assert site.copies == []


@pytest.mark.parametrize("tables", ["users", [1], None, {"a": 1}])
def test_tables_to_copy_must_be_names(site: Site, tables: object) -> None:
    site.statuses = [status()]
    response = site.http.post("/v1/sources/shop/snapshot", json={"tables": tables})
    assert (response.status_code, response.json()["parameter"]) == (400, "tables")
    assert site.copies == []


def test_what_does_not_work_now_is_unavailable_and_says_why(site: Site) -> None:
    site.statuses = [status()]
    site.copy_error = LogFailed("the log could not be written")
    response = site.http.post("/v1/sources/shop/snapshot", json={})
    assert response.status_code == 503
    assert response.json() == {
        "error": "unavailable",
        "message": "the log could not be written",
        "hint": LogFailed.hint,
    }


def test_a_mistake_of_the_server_tells_no_details(site: Site) -> None:
    site.statuses = [status()]
    site.copy_error = RuntimeError("password=hunter2")
    response = site.http.post("/v1/sources/shop/snapshot", json={})
    assert (response.status_code, response.json()["error"]) == (500, "server_error")
    assert "hunter2" not in response.text
    assert site.get("/health").json()["status"] == "healthy"


def test_a_server_that_does_not_capture_copies_nothing(site: Site) -> None:
    settings = ServerSettings(port=0)
    app = create_app(site.log, statuses=lambda: [status()], copy_again=None, settings=settings)
    with BackgroundServer(app, settings) as server:
        response = site.http.post(f"{server.url}/v1/sources/shop/snapshot", json={})
    assert (response.status_code, response.json()["error"]) == (409, "not_capturing")
