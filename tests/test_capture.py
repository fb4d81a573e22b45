"""Capture moves batches into the log: durable first, forgotten second, whatever happens."""

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from headrace.capture import Capture
from headrace.change.event import Batch, Table
from headrace.errors import (
    HeadraceError,
    LogFailed,
    PositionLost,
    SourceError,
    SourceUnavailable,
)
from headrace.log import Log
from headrace.retry import Backoff
from headrace.sources import Finding, Phase, Register, Removal, Status
from headrace.testing import wait_until
from tests.changes import make_change
from tests.log.transactions import ids, known_table, transaction

Step = Batch | HeadraceError | Exception | Callable[[], None]


class Scripted:
    """A source that delivers its script, one for each time it is opened."""

    name = "scripted"
    host = "scripted.example"

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self.scripts = list(scripts)
        self.opened: list[bytes | None] = []  # the resume of each time
        self.acked: list[bytes] = []
        self.phase = Phase.STREAMING  # of a stream while it is open

    def open(self, resume: bytes | None, register: Register) -> "ScriptedStream":
        """The next script; after the last one it is quiet."""
        self.opened.append(resume)
        script = self.scripts.pop(0) if self.scripts else []
        return ScriptedStream(self, script)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        """A resume that names the tables."""
        if "missing" in tables:
            raise SourceError("scripted has no table missing")
        return b"copy again: " + ",".join(tables).encode()

    def describe(self, resume: bytes | None) -> Status:
        """Nothing more than its name."""
        return Status(source="scripted", phase=Phase.STOPPED)

    def check(self) -> list[Finding]:
        """Nothing to look at."""
        return []

    def captured_tables(self) -> list[Table]:
        """None that anybody asks for."""
        return []

    def remove(self, resume: bytes | None, *, dry_run: bool = False) -> list[Removal]:
        """Nothing to take out."""
        return []


class ScriptedStream:
    """One time that the source is open."""

    def __init__(self, source: Scripted, script: Sequence[Step]) -> None:
        self._source = source
        self._script = script
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[Batch]:
        for step in self._script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, Batch):
                yield step
            else:
                step()
        self._closed.wait(30)

    def ack(self, resume: bytes) -> None:
        """Remember it."""
        self._source.acked.append(resume)

    def status(self) -> Status:
        """Streaming, unless a test says otherwise."""
        return Status(source="scripted", phase=self._source.phase, position="p")

    def close(self) -> None:
        """End the wait."""
        self._closed.set()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log.open(tmp_path / "log") as log:
        yield log


@pytest.fixture
def run(log: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Capture]]:
    """Starts captures and stops them in the end."""
    monkeypatch.setattr("headrace.capture.BACKOFF", Backoff(0.01, 30.0, 0.25))
    started: list[Capture] = []

    def start(source: Scripted) -> Capture:
        capture = Capture(source, log)
        capture.start()
        started.append(capture)
        return capture

    yield start
    for capture in started:
        capture.stop()


def whole(log: Log, number: int, size: int = 2) -> Batch:
    """A transaction in one batch."""
    return Batch(transaction(known_table(log), number, size), b"%d" % number)


def until(capture: Capture, phase: Phase) -> Status:
    wait_until(lambda: capture.status().phase is phase, message=f"the capture is {phase}")
    return capture.status()


Run = Callable[[Scripted], Capture]


@pytest.mark.requirement("S1-50", "S0-34")
def test_a_batch_is_acknowledged_only_when_it_is_stored(
    log: Log, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[bytes], bytes | None]] = []
    source = Scripted()
    append = log.append

    def watched(name: str, batch: Batch) -> int:
        seen.append((list(source.acked), log.resume(name)))
        return append(name, batch)

    monkeypatch.setattr(log, "append", watched)
    source.scripts.append([whole(log, 1), whole(log, 2)])
    run(source)
    wait_until(lambda: source.acked == [b"1", b"2"])
    assert seen == [([], None), ([b"1"], b"1")]
    assert ids(log.read(0)) == [("1", 1), ("1", 2), ("2", 1), ("2", 2)]


def test_pieces_of_a_transaction_are_not_acknowledged(log: Log, run: Run) -> None:
    table = known_table(log)
    piece = Batch(transaction(table, 1, 2), None)
    source = Scripted([piece, Batch(transaction(table, 1, 1, start=3), b"1")])
    run(source)
    wait_until(lambda: source.acked == [b"1"])
    assert ids(log.read(0)) == [("1", 1), ("1", 2), ("1", 3)]


def test_a_source_that_does_not_answer_is_tried_again_from_what_is_stored(
    log: Log, run: Run
) -> None:
    away = SourceUnavailable("nobody there")
    source = Scripted([whole(log, 1), away], [away], [whole(log, 2)])
    capture = run(source)
    wait_until(lambda: source.acked == [b"1", b"2"])
    assert source.opened == [None, b"1", b"1"]
    assert capture.status().phase is Phase.STREAMING


def test_where_no_file_can_be_opened_it_waits_and_says_why(log: Log, run: Run) -> None:
    exhausted = OSError(errno.EMFILE, "Too many open files")
    source = Scripted([whole(log, 1), exhausted], [whole(log, 2)])
    run(source)
    wait_until(lambda: source.acked == [b"1", b"2"])
    status = until(run(Scripted(*[[exhausted]] * 1000)), Phase.WAITING)
    assert status.error == "no file can be opened: Too many open files"
    assert "ulimit -n" in status.hint


def test_while_it_waits_it_says_for_what(log: Log, run: Run) -> None:
    source = Scripted(*[[SourceUnavailable("nobody there")]] * 1000)
    status = until(run(source), Phase.WAITING)
    assert status.error == "nobody there"


def test_while_it_is_tried_again_it_still_waits(log: Log, run: Run) -> None:
    """Starting the process of an attempt takes seconds on a busy machine: nothing is well then."""
    source = Scripted([SourceUnavailable("nobody there")])
    source.phase = Phase.STARTING
    capture = run(source)
    wait_until(lambda: len(source.opened) == 2)
    status = capture.status()
    assert (status.phase, status.error) == (Phase.WAITING, "nobody there")
    source.phase = Phase.STREAMING
    assert capture.status().phase is Phase.STREAMING
    capture.copy_again([])  # ends this stream
    wait_until(lambda: len(source.opened) == 3)
    source.phase = Phase.STARTING
    assert capture.status().phase is Phase.STARTING  # what failed before is over


def test_a_transaction_cut_off_by_its_source_is_forgotten(log: Log, run: Run) -> None:
    table = known_table(log)
    source = Scripted(
        [whole(log, 1), Batch(transaction(table, 2, 3), None), SourceUnavailable("cut")],
        [whole(log, 3)],
    )
    run(source)
    wait_until(lambda: source.acked == [b"1", b"3"])
    assert ids(log.read(0)) == [("1", 1), ("1", 2), ("3", 1), ("3", 2)]


def test_what_needs_a_person_halts_it_with_the_way_out(log: Log, run: Run) -> None:
    source = Scripted([whole(log, 1), PositionLost("the slot is gone")])
    status = until(run(source), Phase.HALTED)
    assert status.error == "the slot is gone"
    assert "headrace snapshot scripted" in status.hint
    assert status.position == "p"
    assert len(source.opened) == 1


def test_a_mistake_of_ours_halts_it_and_is_shown(
    log: Log, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    status = until(run(Scripted([ZeroDivisionError("oops")])), Phase.HALTED)
    assert "ZeroDivisionError('oops')" in status.error
    assert "please report it" in status.hint
    assert "Traceback" in caplog.text


def test_a_paused_source_that_cannot_be_described_waits_between_its_attempts(
    log: Log, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.capture.BACKOFF", Backoff(30.0, 30.0))
    source, described = Scripted(), list[bytes | None]()

    def describe(resume: bytes | None) -> Status:
        described.append(resume)
        raise SourceError("its resume cannot be read")

    monkeypatch.setattr(source, "describe", describe)
    capture = run(source)
    capture.pause(1)
    assert until(capture, Phase.WAITING).error == "its resume cannot be read"
    assert len(described) == 1
    capture.resume()
    until(capture, Phase.STREAMING)


def test_a_full_disk_halts_it_with_the_disks_words(
    log: Log, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Scripted([whole(log, 1), whole(log, 2)])
    append = log.append

    def failing(name: str, batch: Batch) -> int:
        if batch.resume == b"2":
            raise LogFailed("the log could not be written") from OSError("No space left on device")
        return append(name, batch)

    monkeypatch.setattr(log, "append", failing)
    status = until(run(source), Phase.HALTED)
    assert status.error == "the log could not be written: No space left on device"
    assert "Free some space" in status.hint
    assert source.acked == [b"1"]


def test_stopping_ends_it_after_the_batch_at_hand(log: Log, run: Run) -> None:
    source = Scripted([whole(log, 1)])
    capture = run(source)
    wait_until(lambda: source.acked == [b"1"])
    capture.stop()
    assert capture.status().phase is Phase.STOPPED
    capture.stop()


def test_stopping_does_not_wait_for_a_source_that_is_away(
    log: Log, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.capture.BACKOFF", Backoff(600.0, 600.0))
    capture = run(Scripted([SourceUnavailable("nobody there")]))
    until(capture, Phase.WAITING)
    stopping = threading.Thread(target=capture.stop)
    stopping.start()
    stopping.join(120)
    assert not stopping.is_alive()


def test_a_capture_that_was_never_started_can_be_stopped(log: Log) -> None:
    Capture(Scripted(), log).stop()


# --- copying again -------------------------------------------------------------------------------


def test_a_copy_begins_after_the_batch_at_hand(log: Log, run: Run) -> None:
    source = Scripted([whole(log, 1)])
    capture = run(source)
    wait_until(lambda: source.acked == [b"1"])
    capture.copy_again(["a", "b"])
    wait_until(lambda: len(source.opened) == 2)
    assert source.opened[1] == b"copy again: a,b"
    assert log.resume("scripted") == b"copy again: a,b"


def test_a_copy_wakes_a_capture_that_has_halted(log: Log, run: Run) -> None:
    source = Scripted([PositionLost("gone")], [whole(log, 1)])
    capture = run(source)
    until(capture, Phase.HALTED)
    capture.copy_again([])
    wait_until(lambda: source.acked == [b"1"])
    status = capture.status()
    assert (status.phase, status.error) == (Phase.STREAMING, "")


def test_a_copy_of_what_is_not_there_is_refused_and_nothing_stops(log: Log, run: Run) -> None:
    source = Scripted([whole(log, 1)])
    capture = run(source)
    wait_until(lambda: source.acked == [b"1"])
    with pytest.raises(SourceError, match="no table missing"):
        capture.copy_again(["missing"])
    assert capture.status().phase is Phase.STREAMING
    assert len(source.opened) == 1


def test_a_snapshot_requested_while_it_connects_is_not_forgotten(log: Log, run: Run) -> None:
    capture: list[Capture] = []

    def ask() -> None:
        wait_until(lambda: capture)
        capture[0].copy_again(["a"])

    source = Scripted([ask])
    capture.append(run(source))
    wait_until(lambda: len(source.opened) == 2)
    assert source.opened == [None, b"copy again: a"]


def test_a_halted_source_that_gets_many_requests_at_once_is_captured_by_one(
    log: Log, run: Callable[..., Capture]
) -> None:
    source = Scripted([SourceError("broken")])
    capture = run(source)
    wait_until(lambda: capture.status().phase is Phase.HALTED, message="it has halted")
    asking = [threading.Thread(target=capture.copy_again, args=(["orders"],)) for _ in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(120)
    assert not any(thread.is_alive() for thread in asking)
    capturing = [each for each in threading.enumerate() if each.name == "capture-scripted"]
    assert len(capturing) == 1


def test_told_to_close_first_one_capture_does_not_wait_for_another_s_transaction(
    log: Log, run: Callable[..., Capture]
) -> None:
    large = Scripted([Batch([make_change(table=log.register(make_change().table))], None)])
    waiting = Scripted([Batch([], b"{}")])
    waiting.name = "waiting"
    first = run(large)
    wait_until(lambda: log._unfinished == "scripted", message="a transaction is open")
    second = run(waiting)
    wait_until(lambda: waiting.opened, message="the second has begun")
    for capture in (first, second):
        capture.close()
    second.stop()
    assert second.status().phase is Phase.STOPPED
