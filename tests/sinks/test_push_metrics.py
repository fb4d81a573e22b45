"""The metrics of a sink that sends events, as the server tells them while a pipeline runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import SparkSession

from headrace.pipeline import run
from headrace.retry import Backoff
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.sinks.push import writer as writers
from headrace.sinks.report import PipelineFolder
from headrace.testing import wait_until
from tests.changes import Writer, opened_writer
from tests.pipeline.sites import Site
from tests.sinks.socket_sink import Courier, Office, opened_office


@pytest.fixture
def office() -> Iterator[Office]:
    with opened_office() as opened:
        yield opened


@pytest.fixture
def site(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(run, "REPORT_SECONDS", 0.1)
    monkeypatch.setattr(writers, "BACKOFF", Backoff(0.05, 60.0))
    return Site(tmp_path, spark)


@pytest.fixture
def writer(site: Site) -> Iterator[Writer]:
    with opened_writer(site.log) as writer:
        yield writer


@pytest.fixture
def url(site: Site, writer: Writer) -> Iterator[str]:
    """A server of the log that the pipeline reads."""
    place = PipelineFolder(folder=site.checkpoints, sinks=("post",))
    settings = ServerSettings(port=0, pipeline=place)
    app = create_app(writer.log, statuses=list, copy_again=None, settings=settings)
    with BackgroundServer(app, settings) as server:
        yield server.url


def scraped(url: str) -> dict[str, float]:
    """What is told of the sink and its pipeline; of the phases, the one that is 1."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {
        "_".join([sample.name, sample.labels.get("phase", "")]).strip("_"): sample.value
        for sample in samples
        if sample.name.startswith(("headrace_sink", "headrace_pipeline"))
        and (sample.value or "phase" not in sample.labels)
    }


def judged(url: str) -> tuple[str, list[str]]:
    """What /health says, and why."""
    document = httpx.get(f"{url}/health", timeout=30).json()
    [sink] = document["pipeline"]["sinks"]
    return document["status"], [*document["pipeline"]["reasons"], *sink["reasons"]]


@contextmanager
def at_work(site: Site, sink: Courier) -> Iterator[None]:
    """A pipeline, looked after as `headrace pipeline` does."""
    stopping = threading.Event()
    with site.pipeline(sink, once=False) as running:
        working = threading.Thread(
            target=lambda: running.work(stopping, lambda: None, once=False), name="work"
        )
        working.start()
        try:
            yield
        finally:
            stopping.set()
            working.join()


def test_what_is_sent_refused_and_waiting_is_told_while_it_happens(
    site: Site, writer: Writer, office: Office, url: str
) -> None:
    writer.put_many("users", 20)
    office.shut()
    sink = Courier(
        name="post", port=office.port, retry_first_seconds=0.005, batch_seconds=0.1, batch_size=5
    )
    before = scraped(url)
    assert before.pop("headrace_sink_lag_seconds") >= 0
    assert before == {
        "headrace_pipeline_up": 0,
        "headrace_sink_up": 0,
        "headrace_sink_lag_changes": 20,
    }
    with at_work(site, sink):
        wait_until(lambda: "headrace_sink_phase_waiting" in scraped(url), timeout=120)
        told = scraped(url)
        assert (told["headrace_pipeline_up"], told["headrace_sink_up"]) == (1, 0)
        assert told["headrace_sink_events_sent_total"] == 0
        assert told["headrace_sink_lag_changes"] == 20
        verdict, [reason] = judged(url)
        assert (verdict, "tried again" in reason) == ("degraded", True)
        office.open()
        wait_until(lambda: scraped(url).get("headrace_sink_events_sent_total") == 20, timeout=120)
        wait_until(lambda: scraped(url).get("headrace_sink_lag_changes") == 0, timeout=120)
        told = scraped(url)
        assert (told["headrace_sink_up"], told["headrace_sink_phase_streaming"]) == (1, 1)
        assert (told["headrace_sink_sequence"], told["headrace_sink_changes_total"]) == (20, 20)
        assert told["headrace_sink_requests_total"] >= 4
        assert told["headrace_sink_last_batch_seconds"] > 0
        assert judged(url) == ("healthy", [])

        office.judge = lambda event: ("refused", "no thanks", 0.0)
        writer.put_many("orders", 3)
        wait_until(lambda: scraped(url).get("headrace_sink_dead_letters") == 3, timeout=120)
        wait_until(lambda: scraped(url).get("headrace_sink_sequence") == 23, timeout=120)
        assert scraped(url)["headrace_sink_waiting_rows"] == 3
        verdict, [reason] = judged(url)
        assert (verdict, "3 dead letters" in reason) == ("degraded", True)


def test_after_an_orderly_end_nobody_tells_of_the_sink_as_running(
    site: Site, writer: Writer, office: Office, url: str
) -> None:
    writer.put_many("users", 2)
    site.once(Courier(name="post", port=office.port, batch_seconds=0.1))
    told = scraped(url)
    # This process, which was the pipeline, still lives: the sink's own last word counts.
    assert (told["headrace_sink_up"], told["headrace_sink_phase_stopped"]) == (0, 1)
    assert (told["headrace_sink_events_sent_total"], told["headrace_sink_lag_changes"]) == (2, 0)
