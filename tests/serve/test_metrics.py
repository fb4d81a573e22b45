"""GET /metrics: what Prometheus reads, from a real server and the report of a pipeline."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace import __version__, metrics
from headrace.change.event import Batch, Op, Transaction
from headrace.config import load
from headrace.log.keys import Scope
from headrace.run import server_settings
from headrace.serve import ServerSettings
from headrace.sinks import FailedTable, SinkPhase, SinkStatus, report, verification
from headrace.sinks.report import REPORT, PipelineFolder, PipelineReport
from headrace.sinks.verification import Verification
from headrace.sources import CopyProgress
from headrace.sources import Phase as SourcePhase
from headrace.sources import Status as SourceStatus
from headrace.testing import wait_until
from tests.changes import make_change, make_table
from tests.serve.conftest import Site, Sites
from tests.serve.sse import Reader
from tests.serve.ws import Talk

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"
HOOK = SinkStatus(
    sink="hook",
    phase=SinkPhase.STREAMING,
    batch=3,
    changes=40,
    batch_seconds=0.5,
    sequence=15,
    lag=1,
    sent=38,
    requests=4,
    retries=6,
    dead_letters=2,
    waiting_rows=1,
)
LAKE = SinkStatus(
    sink="lake",
    phase=SinkPhase.HALTED,
    sequence=20,
    failed_tables=(FailedTable("public.users", 7, "no key", "Give it one."),),
    error="the password is hunter2",
    rescued={"public.users": 2, "public.orders": 3},
)

Labels = frozenset[tuple[str, str]]


class Scraped:
    """What a scraper makes of an answer."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.about = {family.name: family.documentation for family in families}
        self.histograms = {family.name for family in families if family.type == "histogram"}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
        # A series that is told twice makes Prometheus refuse the whole answer.
        assert len(self.samples) == sum(len(family.samples) for family in families)

    def __getitem__(self, name: str) -> float:
        return self.of(name)

    def of(self, name: str, **labels: str) -> float:
        """The value of a series."""
        return self.samples[f"headrace_{name}", frozenset(labels.items())]

    def only(self, name: str, **labels: str) -> list[str]:
        """The phases (or the like) that are 1."""
        wanted = labels.items()
        return [
            value
            for (each, given), one in self.samples.items()
            if each == f"headrace_{name}" and one == 1 and wanted <= dict(given).items()
            for label, value in given
            if label not in labels
        ]

    def names(self, **labels: str) -> set[str]:
        """The metrics that have a series with these labels."""
        wanted = labels.items()
        return {name for name, given in self.samples if wanted <= dict(given).items()}


def scrape(site: Site, **headers: str) -> Scraped:
    answer = site.http.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scraped(answer.text)


@pytest.fixture
def place(tmp_path: Path) -> PipelineFolder:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    return PipelineFolder(folder=folder, sinks=("hook", "lake"))


@pytest.fixture
def site(sites: Sites, place: PipelineFolder) -> Site:
    """A server over twenty changes, of a config with two sinks."""
    site = sites(ServerSettings(port=0, pipeline=place))
    site.writer.put_many("users", 20)
    return site


# --- the server, its log, its sources and its clients --------------------------------------------


def test_the_log_is_told_of(site: Site) -> None:
    site.log.trim(5)
    scraped, stats = scrape(site), site.log.stats()
    assert (scraped["log_first_sequence"], scraped["log_latest_sequence"]) == (5, 20)
    assert (scraped["log_changes"], scraped["log_bytes"]) == (16, stats.total_bytes)
    assert scraped.only("build_info") == [__version__]
    assert scraped.only("health") == ["degraded"]  # its pipeline does not run


def test_every_source_is_told_of_and_no_reason_or_table(site: Site) -> None:
    now = time.time()
    site.statuses = [
        SourceStatus(
            source="shop",
            phase=SourcePhase.SNAPSHOT,
            lag_bytes=512,
            lag_seconds=2.5,
            heard_at=int(now * 1e6),
            copies=(CopyProgress("users", 5, 9, False), CopyProgress("orders", 5, 5, True)),
            errored={"public.maps": "a value of hunter2"},
            inserts_only={"public.maps": "ALTER TABLE hunter2"},
            warnings=("hunter2", "hunter3"),
            retained_bytes=4096,
        ),
        SourceStatus(source="stock", phase=SourcePhase.HALTED, error="hunter2"),
    ]
    scraped = scrape(site)
    assert scraped.only("source_phase", source="shop") == ["snapshot"]
    assert scraped.only("source_phase", source="stock") == ["halted"]
    assert scraped.of("source_lag_seconds", source="shop") == 2.5
    assert scraped.of("source_lag_bytes", source="shop") == 512
    assert scraped.of("source_heard_timestamp_seconds", source="shop") == pytest.approx(now)
    assert "headrace_source_heard_timestamp_seconds" not in scraped.names(source="stock")
    assert scraped.of("source_errored_tables", source="shop") == 1
    assert scraped.of("source_copying_tables", source="shop") == 1
    assert scraped.only("health") == ["unhealthy"]
    text = site.get("/metrics").text
    assert "hunter2" not in text
    assert "maps" not in text
    assert scraped.of("source_snapshot_rows", source="shop") == 10
    assert scraped.of("source_snapshot_estimated_rows", source="shop") == 14
    assert scraped.of("source_retained_bytes", source="shop") == 4096
    assert scraped.of("source_inserts_only_tables", source="shop") == 1
    assert scraped.of("source_warnings", source="shop") == 2


def test_readers_that_wait_are_counted(site: Site) -> None:
    assert scrape(site)["subscriptions_waiting"] == 0
    url = f"{site.url}/v1/changes/stream"
    with Reader(url), Reader(f"{url}?format=debezium"):
        site.await_waiting(2)
        assert scrape(site)["subscriptions_waiting"] == 2


def test_what_the_servers_process_uses_is_told_as_everywhere(site: Site) -> None:
    used = scrape(site).samples["process_resident_memory_bytes", frozenset()]
    assert used > 1 << 20 or sys.platform != "linux"


# --- counters and histograms ---------------------------------------------------------------------


def test_changes_are_counted_by_source_table_and_operation(site: Site) -> None:
    site.writer.put("orders", "1")
    site.writer.put("orders", "1", Op.UPDATE)
    site.writer.delete("orders", "1")
    scraped = scrape(site)

    def count(table: str, operation: str) -> float:
        return scraped.of("changes_total", source="shop", table=table, operation=operation)

    assert count("public.users", "INSERT") == 20
    assert [count("public.orders", op) for op in ("INSERT", "UPDATE", "DELETE")] == [1, 1, 1]
    assert scraped.of("commit_to_log_seconds_count", source="shop") == 23


def test_of_many_tables_the_first_are_counted_by_name_and_the_others_together(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MOST_TABLES", 2)
    for name in ("orders", "items", "stock"):
        site.writer.put_many(name, 2)
    site.writer.put_many("orders", 1)
    scraped = scrape(site)
    counted = {
        dict(labels)["table"]: value
        for (name, labels), value in scraped.samples.items()
        if name == "headrace_changes_total"
    }
    assert counted == {"public.users": 20, "public.orders": 3, metrics.OTHERS: 4}


def test_a_transaction_in_several_batches_counts_when_it_is_complete(site: Site) -> None:
    table = site.log.register(make_table("large"))
    site.log.append("shop", Batch([make_change(table=table, last=False)], None))
    assert "public.large" not in site.get("/metrics").text
    site.log.abandon("shop")
    site.log.append("shop", Batch([make_change(table=table)], b"1"))
    counted = scrape(site).of(
        "changes_total", source="shop", table="public.large", operation="INSERT"
    )
    assert counted == 1


def test_how_long_a_change_takes_from_its_commit_to_a_client_is_measured(site: Site) -> None:
    def delivered() -> float:
        return scrape(site)["commit_to_client_seconds_count"]

    site.get("/v1/changes", after=0)  # what is old says nothing of that
    assert delivered() == 0
    with Reader(f"{site.url}/v1/changes/stream?after=0") as reader:
        site.await_waiting(1)
        assert delivered() == 0
        moment = Transaction("9", time.time_ns() // 1000 - 3_000_000, time.time_ns() // 1000)
        site.writer.append([make_change(table=site.writer.table("users"), transaction=moment)])
        wait_until(lambda: delivered() == 1)
        scraped = scrape(site)
        assert 3 <= scraped["commit_to_client_seconds_sum"] < 60
        assert scraped.of("commit_to_client_seconds_bucket", le="2.5") == 0
        assert reader is not None


def poll(site: Site) -> None:
    waiting = site.log.latest_sequence
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(site.get, "/v1/changes", after=waiting, wait_ms=30_000)
        site.await_waiting(1)
        site.writer.put("users", "1")
        assert answer.result().json()["count"] == 1


def talk(site: Site) -> None:
    with Talk(site.url) as client:
        client.auth().subscribe("users")
        site.await_waiting(1)
        site.writer.put("users", "1")
        client.events(1)


def changefeed(site: Site) -> None:
    latest = site.log.latest_sequence
    with Reader(f"{site.url}/changefeed/stream?keep_alive=true&from_seq={latest}"):
        site.await_waiting(1)
        site.writer.put("users", "1")
        wait_until(lambda: scrape(site)["commit_to_client_seconds_count"] == 1)


@pytest.mark.parametrize("deliver", [poll, talk, changefeed])
def test_every_transport_is_measured(site: Site, deliver: Callable[[Site], None]) -> None:
    deliver(site)
    assert scrape(site)["commit_to_client_seconds_count"] == 1


def test_requests_are_counted_by_route_and_not_by_what_clients_send(site: Site) -> None:
    for path in ("/v1/cursors/one", "/v1/cursors/two", "/no/such/path", "/v1/changes"):
        site.http.get(path)
    site.http.request("BREW", "/v1/changes")
    scraped = scrape(site)

    def count(route: str, status: str) -> float:
        return scraped.of("http_requests_total", route=route, method="GET", status=status)

    assert count("/v1/cursors/{name}", "404") == 2
    assert count("/v1/changes", "200") == 1
    assert count("", "404") == 1
    assert scraped.of("http_request_seconds_count", route="/v1/changes", method="GET") == 1
    text = site.get("/metrics").text
    assert "BREW" not in text
    assert "such" not in text


# --- cursors -------------------------------------------------------------------------------------


def put_cursor(site: Site, name: str, sequence: int, key: dict[str, str]) -> None:
    site.http.put(
        f"/v1/cursors/{name}", json={"sequence": sequence}, headers=key
    ).raise_for_status()


def test_cursors_are_named_to_those_who_may_see_them_and_counted_to_all(site: Site) -> None:
    first, second = site.key(), site.key()
    put_cursor(site, "billing", 3, first)
    put_cursor(site, "billing", 12, second)
    put_cursor(site, "audit", 20, {})
    everything = scrape(site, **site.key(scopes=frozenset({Scope.ADMIN})))
    assert (everything["cursors"], everything["cursors_lag_changes"]) == (3, 17)
    lags = [
        v for (name, _), v in everything.samples.items() if name == "headrace_cursor_lag_changes"
    ]
    assert lags == [17, 8, 0]
    assert everything.of("cursor_sequence", cursor="audit", owner="") == 20
    own = scrape(site, **first)
    assert (own["cursors"], own["cursors_lag_changes"]) == (3, 17)
    owners = {dict(labels)["owner"] for name, labels in own.samples if "_cursor_" in name}
    assert len(owners) == 1
    assert "audit" not in site.http.get("/metrics", headers=first).text


def test_of_many_cursors_those_furthest_behind_are_named(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MOST_CURSORS", 2)
    for number in range(5):
        put_cursor(site, f"c{number}", 10 + number, {})
    scraped = scrape(site)
    assert scraped["cursors"] == 5
    named = {dict(labels).get("cursor") for _, labels in scraped.samples} - {None}
    assert named == {"c0", "c1"}


# --- the pipeline --------------------------------------------------------------------------------


def test_a_running_pipelines_sinks_are_told_of(site: Site, place: PipelineFolder) -> None:
    report.write(place.folder, [HOOK, LAKE])
    scraped = scrape(site)
    assert scraped["pipeline_up"] == 1
    assert scraped["pipeline_reported_timestamp_seconds"] == pytest.approx(time.time(), abs=60)
    old_name = "pipeline_told_timestamp_seconds"
    assert scraped[old_name] == scraped["pipeline_reported_timestamp_seconds"]
    assert scraped.only("sink_phase", sink="hook") == ["streaming"]
    assert scraped.only("sink_phase", sink="lake") == ["halted"]
    assert scraped.only("sink_up") == ["hook"]
    hook = {
        name.removeprefix("headrace_sink_"): value
        for (name, labels), value in scraped.samples.items()
        if labels == {("sink", "hook")}
    }
    assert hook == {
        "up": 1,
        "sequence": 15,
        "lag_seconds": pytest.approx(hook["lag_seconds"]),
        "lag_changes": 5,  # of the log as it is now, not as it was when the sink looked
        "changes_total": 40,
        "last_batch_seconds": 0.5,
        "events_sent_total": 38,
        "requests_total": 4,
        "retries_total": 6,
        "dead_letters": 2,
        "waiting_rows": 1,
        "failed_tables": 0,
        "troubled_tables": 0,  # the old name
        "rescued_values_total": 0,
    }
    assert scraped.of("sink_failed_tables", sink="lake") == 1
    assert scraped.of("sink_troubled_tables", sink="lake") == 1
    assert scraped.of("sink_rescued_values_total", sink="lake") == 5
    assert "hunter2" not in site.get("/metrics").text


def stale(place: PipelineFolder) -> None:
    told = PipelineReport(pid=os.getpid(), at=int((time.time() - 60) * 1e6), sinks=[HOOK])
    (place.folder / REPORT).write_bytes(msgspec.json.encode(told))


def ended(place: PipelineFolder) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    told = PipelineReport(pid=process.pid, at=time.time_ns() // 1000, sinks=[HOOK])
    (place.folder / REPORT).write_bytes(msgspec.json.encode(told))


@pytest.mark.parametrize("gone", [stale, ended])
def test_of_a_pipeline_that_says_nothing_any_more_only_what_it_left_is_told(
    site: Site, place: PipelineFolder, gone: Any
) -> None:
    gone(place)
    scraped = scrape(site)
    assert scraped["pipeline_up"] == 0
    assert scraped.only("sink_up") == []
    assert scraped.names(sink="hook") == {
        "headrace_sink_up",
        "headrace_sink_sequence",
        "headrace_sink_lag_changes",
        "headrace_sink_lag_seconds",
        "headrace_sink_dead_letters",
        "headrace_sink_waiting_rows",
        "headrace_sink_failed_tables",
        "headrace_sink_troubled_tables",
        "headrace_sink_rescued_values_total",
    }
    assert scraped.of("sink_lag_changes", sink="hook") == 5
    site.writer.put_many("users", 10)
    assert scrape(site).of("sink_lag_changes", sink="hook") == 15  # it grows, and wakes somebody
    # Nothing of it is known to have arrived.
    lags = {"headrace_sink_lag_changes", "headrace_sink_lag_seconds"}
    assert scraped.names(sink="lake") == {"headrace_sink_up", *lags}
    assert scraped.of("sink_lag_changes", sink="lake") == 20


def test_the_lag_of_a_sink_is_known_or_not_told_never_zero(
    site: Site, place: PipelineFolder
) -> None:
    never_stored = SinkStatus(sink="hook", phase=SinkPhase.WAITING, lag=12)
    unknown = SinkStatus(sink="lake", phase=SinkPhase.STARTING)
    report.write(place.folder, [never_stored, unknown])
    scraped = scrape(site)
    assert scraped.of("sink_lag_changes", sink="hook") == 20
    assert "headrace_sink_lag_changes" not in scraped.names(sink="lake")


def test_a_pipeline_that_never_ran_is_down_with_all_its_sinks(site: Site) -> None:
    scraped = scrape(site)
    assert scraped["pipeline_up"] == 0
    assert [scraped.of("sink_up", sink=name) for name in ("hook", "lake")] == [0, 0]
    assert [scraped.of("sink_lag_changes", sink=name) for name in ("hook", "lake")] == [20, 20]
    assert ("headrace_pipeline_reported_timestamp_seconds", frozenset()) not in scraped.samples


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": 1, "at": 1, "sinks": [{"phase": "x"}]}'])
def test_a_report_that_cannot_be_read_stops_nothing(
    site: Site, place: PipelineFolder, content: bytes
) -> None:
    (place.folder / REPORT).write_bytes(content)
    scraped = scrape(site)
    assert (scraped["pipeline_up"], scraped["log_changes"]) == (0, 20)


def test_a_sink_that_left_the_config_is_told_of_only_while_it_runs(
    sites: Sites, place: PipelineFolder
) -> None:
    site = sites(ServerSettings(port=0, pipeline=msgspec.structs.replace(place, sinks=("lake",))))
    report.write(place.folder, [HOOK, LAKE])
    assert scrape(site).of("sink_up", sink="hook") == 1
    stale(place)
    assert scrape(site).names(sink="hook") == set()


def test_the_lag_in_another_log_is_as_the_sink_tells_it(
    sites: Sites, place: PipelineFolder
) -> None:
    elsewhere = msgspec.structs.replace(place, same_log=False)
    site = sites(ServerSettings(port=0, pipeline=elsewhere))
    report.write(place.folder, [HOOK])
    assert scrape(site).of("sink_lag_changes", sink="hook") == 1
    stale(place)
    assert "headrace_sink_lag_changes" not in scrape(site).names(sink="hook")


def test_without_a_pipeline_nothing_is_told_of_one(sites: Sites) -> None:
    text = sites().get("/metrics").text
    assert "headrace_pipeline" not in text
    assert "headrace_sink" not in text


def test_the_config_says_where_the_pipeline_tells_and_of_what(tmp_path: Path) -> None:
    source = "sources: {db: {type: postgres, url: 'postgresql://127.0.0.1:1/x'}}\n"
    file = tmp_path / "headrace.yaml"
    file.write_text(source)
    assert server_settings(load(file)).pipeline is None
    file.write_text(source + "pipeline: {sinks: {lake: {type: tables, path: lake}}}\n")
    config = load(file)
    assert server_settings(config).pipeline == PipelineFolder(
        folder=config.pipeline_dir, sinks=("lake",), checkpoints=config.checkpoint_dir
    )
    url = "http://elsewhere:3000"
    file.write_text(
        source + f"pipeline: {{url: '{url}', sinks: {{lake: {{type: tables, path: lake}}}}}}\n"
    )
    place = server_settings(load(file)).pipeline
    assert place is not None
    assert not place.same_log


# --- who may ask, and what is written of it ------------------------------------------------------


def test_where_keys_are_needed_a_scraper_needs_one_to_everything(
    sites: Sites, place: PipelineFolder
) -> None:
    site = sites(ServerSettings(port=0, require_key=True, pipeline=place))
    assert site.http.get("/metrics").status_code == 401
    assert site.http.get("/metrics", headers=site.key(tables=("users",))).status_code == 403
    assert site.http.get("/metrics", headers=site.key(tenant="t1")).status_code == 403
    key = site.key()
    bearer = {"Authorization": f"Bearer {key['X-API-Key']}"}  # as Prometheus sends it
    assert scrape(site, **bearer)["pipeline_up"] == 0
    assert key["X-API-Key"] not in site.http.get("/metrics", headers=key).text


def test_the_description_says_that_it_is_text(site: Site) -> None:
    described = site.get("/openapi.json").json()["paths"]["/metrics"]["get"]
    [media_type] = described["responses"]["200"]["content"]
    assert media_type.startswith("text/plain")


PART = re.compile("_(bucket|sum|count)$")  # of a histogram
ROW = re.compile(r"^\| `(headrace_\w+)` \|([^|]*)\| ", re.MULTILINE)


def test_the_docs_list_exactly_what_is_exposed(site: Site, place: PipelineFolder) -> None:
    now = time.time_ns() // 1000
    site.statuses = [
        SourceStatus(source="shop", phase=SourcePhase.STREAMING, heard_at=now, stored_at=now)
    ]
    put_cursor(site, "billing", 3, {})
    report.write(place.folder, [HOOK, LAKE])
    verification.note(place.folder_of(LAKE.sink), Verification(sink=LAKE.sink, at=now))
    site.service.requests.grpc["Poll", "OK"] += 1
    site.service.requests.grpc_seconds["Poll"].observe(0.1)
    scraped = scrape(site)
    exposed = {
        PART.sub("", name) if PART.sub("", name) in scraped.histograms else name: {
            label for label, _ in labels if label != "le"
        }
        for name, labels in scraped.samples
        if name.startswith("headrace_")
    }
    written = {
        name: set(re.findall(r"`(\w+)`", labels)) for name, labels in ROW.findall(PAGE.read_text())
    }
    assert written == exposed
    assert all(scraped.about.values())


def test_serving_them_loads_no_spark() -> None:
    looking = "import sys, headrace.serve; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", looking], check=True)
