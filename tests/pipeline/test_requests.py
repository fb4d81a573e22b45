"""An operator pauses, resumes and resets one sink, while the others go on."""

import threading
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from headrace import plugins
from headrace.pipeline.run import Pipeline
from headrace.secret import Secret
from headrace.sinks import Sink, SinkPhase, SinkStatus
from headrace.sinks.files.sink import Files
from headrace.sinks.history import History
from headrace.sinks.requests import Requests
from headrace.sinks.tables.sink import Tables
from headrace.testing import wait_until
from tests.deltas import stored
from tests.pipeline.sites import Site
from tests.sinks.receiver import OK, Receiver, reply

pytestmark = pytest.mark.requirement("P-14")


def requests(site: Site, sink: str = "lake") -> Requests:
    return Requests(site.checkpoints / sink)


def status(running: Pipeline, sink: str = "lake") -> SinkStatus:
    return next(status for status in running.statuses() if status.sink == sink)


def await_phase(running: Pipeline, phase: SinkPhase, sink: str = "lake") -> SinkStatus:
    wait_until(
        lambda: status(running, sink).phase is phase, timeout=120, message=f"{sink} is {phase}"
    )
    return status(running, sink)


def await_stored(site: Site, count: int, sink: str = "lake") -> None:
    wait_until(lambda: len(site.stored(sink)) >= count, timeout=120, message=f"{count} are stored")


def test_a_paused_sink_rests_while_another_goes_on_and_misses_nothing(site: Site) -> None:
    site.fill(10)
    sinks = site.sink(), site.sink("other")
    with site.pipeline(*sinks, once=False, most=5) as running:
        await_stored(site, 10)
        requests(site).pause()
        paused = await_phase(running, SinkPhase.PAUSED)
        assert (paused.sequence, paused.hint.startswith("`headrace resume lake`")) == (10, True)
        site.fill(10)
        await_stored(site, 20, "other")
        assert site.stored() == list(range(1, 11))
    assert status(running).phase is SinkPhase.PAUSED
    # It stays paused after a restart, also for a pipeline that runs once.
    assert site.once(*sinks)["lake"].phase is SinkPhase.PAUSED
    with site.pipeline(*sinks, once=False, most=5) as running:
        await_phase(running, SinkPhase.PAUSED)
        requests(site).resume()
        await_stored(site, 20)
        requests(site).pause()
        requests(site).resume()  # before anybody looks
        site.fill(5)
        await_stored(site, 25)
        await_stored(site, 25, "other")
    assert site.stored() == list(range(1, 26)) == site.stored("other")


def test_a_sink_that_waits_or_has_halted_can_be_paused_and_is_tried_again(site: Site) -> None:
    site.fill(10)
    site.fault("SinkFenced")
    with site.pipeline(once=False) as running:
        await_phase(running, SinkPhase.HALTED)
        site.fault(None)
        requests(site).resume()
        await_stored(site, 10)
        site.fault("SinkUnavailable")
        site.fill(1)
        await_phase(running, SinkPhase.WAITING)
        requests(site).pause()
        assert await_phase(running, SinkPhase.PAUSED).error == ""
        site.fault(None)
        requests(site).resume()
        await_stored(site, 11)
    assert site.stored() == list(range(1, 12))


def test_a_sink_of_a_type_without_a_reset_says_so_and_loses_nothing(site: Site) -> None:
    site.fill(10)
    with site.pipeline(once=False) as running:
        await_stored(site, 10)
        requests(site).reset()
        halted = await_phase(running, SinkPhase.HALTED)
        assert "cannot begin again by itself" in halted.error
        requests(site).resume()
        site.fill(1)
        await_stored(site, 11)
    assert site.stored() == list(range(1, 12))


def stored_sequences(sink: Sink) -> list[int]:
    """The changes that a sink with files or a history holds."""
    if isinstance(sink, Files):
        lines = [
            line
            for file in Path(sink.path).rglob("*.jsonl")
            if "_headrace" not in file.parts
            for line in file.read_text().splitlines()
        ]
        return list(range(1, len(lines) + 1))
    table = DeltaTable(sink.path if isinstance(sink, History) else f"{sink.path}/public/users")  # type: ignore[attr-defined]
    name = "sequence" if isinstance(sink, History) else "id"
    return sorted(int(value) for value in stored(table)[name].to_pylist())


KINDS: dict[str, type[Any]] = {"tables": Tables, "history": History, "files": Files}


BY_DAY = "tables"  # `make faults` resets the others


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == BY_DAY else pytest.mark.faults) for kind in KINDS],
)
def test_a_reset_writes_everything_anew_also_when_it_is_interrupted(
    site: Site, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.fill(20)
    sink: Sink = KINDS[kind](name="lake", path=str(site.folder / "lake"))
    assert site.once(sink)["lake"].phase is SinkPhase.STOPPED
    held = stored_sequences(sink)
    assert len(held) == 20
    requests(site).reset()
    with monkeypatch.context() as patched:
        # Killed when everything is empty, and before the request counts as done.
        def killed(self: Requests) -> None:
            raise SystemExit

        patched.setattr(Requests, "finish_reset", killed)
        patched.setattr(threading, "excepthook", lambda _: None)
        with site.pipeline(sink, once=False) as running:
            await_phase(running, SinkPhase.HALTED)
    ended = site.once(sink)["lake"]
    assert (ended.phase, ended.changes, ended.sequence) == (SinkPhase.STOPPED, 20, 20)
    assert stored_sequences(sink) == held
    assert site.once(sink)["lake"].changes == 0


@pytest.mark.parametrize("beginning", [pytest.param("start", marks=pytest.mark.faults), "now"])
def test_a_sink_that_sends_begins_again_from_the_start_or_from_now(
    site: Site, beginning: str
) -> None:
    site.fill(4)
    with Receiver() as receiver:
        receiver.script = lambda request: reply(422) if b'"2"' in request.body else OK
        kind: Any = plugins.load(plugins.SINKS, "webhook")
        sink = kind(name="lake", url=Secret(receiver.url), allow_private_networks=True, attempts=1)
        assert site.once(sink)["lake"].phase is SinkPhase.STOPPED
        before = len(receiver.requests)
        with site.writing() as writer:
            epoch, latest = writer.log.epoch, writer.log.latest_sequence
        requests(site).reset(*((epoch, latest) if beginning == "now" else ()))
        site.fill(1)
        receiver.script = lambda request: OK
        ended = site.once(sink)["lake"]
        assert (ended.phase, ended.dead_letters) == (SinkPhase.STOPPED, 0)
        assert len(receiver.requests) - before == (1 if beginning == "now" else 5)
