"""A push sink in a running pipeline: it waits by itself, says so, and is redriven while idle."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from headrace import plugins
from headrace.errors import ConfigError, PipelineError
from headrace.pipeline import redrive as redriving
from headrace.pipeline import supervise
from headrace.pipeline.run import Pipeline, PipelineInput, plans
from headrace.retry import Backoff
from headrace.secret import Secret
from headrace.sinks import SinkPhase, SinkStatus
from headrace.sinks.push import PushSettings, redrive
from headrace.sinks.push import writer as writers
from headrace.sinks.push.breaker import MOST_REFUSALS
from headrace.testing import wait_until
from tests.pipeline.sites import PLUGINS, Site
from tests.sinks.socket_sink import Courier, Office, opened_office

SECRET = "hush-hush-4711"


@pytest.fixture
def office() -> Iterator[Office]:
    with opened_office() as opened:
        yield opened


@pytest.fixture
def site(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setattr(plugins, "_installed", plugins._installed.__wrapped__)
    monkeypatch.setattr(supervise, "BACKOFF", Backoff(0.05, 60.0))
    monkeypatch.setattr(writers, "BACKOFF", Backoff(0.05, 60.0))
    return Site(tmp_path, spark)


def courier(office: Office, **chosen: Any) -> Courier:
    given: dict[str, Any] = {"retry_first_seconds": 0.005, "batch_seconds": 0.1}
    return Courier(name="post", port=office.port, **(given | chosen))


def status_of(running: Pipeline, name: str) -> SinkStatus:
    [status] = [each for each in running.statuses() if each.sink == name]
    return status


def await_phase(
    running: Pipeline, phase: SinkPhase, says: str = "", name: str = "post"
) -> SinkStatus:
    """The status of a sink once it is in a phase, for a reason: Spark may fail for its own."""

    def reached() -> SinkStatus | None:
        status = status_of(running, name)
        return status if status.phase is phase and says in status.error else None

    status = wait_until(reached, timeout=120, message=f"{name} is {phase} {says}")
    assert status is not None
    return status


def test_an_outage_is_told_and_delays_nobody_else(
    site: Site, office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    site.fill(50)
    office.shut()
    sink = courier(office, secret=Secret(SECRET))
    caplog.set_level(logging.DEBUG)
    with site.pipeline(sink, site.sink("lake"), once=False) as running:
        status = await_phase(running, SinkPhase.WAITING, "nobody is at the door")
        assert status.error.startswith("nobody is at the door; nothing has been taken since ")
        assert "sent when it is back" in status.hint
        wait_until(lambda: len(site.stored("lake")) == 50, timeout=120)
        office.open()
        wait_until(lambda: len(office.taken) == 50, timeout=120)
        status = await_phase(running, SinkPhase.STREAMING)
        assert not status.error
        wait_until(lambda: status_of(running, "post").sent == 50, timeout=120)

        # Refused now, and redriven while nothing else happens.
        office.judge = lambda event: ("refused", "no thanks", 0.0)
        site.fill(3, "orders")
        wait_until(lambda: status_of(running, "post").dead_letters == 3, timeout=120)
        assert status_of(running, "post").waiting_rows == 3
        office.judge = lambda event: ("accepted", "", 0.0)
        folder = str(site.checkpoints / "post")
        request = redrive.request_redrive(folder)
        wait_until(lambda: (told := redrive.result_of(folder, request)) and told.done, timeout=120)
        wait_until(lambda: status_of(running, "post").dead_letters == 0, timeout=120)
        assert len(office.taken) == 53
    assert sorted(event.sequence for event in office.taken) == list(range(1, 54))
    assert_hidden(site, caplog)


def assert_hidden(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """The secret is in no log line, no plan that Spark keeps, and no file of the pipeline."""
    assert SECRET not in caplog.text
    store = site.spark._jsparkSession.sharedState().statusStore()
    shown = [store.executionsList().apply(at) for at in range(store.executionsList().size())]
    assert any("RangeTask" in each.physicalPlanDescription() for each in shown)
    for each in shown:
        assert SECRET not in each.physicalPlanDescription() + each.details() + each.description()
    for file in site.checkpoints.rglob("*"):
        if file.is_file():
            assert SECRET.encode() not in file.read_bytes(), file


def test_who_stops_while_it_waits_stops_soon_and_goes_on_later(site: Site, office: Office) -> None:
    site.fill(30)
    office.judge = lambda event: (
        ("accepted", "", 0.0) if event.sequence <= 10 else ("failed", "no room", 0.0)
    )
    with site.pipeline(courier(office, batch_size=5), once=False) as running:
        await_phase(running, SinkPhase.WAITING, "no room")
    assert status_of(running, "post").phase is SinkPhase.STOPPED
    office.judge = lambda event: ("accepted", "", 0.0)
    site.once(courier(office, batch_size=5))
    assert sorted(event.sequence for event in office.taken) == list(range(1, 31)), "nothing twice"


@pytest.mark.parametrize("letters", [False, True])
def test_a_stop_in_the_middle_leaves_no_task_behind_and_repeats_nothing(
    site: Site, office: Office, monkeypatch: pytest.MonkeyPatch, letters: bool
) -> None:
    site.fill(200)
    policy: Any = PushSettings.policy
    whole = policy.fget
    assert whole
    short = property(lambda self: msgspec.structs.replace(whole(self), seconds=0.5))
    monkeypatch.setattr(PushSettings, "policy", short)
    if letters:
        site.once(courier(office, max_event_bytes=1))
        redrive.request_redrive(str(site.checkpoints / "post"))
    office.slow = 0.02
    with site.pipeline(courier(office, batch_size=1), once=False):
        wait_until(lambda: len(office.taken) >= 30, timeout=120)
    taken = len(office.taken)
    assert taken < 200
    office.slow = 0.0
    with site.pipeline(courier(office), once=False):
        wait_until(lambda: len(office.taken) >= 200, timeout=120)
    assert sorted(event.sequence for event in office.taken) == list(range(1, 201)), "nothing twice"


def test_once_gives_up_on_a_destination_that_is_not_there(site: Site, office: Office) -> None:
    site.fill(3)
    office.shut()
    status = site.once(courier(office))["post"]
    assert status.phase is SinkPhase.HALTED
    assert "nobody is at the door" in status.error


def test_one_that_wants_nothing_more_halts(site: Site, office: Office) -> None:
    site.fill(3)
    office.gone = True
    with site.pipeline(courier(office), once=False) as running:
        status = await_phase(running, SinkPhase.HALTED, "it has moved")
    assert (status.error, status.hint) == ("it has moved", "Find out where to.")
    with site.pipeline(courier(office), once=False) as running:
        await_phase(running, SinkPhase.HALTED, "it has moved")
    assert len(office.windows) == 0
    assert not office.taken


def test_one_that_halted_goes_on_when_it_is_redriven(site: Site, office: Office) -> None:
    site.fill(3)
    office.gone = True
    folder = site.checkpoints / "post"
    with site.pipeline(courier(office), once=False) as running:
        await_phase(running, SinkPhase.HALTED, "it has moved")
        # Still gone: whoever asked is told so, and it halts again.
        told = redriving.ask(folder, [], lambda: True, lambda told: None)
        assert told.reason == "the sink has halted: it has moved"
        await_phase(running, SinkPhase.HALTED, "it has moved")
        office.gone = False
        redriving.ask(folder, [], lambda: True, lambda told: None)
        wait_until(lambda: len(office.taken) == 3, timeout=120)
        await_phase(running, SinkPhase.STREAMING)
        site.fill(1)
        wait_until(lambda: len(office.taken) == 4, timeout=120)
    assert [event.sequence for event in office.taken] == [1, 2, 3, 4]


def test_one_that_refuses_everything_fills_no_dead_letters(site: Site, office: Office) -> None:
    site.fill(100)
    office.judge = lambda event: ("refused", "it answered 401", 0.0)
    with site.pipeline(courier(office, batch_size=5), once=False) as running:
        await_phase(running, SinkPhase.WAITING, "it answered 401")
        # Two tasks, each of which believes so many refusals.
        assert status_of(running, "post").dead_letters <= 2 * MOST_REFUSALS
        office.judge = lambda event: ("accepted", "", 0.0)
        wait_until(
            lambda: len(office.taken) + status_of(running, "post").dead_letters == 100, timeout=120
        )
    kept = status_of(running, "post").dead_letters
    assert len(office.taken) == 100 - kept
    assert len({event.id for event in office.taken}) == 100 - kept


def test_a_sink_looks_for_changes_as_often_as_it_says(site: Site, office: Office) -> None:
    site.fill(1)
    with site.pipeline(courier(office, batch_seconds=0.05), once=False) as running:
        wait_until(lambda: len(office.taken) == 1, timeout=120)
        seen = threading.Event()
        office.judge = lambda event: (seen.set(), ("accepted", "", 0.0))[1]  # type: ignore[func-returns-value]
        site.fill(1)
        assert seen.wait(60)
        await_phase(running, SinkPhase.STREAMING)


def test_dead_letters_are_redriven_without_a_running_pipeline(site: Site, office: Office) -> None:
    site.fill(3)
    office.judge = lambda event: ("refused", "no thanks", 0.0)
    site.once(courier(office))
    office.judge = lambda event: ("accepted", "", 0.0)
    feed = PipelineInput(address={"path": str(site.log)})
    post, lake = plans([courier(office), site.sink("lake")], feed, checkpoints=site.checkpoints)
    told = redriving.redrive(post, site.spark, [])
    assert (told.letters, told.sent, told.left) == (3, 3, 0)
    assert [event.sequence for event in office.taken] == [1, 2, 3]
    with pytest.raises(ConfigError, match="the sink lake sends nothing"):
        redriving.redrive(lake, site.spark, [])
    with pytest.raises(PipelineError, match="the pipeline ended before"):
        redriving.ask(site.checkpoints / "post", ["users:1"], lambda: False, lambda told: None)


def test_a_sink_may_have_larger_or_smaller_batches_than_the_pipeline(
    site: Site, office: Office
) -> None:
    for _ in range(4):
        site.fill(1)
    with site.pipeline(courier(office, max_changes_per_batch=2), once=True) as running:
        running.work(threading.Event(), lambda: None, once=True)
    assert len(office.taken) == 4
    notes = (site.checkpoints / "post" / "sent.jsonl").read_text()
    assert notes.count('"settled"') == 2
